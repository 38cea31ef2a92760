"""One HTTP exchange under one deadline, with a service of the operator's or a page of the open web.

The deadline covers all of it: looking the name up, dialling, TLS, the head, the body. A socket's
own time-out holds for a single wait only, and a server that drips one byte a second never exceeds
it. So the sockets here shorten every wait to what is left until the deadline. Looking a name up
cannot be interrupted, so it runs in a daemon thread, which is left behind when the deadline passes.

Services come from the operator's environment. They may sit on any address, loopback included, and
the environment's proxies hold for them. Redirects are not followed, for our key would go along.

Pages come from search results, so a stranger chooses them. Only http and https are read, and only
public addresses, which are judged again on every redirect. The connection goes to the very address
that was judged, so that a second answer of the name server cannot move it. Proxies are not used.

Tests: pytest tests/test_web.py (loopback servers that misbehave)
"""

import base64
import functools
import http.client
import ipaddress
import json
import queue
import socket
import ssl
import string
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from tools import ToolError

AGENT = {"User-Agent": "Mozilla/5.0 (compatible; mars)"}
SERVICE_BYTES = 8 << 20
REASON_BYTES = 64 << 10
PAGE_BYTES = 2 << 20  # a longer page is cut
PDF_BYTES = 16 << 20  # a PDF that is cut cannot be read at all
MOST_ADDRESSES = 3  # tried for one name
MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], list[str]]


@dataclass(eq=False)
class Refused(Exception):
    """The server answered with a status that is no success."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes = b""  # the beginning of a service's answer; a page's is dropped


# Threads -----------------------------------------------------------------------------------------


def in_threads(function: Callable, items: list, seconds: float = threading.TIMEOUT_MAX) -> list:
    """[function(item) for each item], each in a thread of its own; the first exception is raised.

    The threads are daemons: neither Ctrl-C nor the end of the program waits for them.
    TimeoutError when they are not done after `seconds`; they are left behind then.
    """
    done = queue.SimpleQueue()

    def work(place, item):
        try:
            done.put((place, function(item), None))
        except BaseException as error:
            done.put((place, None, error))

    for place, item in enumerate(items):
        try:
            threading.Thread(target=work, args=(place, item), daemon=True).start()
        except RuntimeError:
            raise ToolError("this machine has no thread left for the call") from None
    results = [None] * len(items)
    deadline = time.monotonic() + seconds
    for _ in items:
        left = max(deadline - time.monotonic(), 0)
        try:
            place, result, error = done.get(timeout=left)
        except queue.Empty:
            raise TimeoutError("timed out") from None
        if error is not None:
            raise error
        results[place] = result
    return results


# Sockets that know the deadline ------------------------------------------------------------------


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline (time.monotonic); TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Deadline:
    """A socket's waits, each cut to what is left until `deadline`. TLS reads through recv_into."""

    deadline: float

    def recv_into(self, *arguments):
        self.settimeout(seconds_left(self.deadline))
        return super().recv_into(*arguments)

    def sendall(self, *arguments):
        self.settimeout(seconds_left(self.deadline))
        return super().sendall(*arguments)

    def send(self, *arguments):
        self.settimeout(seconds_left(self.deadline))
        return super().send(*arguments)


class _Socket(_Deadline, socket.socket):
    pass


class _TLSSocket(_Deadline, ssl.SSLSocket):
    pass


@functools.cache
def tls(authorities: str | None = None) -> ssl.SSLContext:
    """The context of all TLS connections: certificates and names are checked.

    authorities: a file of certificates to trust instead of the machine's (for tests).
    """
    context = ssl.create_default_context(cafile=authorities)
    context.sslsocket_class = _TLSSocket
    return context


def dial(host: str, port: int, deadline: float, resolve: Resolve) -> _Socket:
    """A connection to the first address of `host` that answers, of at most MOST_ADDRESSES."""

    def look_up(_):
        return resolve(host, port)

    (addresses,) = in_threads(look_up, [host], seconds_left(deadline))
    addresses = addresses[:MOST_ADDRESSES]
    for place, address in enumerate(addresses):
        share = seconds_left(deadline) / (len(addresses) - place)
        try:
            return _connect(address, port, share, deadline)
        except OSError:
            if place + 1 == len(addresses):
                raise
    raise OSError("the name has no address")


def _connect(address: str, port: int, seconds: float, deadline: float) -> _Socket:
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6
    sock = _Socket(family, socket.SOCK_STREAM)
    sock.deadline = deadline
    sock.settimeout(seconds)
    try:
        sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _secure(sock: _Socket, host: str) -> _TLSSocket:
    secured = tls().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    secured.deadline = sock.deadline
    secured.settimeout(seconds_left(sock.deadline))
    try:
        secured.do_handshake()  # its time-out holds for the whole handshake
    except BaseException:
        secured.close()
        raise
    return secured


# Services ----------------------------------------------------------------------------------------


def any_addresses(host: str, port: int) -> list[str]:
    """The addresses of a host that the operator chose."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [info[4][0] for info in found]


def service(url: str, body: dict | None, headers: dict, timeout: float) -> tuple[bytes, dict]:
    """GET of `url`, or POST of `body` as JSON: (at most SERVICE_BYTES, headers).

    Refused unless the status is one of success. timeout: seconds for the whole exchange.
    """
    deadline = time.monotonic() + timeout
    method = "GET"
    data = None
    headers = AGENT | headers
    if body is not None:
        method = "POST"
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    sock, target, proxy_headers = _reach(url, deadline)
    try:
        response = _ask(sock, url, method, target, data, headers | proxy_headers)
        if not 200 <= response.status < 300:
            raise Refused(response.status, response.headers, _reason(response))
        return read_body(response, SERVICE_BYTES), response.headers
    finally:
        sock.close()


def _reason(response: http.client.HTTPResponse) -> bytes:
    """The body of a refusal, where services say what is wrong; empty if it cannot be had."""
    try:
        return read_body(response, REASON_BYTES)
    except Exception:  # the status is known, and it counts
        return b""


def _reach(url: str, deadline: float) -> tuple[socket.socket, str, dict]:
    """(connection, request target, headers for the proxy), by way of the environment's proxy."""
    parts = urllib.parse.urlsplit(url)
    host, port = host_and_port(parts)
    target = request_target(parts)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(f"{host}:{port}"):
        sock = dial(host, port, deadline, any_addresses)
        if parts.scheme == "https":
            sock = _secure(sock, host)
        return sock, target, {}
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    proxy = urllib.parse.urlsplit(proxy)
    headers = _proxy_authorization(proxy)
    proxy_host, proxy_port = host_and_port(proxy)
    sock = dial(proxy_host, proxy_port, deadline, any_addresses)
    if proxy.scheme == "https":
        sock = _secure(sock, proxy_host)
    if parts.scheme == "http":
        return sock, f"http://{parts.netloc}{target}", headers
    _open_tunnel(sock, host, port, headers)
    return _secure(sock, host), target, {}


def _proxy_authorization(proxy: urllib.parse.SplitResult) -> dict:
    if not proxy.username:
        return {}
    user = urllib.parse.unquote(proxy.username)
    password = urllib.parse.unquote(proxy.password or "")
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Proxy-Authorization": f"Basic {token}"}


def _open_tunnel(sock: socket.socket, host: str, port: int, headers: dict) -> None:
    connection = http.client.HTTPConnection(host, port)
    connection.sock = sock
    connection.request("CONNECT", f"{host}:{port}", headers=AGENT | headers)
    response = http.client.HTTPResponse(sock, method="CONNECT")
    response.begin()
    if response.status != 200:
        sock.close()
        raise OSError(f"the proxy answered HTTP {response.status}")


def _ask(sock, url: str, method: str, target: str, data: bytes | None, headers: dict):
    """Sends one request over `sock`. Returns the response, of which the head has been read."""
    parts = urllib.parse.urlsplit(url)
    host, port = host_and_port(parts)
    kind = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection  # knows which port goes unsaid in Host
    connection = kind(host, port)
    connection.sock = sock
    connection.request(method, target, data, headers)
    return connection.getresponse()


def host_and_port(parts: urllib.parse.SplitResult) -> tuple[str, int]:
    """Where a URL leads to; ToolError unless it is http or https and names a host."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ToolError("only http and https addresses are read")
    host = parts.hostname
    if not host.isascii():
        host = host.encode("idna").decode()
    port = parts.port
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return host, port


def request_target(parts: urllib.parse.SplitResult) -> str:
    target = quote(parts.path or "/")
    if parts.query:
        target += "?" + quote(parts.query)
    return target


def quote(text: str) -> str:
    """Spaces and letters beyond ASCII as %XX; everything that a URL may hold stays."""
    return urllib.parse.quote(text, safe=string.punctuation)


def read_body(response: http.client.HTTPResponse, limit: int) -> bytes:
    """The body, cut at `limit` bytes; ConnectionError if it ended before it should."""
    raw = bytearray()
    while len(raw) < limit:
        piece = response.read1(min(1 << 16, limit - len(raw)))
        if not piece:
            break
        raw += piece
    if len(raw) < limit and response.length:  # so many of the promised bytes are missing
        raise ConnectionError("the connection ended before the body did")
    return bytes(raw)


# Pages of the open web ---------------------------------------------------------------------------

# Addresses that count as global, but lead into a cloud's own machines or to another network.
NOT_PUBLIC = [
    ipaddress.ip_network("192.0.0.0/24"),  # holds the metadata service of one cloud
    ipaddress.ip_network("168.63.129.16/32"),  # the host of another cloud
    ipaddress.ip_network("192.88.99.0/24"),  # relays of 6to4
    ipaddress.ip_network("2002::/16"),  # 6to4: an IPv4 address inside an IPv6 address
    ipaddress.ip_network("3fff::/20"),  # documentation
]
# All public IPv6 addresses. Outside lie those that wrap an IPv4 address, and site-local ones.
PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet, and no IPv4 address inside an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if not parsed.is_global or parsed.is_multicast:
        return False
    if parsed.version == 6 and parsed not in PUBLIC_IPV6:
        return False
    return not any(parsed in network for network in NOT_PUBLIC)


def public_addresses(host: str, port: int) -> list[str]:
    """The addresses of a host that a stranger chose. ToolError unless all of them are public.

    Only the web's own ports are allowed, because one of the operator's services may listen on
    another port of a public address.
    """
    addresses = any_addresses(host, port)
    if not all(map(is_public, addresses)):
        raise ToolError("the page is not on the public internet")
    if port not in (80, 443):
        raise ToolError("only the ports 80 and 443 are read")
    return addresses


def page(
    url: str, body: None, headers: dict, timeout: float, *, resolve: Resolve = public_addresses
) -> tuple[bytes, dict]:
    """GET of one page of the open web: (at most PAGE_BYTES or PDF_BYTES, headers).

    Refused unless the status is 200. ToolError for what we do not fetch. timeout: seconds for the
    whole, all redirects included. resolve(host, port): the addresses that we may connect to.
    """
    deadline = time.monotonic() + timeout
    for _ in range(1 + MOST_REDIRECTS):
        parts = urllib.parse.urlsplit(url)
        host, port = host_and_port(parts)
        sock = dial(host, port, deadline, resolve)
        try:
            if parts.scheme == "https":
                sock = _secure(sock, host)
            response = _ask(sock, url, "GET", request_target(parts), None, AGENT | headers)
            location = response.headers.get("Location")
            if response.status in REDIRECTS and location:
                url = urllib.parse.urljoin(url, str(location))
                continue
            if response.status != 200:
                raise Refused(response.status, response.headers)
            limit = PAGE_BYTES
            if "pdf" in str(response.headers.get("Content-Type")).lower():
                limit = PDF_BYTES
            return read_body(response, limit), response.headers
        finally:
            sock.close()
    raise ToolError("the page redirects without end")
