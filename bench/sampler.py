"""The sampler beside other engines on a CPU, and beside what the memory allows on a GPU.

    python -m bench.sampler --peers FOLDER/bin/python …     beside engines of other environments
    python -m bench.gpu --step decode                       on a GPU; likewise prefill, requests

On a CPU SmolLM2-135M samples 64 new tokens at temperature 1, in fp32, and in bf16 where the
processor has it. There are 8 prompts in groups of 8, or 64 different prompts. All engines share a
group's prompt. Each engine has one thread, and a row holds the sampled tokens per CPU second in the
median round. bench/peers.py says how to install the peers. On a GPU:

decode    Decode steps of a random Qwen3-8B in bf16, as a share of the ceiling: each step only reads
          weights, keys and values, once, at the GPU's copy rate. Goal: 80 % with 64 rows of 4k.
prefill   A prompt of 24k tokens through the random Qwen3-8B, by each attention that is installed.
requests  A random Qwen3-0.6B in bf16 answers 256 requests at once, prompts and answers of 100 to
          1,024 tokens, at temperature 0.6. It is nano-vllm's own benchmark.

Results: bench/results/sampler_smollm2.json. Tests: pytest tests/test_bench.py
"""

import argparse
import contextlib
import importlib
import itertools
import random
import sys
from functools import partial
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from bench import common, peers
from kernels import varlen
from plumbing import models
from sampler import Sampler
from sampler.model import has_packed_products

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
NEW = 64  # tokens of an answer on a CPU


def random_model(size: dict, device="cpu", dtype=torch.float32):
    """A random Qwen3 that never stops by itself."""
    torch.manual_seed(0)
    no_specials = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    with torch.device(device):
        config = Qwen3Config(**size, **no_specials)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


# --- beside other engines, on a CPU ---------------------------------------------------------------


def compete(bench: common.Bench, model, pythons: list[str], work: dict, **name) -> None:
    """A row for each engine, which all get the same work (see bench/peers.py)."""
    rounds = 1 if bench.tiny else 5
    prompts = [prompt for prompt in work["prompts"] for _ in range(work["copies"])]
    tokens = sum(len(prompt) + NEW + 16 for prompt in prompts)
    sampler = Sampler(model, max_tokens=tokens, dtype=getattr(torch, work["precision"]))
    seeds = itertools.count()

    def our_round():
        sampler.scheduler.release_all()  # no round reads pages that another has left
        sampler.generate(prompts, max_new_tokens=NEW, seed=next(seeds))

    def columns(seconds: list[float], tokens: int = len(prompts) * NEW) -> dict:
        return common.spread("tokens/s", [tokens / each for each in seconds])

    def peer(engine: str) -> dict:
        reply = peers.first(engine, [sys.executable, *pythons], rounds=rounds, new=NEW, **work)
        row = columns(reply["seconds"], reply["tokens"]) | {"version": reply["version"]}
        return row | {"× MARS": row["tokens/s, median"] / ours["tokens/s, median"]}

    name["precision"] = work["precision"]
    ours = bench.measure(
        name | {"engine": "MARS"}, lambda: columns(common.timed(our_round, rounds))
    )
    for engine in peers.PEERS if "failed" not in ours else ():
        bench.measure(name | {"engine": engine}, partial(peer, engine))


def pieces_of_text(tokenizer, count: int) -> list[list[int]]:
    """`count` prompts of 64 to 700 tokens, 382 on average, from this repository's own pages.

    The pages change, so only rows of one commit can be compared.
    """
    text = "\n".join(path.read_text() for path in sorted((common.ROOT / "docs").glob("*.md")))
    ids = tokenizer(text)["input_ids"]
    lengths = [64 + 636 * (i % 8) // 7 for i in range(count)]
    step = len(ids) // count
    return [ids[i * step : i * step + length] for i, length in enumerate(lengths)]


def smollm2(pythons: list[str], bench: common.Bench) -> None:
    folder = str(models.find("smollm2", common.ROOT / ".cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for precision in ["float32"] + ["bfloat16"] * has_packed_products(torch.bfloat16):
        for name, count, copies in (("8 prompts × 8", 8, 8), ("all different", 64, 1)):
            work = {"folder": folder, "precision": precision, "copies": copies}
            work["prompts"] = pieces_of_text(tokenizer, count)
            compete(bench, model, pythons, work, prompts=name)


# --- on a GPU -------------------------------------------------------------------------------------


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
    """A sampler of a random model. On a GPU both are in bf16: 75 GB for 8B and 64 rows of 4k."""
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


def decode(bench: common.Bench) -> None:
    """A row for each number of rows and context."""
    size, steps = (TINY, 2) if bench.tiny else (QWEN3_8B, 64)
    for rows, context in ((64, 4096), (64, 1024), (1, 4096), (3, 24_576), (12, 24_576)):
        name = {"model": "Qwen3-8B", "rows": rows, "context": context}
        context = 24 if bench.tiny else context
        bench.measure(name, partial(decode_steps, size, rows, context, steps))


def force_attention(name: str | None) -> contextlib.AbstractContextManager:
    """A context in which attention on CUDA is one of ATTENTIONS. None: the code chooses."""
    if name is None:
        return contextlib.nullcontext()
    package = ATTENTIONS[name]
    function = package and importlib.import_module(package).flash_attn_varlen_func
    return mock.patch.object(varlen, "choose_flash_attention", lambda q: function)


def prefill(bench: common.Bench) -> None:
    """A row for each attention: prefilled tokens per second."""
    size, context = (TINY, 96) if bench.tiny else (QWEN3_8B, 24_576)

    def run(attention: str) -> dict:
        sampler = make_sampler(size, context + 128, 1)
        rng = random.Random(0)
        prompts = iter([random_tokens(rng, context, size["vocab_size"]) for _ in range(4)])

        def read() -> None:
            sampler.generate([next(prompts)], max_new_tokens=1)

        with force_attention(attention):
            seconds = common.timed(read, 3)
        return common.spread("tokens/s", [context / each for each in seconds])

    for name in ATTENTIONS:
        bench.measure({"attention": name}, partial(run, name))


def requests(bench: common.Bench) -> None:
    """A row: sampled tokens per second, with all requests in one batch."""
    size, count, low, high = (TINY, 3, 4, 9) if bench.tiny else (QWEN3_0_6B, 256, 100, 1024)
    rng = random.Random(0)
    vocabulary = min(10_000, size["vocab_size"])
    prompts = [random_tokens(rng, rng.randint(low, high), vocabulary) for _ in range(count)]
    wanted = [rng.randint(low, high) for _ in range(count)]

    def run() -> dict:
        sampler = make_sampler(size, sum(map(len, prompts)) + sum(wanted) + 128 * count, count)

        def answer() -> None:
            sampler.scheduler.release_all()  # no round reads pages that another has left
            sampler.generate(prompts, max_new_tokens=wanted, temperature=0.6)

        times = common.timed(answer, 3)
        return common.spread("tokens/s", [sum(wanted) / seconds for seconds in times])

    bench.measure({"model": "Qwen3-0.6B", "requests": count}, run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="+", default=[], metavar="PYTHON", help="bench/peers.py")
    pythons = parser.parse_args().peers
    command = "python -m bench.sampler" + " --peers …" * bool(pythons)
    common.run_on_cpu("sampler_smollm2", command, partial(smollm2, pythons))
