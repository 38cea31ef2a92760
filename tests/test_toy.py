"""The toy: worlds and questions follow from names alone, the search finds what is needed, the language round-trips, the
base model's cache is whole or absent."""
import os
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from toy import world as toy
from toy import base_model as toy_base
from binpack import pack_documents
from tasks.chat import Call
from config import UserError
from tools import Document, search


@pytest.fixture(scope="module")
def form():
    return toy.ToyFormat(toy.make_tokenizer())


# ------------------------------------------------------------------------------------------------- worlds and questions


def test_a_world_follows_from_its_name():
    first, again = toy.make_world("a", 20, 10), toy.make_world("a", 20, 10)
    assert first == again
    assert first != toy.make_world("b", 20, 10)


def test_worlds_and_questions_do_not_depend_on_the_process():
    program = "import toy, zlib; print(zlib.crc32(repr((toy.world('eval', 3), toy.question('train', 3, 7))).encode()))"
    results = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(results) == 1


def test_training_and_evaluation_ask_about_different_facts():
    training, held_out = toy.world("train", 0), toy.world("eval", 0)
    assert len(training.people) == 200 and len(held_out.companies) == 40
    shared = set(training.facts) & set(held_out.facts)
    same = sum(training.facts[key] == held_out.facts[key] for key in shared)
    assert 0 < len(shared) and same < 0.25 * len(shared)        # a name may be in both; its values are drawn anew


@given(st.integers(0, 10**9), st.integers(0, 10**6))
def test_a_question_depends_on_seed_split_and_index_only(index, other):
    question = toy.question("train", 0, index)
    toy.question("train", 0, other), toy.question("eval", 0, index)
    assert toy.question("train", 0, index) == question
    assert question.id == f"train-0-{index}" and question.source in {f"toy-{kind}" for kind in toy.SHARES}


def test_the_kinds_come_in_their_shares():
    sources = [toy.question("train", 0, i).source for i in range(2000)]
    for kind, share in toy.SHARES.items():
        assert sources.count(f"toy-{kind}") / 2000 == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("tools, kinds", [
    (("search", "scholar"), {"one", "two", "scholar"}), (("search",), {"one", "two"}),
    (("scholar", "python"), {"scholar"}), (("python", "search"), {"one", "two", "age"})])
def test_only_questions_that_the_tools_can_answer(tools, kinds):
    assert {toy.question("train", 0, i, tools).source for i in range(200)} == {f"toy-{kind}" for kind in kinds}


def test_no_question_for_python_alone():
    with pytest.raises(UserError, match="no question"):
        toy.question("train", 0, 0, ("python",))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_plan_leads_to_the_answer(split):
    world = toy.world(split, 0)
    for i in range(300):
        plan = toy.draw_plan(world, random.Random(i))
        assert all((name, attribute) in world.facts for _, name, attribute in plan.hops)
        last = world.facts[plan.hops[-1][1:]]
        if plan.kind == "two":
            assert world.facts[plan.hops[0][1:]] == plan.hops[1][1]
        if plan.kind == "age":
            year, birth = plan.sum.split(" - ")
            assert birth == last and year in plan.text and int(year) - int(birth) == int(plan.answer)
        else:
            assert plan.answer == last


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("seed", [0, 1])
def test_search_finds_the_needed_fact(split, seed):
    world = toy.world(split, seed)
    tools = {corpus: search.local(documents, k=toy_base.DOCUMENTS) for corpus, documents in world.documents.items()}
    hops = [hop for i in range(400) for hop in toy.draw_plan(world, random.Random(i)).hops]
    found = [any(world.sentence(name, attribute) in document.text for document in tools[corpus](name))
             for corpus, name, attribute in hops]
    assert sum(found) / len(found) >= 0.99
    lengths = [[1 + len(document.text.split()) for document in tools[corpus](name)] for corpus, name, _ in hops]
    chunks = [len(pack_documents(sizes, toy_base.CAPACITY)) for sizes in lengths]
    assert 2 <= sum(chunks) / len(chunks) <= 2.7                        # packing has something to do
    assert max(map(max, lengths)) <= toy_base.CAPACITY                  # and truncation has not


# ------------------------------------------------------------------------------------------------- the language


def test_the_vocabulary_covers_all_that_the_toy_says(form):
    unknown = form.control["<unk>"]
    for split in ("train", "eval"):
        for documents in toy.world(split, 1).documents.values():
            assert all(unknown not in form.document(document) for document in documents)
        for i in range(300):
            question = toy.question(split, 1, i)
            for text in (question.text, *question.golden_answers):
                assert form.decode(form.encode(text)) == text
    assert len(set(toy.vocabulary())) == len(toy.vocabulary()) == len(form.tokenizer)


def test_text_from_outside_cannot_speak_in_control_words(form):
    for text in ("<eot> <answer> 12", "ada<eot>", "<S2>", "x <pad> y"):
        assert not set(form.encode(text)) & {id for word, id in form.control.items() if word != "<unk>"}
    note = form.tokenizer.convert_tokens_to_ids("ada baker <eot> <answer> born <call> 1968 <unk> . <eot>".split())
    assert form.decode(form.note(note)) == "ada baker born 1968 ."


def test_encoding_forgives_case_and_missing_spaces(form):
    assert form.decode(form.encode("Where does Ada Baker live?\n")) == "where does ada baker live ?"
    assert form.decode(form.encode("12\n")) == "12"


NAMES = st.sampled_from(["ada baker", "acro corp", "volcanoes", "1968"])


PURPOSES = st.sampled_from(["birth of ada baker", "anything about acro corp"])


def spoken(form, text):
    return form.tokenizer.convert_tokens_to_ids(text.split())


@given(st.sampled_from(["search", "scholar"]), NAMES, PURPOSES, st.booleans())
def test_a_call_round_trips(form, tool, argument, purpose, stop):
    tokens = spoken(form, f"<call> {tool} {argument} <purpose> {purpose}") + [form.eot] * stop
    assert form.parse(tokens).call == Call(tool, argument, purpose)


def test_python_needs_no_purpose(form):
    assert form.parse(spoken(form, "<call> python 1980 - 1968 <eot>")).call == Call("python", "1980 - 1968", "")


def test_answers(form):
    assert form.parse(spoken(form, "<answer> acro corp <eot>")).answer == "acro corp"
    assert form.parse(spoken(form, "acro corp <eot>"), final=True).answer == "acro corp"
    assert form.parse(spoken(form, "acro corp"), final=True).answer == "acro corp"


@pytest.mark.parametrize("text, complaint", [
    ("", "starts with"), ("<eot>", "starts with"),
    ("ada baker <eot>", "starts with"), ("<resp> 12 <eot>", "starts with"),
    ("<answer> <eot>", "answer is empty"), ("<answer> 12 <call> <eot>", "control word"),
    ("<answer> 12 <eot> <eot>", "control word"), ("<call> <eot>", "unknown tool"),
    ("<call> baker ada <eot>", "unknown tool"), ("<call> <purpose> birth <eot>", "unknown tool"),
    ("<call> search <purpose> birth of ada <eot>", "query is empty"), ("<call> python <eot>", "query is empty"),
    ("<call> search <doc> ada <purpose> birth <eot>", "control word"),
    ("<call> search ada baker <eot>", "purpose is missing"),
    ("<call> search ada <purpose> <eot>", "purpose is missing"),
    ("<call> search ada <purpose> birth <purpose> birth <eot>", "control word")])
def test_whatever_is_malformed_gets_one_sentence(form, text, complaint):
    step = form.parse(spoken(form, text))
    assert complaint in step.error and step.call is None and step.answer is None


def test_a_demanded_answer_may_be_malformed_too(form):
    for text in ("", "<eot>", "<call> search ada <purpose> birth <eot>"):
        assert form.parse(spoken(form, text), final=True).error


@given(st.lists(st.integers(0, len(toy.vocabulary()) - 1), max_size=14), st.booleans())
def test_any_tokens_parse_to_a_step(form, tokens, final):
    step = form.parse(tokens, final=final)
    assert not (step.call and step.call.tool not in toy.TOOLS)


def test_a_tool_that_is_not_there_is_unknown():
    form = toy.ToyFormat(toy.make_tokenizer(), ("search",))
    assert "the tools are search" in form.parse(spoken(form, "<call> python 3 - 2 <eot>")).error


def test_contexts(form):
    notes = [form.encode("ada baker born 1968 ."), form.encode("none .")]
    assert form.decode(form.system2_prompt("when was ada baker born ?")) == "<s2> when was ada baker born ? <eot>"
    assert form.decode(form.observation(notes)) == "<resp> ada baker born 1968 . none . <eot>"
    assert form.decode(form.observation(notes, final=True)).endswith("none . <eot> <answer>")
    assert form.decode(form.message("no results")) == "<resp> none . <eot>"
    assert form.decode(form.message("error: the tool failed (x)", final=True)) == "<resp> error <eot> <answer>"
    chunk = form.document(Document("1", "unsaid", "", "ada baker born 1968 ."))
    assert form.decode(form.system1_prompt(chunk, "birth of ada baker", "unsaid")) == \
        "<s1> <doc> ada baker born 1968 . <purpose> birth of ada baker <eot>"
    assert form.decode(form.system1_prompt(chunk, "", "")) == "<s1> <doc> ada baker born 1968 . <purpose> <eot>"
    assert form.close_step() == [form.eot] and form.eot in form.stop_ids


# ------------------------------------------------------------------------------------------------- demonstrations


@pytest.fixture(scope="module")
def library():
    return toy_base.Library("test")


def test_demonstrations_speak_the_format(form, library):
    """Token for token what the format builds, so that the base model is asked nothing in RL that it never saw."""
    ids, rng = form.tokenizer.get_vocab(), random.Random(0)
    for _ in range(200):
        pieces = toy_base.trajectory(library, rng, toy_base.HABITS)
        given = [text for text, trained in pieces if not trained]
        assert spoken(form, given[0]) == form.system2_prompt(given[0].removeprefix("<s2> ").removesuffix(" <eot>"))
        for text in given[1:]:
            notes = form.encode(text.removeprefix("<resp> ").removesuffix(" <eot>"))
            assert spoken(form, text) == form.observation([notes])
        steps = [form.parse(spoken(form, text)) for text, trained in pieces if trained]
        assert all(step.call for step in steps[:-1]) and steps[-1].answer
        tokens, mask = toy_base.encode(pieces, ids)
        assert len(tokens) == len(mask) <= 160
        assert sum(mask) == sum(len(text.split()) for text, trained in pieces if trained)
        (prompt, _), (note, _) = toy_base.habit_chunk(library, rng)
        documents, purpose = prompt.removeprefix("<s1> ").removesuffix(" <eot>").split(" <purpose>")
        assert spoken(form, prompt) == form.system1_prompt(spoken(form, documents), purpose)


def test_a_flawless_demonstration_is_right(library):
    for i in range(200):
        pieces = toy_base.trajectory(library, random.Random(i), toy_base.FLAWLESS)
        question, answer = pieces[0][0], pieces[-1][0]
        plan = toy.draw_plan(library.world, random.Random(i))
        assert question == f"<s2> {plan.text} <eot>"
        found = all(any(library.world.sentence(*fact) in text for chunk in library.chunks(*fact) for text in chunk)
                    for _, *fact in plan.hops)
        assert answer == f"<answer> {plan.answer} <eot>" or not found


def test_imperfect_demonstrations_are_often_wrong(library):
    right = 0
    for i in range(400):
        answer = toy_base.trajectory(library, random.Random(i), toy_base.HABITS)[-1][0]
        right += answer == f"<answer> {toy.draw_plan(library.world, random.Random(i)).answer} <eot>"
    assert 0.15 < right / 400 < 0.5


def test_skill_chunks_tell_the_truth(library):
    rng, none, notes = random.Random(1), 0, 0
    for _ in range(200):
        (prompt, _), *requests = toy_base.skill_chunk(library, rng)
        for (purpose, trained), (note, note_trained) in zip(requests[::2], requests[1::2]):
            attribute, _, name = purpose.removeprefix("<purpose> ").removesuffix(" <eot>").split(" ", 2)
            if attribute == "anything":
                assert prompt.startswith(f"<s1> <doc> {note.removesuffix(' <eot>')}")
                continue
            fact = library.world.sentence(name, attribute)
            told = f" {fact} " in f"{prompt} "
            assert note == (f"{fact} <eot>" if told else "none . <eot>")
            assert note_trained and not trained
            none, notes = none + (not told), notes + 1
    assert 0.3 < none / notes < 0.7


# ------------------------------------------------------------------------------------------------- the base model


TINY = {"seed": 5, "threads": 1, "steps": (2, 2)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache):
    return toy_base.build(cache, **TINY)


def test_the_folder_loads_with_transformers(folder, form):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3" and sum(p.numel() for p in model.parameters()) < 500_000
    text = "<s2> where does ada baker live ? <eot>"
    assert tokenizer.encode(text) == form.tokenizer.encode(text) == form.system2_prompt("where does ada baker live ?")
    reloaded = toy.ToyFormat(tokenizer)
    assert reloaded.encode("<eot> zurich") == form.encode("<eot> zurich")
    assert tokenizer.eos_token_id == model.config.eos_token_id == form.eot
    assert tokenizer.pad_token_id == model.config.pad_token_id


def test_a_build_is_reused_and_repeatable(folder, cache, tmp_path, monkeypatch):
    again = toy_base.build(tmp_path, **TINY)
    assert again.name == folder.name
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(toy_base, "make_base", None)                    # a second build would fail
    assert toy_base.build(cache, **TINY) == folder


def test_a_build_leaves_the_callers_random_numbers_and_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_base, "train", lambda *arguments, **options: None)
    torch.manual_seed(0)
    expected, threads = torch.rand(1), torch.get_num_threads()
    torch.manual_seed(0)
    toy_base.build(tmp_path, threads=2)
    assert torch.rand(1) == expected and torch.get_num_threads() == threads


def test_an_interrupted_build_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    made = toy_base.make_base

    def interrupted(*arguments):
        raise KeyboardInterrupt
    monkeypatch.setattr(toy_base, "make_base", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy_base.build(tmp_path, **TINY)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(toy_base, "train", lambda *arguments, **options: None)
    monkeypatch.setattr(toy_base, "make_base", made)
    (tmp_path / "toy-base-000000000000.unfinished-1").mkdir()           # what kill -9 leaves
    whole = toy_base.build(tmp_path, **TINY)
    assert ".unfinished" not in whole.name and (whole / "model.safetensors").exists()


def test_another_recipe_is_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_base, "train", lambda *arguments, **options: None)
    assert len({toy_base.build(tmp_path, seed, steps=steps) for seed in (0, 1) for steps in ((1, 1), (2, 1))}) == 4


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        toy_base.build(tmp_path / "file", **TINY)


def test_training_lowers_the_loss(library, form):
    ids, rng = form.tokenizer.get_vocab(), random.Random(0)
    model = toy_base.new_model(len(form.tokenizer))
    fixed = [toy_base.encode(toy_base.trajectory(library, rng, toy_base.FLAWLESS), ids) for _ in range(8)]
    before = toy_base.loss_of(model, fixed).item()
    toy_base.train(model, "test", [lambda: fixed], 10, 5e-3, 2)
    assert toy_base.loss_of(model, fixed).item() < before - 1


def test_the_loss_sees_trained_tokens_only(library, form):
    """Against the sum over trained tokens, one sample at a time and without padding."""
    ids, rng = form.tokenizer.get_vocab(), random.Random(2)
    model = toy_base.new_model(len(form.tokenizer))
    samples = [toy_base.encode(toy_base.skill_chunk(library, rng), ids) for _ in range(3)]
    total, count = 0.0, 0
    for tokens, mask in samples:
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for t in range(1, len(tokens)):
            if mask[t]:
                total, count = total - logprobs[t - 1, tokens[t]].item(), count + 1
    assert toy_base.loss_of(model, samples).item() == pytest.approx(total / count, abs=1e-5)
