"""Pictures of runs: hostile text stays text, damaged records are drawn as far as they go.

Run: pytest tests/test_view.py
"""

import copy
import html.parser
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import view
from config import UserError
from plumbing import curves as drawing
from plumbing import trajectories

REPOSITORY = Path(view.__file__).parent
HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=https://evil.example/x onerror=alert(1)>',
    "' onload='x",
    "<!--",
    "]]>",
    "\x00\x1b[31m",
    "\u202egnp.exe\u202c",
    "\ud800\udfff",
    "</pre></details></style>",
    "&lt;b&gt;",
    "\u200f\u0645\u0631\u062d\u0628\u0627",
    "a" * 400,
]
MARS_ROLES = {"sys2": "System 2", "sys1": "System 1"}


# ----------------------------------------------------------------------------- fakes


def fake_turn(text: str, **known) -> dict:
    turn = {"text": text, "call": None, "answer": None, "error": None}
    return turn | {"documents": [], "seconds_tool": 0.0, "chunks": []} | known


def fake_search(
    argument: str,
    purpose: str,
    fact: str,
    lengths: list[int],
    advantage: float,
    drawn: list[int],
) -> dict:
    """A search and its notes.

    The second and third document share a chunk; a fourth one is cut to fit its own.
    """
    titles = [argument, "bob stone", "a walk in " + argument, "long report"]
    documents = []
    for title, length in zip(titles, lengths, strict=False):
        documents.append(
            {
                "id": f"d{length}",
                "title": title,
                "url": f"toy://world/{title.replace(' ', '-')}",
                "tokens": length,
                "text": f"{fact} it was a quiet year . bob stone likes chess .",
            }
        )
    chunks = []
    bins = [[1, 2], [0], [3]][: len(lengths) - 1]
    for members, times in zip(bins, drawn, strict=False):
        read = "".join(documents[i]["text"] for i in members)
        chunks.append(
            {
                "documents": members,
                "tokens": min(64, sum(lengths[i] for i in members)),
                "capacity": 64,
                "truncated": lengths[members[0]] > 64,
                "prompt": read + purpose,
                "note": f"{fact} <eot>" if 0 in members else "none . <eot>",
                "note_tokens": 7,
                "advantage": advantage,
                "drawn": times,
            }
        )
    return fake_turn(
        f"<call> search {argument} <purpose> {purpose} <eot>",
        documents=documents,
        seconds_tool=0.004,
        call={"tool": "search", "argument": argument, "purpose": purpose},
        chunks=chunks,
    )


def fake_record(trajectory: int, reward: float | None, *, step=1, **known) -> dict:
    """A two-hop toy trajectory.

    A wrong one stumbles over a malformed call and a failing tool before it guesses.
    """
    rng = random.Random(f"{trajectory} {step}")
    question = "in which city does the employer of ada baker have its base ?"
    trained = reward is not None
    advantage = (reward - 0.375) / 0.484 if trained else 0.0
    draws = [[rng.choice([0, 0, 1, 1, 2]) * trained for _ in range(3)] for _ in range(2)]
    inner = advantage * 1.1
    lengths = [31, 38, rng.randrange(16, 26)]
    purpose = "employer of ada baker"
    turns = [
        fake_search("ada baker", purpose, "ada baker joined acro corp .", lengths, inner, draws[0])
    ]
    if reward == 0:
        call = {"tool": "scholar", "argument": "acro corp", "purpose": "base of acro corp"}
        turns.append(
            fake_turn(
                "<call> search acro corp <eot>",
                error="malformed: a call needs <purpose> and what for",
            )
        )
        turns.append(
            fake_turn(
                "<call> scholar acro corp <purpose> base of acro corp <eot>",
                call=call,
                error="tool failed: scholar answered 503 three times",
            )
        )
    else:
        lengths = [29, 33, 25, 180]
        purpose = "base of acro corp"
        fact = "acro corp sits in oslo ."
        turns.append(fake_search("acro corp", purpose, fact, lengths, inner, draws[1]))
    answer = "oslo"
    if reward == 0:
        answer = rng.choice(["bergen", "turin", "acro corp"])
    turns.append(fake_turn(f"<answer> {answer} <eot>", answer=answer))

    segments = [{"text": question + " <eot>", "trained": False}]
    for turn in turns:
        notes = " ".join(chunk["note"][:-6] for chunk in turn["chunks"])
        segments.append({"text": turn["text"], "trained": True})
        segments.append({"text": (turn["error"] or notes) + " <eot>", "trained": False})
    record = {
        "step": step,
        "split": "train",
        "question_id": "train-17",
        "question": question,
        "gold": ["oslo"],
        "trajectory": trajectory,
        "answer": answer,
        "ended": "answer",
        "reward": reward,
        "advantage": advantage,
        "trained": trained,
        "segments": segments[:-1],
        "turns": turns,
    }
    return record | known


def fake_team_record() -> dict:
    """Of a method with a planner, a worker that calls tools itself, and a verifier."""
    found = fake_search(
        "acro corp", "its base", "acro corp sits in oslo .", [29, 33, 20], 0.5, [1, 1]
    )
    for chunk in found["chunks"]:
        chunk["role"] = "reader"
    worker = {
        "role": "worker",
        "prompt": "find the base of acro corp",
        "note": "browse acro corp acro corp sits in oslo it is in oslo",
        "advantage": 0.9,
        "drawn": 1,
        "segments": [
            {"text": "find the base of acro corp", "trained": False},
            {"text": found["text"], "trained": True},
            {"text": "acro corp sits in oslo", "trained": False},
            {"text": "it is in oslo", "trained": True},
        ],
        "turns": [found, fake_turn("it is in oslo")],
    }
    call = {"tool": "browse", "argument": "base of acro corp", "purpose": ""}
    verifier = {
        "role": "verifier",
        "prompt": "is oslo right ?",
        "note": "right <eot>",
        "advantage": -0.4,
        "drawn": 1,
    }
    return {
        "question_id": "q",
        "question": "where is acro corp based ?",
        "trajectory": 0,
        "role": "planner",
        "answer": "oslo",
        "reward": 1.0,
        "advantage": 1.0,
        "trained": True,
        "turns": [
            fake_turn("browse: base of acro corp", call=call, chunks=[worker]),
            fake_turn("oslo", answer="oslo", chunks=[verifier]),
        ],
    }


def fake_metrics(steps: int) -> list[dict]:
    rng = random.Random(3)
    rows = []
    for step in range(1, steps + 1):
        done = 1 - 2 ** (-step / 15)
        row = {
            "step": step,
            "reward": 0.2 + 0.7 * done + rng.gauss(0, 0.02),
            "clip_share": 0.0,
            "calls_per_question": 1.1 + 0.6 * done + rng.gauss(0, 0.03),
            "mismatch_kl": 2e-6 * rng.random(),
            "sys1_length": 5 + 2 * done,
            "sys2_length": 14 + 8 * done,
            "sys1_entropy": 0.5 - 0.4 * done,
            "sys2_entropy": 0.4 - 0.25 * done,
            "sys1_logprob_right": -0.5 + 0.4 * done,
            "sys2_logprob_wrong": -0.6 + 0.1 * done,
            "malformed_share": 0.02 * (1 - done),
            "tool_error_share": 0.0,
            "zero_variance_share": 0.3 + 0.4 * done,
            "seconds_rollout": 1 + rng.random() * 0.2,
            "seconds_train": 0.5,
        }
        if step == 1 or step % 10 == 0:
            row["eval_accuracy"] = 0.17 + 0.7 * done
            row["eval_greedy"] = 0.45 + 0.48 * done
            row["seconds_eval"] = 3.0
        rows.append(row)
    return rows


def write_lines(path: Path, records: list[dict], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def fake_run(path: Path, *, steps: int = 40, group: int = 8) -> Path:
    write_lines(path / "metrics.jsonl", fake_metrics(steps))
    easy = {
        "question_id": "easy",
        "question": "where does bob stone live ?",
        "advantage": 0.0,
    }
    for step in (1, steps // 2, steps):
        records = [fake_record(k, float(k % 8 in (0, 3, 6)), step=step) for k in range(group)]
        records += [fake_record(k, 1.0, step=step, **easy) for k in range(group)]
        write_lines(path / "rollouts" / f"step_{step}.jsonl", records)
    return path


# --------------------------------------------------------------- reading a page back

KNOWN = """
    html head title style body h1 h2 summary span b bdi p pre code dl dt dd ol li div i details
""".split()
TAGS = {tag: {"class"} for tag in KNOWN}
TAGS |= {
    "html": {"lang"},
    "meta": {"charset", "http-equiv", "content", "name"},
    "details": {"class", "open"},
    "span": {"class", "title"},
    "div": {"class", "aria-hidden"},
    "i": {"style"},
}
CLASS = re.compile("[a-z0-9 ]*")
WIDTH = re.compile(r"width:(\d+\.\d\d)%|width:\d\d%")


class Reader(html.parser.HTMLParser):
    """Collects the text of a page.

    It fails at tags, attributes, comments and nesting that the page never has.
    """

    def __init__(self, page: bytes):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.tags = [], [], []
        self.feed(page.decode("utf-8"))
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, f"unexpected <{tag}>"
        for name, value in attributes:
            assert name in TAGS[tag], f"unexpected {name}= on <{tag}>"
            if name == "style":
                width = WIDTH.fullmatch(value)
                assert width and float(width[1] or 0) < 100.01, value
            assert name != "class" or CLASS.fullmatch(value), value
            assert name != "http-equiv" or value == "Content-Security-Policy"
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    def handle_comment(self, data):
        raise AssertionError("a comment")

    unknown_decl = handle_pi = handle_comment

    def said(self) -> str:
        return "".join(self.text)


def page_of(tmp_path, *records, method=trajectories.MARS) -> bytes:
    return view.trajectory_page(list(records), tmp_path / "page.html", method).read_bytes()


def said_of(tmp_path, *records, method=trajectories.MARS) -> str:
    return Reader(page_of(tmp_path, *records, method=method)).said()


def poison(value, text: str):
    """The record with `text` behind every string in it."""
    if isinstance(value, dict):
        return {key: poison(v, text) for key, v in value.items()}
    if isinstance(value, list):
        return [poison(v, text) for v in value]
    return value + text if isinstance(value, str) else value


def paths(value, prefix=()):
    """Every place in a record that can be damaged."""
    if prefix:
        yield prefix
    children = ()
    if isinstance(value, dict):
        children = value.items()
    if isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        yield from paths(child, (*prefix, key))


SHARED_FOLDER = [HealthCheck.function_scoped_fixture]
FAST = settings(max_examples=40, deadline=None, suppress_health_check=SHARED_FOLDER)
PIECE = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=()), max_size=12)
TEXT = st.lists(PIECE, min_size=1, max_size=4).map("".join)


# -------------------------------------------------------------------------- the page


@FAST
@given(TEXT)
def test_hostile_text_stays_text(tmp_path, text):
    right = fake_record(0, 1.0)
    wrong = fake_record(1, 0.0)
    poisoned = poison(wrong, text) | {"trajectory": text}
    reader = Reader(page_of(tmp_path, poison(right, text), poisoned))
    said = reader.said()
    assert not any(0xD800 <= ord(c) < 0xE000 or c in "\x00\x1b\u202e\u2066" for c in said)
    clean = Reader(page_of(tmp_path, right, wrong))
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in clean.tags}


@pytest.mark.parametrize("text", HOSTILE)
def test_each_hostile_text_is_shown_escaped(tmp_path, text):
    spelt = "\x00\x1b\u202e\u202c\ud800\udfff\u200f"
    expected = "".join(f"⟦U+{ord(c):04X}⟧" if c in spelt else c for c in text)
    assert "acro corp" + expected in said_of(tmp_path, poison(fake_record(0, 1.0), text))


def test_the_page_asks_nothing_of_the_outside(tmp_path):
    content = view.page(fake_run(tmp_path)).read_text()
    assert "default-src 'none'" in content
    for word in ("<script", "<link", "<img", "<a ", "url(", "@import", "src=", "javascript:"):
        assert word not in content
    assert "http://" not in content and "https://" not in content


def test_the_page_tells_trained_from_given_and_up_from_down(tmp_path):
    right = fake_record(0, 1.0)
    right["turns"][0]["chunks"][0]["drawn"] = 2
    right["turns"][0]["chunks"][1]["drawn"] = 0
    content = page_of(tmp_path, right).decode()
    for part in (
        '<pre class="up w2">&lt;call&gt; search',
        '<pre class="up w2">none',
        '<pre class="flat">ada baker',
        '<pre class="given">in which',
        "▲ +1.29",
        "drawn 2×",
        ">not drawn<",
        "✂ cut to fit",
        "right answer: <bdi>oslo</bdi>",
        "packed into 2 chunks for System 1",
    ):
        assert part in content, part
    content = page_of(tmp_path, fake_record(1, 0.0)).decode()
    assert "▼ −0.77" in content and '<pre class="down w1">&lt;call&gt; search' in content
    assert "tool failed: scholar answered 503" in content


@pytest.mark.parametrize(
    "record, said",
    [
        (fake_record(2, 1.0) | {"advantage": 0.0}, "● 0"),
        (fake_record(3, None), "not graded"),
        (fake_record(0, 1.0) | {"trained": False}, "not trained on"),
    ],
)
def test_what_does_not_push_is_flat(tmp_path, record, said):
    content = page_of(tmp_path, record).decode()
    assert '<pre class="flat">&lt;call&gt; search' in content and said in content


def test_text_is_escaped_for_attributes_too():
    assert trajectories.show("<a b='\"&") == "&lt;a b=&#x27;&quot;&amp;"


@pytest.mark.parametrize(
    "hidden",
    ["\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\u200b", "\u00ad", "\u180e", "\u3164", "\u2800"]
    + ["\U000e0041", "\U000e007f", "\U000e0000", "\U000e0100", "\u115f", "\uffa0", "\u034f"],
    ids=ascii,
)
def test_hidden_characters_are_spelt_out(hidden):
    """Also those that a reader takes for nothing, or for a blank."""
    spelt = f"⟦U+{ord(hidden):04X}⟧"
    assert view.plain(f"ada{hidden}baker") == f"ada{spelt}baker"
    assert trajectories.show(f"ada{hidden}baker") == f"ada{spelt}baker"


def test_letters_emoji_and_line_ends_are_left_alone():
    for text in ("Zoë — 東京 ❤️ 👩‍👧", "a\tb\nc", "نمی‌خواهم", "�"):
        assert view.plain(text) == text
    assert view.plain("a\r\nb") == "a\nb"
    carrier = "a\ufe01\ufe02\ufe03"
    assert view.plain(carrier) == "a\ufe01⟦U+FE02⟧⟦U+FE03⟧"
    assert view.plain(None) == "None" and trajectories.show(None) == ""


def test_plain_text_holds_nothing_that_steers_a_terminal():
    sent = "\x1b]0;title\x07 \x1b[2J \x9b31m \u202e"
    assert all(c.isprintable() for c in view.plain(sent))


def test_chunks_are_drawn_in_proportion_to_their_capacity():
    lengths = {"a": 16, "b": 32, "c": 500}
    documents = [{"title": title, "tokens": n} for title, n in lengths.items()]
    chunk = {"documents": [1, 0], "tokens": 48, "capacity": 64, "truncated": False}
    picture = trajectories.chunk_bar(chunk, documents)
    assert '<i style="width:50.00%">2</i><i style="width:25.00%">1</i>' in picture
    assert "48 of 64 tokens" in picture
    chunk = {"documents": [2], "tokens": 64, "capacity": 64, "truncated": True}
    cut = trajectories.chunk_bar(chunk, documents)
    assert '<i style="width:100.00%">3</i>' in cut and "cut to fit" in cut


@FAST
@given(st.data())
def test_damaged_records_are_shown_as_far_as_they_go(tmp_path, data):
    records = [fake_record(0, reward) for reward in (0.0, 1.0, None)] + [fake_team_record()]
    record = copy.deepcopy(data.draw(st.sampled_from(records)))
    for _ in range(3):
        *way, last = data.draw(st.sampled_from(list(paths(record))))
        place = record
        for key in way:
            place = place[key]
        if isinstance(place, dict) and data.draw(st.booleans()):
            del place[last]
        else:
            wrong = [None, 3, -1.5, "x", [], {}, [None], ["y"], float("nan"), 1e40, True]
            place[last] = data.draw(st.sampled_from(wrong))
    Reader(page_of(tmp_path, record, fake_record(1, 1.0)))


def test_an_empty_record_and_one_from_ask_make_a_page(tmp_path):
    Reader(page_of(tmp_path, {}))
    turn = {"text": "<answer> ada", "answer": "ada"}
    said = said_of(tmp_path, {"question": "who?", "answer": "ada", "turns": [turn]})
    assert "not trained on" in said and "answer ada" in said
    assert "None" not in said and "nan" not in said


def test_missing_counts_and_segments_are_survived(tmp_path):
    picture = trajectories.chunk_bar({"documents": [0, 7], "tokens": None}, [{"title": "a"}])
    assert '<i style="width:0.00%">1</i>' in picture
    said = said_of(tmp_path, fake_record(0, 1.0, segments=[]))
    assert said.count("System 2 · turn") == 3 and "<answer> oslo <eot>" in said


# ------------------------------------------------------------------- which questions


def test_the_page_opens_on_the_question_that_teaches_most(tmp_path):
    said = Reader(view.page(fake_run(tmp_path)).read_bytes()).said()
    marks = ["Step 1", "in which city", "where does bob stone", "Step 20", "Step 40"]
    assert sorted(marks, key=said.index) == marks
    assert "all alike, nothing to learn" in said
    one = Reader(view.page(tmp_path, steps=[20], questions=1).read_bytes()).said()
    assert "Step 20" in one and "Step 40" not in one and "where does bob stone" not in one


def test_a_right_and_a_wrong_attempt_start_open(tmp_path):
    """Of equals those that have notes in training come first."""
    records = [fake_record(k, float(k > 1)) for k in range(4)]
    for record in records:
        for chunk in trajectories.chunks_of(record):
            chunk["drawn"] = int(record["trajectory"] in (1, 3))
    content = page_of(tmp_path, *records).decode()
    heads = re.findall(r'<details class="card"( open)?><summary><b>#(\d)', content)
    assert heads == [(" open", "3"), (" open", "1"), ("", "0"), ("", "2")]


def test_steps_are_ordered_by_number_and_repeats_are_shown_once(tmp_path):
    for step in (2, 10, 9):
        attempts = [fake_record(0, 1.0), fake_record(0, 0.0)]
        write_lines(tmp_path / "rollouts" / f"step_{step}.jsonl", attempts)
    said = Reader(view.page(tmp_path).read_bytes()).said()
    assert said.index("Step 2") < said.index("Step 9") < said.index("Step 10")
    assert said.count("✗ reward 0") == 3 and "✓ reward 1" not in said


def test_huge_records_are_cut_until_the_page_is_small(tmp_path):
    page = view.page(fake_run(tmp_path / "toy"))
    assert page.stat().st_size < 1_000_000
    monster = poison(fake_record(0, 1.0), '<"&' * 3_000)
    monster["turns"] = monster["turns"] * 10
    monster["turns"][0]["documents"] = monster["turns"][0]["documents"] * 100
    records = []
    for question in range(3):
        for k in range(8):
            known = {"question_id": str(question), "trajectory": k}
            records.append(copy.deepcopy(monster) | known)
    content = page_of(tmp_path, *records)
    assert len(content) < 3_000_000
    said = Reader(content).said()
    assert "more characters cut" in said and "left out, to keep this page small" in said


@pytest.mark.parametrize("most", [60_000, 90_000, 150_000, 250_000])
def test_any_bound_on_the_page_holds(tmp_path, monkeypatch, most):
    monkeypatch.setattr(trajectories, "MAX_BYTES", most)
    content = view.page(fake_run(tmp_path)).read_bytes()
    assert len(content) < most
    assert "in which city" in Reader(content).said()


# --------------------------------------------------------------------- other methods

TEAM = view.Method(
    "team", {"planner": "Planner", "worker": "Worker", "reader": "Reader", "verifier": "Verifier"}
)


def test_a_worker_of_several_turns_is_drawn_in_its_place(tmp_path):
    said = said_of(tmp_path, fake_team_record(), method=TEAM)
    marks = [
        "Planner · turn 1",
        "goes on with Worker",
        "Worker · context 1",
        "Worker starts from",
        "Worker · turn 1",
        "packed into 2 chunks for Reader",
        "Reader · chunk 1",
        "Worker · turn 2",
        "Planner · turn 2",
        "Verifier · context 1",
    ]
    story = said[said.index("Planner · turn 1") :]
    assert sorted(marks, key=story.index) == marks
    assert "System" not in said and "found nothing" not in said
    assert "1 Worker sample, 2 Reader samples, 1 Verifier sample, 4 drawn for training" in said


def test_a_context_in_a_context_in_a_context_ends(tmp_path):
    record = fake_record(0, 1.0)
    for _ in range(40):
        record = {"turns": [fake_turn("deep", chunks=[record | {"drawn": 1}])], "trained": True}
    assert said_of(tmp_path, record).count("deep") < 12


def test_roles_are_called_what_the_run_says(tmp_path):
    run = fake_run(tmp_path)
    said = Reader(view.page(run).read_bytes()).said()
    assert "System 2 · turn 1" in said and "balancing" in said
    roles = {"sys2": "Solver", "sys1": "<b>Reader"}
    (run / "method.json").write_text(json.dumps({"name": "other", "roles": roles}))
    said = Reader(view.page(run).read_bytes()).said()
    assert "Solver · turn 1" in said and "<b>Reader · chunk 1" in said and "balancing" not in said


@pytest.mark.parametrize("content", ["", "[]", '{"name": 3}', '{"name": "x", "roles": []}'])
def test_a_damaged_method_is_told_and_taken_for_mars(tmp_path, capsys, content):
    (tmp_path / "method.json").write_text(content)
    assert view.read_method(tmp_path).roles == MARS_ROLES
    assert "names no method" in capsys.readouterr().err


# ------------------------------------------------------------------------ the curves


def picture_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.fixture
def panels(monkeypatch):
    """Title -> the values that a panel was given, seen through a wrapped draw_panel."""
    seen = {}
    draw = drawing.draw_panel

    def watched(ax, panel, steps, values):
        seen[panel.title] = values
        draw(ax, panel, steps, values)

    monkeypatch.setattr(drawing, "draw_panel", watched)
    return seen


def test_curves_draw_all_that_was_logged(tmp_path, panels):
    picture = view.curves(fake_run(tmp_path))
    assert picture == tmp_path / "curves.png" and picture_size(picture) == (1260, 495)
    assert picture_size(tmp_path / "diagnostics.png") == (1890, 1305)
    assert len(panels) == 11 and all(panels.values())
    assert list(panels)[-2:] == ["Held-out accuracy", "Reward in training"]


@pytest.mark.parametrize(
    "rows, drawn",
    [
        ([{"step": 1}], set()),
        ([{"step": 0, "eval_accuracy": 0.2}], {"Held-out accuracy"}),
        (
            [
                {"step": 1, "reward": None},
                {"step": 2, "reward": "high"},
                {"step": 4, "reward": float("nan"), "clip_share": 0},
            ],
            {"Share of clipped tokens"},
        ),
        (
            [
                {"step": 3, "seconds_train": 0.5},
                {"step": 9, "seconds_rollout": 1.5, "mismatch_kl": -1e-9},
            ],
            {"Seconds per step", "Sampler–trainer mismatch, KL"},
        ),
    ],
)
def test_curves_make_do_with_partial_metrics(tmp_path, panels, rows, drawn):
    write_lines(tmp_path / "metrics.jsonl", rows)
    view.curves(tmp_path)
    assert {title for title, values in panels.items() if values} == drawn


def test_each_role_of_a_method_has_its_line(tmp_path, panels):
    rows = [{"step": 1, "planner_entropy": 0.3, "verifier_entropy": 0.1, "sys1_entropy": 0.2}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    method = {"name": "team", "roles": {"planner": "Plan $x$", "verifier": "Verifier"}}
    (tmp_path / "method.json").write_text(json.dumps(method))
    view.curves(tmp_path)
    assert set(panels["Entropy, nats per token"]) == {"planner_entropy", "verifier_entropy"}


def test_of_a_repeated_step_the_later_line_counts(tmp_path, panels):
    rows = [{"step": step, "reward": y} for step, y in [(1, 0.1), (2, 0.9), (2, 0.3)]]
    write_lines(tmp_path / "metrics.jsonl", rows)
    view.curves(tmp_path)
    assert panels["Reward in training"]["reward"].tolist() == [0.1, 0.3]


def test_matplotlib_is_loaded_by_nothing_but_curves():
    program = (
        "import sys; import view, mars; "
        "loaded = sorted(m for m in sys.modules if m.startswith('matplotlib')); "
        "sys.exit(f'loaded: {loaded[:3]}' if loaded else 0)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------- bad runs


def test_a_line_cut_by_a_kill_is_skipped_and_told(tmp_path, capsys):
    tail = '[1]\n{"reward": 1.0}\n{"step": 4, "rew'
    write_lines(tmp_path / "metrics.jsonl", fake_metrics(3), tail=tail)
    cut = json.dumps(fake_record(1, 0.0))[:500]
    write_lines(tmp_path / "rollouts" / "step_1.jsonl", [fake_record(0, 1.0)], tail=cut)
    view.curves(tmp_path)
    said = Reader(view.page(tmp_path).read_bytes()).said()
    assert "reward 1" in said and "reward 0" not in said
    told = capsys.readouterr().err
    assert told.count("is not a whole record, skipped") == 3
    assert told.count("1 line without a step, skipped") == 1


def test_nothing_is_half_written(tmp_path):
    fake_run(tmp_path)
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        view.curves(tmp_path)
    assert not list(tmp_path.glob("*.part")) and not list((tmp_path / "curves.png").iterdir())


def command(*arguments) -> subprocess.CompletedProcess:
    line = [sys.executable, "view.py", *map(str, arguments)]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        ("absent", "is no folder"),
        ("empty", "holds no finished step"),
        ("no rollouts", "has no rollouts"),
        ("cut rollouts", "no whole trajectory"),
    ],
)
def test_the_command_answers_bad_runs_with_one_sentence(tmp_path, damage, sentence):
    run = tmp_path / "run"
    if damage != "absent":
        run.mkdir()
    if "rollouts" in damage:
        write_lines(run / "metrics.jsonl", fake_metrics(2))
    if damage == "cut rollouts":
        write_lines(run / "rollouts" / "step_1.jsonl", [], tail='{"step"')
    result = command(run)
    assert result.returncode == 2 and sentence in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_the_command_prints_both_paths(tmp_path):
    run = fake_run(tmp_path, steps=2)
    result = command(run)
    assert result.returncode == 0
    assert result.stdout.split() == [str(run / "curves.png"), str(run / "trajectories.html")]
    missing = command(run, "--steps", "7")
    assert missing.returncode == 2 and "recorded no step 7: choose from 1 to 2" in missing.stderr
