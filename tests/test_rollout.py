"""The episode with scripted roles: every way it can go, and what is written down."""

import functools
import itertools
import math
import re
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy
import pytest
import torch
import torch.distributed as dist
from helpers.launch import launch
from helpers.samples import text_of
from helpers.script import Script

import mars
import processes
import rollout
from config import UserError
from driver import Driver
from plumbing.logbook import record, unpack_ids
from plumbing.sharing import play_shared
from rollout import play_batch
from tasks.grading import grader
from tasks.questions import Question
from tools import Document, Tool, ToolError
from toy import language

FORMAT = language.ToyFormat(language.make_tokenizer())
RESP = FORMAT.control["<resp>"]
QUESTION = Question("q1", "when was ada baker born ?", ("1968",), "toy")
PAGES = [
    Document("d1", "unsaid", "", "ada baker born 1968 . the weather was mild that week ."),
    Document("d2", "", "", "bob cohen wrote about ada baker ."),
    Document("d3", "", "", "see also the list of records ."),
]
CALL = "<call> search ada baker <purpose> birth of ada baker <eot>"
ANSWER = "<answer> 1968 <eot>"
text = functools.partial(text_of, FORMAT)


def play(system2, *, search=lambda query: PAGES, grade=None, attempt=0, **options):
    """One scripted episode: (trajectory, what was asked as (role, text given, limit, seed)).

    system2: its texts, or one that it says at every step, until an answer is demanded.
    """
    left = list(system2) if isinstance(system2, list) else None

    def say(tokens, seed):
        if tokens[0] == FORMAT.control["<s1>"]:
            return "ada baker born 1968 . <eot>"
        if left is None:
            return "1968 <eot>" if tokens[-1] == FORMAT.control["<answer>"] else system2
        return left.pop(0)

    script = Script(FORMAT, say)
    config = mars.MarsConfig(**options)
    tools = {"search": search, "python": lambda code: [Document("python", "", "", "12\n")]}
    drawn = {"temperature": 0.7, "top_p": 0.9}
    trajectory = script.play(mars.METHOD, config, QUESTION, tools, grade, attempt, **drawn)
    assert script.options == drawn | {"stop_ids": FORMAT.stop_ids}
    asked = []
    for tokens, limit, seed in script.asked:
        role = "sys1" if tokens[0] == FORMAT.control["<s1>"] else "sys2"
        asked.append((role, FORMAT.text(tokens), limit, seed))
    return trajectory, asked


def test_call_distil_answer():
    """What is stored of a token is what the sampler said of it."""
    trajectory, asked = play([CALL, ANSWER])
    assert (trajectory.answer, trajectory.ended, trajectory.reward) == ("1968", "answer", 1.0)
    sample = trajectory.contexts[0].sample
    assert text(sample, True) == f"{CALL} <answer> 1968 <eot>"
    notes = " ".join(["ada baker born 1968 ."] * len(trajectory.turns[0].readers))
    assert text(sample, False) == f"<s2> when was ada baker born ? <eot> <resp> {notes} <eot>"
    stored = [logprob for logprob, own in zip(sample.logprobs, sample.mask) if own]
    assert stored == [-(i + 1) / 10 for turn in trajectory.turns for i in range(len(turn.sampled))]
    for sample in trajectory.samples():
        assert len(sample.tokens) == len(sample.mask) == len(sample.logprobs)
        assert sample.reward == 1.0
        assert [logprob != 0 for logprob in sample.logprobs] == sample.mask


def test_a_graders_number_from_0_to_1_is_a_float_and_anything_else_is_refused():
    for one in (True, numpy.float32(1), torch.tensor([1])):
        trajectory, _ = play([CALL, ANSWER], grade=Mock(return_value=one))
        assert type(trajectory.reward) is float and trajectory.reward == 1.0
    for no_number in (math.nan, torch.ones(2), "much", 10**400, 2, -1):
        with pytest.raises(UserError, match="the grader returned"):
            play([CALL, ANSWER], grade=Mock(return_value=no_number))


def test_a_step_that_ends_otherwise_gets_the_templates_end_of_turn(monkeypatch):
    """Its own last token stays."""
    fresh = language.ToyFormat(FORMAT.tokenizer)
    fresh.stop_ids = (fresh.eot, RESP)
    monkeypatch.setitem(globals(), "FORMAT", fresh)
    trajectory, _ = play([CALL.replace("<eot>", "<resp>"), ANSWER])
    assert "ada baker <resp> <eot> <resp> " in FORMAT.text(trajectory.contexts[0].sample.tokens)


def test_system1_sees_packed_documents_and_the_purpose_and_is_trained_on_its_note_only():
    trajectory, asked = play([CALL, ANSWER], sys1_prompt=30)
    readers = trajectory.turns[0].readers
    assert sorted(i for reader in readers for i in reader.chunk.documents) == [0, 1, 2]
    assert 1 < len(readers) <= 3
    for reader in readers:
        chunk = reader.chunk
        frame = FORMAT.prompt("sys1", chunk=[], purpose="birth of ada baker", question="")
        assert chunk.tokens <= chunk.capacity == 30 - len(frame)
        documents = " ".join(f"<doc> {PAGES[i].text}" for i in chunk.documents)
        assert text(reader.sample, False) == f"<s1> {documents} <purpose> birth of ada baker <eot>"
        assert text(reader.sample, True) == "ada baker born 1968 . <eot>"


def test_documents_are_encoded_once_for_all_attempts_and_beside_the_decoding(monkeypatch):
    fresh = language.ToyFormat(FORMAT.tokenizer)
    encode = fresh.encode
    threads = []

    def encoding(text):
        if text == PAGES[0].text:
            threads.append(threading.current_thread())
        return encode(text)

    fresh.encode = encoding
    monkeypatch.setitem(globals(), "FORMAT", fresh)
    first, _ = play([CALL, ANSWER])
    second, _ = play([CALL, ANSWER], attempt=1)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    assert first.turns[0].lengths == second.turns[0].lengths == [13, 8, 8]


def test_a_long_document_is_cut_into_a_chunk_of_its_own():
    long = [Document("long", "", "", "ada " * 200), PAGES[2]]
    trajectory, _ = play([CALL, ANSWER], search=lambda query: long, sys1_prompt=30)
    cut, other = (reader.chunk for reader in trajectory.turns[0].readers)
    assert cut.documents == [0] and cut.truncated and cut.tokens == cut.capacity
    assert other.documents == [1] and not other.truncated


MALFORMED = [
    ("when was <eot>", "starts with"),
    (CALL.replace("<eot>", "of ada") * 3, "cut"),
    # It would leave no token for a document.
    (CALL.replace("birth of ada baker", "birth of ada baker " * 5), "purpose is too long"),
]


@pytest.mark.parametrize("step, why", MALFORMED)
def test_a_malformed_step_is_corrected_and_counted(step, why):
    """Where a step was cut its end is given by us, so it carries no loss."""
    search = Mock()
    trajectory, asked = play([step, ANSWER], search=search, step_tokens=40, sys1_prompt=20)
    turn = trajectory.turns[0]
    assert turn.problem.startswith("malformed") and why in turn.problem
    assert "error" in asked[1][1] and trajectory.reward == 1.0 and not search.called
    assert asked[1][1].startswith("<eot>") == (why == "cut")
    assert text(trajectory.contexts[0].sample, True).count("<eot>") == 1 + (why != "cut")


def test_a_tool_that_fails_is_told_and_never_looks_like_an_empty_result():
    broken = Mock(side_effect=ToolError("the service is down"))
    for search, problem, told in (
        (broken, "tool failed: the service is down", "error"),
        (lambda query: [], "no results", "none ."),
    ):
        trajectory, asked = play([CALL, ANSWER], search=search)
        assert trajectory.turns[0].problem == problem
        assert asked[1][1] == f"<resp> {told} <eot>"
        assert trajectory.samples("sys1") == []
    # A tool of one's own may raise anything; `play` sees that every context was closed.
    with pytest.raises(RuntimeError, match="a bug"):
        play([CALL], search=Mock(side_effect=RuntimeError("a bug")))


def test_a_call_that_is_given_up_took_as_long_as_it_was_waited_for():
    ended = threading.Event()
    trajectory, _ = play([CALL, ANSWER], search=lambda query: ended.wait(60), tool_seconds=0.1)
    ended.set()
    for thread in threading.enumerate():  # the call returns now, and changes nothing
        if "(work)" in thread.name:
            thread.join(10)
    assert trajectory.turns[0].seconds == 0.1 and "no answer" in trajectory.turns[0].problem


def test_the_last_turn_must_answer():
    trajectory, asked = play([CALL, CALL, "1968 <eot>"], max_turns=3)
    assert asked[-1][1].endswith("<eot> <answer>")
    assert (trajectory.ended, trajectory.reward) == ("answer on demand", 1.0)
    silent, _ = play([CALL, CALL, CALL], max_turns=3)
    assert (silent.ended, silent.answer, silent.reward) == ("no answer", None, 0.0)


@pytest.mark.parametrize("context", [36, 37, 38, 40, 43, 47, 52, 58, 65, 73, 82, 99])
@pytest.mark.parametrize("step", [CALL, "when was <eot>", CALL.replace("<eot>", "ada") * 3])
def test_a_full_context_ends_in_a_demand_that_always_fits(context, step):
    """Calls, malformed and cut steps without end, at any size: an answer is always reached."""
    trajectory, asked = play(step, sys2_context=context, max_turns=50)
    assert len(trajectory.contexts[0].sample.tokens) <= context
    assert (trajectory.ended, trajectory.reward) == ("answer on demand", 1.0)
    assert asked[-1][2] >= mars.MarsConfig().answer_tokens, "what is kept for the answer is left"


def test_arms():
    """Unpacked, without purposes, and without System 1: then System 2 reads within a budget."""
    trajectory, _ = play([CALL, ANSWER], packing=False)
    assert [reader.chunk.documents for reader in trajectory.turns[0].readers] == [[0], [1], [2]]
    _, asked = play([CALL, ANSWER], purpose=False)
    assert all("birth" not in said for role, said, *_ in asked if role == "sys1")
    trajectory, asked = play([CALL, ANSWER], system1="none", max_turns=13)
    assert trajectory.samples("sys1") == [] and all(role == "sys2" for role, *_ in asked)
    parts = ["<doc> ada baker born", "<doc> bob cohen wrote", "<doc> see also the"]
    assert asked[1][1] == f"<resp> {' '.join(parts)} <eot>", "160 tokens for 13 turns of 3"


def test_python_output_reaches_system2_as_it_is_unless_it_is_distilled():
    call = "<call> python 1980 - 1968 <eot>"
    direct, asked = play([call, "<answer> 12 <eot>"])
    assert asked[1][1] == "<resp> 12 <eot>" and direct.samples("sys1") == []
    distilled, asked = play([call, "<answer> 12 <eot>"], tools="search,scholar,python")
    assert len(distilled.samples("sys1")) == 1


def test_draws_are_named_and_all_different():
    _, asked = play([CALL, CALL, ANSWER])
    seeds = [seed for *_, seed in asked]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [seed for *_, seed in play([CALL, CALL, ANSWER])[1]]
    for other in ({"seed": 1}, {"attempt": 1}):
        _, asked = play([CALL, CALL, ANSWER], **other)
        assert set(seeds).isdisjoint(seed for *_, seed in asked)
    _, asked = play([CALL, ANSWER], packing=False)  # three chunks of one call
    seeds = [seed for *_, seed in asked]
    assert len(seeds) == 5 and len(set(seeds)) == 5


def test_record_holds_the_whole_trajectory():
    trajectory, _ = play([CALL, ANSWER])
    sample = trajectory.turns[0].readers[0].sample
    sample.loss_weight, sample.advantage = 2, 0.5
    line = record(trajectory, FORMAT, 3, "train")
    said = " ".join(segment["text"] for segment in line["segments"])
    assert said == FORMAT.text(trajectory.contexts[0].sample.tokens)
    turn = line["turns"][0]
    for context, kept in zip(trajectory.contexts, [line, *turn["chunks"]], strict=True):
        pieces = [unpack_ids(piece) for piece in kept["ids"]]
        assert [token for piece in pieces for token in piece] == context.sample.tokens
        masks = [[bool(number % 2)] * len(piece) for number, piece in enumerate(pieces)]
        assert sum(masks, []) == context.sample.mask
    assert list(turn["call"].values()) == ["search", "ada baker", "birth of ada baker"]
    assert [document["id"] for document in turn["documents"]] == ["d1", "d2", "d3"]
    assert turn["chunks"][0]["note"] == "ada baker born 1968 . <eot>"
    assert turn["chunks"][0]["drawn"] == 2 and turn["chunks"][0]["advantage"] == 0.5


def stage(say, search=lambda query: PAGES, **place):
    """A run whose sampler is a script, and the script."""
    script = Script(FORMAT, say)
    run = SimpleNamespace(
        driver=Driver([script], deterministic=False),
        samplers={"sys1": script, "sys2": script},
        chat=FORMAT,
        grade=grader("em"),
        sampler=SimpleNamespace(pages=SimpleNamespace(count=1, size=16)),  # room for one unit
        config=mars.MarsConfig(),
        method=mars.METHOD,
        tools=[Tool("search", "query", "", search)],
        **place,
    )
    return run, script


def play_on_ranks(broken: bool) -> None:
    """What each of three ranks does: the first has no question and helps the others, or fails."""
    rank = dist.get_rank()

    def say(tokens, seed):
        if tokens[0] == FORMAT.control["<s1>"]:
            return "ada baker born 1968 . <eot>"
        if RESP not in tokens:
            return CALL
        time.sleep(0.1 * rank)
        return ANSWER if seed % 2 else "<answer> 1970 <eot>"

    def search(query):
        if broken and rank == 0:
            raise UserError("no money left")
        return PAGES

    def outcomes(trajectories):
        for one in trajectories:
            assert one.turns[0].readers[0] is one.contexts[1] and one.turns[0].documents == PAGES
        return [
            (one.question, one.attempt, one.answer, one.reward, one.samples())
            for one in trajectories
        ]

    run, script = stage(say, search, rank=rank, ranks=3)
    second = Question("q2", "who wrote about ada baker ?", ("bob cohen",), "toy")
    shares = [[], [(0, QUESTION)], [(1, second)]]
    for step in range(2):  # the second batch has counters of its own
        script.asked.clear()
        dist.barrier()
        got = outcomes(play_shared(run, shares, 6, run.tools, step=step))
        assert rank or script.asked, "the rank without questions has played some attempts"
        assert got == outcomes(play_batch(run, shares[rank], 6, run.tools, step=step))
    parts = [[rank], [rank], [rank]]
    parts[rank] = [print, lambda: "what stays is not pickled"]
    assert processes.deliver(parts)[2:] == [other for other in range(3) if other != rank]


@pytest.mark.parametrize("broken, code", [(False, 0), (True, 1)])
def test_ranks_that_are_done_play_others_attempts_and_change_no_draw(tmp_path, broken, code):
    """An error on one of them ends all."""
    assert launch(play_on_ranks, broken, log=tmp_path / "log", world=3) == code


@pytest.mark.parametrize("rank, terminal", [(0, False), (0, True), (1, False)])
def test_a_line_a_minute_where_no_bar_is_seen(monkeypatch, capsys, rank, terminal):
    """Half a minute passes between any two looks at the clock."""
    clock = Mock(monotonic=itertools.count(0, 30).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(rollout, "time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(rollout, "tqdm", MagicMock())
    broken = Mock(side_effect=ToolError("the service is down"))
    run, _ = stage(lambda tokens, seed: ANSWER if RESP in tokens else CALL, broken, rank=rank)
    play_batch(run, [(0, QUESTION)], 3, run.tools, step=0)
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) == (rank == 0 and not terminal)
    assert len(lines) <= clock.monotonic() // 60
    if lines:
        assert re.fullmatch("rollouts: . of 3 attempts, .. tokens, 3 calls, 3 failed", lines[-1])
