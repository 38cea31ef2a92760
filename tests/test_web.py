"""The client of services against loopback servers that misbehave."""

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from loopback import ECHO, GOOD, KEY, ROW, drops, hangs, says, serper

from config import UserError
from tools import ToolError, web

ROOT = Path(__file__).parent.parent


# Failures ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def fails(match):
    """A ToolError is raised, whose message can be shown."""
    with pytest.raises(ToolError, match=match) as caught:
        yield caught
    said = str(caught.value)
    assert len(said) <= web.LONGEST_MESSAGE and said.isprintable() and KEY[:6] not in said


def speaks(raw):
    """A reply of raw bytes, status line and all."""
    return lambda handler: handler.wfile.write(raw)


OK = b"HTTP/1.1 200 OK\r\n"


BAD = [
    says("", 408),
    says("oops", 500),
    drops,
    says('{"organic": []}', promise=99),
    says("<html>"),
    says("[" * 100_000),
    says({}),
    says({"organic": [5]}),
    says({"organic": None}),
    says({**ECHO, "message": "Not enough credits"}),
    says({**ECHO, "error": "Query too long"}),
    says({"organic": [ROW]}, headers={"Content-Encoding": "gzip"}),
    speaks(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n"),
    speaks(b"SSH-2.0-x\r\n"),
]


@pytest.mark.parametrize("bad", BAD)
def test_what_may_pass_is_tried_again_and_never_kept_or_taken_for_nothing_found(
    server, tmp_path, waits, bad
):
    server.replies = [bad]
    find = serper(tmp_path, tries=3)
    with fails("3 tries"):
        find("ada")
    assert len(server.requests) == 3 and len(waits) == 2
    server.replies = [bad] * 4 + [GOOD]
    assert len(find("ada")) == 1 and len(server.requests) == 5


@pytest.mark.parametrize("status, before", [(400, 0), (403, 137), (302, 990)])
def test_a_refusal_is_final_and_shows_no_part_of_the_key(server, tmp_path, waits, status, before):
    said = f"no credit {'x' * before}{KEY}"
    server.replies = [says(said, status, {"Location": f"{server.url}/elsewhere"})]
    with fails(f"HTTP {status} no credit"):
        serper(tmp_path)("ada")
    assert len(server.requests) == 1 and not waits  # nor was the key carried to another address


@pytest.mark.parametrize("write", [str.swapcase, json.dumps, lambda key: key.replace("/", "\\/")])
def test_a_key_is_hidden_however_a_service_writes_it(server, tmp_path, monkeypatch, write):
    key = 'AbC/12"34\\xyz'
    monkeypatch.setenv("SERPER_API_KEY", key)
    server.replies = [says(f"bad key {write(key)}", 403)]
    with fails("HTTP 403 bad key") as caught:
        serper(tmp_path)("ada")
    assert "xyz" not in str(caught.value).lower()


def test_pauses_grow_and_jitter_and_last_as_long_as_asked(server, tmp_path, waits):
    asked = {"20": 20, "86400": web.LONGEST_WAIT, "9" * 5000: web.LONGEST_WAIT}
    busy = [says("", 429, {"Retry-After": seconds}) for seconds in asked]
    server.replies = [says("", 500), says("", 500), *busy, GOOD]
    serper(tmp_path, tries=6)("ada")
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2 and waits[0] != waits[1] / 2
    assert waits[2:] == list(asked.values())
    for nonsense in ("", "٣", "²", "-5", "Wed, 21 Oct 2026"):
        assert web.retry_after({"Retry-After": nonsense}) == 0


def test_a_service_that_has_too_much_to_do_is_asked_for_longer(server, tmp_path, waits):
    busy = says("", 429)
    server.replies = [busy, busy, drops, busy, busy, busy, GOOD]
    assert serper(tmp_path, tries=2)("ada")
    assert len(waits) == 6 and 15 < max(waits) <= web.LONGEST_WAIT
    waits.clear()
    server.replies = [busy]
    with fails(r"HTTP 429.*, \d+ tries"):
        serper(tmp_path, tries=2)("bob")
    server.replies = [GOOD]
    assert len(serper(tmp_path, tries=2)("bob")) == 1, "a refusal is not kept"
    assert web.PATIENCE - web.LONGEST_WAIT < sum(waits) <= web.PATIENCE


def drips(handler):
    """One blank after another, each in good time."""
    handler.wfile.write(OK + b"Content-Length: 80\r\n\r\n")
    for _ in range(80):
        handler.server.released.wait(0.05)
        handler.wfile.write(b" ")


@pytest.mark.parametrize(
    "reply, why", [(hangs, "timed out"), (drips, "too long"), (says("x" * 10**6), "too long")]
)
def test_a_service_that_is_silent_slow_or_endless_fails(
    server, tmp_path, waits, monkeypatch, reply, why
):
    monkeypatch.setattr(web, "ANSWER_BYTES", 10**5)
    server.replies = [reply]
    with fails(f"{why}.*, 2 tries"):
        serper(tmp_path, timeout=1.0, tries=2)("ada")
    assert len(server.requests) == 2


@pytest.mark.parametrize("url", ["http://user:pw@host", "host", "http://", "ftp://h", "http://h?q"])
def test_base_urls_with_passwords_and_other_nonsense_are_refused(url):
    with pytest.raises(UserError, match="MARS_X_URL") as caught:
        web.check_base_url("MARS_X_URL", url)
    assert "pw" not in str(caught.value)
    assert web.check_base_url("x", " https://h:8000/v1/ ") == "https://h:8000/v1"


@pytest.mark.parametrize("proxy", ["socks4://user:pw@host:1", "http://user:pw@host:no"])
def test_a_proxy_that_is_of_no_use_is_one_sentence_without_its_password(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UserError, match="proxy in the environment") as caught:
        web.Client(None)
    assert "pw" not in str(caught.value)


# The cache, and equal requests -------------------------------------------------------------------


def kept(tmp_path):
    return [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_good_answers_are_kept_without_the_key(server, tmp_path):
    server.replies = [GOOD, says(ECHO)]
    first = serper(tmp_path)("ada")
    assert serper(tmp_path)("ada") == first and len(server.requests) == 1
    assert serper(tmp_path)("  ") == [] and len(server.requests) == 1
    (file,) = kept(tmp_path)
    request = json.dumps([f"{server.url}/search", {"num": 5, "q": "ada"}])
    assert file.name == hashlib.sha256(request.encode()).hexdigest()
    assert KEY not in file.read_text()
    assert serper(tmp_path)("none") == serper(tmp_path)("none") == []  # kept like any answer
    assert len(server.requests) == 2


@pytest.mark.parametrize("damaged", ['{"organ', "{}"])
def test_a_kept_answer_of_another_shape_is_asked_for_again(server, tmp_path, damaged):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    (file,) = kept(tmp_path)
    file.write_text(damaged)
    assert serper(tmp_path)("ada") == first and len(server.requests) == 2


def test_a_full_disk_does_not_take_the_answer_away(server, tmp_path, monkeypatch):
    monkeypatch.setattr(web.os, "replace", Mock(side_effect=OSError(28, "No space left")))
    server.replies = [GOOD]
    assert len(serper(tmp_path)("ada")) == 1
    assert kept(tmp_path) == []


@pytest.mark.parametrize("outcome", [GOOD, says("no", 404)])
def test_equal_requests_share_one_outcome_and_others_go_side_by_side(
    server, tmp_path, monkeypatch, outcome
):
    """A group's first searches are paid for once."""
    monkeypatch.setattr(web, "AT_ONCE", 3)
    under_way, seen, lock = [], [], threading.Lock()
    started = threading.Barrier(12)

    def counted(handler):
        with lock:
            under_way.append(handler)
            seen.append(len(under_way))
        threading.Event().wait(0.2)
        with lock:
            under_way.remove(handler)  # before the answer goes out, which frees the connection
        outcome(handler)

    server.replies = [counted]
    find = serper(tmp_path)

    def ask(query):
        started.wait()
        try:
            return len(find(query))
        except ToolError:
            return "failed"

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(ask, [f"q{i % 6}" for i in range(12)]))
    assert found == [1 if outcome is GOOD else "failed"] * 12
    assert 1 < max(seen) <= 3 and len(server.requests) == 6


# Threads -----------------------------------------------------------------------------------------


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
