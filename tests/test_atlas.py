"""The atlas: its pages answer its questions, and nothing that is held out stands in training."""

import collections
import dataclasses
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.chat import QWEN25, tokenizer
from helpers.samples import text_of
from helpers.stopped import options_of

import mars
from mars import MarsConfig
from recipes import atlas, atlas_world
from recipes.atlas_world import LONG, SHORT
from tasks import questions
from tasks.chat import ChatFormat
from tasks.grading import exact_match
from tools import KNOWN, Document, Tool, search

REPO = Path(__file__).parent.parent
needs_facts = pytest.mark.skipif(
    importlib.util.find_spec("countryinfo") is None,
    reason="countryinfo is not installed: see requirements-real.txt",
)
WORLDS = [(0, SHORT), (1, LONG)]


@pytest.fixture(scope="module", params=WORLDS, ids=["short", "long"])
def world(request):
    return atlas_world.make_world(*request.param)


def plans(world, part, count=240):
    """As many plans of each kind, drawn at random."""
    rng = random.Random(f"test {part}")
    kinds = world.size.kinds
    return [atlas_world.draw_plan(world, part, kinds[i % len(kinds)], rng) for i in range(count)]


def word(text, inside):
    """Whether a text stands in another one as whole words."""
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", inside) is not None


@needs_facts
def test_training_names_no_country_that_is_held_out(world):
    """Neither in a page nor in a question; but a name may be part of a trained one's or a value."""
    assert sorted(sum(world.parts.values(), [])) == sorted(world.names), "none in two parts"
    held_out = world.parts["held_out"]
    assert 0.25 < len(held_out) / len(world.names) < 0.35
    known = [word for name in world.names.keys() - held_out for word in (name, *world.names[name])]
    for (name, _), value in world.facts.items():
        known += value.golds if name not in held_out else ()
    secret = [re.escape(name) for name in held_out if not any(word(name, k) for k in known)]
    assert len(secret) > 50
    pages = [f"{page.title} {page.text}" for page in world.searched("train")]
    rows = [json.dumps(row, ensure_ascii=False) for row in atlas_world.questions(world, "train")]
    told = re.compile(rf"(?<!\w)({'|'.join(secret)})(?!\w)")
    assert not [text for text in pages + rows if told.search(text)]


@needs_facts
def test_every_question_is_answered_by_its_plan(world):
    """The pages that are found are read here without the world's own notes on who tells what."""
    for part in world.parts:
        find = search.local(world.searched(part), world.size.top_k)
        for plan in plans(world, part):
            read = plan.text
            assert not [gold for gold in plan.golds if word(gold, read)], "the question says it"
            numbers = []
            for hop in plan.hops:
                name, attribute = hop.fact
                # It needs only what the question or a former look-up says.
                known = world.facts[hop.fact].text if hop.backwards else name
                assert hop.query in (f"{attribute} of {known}", f"country {known}")
                assert word(known, read), (plan.text, hop)
                value = world.facts[hop.fact].text
                ways = world.size.tellings(attribute)
                told = [words.format(name=name, value=value) for words in ways]
                found = find(hop.query)
                assert any(name in p.title and any(t in p.text for t in told) for p in found), hop
                numbers.append(value.replace(",", ""))
                read += f" {name}, {value}"
            answer = plan.golds[0]
            if plan.code:
                assert [x for x in plan.code.split() if x.isdecimal()] == numbers
                answer = str(eval(plan.code))
            else:
                # Which country it is, or what its fact says.
                assert any(word(gold, f"{name}: {value}") for gold in plan.golds)
            assert exact_match(answer, plan.golds)


def test_usual_spellings_count():
    assert exact_match("Brasilia", atlas_world.spellings("Brasília"))
    assert exact_match("St. John's", atlas_world.spellings("Saint John's"))
    ivory = {"name": "Ivory Coast", "altSpellings": ["CI", "Côte d'Ivoire", "CIV", "Кот-д’Ивуар"]}
    names = atlas_world.names_of(ivory)
    assert exact_match("Cote d'Ivoire", names) and exact_match("the Ivory Coast", names)
    assert not exact_match("CI", names) and not any("К" in name for name in names)


@pytest.mark.parametrize(
    "module, made",
    [
        ("toy.world", "world('eval', {0}), question('train', {0}, 7)"),
        pytest.param("recipes.atlas_world", "make_world({0}).searched('train')", marks=needs_facts),
    ],
)
def test_a_world_follows_from_its_seed(module, made):
    """The toy's and this one, in another process as well, whose hashes of texts are other ones."""
    command = [sys.executable, "-c", f"from {module} import *; print(({made.format(1)}))"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    said = subprocess.check_output(command, cwd=REPO, env=environment, text=True)
    names = vars(importlib.import_module(module))
    here, other = (str(eval(made.format(seed), names)) for seed in (1, 0))
    assert said.strip() == here != other


# ---------------------------------------------------------------- demonstrations


def playing(world, **limits):
    """(config, chat, tools) with a tokenizer of 400 words, and so with wide limits."""
    wide = {"sys2_context": 9000, "step_tokens": 900, "answer_tokens": 200, "sys1_prompt": 9000}
    tools = "search,python:raw" if "sum" in world.size.kinds else "search"
    config = MarsConfig(tools=tools, **{**wide, "sys1_response": 500, **limits})
    calls = {
        "search": search.local(world.searched("train"), world.size.top_k),
        "python": lambda code: [search.Document("python", "", "", str(eval(code)))],
    }
    names = [name.removesuffix(":raw") for name in tools.split(",")]
    tools = [Tool(name, *KNOWN[name], calls[name]) for name in names]
    return config, ChatFormat(tokenizer(QWEN25), mars.words(config, tools), tools), tools


@needs_facts
@pytest.mark.parametrize("purpose", [True, False])
def test_demonstrations_are_flawless_and_true(world, purpose):
    """Without purposes they neither state nor tell one."""
    config, chat, tools = playing(world, purpose=purpose)
    for plan in plans(world, "train", 16):
        trajectory = atlas.demonstrate(plan, world, config, chat, tools)
        assert trajectory is not None, plan
        assert trajectory.reward == 1 and trajectory.ended == "answer"
        assert not any(turn.problem for turn in trajectory.turns)
        assert len(trajectory.turns) == len(plan.hops) + bool(plan.code) + 1
        for sample in trajectory.samples("sys1"):
            assert ("What to find out: " in chat.text(sample.tokens)) == purpose
        system2 = trajectory.samples("sys2")[0]
        read = chat.text(system2.tokens)
        assert ('"purpose"' in text_of(chat, system2, True)) == purpose
        for hop in plan.hops:
            assert (f'"purpose": "{hop.purpose}"' in read) == purpose
            found = atlas.clause(world, hop, hop.fact[0])
            assert f" says: {found}." in read
            assert f"Found: {found}.\n" in read  # word for word as in the note
            assert found.startswith(f"{hop.purpose} is ")
        # What was found takes its place in what is wanted next: a country, or a part of a sum.
        for i, wanted in enumerate(re.findall(r"Wanted: (.*)\.\n", read)):
            purposes = [hop.purpose for hop in plan.hops[i:]]
            if plan.code:
                values = [atlas.value(world, hop) for hop in plan.hops[:i]]
                assert wanted == f" {plan.code.split()[1]} ".join(values + purposes)
            else:
                of = "".join(f"the {hop.fact[1]} of " for hop in plan.hops[:i:-1])
                assert wanted == of + purposes[0]


@needs_facts
def test_a_note_tells_the_wanted_fact_or_whose_the_other_one_is():
    """Each is written in the chunk, the wanted one first; without either the note is idle.

    In the long world, where some countries have no known neighbour.
    """
    world = atlas_world.make_world(size=LONG)
    pages = world.searched("held_out")
    rng = random.Random(0)
    seen = collections.Counter()
    for _ in range(1200):
        wanted = rng.choice(list(world.told))
        chunk = rng.sample(pages, rng.randint(1, 2))
        if rng.random() < 0.3:
            chunk.append(next(page for page in pages if page.title == wanted[0]))
        read = "\n\n".join(f"[document] {page.title}\n{page.text}" for page in chunk)
        fact, said = atlas.note(atlas_world.hop_to_fact(*wanted), world, read)
        there = {
            (known, title)
            for known, told in world.told.items()
            for title, sentence in told
            if known[1] == wanted[1]
            and any(page.title == title and sentence in page.text for page in chunk)
        }
        known = {known for known, _ in there}
        seen["wanted" if wanted in known else "other" if known else "idle"] += 1
        if not there:
            assert (fact, said) == (None, atlas.IDLE)
            continue
        assert fact in known and (fact == wanted) == (wanted in known)
        assert said.startswith(tuple(f"The page {t} says: " for k, t in there if k == fact))
        assert word(fact[0], said) and word(world.facts[fact].text, said)
    assert min(seen["idle"], seen["wanted"], seen["other"]) > 10, seen


@needs_facts
@pytest.mark.parametrize("answer", ["", "5"])
def test_what_the_tools_did_not_find_is_not_demonstrated(answer):
    """Else System 2 would be taught to make up sums, or facts though its answer is right."""
    world = atlas_world.make_world(size=LONG)
    plan = next(plan for plan in plans(world, "train", 24) if plan.code)
    config, chat, tools = playing(world)
    assert atlas.demonstrate(plan, world, config, chat, tools) is not None

    def broken(argument):
        return [Document("x/0", "", "", answer)] if answer else []

    for name in ("python", "search"):
        changed = [dataclasses.replace(t, call=broken) if t.name == name else t for t in tools]
        assert atlas.demonstrate(plan, world, config, chat, changed) is None


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder to work in: worlds are made once in its cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def options(monkeypatch, home):
    """A function from a command line to the options that reach the run."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(atlas, "warm_model", lambda config: "warm/atlas")
    return lambda line: options_of(atlas.main, line.split())


@needs_facts
@pytest.mark.parametrize("preset", atlas.PRESETS)
def test_a_run_starts_warm_and_asks_about_its_world(preset, options):
    config = options(f"--preset {preset} --steps 7")
    assert (config.model, config.preset, config.steps) == ("warm/atlas", preset, 7)
    assert config.top_k == atlas.SIZES[preset].top_k and config.eval_questions == 64
    asked, held_out = questions.split(config.data, config.eval_data, held_out=200, seed=0)
    assert len(asked) == 1500 and len(held_out) == 200
    assert {question.source for question in held_out} == set(atlas.SIZES[preset].kinds)
    found = [search.make("local", docs=docs)("Brazil") for docs in (config.docs, config.eval_docs)]
    assert {page.id for page in found[0]} != {page.id for page in found[1]}


@needs_facts
def test_a_plain_model_is_asked_as_a_run_would_be(options):
    config = options("eval smollm2 --preset atlas-long --max_turns 3")
    assert (config.max_turns, config.sys1_prompt) == (3, atlas.ATLAS_LONG["sys1_prompt"])
    assert config.data.endswith("held_out.jsonl") and config.eval_questions == 64
    assert config.docs.endswith("held_out_pages.jsonl") and "atlas-long" in config.docs
    assert options("eval smollm2 --data own.jsonl --docs own").data == "own.jsonl"
    assert options("--data own.jsonl").data == "own.jsonl", "nor is it replaced in training"
    assert options("ask smollm2 Who?").docs.endswith("held_out_pages.jsonl")


def test_a_resumed_run_has_its_own_model_and_files(options):
    """Though the cache was moved, or the warm start's code has changed since."""
    saved = {"model": "old/warm", "data": "a", "eval_data": "b", "docs": "c", "eval_docs": "d"}
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/config.json").write_text(json.dumps({"preset": "atlas-long", **saved}))
    config = options("--resume --name one --cache elsewhere")
    assert {name: getattr(config, name) for name in saved} == saved
    assert config.preset == "atlas-long" and not Path("elsewhere").exists()


def test_a_warm_start_belongs_to_the_model_and_not_to_its_folders_name(monkeypatch, tmp_path):
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atlas.warm_start, "train", lambda *given: made.append(given[-1]))
    monkeypatch.setattr(atlas, "demonstrations", lambda *given: None)
    weights = tmp_path / "model" / "weights"
    weights.parent.mkdir()
    weights.write_text("one")
    config = atlas.AtlasConfig(preset="atlas", cache="cache", model="model")
    first = atlas.warm_model(config)
    assert atlas.warm_model(config) == first and len(made) == 1
    assert atlas.warm_model(dataclasses.replace(config, purpose=False)) != first
    weights.write_text("three")
    assert atlas.warm_model(config) != first and len(made) == 3
