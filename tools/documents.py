"""Documents of your own: read from a JSONL file, a folder or one file, and cut into passages.

A passage is what System 1 reads at once: `passage_words` words, of which the last `overlap` begin
the next passage, so that no sentence falls between two. A passage knows its place: its title names
the heading it stands under, its url the file and the lines (or the page of a PDF), so that a note
can say where it found something. A document that fits is one passage and stays as it is.

A file that cannot be read is skipped and listed; it does not refuse the folder. Links that lead out
of the folder are not followed, for a cloned folder may link to anything.

Tests: pytest tests/test_documents.py
"""

import bisect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from config import UserError
from tools import Document, one_line, reader
from tools.web import in_threads

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
}
WHAT_IS_READ = f"a JSONL file, or a folder of {', '.join(KINDS)} files, or one such file"
A_LINE = 'a line is {"id": …, "title"?: …, "contents": …}'
LARGEST_FILE = 64 << 20  # bytes
TOO_LARGE = f"more than {LARGEST_FILE >> 20} MiB"
LONGEST_TITLE = 300
# Scripts without spaces (Chinese and Japanese; Thai, Lao, Burmese, Khmer): a character is a word.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
UNSPACED += "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
HEADING = re.compile(r"#{1,7}[ \t]+")
UNDERLINE = re.compile(r"(=|-|~|\^|\*|\+)\1{2,}[ \t]*")
PASSAGE_WORDS = 200
OVERLAP = 50


def make_document(id: str, title: str, url: str, text: str) -> Document:
    """A Document that is safe to show: title and url are one line, and UTF-8 can hold every field.

    The outside world sends halves of surrogate pairs, and titles that pretend to be several lines.
    """
    id, title, url, text = (s.encode("utf-8", "replace").decode() for s in (id, title, url, text))
    return Document(id, one_line(title, LONGEST_TITLE), one_line(url, 2000), text)


def split_title(contents: str) -> tuple[str, str]:
    """The title and text of Search-R1's `"Title"\\ntext`; other contents have no title."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    if rest and len(first) > 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents


# Reading -----------------------------------------------------------------------------------------


def read_documents(path: Path) -> list[Document]:
    """Every document under `path`. Skipped files are listed in one line on standard error.

    UserError for a path that is missing, malformed (file and line are named) or without a document.
    """
    skipped: dict[str, list[str]] = {}  # why -> which files
    shown = one_line(str(path), 200)
    if path.is_dir():
        documents = _read_files(files_below(path, skipped), path, skipped)
    elif not path.is_file():
        raise UserError(f"{shown} is neither a file nor a folder: give {WHAT_IS_READ} as documents")
    elif path.suffix.lower() in KINDS:
        documents = _read_files([path], path.parent, skipped)
        for reason in skipped:
            raise UserError(f"{shown} cannot be read: {reason}")
    else:
        try:
            documents = list(_read_jsonl(path))
        except OSError as error:
            raise UserError(f"{shown} cannot be read ({error.strerror})") from None
    if skipped:
        print(f"{shown}: skipped {_list(skipped)}", file=sys.stderr, flush=True)
    if not documents:
        raise UserError(f"{shown} holds no document: give {WHAT_IS_READ}")
    return documents


def _list(skipped: dict[str, list[str]]) -> str:
    """ "3 files (a.doc, b.doc, …): why; 1 file (c.md): why" """
    parts = []
    for reason, names in skipped.items():
        shown = [one_line(name, 60) for name in sorted(names)[:3]]
        if len(names) > len(shown):
            shown.append("…")
        count = "1 file" if len(names) == 1 else f"{len(names)} files"
        parts.append(f"{count} ({', '.join(shown)}): {reason}")
    return "; ".join(parts)


def files_below(folder: Path, skipped: dict[str, list[str]] | None = None) -> list[Path]:
    """The files below a folder that can be read, sorted. Hidden folders are left out."""
    if skipped is None:
        skipped = {}
    home = folder.resolve()
    files = []

    def closed(error: OSError):
        name = Path(error.filename).relative_to(folder).as_posix()
        skipped.setdefault("a folder that cannot be opened", []).append(name)

    for parent, folders, names in os.walk(folder, onerror=closed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(parent, name)
            reason = _why_skipped(file, home)
            if reason is None:
                files.append(file)
            elif not name.startswith("."):
                skipped.setdefault(reason, []).append(file.relative_to(folder).as_posix())
    return sorted(files)


def _why_skipped(file: Path, home: Path) -> str | None:
    kind = KINDS.get(file.suffix.lower())
    if kind is None:
        return "of a kind that is not read"
    try:
        if file.is_symlink() and not file.resolve().is_relative_to(home):
            return "a link out of the folder"
        if not file.is_file():
            return "not a file"
        if file.stat().st_size > LARGEST_FILE:
            return TOO_LARGE
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return "cannot be opened"
    return reader.missing(kind)


def _read_files(files: list[Path], folder: Path, skipped: dict[str, list[str]]) -> list[Document]:
    """One document a file; its url is the path below `folder`."""

    def attempt(file: Path):
        """(text, None), or (None, why there is none)."""
        try:
            if file.stat().st_size > LARGEST_FILE:  # one that is named by itself, or has grown
                return None, TOO_LARGE
            return reader.read(file.read_bytes(), KINDS[file.suffix.lower()]), None
        except reader.NotText as error:
            return None, str(error)
        except OSError as error:
            return None, f"cannot be opened ({error.strerror})"

    documents = []
    at_once = os.cpu_count() or 1  # HTML and PDF are read in child processes.
    for start in range(0, len(files), at_once):
        batch = files[start : start + at_once]
        for file, (text, reason) in zip(batch, in_threads(attempt, batch), strict=True):
            name = file.relative_to(folder).as_posix()
            if text is None:
                skipped.setdefault(reason, []).append(name)
            else:
                documents.append(make_document(name, file.stem, name, text))
    return documents


def _read_jsonl(path: Path) -> Iterator[Document]:
    first_line: dict[str, int] = {}  # id -> where it stands
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                document = _parse_line(line)
            except RecursionError:
                raise UserError(f"{where}: nested too deeply; {A_LINE}") from None
            except ValueError as error:
                raise UserError(f"{where}: {one_line(str(error), 200)}; {A_LINE}") from None
            if document.id in first_line:
                earlier = first_line[document.id]
                raise UserError(f"{where}: id {document.id!r} stands on line {earlier} already")
            first_line[document.id] = number
            yield document


def _parse_line(line: bytes) -> Document:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), (str, int)):
        raise ValueError("no id")
    if not isinstance(row.get("contents"), str):
        raise ValueError("no contents")
    for field in ("title", "url"):
        if not isinstance(row.get(field) or "", str):
            raise ValueError(f"the {field} is not text")
    title = row.get("title")
    text = row["contents"]
    if not title:
        title, text = split_title(text)
    return make_document(str(row["id"]), title, row.get("url") or "", text)


# Passages ----------------------------------------------------------------------------------------


def passages(
    document: Document, words: int = PASSAGE_WORDS, overlap: int = OVERLAP
) -> list[Document]:
    """The document in passages of `words` words; a document that fits, or words=0, gives itself."""
    spans = _windows(document.text, words, overlap)
    if len(spans) < 2:
        return [document]
    places = _Places(document.text)
    cut = []
    for number, (begin, end) in enumerate(spans, 1):
        heading = places.heading(begin)
        title = document.title
        if heading:
            title = f"{title} › {heading}"
        url = document.url
        if url.startswith(("http://", "https://")):
            title = f"{title} (part {number} of {len(spans)})"
        else:
            url = ", ".join(filter(None, [url, places.place(begin, end)]))
        id = f"{document.id}#{number:04}"
        text = document.text[begin:end].replace("\f", "\n")
        cut.append(Document(id, one_line(title, LONGEST_TITLE), url, text))
    return cut


def _windows(text: str, words: int, overlap: int) -> list[tuple[int, int]]:
    """(begin, end) of each passage; [] for one. One walk over the text, which may be one long line.

    A passage that begins with a line begins with its indentation, as code needs it.
    """
    if not words:
        return []
    overlap = min(overlap, words // 2)
    step = words - overlap
    begins = []
    ends = []
    count = 0
    end = 0  # of the word before
    for count, word in enumerate(WORD.finditer(text), 1):
        if (count - 1) % step == 0:
            begin = word.start()
            line_begin = text.rfind("\n", end, begin) + 1
            begins.append(line_begin or (begin if end else 0))
        end = word.end()
        if count >= words and (count - words) % step == 0:
            ends.append(end)
    begins = begins[: len(range(0, count - overlap, step))]
    return list(zip(begins, [*ends, end], strict=False))


class _Places:
    """Where a character of a text stands: its line or its page, and the heading above it."""

    def __init__(self, text: str):
        self.page_ends = [match.start() for match in re.finditer("\f", text)]
        self.line_ends = [match.start() for match in re.finditer("\n", text)]
        self.headings: list[tuple[int, str]] = []  # (where it begins, what it says)
        lines = text.split("\n")
        begin = 0
        in_code = False
        for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
            mark = HEADING.match(line)
            underlined = len(line) < 200 and line[:1].isalnum() and UNDERLINE.fullmatch(next_line)
            if line.lstrip().startswith(("```", "~~~")):
                in_code = not in_code
            elif mark and not in_code:
                self.headings.append((begin, line[mark.end() :][:LONGEST_TITLE].rstrip(" \t#")))
            elif underlined and not in_code:
                self.headings.append((begin, line.strip()))
            begin += len(line) + 1

    def heading(self, at: int) -> str:
        above = bisect.bisect_right(self.headings, at, key=lambda heading: heading[0])
        if above == 0:
            return ""
        return self.headings[above - 1][1]

    def place(self, begin: int, end: int) -> str:
        unit = "line"
        ends = self.line_ends
        if self.page_ends:
            unit = "page"
            ends = self.page_ends
        first = bisect.bisect_left(ends, begin) + 1
        last = bisect.bisect_left(ends, end) + 1
        if first == last:
            return f"{unit} {first}"
        return f"{unit}s {first}-{last}"


def best_passages(document: Document, rank, *, words: int, longest: int) -> Document:
    """A document of more than `longest` words, shortened to the passages that matter.

    rank(passages) -> the passages that match, best first. Where too few match, the beginning fills
    up. They stay in their order, and each begins with its place, such as [part 3 of 25].
    """
    total = sum(1 for _ in itertools.islice(WORD.finditer(document.text), longest + 1))
    if not words or total <= longest:
        return document
    parts = passages(document, words, overlap=0)
    chosen = dict.fromkeys(part.id for part in [*rank(parts), *parts])
    kept = set(itertools.islice(chosen, max(1, longest // words)))
    lines = []
    for number, part in enumerate(parts, 1):
        if part.id in kept:
            lines.append(f"[part {number} of {len(parts)}]\n{part.text}")
    return replace(document, text="\n\n".join(lines))
