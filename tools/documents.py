"""Documents of your own: read from a JSONL file, a folder or one file, and cut into passages.

A passage is what System 1 reads at once: `passage_words` words, of which the last `overlap` begin
the next passage, so that no sentence falls between two. A passage knows its place: its title names
the heading it stands under, its url the file and the lines (or the page of a PDF), so that a note
can say where it found something. A document that fits is one passage and stays as it is.

A file that cannot be read is skipped and listed; it does not refuse the folder. Links to folders,
and links that lead out of the folder, are not followed: a cloned folder may link to anything.

Tests: pytest tests/test_documents.py
"""

import bisect
import functools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import UserError
from tools import Document, one_line, reader
from tools.reader import NotText

KINDS = dict.fromkeys((".txt", ".md", ".markdown", ".rst"), "text")
KINDS |= {".html": "html", ".htm": "html", ".pdf": "pdf"}
WHAT_IS_READ = f"a JSONL file, or a folder of {', '.join(KINDS)} files, or one such file"
A_LINE = 'a line is {"id": …, "title"?: …, "contents": …}, with an id of its own'
LARGEST_FILE = 64 << 20  # bytes
LONGEST_TITLE = 300
# Scripts without spaces (Chinese and Japanese; Thai, Lao, Burmese, Khmer): a character is a word.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
UNSPACED += "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
# A heading after #, or over a line of marks. A block of code is found first: its # is a comment.
HEADING = re.compile(
    r"^[ \t]*(?P<fence>```|~~~).*?(?:^[ \t]*(?P=fence)|\Z)"
    r"|^#{1,7}[ \t]+(?P<marked>[^\n]+)"
    r"|^(?P<underlined>\w[^\n]{,200})\n(?P<mark>[-=~^*+])(?P=mark){2,}[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
PASSAGE_WORDS = 200
OVERLAP = 50


def make_document(id: str, title: str, url: str, text: str) -> Document:
    """A Document that is safe to show: title and url are one line, UTF-8 can hold every field."""
    id, title, url, text = (s.encode("utf-8", "replace").decode() for s in (id, title, url, text))
    return Document(id, one_line(title, LONGEST_TITLE), one_line(url, 2000), text)


def from_contents(id: str, title: str | None, url: str | None, contents: str) -> Document:
    """A Document. Without a title, contents of `"Title"\\ntext` give it, as Search-R1 writes."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    if not title and rest and len(first) > 2 and first[0] == first[-1] == '"':
        title, contents = first[1:-1], rest
    return make_document(id, title or "", url or "", contents)


# Reading -----------------------------------------------------------------------------------------


def read_documents(path: Path) -> list[Document]:
    """Every document under `path`. Skipped files are counted on standard error, by reason.

    UserError for a path that is missing, malformed (file and line are named) or without a document.
    """
    skipped: dict[str, list[str]] = {}  # why -> which files
    shown = one_line(str(path), 200)
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        documents = _read_files(files_below(path), path, skipped)
    elif not os.path.isfile(path):
        raise UserError(f"{shown} is neither a file nor a folder: give {WHAT_IS_READ} as documents")
    elif path.suffix.lower() in KINDS:
        documents = _read_files([path], path.parent, skipped)
        if skipped:
            raise UserError(f"{shown} cannot be read: {next(iter(skipped))}")
    else:
        try:
            documents = _read_jsonl(path)
        except OSError as error:
            raise UserError(f"{shown} cannot be read ({error.strerror})") from None
    for reason, names in skipped.items():
        some = ", ".join([one_line(name, 60) for name in names[:3]] + ["…"] * (len(names) > 3))
        print(f"{shown}: skipped {len(names)} ({some}): {reason}", file=sys.stderr, flush=True)
    if not documents:
        raise UserError(f"{shown} holds no document: give {WHAT_IS_READ}")
    return documents


def files_below(folder: Path) -> list[Path]:
    """The files below a folder, sorted, without hidden ones and what lies in hidden folders."""
    files = []
    closed = []  # errors, whose folders will be listed as skipped
    for parent, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files + [Path(error.filename) for error in closed])


def _read_files(files: list[Path], folder: Path, skipped: dict[str, list[str]]) -> list[Document]:
    """One document a file; its url is the path below `folder`."""
    documents = []
    read = functools.partial(_read_file, home=folder.resolve())
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # child processes read HTML and PDF
        for file, text in zip(files, threads.map(read, files), strict=True):
            name = file.relative_to(folder).as_posix()
            if isinstance(text, NotText):
                skipped.setdefault(str(text), []).append(name)
            else:
                documents.append(make_document(name, file.stem, name, text))
    return documents


def _read_file(file: Path, home: Path) -> str | NotText:
    """A file's text, or why there is none."""
    kind = KINDS.get(file.suffix.lower())
    try:
        if not file.is_file():
            return NotText("no file, or a folder that cannot be opened")
        if kind is None:
            return NotText("of a kind that is not read")
        if not file.resolve().is_relative_to(home):
            return NotText("a link out of the folder")
        if file.stat().st_size > LARGEST_FILE:
            return NotText(f"more than {LARGEST_FILE >> 20} MiB")
        return reader.read(file.read_bytes(), kind)
    except OSError as error:
        return NotText(f"cannot be opened ({error.strerror})")
    except NotText as error:
        return error


def _read_jsonl(path: Path) -> list[Document]:
    documents: dict[str, Document] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                title, url = row.get("title"), row.get("url")
                document = from_contents(str(row["id"]), title, url, row["contents"])
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                document = None
            if document is None or document.id in documents:
                raise UserError(f"{path}, line {number}: {A_LINE}")
            documents[document.id] = document
    return list(documents.values())


# Passages ----------------------------------------------------------------------------------------


def passages(
    document: Document, words: int = PASSAGE_WORDS, overlap: int = OVERLAP
) -> list[Document]:
    """The document in passages of `words` words; a document that fits, or words=0, gives itself."""
    text = document.text
    spans = _windows(text, words, overlap)
    if len(spans) < 2:
        return [document]
    unit, mark = ("page", "\f") if "\f" in text else ("line", "\n")
    ends = [match.start() for match in re.finditer(mark, text)]
    headings = [match for match in HEADING.finditer(text) if not match["fence"]]
    cut = []
    for number, (begin, end) in enumerate(spans, 1):
        title = document.title
        above = bisect.bisect_right(headings, begin, key=re.Match.start)
        if above:
            heading = headings[above - 1]["marked"] or headings[above - 1]["underlined"]
            title = f"{title} › {heading[:LONGEST_TITLE].rstrip(' #')}"
        first = bisect.bisect_left(ends, begin) + 1
        last = bisect.bisect_left(ends, end) + 1
        place = f"{unit} {first}" if first == last else f"{unit}s {first}-{last}"
        url = document.url
        if not url.startswith(("http://", "https://")):
            url = ", ".join(filter(None, [url, place]))
        id = f"{document.id}#{number:04}"
        part = text[begin:end].replace("\f", "\n")
        cut.append(Document(id, one_line(title, LONGEST_TITLE), url, part))
    return cut


def _windows(text: str, words: int, overlap: int) -> list[tuple[int, int]]:
    """(begin, end) of each passage; [] if there is no need to cut."""
    found = [match.span() for match in WORD.finditer(text)] if words else []
    if len(found) <= words:
        return []
    overlap = min(overlap, words // 2)
    spans = [(0, found[words - 1][1])]
    for first in range(words - overlap, len(found) - overlap, words - overlap):
        begin = found[first][0]
        line_begin = text.rfind("\n", found[first - 1][1], begin) + 1  # code needs its indentation
        last = min(first + words, len(found)) - 1
        spans.append((line_begin or begin, found[last][1]))
    return spans
