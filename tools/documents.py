"""Your own documents, read from a JSONL file, a folder or one file, and split into passages.

System 1 reads one passage at a time. A passage has `passage_words` words, and its last `overlap`
words begin the next passage, so that no sentence falls between two. Its title names the heading
above it, and its url names the file and the lines (or the page of a PDF or slide), so that a note
can give its source. A document that fits into one passage is not changed.

A file that cannot be read is skipped and listed, and the rest of the folder is read. If the machine
lacks memory or disk space, nothing is read. Links to folders and links out of the folder are not
followed: a cloned folder may link to anything.

Tests: pytest tests/test_documents.py
"""

import bisect
import errno
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
KINDS |= {".html": "html", ".htm": "html", ".pdf": "pdf", ".docx": "docx", ".pptx": "pptx"}
WHAT_IS_READ = f"a JSONL file, or a folder of {', '.join(KINDS)} files, or one such file"
LINE_FORMAT = 'a line is {"id": …, "title"?: …, "contents": …}, with an id of its own'
LARGEST_FILE = 64 << 20  # bytes
LONGEST_TITLE = 300
# Errors that will come again. Others, such as too many open files, are the machine's.
OF_THE_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
# Scripts without spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer): a character is a word.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
UNSPACED += "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
NO_SPACE = re.compile(r"\S")
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
# A heading begins with # or is underlined. Code blocks match first: their # begins a comment.
HEADING = re.compile(
    r"^[ \t]*(?P<fence>```|~~~).*?(?:^[ \t]*(?P=fence)|\Z)"
    r"|^#{1,7}[ \t]+(?P<marked>[^\n]+)"
    r"|^(?P<underlined>\w[^\n]{,200})\n(?P<mark>[-=~^*+])(?P=mark){2,}[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
PASSAGE_WORDS = 200
OVERLAP = 50


def make_document(id: str, title: str, url: str, text: str) -> Document:
    """A Document that is safe to print: title and url are one line, every field is valid UTF-8."""
    id, title, url, text = (s.encode("utf-8", "replace").decode() for s in (id, title, url, text))
    return Document(id, one_line(title, LONGEST_TITLE), one_line(url, 2000), text)


def from_contents(id: str, title: str | None, url: str | None, contents: str) -> Document:
    """A Document. A missing title is read from contents like `"Title"\\ntext`, as in Search-R1."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    if not title and rest and len(first) > 2 and first[0] == first[-1] == '"':
        title, contents = first[1:-1], rest
    return make_document(id, title or "", url or "", contents)


# Reading -----------------------------------------------------------------------------------------


def read_documents(path: Path) -> list[Document]:
    """Every document under `path`. Standard error lists the skipped files by reason.

    UserError if the path is missing, has no document, or a line of a JSONL file is malformed.
    """
    faults: dict[str, list[str]] = {}  # reason -> names
    name = one_line(str(path), 200)
    if os.path.isdir(path):  # Path.is_dir raises an error for a name that is too long
        documents = _read_files(files_below(path), path, faults)
    elif not os.path.isfile(path):
        raise UserError(f"{name} is neither a file nor a folder: give {WHAT_IS_READ} as documents")
    elif path.suffix.lower() in KINDS:
        documents = _read_files([path], path.parent, faults)
        if faults:
            raise UserError(f"{name} cannot be read: {next(iter(faults))}")
    else:
        try:
            documents = _read_jsonl(path)
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror})") from None
    for reason, files in faults.items():
        names = ", ".join([one_line(file, 60) for file in files[:3]] + ["…"] * (len(files) > 3))
        print(f"{name}: skipped {len(files)} ({names}): {reason}", file=sys.stderr, flush=True)
    if not documents:
        raise UserError(f"{name} holds no document: give {WHAT_IS_READ}")
    return documents


def files_below(folder: Path) -> list[Path]:
    """The files below a folder, sorted. Hidden files and hidden folders are left out."""
    files = []
    errors = []  # each names a folder that cannot be opened and will be listed as skipped
    for parent, folders, names in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files + [Path(error.filename) for error in errors])


def _read_files(files: list[Path], folder: Path, faults: dict[str, list[str]]) -> list[Document]:
    """One document per file. Its url is the path below `folder`."""
    documents = []
    read = functools.partial(_read_file, home=folder.resolve())
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # most wait for a child process
        for file, text in zip(files, threads.map(read, files), strict=True):
            name = file.relative_to(folder).as_posix()
            if isinstance(text, NotText):
                faults.setdefault(str(text), []).append(name)
            else:
                documents.append(make_document(name, file.stem, name, text))
    return documents


def _read_file(file: Path, home: Path) -> str | NotText:
    """The file's text, or the reason why there is none."""
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
    except NotText as error:
        return error
    except OSError as error:
        if error.errno in OF_THE_FILE:
            return NotText(f"cannot be opened ({error.strerror})")
        # The machine is at fault. Another time the file can be read, so it must not be left out.
        raise OSError(f"{one_line(str(file), 300)}: {error.strerror or error}") from None


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
                raise UserError(f"{path}, line {number}: {LINE_FORMAT}")
            documents[document.id] = document
    return list(documents.values())


# Passages ----------------------------------------------------------------------------------------


def passages(
    document: Document, words: int = PASSAGE_WORDS, overlap: int = OVERLAP
) -> list[Document]:
    """Splits a document into passages of `words` words (0: no limit); a short one is not split."""
    text = document.text
    spans = _windows(text, words, overlap)
    if not spans:
        return [document]
    unit, mark = ("page", "\f") if "\f" in text else ("line", "\n")
    ends = [match.start() for match in re.finditer(mark, text)]
    headings = [match for match in HEADING.finditer(text) if not match["fence"]]
    parts = []
    for number, (begin, end) in enumerate(spans, 1):
        title = document.title
        count = bisect.bisect_right(headings, begin, key=re.Match.start)  # headings above it
        if count:
            heading = headings[count - 1]["marked"] or headings[count - 1]["underlined"]
            title = f"{title} › {heading[:LONGEST_TITLE].rstrip(' #')}"
        word = NO_SPACE.search(text, begin)  # A page may end with a new line.
        first = bisect.bisect_left(ends, word.start()) + 1
        last = bisect.bisect_left(ends, end) + 1
        place = f"{unit} {first}" if first == last else f"{unit}s {first}-{last}"
        url = document.url
        if not url.startswith(("http://", "https://")):
            url = ", ".join(filter(None, [url, place]))
        id = f"{document.id}#{number:04}"
        contents = text[begin:end].replace("\f", "\n")
        parts.append(Document(id, one_line(title, LONGEST_TITLE), url, contents))
    return parts


def _windows(text: str, words: int, overlap: int) -> list[tuple[int, int]]:
    """(begin, end) of each passage in the text, or [] if one passage holds all of it."""
    words_at = [match.span() for match in WORD.finditer(text)] if words else []
    if len(words_at) <= words:
        return []
    overlap = min(overlap, words // 2)
    spans = [(0, words_at[words - 1][1])]
    for first in range(words - overlap, len(words_at) - overlap, words - overlap):
        begin = words_at[first][0]
        line_begin = text.rfind("\n", words_at[first - 1][1], begin) + 1  # keeps the indentation
        last = min(first + words, len(words_at)) - 1
        spans.append((line_begin or begin, words_at[last][1]))
    return spans
