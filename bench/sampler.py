"""The sampler beside other engines on a CPU, and beside what the memory allows on a GPU.

    python -m bench.sampler                     mixed, smollm2
    python -m bench.sampler --peers FOLDER/bin/python …     engines of other environments too
    python -m bench.gpu --step decode           on a GPU; likewise prefill, requests

mixed     A random Qwen3 of 5M parameters samples greedily in fp32: 64 prompts of 16 to 256 tokens,
          16, 32, 64 or 128 new tokens each. The peers' tokens are compared with ours.
smollm2   SmolLM2-135M samples 64 new tokens at temperature 1, in fp32, and in bf16 where the
          processor has it. There are 8 prompts in groups of 8, or 64 different prompts. All engines
          share a group's prompt. `generate` cannot, and takes ten times as long, so it is left out.
decode    Decode steps of a random Qwen3-8B in bf16, as a share of the ceiling: each step only reads
          weights, keys and values, once, at the GPU's copy rate. Goal: 80 % with 64 rows of 4k.
prefill   A prompt of 24k tokens through the random Qwen3-8B, by each attention that is installed.
requests  A random Qwen3-0.6B in bf16 answers 256 requests at once, prompts and answers of 100 to
          1,024 tokens, at temperature 0.6. It is nano-vllm's own benchmark. "both" is the code. Its
          decode attention once planned a row's pieces for a row as long as the pool, and launched
          programs for shared pages where no rows (as here) share any.

On a CPU each engine has one thread, and a row holds the requested tokens per CPU second in the
median round. bench/peers.py says how to install the peers.

Results: bench/results/sampler_PART.json. Tests: pytest tests/test_bench.py
"""

import contextlib
import importlib
import random
import sys
import tempfile
from functools import partial
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from bench import common, peers
from kernels import paged, varlen
from plumbing import models
from sampler import Sampler
from sampler.model import has_packed_products
from sampler.plan import plan_kv_ranges

SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim tie_word_embeddings"
).split()
TINY = dict(zip(SIZES, (128, 32, 48, 4, 8, 4, 16, False)))
SMALL = dict(zip(SIZES, (4096, 256, 768, 4, 8, 4, 32, False)))
QWEN3_0_6B = dict(zip(SIZES, (151_936, 1024, 3072, 28, 16, 8, 128, True)))
QWEN3_8B = dict(zip(SIZES, (151_936, 4096, 12_288, 36, 32, 8, 128, False)))
# The name of a prefill's attention -> its package; None is PyTorch's varlen_attn.
ATTENTIONS = {"PyTorch": None, "flash-attn 2": "flash_attn", "flash-attn 4": "flash_attn.cute"}
ENGINES = ["generate, left-padded", "OpenVINO GenAI", "vLLM"]


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


def compete(bench: common.Bench, model, folder: str, work: dict, engines: list[str], **name):
    """A row for each engine, which all get the same work (see bench/peers.py)."""
    rounds = 1 if bench.tiny else 5
    prompts = [prompt for prompt in work["prompts"] for _ in range(work["copies"])]
    wanted = [count for count in work["wanted"] for _ in range(work["copies"])]
    lengths = [len(prompt) + count + 16 for prompt, count in zip(prompts, wanted)]
    sampler = Sampler(model, max_tokens=sum(lengths), dtype=getattr(torch, work["precision"]))
    answers = []

    def our_round():
        sampler.scheduler.release_all()  # Else the pages of the round before would be found.
        options = {"temperature": work["temperature"], "seed": len(answers)}
        completions = sampler.generate(prompts, max_new_tokens=wanted, **options)
        answers.append([completion.tokens for completion in completions])

    def columns(seconds: list[float], tokens: list) -> dict:
        row = common.spread("tokens/s", [sum(wanted) / each for each in seconds])
        if not work["temperature"]:
            row["rows equal"] = sum(a == b for a, b in zip(tokens, answers[-1]))
        return row

    def peer(engine: str) -> dict:
        pythons = [sys.executable, *bench.peers]
        reply = peers.first(engine, pythons, rounds=rounds, folder=folder, **work)
        row = columns(reply["seconds"], reply["answers"]) | {"version": reply["version"]}
        return row | {"× MARS": row["tokens/s, median"] / ours["tokens/s, median"]}

    name["precision"] = work["precision"]
    ours = bench.measure(
        name | {"engine": "MARS"}, lambda: columns(common.timed(our_round, rounds), answers[-1])
    )
    for engine in engines if "failed" not in ours else ():
        bench.measure(name | {"engine": engine}, partial(peer, engine))


def mixed(bench: common.Bench) -> None:
    rng = random.Random(0)
    count, lengths = (4, (2, 4)) if bench.tiny else (64, (16, 32, 64, 128))
    size = TINY if bench.tiny else SMALL
    prompts = [random_tokens(rng, rng.randint(16, 256), size["vocab_size"]) for _ in range(count)]
    wanted = [lengths[i % len(lengths)] for i in range(count)]
    work = {"prompts": prompts, "copies": 1, "wanted": wanted, "temperature": 0}
    work["precision"] = "float32"
    model = random_model(size)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        compete(bench, model, folder, work, ENGINES)


def pieces_of_text(tokenizer, count: int) -> list[list[int]]:
    """`count` prompts of 64 to 700 tokens, 382 on average, from this repository's own pages.

    The pages change, so only rows of one commit can be compared.
    """
    text = "\n".join(path.read_text() for path in sorted((common.ROOT / "docs").glob("*.md")))
    ids = tokenizer(text)["input_ids"]
    some = min(count, 8)
    lengths = [64 + 636 * (i % some) // (some - 1) for i in range(count)]
    step = len(ids) // count
    return [ids[i * step : i * step + length] for i, length in enumerate(lengths)]


def smollm2(bench: common.Bench) -> None:
    folder = str(models.find("smollm2", common.ROOT / ".cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for precision in ["float32"] + ["bfloat16"] * has_packed_products(torch.bfloat16):
        for name, count, copies in (("8 prompts × 8", 8, 8), ("all different", 64, 1)):
            prompts = pieces_of_text(tokenizer, count)
            work = {"prompts": prompts, "copies": copies, "wanted": [64] * count}
            work |= {"temperature": 1.0, "precision": precision}
            compete(bench, model, folder, work, ENGINES[1:], prompts=name)


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
    # The first rows decode so many tokens while the last ones are prefilled.
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


def prefill(bench: common.Bench) -> None:
    """A row for each attention: prefilled tokens per second."""
    size, context = (TINY, 96) if bench.tiny else (QWEN3_8B, 24_576)

    def run(package: str | None) -> dict:
        function = package and importlib.import_module(package).flash_attn_varlen_func
        sampler = make_sampler(size, context + 128, 1)
        rng = random.Random(0)
        prompts = iter([random_tokens(rng, context, size["vocab_size"]) for _ in range(4)])

        def read() -> None:
            sampler.generate([next(prompts)], max_new_tokens=1)

        with mock.patch.object(varlen, "choose_flash_attention", lambda q: function):
            seconds = common.timed(read, 3)
        return common.spread("tokens/s", [context / each for each in seconds])

    for name, package in ATTENTIONS.items():
        bench.measure({"attention": name}, partial(run, package))


def with_empty_ranges(*plan) -> np.ndarray:
    """plan_kv_ranges with an unused range wherever a shared one could be."""
    ranges = plan_kv_ranges(*plan)
    rows = len(plan[1])
    return np.pad(ranges, ((paged.LEVELS * (rows // 2) + rows - len(ranges), 0), (0, 0)))


def requests(bench: common.Bench) -> None:
    """A row for each form: sampled tokens per second, with all requests in one batch."""
    size, count, low, high = (TINY, 3, 4, 9) if bench.tiny else (QWEN3_0_6B, 256, 100, 1024)
    rng = random.Random(0)
    vocabulary = min(10_000, size["vocab_size"])
    prompts = [random_tokens(rng, rng.randint(low, high), vocabulary) for _ in range(count)]
    wanted = [rng.randint(low, high) for _ in range(count)]

    tokens = sum(map(len, prompts)) + sum(wanted) + 128 * count

    def split_pool(rows, kv_heads, capacity, *more) -> int:
        return paged_splits.__wrapped__(rows, kv_heads, tokens, *more)

    paged_splits = paged.split_count
    long_pieces = [
        mock.patch.object(paged, "split_count", split_pool),
        mock.patch.object(paged, "LEAST_PIECE", 1),
    ]
    empty_launch = [mock.patch("sampler.engine.plan_kv_ranges", with_empty_ranges)]
    forms = {
        "as it was": long_pieces + empty_launch,
        "both": [],
        "pieces": empty_launch,
        "no empty launch": long_pieces,
    }

    def run(patches) -> dict:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            sampler = make_sampler(size, tokens, count)
            sampler.generate(prompts[:2], max_new_tokens=8, temperature=0.6)
            rates = []
            for _ in range(3):
                sampler.scheduler.release_all()  # no round reads pages that another has left
                start = common.clock()
                sampler.generate(prompts, max_new_tokens=wanted, temperature=0.6)
                rates.append(sum(wanted) / (common.clock() - start))
        return common.spread("tokens/s", rates)

    for form, patches in forms.items():
        bench.measure({"form": form}, partial(run, patches))


if __name__ == "__main__":
    common.main("sampler", __doc__, {"mixed": mixed, "smollm2": smollm2})
