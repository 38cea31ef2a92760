"""BM25 over documents, in memory or in an index on disk.

bm25s computes the scores of Lucene's variant (k1 = 1.5, b = 0.75) once, when it indexes. Every
process of a machine loads the index on disk by mmap.

There are three differences from bm25s. We keep the single letters and stop words that it drops, so
that "vitamin c" and "the who" can be found (common words weigh little in BM25 anyway). We drop
accents, so that "Zurich" finds "Zürich". Documents with equal scores are ordered by id.

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

# bm25s uses JAX if it is installed, and JAX would take three quarters of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Each of these characters is a word. Korean has spaces, but it joins endings to the words.
CHARACTERS = UNSPACED + "\uac00-\ud7a3"
WORD = re.compile(rf"[{CHARACTERS}]|[^\W_{CHARACTERS}]+")
# Accents, vowel signs and points of any script, and invisible characters (soft hyphens).
MARKS = [c for c in map(chr, range(0xD800)) if unicodedata.category(c) in ("Mn", "Mc", "Cf")]
IGNORED = re.compile(f"[{re.escape(''.join(MARKS))}]+")
# Raise this number when a change here, in documents.py or reader.py changes the index.
LAYOUT = 7
Search = Callable[[str], list[Document]]


def words(text: str) -> list[str]:
    """The words BM25 counts: runs of letters and digits, case folded, without accents."""
    letters = unicodedata.normalize("NFKD", text).casefold()
    return WORD.findall(unicodedata.normalize("NFC", IGNORED.sub("", letters)))


def in_memory(documents: list[Document], k: int) -> Search:
    """A search for at most k documents that share a word with the query, by (-score, id)."""
    documents = sorted(documents, key=lambda document: document.id)
    index = _index(documents)
    return functools.partial(_search, index, documents.__getitem__, min(k, len(documents)))


def _search(index, document: Callable[[int], Document], k: int, query: str) -> list[Document]:
    tokens = index.get_tokens_ids(words(query))
    if not tokens:
        return []
    scores = index.get_scores_from_ids(tokens)  # [documents]
    kth = np.partition(scores, -k)[-k]
    # Documents are sorted by id, so a position breaks ties as an id would.
    matches = np.flatnonzero((scores >= kth) & (scores > 0))
    best = np.lexsort((matches, -scores[matches]))[:k]
    return [document(i) for i in matches[best].tolist()]


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
    # `index.index` does the same, but its debug line would appear in a program's logging.
    ids = list(vocabulary.values())
    index.scores = index.build_index_from_ids(ids, tokens, show_progress=False)
    index.vocab_dict = vocabulary
    return index


# The index on disk -------------------------------------------------------------------------------


def on_disk(path: Path, k: int, cache: Path, passage_words: int) -> Search:
    """A search over the passages of a path's documents; its index is kept in `cache`.

    One process builds the index while the others wait, and then all load it. When the documents
    change, a new index replaces the old one, so that deleted documents leave the cache.
    """
    path = Path(os.path.realpath(path))  # Path.resolve fails on circular links
    key = repr((str(path), passage_words)).encode("utf-8", "replace")
    folder = cache / f"index-{hashlib.sha256(key).hexdigest()[:16]}"
    fingerprint = _fingerprint(path)
    with atomic.on_disk(f"keep the search index in {one_line(str(cache), 80)}"):
        cache.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = folder / "made_of"
            if not record.exists() or record.read_bytes() != fingerprint.encode():
                fill = functools.partial(build, path, passage_words, fingerprint)
                atomic.write_folder(folder, fill)
            try:
                return _load(folder, k)
            except (ValueError, EOFError, FileNotFoundError, TypeError):  # a file is cut or gone
                raise UserError(
                    f"the search index {one_line(str(folder), 300)} is damaged: remove that folder"
                ) from None


def build(path: Path, passage_words: int, fingerprint: str, folder: Path) -> None:
    """Writes the index of a path's documents into an empty folder."""
    parts = [part for one in read_documents(path) for part in passages(one, passage_words)]
    parts.sort(key=lambda part: part.id)
    corpus = [vars(part) for part in parts]
    _index(parts).save(folder, corpus=corpus, show_progress=False)
    (folder / "made_of").write_text(fingerprint)


def _load(folder: Path, k: int) -> Search:
    import bm25s

    index = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
    lock = threading.Lock()  # all threads share the corpus file's read position

    def document(i: int) -> Document:
        try:
            with lock:
                return Document(**index.corpus[i])
        except (ValueError, TypeError):
            raise ToolError(f"the search index {folder} is damaged: remove that folder") from None

    return functools.partial(_search, index, document, min(k, len(index.corpus)))


def _fingerprint(path: Path) -> str:
    """A hash of what makes the index: the files' names, sizes, times; the installed libraries."""
    states = []
    for file in files_below(path) if os.path.isdir(path) else [path]:
        with contextlib.suppress(OSError):  # the file has gone, or its folder cannot be opened
            state = file.stat()
            states.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    missing = [reader.missing(kind) for kind in reader.LIBRARIES]
    inputs = repr((LAYOUT, version("bm25s"), missing, states))
    return hashlib.sha256(inputs.encode("utf-8", "surrogateescape")).hexdigest()
