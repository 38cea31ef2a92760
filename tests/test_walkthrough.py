"""docs/walkthrough.md is true: a fresh page's claims hold, and the committed one is of its kind.

The fresh page is made as the command makes it, from a base model that was hardly trained.
"""

import importlib
import math
import re
import string
from pathlib import Path

import pytest
import torch

import grpo
import mars
import train
from bench import walkthrough
from config import UserError, parser
from plumbing.start import build
from plumbing.logbook import record
from toy import base_model as toy_base

REPO = Path(__file__).parent.parent
COMMITTED = walkthrough.PAGE.read_text()


def grade(question, answer: str) -> float:
    """Half of all answers are right, for such a model would hardly ever find the true one."""
    return float(sum(map(ord, answer)) % 2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache where the default options find a base model that was trained an eighth as long."""
    folder = tmp_path_factory.mktemp("cache")
    usual = (toy_base.SKILL_STEPS, toy_base.HABIT_STEPS)
    made = toy_base.build(folder, threads=1, steps=(60, 30))
    return made.rename(folder / f"toy-base-{toy_base.recipe(0, usual)}").parent


def make_run(cache):
    config = mars.MarsConfig(cache=str(cache))
    return build(mars.METHOD, config, training=True, folder=cache, grade=grade)


@pytest.fixture(scope="module")
def walked(cache):
    """The run, the step that is followed, and the page about it."""
    run = make_run(cache)
    walk = walkthrough.follow(run)
    return run, walk, walkthrough.fill(run, walk)


def plain(text: str) -> str:
    """A page with the minus signs that Python reads."""
    return text.replace("−", "-")


def numbers(pattern: str, page: str) -> list[float]:
    """The numbers in the groups of a pattern that a page holds once."""
    (found,) = re.findall(pattern, plain(page))
    return [float(number) for number in found]


def blocks(page: str) -> list[dict[str, list[str]]]:
    """The page's tables of tokens: row's name -> cells."""
    found = []
    for block in re.findall(r"^token .*?$(?:\n\S.*$)*", plain(page), re.MULTILINE):
        rows = [line.split() for line in block.split("\n") if line != "```"]
        found.append({name: cells for name, *cells in rows})
    return found


def test_the_command_writes_this_page(walked, cache, tmp_path, capsys):
    out = tmp_path / "page.md"
    assert walkthrough.main(["--cache", str(cache), "--out", str(out)], grade=grade) == 0
    assert out.read_text() == walked[2]
    assert str(out) in capsys.readouterr().out


def test_the_step_is_one_of_the_loop(walked, cache):
    _, walk, _ = walked
    run = make_run(cache)
    for step in range(walk.step + 1):
        metrics, trajectories = train.train_step(run, step)
    assert walk.metrics.items() <= metrics.items()
    for ours, theirs in zip(walk.trajectories, trajectories, strict=True):
        assert ours.samples() == theirs.samples()
    again = train.attempts(run, walk.step, train.questions_of(run, walk.step))
    for ours, theirs in zip(walk.again, again, strict=True):
        assert ours.samples() == theirs.samples(), "the sampler has the new weights"
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(walked[0].policy.parameters(), run.policy.parameters(), strict=True)
    )


def test_the_attempt_is_worth_following(walked):
    _, walk, page = walked
    assert walk.attempt.reward == 1
    group = [t.reward for t in walk.trajectories if t.question_index == walk.attempt.question_index]
    assert 2 <= sum(group) <= len(group) - 2
    call = walk.attempt.turns[0]
    assert 1 < len(call.readers) < len(call.documents)
    assert walk.attempt.question.text in page and walk.reader.sample.copies == 1


def test_a_run_without_such_an_attempt_is_an_error(cache):
    run = make_run(cache)
    run.grade = lambda question, answer: 0.0
    run.config.steps = 1
    with pytest.raises(UserError, match="no step"):
        walkthrough.follow(run)


def test_shown_tokens_are_the_records(walked):
    run, walk, page = walked
    line = record(walk.attempt, run.chat, walk.step, "train")
    prompt, call, note, after2, after1 = blocks(page)
    sample = walk.attempt.contexts[0].sample
    length = len(prompt["id"]) + len(call["id"])
    assert [int(i) for i in prompt["id"] + call["id"]] == sample.tokens[:length]
    assert [cell == "1" for cell in prompt["mask"] + call["mask"]] == sample.mask[:length]
    assert " ".join(call["token"]) == line["turns"][0]["text"]
    for cells, logprob in zip(zip(*call.values()), sample.logprobs[len(prompt["id"]) :]):
        shown = dict(zip(call, cells))
        assert float(shown["log-prob"]) == pytest.approx(logprob, abs=6e-4)
        assert float(shown["probability"]) == pytest.approx(math.exp(logprob), abs=6e-3)
    chunks = next(turn["chunks"] for turn in line["turns"] if turn["call"])
    shown = [chunk["note"] for chunk in chunks]
    assert " ".join(note["token"]) in shown
    assert after2["token"] == call["token"] and after1["token"] == note["token"]
    assert after2["before"] == call["probability"] and after1["before"] == note["probability"]
    for part in line["segments"]:
        assert f"{'sampled' if part['trained'] else 'given':<9}{part['text']}\n" in page


def test_a_roles_weights_sum_to_one(walked):
    """What is in the micro-batches, and what advantage 0 keeps out of them."""
    run, walk, page = walked
    sums = re.findall(r"\| (\d\.\d{6}) \|$", page, re.MULTILINE)
    assert sums == ["1.000000", "1.000000"]
    for role, samples in walk.terms.items():
        weight = 0.0
        for batch in walk.batches:
            mine = [walk.trained[i].role == role for i in batch.owner.tolist()]
            weight += float(batch.weight[torch.tensor(mine)].sum())
        count = sum(sample.copies for sample in samples)
        flat = sum(sample.copies for sample in samples if not sample.advantage)
        assert weight + flat / count == pytest.approx(1, abs=1e-6)


def test_the_losses_shown_are_the_steps(walked):
    run, walk, _ = walked
    total = 0.0
    for batch in walk.batches:
        new = torch.zeros(len(batch.target))
        for index in batch.owner.unique().tolist():
            new[batch.owner == index] = walk.before[index]
        total += float(grpo.grpo_loss(new, batch.old_logprob, batch.advantage, batch.weight)[0])
    assert total == pytest.approx(walk.metrics["loss"], abs=1e-6)
    after = walkthrough.logprobs(run, walk.batches, walk.trained)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(walk.after, after, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(walk.before, walk.after, strict=True))


@pytest.mark.parametrize("which", ["fresh", "committed"])
def test_the_pages_arithmetic(which, request):
    page = COMMITTED
    if which == "fresh":
        page = request.getfixturevalue("walked")[2]
    number = r"(-?[\d.]+)"
    new, old, ratio = numbers(rf"exp\({number} - \({number}\)\) = {number}", page)
    assert ratio == pytest.approx(math.exp(new - old), abs=3e-6)
    weight, loss, term = numbers(rf"w · ℓ = {number} · {number} = {number}", page)
    low, high = numbers(rf"clip\(ρ, {number}, {number}\)", page)
    factors = numbers(rf"= -min\({number} · {number}, {number} · {number}\) = {number}", page)
    assert factors[0] == ratio and low <= factors[2] <= high and factors[1] == factors[3]
    assert factors[4] == loss
    assert loss == pytest.approx(-min(ratio * factors[1], factors[2] * factors[1]), abs=1e-5)
    assert term == pytest.approx(weight * loss, abs=3e-7)
    kernel = re.findall(rf"grpo.grpo_loss of this token: {number}", plain(page))
    assert kernel == [f"{term:.7f}"], "by hand and by the kernel"
    for kind, reward in (("right", 1), ("wrong", 0)):
        pattern = rf"{kind}: A = \({reward} - {number}\) / {number} = {number}"
        mean, spread, advantage = numbers(pattern, page)
        assert advantage == pytest.approx((reward - mean) / spread, abs=0.01)
    for shown in blocks(page)[1:3]:
        for logprob, chance in zip(shown["log-prob"], shown["probability"]):
            assert float(chance) == pytest.approx(math.exp(float(logprob)), abs=6e-3)


def test_the_committed_page_was_made_by_the_present_template():
    parts = string.Formatter().parse(walkthrough.TEMPLATE.read_text())
    end = 0
    for text, *_ in parts:
        start = COMMITTED.find(text, end)
        assert start >= 0, f"the page lacks: {text}; run {walkthrough.COMMAND}"
        assert end or start == 0
        end = start + len(text)
    assert end == len(COMMITTED)


def test_the_committed_step_did_what_the_page_says():
    pattern = r"System \d, (right|wrong) \| \d+ \| (-?[\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \|"
    rows = re.findall(pattern, plain(COMMITTED))
    assert len(rows) == 4
    for kind, advantage, before, after in rows:
        assert (kind == "right") == (float(advantage) > 0) == (float(after) > float(before))


def test_the_page_can_be_read_in_ten_minutes():
    assert len(COMMITTED.splitlines()) <= 255
    assert len(COMMITTED.split()) < 2500


def named(page: str) -> list[str]:
    """Names like mars.act or rollout.Env.reward."""
    names = re.findall(r"`((?:\w+\.)+\w+)`", page)
    return [name for name in names if not name.endswith((".md", ".py", ".jsonl"))]


def test_every_function_that_the_page_names_exists():
    names = named(COMMITTED)
    assert len(set(names)) > 15
    for name in names:
        module, *rest = name.split(".")
        found = importlib.import_module(module)
        for i, part in enumerate(rest, 1):
            if not hasattr(found, part):
                importlib.import_module(".".join([module, *rest[:i]]))
            found = getattr(found, part)


def test_files_and_options_that_the_pages_name_exist():
    choices = (REPO / "docs" / "choices.md").read_text()
    for file in re.findall(r"`([\w/]+\.(?:py|md))`", COMMITTED + choices):
        assert (REPO / file).exists(), file
    options = parser(mars.MarsConfig, "").format_help().split()
    for option in re.findall(r"`(--\w+)", COMMITTED + choices):
        assert option in options or f"{option}," in options, option
