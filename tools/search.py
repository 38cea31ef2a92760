"""Search: what System 2's `search` and `scholar` calls reach.

local      BM25 over your own documents, cut into passages. No key, no network.
serper     Google and Google Scholar: POST {MARS_SERPER_URL}/search or /scholar, key SERPER_API_KEY.
           A result's text is its snippet, or with pages="jina" the page behind it, as Jina's
           reader gives it: GET {MARS_JINA_URL}/{page}. A JINA_API_KEY raises its limits.
retriever  A Search-R1 server: POST {MARS_RETRIEVER_URL}/retrieve.

The MARS_*_URL come from the operator and may name any machine, loopback too. A search that fails
raises ToolError; [] means that it ran and found nothing. A result whose page cannot be read keeps
its snippet and says so in the text. Only when no page at all could be read has the search failed.

    python -m tools.search --backend local --docs FOLDER "query"        by hand

Tests: pytest tests/test_search.py
"""

import contextlib
import functools
import json
import os
import re
import string
import sys
import urllib.parse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from config import OneLineParser, UserError, fail
from tools import Document, ToolError, bm25, one_line, show, web
from tools.bm25 import Search
from tools.documents import (
    PASSAGE_WORDS,
    WHAT_IS_READ,
    make_document,
    passages,
    read_documents,
    split_title,
)

BACKENDS = ("local", "serper", "retriever")
PAGES = ("none", "jina")
URLS = {
    "MARS_SERPER_URL": "https://google.serper.dev",
    "MARS_JINA_URL": "https://r.jina.ai",
    "MARS_RETRIEVER_URL": "http://127.0.0.1:8000",
}
UNREAD = "[This page could not be read; what follows is the search engine's snippet.]"


def make(
    backend: str,
    *,
    scholar: bool = False,
    k: int = 5,
    docs: str | Path | None = None,
    cache: str | Path | None = ".cache",
    pages: str = "none",
    passage_words: int = PASSAGE_WORDS,
    block: Iterable[str] = (),
    **client_options,
) -> Search:
    """The search tool of a backend: search(query) -> at most k documents, best first.

    An empty query finds nothing. UserError for what is missing or makes no sense, before any
    search.

    docs: the local backend's files, cut into passages of so many words (0: not at all). cache:
    folder for the index and for answers; None keeps neither. block: hosts from which nothing is
    taken, nor from below them, such as those that publish a benchmark's answers. client_options:
    see web.Client.
    """
    if k < 1:
        raise UserError(f"k is {k}: ask for at least 1 document")
    block = blocked_hosts(block)
    if backend == "local":
        if docs is None:
            raise UserError(
                f"the local backend searches your documents: name {WHAT_IS_READ} by --docs"
            )
        return local(docs, k, cache, passage_words)
    client = web.Client(None if cache is None else Path(cache) / "web", **client_options)
    if backend == "retriever":
        if scholar:
            raise UserError(
                "the retriever has no scholar search: leave it out with --tools search,python"
            )
        base = base_url("MARS_RETRIEVER_URL").removesuffix("/retrieve")
        search = functools.partial(_retriever, client, base, k)
    else:
        headers = {"X-API-KEY": _key("SERPER_API_KEY")}
        url = f"{base_url('MARS_SERPER_URL')}/{'scholar' if scholar else 'search'}"
        search = functools.partial(_serper, client, url, headers, k)
    if block:
        search = functools.partial(_allowed, search, block)
    if pages == "none":
        return search
    # Dead pages are common, and their results have a snippet.
    client = replace(client, tries=min(client.tries, 2))
    headers = {"Accept": "application/json"}
    if os.environ.get("JINA_API_KEY", "").strip():
        headers["Authorization"] = f"Bearer {_key('JINA_API_KEY')}"
    page = functools.partial(jina_page, block=block)
    read = functools.partial(_read_by_jina, client, base_url("MARS_JINA_URL"), headers, page)
    return functools.partial(_with_pages, search, read)


def base_url(variable: str) -> str:
    """The service's URL from the environment, or its default; UserError if it is malformed."""
    return web.check_base_url(variable, os.environ.get(variable) or URLS[variable])


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError(
            f"{variable} is not set to a key: export {variable}=…, or choose another backend"
        )
    return key


def local(
    documents: list[Document] | str | Path,
    k: int,
    cache: str | Path | None = None,
    passage_words: int = PASSAGE_WORDS,
) -> Search:
    """A search over your own documents: the k best by (-score, id), fewer when fewer share a word.

    documents: in memory, searched as they are; or the path of a JSONL file, a folder or a file,
    searched in passages. cache: folder that keeps the index of a path, so that later starts and
    other processes load it by mmap; None builds in memory. UserError for a path that is missing,
    malformed (file and line are named) or without a document.
    """
    if not isinstance(documents, (str, Path)):
        return bm25.in_memory(documents, k)
    path = Path(documents)
    if cache is not None and os.path.exists(path):
        return bm25.on_disk(path, k, Path(cache), passage_words)
    whole = read_documents(path)
    return bm25.in_memory([p for document in whole for p in passages(document, passage_words)], k)


# Services ----------------------------------------------------------------------------------------


def _serper(client, url, headers, k, query: str) -> list[Document]:
    if not query.strip():
        return []
    return client.call(url, serper_documents, body={"q": query, "num": k}, headers=headers)[:k]


def serper_documents(raw: bytes) -> list[Document]:
    """The results of a Serper answer; an exception if it is none.

    An answer without `organic` found nothing if it echoes the search and reports no error.
    """
    answer = json.loads(raw)
    if "organic" not in answer:
        said = answer.get("message") or answer.get("error")
        if said or not isinstance(answer.get("searchParameters"), dict):
            raise ValueError(f"the answer is not that of a search: {said or 'no results in it'}")
    return [_serper_document(row, rank) for rank, row in enumerate(answer.get("organic", []), 1)]


def _serper_document(row: dict, rank: int) -> Document:
    """One result; every field is optional. Scholar adds authors, journal, year and citations."""
    url = _text(row.get("link")) or _text(row.get("pdfUrl"))
    about = _text(row.get("publicationInfo"))
    year = _text(row.get("year"))
    cited = _text(row.get("citedBy"))
    lines = [
        about,
        year if year not in about else "",
        _text(row.get("date")),
        f"Cited by {cited}" if cited else "",
        _text(row.get("snippet")),
    ]
    text = "\n".join(filter(None, lines))
    return make_document(url or f"result-{rank}", _text(row.get("title")), url, text)


def _text(value) -> str:
    return str(value) if isinstance(value, (str, int, float)) else ""


def _retriever(client, base, k, query: str) -> list[Document]:
    if not query.strip():
        return []
    body = {"queries": [query], "topk": k, "return_scores": True}
    return client.call(f"{base}/retrieve", retriever_documents, body=body)[:k]


def retriever_documents(raw: bytes) -> list[Document]:
    """The results of a /retrieve answer to one query; an exception if it is none.

    The answer is {"result": [[{"document": {"contents", "id"?, "title"?, "url"?}, "score"}, …]]}.
    """
    (rows,) = json.loads(raw)["result"]
    return [_retrieved_document(row["document"], rank) for rank, row in enumerate(rows, 1)]


def _retrieved_document(found: dict, rank: int) -> Document:
    text = found["contents"]
    title = _text(found.get("title"))
    if not title:
        title, text = split_title(text)
    name = _text(found.get("id")) or f"result-{rank}"
    return make_document(name, title, _text(found.get("url")), text)


# Hosts that are not asked ------------------------------------------------------------------------


def _allowed(search: Search, block: tuple[str, ...], query: str) -> list[Document]:
    found = search(query)
    return [d for d in found if not is_blocked(d.url or d.id, block)]


def blocked_hosts(names: Iterable[str]) -> tuple[str, ...]:
    """The hosts as they are compared. UserError for what is no name of a host.

    www.example.org and example.org are one site, so either blocks both.
    """
    hosts = []
    for name in filter(str.strip, names):
        host = plain_host(name.strip()).removeprefix("www.")
        if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
            raise UserError(
                f"--block {one_line(name, 80)}: give hosts by commas, such as "
                "huggingface.co,hf.co, without https://, port or path"
            )
        hosts.append(host)
    return tuple(hosts)


def is_blocked(url: str, block: tuple[str, ...]) -> bool:
    """Whether a URL's host is one of `block` (blocked_hosts), or below one of them."""
    # A retriever may leave the scheme out.
    plain = re.sub(r"^([a-z][a-z0-9+.-]*:)?/*(?=[^/:]*[.])", "//", url.strip(), flags=re.IGNORECASE)
    try:
        host = plain_host(urllib.parse.urlsplit(plain).hostname or "")
    except ValueError:
        return "://" in url  # else it is a name with brackets
    return any(host == name or host.endswith(f".{name}") for name in block)


def plain_host(host: str) -> str:
    """A host as name servers know it: in ASCII and lower case, without the last dot."""
    with contextlib.suppress(UnicodeError):  # no name server knows it
        host = host.encode("idna").decode()
    return host.lower().rstrip(".")


# The pages behind the results --------------------------------------------------------------------


def _with_pages(search: Search, read, query: str) -> list[Document]:
    """Each result with the text of its page.

    ToolError when there were pages to read and none could be.
    """
    found = search(query)

    def attempt(document: Document) -> Document | ToolError:
        try:
            return replace(document, text=read(document.url)) if document.url else document
        except ToolError as error:
            return error

    pages = web.in_threads(attempt, found)
    errors = [page for page in pages if isinstance(page, ToolError)]
    if errors and len(errors) == sum(bool(document.url) for document in found):
        why = f"none of the {len(errors)} pages found could be read: {errors[0]}"
        raise ToolError(one_line(why, web.LONGEST_MESSAGE))
    for place, document in enumerate(found):
        if isinstance(pages[place], ToolError):
            pages[place] = replace(document, text=f"{UNREAD}\n{document.text}")
    return pages


def _read_by_jina(client, base, headers, page, url: str) -> str:
    """The page's text, or a ToolError that quotes nothing of what strangers wrote."""
    if not url.startswith(("http://", "https://")):
        raise ToolError("only http and https pages are read")
    address = f"{base}/{urllib.parse.quote(url, safe=string.punctuation)}"  # only non-ASCII changes
    return client.call(address, page, headers=headers, quote=False)


def jina_page(raw: bytes, block: tuple[str, ...] = ()) -> str:
    """The text of a reader's answer.

    The reader answers 200 also when it could not read the page, or read an error in its place.
    """
    page = json.loads(raw)["data"]
    refused = re.search(r"returned error (\d{3})", str(page.get("warning")))
    if refused:
        raise ToolError(f"the page answered HTTP {refused[1]}")
    if is_blocked(str(page.get("url") or ""), block):  # the reader follows redirects itself
        raise ToolError("the page redirects to a blocked host")
    text = page["content"].encode("utf-8", "replace").decode()
    if not text.strip():
        raise ValueError("the reader found no text on the page")
    return text


# The command -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Prints one JSON document per line.

    Returns 0; 1 when the service failed, 2 on misuse, with one sentence.
    """
    parser = OneLineParser(
        prog="python -m tools.search", description="Search, and print one JSON document per line."
    )
    add = parser.add_argument
    add("query")
    add("--backend", required=True, choices=BACKENDS)
    add("--k", type=int, default=5, help="how many documents (default 5)")
    add("--docs", help=f"{WHAT_IS_READ} (local)")
    add("--pages", default="none", choices=PAGES, help="how to read the pages (serper)")
    add("--cache", default=".cache", help="folder of the index and of past answers (.cache)")
    options = vars(parser.parse_args(arguments))
    query = options.pop("query")
    try:
        if not query.strip():
            raise UserError("the query is empty: say what to search for")
        for document in make(options.pop("backend"), **options)(query):
            show(_as_json(document))
    except UserError as error:
        return fail(error)
    except ToolError as error:
        fail(error)
        return 1
    return 0


def _as_json(document: Document) -> str:
    """One line. What a terminal would obey or hide is escaped, for strangers wrote the text."""
    fields = {"title": document.title, "url": document.url, "text": document.text}
    line = json.dumps(fields, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


if __name__ == "__main__":
    sys.exit(main())
