"""Pictures of runs: hostile text stays text, and what a page and the curves tell."""

import html.parser
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import view
from plumbing import curves, pages

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=https://evil.example/x onerror=alert(1)>',
    "' onload='x",
    "<!--",
    "\x00\x1b[31m",
    "\u202egnp.exe\u202c",
    "\ud800\udfff",
    "</pre></details></style>",
    "&lt;b&gt;",
    "\u200f\u0645\u0631\u062d\u0628\u0627",
    "a" * 400,
]
MARS = {"sys2": "System 2", "sys1": "System 1"}


# ----------------------------------------------------------------------------- fakes


def fake_turn(text: str, **known) -> dict:
    turn = {"text": text, "call": None, "answer": None, "error": None}
    return turn | {"documents": [], "seconds_tool": 0.0, "chunks": []} | known


def fake_record(trajectory: int, reward: float | None, *, step=1, **known) -> dict:
    """Documents 1 and 2 share a chunk, 0 is cut; a wrong attempt then has a failing tool."""
    advantage = 0.0 if reward is None else (reward - 0.375) / 0.484
    fact = "ada baker joined acro corp ."
    documents = [
        {"id": f"d{i}", "title": f"ada baker {i}", "url": "toy://x", "tokens": n, "text": fact}
        for i, n in enumerate([180, 38, 20])
    ]
    chunk = {"role": "sys1", "capacity": 64, "prompt": fact, "advantage": advantage, "drawn": 1}
    both = {"documents": [1, 2], "tokens": 58, "truncated": False, "note": "none . <eot>"}
    alone = {"documents": [0], "tokens": 64, "truncated": True, "note": f"{fact} <eot>"}
    call = {"tool": "search", "argument": "ada baker", "purpose": "the employer"}
    found = {"call": call, "documents": documents, "chunks": [chunk | both, chunk | alone]}
    turns = [fake_turn("<call> search ada baker <eot>", **found)]
    if reward == 0:
        error = "tool failed: scholar answered 503 three times"
        turns.append(fake_turn("<call> scholar <eot>", call=call, error=error))
    turns.append(fake_turn("<answer> oslo <eot>", answer="oslo"))
    question = "in which city does the employer of ada baker have its base ?"
    segments = [{"text": question, "trained": False}]
    for turn in turns:
        segments += [{"text": turn["text"], "trained": True}, {"text": "notes", "trained": False}]
    record = {
        "step": step,
        "split": "train",
        "question_id": "train-17",
        "question": question,
        "gold": ["oslo"],
        "trajectory": trajectory,
        "answer": "oslo" if reward else "turin",
        "ended": "answer",
        "reward": reward,
        "advantage": advantage,
        "trained": reward is not None,
        "segments": segments[:-1],
        "turns": turns,
    }
    return record | known


def fake_metrics(steps: int) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": 0.2 + step / 100, "clip_share": 0.0, "mismatch_kl": 2e-6}
        row |= {"calls_per_question": 1.5, "malformed_share": 0.02, "seconds_rollout": 1.0}
        for what in ("length", "entropy", "logprob_right", "logprob_wrong"):
            row |= {f"sys1_{what}": -0.5 + step / 100, f"sys2_{what}": 0.1}
        if step % 10 == 1:
            row |= {"eval_accuracy": 0.17, "eval_greedy": 0.45, "seconds_eval": 3.0}
        rows.append(row)
    return rows


def write_lines(path: Path, records: list[dict], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def fake_run(path: Path, *, steps: int = 40) -> Path:
    """Three recorded steps, each with a question that teaches and one that is too easy."""
    write_lines(path / "metrics.jsonl", fake_metrics(steps))
    (path / "method.json").write_text(json.dumps({"name": "mars", "roles": MARS}))
    easy = {"question_id": "easy", "question": "where does bob stone live ?", "advantage": 0.0}
    for step in (1, steps // 2, steps):
        records = [fake_record(k, 1.0, step=step, **easy) for k in range(8)]
        records += [fake_record(k, float(k in (0, 3, 6)), step=step) for k in range(8)]
        write_lines(path / "rollouts" / f"step_{step}.jsonl", records)
    return path


# --------------------------------------------------------------- reading a page back


class Reader(html.parser.HTMLParser):
    """Collects the text of a page and its tags. It fails at comments and at wrong nesting."""

    def __init__(self, page: bytes):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.tags = [], [], set()
        self.feed(page.decode("utf-8"))
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.add((tag, *attributes))
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


def page_of(tmp_path, *records, roles=MARS) -> bytes:
    return pages.write(tmp_path / "page.html", "A page", [list(records)], roles).read_bytes()


def said_of(tmp_path, *records, roles=MARS) -> str:
    return Reader(page_of(tmp_path, *records, roles=roles)).said()


def poison(value, text: str):
    """The record with `text` behind every string in it."""
    if isinstance(value, dict):
        return {key: poison(v, text) for key, v in value.items()}
    if isinstance(value, list):
        return [poison(v, text) for v in value]
    return value + text if isinstance(value, str) else value


FAST = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECE = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=()), max_size=12)
TEXT = st.lists(PIECE, min_size=1, max_size=4).map("".join)


# -------------------------------------------------------------------------- the page


@FAST
@given(TEXT)
def test_hostile_text_stays_text(tmp_path, text):
    right = fake_record(0, 1.0)
    wrong = fake_record(1, 0.0)
    reader = Reader(page_of(tmp_path, poison(right, text), poison(wrong, text)))
    said = reader.said()
    assert "ada baker" + pages.plain(text) in said, "nothing of it is lost"
    assert pages.plain(said) == said, "nowhere a hidden character"
    clean = Reader(page_of(tmp_path, right, wrong))
    assert reader.tags <= clean.tags, "no tag, no attribute and no value of its making"


PACKED = '<i style="width:59.38%">2</i><i style="width:31.25%">3</i>'  # 38 and 20 of 64 tokens
TOLD = [
    (1.0, {}, "up w2", ["▲ +1.29", '<pre class="up w2">none', "drawn 2×", ">not drawn<", PACKED]),
    (1.0, {}, "up w2", ["✂ cut to fit", "right answer: <bdi>oslo</bdi>", '<pre class="flat">ada']),
    (0.0, {}, "down w1", ["▼ −0.77", "tool failed: scholar answered 503"]),
    # What does not push is flat.
    (1.0, {"advantage": 0.0}, "flat", ["● 0"]),
    (None, {}, "flat", ["not graded"]),
    (1.0, {"trained": False}, "flat", ["not trained on"]),
]


@pytest.mark.parametrize("reward, known, push, parts", TOLD)
def test_the_page_tells_trained_from_given_and_up_from_down(tmp_path, reward, known, push, parts):
    record = fake_record(0, reward, **known)
    for chunk, drawn in zip(record["turns"][0]["chunks"], (2, 0)):
        chunk["drawn"] = drawn
    content = page_of(tmp_path, record).decode()
    said = [f'<pre class="{push}">&lt;call&gt; search', '<pre class="given">in which', *parts]
    assert [part for part in said if part not in content] == []


def test_hidden_characters_are_spelt_out_and_letters_left_alone():
    for hidden in "\x1b\x07\x9b\u202e\u2066\u200b\u00ad\u2028\ufdd0\U000e0041":
        assert pages.plain(f"ada{hidden}baker") == f"ada⟦U+{ord(hidden):04X}⟧baker"
    for text in ("Zoë — 東京 ❤️ 👩‍👧", "a\tb\nc", "نمی‌خواهم", "�"):
        assert pages.plain(text) == text
    assert pages.plain("a\r\nb") == "a\nb"


# ------------------------------------------------------------------- which questions


def test_the_page_opens_on_the_question_that_teaches_most(tmp_path):
    said = Reader(pages.of_run(fake_run(tmp_path, steps=18)).read_bytes()).said()
    marks = ["in which city", "step 1 ·", "where does bob stone", "step 9 ·", "step 18 ·"]
    assert sorted(marks, key=said.index) == marks
    one = Reader(pages.of_run(tmp_path, steps=[9], questions=1).read_bytes()).said()
    assert "step 9 ·" in one and "step 18 ·" not in one and "where does bob stone" not in one


def test_the_best_and_the_worst_attempt_start_open(tmp_path):
    """One that nobody graded comes last."""
    records = [fake_record(k, reward) for k, reward in enumerate([0.0, 1.0, None, 1.0])]
    content = page_of(tmp_path, *records).decode()
    heads = re.findall(r'<details class="card"( open)?><summary><b>#(\d)', content)
    assert heads == [(" open", "1"), (" open", "2"), ("", "3"), ("", "0")]


def test_a_page_stays_small_and_asks_nothing_of_the_outside(tmp_path, monkeypatch):
    content = pages.of_run(fake_run(tmp_path)).read_text()
    assert len(content) < 1_000_000 and "default-src 'none'" in content
    assert not [word for word in ("url(", "@import", "http://", "https://") if word in content]
    long = poison(fake_record(0, 1.0), '<"&' * 3_000)
    assert "…[cut]" in said_of(tmp_path, long)
    monkeypatch.setattr(pages, "MAX_BYTES", 60_000)
    content = pages.of_run(tmp_path).read_bytes()
    assert len(content) < 80_000
    said = Reader(content).said()
    assert "in which city" in said and "left out, to keep this page small" in said


# --------------------------------------------------------------------- other methods


def test_a_worker_of_several_turns_is_drawn_in_its_place(tmp_path):
    record = fake_record(0, 1.0)
    found = record["turns"][0]
    for chunk in found["chunks"]:
        chunk["role"] = "reader"
    worker = {"role": "worker", "prompt": "find it", "note": "", "advantage": 0.9, "drawn": 1}
    worker["turns"] = [found, fake_turn("it is in oslo")]
    call = {"tool": "browse", "argument": "base of acro corp", "purpose": ""}
    record["turns"] = [fake_turn("browse", call=call, chunks=[worker]), fake_turn("oslo")]
    record["segments"] = []
    roles = {"planner": "Planner", "worker": "<b>Worker", "reader": "Reader"}
    said = said_of(tmp_path, record, roles=roles)
    marks = ["Planner · turn 1", "<b>Worker · context 1", "<b>Worker · turn 1"]
    marks += ["packed into 2 chunks", "Reader · chunk 1", "<b>Worker · turn 2", "Planner · turn 2"]
    story = said[said.index("Planner · turn 1") :]
    assert sorted(marks, key=story.index) == marks


# ------------------------------------------------------------------------ the curves


@pytest.fixture
def panels(monkeypatch, draw):
    """Title -> label -> the values of a line, seen through a wrapped draw_panel."""
    seen = {}
    real = curves.draw_panel

    def watched(ax, *given):
        real(ax, *given)
        lines = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
        seen[ax.get_title(loc="left")] = lines

    monkeypatch.setattr(curves, "draw", draw)
    monkeypatch.setattr(curves, "draw_panel", watched)
    return seen


def test_curves_draw_all_that_was_logged(tmp_path, panels):
    picture = curves.of_run(fake_run(tmp_path))
    assert picture == tmp_path / "curves.png"
    for name in ("curves.png", "diagnostics.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(panels) == 11 and all(panels.values())
    assert list(panels)[-2:] == ["Held-out accuracy", "Reward in training"]
    assert panels["Held-out accuracy"] == {"sampled": [0.17] * 4, "greedy": [0.45] * 4}
    assert list(panels["Entropy, nats per token"]) == ["System 2", "System 1"]


def test_curves_make_do_with_partial_metrics_of_other_roles(tmp_path, panels):
    """Also with a line that a kill has cut, and a name that looks like a formula."""
    rows = [{"step": 1, "reward": None, "sys1_entropy": 0.2}]
    rows.append({"step": 2, "reward": 0.3, "planner_entropy": 0.4})
    write_lines(tmp_path / "metrics.jsonl", rows, tail='{"step": 4, "rew')
    roles = {"planner": "Plan $\\x$", "verifier": "Verifier"}
    (tmp_path / "method.json").write_text(json.dumps({"name": "team", "roles": roles}))
    curves.of_run(tmp_path)
    drawn = {title: list(lines.values()) for title, lines in panels.items() if lines}
    assert drawn == {"Reward in training": [[0.3]], "Entropy, nats per token": [[0.4]]}
    assert list(panels["Entropy, nats per token"]) == ["Plan $\\x$"]


# ----------------------------------------------------------------------- the command


def test_the_command_prints_both_paths_or_one_sentence(tmp_path, capsys):
    run = fake_run(tmp_path / "run", steps=2)
    assert view.main([str(run)]) == 0
    assert capsys.readouterr().out.split() == [f"{run}/curves.png", f"{run}/trajectories.html"]
    empty = tmp_path / "empty"
    write_lines(empty / "metrics.jsonl", fake_metrics(2))
    (empty / "method.json").write_text((run / "method.json").read_text())
    for line, said in (
        ([run, "--steps", 7], "recorded no step 7"),
        ([tmp_path / "absent"], "absent"),
        ([tmp_path / ("x" * 5000)], "cannot read"),
        ([empty], "no trajectory"),
    ):
        assert view.main([str(word) for word in line]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("mars: ") and said in error and len(error) < 2100
