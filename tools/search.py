"""Search: what System 2's `search` and `scholar` calls reach, and `python -m tools.search` to try it by hand.

local      BM25 over your own documents. No key, no network.
serper     Google and Google Scholar: POST {MARS_SERPER_URL}/search or /scholar, key SERPER_API_KEY. A result's text is
           its snippet, or the page behind it: pages="fetch" reads it directly, under the safety rules of tools/web.py;
           pages="jina" lets a reader service do so (PDF too): GET {MARS_JINA_URL}/{page}, key JINA_API_KEY. Only pages
           that a search returned are read.
retriever  A Search-R1 server: POST {MARS_RETRIEVER_URL}/retrieve.

The MARS_*_URL hold scheme, host and port, no path; they come from the operator and may name any machine, loopback too.
A search that fails raises ToolError; [] means that it ran and found nothing. A page that cannot be read leaves its
result with the snippet and says so in the text; only when no page at all could be read has the search failed.
Tests: pytest tests/test_search.py; timing: python -m bench.search.
"""
import argparse
import fcntl
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
import string
import sys
import tempfile
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import bm25s
import numpy as np

from config import UserError
from tools import Document, ToolError, web

BACKENDS = ("local", "serper", "retriever")
PAGES = ("none", "jina", "fetch")
URLS = {"MARS_SERPER_URL": "https://google.serper.dev", "MARS_JINA_URL": "https://r.jina.ai",
        "MARS_RETRIEVER_URL": "http://127.0.0.1:8000"}
Search = Callable[[str], list[Document]]
UNREAD = "[This page could not be read; what follows is the search engine's snippet.]"


def make(backend: str, *, scholar: bool = False, k: int = 5, docs: str | Path | None = None,
         cache: str | Path | None = ".cache", offline: bool = False, pages: str = "none", timeout: float = 20.0,
         tries: int = 5, pause: float = 1.0, parallel: int = 16, resolve: Callable = web.public_addresses) -> Search:
    """The search tool of a backend: search(query) -> at most k documents, best first. An empty query finds nothing.

    docs: the local backend's JSONL file or folder. cache: folder for the index and for answers; None keeps neither.
    offline: answer from the cache alone, no key needed. timeout, tries, pause, parallel: see web.Client; a page gets at
    most 2 tries. resolve: which addresses a page may be fetched from (only tests change it).
    Raises UserError for what is missing or makes no sense, before any search.
    """
    _check(backend, scholar, k, docs, pages)
    if backend == "local":
        return local(docs, k, cache)
    client = web.Client(None if cache is None else Path(cache) / "web", offline, timeout, tries, pause, parallel)
    if backend == "retriever":
        return functools.partial(_retriever, client, base_url("MARS_RETRIEVER_URL"), k)
    key = {"X-API-KEY": _key("SERPER_API_KEY", offline)}
    url = f"{base_url('MARS_SERPER_URL')}/{'scholar' if scholar else 'search'}"
    search = functools.partial(_serper, client, url, key, k)
    reader = replace(client, tries=min(tries, 2))                       # dead pages are common and have a snippet
    if pages == "jina":
        key = {"Authorization": f"Bearer {_key('JINA_API_KEY', offline)}"}
        read = functools.partial(_read_by_jina, reader, base_url("MARS_JINA_URL"), key)
    elif pages == "fetch":
        send = functools.partial(web.page, resolve=resolve)
        read = functools.partial(reader.call, decode=web.page_text, send=send)
    return search if pages == "none" else lambda query: _with_pages(search(query), read)


def _check(backend, scholar, k, docs, pages) -> None:
    for name, value, choices in (("search backend", backend, BACKENDS), ("way to read pages", pages, PAGES)):
        if value not in choices:
            raise UserError(f"there is no {name} {value!r}: choose one of {', '.join(choices)}")
    if k < 1:
        raise UserError(f"k is {k}: ask for at least 1 document")
    if backend == "local" and docs is None:
        raise UserError("the local backend searches your documents: name a JSONL file or a folder with --docs")
    if backend != "local" and docs is not None:
        raise UserError(f"--docs is for the local backend: leave it out with {backend}, or choose local")
    if backend != "serper" and pages != "none":
        raise UserError(f"--pages is for serper: the {backend} backend has the text of its documents already")
    if backend == "retriever" and scholar:
        raise UserError("the retriever has no scholar search: choose serper, or local with papers as documents")


def base_url(variable: str) -> str:
    """The service's URL from the environment, or its default; UserError unless it is scheme://host[:port]."""
    url = (os.environ.get(variable) or URLS[variable]).rstrip("/")
    if not re.fullmatch(r"https?://[^/?#\s]+", url):
        raise UserError(f"{variable} is {url!r}: give http(s)://host:port without a path")
    return url


def _key(variable: str, offline: bool) -> str:
    key = os.environ.get(variable, "").strip()
    if not offline and not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"{variable} is not set to a key: export {variable}=…, or choose another backend")
    return key


# Services -----------------------------------------------------------------------------------------------------------

def _ask(client: web.Client, url: str, body: dict, headers: dict, documents: Callable) -> list[Document]:
    """POSTs `body`. `documents` reads the answer; its ValueError for a wrong shape makes a failure, not kept."""
    def decode(raw, _):
        answer = json.loads(raw)
        documents(answer)
        return answer
    return documents(client.call(url, decode, body=body, headers=headers))


def _serper(client, url, headers, k, query: str) -> list[Document]:
    if not query.strip():
        return []
    return _ask(client, url, {"q": query, "num": k}, headers, serper_documents)[:k]


def serper_documents(answer) -> list[Document]:
    """The results of a Serper answer. Without `organic` none were found, if it echoes the search, as errors don't."""
    if not isinstance(answer, dict) or not ("organic" in answer or isinstance(answer.get("searchParameters"), dict)):
        raise ValueError("the answer is not that of a search")
    rows = answer.get("organic", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("the answer's results are not a list of objects")
    documents = []
    for rank, row in enumerate(rows, 1):
        url = _text(row.get("link")) or _text(row.get("pdfUrl"))
        about = row.get("publicationInfo")                              # scholar: authors, journal, year
        about = _text(about.get("summary") if isinstance(about, dict) else about)
        cited = row.get("citedBy")
        cited = _text(cited.get("total") if isinstance(cited, dict) else cited)
        year = _text(row.get("year"))
        lines = [about, year if year not in about else "", _text(row.get("date")), cited and f"Cited by {cited}",
                 _text(row.get("snippet"))]
        text = "\n".join(filter(None, lines))
        documents.append(make_document(url or f"result-{rank}", _text(row.get("title")), url, text))
    return documents


def _text(value) -> str:
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def _retriever(client, base, k, query: str) -> list[Document]:
    if not query.strip():
        return []
    body = {"queries": [query], "topk": k, "return_scores": True}
    return _ask(client, f"{base}/retrieve", body, {}, retriever_documents)[:k]


def retriever_documents(answer) -> list[Document]:
    """The results of a /retrieve answer to one query: [[…]] of {"document", "score"?}, bare documents or strings."""
    rows = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], list):
        raise ValueError("the answer holds no list of results for the query")
    documents = []
    for row in rows[0]:
        found = row.get("document", row) if isinstance(row, dict) else row
        found = {"contents": found} if isinstance(found, str) else found
        contents = found.get("contents", found.get("text")) if isinstance(found, dict) else None
        if not isinstance(contents, str):
            raise ValueError("a result has no contents")
        title = _text(found.get("title"))
        title, text = (title, contents) if title else split_title(contents)
        name = _text(found.get("id")) or hashlib.sha256(contents.encode("utf-8", "replace")).hexdigest()[:12]
        documents.append(make_document(name, title, _text(found.get("url")), text))
    return documents


def _with_pages(found: list[Document], read: Callable[[str], str]) -> list[Document]:
    """Each result with the text of its page. ToolError when there were pages to read and none could be."""
    def attempt(document):
        try:
            return make_document(document.id, document.title, document.url, read(document.url)), None
        except ToolError as error:
            return replace(document, text=f"{UNREAD}\n{document.text}"), error
    linked = [document for document in found if document.url]
    if not linked:
        return found
    with ThreadPoolExecutor(len(linked)) as threads:
        results = list(threads.map(attempt, linked))
    if all(error for _, error in results):
        raise ToolError(f"none of the {len(results)} pages found could be read: {results[0][1]}")
    read_ones = iter(results)
    return [next(read_ones)[0] if document.url else document for document in found]


def _read_by_jina(client, base, headers, url: str) -> str:
    def decode(raw, _):
        text = raw.decode("utf-8", "replace").strip()
        head, _, body = text.partition("Markdown Content:")
        if "Warning: Target URL returned error" in head:                # it answers 200 all the same
            raise ToolError("the page could not be read: " + " ".join(head[head.index("Target"):].split())[:100])
        if not (body if head.startswith("Title:") else text).strip():
            raise ValueError("the reader found no text on the page")
        return text
    if not url.startswith(("http://", "https://")):
        raise ToolError("only http and https pages are read")
    page = urllib.parse.quote(url, safe=string.punctuation)
    return client.call(f"{base}/{page}", decode, headers=headers)


# The local backend --------------------------------------------------------------------------------------------------
# BM25 by bm25s: Lucene's variant, k1 = 1.5, b = 0.75, scores computed once, at indexing. A document is found whole,
# never cut here: very long files are better split beforehand. Our tokens keep one-letter words and stop words, which
# bm25s's own drop, so that "vitamin c" and "the who" can be found; common words weigh little in BM25 anyway.

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"                       # written without spaces: a character is a word
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")


def words(text: str) -> list[str]:
    """The words BM25 counts: runs of letters and digits, case folded."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def local(documents: list[Document] | str | Path, k: int, cache: str | Path | None = None) -> Search:
    """A search over your own documents: the k best by (-score, id), fewer when fewer share a word with the query.

    documents: in memory, or the path of a JSONL file or of a folder of .txt/.md files. cache: folder that keeps the
    index of a path, keyed by its content, so that later starts and other ranks load it by mmap; None builds in memory.
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
    found = np.flatnonzero((scores >= kth) & (scores > 0))              # with all ties of the k-th: id decides
    best = np.lexsort((found, -scores[found]))[:k]                      # documents lie sorted by id: position tells it
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


# Reading documents --------------------------------------------------------------------------------------------------

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
                raise UserError(f'{path}, line {number}: {error}; a line is {{"id": …, "title"?: …, "contents": …}}')
            if document.id in seen:
                raise UserError(f"{path}, line {number}: id {document.id!r} stands on line {seen[document.id]} already")
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


# The index on disk --------------------------------------------------------------------------------------------------

def _on_disk(path: Path, k: int, cache: Path):
    folder = cache / f"index-{_content_hash(path)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(f"{folder}.lock", "a")
    except OSError as error:
        raise UserError(f"the cache folder {cache} cannot be written ({error.strerror}): name another one")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                                # one rank builds, the others wait and load
        if not folder.exists():
            _build(path, folder)
    index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    ends = np.load(folder / "ends.npy", mmap_mode="r")                  # [documents]: where each one's line ends
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
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(repr((file.relative_to(path).as_posix(), content)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


# The command --------------------------------------------------------------------------------------------------------

class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def main(arguments: list[str] | None = None) -> int:
    """Prints one JSON document per line. Returns 0; 1 when the service failed, 2 on misuse, with one sentence."""
    parser = _Parser(prog="python -m tools.search", description="Search, and print one JSON document per line.")
    parser.add_argument("query")
    parser.add_argument("--backend", required=True, metavar="|".join(BACKENDS))
    parser.add_argument("--scholar", action="store_true", help="search papers (serper)")
    parser.add_argument("--k", type=int, default=5, help="how many documents (default 5)")
    parser.add_argument("--docs", help="JSONL file or folder of .txt and .md files (local)")
    parser.add_argument("--pages", default="none", metavar="|".join(PAGES), help="how to read the pages found (serper)")
    parser.add_argument("--cache", default=".cache", help="folder of the index and of past answers (default .cache)")
    parser.add_argument("--offline", action="store_true", help="answer from the cache alone")
    try:
        options = vars(parser.parse_args(arguments))
        query = options.pop("query")
        if not query.strip():
            raise UserError("the query is empty: say what to search for")
        for document in make(options.pop("backend"), **options)(query):
            print(json.dumps({"title": document.title, "url": document.url, "text": document.text}, ensure_ascii=False))
    except (UserError, ToolError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
