"""BM25 over documents, in memory or in an index on disk.

It is Lucene's variant by bm25s (k1 = 1.5, b = 0.75), whose scores are computed once, at indexing.
Every process of a machine loads the index on disk by mmap.

Departures: our words keep the single letters and stop words that bm25s drops, so that "vitamin c"
and "the who" can be found (common words weigh little in BM25 anyway). Accents are dropped, so that
"Zurich" finds "Zürich". Equal scores come in the order of the ids.

Tests: pytest tests/test_search.py
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
from collections.abc import Callable
from pathlib import Path

import numpy as np

from config import UserError
from tools import Document, ToolError, one_line, reader
from tools.documents import UNSPACED, files_below, passages, read_documents

# Each character is a word: Korean has spaces, but its endings grow onto the words.
ALONE = UNSPACED + "\uac00-\ud7a3"
LETTER = rf"[^\W_{ALONE}]"
# Vowel signs, of Indic scripts for instance, belong to their word; for Python they are no letters.
SIGNS = "".join(c for c in map(chr, range(0x370, 0x1DC0)) if unicodedata.category(c)[0] == "M")
WORD = re.compile(rf"[{ALONE}]|{LETTER}+(?:[{SIGNS}]+{LETTER}*)*")
# Accents (Latin, Greek, Cyrillic), points (Hebrew, Arabic) and what lengthens an Arabic word.
DROPPED = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
DROPPED += "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u0640\u064b-\u065f\u0670"
# Marks of where a word may break, of direction, and other unseen ones; U+200B parts words.
DROPPED += "\u00ad\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
DROPPED = re.compile(f"[{DROPPED}]+")
TRADE_MARKS = re.compile("[\u2120\u2122]")  # ℠ and ™, which normalisation makes letters of
LAYOUT = 4  # of the index on disk; an index of another layout is not used
Search = Callable[[str], list[Document]]


def library():
    """The package bm25s. It is imported here, so that a run without search does not need it."""
    try:
        import bm25s
    except ImportError:
        raise UserError("searching documents needs bm25s: pip install bm25s") from None
    return bm25s


def words(text: str) -> list[str]:
    """The words BM25 counts: runs of letters and digits, case folded, without accents."""
    letters = unicodedata.normalize("NFKD", TRADE_MARKS.sub(" ", text)).casefold()
    letters = DROPPED.sub("", unicodedata.normalize("NFKD", letters))
    return WORD.findall(unicodedata.normalize("NFC", letters))


def in_memory(documents: list[Document], k: int) -> Search:
    """A search over documents: the k best by (-score, id), fewer when fewer share a word."""
    documents = sorted(documents, key=lambda document: document.id)
    index = _index(documents)
    return functools.partial(_search, index, documents.__getitem__, min(k, len(documents)))


def _search(index, document: Callable[[int], Document], k: int, query: str) -> list[Document]:
    tokens = index.get_tokens_ids(words(query))
    if not tokens:
        return []
    scores = index.get_scores_from_ids(tokens)  # [documents]
    kth = np.partition(scores, -k)[-k]
    # All documents that tie with the k-th take part. They lie sorted by id, so positions decide.
    found = np.flatnonzero((scores >= kth) & (scores > 0))
    best = np.lexsort((found, -scores[found]))[:k]
    return [document(i) for i in found[best].tolist()]


def _index(documents: list[Document]):
    vocabulary: dict[str, int] = {}
    tokens = []
    for document in documents:
        text = f"{document.title}\n{document.text}"
        tokens.append([vocabulary.setdefault(word, len(vocabulary)) for word in words(text)])
    if not vocabulary:
        raise UserError("the documents hold no word to search for: give a document with text")
    index = library().BM25()
    index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
    return index


# The index on disk -------------------------------------------------------------------------------


def on_disk(path: Path, k: int, cache: Path, passage_words: int) -> Search:
    """A search over the passages of a path's documents; its index is kept in `cache`.

    One process builds, the others wait and load. When the documents change, the new index takes the
    place of the old one, so that what was deleted does not live on in the cache.
    """
    library()
    which = repr((str(path.resolve()), passage_words)).encode("utf-8", "replace")
    prefix = f"index-{hashlib.sha256(which).hexdigest()[:16]}"
    folder = cache / f"{prefix}-{_fingerprint(path)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / f"{prefix}.lock", "a")
    except OSError as error:
        shown = one_line(str(cache), 80)
        raise UserError(
            f"the cache folder {shown} cannot be written ({error.strerror}): name another one"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _load(folder, k)
        except Exception:  # there is none, or it is damaged
            shutil.rmtree(folder, ignore_errors=True)
        build(path, folder, passage_words)
        for other in cache.glob(f"{prefix}-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return _load(folder, k)


def _load(folder: Path, k: int) -> Search:
    """The index in a folder. Any exception if it is not whole."""
    index = library().BM25.load(folder, mmap=True, show_progress=False)
    ends = np.load(folder / "ends.npy", mmap_mode="r")  # [documents]: where each one's line ends
    with open(folder / "documents.jsonl", "rb") as file:
        lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(lines) != ends[-1] or index.scores["num_docs"] != len(ends):
        raise ValueError("the files do not belong together")

    def document(i: int) -> Document:
        begin = ends[i - 1] if i else 0
        try:
            return Document(**json.loads(lines[begin : ends[i]]))
        except (ValueError, TypeError):
            raise ToolError("the search index is damaged: remove it from the cache") from None

    return functools.partial(_search, index, document, min(k, len(ends)))


def build(path: Path, folder: Path, passage_words: int) -> None:
    """Writes the index of a path's documents into `folder`, whole or not at all."""
    cut = [part for document in read_documents(path) for part in passages(document, passage_words)]
    cut.sort(key=lambda document: document.id)
    index = _index(cut)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as unfinished:
            unfinished = Path(unfinished, "index")
            index.save(unfinished, show_progress=False)
            lengths = []
            with open(unfinished / "documents.jsonl", "wb") as file:
                for document in cut:
                    line = json.dumps(vars(document), ensure_ascii=False)
                    lengths.append(file.write(line.encode() + b"\n"))
            np.save(unfinished / "ends.npy", np.cumsum(lengths))
            os.rename(unfinished, folder)
    except OSError as error:
        raise UserError(
            f"the index cannot be written to {one_line(str(folder.parent), 80)} "
            f"({error.strerror or error}): make room, or name another cache folder"
        ) from None


def _fingerprint(path: Path) -> str:
    """A hash of the documents' bytes, and of everything else that shapes an index made of them."""
    readers = [reader.missing(kind) for kind in ("html", "pdf")]
    shape = (LAYOUT, WORD.pattern, DROPPED.pattern, library().__version__, path.is_dir(), readers)
    digest = hashlib.sha256(repr(shape).encode() + Path(reader.__file__).read_bytes())
    files = files_below(path) if path.is_dir() else [path]
    for file in files:
        try:
            with open(file, "rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError:
            content = "unreadable"
        name = file.relative_to(path).as_posix()
        digest.update(repr((name, content)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
