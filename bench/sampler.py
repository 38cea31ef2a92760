"""The sampler beside other engines on a CPU, and beside what the memory allows on a GPU.

    python -m bench.sampler                     mixed, smollm2
    python -m bench.sampler --peers FOLDER/bin/python …     engines of other environments too
    python -m bench.sampler --only mixed --tiny             in seconds; writes no file
    python -m bench.gpu --step decode           on a GPU; likewise --step requests

mixed     A random Qwen3 of 5M parameters; 64 prompts of 16 to 256 tokens with 16, 32, 64 or 128
          new ones each, greedy, fp32; the peers' tokens are compared with ours.
smollm2   SmolLM2-135M, 64 new tokens at temperature 1, in fp32, and in bf16 where the processor
          has it: 8 prompts × G = 8, and 64 that are all different. All engines share a group's
          prompt; `generate`, which shares none, is left out: it takes ten times as long.
decode    Random Qwen3-8B in bf16: decode steps against the ceiling, where weights, keys and values
          are only read, each once a step, at the card's copy rate. Goal: 80 % at batch 64, 4k.
requests  Random Qwen3-0.6B in bf16, 256 requests at once, prompts and answers of 100 to 1,024
          tokens, temperature 0.6: nano-vllm's own bench.

On a CPU each engine has one thread, and a row is the tokens a CPU second of the median round.
A useful token is one that was asked for. Peers and how to install them: bench/peers.py.

Results: bench/results/sampler_PART.json. Tests: pytest tests/test_bench.py
"""

import random
import sys
import tempfile
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from bench import common, peers
from plumbing import models
from sampler import Sampler
from sampler.model import has_packed_products

SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim tie_word_embeddings"
).split()
TINY = dict(zip(SIZES, (128, 32, 48, 4, 8, 4, 16, False)))
SMALL = dict(zip(SIZES, (4096, 256, 768, 4, 8, 4, 32, False)))
QWEN3_0_6B = dict(zip(SIZES, (151_936, 1024, 3072, 28, 16, 8, 128, True)))
QWEN3_8B = dict(zip(SIZES, (151_936, 4096, 12_288, 36, 32, 8, 128, False)))
ENGINES = ["generate, left-padded", "OpenVINO GenAI", "vLLM"]


def random_model(shape: dict, where="cpu", dtype=torch.float32):
    """A random Qwen3 that never stops by itself."""
    torch.manual_seed(0)
    no_specials = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    with torch.device(where):
        config = Qwen3Config(**shape, **no_specials)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


# --- beside other engines, on a CPU ---------------------------------------------------------------


def compete(bench: common.Bench, model, folder: str, work: dict, engines: list[str], **name):
    """A row for each engine on the same work (see bench/peers.py), one after the other."""
    rounds = 1 if bench.tiny else 5
    prompts = [prompt for prompt in work["prompts"] for _ in range(work["copies"])]
    wanted = [count for count in work["wanted"] for _ in range(work["copies"])]
    lengths = [len(prompt) + count + 16 for prompt, count in zip(prompts, wanted)]
    sampler = Sampler(model, max_tokens=sum(lengths), dtype=getattr(torch, work["precision"]))
    answers = []

    def our_round():
        options = {"temperature": work["temperature"], "seed": len(answers)}
        done = sampler.generate(prompts, max_new_tokens=wanted, **options)
        answers.append([completion.tokens for completion in done])

    def columns(seconds: list[float], theirs: list) -> dict:
        row = common.spread("tokens/s", [sum(wanted) / each for each in seconds])
        if not work["temperature"]:
            row["rows equal"] = sum(a == b for a, b in zip(theirs, answers[-1]))
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
    shape = TINY if bench.tiny else SMALL
    prompts = [random_tokens(rng, rng.randint(16, 256), shape["vocab_size"]) for _ in range(count)]
    wanted = [lengths[i % len(lengths)] for i in range(count)]
    work = {"prompts": prompts, "copies": 1, "wanted": wanted, "temperature": 0}
    work["precision"] = "float32"
    model = random_model(shape)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        compete(bench, model, folder, work, ENGINES)


def pieces_of_text(tokenizer, count: int) -> list[list[int]]:
    """`count` prompts out of this repository's own pages, of 64 to 700 tokens, 382 on average.

    The pages change, so only rows of one commit compare.
    """
    text = "\n".join(path.read_text() for path in sorted((common.ROOT / "docs").glob("*.md")))
    ids = tokenizer(text)["input_ids"]
    some = min(count, 8)
    lengths = [64 + 636 * (i % some) // (some - 1) for i in range(count)]
    step = len(ids) // count
    return [ids[i * step : i * step + length] for i, length in enumerate(lengths)]


def smollm2(bench: common.Bench) -> None:
    """With --tiny one round, at full size."""
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


def weight_bytes(shape: dict) -> int:
    """Bytes in bf16 that a decode step reads; the embedding's other rows stay untouched."""
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    attention = 2 * heads * shape["head_dim"] * shape["hidden_size"]
    feed_forward = 3 * shape["hidden_size"] * shape["intermediate_size"]
    layers = shape["num_hidden_layers"] * (attention + feed_forward)
    return 2 * (layers + shape["vocab_size"] * shape["hidden_size"])


def token_bytes(shape: dict) -> int:
    """Bytes of the keys and values of one token in bf16."""
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def make_sampler(shape: dict, tokens: int, rows: int) -> Sampler:
    """A sampler of a random model; on a GPU both are in bf16 (8B with 64 rows of 4k: 75 GB)."""
    model = random_model(shape, common.DEVICE, common.DTYPE)
    return Sampler(model, max_tokens=tokens, max_sequences=rows)


def decode_steps(shape: dict, rows: int, context: int, steps: int) -> dict:
    """Milliseconds a decode step of `rows` rows that all hold `context` tokens."""
    rounds = 3
    ahead = rows * context // 8192 + 16  # tokens that the first row has when the last is prefilled
    tokens = rows * (context + (rounds + 1) * steps + ahead + 64)
    sampler = make_sampler(shape, tokens, rows)
    rng = random.Random(0)
    for _ in range(rows):
        prompt = random_tokens(rng, context, shape["vocab_size"])
        sampler.submit(sampler.open(), prompt, max_new_tokens=(rounds + 1) * steps + ahead + 16)
    while sampler.stats["prefilled_tokens"] < rows * (context - 1):
        sampler.step()

    def some_steps():
        for _ in range(steps):
            sampler.step()

    row = common.spread("ms a step", [1e3 * s / steps for s in common.timed(some_steps, rounds)])
    seconds = row["ms a step, median"] / 1e3
    held = rows * (context + (rounds + 1) * steps // 2)
    size = weight_bytes(shape) + held * token_bytes(shape)
    row["share of ceiling"] = size / seconds / common.rates()["copy"]
    return row | {"tokens/s": rows / seconds}


def decode(bench: common.Bench) -> None:
    """The goal's case first."""
    shape, steps = (TINY, 2) if bench.tiny else (QWEN3_8B, 64)
    sizes = ((2, 24),) if bench.tiny else ((64, 4096), (64, 1024), (1, 4096))
    for rows, context in sizes:
        name = {"model": "Qwen3-8B", "rows": rows, "context": context}
        bench.measure(name, partial(decode_steps, shape, rows, context, steps))


def requests(bench: common.Bench) -> None:
    """Sampled tokens a second of all requests at once."""
    shape, count, low, high = (TINY, 3, 4, 9) if bench.tiny else (QWEN3_0_6B, 256, 100, 1024)
    rng = random.Random(0)
    vocabulary = min(10_000, shape["vocab_size"])
    prompts = [random_tokens(rng, rng.randint(low, high), vocabulary) for _ in range(count)]
    wanted = [rng.randint(low, high) for _ in range(count)]

    def run() -> dict:
        tokens = sum(map(len, prompts)) + sum(wanted) + 128 * count
        sampler = make_sampler(shape, tokens, count)
        sampler.generate(prompts[:2], max_new_tokens=8, temperature=0.6)
        start = common.clock()
        done = sampler.generate(prompts, max_new_tokens=wanted, temperature=0.6)
        return {"tokens/s": sum(len(each.tokens) for each in done) / (common.clock() - start)}

    bench.measure({"model": "Qwen3-0.6B", "requests": count}, run)


if __name__ == "__main__":
    common.main("sampler", __doc__, {"mixed": mixed, "smollm2": smollm2})
