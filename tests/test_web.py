"""The client of services against loopback servers that misbehave."""

import contextlib
import hashlib
import html
import json
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import ECHO, GOOD, KEY, ROW, cut_chunks, drips, drops, hangs, says, serper

from config import UserError
from tools import ToolError, search, web

ROOT = Path(__file__).parent.parent


def check_message(message):
    assert len(message) <= web.LONGEST_MESSAGE and message.isprintable()


# Failures ----------------------------------------------------------------------------------------


def speaks(raw):
    """A reply of raw bytes, status line and all."""

    def reply(handler):
        with contextlib.suppress(OSError):
            handler.wfile.write(raw)

    return reply


OK = b"HTTP/1.1 200 OK\r\n"


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
        says({**ECHO, "message": "Not enough credits"}),
        says({**ECHO, "error": "Query too long"}),
        says({"organic": [ROW]}, headers={"Content-Encoding": "gzip"}),
        speaks(b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n"),
        speaks(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n"),
        speaks(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n"),
        speaks(OK + b"Content-Length: -1\r\n\r\nabc"),
        speaks(OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n[] "),
        speaks(OK + b"Content-Length: 9" + b"9" * 5000 + b"\r\n\r\nabc"),
        speaks(OK + b"\r\n1" + b"0" * 5000),
        speaks(OK + b"X: " + b"y" * 200_000 + b"\r\n\r\n"),
        speaks(b"SSH-2.0-x\r\n"),
        speaks(b"\x00" * 100),
        speaks(b""),
    ],
)
def test_what_may_pass_is_tried_again_and_never_kept_or_taken_for_nothing_found(
    server, tmp_path, waits, bad
):
    server.replies = [bad]
    find = serper(tmp_path, tries=3)
    with pytest.raises(ToolError, match="3 tries") as caught:
        find("ada")
    check_message(str(caught.value))
    assert len(server.requests) == 3 and len(waits) == 2
    server.replies = [bad] * 4 + [GOOD]
    assert len(find("ada")) == 1 and len(server.requests) == 5


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 302])
def test_a_refusal_is_final_and_does_not_show_the_key(server, tmp_path, waits, status):
    server.replies = [says(f"no credit for {KEY}", status, {"Location": f"{server.url}/elsewhere"})]
    with pytest.raises(ToolError, match=f"HTTP {status} no credit for \\*\\*\\*") as caught:
        serper(tmp_path)("ada")
    check_message(str(caught.value))
    assert len(server.requests) == 1 and not waits  # nor was the key carried to another address


def test_pauses_grow_and_jitter_and_last_as_long_as_asked(server, tmp_path, waits):
    server.replies = [
        says("", 500),
        says("", 500),
        says("", 429, {"Retry-After": "20"}),
        says("", 429, {"Retry-After": "86400"}),
        GOOD,
    ]
    serper(tmp_path, tries=6, pause=1)("ada")
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2
    assert waits[2:] == [20, web.LONGEST_WAIT]
    server.replies = [says("", 500)]
    for _ in range(5):
        with pytest.raises(ToolError):
            serper(tmp_path, tries=2)("other")
    assert len(set(waits[4:])) == 5


@given(st.text(max_size=40))
def test_retry_after_is_always_a_wait_that_can_be_waited(header):
    assert 0 <= web.retry_after(header) <= web.LONGEST_WAIT
    assert web.retry_after("9" * 5000) == web.LONGEST_WAIT
    assert web.retry_after("٣") == web.retry_after(None) == web.retry_after("-5") == 0


@pytest.mark.parametrize("reply", [hangs, drips(OK + b"Content-Length: 999999\r\n\r\n")])
def test_a_silent_or_dripping_service_times_out(server, tmp_path, waits, reply):
    server.replies = [reply]
    with pytest.raises(ToolError, match="timed out, 2 tries"):
        serper(tmp_path, timeout=1.0, tries=2)("ada")
    assert len(server.requests) == 2


def test_no_service_at_all_is_a_failure(tmp_path, monkeypatch, waits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MARS_RETRIEVER_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ToolError, match="refused, 2 tries"):
            search.make("retriever", cache=None, tries=2)("ada")


def test_an_answer_without_end_is_cut(server):
    def reply(handler):
        with contextlib.suppress(OSError):
            handler.wfile.write(OK + b"\r\n")
            while True:
                handler.wfile.write(b"x" * 100_000)

    server.replies = [reply]
    raw, _ = web.service(server.url, None, {}, 600)
    assert len(raw) == web.ANSWER_BYTES


ANSWERS = [
    OK + b'Content-Type: application/json\r\n\r\n{"organic": [{"link": "a"}]}',
    OK + b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 5\r\n\r\nhello",
    OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{}a\r\n0\r\n\r\n",
    b"HTTP/1.1 429 Slow\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n\r\nslow",
    b"HTTP/1.1 302 Found\r\nLocation: http://site.test/a?b=c\r\n\r\n",
    b"HTTP/1.1 404 None\r\nContent-Length: 4\r\n\r\nnone",
]
PIECES = [b"\r\n", b"\0", b"\xff", b"-", b"9" * 30, b";", b"*", b"=", b" ", b"\xc3\xa9", b"HTTP"]


@pytest.mark.parametrize("quote", [True, False])
def test_mutated_answers_end_as_answers_or_tool_errors(server, waits, quote):
    rng = random.Random(0)
    client = web.Client(None, tries=1)
    for _ in range(150):
        raw = bytearray(rng.choice(ANSWERS))
        for _ in range(rng.randint(0, 4)):
            place = rng.randrange(len(raw) + 1)
            end = place + rng.choice([0, 0, 1, 5])
            raw[place:end] = rng.choice(PIECES)
        server.replies = [speaks(bytes(raw))]
        check = search.serper_documents if quote else None
        decode = search._decode_json if quote else search.jina_page
        try:
            client.call(server.url, decode, check=check, quote=quote)
        except ToolError as error:
            check_message(str(error))
            said = str(error).removeprefix(server.url)
            assert quote or not {"slow", "none", "hello", "site"} & set(said.split())


# Messages ----------------------------------------------------------------------------------------

HARD = "sk/a+b=C-9_&"


def json_escaped(text):
    return json.dumps(text).replace("/", r"\/").replace("+", r"\u002b").replace("=", r"\u003D")


SPELLINGS = [
    str,
    str.upper,
    json_escaped,
    lambda key: json.dumps(json_escaped(key)),
    lambda key: "".join(f"\\u{ord(c):04X}" for c in key),
    lambda key: "".join(f"\\x{ord(c):02x}" for c in key),
    lambda key: urllib.parse.quote(key, safe=""),
    lambda key: urllib.parse.quote(urllib.parse.quote(key, safe=""), safe=""),
    lambda key: "".join(f"%{ord(c):02x}" for c in key),
    html.escape,
    lambda key: html.escape(html.escape(key)),
    lambda key: "".join(f"&#{ord(c)};" for c in key),
    lambda key: "".join(f"&#x00{ord(c):X}" for c in key),
    lambda key: key.replace("/", "&sol;").replace("+", "&plus;").replace("=", "&equals;"),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_is_masked_in_every_spelling(server, waits, spelling):
    server.replies = [says(f"the key <{spelling(HARD)}> is bad", 401)]
    headers = {"Authorization": f"Bearer {HARD}"}
    with pytest.raises(ToolError) as caught:
        web.Client(None, tries=1).call(server.url, search._decode_json, headers=headers)
    said = str(caught.value).replace("&quot;", '"').replace('"', "").replace("\\", "")
    assert said.endswith("the key <***> is bad")


@given(st.text("ab\\%&#x0u;/25amp+", max_size=300), st.text("ab/+=&%", min_size=1, max_size=9))
def test_masking_takes_any_text(text, secret):
    masked = web.hide(f"{text}{secret}", [secret, f"Bearer {secret}", ""])
    assert secret.lower() not in masked.lower().replace("***", "\0")


@pytest.mark.parametrize("before", [0, 150, 180, 190, 199, 210, 65_520, 65_530])
def test_no_part_of_a_key_stands_in_a_message(server, waits, before):
    body = "x" * before if before < 1000 else " " * before
    server.replies = [says(f"{body}{KEY} is not valid", 401)]
    headers = {"Authorization": f"Bearer {KEY}"}
    with pytest.raises(ToolError) as caught:
        web.Client(None, tries=1).call(server.url, search._decode_json, headers=headers)
    check_message(str(caught.value))
    assert KEY[:6] not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://user:pw@host", "host", "http://", "ftp://h", "http://h:x", "http://h?q"]
)
def test_base_urls_with_passwords_and_other_nonsense_are_refused(url):
    with pytest.raises(UserError, match="MARS_X_URL") as caught:
        web.check_base_url("MARS_X_URL", url)
    assert "pw" not in str(caught.value)
    for right in ("https://h:8000/v1", "http://[::1]:80", "http://h"):
        assert web.check_base_url("x", f" {right}/") == right


# The cache, and equal requests -------------------------------------------------------------------


def test_good_answers_are_kept_without_the_key(server, tmp_path):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    assert serper(tmp_path)("ada") == first and len(server.requests) == 1
    (file,) = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    request = json.dumps([f"{server.url}/search", {"num": 5, "q": "ada"}])
    assert file.stem == hashlib.sha256(request.encode()).hexdigest()
    assert KEY not in file.read_text()


@pytest.mark.parametrize(
    "kept", ['{"answer": {"org', '{"answer": {}}', '{"answer": 5}', "{}", '{"answer": null}']
)
def test_a_kept_answer_of_another_shape_is_asked_for_again(server, tmp_path, kept):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text(kept)
    assert serper(tmp_path)("ada") == first and len(server.requests) == 2


def test_nothing_found_is_kept_like_any_answer(server, tmp_path):
    server.replies = [says(ECHO)]
    assert serper(tmp_path)("ada") == serper(tmp_path)("ada") == []
    assert serper(tmp_path)("  ") == [] and len(server.requests) == 1


def test_a_full_disk_does_not_take_the_answer_away(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(web.os, "replace", full)
    server.replies = [GOOD]
    assert len(serper(tmp_path)("ada")) == 1
    assert [f for f in (tmp_path / "cache").rglob("*") if f.is_file()] == []


@pytest.mark.parametrize("reply, outcome", [(GOOD, 1), (says("bad key", 401), "bad key")])
def test_equal_requests_under_way_are_sent_once_and_share_the_outcome(
    server, tmp_path, reply, outcome
):
    """A group's first searches are paid for once. A failure is shared, and not kept."""
    asked = threading.Semaphore(0)

    class UnderWay(dict):
        def setdefault(self, name, mine):
            outcome = super().setdefault(name, mine)
            asked.release()
            return outcome

    def once_all_have_asked(handler):
        for _ in range(8):
            asked.acquire()
        reply(handler)

    server.replies = [once_all_have_asked, says("sent twice", 500)]
    find = serper(tmp_path, tries=1)
    find.args[0].under_way = UnderWay()

    def ask(_):
        try:
            return len(find("ada"))
        except ToolError as error:
            return "bad key" if "bad key" in str(error) else str(error)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [outcome] * 8
    assert len(server.requests) == 1
    assert ask(0) == (1 if outcome == 1 else f"{server.url}: HTTP 500 sent twice, 1 tries")


def test_at_most_so_many_calls_at_once_and_threads_share_the_cache_unharmed(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr(web, "AT_ONCE", 3)
    under_way, seen, lock = [], [], threading.Lock()

    def counted(handler):
        with lock:
            under_way.append(handler)
            seen.append(len(under_way))
        threading.Event().wait(0.02)
        with lock:
            under_way.remove(handler)  # before the answer goes out, which frees the client's slot
        GOOD(handler)

    server.replies = [counted]
    find = serper(tmp_path)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(find, [f"q{i % 6}" for i in range(24)]))
    assert all(len(answer) == 1 for answer in answers) and max(seen) <= 3
    files = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    assert len(files) == 6 and all(json.loads(f.read_text()) for f in files)


# Threads, proxies, TLS ---------------------------------------------------------------------------


def test_ctrl_c_and_the_end_of_the_program_wait_for_nothing(tmp_path):
    code = """if True:
        import os, signal, threading, time
        from tools import web
        started = threading.Event()
        def hang(item):
            started.set()
            time.sleep(3600)
        def interrupt():
            started.wait()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            web.in_threads(hang, [1] * 5)
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "interrupted\n"


def test_no_thread_left_is_a_failure_of_the_call(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ToolError, match="no thread left"):
        web.in_threads(str, [1])


OPENSSL = """openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1
-subj /CN=localhost -addext subjectAltName=DNS:localhost"""


def test_a_service_over_tls_is_checked_by_its_name(server, tmp_path, monkeypatch, waits):
    if not shutil.which("openssl"):
        pytest.skip("makes its certificate with openssl")
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    command = [*OPENSSL.split(), "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.replies = [says({"a": 1})]
    client = web.Client(None, tries=1)
    url = f"https://localhost:{server.server_port}/"
    with pytest.raises(ToolError, match="CERTIFICATE_VERIFY_FAILED"):
        client.call(url, search._decode_json)
    trusting = ssl.create_default_context(cafile=cert)
    monkeypatch.setattr(web, "_tls", lambda: trusting)
    assert client.call(url, search._decode_json) == {"a": 1}


def test_a_run_without_services_needs_no_http_library():
    """Older hubs bring another one, so httpx2 is imported where somebody is asked."""
    sources = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]
    at_the_top = re.compile("^(import|from) httpx2", re.MULTILINE)
    assert not [path.name for path in sources if at_the_top.search(path.read_text())]
