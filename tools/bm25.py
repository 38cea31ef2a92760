"""BM25 over documents, in memory or in an index on disk.

It is Lucene's variant by bm25s (k1 = 1.5, b = 0.75), whose scores are computed once, at indexing.
Every process of a machine loads the index on disk by mmap.

Departures: our words keep the single letters and stop words that bm25s drops, so that "vitamin c"
and "the who" can be found (common words weigh little in BM25 anyway). Accents are dropped, so that
"Zurich" finds "Zürich". Equal scores come in the order of the ids.

Tests: pytest tests/test_search.py
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import threading
import unicodedata
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

import atomic
from config import UserError
from tools import Document, ToolError, one_line, reader
from tools.documents import UNSPACED, files_below, passages, read_documents

# bm25s tries JAX where that is installed, and JAX would take three quarters of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Each character is a word: Korean has spaces, but its endings grow onto the words.
ALONE = UNSPACED + "\uac00-\ud7a3"
WORD = re.compile(rf"[{ALONE}]|[^\W_{ALONE}]+")
# Accents, vowel signs and points of any script, and unseen marks (soft hyphens, directions).
MARKS = [c for c in map(chr, range(0xD800)) if unicodedata.category(c) in ("Mn", "Mc", "Cf")]
UNHEARD = re.compile(f"[{re.escape(''.join(MARKS))}]+")
# Raise it when this file, documents.py or reader.py makes other indexes: older ones are rebuilt.
LAYOUT = 6
Search = Callable[[str], list[Document]]


def words(text: str) -> list[str]:
    """The words BM25 counts: runs of letters and digits, case folded, without accents."""
    letters = unicodedata.normalize("NFKD", text).casefold()
    return WORD.findall(unicodedata.normalize("NFC", UNHEARD.sub("", letters)))


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
    import bm25s  # here, so that a run without search does not need it

    index = bm25s.BM25()
    index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
    return index


# The index on disk -------------------------------------------------------------------------------


def on_disk(path: Path, k: int, cache: Path, passage_words: int) -> Search:
    """A search over the passages of a path's documents; its index is kept in `cache`.

    One process builds, the others wait and load. When the documents change, the new index takes the
    place of the old one, so that what was deleted does not live on in the cache.
    """
    path = Path(os.path.realpath(path))  # which takes links in a circle, as Path.resolve does not
    which = repr((str(path), passage_words)).encode("utf-8", "replace")
    folder = cache / f"index-{hashlib.sha256(which).hexdigest()[:16]}"
    made_of = _fingerprint(path)
    with atomic.on_disk(f"keep the search index in {one_line(str(cache), 80)}"):
        cache.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = folder / "made_of"
            if not kept.exists() or kept.read_bytes() != made_of.encode():
                build(path, folder, passage_words, made_of)
            try:
                return _load(folder, k)
            except (ValueError, EOFError, FileNotFoundError):  # a file is cut, empty, or gone
                raise UserError(
                    f"the search index {one_line(str(folder), 300)} is damaged: remove that folder"
                ) from None


def build(path: Path, folder: Path, passage_words: int, made_of: str) -> None:
    """Writes the index of a path's documents into `folder`, whole or not at all."""
    cut = [part for document in read_documents(path) for part in passages(document, passage_words)]
    cut.sort(key=lambda document: document.id)
    index = _index(cut)

    def fill(empty: Path) -> None:
        index.save(empty, corpus=[vars(document) for document in cut], show_progress=False)
        (empty / "made_of").write_text(made_of)

    atomic.write_folder(folder, fill)


def _load(folder: Path, k: int) -> Search:
    import bm25s

    index = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
    lock = threading.Lock()  # the corpus is one file with one position

    def document(i: int) -> Document:
        try:
            with lock:
                return Document(**index.corpus[i])
        except (ValueError, TypeError):
            raise ToolError(f"the search index {folder} is damaged: remove that folder") from None

    return functools.partial(_search, index, document, min(k, len(index.corpus)))


def _fingerprint(path: Path) -> str:
    """What shapes an index: the files' names, sizes and times, and what can be read here."""
    states = []
    for file in files_below(path) if os.path.isdir(path) else [path]:
        with contextlib.suppress(OSError):  # it is gone, or its folder is closed
            state = file.stat()
            states.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    readers = [reader.missing(kind) for kind in ("html", "pdf")]
    shape = repr((LAYOUT, version("bm25s"), readers, states))
    return hashlib.sha256(shape.encode("utf-8", "surrogateescape")).hexdigest()
