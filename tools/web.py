"""The one HTTP client of the tools: services that the operator chose (`service`) and pages of the open web (`page`).

A call returns an answer or raises ToolError, so that a failure is never taken for an empty answer. What may pass
(time-out, dropped or cut connection, 408, 429, 5xx, an answer that is not what it should be) is tried again after a
growing, jittered pause, no sooner than Retry-After asks; 400, 401, 403 and other refusals are final. Good answers are
kept on disk under sha256(url, body), without any key; failures are not kept. Requests that are equal and under way at the
same time (a group's first searches) are sent once and share their outcome. Offline, only the cache answers.

Services may sit on any address, loopback included: their base URLs come from the operator's environment. Pages come
from search results, so a stranger chooses them: http and https only, public addresses only, checked again on every
redirect, and the connection goes to the very address that was checked, so that a second DNS answer cannot move it.
Proxy settings of the environment hold for services only. Tests: pytest tests/test_search.py (loopback servers).
"""
import contextlib
import datetime
import email.utils
import functools
import hashlib
import html
import http.client
import io
import ipaddress
import json
import os
import random
import re
import socket
import ssl
import string
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from config import UserError
from tools import ToolError

LONGEST_WAIT = 60.0                                                     # seconds; a larger Retry-After is cut to this
AGENT = {"User-Agent": "Mozilla/5.0 (compatible; mars)"}


@dataclass
class Client:
    """Thread-safe. cache: a folder, or None. timeout: seconds for each silent wait, and again for the whole body.
    tries, pause: how often, and seconds before the second try (doubled for each further). parallel: calls at once."""
    cache: Path | None
    offline: bool = False
    timeout: float = 20.0
    tries: int = 5
    pause: float = 1.0
    parallel: int = 16

    def __post_init__(self):
        self.slots = threading.BoundedSemaphore(self.parallel)
        self.guard, self.under_way = threading.Lock(), {}   # name of a request -> Future of its answer
        if self.offline and self.cache is None:
            raise UserError("offline mode answers from the cache alone: name a cache folder")
        try:
            if self.cache is not None:
                self.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the cache folder {self.cache} cannot be made ({error.strerror}): name another one")

    def call(self, url: str, decode: Callable, *, body: dict | None = None, headers: dict | None = None, send=None):
        """The answer of `url`: GET, or POST of `body` as JSON. Raises ToolError when it cannot be had.

        decode(raw: bytes, headers) -> an answer that JSON can hold; ValueError if it is not the one asked for.
        send: the kind of exchange, `service` (default) or `page`.
        """
        name = hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()
        with self.guard:
            future = self.under_way.get(name)
            if mine := future is None:
                future = self.under_way[name] = Future()
        if mine:
            try:
                future.set_result(self._answer(name, url, decode, body, headers, send))
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self.guard:
                    del self.under_way[name]
        return future.result()

    def _answer(self, name, url, decode, body, headers, send):
        """From the cache, or else from the service, and then into the cache."""
        path = None if self.cache is None else self.cache / name[:2] / f"{name}.json"
        if path:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):      # not as we wrote it: not there
                return json.loads(path.read_bytes())["answer"]
        if self.offline:
            raise ToolError("this request is not in the cache, and the run is offline")
        answer = self._persist(url, decode, body, headers or {}, send or service)
        if path:
            with contextlib.suppress(OSError):              # a full disk does not take the answer away
                _write_whole(path, {"url": url, "body": body, "answer": answer})
        return answer

    def _persist(self, url, decode, body, headers, send):
        for attempt in range(self.tries):
            wait = self.pause * 2 ** attempt * random.uniform(0.5, 1)
            try:
                with self.slots:
                    raw, answer_headers = send(url, body, headers, self.timeout)
                return decode(raw, answer_headers)
            except urllib.error.HTTPError as error:
                why = _explain(error)
                if error.code not in (408, 429) and error.code < 500:
                    raise ToolError(_told(url, why, headers)) from None
                wait = max(wait, retry_after(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
            except (ValueError, RecursionError) as error:               # RecursionError: JSON nested without end
                why = f"the answer is not what was asked for ({error})"
            if attempt + 1 < self.tries:
                time.sleep(wait)
        raise ToolError(_told(url, f"{why}, {self.tries} tries", headers))


def _explain(error: urllib.error.HTTPError) -> str:
    """Status and the beginning of the body, where services say what is wrong ("Not enough credits")."""
    why = f"HTTP {error.code} {error.reason}"
    with error, contextlib.suppress(OSError, http.client.HTTPException):
        why += " " + error.read(200).decode("utf-8", "replace")
    return why


def _told(url: str, why: str, headers: dict) -> str:
    """What System 2 and the operator are told: one line, without our keys."""
    for secret in headers.values():
        why = why.replace(secret.removeprefix("Bearer "), "***")
    service_or_site = "/".join(url.split("/")[:3])
    return " ".join(f"{service_or_site}: {why}".split())


def _write_whole(path: Path, content: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            json.dump(content, file)
            file.flush()
            os.replace(file.name, path)                                 # whole or not at all, also with 8 ranks at once
        except OSError:
            os.unlink(file.name)
            raise


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header (a number, or a date) asks for: 0 if none, at most LONGEST_WAIT."""
    header = (header or "").strip()
    if header.isascii() and header.isdigit():
        return min(float(header), LONGEST_WAIT)
    try:
        date = email.utils.parsedate_to_datetime(header)
    except (ValueError, TypeError):
        return 0.0
    date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
    return min(max((date - datetime.datetime.now(datetime.UTC)).total_seconds(), 0.0), LONGEST_WAIT)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):                                     # or our key would go to another host
        return None


def service(url: str, body: dict | None, headers: dict, timeout: float, limit: int = 8 << 20) -> tuple[bytes, dict]:
    """One exchange with a service of the operator's choice: (at most `limit` bytes, headers); HTTPError if refused."""
    data = None if body is None else json.dumps(body).encode()
    headers = AGENT | headers | ({} if data is None else {"Content-Type": "application/json"})
    request = urllib.request.Request(url, data, headers)
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout) as response:
        return _body(response, limit, time.monotonic() + timeout), response.headers


def _body(response, limit: int, deadline: float) -> bytes:
    """The body, cut at `limit` bytes; OSError if the connection ended before the body did, or the deadline passed."""
    raw = bytearray()
    while len(raw) < limit and (piece := response.read1(min(1 << 16, limit - len(raw)))):
        raw += piece
        if time.monotonic() > deadline:
            break
    if time.monotonic() > deadline:
        raise TimeoutError("timed out in the middle of the body")
    if len(raw) < min(limit, int(response.headers.get("Content-Length") or 0)):
        raise ConnectionError("the connection ended before the body did")
    return bytes(raw)


# Pages of the open web ---------------------------------------------------------------------------------------------

# Addresses that count as global but answer to the machines of a cloud only: 192.0.0.192, 168.63.129.16
INTERNAL = [ipaddress.ip_network(network) for network in ("192.0.0.0/24", "168.63.129.16/32")]


def public_addresses(host: str, port: int) -> list[str]:
    """The addresses of `host`; ToolError if one of them is not public or is a v4 address in v6 clothes, or for another port
    than the web's (a service of the operator's may listen on a public address)."""
    addresses = [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in addresses:
        address = ipaddress.ip_address(text)
        dressed = address.version == 6 and (address.sixtofour or address.is_reserved)      # both NAT64 ranges are reserved
        internal = any(address in network for network in INTERNAL)
        if not address.is_global or address.is_multicast or dressed or internal:
            raise ToolError(f"{host} is not on the public internet")
    if port not in (80, 443):
        raise ToolError("only the ports 80 and 443 are read")
    return addresses


def page(url: str, body: None, headers: dict, timeout: float, limit: int = 2 << 20, resolve=public_addresses):
    """GET of one page of the open web: (at most `limit` bytes, headers); HTTPError unless 200.

    At most 5 redirects. resolve(host, port) -> the addresses we may connect to. ToolError for what we refuse to fetch.
    """
    for _ in range(6):
        with _connected(url, timeout, resolve) as (connection, target, deadline):
            connection.request("GET", target, headers=AGENT | headers)
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308) and response.headers.get("Location"):
                url = urllib.parse.urljoin(url, response.headers["Location"])
                continue
            if response.status != 200:
                raise urllib.error.HTTPError(url, response.status, response.reason, response.headers, io.BytesIO())
            return _body(response, limit, deadline), response.headers
    raise ToolError("the page redirects without end")


@contextlib.contextmanager
def _connected(url: str, timeout: float, resolve: Callable):
    """Yields (connection to a checked address, request target, the deadline at which the connection is shut)."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ToolError("only http and https pages are read")
    secure = parts.scheme == "https"
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    port = parts.port or (443 if secure else 80)
    target = _quote(parts.path or "/") + ("?" + _quote(parts.query) if parts.query else "")
    kind = functools.partial(http.client.HTTPSConnection, context=_tls()) if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout)
    sock = _dial(resolve(host, port), port, timeout)
    if secure:
        sock = _tls().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    connection.sock = sock
    guard = threading.Timer(timeout, _shut, [sock])                     # a server that drips is not waited for
    guard.start()
    try:
        if secure:
            sock.do_handshake()
        yield connection, target, time.monotonic() + timeout
    finally:
        guard.cancel()
        sock.close()


def _dial(addresses: list[str], port: int, timeout: float) -> socket.socket:
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), timeout)
    return socket.create_connection((addresses[-1], port), timeout)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)                  # SSLSocket's own is not safe across threads


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe=string.punctuation)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


# Page to text ------------------------------------------------------------------------------------------------------

BLOCKS = frozenset("""address article aside blockquote br caption dd details div dl dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header hr legend li main nav ol option p pre section summary table tbody tfoot thead title tr
    ul""".split())
CHARSETS = re.compile("utf|iso|windows|cp|gb|big5|euc|shift|koi8|us-ascii|latin", re.I)    # others are slow
MARKUP = re.compile(r"""<!--.*?(?:-->|\Z)                                       # a comment
    | <(script|style)(?=[\s/>]).*?(?=</\1[\s/>]|\Z)                             # not for readers
    | <(/?)([a-z][^\s/>]*+)(?:=\s*+"[^"]*+" | =\s*+'[^']*+' | [^>])*+(?:>|\Z)   # a tag; > may stand in quotes
    | <[!?/][^>]*+(?:>|\Z)""", re.IGNORECASE | re.DOTALL | re.VERBOSE)


def page_text(raw: bytes, headers) -> str:
    """The text of a fetched page. ToolError if it is of a kind that holds no text, ValueError if it is empty."""
    kind = headers.get_content_type()
    if not kind.startswith("text/") and kind not in ("application/xhtml+xml", "application/xml", "application/json"):
        raise ToolError(f"the page is {kind}, not text")
    if headers.get("Content-Encoding", "identity") != "identity":
        raise ToolError("the page is compressed, which was not asked for")
    declared = re.search(rb"<meta[^>]{0,200}charset=[\"']?([\w-]{1,40})", raw[:4096], re.IGNORECASE)
    charset = headers.get_content_charset() or (declared and declared[1].decode()) or "utf-8"
    try:
        text = raw.decode(charset if CHARSETS.match(charset) else "utf-8", "replace")
    except LookupError:
        text = raw.decode("utf-8", "replace")
    text = html_to_text(text) if "html" in kind else text
    if not text.strip():
        raise ValueError("the page holds no text")
    return text


def html_to_text(text: str) -> str:
    """All text of a page but scripts, styles, comments: blocks begin a line, cells stay apart, <pre> keeps its lines.

    Not by html.parser: until its repair in 2025 a malformed page took it time quadratic in the length, hours for one
    made to hurt. Every alternative of MARKUP ends at the end of the text at the latest, so nothing is scanned twice.
    """
    pieces, at, pre = [], 0, 0
    for mark in MARKUP.finditer(text + "<!---->"):
        piece = html.unescape(text[at:mark.start()])
        pieces.append(piece if pre else re.sub(r"\s+", " ", piece))
        at, tag = mark.end(), (mark[3] or "").lower()
        if tag == "pre":
            pre = max(pre + (-1 if mark[2] else 1), 0)
        pieces.append("\n" if tag in BLOCKS else " " if tag in ("td", "th") else "")
    lines = (line.rstrip() for line in "".join(pieces).split("\n"))
    return "\n".join(line if line.startswith("  ") else line.strip() for line in lines if line)
