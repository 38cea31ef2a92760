"""The sampler beside what the memory of a GPU allows. The models' weights are random, in bf16.

    python -m bench.gpu --step decode prefill requests

decode    Decode steps of Qwen3-8B, as a share of the ceiling: each step only reads weights, keys
          and values, once, at the GPU's copy rate. Goal: 80 % with 64 rows of 4k.
prefill   A prompt of 24k tokens through Qwen3-8B, by each attention that is installed.
requests  Qwen3-0.6B answers 256 requests at once, prompts and answers of 100 to 1,024 tokens, at
          temperature 0.6. It is nano-vllm's own benchmark.

Results: bench/results/gpu_STEP.json. Tests: pytest tests/test_bench.py tests/test_bench_gpu.py
"""

import contextlib
import importlib
import random
from functools import partial
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench import common
from kernels import varlen
from sampler import Sampler

SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim tie_word_embeddings"
).split()
TINY = dict(zip(SIZES, (128, 32, 48, 4, 8, 4, 16, False)))
SMALL = dict(zip(SIZES, (4096, 256, 768, 4, 8, 4, 32, True)))
QWEN3_0_6B = dict(zip(SIZES, (151_936, 1024, 3072, 28, 16, 8, 128, True)))
QWEN3_8B = dict(zip(SIZES, (151_936, 4096, 12_288, 36, 32, 8, 128, False)))
# The name of a prefill's attention -> its package; None is PyTorch's varlen_attn.
ATTENTIONS = {"PyTorch": None, "flash-attn 2": "flash_attn", "flash-attn 4": "flash_attn.cute"}


def random_model(size: dict, device, dtype=torch.float32):
    """A random Qwen3 that never stops by itself."""
    torch.manual_seed(0)
    no_specials = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    with torch.device(device):
        config = Qwen3Config(**size, **no_specials)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def weight_bytes(size: dict) -> int:
    """Bytes of the weights that a decode step reads in bf16: matrices, but no untied embedding."""
    model = random_model(size, "meta")
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    embedding = 0 if size["tie_word_embeddings"] else size["vocab_size"] * size["hidden_size"]
    return 2 * (matrices - embedding)


def token_bytes(size: dict) -> int:
    """Bytes of the keys and values of one token in bf16."""
    return 2 * 2 * size["num_hidden_layers"] * size["num_key_value_heads"] * size["head_dim"]


def make_sampler(size: dict, tokens: int, rows: int) -> Sampler:
    """A sampler of a random model. On a GPU 8B with 64 rows of 4k takes 75 GB."""
    model = random_model(size, common.DEVICE, common.DTYPE)
    return Sampler(model, max_tokens=tokens, max_sequences=rows)


def decode_steps(size: dict, rows: int, context: int, steps: int) -> dict:
    """The time of a decode step of `rows` rows, each of which holds `context` tokens."""
    rounds = 3
    # The tokens that the first rows decode while the last ones are prefilled.
    ahead = rows * context // 8192 + 16
    tokens = rows * (context + (rounds + 1) * steps + ahead + 64)
    sampler = make_sampler(size, tokens, rows)
    rng = random.Random(0)
    for _ in range(rows):
        prompt = random_tokens(rng, context, size["vocab_size"])
        sampler.submit(sampler.open(), prompt, max_new_tokens=(rounds + 1) * steps + ahead + 16)
    while sampler.stats["prefilled_tokens"] < rows * (context - 1):
        sampler.step()

    def some_steps():
        for _ in range(steps):
            sampler.step()

    row = common.spread("ms a step", [1e3 * s / steps for s in common.timed(some_steps, rounds)])
    seconds = row["ms a step, median"] / 1e3
    cached = rows * (context + (rounds + 1) * steps // 2)  # tokens, on average
    bytes_read = weight_bytes(size) + cached * token_bytes(size)
    row["share of ceiling"] = bytes_read / seconds / common.rates()["copy"]
    return row | {"tokens/s": rows / seconds}


def decode(tiny: bool) -> common.Rows:
    """A row for each number of rows and context."""
    size, steps = (TINY, 2) if tiny else (QWEN3_8B, 64)
    for rows, context in ((64, 4096), (64, 1024), (1, 4096), (3, 24_576), (12, 24_576)):
        name = {"model": "Qwen3-8B", "rows": rows, "context": context}
        context = 24 if tiny else context
        yield name, partial(decode_steps, size, rows, context, steps)


def force_attention(name: str | None) -> contextlib.AbstractContextManager:
    """A context in which attention on CUDA is one of ATTENTIONS. None: the code chooses."""
    if name is None:
        return contextlib.nullcontext()
    package = ATTENTIONS[name]
    function = package and importlib.import_module(package).flash_attn_varlen_func
    return mock.patch.object(varlen, "choose_flash_attention", lambda q: function)


def prefill(tiny: bool) -> common.Rows:
    """A row for each attention: prefilled tokens per second."""
    size, context = (TINY, 96) if tiny else (QWEN3_8B, 24_576)

    def run(attention: str) -> dict:
        sampler = make_sampler(size, context + 128, 1)
        rng = random.Random(0)
        prompts = iter([random_tokens(rng, context, size["vocab_size"]) for _ in range(4)])

        def read() -> None:
            sampler.generate([next(prompts)], max_new_tokens=1)

        with force_attention(attention):
            times = common.timed(read, 3)
        return common.spread("tokens/s", [context / seconds for seconds in times])

    for name in ATTENTIONS:
        yield {"attention": name}, partial(run, name)


def requests(tiny: bool) -> common.Rows:
    """A row: sampled tokens per second, with all requests in one batch."""
    size, count, low, high = (TINY, 3, 4, 9) if tiny else (QWEN3_0_6B, 256, 100, 1024)
    rng = random.Random(0)
    vocabulary = min(10_000, size["vocab_size"])
    prompts = [random_tokens(rng, rng.randint(low, high), vocabulary) for _ in range(count)]
    lengths = [rng.randint(low, high) for _ in range(count)]  # of the answers

    def run() -> dict:
        sampler = make_sampler(size, sum(map(len, prompts)) + sum(lengths) + 128 * count, count)

        def answer() -> None:
            sampler.scheduler.release_all()  # else a round would reuse the pages of the one before
            sampler.generate(prompts, max_new_tokens=lengths, temperature=0.6)

        times = common.timed(answer, 3)
        return common.spread("tokens/s", [sum(lengths) / seconds for seconds in times])

    yield {"model": "Qwen3-0.6B", "requests": count}, run
