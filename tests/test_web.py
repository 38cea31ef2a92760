"""The client of services against loopback servers that misbehave."""

import contextlib
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import ECHO, GOOD, KEY, ROW, cut_chunks, drops, hangs, says, serper

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
        speaks(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n"),
        speaks(OK + b"Content-Length: -1\r\n\r\nabc"),
        speaks(OK + b"X: " + b"y" * 200_000 + b"\r\n\r\n"),
        speaks(b"SSH-2.0-x\r\n"),
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


@pytest.mark.parametrize("status", [400, 403, 404, 302])
@pytest.mark.parametrize("before", [0, 170, 180, 190, 990])
def test_a_refusal_is_final_and_shows_no_part_of_the_key(server, tmp_path, waits, status, before):
    said = f"no credit {'x' * before}{KEY}"
    server.replies = [says(said, status, {"Location": f"{server.url}/elsewhere"})]
    with pytest.raises(ToolError, match=f"HTTP {status} no credit") as caught:
        serper(tmp_path)("ada")
    check_message(str(caught.value))
    assert KEY[:6] not in str(caught.value)
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


@given(st.text(max_size=40) | st.sampled_from(["9" * 5000, "٣", "-5", "Wed, 21 Oct 2026"]))
def test_retry_after_is_always_a_wait_that_can_be_waited(header):
    assert 0 <= web.retry_after({"Retry-After": header}) <= web.LONGEST_WAIT
    assert web.retry_after({}) == 0


def test_a_silent_service_times_out(server, tmp_path, waits):
    server.replies = [hangs]
    with pytest.raises(ToolError, match="timed out, 2 tries"):
        serper(tmp_path, timeout=1.0, tries=2)("ada")
    assert len(server.requests) == 2


def test_no_service_at_all_is_a_failure(tmp_path, monkeypatch, waits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MARS_RETRIEVER_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ToolError, match="refused, 2 tries"):
            search.make("retriever", cache=None, tries=2)("ada")


@pytest.mark.parametrize("url", ["http://user:pw@host", "host", "http://", "ftp://h", "http://h?q"])
def test_base_urls_with_passwords_and_other_nonsense_are_refused(url):
    with pytest.raises(UserError, match="MARS_X_URL") as caught:
        web.check_base_url("MARS_X_URL", url)
    assert "pw" not in str(caught.value)
    for right in ("https://h:8000/v1", "http://[::1]:80", "http://h"):
        assert web.check_base_url("x", f" {right}/") == right


# The cache, and equal requests -------------------------------------------------------------------


def kept(tmp_path):
    return [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_good_answers_are_kept_without_the_key(server, tmp_path):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    assert serper(tmp_path)("ada") == first and len(server.requests) == 1
    (file,) = kept(tmp_path)
    request = json.dumps([f"{server.url}/search", {"num": 5, "q": "ada"}])
    assert file.name == hashlib.sha256(request.encode()).hexdigest()
    assert KEY not in file.read_text()


@pytest.mark.parametrize("damaged", ['{"organ', "{}", "5", ""])
def test_a_kept_answer_of_another_shape_is_asked_for_again(server, tmp_path, damaged):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    (file,) = kept(tmp_path)
    file.write_text(damaged)
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
    assert kept(tmp_path) == []


def test_equal_requests_are_sent_once_and_others_side_by_side(server, tmp_path, monkeypatch):
    """A group's first searches are paid for once."""
    monkeypatch.setattr(web, "AT_ONCE", 3)
    under_way, seen, lock = [], [], threading.Lock()

    def counted(handler):
        with lock:
            under_way.append(handler)
            seen.append(len(under_way))
        threading.Event().wait(0.02)
        with lock:
            under_way.remove(handler)  # before the answer goes out, which frees the connection
        GOOD(handler)

    server.replies = [counted]
    find = serper(tmp_path)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(find, [f"q{i % 6}" for i in range(24)]))
    assert all(len(answer) == 1 for answer in answers) and 1 < max(seen) <= 3
    assert len(server.requests) == len(kept(tmp_path)) == 6


def test_equal_requests_share_a_failure_too(server, tmp_path, waits):
    def slowly_refused(handler):
        threading.Event().wait(0.2)
        says("no", 404)(handler)

    server.replies = [slowly_refused]
    find = serper(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(find, "ada") for _ in range(4)]
    assert all(isinstance(one.exception(), ToolError) for one in made)
    assert len(server.requests) == 1


def test_an_answer_without_an_end_is_a_failure(server, tmp_path, waits, monkeypatch):
    monkeypatch.setattr(web, "ANSWER_BYTES", 100)
    server.replies = [says("x" * 1000)]
    with pytest.raises(ToolError, match="too long"):
        serper(tmp_path)("ada")


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


def test_a_run_without_services_needs_no_http_library():
    """Older hubs bring another one, so httpx2 is imported where somebody is asked."""
    sources = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]
    at_the_top = re.compile("^(import|from) httpx2", re.MULTILINE)
    assert not [path.name for path in sources if at_the_top.search(path.read_text())]
