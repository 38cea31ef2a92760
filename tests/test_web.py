"""The client and its exchanges against loopback servers that misbehave."""

import datetime
import email.utils
import hashlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from loopback import (
    ECHO,
    GOOD,
    KEY,
    cut_chunks,
    drips,
    drops,
    hangs,
    only_site,
    routes,
    says,
    serper,
)

from tools import ToolError, exchange, search, web

# The client ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        says("slow down", 429),
        says("", 408),
        says("oops", 500),
        says("", 503),
        drops,
        cut_chunks,
        says('{"organic": []}', promise=99),
        says("<html>"),
        says(""),
        says("[" * 100_000),
        says([]),
        says({}),
        says({"organic": 5}),
        says({"organic": [5]}),
        says({"organic": None}),
        says({"message": "Not enough credits", "statusCode": 400}),
    ],
)
def test_what_may_pass_is_tried_again_and_never_kept_or_taken_for_nothing_found(
    server, tmp_path, waits, bad
):
    server.replies = [bad]
    find = serper(tmp_path, tries=3)
    with pytest.raises(ToolError, match="3 tries"):
        find("ada")
    assert len(server.requests) == 3 and len(waits) == 2
    server.replies = [bad] * 4 + [GOOD]
    assert len(find("ada")) == 1 and len(server.requests) == 5


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 302])
def test_a_refusal_is_final_and_does_not_show_the_key(server, tmp_path, waits, status):
    server.replies = [says(f"no credit for {KEY}", status, {"Location": f"{server.url}/elsewhere"})]
    with pytest.raises(ToolError, match=f"HTTP {status}") as caught:
        serper(tmp_path)("ada")
    assert len(server.requests) == 1 and not waits  # nor was the key carried to another address
    assert (
        KEY not in str(caught.value)
        and "no credit for ***" in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_pauses_grow_and_jitter_and_last_as_long_as_asked(server, tmp_path, waits):
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    server.replies = [
        says("", 500),
        says("", 500),
        says("", 429, {"Retry-After": "20"}),
        says("", 503, {"Retry-After": email.utils.format_datetime(soon, usegmt=True)}),
        says("", 429, {"Retry-After": "86400"}),
        GOOD,
    ]
    serper(tmp_path, tries=6, pause=1)("ada")
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2
    assert waits[2] == 20 and 25 < waits[3] <= 30 and waits[4] == web.LONGEST_WAIT
    server.replies = [says("", 500)]
    for _ in range(5):
        with pytest.raises(ToolError):
            serper(tmp_path, tries=2)("other")
    assert len(set(waits[5:])) == 5


@pytest.mark.parametrize(
    "header",
    [None, "", "soon", "-5", "nan", "1e9", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Oct 2015"],
)
def test_a_retry_after_that_says_nothing_useful_asks_for_no_wait(header):
    assert web.retry_after(header) == 0


@pytest.mark.parametrize(
    "reply", [hangs, drips(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n")]
)
def test_a_silent_or_dripping_service_times_out(server, tmp_path, waits, reply):
    server.replies = [reply]
    start = time.monotonic()
    with pytest.raises(ToolError, match="timed out"):
        serper(tmp_path, timeout=0.3, tries=2)("ada")
    assert time.monotonic() - start < 4 and len(server.requests) == 2


def test_no_service_at_all_is_a_failure(tmp_path, monkeypatch, waits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MARS_RETRIEVER_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ToolError, match="refused, 2 tries"):
            search.make("retriever", cache=None, tries=2)("ada")


def test_good_answers_are_kept_without_the_key_and_serve_offline(server, tmp_path, monkeypatch):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    assert serper(tmp_path)("ada") == first and len(server.requests) == 1
    (file,) = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    name = hashlib.sha256(
        json.dumps([f"{server.url}/search", {"num": 5, "q": "ada"}]).encode()
    ).hexdigest()
    assert file.name == f"{name}.json" and KEY not in file.read_text()
    monkeypatch.delenv("SERPER_API_KEY")
    offline = serper(tmp_path, offline=True)
    assert offline("ada") == first
    with pytest.raises(ToolError, match="offline"):
        offline("bob")
    file.write_text(file.read_text()[:20])  # a disk that was full
    with pytest.raises(ToolError, match="offline"):
        offline("ada")
    assert len(server.requests) == 1
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    assert (
        serper(tmp_path)("ada") == first and offline("ada") == first and len(server.requests) == 2
    )


def test_nothing_found_is_kept_like_any_answer(server, tmp_path):
    server.replies = [says(ECHO)]
    assert serper(tmp_path)("ada") == serper(tmp_path)("ada") == []
    assert serper(tmp_path)("  ") == [] and len(server.requests) == 1


def test_at_most_so_many_calls_at_once_and_threads_share_the_cache_unharmed(server, tmp_path):
    under_way, seen, lock = [], [], threading.Lock()

    def slowly(handler):
        with lock:
            under_way.append(handler)
            seen.append(len(under_way))
        time.sleep(0.05)
        with lock:
            under_way.remove(
                handler
            )  # before the answer goes out, which is what frees the client's slot
        GOOD(handler)

    server.replies = [slowly]
    find = serper(tmp_path, parallel=3)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(find, [f"q{i % 6}" for i in range(24)]))
    assert all(len(answer) == 1 for answer in answers) and max(seen) == 3
    files = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    assert len(files) == 6 and all(json.loads(f.read_text()) for f in files)


@pytest.mark.parametrize("reply, outcome", [(GOOD, 1), (says("bad key", 401), "bad key")])
def test_equal_requests_under_way_are_sent_once_and_share_the_outcome(
    server, tmp_path, reply, outcome
):
    """A group's first searches are paid for once. A failure is shared, and not kept."""

    def slowly(handler):
        time.sleep(0.3)
        reply(handler)

    server.replies = [slowly]
    find = serper(tmp_path)

    def ask(_):
        try:
            return len(find("ada"))
        except ToolError as error:
            return "bad key" if "bad key" in str(error) else str(error)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [outcome] * 8
    assert len(server.requests) == 1
    assert ask(0) == outcome and len(server.requests) == (1 if outcome == 1 else 2)


# Pages of the open web ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "2130706433",
        "0x7f.1",
        "localhost",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "::7f00:1",
        "192.0.0.192",
        "168.63.129.16",
        "192.88.99.1",
        "fec0::1",
        "3fff::1",
        "5f00::1",
    ],
)
def test_addresses_that_are_not_public_are_refused(host):
    with pytest.raises(ToolError, match="not on the public internet"):
        exchange.public_addresses(host, 80)
    with pytest.raises(ToolError, match="not on the public internet"):
        exchange.page(f"http://[{host}]/" if ":" in host else f"http://{host}/", None, {}, 1)


def test_public_addresses_are_allowed_unless_one_of_several_is_not(monkeypatch):
    assert exchange.public_addresses("8.8.8.8", 80) == ["8.8.8.8"]
    assert exchange.public_addresses("2606:4700:4700::1111", 443) == ["2606:4700:4700::1111"]
    with pytest.raises(ToolError, match="ports 80 and 443"):
        exchange.public_addresses("8.8.8.8", 8000)
    both = [(0, 0, 0, "", ("8.8.8.8", 80)), (0, 0, 0, "", ("127.0.0.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(ToolError, match="public internet"):
        exchange.public_addresses("two.test", 80)


def test_a_second_dns_answer_cannot_move_the_connection(monkeypatch):
    names, dialled = [], []

    def rebinding(host, *_, **__):
        names.append(host)
        return [(0, 0, 0, "", ("8.8.8.8" if len(names) == 1 else "127.0.0.1", 80))]

    def connect(address, port, seconds, deadline):
        dialled.append((address, port))
        raise OSError("no network in a test")

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(exchange, "_connect", connect)
    with pytest.raises(OSError, match="no network"):
        exchange.page("http://rebind.test/", None, {}, 1)
    assert names == ["rebind.test"] and dialled == [("8.8.8.8", 80)]


def read(server, path, **options):
    return exchange.page(
        f"http://site.test:{server.server_port}{path}", None, {}, 5, resolve=only_site, **options
    )


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/secret",
        "http://localhost:{port}/secret",
        "//127.0.0.1:{port}/secret",
        "http://0x7f.1:{port}/secret",
        "http://[::ffff:127.0.0.1]:{port}/secret",
        "file:///etc/passwd",
        "ftp://site.test:{port}/secret",
        "http://site.test:{port}@127.0.0.1:{port}/secret",
    ],
)
def test_a_redirect_to_a_private_address_is_refused_before_it_is_followed(server, tmp_path, target):
    target = target.format(port=server.server_port)
    secret = says("the secret", kind="text/plain")
    server.replies = [routes({"/": says("", 302, {"Location": target}), "/secret": secret})]
    with pytest.raises((ToolError, OSError)):
        read(server, "/")
    assert [path for _, path, _, _ in server.requests] == ["/"]


def test_ordinary_redirects_are_followed_but_not_for_ever(server):
    server.replies = [
        routes(
            {
                "/": says("", 301, {"Location": "b c?q=é"}),
                "/b%20c?q=%C3%A9": says("", 307, {"Location": "/end"}),
                "/end": says("here", kind="text/plain"),
                "/loop": says("", 302, {"Location": "/loop"}),
            }
        )
    ]
    assert read(server, "/")[0] == b"here"
    host = {name.lower(): value for name, value in server.requests[-1][2].items()}["host"]
    assert host == f"site.test:{server.server_port}"
    with pytest.raises(ToolError, match="without end"):
        read(server, "/loop")
    assert len(server.requests) == 3 + 6


def test_a_page_of_5_mb_is_cut_not_refused(server, tmp_path):
    server.replies = [says("<p>" + "fact " * 1_000_000, kind="text/html")]
    raw, headers = read(server, "/")
    assert len(raw) == 2 << 20


@pytest.mark.parametrize(
    "beginning", [b"", b"HTTP/1.1 200 OK\r\nX-Header: ", b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_a_dripping_page_is_not_waited_for(server, beginning):
    server.replies = [drips(beginning)]
    start = time.monotonic()
    with pytest.raises((OSError, ToolError, http.client.HTTPException)):
        exchange.page(f"http://site.test:{server.server_port}/", None, {}, 0.4, resolve=only_site)
    assert time.monotonic() - start < 4


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificate with openssl")
def test_a_page_over_tls_is_checked_by_its_name(server, tmp_path, monkeypatch):
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=site.test",
            "-addext",
            "subjectAltName=DNS:site.test",
            "-keyout",
            key,
            "-out",
            cert,
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.replies = [says("hello", kind="text/plain")]
    monkeypatch.setattr(exchange, "tls", lambda: ssl.create_default_context(cafile=cert))
    url = f"https://{{}}:{server.server_port}/"
    assert exchange.page(url.format("site.test"), None, {}, 5, resolve=only_site)[0] == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        exchange.page(url.format("other.test"), None, {}, 5, resolve=lambda *_: ["127.0.0.1"])
