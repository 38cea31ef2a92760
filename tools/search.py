"""Search: what System 2's `search` and `scholar` calls reach.

The local backend is BM25 (bm25s: Lucene's variant, k1 = 1.5, b = 0.75, scores computed once, at indexing) over your own
documents: a JSONL file of {"id", "title"?, "contents"}, a folder of .txt/.md files, or Documents in memory. A document is
found whole, never cut here: very long files are better split beforehand. Unlike bm25s's own tokeniser, ours keeps one-letter
words, numbers and stop words, so that "vitamin c" and "apollo 8" can be found; rare words weigh more anyway.
"""
import fcntl
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import bm25s
import numpy as np

from tools import Document, UserError

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"                       # written without spaces: a character is a word
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")


def words(text: str) -> list[str]:
    """The words BM25 counts: runs of letters and digits, case folded."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def local(documents: list[Document] | str | Path, k: int, cache: str | Path | None = None) -> Callable[[str], list[Document]]:
    """A search over your own documents: the k best by (-score, id), fewer when fewer share a word with the query.

    documents: in memory, or the path of a JSONL file or of a folder of .txt/.md files. cache: folder that keeps the index of a
    path, keyed by its content, so that later starts and other ranks load it by mmap; None builds it in memory.
    Raises UserError for a path that is missing, malformed (file and line are named) or without a document.
    """
    if k < 1:
        raise UserError(f"k is {k}: ask for at least 1 document")
    if not isinstance(documents, (str, Path)):
        return _in_memory(documents, k)
    path = Path(documents)
    if not path.exists():
        raise UserError(f"there is no {path}: give a JSONL file or a folder of .txt and .md files as documents")
    return _in_memory(read_documents(path), k) if cache is None else _on_disk(path, k, Path(cache))


def _in_memory(documents: list[Document], k: int):
    documents = sorted(documents, key=lambda document: document.id)
    return functools.partial(_search, _index(documents), documents.__getitem__, min(k, len(documents)))


def _search(index: bm25s.BM25, document: Callable[[int], Document], k: int, query: str) -> list[Document]:
    tokens = index.get_tokens_ids(words(query))
    if not tokens:
        return []
    scores = index.get_scores_from_ids(tokens)                          # [documents]
    kth = np.partition(scores, -k)[-k]
    found = np.flatnonzero((scores >= kth) & (scores > 0))              # ties with the k-th included: id decides, not chance
    best = np.lexsort((found, -scores[found]))[:k]                      # documents lie sorted by id: position stands for it
    return [document(i) for i in found[best].tolist()]


def _index(documents: list[Document]) -> bm25s.BM25:
    vocabulary = {}
    tokens = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{document.title}\n{document.text}")]
              for document in documents]
    if not vocabulary:
        raise UserError("the documents hold no word to search for: give at least one document with text")
    index = bm25s.BM25()
    index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
    return index


# Reading documents ---------------------------------------------------------------------------------------------------

def read_documents(path: Path) -> list[Document]:
    """Every document of a JSONL file or of a folder of .txt/.md files; UserError names the file (and line) at fault."""
    documents = list(_read_folder(path) if path.is_dir() else _read_jsonl(path))
    if not documents:
        raise UserError(f"{path} holds no document: give a JSONL file or a folder of .txt and .md files")
    return documents


def _read_jsonl(path: Path) -> Iterator[Document]:
    seen = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                document = _parse_line(line)
            except ValueError as error:
                raise UserError(f'{path}, line {number}: {error}; a line is {{"id": …, "title": … (optional), "contents": …}}')
            if document.id in seen:
                raise UserError(f"{path}, line {number}: id {document.id!r} was given before, on line {seen[document.id]}")
            seen[document.id] = number
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
    title, text = (row["title"], row["contents"]) if row.get("title") else split_title(row["contents"])
    return make_document(str(row["id"]), title, row.get("url") or "", text)


def split_title(contents: str) -> tuple[str, str]:
    """The title and text of Search-R1's `"Title"\\ntext`; other contents have no title."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    return (first[1:-1], rest) if rest and len(first) > 2 and first[0] == first[-1] == '"' else ("", contents)


def make_document(id: str, title: str, url: str, text: str) -> Document:
    """A Document whose strings can be written as UTF-8: the outside world sends halves of surrogate pairs."""
    return Document(*(s.encode("utf-8", "replace").decode() for s in (id, title, url, text)))


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".txt", ".md") and file.is_file())


def _read_folder(folder: Path) -> Iterator[Document]:
    for file in _files(folder):
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"{file} is not UTF-8 text: convert it or move it out of the folder")
        yield make_document(file.relative_to(folder).as_posix(), file.stem, "", text)


# The index on disk ---------------------------------------------------------------------------------------------------

def _on_disk(path: Path, k: int, cache: Path):
    folder = cache / f"index-{_content_hash(path)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(f"{folder}.lock", "a")
    except OSError as error:
        raise UserError(f"the cache folder {cache} cannot be written ({error.strerror}): name another one")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                                # of 8 ranks one builds, the others wait and load
        if not folder.exists():
            _build(path, folder)
    index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    ends = np.load(folder / "ends.npy", mmap_mode="r")                  # [documents]: where each line of documents.jsonl ends
    with open(folder / "documents.jsonl", "rb") as file:
        lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def document(i: int) -> Document:
        return Document(**json.loads(lines[ends[i - 1] if i else 0:ends[i]]))
    return functools.partial(_search, index, document, min(k, len(ends)))


def _build(path: Path, folder: Path) -> None:
    documents = sorted(read_documents(path), key=lambda document: document.id)
    index = _index(documents)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        index.save(unfinished, show_progress=False)
        lengths = []
        with open(unfinished / "documents.jsonl", "wb") as file:
            for document in documents:
                lengths.append(file.write(json.dumps(vars(document), ensure_ascii=False).encode() + b"\n"))
        np.save(unfinished / "ends.npy", np.cumsum(lengths))
        os.rename(unfinished, folder)                                   # whole or not at all
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _content_hash(path: Path) -> str:
    """Of the documents, and of all that decides what an index made of them looks like."""
    digest = hashlib.sha256(repr((WORD.pattern, bm25s.__version__, path.is_dir())).encode())
    for file in _files(path) if path.is_dir() else [path]:
        with open(file, "rb") as opened:
            digest.update(repr((file.relative_to(path).as_posix(), hashlib.file_digest(opened, "sha256").hexdigest())).encode())
    return digest.hexdigest()[:32]
