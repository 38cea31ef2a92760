"""The client of services against loopback servers that misbehave."""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import ECHO, GOOD, KEY, drops, hangs, says, serper

from config import UserError
from plumbing import models
from tasks.questions import load_set
from tools import ToolError, web


@contextlib.contextmanager
def fails(match):
    """A ToolError is raised, whose message can be shown."""
    with pytest.raises(ToolError, match=match) as caught:
        yield caught
    said = str(caught.value)
    assert len(said) <= web.LONGEST_MESSAGE and said.isprintable() and KEY[:6] not in said


BAD = [drops, says("", 408), says("oops", 500), says('{"organic": []}', promise=99)]
BAD += map(says, ["[" * 100_000, {}, {"organic": [5]}, {"organic": None}])
BAD += [says({**ECHO, "message": "No credits"}), says({**ECHO, "error": "Query too long"})]


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


REFUSALS = [(400, 0, str.swapcase), (302, 137, lambda key: key.replace("/", "\\/"))]
REFUSALS += [(403, 137, json.dumps)]  # at the end of what is shown


@pytest.mark.parametrize("status, before, write", REFUSALS)
def test_a_refusal_is_final_and_shows_no_part_of_the_key_however_a_service_writes_it(
    server, tmp_path, waits, monkeypatch, status, before, write
):
    key = 'AbC/12"34\\xyz'
    monkeypatch.setenv("SERPER_API_KEY", key)
    said = f"no credit {'.' * before}{write(key)}\n{'x' * 999}"
    server.replies = [says(said, status, {"Location": f"{server.url}/elsewhere"})]
    with fails(f"HTTP {status} no credit") as caught:
        serper(tmp_path)("ada")
    shown = str(caught.value).lower()
    assert "abc" not in shown and "xyz" not in shown
    assert len(server.requests) == 1 and not waits  # nor was the key carried to another address


def test_pauses_grow_and_jitter_and_last_as_long_as_asked_but_not_for_ever(server, tmp_path, waits):
    for seconds, read in {"86400": web.LONGEST_WAIT, "9" * 5000: web.LONGEST_WAIT, "٣": 0}.items():
        assert web.retry_after({"Retry-After": seconds}) == read
    for seconds, read in {20: 20, -20: 0, 9999: web.LONGEST_WAIT}.items():
        then = datetime.now(UTC) + timedelta(seconds=seconds)
        for written in ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT"):
            asked = web.retry_after({"Retry-After": then.strftime(written)})
            assert asked == pytest.approx(read, abs=5)
    server.replies = [says("", 500), says("", 500), says("", 429, {"Retry-After": "20"}), GOOD]
    serper(tmp_path)("ada")
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2 and waits[0] != waits[1] / 2
    assert waits[2:] == [20]
    waits.clear()
    server.replies = [says("", 429)]
    with fails(r"HTTP 429.*, \d+ tries"):  # more than two, for a 429 uses up none
        serper(tmp_path, tries=2)("bob")
    assert web.PATIENCE - web.LONGEST_WAIT < sum(waits) <= web.PATIENCE
    server.replies = [GOOD]
    assert len(serper(tmp_path)("bob")) == 1, "a refusal is not kept"


def test_refusals_are_told_once_a_minute_and_are_no_calls(server, tmp_path, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(web, "METER", web.Meter())
    monkeypatch.setattr(web.time, "sleep", slept.append)
    monkeypatch.setattr(web.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(web.random, "uniform", lambda low, high: low)
    server.replies = [says("", 429, {"Retry-After": "20"})]
    with fails("HTTP 429"):
        serper(tmp_path)("ada")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "after 80 and 150 of 180 seconds"
    assert all(line.startswith(f"{server.url} has answered 429") for line in lines)
    server.replies = [says("", 500), GOOD]
    assert len(serper(tmp_path)("bob")) == 1
    assert web.METER.sent == {server.url: 1}


def test_a_call_beyond_the_cap_is_not_sent(server, tmp_path, waits, monkeypatch):
    """A further try is a further call; what the cache knows is none."""
    monkeypatch.setattr(web, "METER", web.Meter())
    web.METER.left = 2
    server.replies = [says("", 500), GOOD]
    find = serper(tmp_path)
    assert len(find("ada")) == len(find("ada")) == 1
    with pytest.raises(UserError, match="--max_calls is reached.*calls sent: 2.*--resume"):
        find("bob")
    assert len(server.requests) == 2


def test_one_request_shows_that_there_is_no_hub(server, tmp_path, monkeypatch):
    """huggingface_hub makes six, for each model and each set of questions."""
    hub = {"HF_HUB_OFFLINE": False, "ENDPOINT": server.url, "HF_HUB_CACHE": tmp_path}
    for name, value in hub.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    server.replies = [drops]
    for find in (lambda: models.find("a/model", tmp_path), lambda: load_set("hub:a/set/b.jsonl")):
        with pytest.raises(UserError, match=f"{server.url} cannot be reached"):
            find()
    assert len(server.requests) == 2
    kept = tmp_path / "models--a--model"
    for file, text in {"refs/main": "1", "snapshots/1/config.json": "{}"}.items():
        (kept / file).parent.mkdir(parents=True)
        (kept / file).write_text(text)
    assert models.find("a/model", tmp_path) == "a/model", "it is in the cache"
    server.replies = [says("", 404)]
    assert models.find("b/model", tmp_path) == "b/model", "there is a hub"


@given(st.text(max_size=40) | st.from_regex(r"\w{3}, \d+ Oct \d+ \d+:\d+:\d+ .{0,5}"))
def test_whatever_stands_in_retry_after_asks_for_a_bearable_pause(asked):
    assert 0 <= web.retry_after({"Retry-After": asked}) <= web.LONGEST_WAIT


def drips(handler):
    """One blank after another, each in good time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 80\r\n\r\n")
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


@pytest.mark.parametrize(
    "variable, value",
    [
        ("MARS_SERPER_URL", "http://user:pw@host"),
        ("SERPER_API_KEY", "two pw"),
        ("ALL_PROXY", "socks4://user:pw@host:1"),
        ("SSL_CERT_FILE", "/pw/is/gone"),
    ],
)
def test_an_environment_of_no_use_is_one_sentence_that_does_not_show_it(
    server, tmp_path, monkeypatch, variable, value
):
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=variable) as caught:
        serper(tmp_path)
    assert "pw" not in str(caught.value)


def test_good_answers_are_kept_without_the_key(server, tmp_path):
    server.replies = [GOOD, says(ECHO)]
    first = serper(tmp_path)("ada")
    assert serper(tmp_path)("ada") == first and len(server.requests) == 1
    assert serper(tmp_path)("  ") == [] and len(server.requests) == 1
    (file,) = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert KEY not in file.read_text()
    assert serper(tmp_path)("none") == serper(tmp_path)("none") == []  # kept like any answer
    assert len(server.requests) == 2


@pytest.mark.parametrize("outcome", [GOOD, says("no", 404)])
def test_equal_requests_share_one_outcome_and_others_go_side_by_side(server, tmp_path, outcome):
    """A group's first searches are paid for once."""
    started = threading.Barrier(12)
    beside = threading.Barrier(3)

    def slow(handler):
        beside.wait(60)
        time.sleep(1)  # so that the twin of a request comes before its answer
        outcome(handler)

    server.replies = [slow]
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
    assert len(server.requests) == 6


def test_threads_are_daemons_for_which_nobody_waits():
    assert web.in_threads(lambda _: threading.current_thread().daemon, [1, 2]) == [True, True]
