"""Files that are read record by record and written whole or not at all."""
import json
import os
import sys
from pathlib import Path

from config import UserError


def read_lines(path: Path) -> list[dict]:
    """Records of a JSONL file. A line that is not whole (a killed run leaves one) is skipped, and stderr says so."""
    records = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give the folder of a run that you may read") from error
    for n, line in enumerate(text.split("\n"), 1):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line.strip():
            print(f"{path}: line {n} is not a whole record, skipped", file=sys.stderr)
    return records


def write_whole(path: Path, content: bytes) -> Path:
    """Writes beside the target, then renames: nobody ever opens half a picture."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path} ({error.strerror}): name a folder that you may write to") from error
    return path
