"""A module with one line of its source changed, to see that its tests notice."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def read_mutants(text):
    """{name: (what stands in the source, what the mutant has)} of lines "name :: one → other"."""
    rows = re.findall(r"^(\S.*) :: (.+)\s+→ (.+)$", text, re.MULTILINE)
    return {name: (stands.strip(), becomes) for name, stands, becomes in rows}


def load_mutant(path, stands, becomes, folder):
    """The module at `path` with one piece of its source replaced, which must stand there once."""
    source = (ROOT / path).read_text()
    count = source.count(stands)
    assert count == 1, f"{path} has {count} times: {stands}"
    copy = folder / "mutant.py"
    copy.write_text(source.replace(stands, becomes))
    specification = importlib.util.spec_from_file_location("mutant", copy)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
