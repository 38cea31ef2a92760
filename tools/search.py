"""The search back ends behind System 2's `search` and `scholar` calls.

local      BM25 over your own documents, split into passages. It needs no key and no network.
serper     Google and Google Scholar: POST {MARS_SERPER_URL}/search or /scholar, key SERPER_API_KEY.
           A result's text is its snippet. With pages="jina" it is the page behind the result, as
           Jina's reader returns it: GET {MARS_JINA_URL}/{page}. A JINA_API_KEY raises its limits.
retriever  A Search-R1 server: POST {MARS_RETRIEVER_URL}/retrieve.

The operator sets the MARS_*_URL variables; they may name any machine, this one too. If a page
cannot be read, the result keeps its snippet and its text says so. If no page can be read, the
search fails.

Tests: pytest tests/test_search.py
"""

import contextlib
import functools
import json
import os
import re
import string
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from config import UserError, key_of
from tools import Document, ToolError, bm25, one_line, web
from tools.bm25 import Search
from tools.documents import PASSAGE_WORDS, WHAT_IS_READ, from_contents, make_document

URLS = {
    "MARS_SERPER_URL": "https://google.serper.dev",
    "MARS_JINA_URL": "https://r.jina.ai",
    "MARS_RETRIEVER_URL": "http://127.0.0.1:8000",
}
local = bm25.in_memory  # local(documents, k): a search over documents in memory
LONGEST_PAGE = 400_000  # characters, which fill about four System 1 prompts of the paper
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

    Raises UserError at once if a setting is missing or wrong.

    docs: the local backend's files, split into passages of `passage_words` words (0: no split).
    cache: the folder for the index, or for a service's answers. With None a service's answers are
    not cached; the local backend needs a folder.
    A retriever's answers are kept in memory only: its index may have changed by the next run.
    block: hosts whose results are dropped, subdomains included, such as those that publish a
    benchmark's answers. A result without a host is dropped as well.
    client_options: see web.Client.
    """
    block = blocked_hosts(block)
    if backend == "local":
        if docs is None:
            raise UserError(f"--docs names what the local backend searches: {WHAT_IS_READ}")
        return bm25.on_disk(Path(docs), k, Path(cache), passage_words)
    folder = None if cache is None or backend == "retriever" else Path(cache) / "web"
    client = web.Client(folder, **client_options)
    if backend == "serper":
        url = f"{base_url('MARS_SERPER_URL')}/{'scholar' if scholar else 'search'}"
        headers = {"X-API-KEY": key_of("SERPER_API_KEY")}
        read = serper_documents
    elif scholar:
        raise UserError("the retriever has no scholar search: give --tools search,python")
    else:
        url = f"{base_url('MARS_RETRIEVER_URL').removesuffix('/retrieve')}/retrieve"
        headers = {}
        read = retriever_documents
    read_page = jina_reader(client, block) if pages == "jina" else None

    def search(query: str) -> list[Document]:
        if not query.strip():
            return []
        body = {"q": query, "num": k}
        if backend == "retriever":
            body = {"queries": [query], "topk": k, "return_scores": True}
        results = client.call(url, read, body=body, headers=headers)[:k]
        results = drop_blocked(results, block) if block else results
        return with_pages(results, read_page) if read_page else results

    if backend == "retriever" and cache is not None:
        return functools.lru_cache(10_000)(search)  # 100 MB if an answer has ten passages
    return search


def base_url(variable: str) -> str:
    """The service's URL from the environment, or its default. UserError if it is malformed."""
    return web.check_base_url(variable, os.environ.get(variable) or URLS[variable])


# Services ----------------------------------------------------------------------------------------


def serper_documents(raw: bytes) -> list[Document]:
    """The results of a Serper answer. Raises an exception for anything else.

    An answer without `organic` is empty if it echoes the search and reports no error.
    """
    answer = json.loads(raw)
    if "organic" not in answer:
        error = answer.get("message") or answer.get("error")
        if error or not isinstance(answer.get("searchParameters"), dict):
            raise ValueError(f"this is not the answer to a search: {error or 'no results in it'}")
    return [_serper_document(row, rank) for rank, row in enumerate(answer.get("organic", []), 1)]


def _serper_document(row: dict, rank: int) -> Document:
    """One result; every field is optional. Scholar adds authors, journal, year and citations.

    The id of a paper is the address of its open copy, if Scholar knows one.
    """
    row = {name: str(value) for name, value in row.items() if value is not None}
    url = row.get("link") or row.get("pdfUrl", "")
    about = row.get("publicationInfo", "")
    year = row.get("year", "")
    cited = f"Cited by {row['citedBy']}" if "citedBy" in row else ""
    lines = [about, "" if year in about else year, row.get("date"), cited, row.get("snippet")]
    text = "\n".join(filter(None, lines))
    id = row.get("pdfUrl") or url or f"result-{rank}"
    return make_document(id, row.get("title", ""), url, text)


def retriever_documents(raw: bytes) -> list[Document]:
    """The results of a /retrieve answer to one query. Raises an exception for anything else.

    The answer is {"result": [[{"document": {"contents", "id"?, "title"?, "url"?}, "score"}, …]]}.
    A reranking server sends the contents alone as the document.
    """
    answer = json.loads(raw)
    documents = []
    try:
        (rows,) = answer["result"]
        for rank, row in enumerate(rows, 1):
            document = row["document"]
            if not isinstance(document, dict):
                document = {"contents": document}
            title, url = (str(document.get(field) or "") for field in ("title", "url"))
            id = str(document.get("id", f"result-{rank}"))
            documents.append(from_contents(id, title, url, document["contents"]))
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ToolError("this is not the answer of a Search-R1 retriever") from None
    return documents


# Blocked hosts -----------------------------------------------------------------------------------


def blocked_hosts(names: Iterable[str]) -> tuple[str, ...]:
    """The hosts in the form in which they are compared. UserError if a name is not a host."""
    hosts = []
    for name in filter(str.strip, names):
        host = plain_host(name.strip()).removeprefix("www.")  # www.x is x
        if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
            raise UserError(
                f"--block {one_line(name, 80)}: give hosts comma-separated, such as "
                "huggingface.co,hf.co, without https://, port or path"
            )
        hosts.append(host)
    return tuple(hosts)


def drop_blocked(documents: list[Document], block: tuple[str, ...]) -> list[Document]:
    """The documents whose host is known and not blocked. ToolError if no host is known.

    An id names a host only if it looks like an address.
    """
    hosts = [host_of(one.url) or ("/" in one.id and host_of(one.id)) for one in documents]
    if documents and not any(hosts):
        raise ToolError("the results name no hosts, so --block cannot be applied to them")
    pairs = zip(documents, hosts, strict=True)
    return [document for document, host in pairs if host and not is_within(host, block)]


def is_blocked(url: str, block: tuple[str, ...]) -> bool:
    """Whether a URL's host is one of `block` (see blocked_hosts) or a subdomain of one.

    A malformed URL counts as blocked.
    """
    host = host_of(url)
    if not host:
        return bool(block) and "://" in url
    return is_within(host, block)


def is_within(host: str, block: tuple[str, ...]) -> bool:
    """Whether a host is one of `block` or a subdomain of one."""
    return any(host == name or host.endswith(f".{name}") for name in block)


def host_of(url: str) -> str:
    """The host in a URL, or "" if there is none or the URL is malformed."""
    # Browsers take \ for / and decode %xx in a host.
    plain = url.strip().replace("\\", "/")
    # A retriever may omit the scheme, so a leading part that looks like a host gets // before it.
    plain = re.sub(r"^([a-z][a-z0-9+.-]*:)?/*(?=[^/:]*[.])", "//", plain, flags=re.IGNORECASE)
    try:
        host = plain_host(urllib.parse.unquote(urllib.parse.urlsplit(plain).hostname or ""))
    except ValueError:  # for example http://[bad or Doc[1]
        return ""
    return host if re.fullmatch(r"[a-z0-9_.:-]*", host) else ""


def plain_host(host: str) -> str:
    """A host in the form of DNS: ASCII, lower case, without the last dot."""
    host = unicodedata.normalize("NFKC", host).replace("\u3002", ".").lower()
    with contextlib.suppress(UnicodeError):  # the name is not valid
        host = host.encode("idna").decode()
    return host.rstrip(".")


# The pages behind the results --------------------------------------------------------------------


def with_pages(results: list[Document], read: Callable[[str], str]) -> list[Document]:
    """The results with their pages' texts, each page once. ToolError if no page could be read."""
    results = list({(one.url or one.id).partition("#")[0]: one for one in results}.values())
    errors = []

    def read_page(document: Document) -> Document:
        try:
            return replace(document, text=read(document.url)) if document.url else document
        except ToolError as error:
            if document.id != document.url:  # the id may be the address of a paper's open copy
                with contextlib.suppress(ToolError):
                    return replace(document, url=document.id, text=read(document.id))
            errors.append(error)
            return replace(document, text=f"{UNREAD}\n{document.text}")

    pages = web.in_threads(read_page, results)
    if errors and len(errors) == sum(bool(document.url) for document in results):
        # Threads fail in any order; the least of their messages is the same in every run.
        message = f"none of the {len(errors)} pages found could be read: {min(map(str, errors))}"
        raise ToolError(one_line(message, web.LONGEST_MESSAGE))
    return pages


def jina_reader(client: web.Client, block: tuple[str, ...]) -> Callable[[str], str]:
    """read(url) -> the page's text. No ToolError of it quotes the page."""
    base = base_url("MARS_JINA_URL")
    headers = {"Accept": "application/json"}
    if os.environ.get("JINA_API_KEY", "").strip():
        headers["Authorization"] = f"Bearer {key_of('JINA_API_KEY')}"
    # Many pages are dead, so a page is tried twice at most. Jina needs eight seconds on average.
    client = replace(client, tries=min(client.tries, 2), timeout=max(client.timeout, 60.0))
    parse = functools.partial(jina_page, block=block)

    def read(url: str) -> str:
        if not url.startswith(("http://", "https://")) or is_blocked(url, block):
            raise ToolError("only http and https pages of hosts that are not blocked are read")
        # This quotes spaces and characters outside ASCII, and nothing else.
        quoted = urllib.parse.quote(url, safe=string.punctuation)
        return client.call(f"{base}/{quoted}", parse, headers=headers, quote=False)

    return read


def jina_page(raw: bytes, block: tuple[str, ...]) -> str:
    """The text in the reader's answer, which has status 200 even if the page was an error."""
    page = json.loads(raw)["data"]
    failures = r"returned error \d{3}|CAPTCHA|not yet fully loaded"
    if failure := re.search(failures, str(page.get("warning"))):
        raise ToolError(f"the reader did not get the page: {failure[0]}")
    if is_blocked(str(page.get("url") or ""), block):  # Jina follows redirects
        raise ToolError("the page redirects to a blocked host")
    text = page["content"][:LONGEST_PAGE].encode("utf-8", "replace").decode()
    if not text.strip():
        raise ValueError("the reader found no text on the page")
    return text
