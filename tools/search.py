"""Search: what System 2's `search` and `scholar` calls reach.

local      BM25 over your own documents, cut into passages. No key, no network.
serper     Google and Google Scholar: POST {MARS_SERPER_URL}/search or /scholar, key SERPER_API_KEY.
           A result's text is its snippet, or with pages="jina" the page behind it, as Jina's
           reader gives it: GET {MARS_JINA_URL}/{page}. A JINA_API_KEY raises its limits.
retriever  A Search-R1 server: POST {MARS_RETRIEVER_URL}/retrieve.

The MARS_*_URL come from the operator and may name any machine, loopback too. A result whose page
cannot be read keeps its snippet and says so in the text. Only when no page at all could be read has
the search failed.

Tests: pytest tests/test_search.py
"""

import contextlib
import functools
import json
import os
import re
import string
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
LONGEST_PAGE = 400_000  # characters: four times what a System 1 prompt of the paper holds
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

    UserError for what is missing or makes no sense, before any search.

    docs: the local backend's files, cut into passages of so many words (0: not at all). cache:
    folder for the index or for answers; None, for a service, keeps none. block: hosts from which
    nothing is taken, nor from below them, such as those that publish a benchmark's answers; what
    names no host could come from them, and is not taken either.
    client_options: see web.Client.
    """
    if k < 1:
        raise UserError(f"k is {k}: ask for at least 1 document")
    block = blocked_hosts(block)
    if backend == "local":
        if docs is None:
            raise UserError(f"--docs names what the local backend searches: {WHAT_IS_READ}")
        return bm25.on_disk(Path(docs), k, Path(cache), passage_words)
    client = web.Client(None if cache is None else Path(cache) / "web", **client_options)
    if backend == "serper":
        url = f"{base_url('MARS_SERPER_URL')}/{'scholar' if scholar else 'search'}"
        headers = {"X-API-KEY": key_of("SERPER_API_KEY")}
        read = serper_documents
    else:
        if scholar:
            raise UserError("the retriever has no scholar search: give --tools search,python")
        url = f"{base_url('MARS_RETRIEVER_URL').removesuffix('/retrieve')}/retrieve"
        headers = {}
        read = retriever_documents
    page = jina_reader(client, block) if pages == "jina" else None

    def search(query: str) -> list[Document]:
        if not query.strip():
            return []
        body = {"q": query, "num": k}
        if backend == "retriever":
            body = {"queries": [query], "topk": k, "return_scores": True}
        found = client.call(url, read, body=body, headers=headers)[:k]
        found = unblocked(found, block)
        return with_pages(found, page) if page else found

    return search


def base_url(variable: str) -> str:
    """The service's URL from the environment, or its default; UserError if it is malformed."""
    return web.check_base_url(variable, os.environ.get(variable) or URLS[variable])


# Services ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper(Document):
    """A paper that has a page at its publisher's, `url`, and a copy elsewhere."""

    copy: str


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
    row = {name: str(value) for name, value in row.items() if value is not None}
    pdf = row.get("pdfUrl", "")
    url = row.get("link") or pdf
    about = row.get("publicationInfo", "")
    year = row.get("year", "")
    lines = [
        about,
        "" if year in about else year,
        row.get("date"),
        f"Cited by {row['citedBy']}" if "citedBy" in row else "",
        row.get("snippet"),
    ]
    text = "\n".join(filter(None, lines))
    document = make_document(url or f"result-{rank}", row.get("title", ""), url, text)
    copy = make_document("", "", pdf, "").url  # safe to show
    return document if copy in ("", document.url) else Paper(**vars(document), copy=copy)


def retriever_documents(raw: bytes) -> list[Document]:
    """The results of a /retrieve answer to one query; an exception if it is none.

    The answer is {"result": [[{"document": {"contents", "id"?, "title"?, "url"?}, "score"}, …]]}.
    A reranking server gives the contents in the document's place.
    """
    answer = json.loads(raw)
    try:
        (rows,) = answer["result"]
        return [_retrieved_document(row["document"], rank) for rank, row in enumerate(rows, 1)]
    except (LookupError, TypeError, ValueError, AttributeError):
        shape = json.dumps(shape_of(answer))
        raise ToolError(
            f"the retriever's answer has another shape than expected: {shape}"
        ) from None


def shape_of(value):
    """JSON's value with the names of types for what strangers wrote, and one item of each list."""
    if isinstance(value, dict):
        return {name: shape_of(inner) for name, inner in value.items()}
    return [shape_of(one) for one in value[:1]] if isinstance(value, list) else type(value).__name__


def _retrieved_document(found: dict | str, rank: int) -> Document:
    if isinstance(found, str):
        found = {"contents": found}
    id = str(found.get("id", f"result-{rank}"))
    title, url = (str(found.get(field) or "") for field in ("title", "url"))
    return from_contents(id, title, url, found["contents"])


# Hosts that are not asked ------------------------------------------------------------------------


def blocked_hosts(names: Iterable[str]) -> tuple[str, ...]:
    """The hosts as they are compared. UserError for what is no name of a host."""
    hosts = []
    for name in filter(str.strip, names):
        host = plain_host(name.strip()).removeprefix("www.")  # with or without it, it is one site
        if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
            raise UserError(
                f"--block {one_line(name, 80)}: give hosts comma-separated, such as "
                "huggingface.co,hf.co, without https://, port or path"
            )
        hosts.append(host)
    return tuple(hosts)


def unblocked(found: list[Document], block: tuple[str, ...]) -> list[Document]:
    """The results that come from hosts that are not blocked; ToolError if none names its host."""
    if not block:
        return found
    free = [d for d in found if not is_blocked(d.url, block) and not is_blocked(d.id, block)]
    named = [d for d in free if host_of(d.url) or host_of(d.id)]
    if free and not named:
        raise ToolError(
            "the results name no hosts, so what --block forbids cannot be told from them"
        )
    return named


def is_blocked(url: str, block: tuple[str, ...]) -> bool:
    """Whether a URL's host is one of `block` (blocked_hosts), or below one of them.

    An address that cannot be read counts as one.
    """
    host = host_of(url)
    if not host:
        return bool(block) and "://" in url
    return any(host == name or host.endswith(f".{name}") for name in block)


def host_of(url: str) -> str:
    """The host that a URL names; "" if it names none, or cannot be read."""
    # A retriever may leave the scheme out: what looks like a host gets // before it.
    plain = re.sub(r"^([a-z][a-z0-9+.-]*:)?/*(?=[^/:]*[.])", "//", url.strip(), flags=re.IGNORECASE)
    try:
        return plain_host(urllib.parse.urlsplit(plain).hostname or "")
    except ValueError:  # such as http://[bad; or a name with brackets, such as Doc[1]
        return ""


def plain_host(host: str) -> str:
    """A host as name servers know it: in ASCII and lower case, without the last dot."""
    with contextlib.suppress(UnicodeError):  # no name server knows it
        host = host.encode("idna").decode()
    return host.lower().rstrip(".")


# The pages behind the results --------------------------------------------------------------------


def with_pages(found: list[Document], read: Callable[[str], str]) -> list[Document]:
    """Each page's text once, or its copy's; ToolError when there were pages and none was read."""
    once = {}
    for document in found:
        once.setdefault((document.url or document.id).partition("#")[0], document)
    found = list(once.values())

    def attempt(document: Document) -> Document | ToolError:
        outcome = document
        for url in filter(None, (document.url, getattr(document, "copy", ""))):
            try:
                return replace(document, url=url, text=read(url))
            except ToolError as error:
                outcome = error
        return outcome

    pages = web.in_threads(attempt, found)
    errors = [page for page in pages if isinstance(page, ToolError)]
    if errors and len(errors) == sum(bool(document.url) for document in found):
        why = f"none of the {len(errors)} pages found could be read: {errors[0]}"
        raise ToolError(one_line(why, web.LONGEST_MESSAGE))
    return [
        replace(document, text=f"{UNREAD}\n{document.text}")
        if isinstance(page, ToolError)
        else page
        for document, page in zip(found, pages, strict=True)
    ]


def jina_reader(client: web.Client, block: tuple[str, ...]) -> Callable[[str], str]:
    """read(url) -> the page's text, or a ToolError that quotes nothing of what strangers wrote."""
    base = base_url("MARS_JINA_URL")
    headers = {"Accept": "application/json"}
    if os.environ.get("JINA_API_KEY", "").strip():
        headers["Authorization"] = f"Bearer {key_of('JINA_API_KEY')}"
    # Dead pages are common. Live ones take eight seconds in the mean, by Jina's account.
    client = replace(client, tries=min(client.tries, 2), timeout=max(client.timeout, 60.0))
    page = functools.partial(jina_page, block=block)

    def read(url: str) -> str:
        if not url.startswith(("http://", "https://")) or is_blocked(url, block):
            raise ToolError("only http and https pages are read, and none of a blocked host")
        # Only spaces and what is not ASCII change.
        quoted = urllib.parse.quote(url, safe=string.punctuation)
        return client.call(f"{base}/{quoted}", page, headers=headers, quote=False)

    return read


def jina_page(raw: bytes, block: tuple[str, ...]) -> str:
    """The text of a reader's answer, which is 200 also where it read an error in a page's place."""
    page = json.loads(raw)["data"]
    warning = str(page.get("warning"))
    refused = re.search(r"returned error (\d{3})", warning)
    if refused:
        raise ToolError(f"the page answered HTTP {refused[1]}")
    if re.search("captcha|not yet fully loaded", warning, re.IGNORECASE):
        raise ToolError("the page asked for a CAPTCHA, or was not loaded")
    if is_blocked(str(page.get("url") or ""), block):  # the reader follows redirects itself
        raise ToolError("the page redirects to a blocked host")
    text = page["content"][:LONGEST_PAGE].encode("utf-8", "replace").decode()
    if not text.strip():
        raise ValueError("the reader found no text on the page")
    return text
