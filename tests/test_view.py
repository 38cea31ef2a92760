"""view.py: hostile text stays text, damaged records are drawn as far as they go, files stay small.

Run: pytest tests/test_view.py
"""
import copy
import html.parser
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import view
from config import UserError

REPOSITORY = Path(view.__file__).parent
HOSTILE = ["</script><script>alert(1)</script>", '"><img src=https://evil.example/x onerror=alert(1)>', "' onload='x",
           "<!--", "]]>", "\x00\x1b[31m", "\u202egnp.exe\u202c", "\ud800\udfff", "</pre></details></style>",
           "&lt;b&gt;", "\u200f\u0645\u0631\u062d\u0628\u0627", "a" * 400]


# ------------------------------------------------------------------------------------------------ fakes
def fake_turn(text: str, **known) -> dict:
    return {"text": text, "call": None, "answer": None, "error": None, "documents": [], "seconds_tool": 0.0,
            "chunks": [], **known}


def fake_search(argument: str, purpose: str, fact: str, sizes: list[int], advantage: float, drawn: list[int]) -> dict:
    """A search and its notes: the second and third document share a chunk, a fourth one is cut to fit its own."""
    titles = [argument, "bob stone", "a walk in " + argument, "long report"]
    documents = [{"id": f"d{size}", "title": title, "url": f"toy://world/{title.replace(' ', '-')}", "tokens": size,
                  "text": f"{fact} it was a quiet year . bob stone likes chess ."}
                 for title, size in zip(titles, sizes)]
    chunks = [{"documents": members, "tokens": min(64, sum(sizes[i] for i in members)), "capacity": 64,
               "truncated": sizes[members[0]] > 64, "prompt": "".join(documents[i]["text"] for i in members) + purpose,
               "note": f"{fact} <eot>" if 0 in members else "none . <eot>", "note_tokens": 7, "advantage": advantage,
               "drawn": times} for members, times in zip([[1, 2], [0], [3]][:len(sizes) - 1], drawn)]
    return fake_turn(f"<call> search {argument} <purpose> {purpose} <eot>", documents=documents, seconds_tool=0.004,
                     call={"tool": "search", "argument": argument, "purpose": purpose}, chunks=chunks)


def fake_record(trajectory: int, reward: float | None, *, step=1, **known) -> dict:
    """A two-hop toy trajectory. A wrong one stumbles over a malformed call and a failing tool before it guesses."""
    rng = random.Random(f"{trajectory} {step}")
    question = "in which city does the employer of ada baker have its base ?"
    advantage, trained = (0.0, False) if reward is None else ((reward - 0.375) / 0.484, True)
    draws = [[rng.choice([0, 0, 1, 1, 2]) * trained for _ in range(3)] for _ in range(2)]
    turns = [fake_search("ada baker", "employer of ada baker", "ada baker joined acro corp .",
                         [31, 38, rng.randrange(16, 26)], advantage * 1.1, draws[0])]
    if reward == 0:
        call = {"tool": "scholar", "argument": "acro corp", "purpose": "base of acro corp"}
        turns += [fake_turn("<call> search acro corp <eot>", error="malformed: a call needs <purpose> and what for"),
                  fake_turn("<call> scholar acro corp <purpose> base of acro corp <eot>", call=call,
                            error="tool failed: scholar answered 503 three times")]
    else:
        turns += [fake_search("acro corp", "base of acro corp", "acro corp sits in oslo .", [29, 33, 25, 180],
                              advantage * 1.1, draws[1])]
    answer = rng.choice(["bergen", "turin", "acro corp"]) if reward == 0 else "oslo"
    turns += [fake_turn(f"<answer> {answer} <eot>", answer=answer)]
    segments = [{"text": question + " <eot>", "trained": False}]
    for turn in turns:
        seen = turn["error"] or " ".join(chunk["note"][:-6] for chunk in turn["chunks"])
        segments += [{"text": turn["text"], "trained": True}, {"text": seen + " <eot>", "trained": False}]
    return {"step": step, "split": "train", "question_id": "train-17", "question": question, "gold": ["oslo"],
            "trajectory": trajectory, "answer": answer, "ended": "answer", "reward": reward, "advantage": advantage,
            "trained": trained, "segments": segments[:-1], "turns": turns, **known}


def fake_metrics(steps: int) -> list[dict]:
    rng, rows = random.Random(3), []
    for step in range(1, steps + 1):
        done = 1 - 2 ** (-step / 15)
        rows.append({"step": step, "reward": 0.2 + 0.7 * done + rng.gauss(0, 0.02), "clip_share": 0.0,
                     "calls_per_question": 1.1 + 0.6 * done + rng.gauss(0, 0.03), "mismatch_kl": 2e-6 * rng.random(),
                     "sys1_length": 5 + 2 * done, "sys2_length": 14 + 8 * done, "sys1_entropy": 0.5 - 0.4 * done,
                     "sys2_entropy": 0.4 - 0.25 * done, "malformed_share": 0.02 * (1 - done), "tool_error_share": 0.0,
                     "zero_variance_share": 0.3 + 0.4 * done, "seconds_rollout": 1 + rng.random() * 0.2,
                     "seconds_train": 0.5})
        if step == 1 or step % 10 == 0:
            rows[-1] |= {"eval_accuracy": 0.17 + 0.7 * done, "eval_greedy": 0.45 + 0.48 * done, "seconds_eval": 3.0}
    return rows


def write_lines(path: Path, records: list[dict], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def fake_run(path: Path, *, steps: int = 40, group: int = 8) -> Path:
    write_lines(path / "metrics.jsonl", fake_metrics(steps))
    for step in (1, steps // 2, steps):
        records = [fake_record(k, float(k % 8 in (0, 3, 6)), step=step) for k in range(group)]
        easy = {"question_id": "easy", "question": "where does bob stone live ?", "advantage": 0.0}
        records += [fake_record(k, 1.0, step=step, **easy) for k in range(group)]
        write_lines(path / "rollouts" / f"step_{step}.jsonl", records)
    return path


# ------------------------------------------------------------------------------------------------ reading a page back
TAGS = {tag: {"class"} for tag in (
    "html head title style body h1 h2 summary span b bdi p pre code dl dt dd ol li div i details").split()}
TAGS |= {"html": {"lang"}, "meta": {"charset", "http-equiv", "content", "name"}, "details": {"class", "open"},
         "span": {"class", "title"}, "div": {"class", "aria-hidden"}, "i": {"style"}}


class Reader(html.parser.HTMLParser):
    """Collects the text of a page; fails at tags, attributes, comments and nesting that view.py never writes."""
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
            assert name != "style" or value[:6] + value[-1] == "width:%" and float(value[6:-1]) < 100.01, value
            assert name != "class" or set(value) <= set("abcdefghijklmnopqrstuvwxyz0123456789 "), value
            assert name != "http-equiv" or value == "Content-Security-Policy"
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        (self.text if self.open[-1:] != ["style"] else []).append(data)

    def handle_comment(self, data):
        raise AssertionError("a comment")

    unknown_decl = handle_pi = handle_comment

    def said(self) -> str:
        return "".join(self.text)


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
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(child, (*prefix, key))


FAST = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECE = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=()), max_size=12)
TEXT = st.lists(PIECE, min_size=1, max_size=4).map("".join)


# ------------------------------------------------------------------------------------------------ the page
@FAST
@given(TEXT)
def test_hostile_text_stays_text(tmp_path, text):
    records = [poison(fake_record(0, 1.0), text), poison(fake_record(1, 0.0), text) | {"trajectory": text}]
    content = view.trajectory_page(records, tmp_path / "page.html").read_bytes()
    reader = Reader(content)
    assert not any(0xD800 <= ord(c) < 0xE000 or c in "\x00\x1b\u202e\u2066" for c in reader.said())
    plain = fake_record(0, 1.0), fake_record(1, 0.0)
    clean = Reader(view.trajectory_page(list(plain), tmp_path / "clean.html").read_bytes())
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in clean.tags}


@pytest.mark.parametrize("text", HOSTILE)
def test_each_hostile_text_is_shown_escaped(tmp_path, text):
    said = Reader(view.trajectory_page([poison(fake_record(0, 1.0), text)], tmp_path / "page.html").read_bytes()).said()
    expected = "".join(f"⟦U+{ord(c):04X}⟧" if c in "\x00\x1b\u202e\u202c\ud800\udfff\u200f" else c for c in text)
    assert "acro corp" + expected in said


def test_the_page_asks_nothing_of_the_outside(tmp_path):
    content = view.page(fake_run(tmp_path)).read_text()
    assert "default-src 'none'" in content
    for word in ("<script", "<link", "<img", "<a ", "url(", "@import", "src=", "javascript:", "http://", "https://"):
        assert word not in content


def test_the_page_tells_trained_from_given_and_up_from_down(tmp_path):
    right, wrong, alike, ungraded = fake_record(0, 1.0), fake_record(1, 0.0), fake_record(2, 1.0), fake_record(3, None)
    right["turns"][0]["chunks"][0]["drawn"], right["turns"][0]["chunks"][1]["drawn"] = 2, 0

    def page_of(record):
        return view.trajectory_page([record], tmp_path / "page.html").read_text()
    content = page_of(right)
    for part in ['<pre class="up w2">&lt;call&gt; search', '<pre class="up w2">none', '<pre class="flat">ada baker',
                 '<pre class="given">in which', "▲ +1.29", "drawn 2×", ">not drawn<", "✂ cut to fit",
                 "right answer: <bdi>oslo</bdi>"]:
        assert part in content, part
    content = page_of(wrong)
    assert "▼ −0.77" in content and '<pre class="down w1">&lt;call&gt; search' in content
    assert "tool failed: scholar answered 503" in content
    for record, said in [(alike | {"advantage": 0.0}, "● 0"), (ungraded, "not graded"),
                         (right | {"trained": False}, "not trained on")]:
        assert '<pre class="flat">&lt;call&gt; search' in page_of(record) and said in page_of(record)


def test_text_is_escaped_for_attributes_too():
    assert view.show("<a b='\"&") == "&lt;a b=&#x27;&quot;&amp;"


def test_chunks_are_drawn_in_proportion_to_their_capacity():
    documents = [{"title": "a", "tokens": 16}, {"title": "b", "tokens": 32}, {"title": "c", "tokens": 500}]
    picture = view.bar({"documents": [1, 0], "tokens": 48, "capacity": 64, "truncated": False}, documents)
    assert '<i style="width:50.00%">2</i><i style="width:25.00%">1</i>' in picture and "48 of 64 tokens" in picture
    cut = view.bar({"documents": [2], "tokens": 64, "capacity": 64, "truncated": True}, documents)
    assert '<i style="width:100.00%">3</i>' in cut and "cut to fit" in cut


@FAST
@given(st.data())
def test_damaged_records_are_shown_as_far_as_they_go(tmp_path, data):
    record = copy.deepcopy(fake_record(0, data.draw(st.sampled_from([0.0, 1.0, None]))))
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
    Reader(view.trajectory_page([record, fake_record(1, 1.0)], tmp_path / "page.html").read_bytes())


def test_an_empty_record_and_one_from_ask_make_a_page(tmp_path):
    Reader(view.trajectory_page([{}], tmp_path / "page.html").read_bytes())
    asked = {"question": "who?", "answer": "ada", "turns": [{"text": "<answer> ada", "answer": "ada"}]}
    said = Reader(view.trajectory_page([asked], tmp_path / "page.html").read_bytes()).said()
    assert "not trained on" in said and "answer ada" in said and "None" not in said and "nan" not in said


def test_missing_counts_and_segments_are_survived(tmp_path):
    assert '<i style="width:0.00%">1</i>' in view.bar({"documents": [0, 7], "tokens": None}, [{"title": "a"}])
    record = fake_record(0, 1.0, segments=[])
    said = Reader(view.trajectory_page([record], tmp_path / "page.html").read_bytes()).said()
    assert said.count("System 2 · turn") == 3 and "<answer> oslo <eot>" in said


def test_the_page_opens_on_the_question_that_teaches_most(tmp_path):
    said = Reader(view.page(fake_run(tmp_path)).read_bytes()).said()
    marks = ["Step 1", "in which city", "where does bob stone", "Step 20", "Step 40"]
    assert sorted(marks, key=said.index) == marks
    assert "all alike, nothing to learn" in said
    one = Reader(view.page(tmp_path, steps=[20], questions=1).read_bytes()).said()
    assert "Step 20" in one and "Step 40" not in one and "where does bob stone" not in one


def test_a_right_and_a_wrong_attempt_start_open_and_those_with_trained_notes_first(tmp_path):
    records = [fake_record(k, float(k > 1)) for k in range(4)]
    for record in records:
        for chunk in view.samples(record):
            chunk["drawn"] = int(record["trajectory"] in (1, 3))
    content = view.trajectory_page(records, tmp_path / "page.html").read_text()
    heads = re.findall(r'<details class="card"( open)?><summary><b>#(\d)', content)
    assert heads == [(" open", "3"), (" open", "1"), ("", "0"), ("", "2")]


def test_steps_are_ordered_by_number_and_repeats_are_shown_once(tmp_path):
    for step in (2, 10, 9):
        write_lines(tmp_path / "rollouts" / f"step_{step}.jsonl", [fake_record(0, 1.0), fake_record(0, 0.0)])
    said = Reader(view.page(tmp_path).read_bytes()).said()
    assert said.index("Step 2") < said.index("Step 9") < said.index("Step 10")
    assert said.count("✗ reward 0") == 3 and "✓ reward 1" not in said


def test_huge_records_are_cut_until_the_page_is_small(tmp_path):
    page = view.page(fake_run(tmp_path / "toy"))
    assert page.stat().st_size < 1_000_000
    monster = poison(fake_record(0, 1.0), "<\"&" * 3_000)
    monster["turns"] = monster["turns"] * 10
    monster["turns"][0]["documents"] = monster["turns"][0]["documents"] * 100
    groups = [copy.deepcopy(monster) | {"question_id": str(q), "trajectory": k} for q in range(3) for k in range(8)]
    content = view.trajectory_page(groups, tmp_path / "page.html").read_bytes()
    assert len(content) < 3_000_000
    said = Reader(content).said()
    assert "more characters cut" in said and "left out, to keep this page small" in said


@pytest.mark.parametrize("most", [60_000, 90_000, 150_000, 250_000])
def test_any_bound_on_the_page_holds(tmp_path, monkeypatch, most):
    monkeypatch.setattr(view, "MAX_BYTES", most)
    content = view.page(fake_run(tmp_path)).read_bytes()
    assert len(content) < most
    assert "in which city" in Reader(content).said()


# ------------------------------------------------------------------------------------------------ the curves
def picture_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def panels_drawn(run: Path, monkeypatch) -> dict[str, bool]:
    """Title -> whether anything was drawn, seen through a wrapped draw_panel."""
    seen, draw = {}, view.draw_panel

    def watched(ax, series, steps, values):
        seen[ax.get_title(loc="left")] = bool(values)
        draw(ax, series, steps, values)
    monkeypatch.setattr(view, "draw_panel", watched)
    assert picture_size(view.curves(run)) == (1500, 1200)
    return seen


def test_curves_draw_all_that_was_logged(tmp_path, monkeypatch):
    seen = panels_drawn(fake_run(tmp_path), monkeypatch)
    assert len(seen) == 9 and all(seen.values())


@pytest.mark.parametrize("rows, drawn", [
    ([{"step": 1}], set()),
    ([{"step": 0, "eval_accuracy": 0.2}], {"Held-out accuracy"}),
    ([{"step": 1, "reward": None}, {"step": 2, "reward": "high"}, {"step": 4, "reward": float("nan"), "clip_share": 0}],
     {"Share of clipped tokens"}),
    ([{"step": 3, "seconds_train": 0.5}, {"step": 9, "seconds_rollout": 1.5, "mismatch_kl": -1e-9}],
     {"Seconds per step", "Sampler–trainer mismatch, KL"})])
def test_curves_make_do_with_partial_metrics(tmp_path, monkeypatch, rows, drawn):
    write_lines(tmp_path / "metrics.jsonl", rows)
    seen = panels_drawn(tmp_path, monkeypatch)
    assert {title for title, filled in seen.items() if filled} == drawn


def test_of_a_repeated_step_the_later_line_counts(tmp_path, monkeypatch):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "reward": y} for step, y in [(1, 0.1), (2, 0.9), (2, 0.3)]])
    seen = {}
    monkeypatch.setattr(view, "draw_panel", lambda ax, series, steps, values: seen.update(values))
    view.curves(tmp_path)
    assert seen["reward"].tolist() == [0.1, 0.3]


# ------------------------------------------------------------------------------------------------ bad runs
def test_a_line_cut_by_a_kill_is_skipped_and_told(tmp_path, capsys):
    write_lines(tmp_path / "metrics.jsonl", fake_metrics(3), tail='[1]\n{"step": 4, "rew')
    cut = json.dumps(fake_record(1, 0.0))[:500]
    write_lines(tmp_path / "rollouts" / "step_1.jsonl", [fake_record(0, 1.0)], tail=cut)
    view.curves(tmp_path)
    said = Reader(view.page(tmp_path).read_bytes()).said()
    assert "reward 1" in said and "reward 0" not in said
    assert capsys.readouterr().err.count("is not a whole record, skipped") == 3


def test_nothing_is_half_written(tmp_path, monkeypatch):
    fake_run(tmp_path)
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        view.curves(tmp_path)
    assert not list(tmp_path.glob("*.part")) and not list((tmp_path / "curves.png").iterdir())


def command(*arguments) -> subprocess.CompletedProcess:
    line = [sys.executable, "view.py", *map(str, arguments)]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.parametrize("damage, sentence", [
    ("absent", "is no folder"), ("empty", "holds no finished step"), ("no rollouts", "has no rollouts"),
    ("cut rollouts", "no whole trajectory")])
def test_the_command_answers_bad_runs_with_one_sentence(tmp_path, damage, sentence):
    run = tmp_path / "run"
    if damage != "absent":
        run.mkdir()
    if "rollouts" in damage:
        write_lines(run / "metrics.jsonl", fake_metrics(2))
    if damage == "cut rollouts":
        write_lines(run / "rollouts" / "step_1.jsonl", [], tail='{"step"')
    result = command(run)
    assert result.returncode == 2 and sentence in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_the_command_prints_both_paths(tmp_path):
    run = fake_run(tmp_path, steps=2)
    result = command(run)
    assert result.returncode == 0 and result.stdout.split() == [str(run / "curves.png"), str(run / "trajectories.html")]
    missing = command(run, "--steps", "7")
    assert missing.returncode == 2 and "recorded no step 7: choose from 1 to 2" in missing.stderr
