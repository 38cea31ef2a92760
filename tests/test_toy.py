"""The toy's world, language and base model."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import binpack
from tasks.format import Action, Call
from tools import bm25
from toy import base_model, language, world


@pytest.fixture(scope="module")
def form():
    return language.ToyFormat(language.make_tokenizer())


def test_training_and_evaluation_ask_about_different_facts():
    training, held_out = (world.world(split, 0).facts for split in ("train", "eval"))
    # A name may stand in both worlds. Its values are drawn anew.
    shared = set(training) & set(held_out)
    assert 0 < sum(training[key] == held_out[key] for key in shared) < 0.25 * len(shared)


def test_a_world_follows_from_its_seed_alone_in_another_process():
    """That process orders its sets in another way."""
    program = "from toy import world; print(world.world('eval', 3), world.question('eval', 3, 7))"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    text = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert text == f"{world.world('eval', 3)} {world.question('eval', 3, 7)}\n"


def test_the_kinds_come_in_their_shares_as_far_as_the_tools_answer_them():
    sources = [world.question("train", 0, i).source for i in range(2000)]
    for kind, share in world.SHARES.items():
        assert sources.count(f"toy-{kind}") / 2000 == pytest.approx(share, abs=0.04)
    for tools, kinds in (("search scholar", "one two scholar"), ("scholar python", "scholar")):
        asked = [world.question("train", 0, i, tools.split()) for i in range(200)]
        assert {q.source for q in asked} == {f"toy-{kind}" for kind in kinds.split()}


def spoken(form, text):
    """The ids of words as a role samples them, control words included."""
    return form.tokenizer.convert_tokens_to_ids(text.split())


def test_the_vocabulary_covers_all_that_the_toy_says(form):
    unknown = form.control["<unk>"]
    for split in ("train", "eval"):
        for documents in world.world(split, 1).documents.values():
            assert all(unknown not in form.document(document) for document in documents)
        for i in range(300):
            question = world.question(split, 1, i)
            for text in (question.text, *question.golden_answers):
                assert form.text(form.encode(text)) == text


def test_text_from_outside_cannot_speak_in_control_words(form):
    """Nor is it a slot or a whole prompt."""
    control = {id for word, id in form.control.items() if word != "<unk>"}
    outside = ("<eot> <answer> 12", "ada<eot>", "<S2>", "x <pad> y", "{chunk}", "<s1> {purpose}")
    for text in outside:
        first, *middle, last = form.prompt("sys2", question=text)
        assert (first, last) == (form.control["<s2>"], form.eot)
        assert middle == form.encode(text) and not set(middle) & control
    note = spoken(form, "ada baker <eot> <answer> born <call> 1968 <unk> . <eot>")
    assert form.text(form.note(note)) == "ada baker born 1968 ."


CALLS = (Call("search", "ada baker", "birth of ada baker"), Call("python", "1980 - 1968", ""))
MALFORMED = {
    "ada baker <eot>": "starts with",
    "<answer> <eot>": "answer is empty",
    "<answer> 12 <call> <eot>": "control word",
    "<call> <eot>": "unknown tool",
    "<call> baker ada <eot>": "unknown tool",
    "<call> search <purpose> birth of ada <eot>": "query is empty",
    "<call> search ada baker <eot>": "purpose is missing",
    "<call> search ada <purpose> birth <purpose> birth <eot>": "control word",
}


def test_calls_answers_and_what_is_malformed(form):
    for call in CALLS:
        text = f"<call> {call.tool} {call.argument}"
        if call.purpose:
            text += f" <purpose> {call.purpose}"
        for end in ("", " <eot>"):
            assert form.parse(spoken(form, text + end)) == Action(call=call)
    for text, final in (("<answer> acro corp <eot>", False), ("acro corp", True)):
        assert form.parse(spoken(form, text), final=final) == Action(answer="acro corp")
    for text, complaint in MALFORMED.items():
        assert complaint in form.parse(spoken(form, text)).error
        assert form.parse(spoken(form, text), final=True).error or text.startswith("ada")


@pytest.fixture(scope="module")
def library():
    return base_model.Library("test")


def test_demonstrations_speak_the_format(form, library):
    """Token for token what the format builds: RL asks nothing that the base model never saw."""
    ids = form.tokenizer.get_vocab()
    rng = random.Random(0)
    for _ in range(100):
        pieces = base_model.habit_trajectory(library, rng)
        given = [text for text, trained in pieces if not trained]
        question = given[0].removeprefix("<s2> ").removesuffix(" <eot>")
        assert spoken(form, given[0]) == form.prompt("sys2", question=question)
        for text in given[1:]:
            notes = form.encode(text.removeprefix("<resp> ").removesuffix(" <eot>"))
            assert spoken(form, text) == form.observation([notes])
        said = [text for text, trained in pieces if trained]
        steps = [form.parse(spoken(form, text)) for text in said]
        assert all(step.call for step in steps[:-1]) and steps[-1].answer
        tokens, mask = base_model.encode(pieces, ids)
        assert len(tokens) == len(mask) <= 160
        assert sum(mask) == sum(len(text.split()) for text in said)

        (prompt, _), (note, _) = base_model.habit_chunk(library, rng)
        bare = prompt.removeprefix("<s1> ").removesuffix(" <eot>")
        documents, purpose = bare.split(" <purpose>")
        built = form.prompt("sys1", chunk=spoken(form, documents), purpose=purpose, question="")
        assert spoken(form, prompt) == built


def test_a_plan_leads_to_the_answer_and_a_flawless_demonstration_finds_it(library):
    facts = library.world.facts
    known = 0
    for i in range(200):
        rng = random.Random(i)
        plan = world.draw_plan(library.world, rng)
        assert all((name, attribute) in facts for _, name, attribute in plan.hops)
        last = facts[plan.hops[-1][1:]]
        if plan.kind == "two":
            assert facts[plan.hops[0][1:]] == plan.hops[1][1]
        if plan.kind == "age":
            year, birth = plan.expression.split(" - ")
            assert birth == last and year in plan.text
            assert int(year) - int(birth) == int(plan.answer)
        else:
            assert plan.answer == last
        pieces = base_model.trajectory(library, plan, rng, base_model.FLAWLESS)
        assert pieces[0][0] == f"<s2> {plan.text} <eot>"
        found = all(
            any(library.world.sentence(*fact) in " ".join(chunk) for chunk in library.chunks(*fact))
            for _, *fact in plan.hops
        )
        assert pieces[-1][0] == f"<answer> {plan.answer} <eot>" or not found
        known += found
    assert known >= 198


def test_stage_a_asks_for_employers_more_often_than_the_questions_do(library):
    rng = random.Random(0)
    texts = [base_model.skill_trajectory(library, rng)[0][0] for _ in range(1000)]
    share = sum("which firm employs" in text for text in texts) / len(texts)
    assert 0.2 < share < 0.3


def test_a_build_is_repeatable_and_reused_and_loads_with_transformers(form, tmp_path):
    one = base_model.build(tmp_path / "one", 5, (1, 1))
    torch.rand(1)  # what others draw changes nothing
    other = base_model.build(tmp_path / "other", 5, (1, 1))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, other)]
    assert weights[0] == weights[1]
    again = base_model.build(tmp_path / "one", 5, (1, 1), make=None)
    assert again == one, "a second build would fail"
    model = AutoModelForCausalLM.from_pretrained(one)
    tokenizer = AutoTokenizer.from_pretrained(one)
    text = "<s2> where does ada baker live ? <eot>"
    assert tokenizer.encode(text) == form.prompt("sys2", question="where does ada baker live ?")
    assert language.ToyFormat(tokenizer).encode("<eot> Zurich") == form.encode("<eot> zurich")
    assert tokenizer.eos_token_id == model.config.eos_token_id == form.eot


def test_another_recipe_is_another_name(tmp_path, monkeypatch):
    """Another seed, other steps, and a change of any of the files that the model follows from."""
    made = {base_model.recipe(seed, steps) for seed in (0, 1) for steps in ((1, 1), (2, 1))}
    for module in (binpack, bm25, world, language, base_model):
        changed = tmp_path / f"{module.__name__}.py"
        changed.write_text(Path(module.__file__).read_text() + "# changed\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(changed))
            made.add(base_model.recipe(0, (1, 1)))
    assert len(made) == 4 + 5


def test_the_loss_sees_trained_tokens_only(library, form, monkeypatch):
    """Loss and gradient against the mean over trained tokens, sample by sample, without padding."""
    monkeypatch.setattr(base_model, "PART", 2)
    ids = form.tokenizer.get_vocab()
    rng = random.Random(2)
    model = base_model.new_model(len(form.tokenizer))
    chunks = [base_model.skill_chunk(library, rng) for _ in range(3)]
    samples = [base_model.encode(pieces, ids) for pieces in chunks]
    losses = []
    for tokens, mask in samples:
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, tokens[t]] for t in range(1, len(tokens)) if mask[t]]
    mean = torch.stack(losses).mean()
    expected = torch.autograd.grad(mean, model.parameters())
    assert base_model.backward(model, samples) == pytest.approx(mean.item(), abs=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)
