"""Pictures of runs: hostile text stays text, and what a page and the curves tell."""

import html.parser
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_rollout import ANSWER, CALL, FORMAT, PAGES, play

import view
from plumbing import curves, folders, pages
from plumbing.logbook import record
from tools import Document

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
]
MARS = {"sys2": "System 2", "sys1": "Read $\\x$"}  # a name that looks like a formula


def fake_record(trajectory: int, reward: float | None, **known) -> dict:
    """An attempt that searches once. Document 0 is cut, and documents 1 and 2 share a chunk."""
    found = [Document("d0", "", "", "ada baker " * 30), *PAGES[1:]]
    played, _ = play([CALL, ANSWER], search=lambda query: found, sys1_prompt=30, attempt=trajectory)
    advantage = 0.0 if reward is None else (reward - 0.375) / 0.484
    credited = {"reward": reward, "advantage": advantage, "trained": reward is not None}
    made = record(played, FORMAT, 1, "train") | credited
    for chunk, drawn in zip(made["turns"][0]["chunks"], (0, 2), strict=True):
        chunk |= {"advantage": advantage, "drawn": drawn}
    return made | known


def fake_metrics(steps: int) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": step / 100 if step > 1 else None, "clip_share": 0.0}
        row |= {"mismatch_kl": 2e-6, "calls_per_question": 1.5, "malformed_share": 0.02}
        row |= {"seconds_rollout": 1.0}
        for number, what in enumerate(("length", "entropy", "logprob_right", "logprob_wrong")):
            row |= {f"sys1_{what}": number + step, f"sys2_{what}": number - step}
        if step % 10 == 1:
            row |= {"eval_step": step + 1, "eval_accuracy": 0.17, "eval_greedy": 0.45}
            row |= {"seconds_eval": 3.0}
        rows.append(row)
    rows[0]["eval_greedy_before"] = 0.2
    return rows


def fake_run(path: Path, *, steps: int = 40) -> Path:
    folders.append_lines(path / "metrics.jsonl", fake_metrics(steps))
    (path / "method.json").write_text(json.dumps({"name": "mars", "roles": MARS}))
    for step in {1, steps // 2, steps}:
        records = [fake_record(k, float(k in (0, 3, 6)), step=step) for k in range(8)]
        folders.append_lines(path / "rollouts" / f"step_{step}.jsonl", records)
    return path


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


def page_of(tmp_path, *records) -> bytes:
    return pages.write(tmp_path / "page.html", "A page", [list(records)], MARS).read_bytes()


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


@FAST
@given(TEXT)
def test_hostile_text_stays_text(tmp_path, text):
    right = fake_record(0, 1.0)
    wrong = fake_record(1, 0.0)
    reader = Reader(page_of(tmp_path, poison(right, text), poison(wrong, text)))
    said = "".join(reader.text)
    assert "ada baker" + pages.plain(text) in said, "nothing of it is lost"
    assert pages.plain(said) == said, "nowhere a hidden character"
    clean = Reader(page_of(tmp_path, right, wrong))
    assert reader.tags <= clean.tags, "no tag, no attribute and no value of its making"


PACKED = '<i style="width:34.78%">2</i><i style="width:34.78%">3</i>'  # 8 and 8 of 23 tokens
TOLD = [
    (1.0, {}, "up w2", ["▲ +1.29", '<pre class="up w2">ada', "drawn 2×", ">not drawn<", PACKED]),
    (1.0, {}, "up w2", ["✂ cut to fit", "right answer: <bdi>1968</bdi>", '<pre class="flat">ada']),
    (0.0, {}, "down w1", ["▼ −0.77"]),
    # What does not push is flat.
    (1.0, {"advantage": 0.0}, "flat", ["● 0"]),
    (None, {}, "flat", ["not graded"]),
    (1.0, {"trained": False}, "flat", ["not trained on"]),
]


@pytest.mark.parametrize("reward, known, push, parts", TOLD)
def test_the_page_tells_trained_from_given_and_up_from_down(tmp_path, reward, known, push, parts):
    content = page_of(tmp_path, fake_record(0, reward, **known)).decode()
    said = [f'<pre class="{push}">&lt;call&gt; search', '<pre class="given">&lt;s2&gt;', *parts]
    assert [part for part in said if part not in content] == []


def test_hidden_characters_are_spelt_out_and_letters_left_alone():
    for hidden in "\x1b\x07\x9b\u202e\u2066\u200b\u00ad\u2028\ufdd0\U000e0041":
        assert pages.plain(f"ada{hidden}baker") == f"ada⟦U+{ord(hidden):04X}⟧baker"
    for text in ("Zoë — 東京 ❤️ 👩‍👧", "a\tb\nc", "نمی‌خواهم", "�"):
        assert pages.plain(text) == text
    assert pages.plain("a\r\nb") == "a\nb"


def test_a_page_stays_small_and_asks_nothing_of_the_outside(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "MAX_BYTES", 30_000)
    content = pages.of_run(fake_run(tmp_path)).read_text()
    assert len(content) < 50_000 and "2 questions left out" in content
    assert "default-src 'none'" in content
    assert not [word for word in ("url(", "@import", "http://", "https://") if word in content]


def test_curves_draw_all_that_was_logged(tmp_path, monkeypatch, draw):
    """An evaluation is drawn after its steps."""
    seen = {}
    real = curves.draw_panel

    def watched(ax, *given):
        real(ax, *given)
        lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
        seen[ax.get_title(loc="left")] = lines

    monkeypatch.setattr(curves, "draw", draw)
    monkeypatch.setattr(curves, "draw_panel", watched)
    curves.of_run(fake_run(tmp_path))
    for name in ("curves.png", "diagnostics.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(seen) == 11 and all(seen.values())
    sampled, greedy = ([[step, share] for step in (2, 12, 22, 32)] for share in (0.17, 0.45))
    assert seen["Held-out accuracy"] == {"sampled": sampled, "greedy": [[1, 0.2], *greedy]}
    assert [*seen["Reward in training"].values()] == [[[n, n / 100] for n in range(2, 41)]]
    wrong = {name: line[0] for name, line in seen["Log-prob per token, wrong attempts"].items()}
    assert wrong == {"System 2": [1, 2], "Read $\\x$": [1, 4]}


def test_the_command_prints_both_paths_or_one_sentence(tmp_path, capsys, monkeypatch):
    run = fake_run(tmp_path / "run", steps=2)
    assert view.main([str(run)]) == 0
    assert capsys.readouterr().out.split() == [f"{run}/curves.png", f"{run}/trajectories.html"]
    for line, said in (([str(run), "--steps", "7"], "no step 7"), ([f"{run}/absent"], "absent")):
        assert view.main(line) == 2
        *_, error = capsys.readouterr().err.splitlines()
        assert error.startswith("mars: ") and said in error
    monkeypatch.setattr(curves, "of_run", Mock(side_effect=KeyboardInterrupt))
    assert view.main([str(run)]) == 130
    assert capsys.readouterr().err.startswith("mars: interrupted")
