"""The sampler beside other engines on a CPU, and beside what the memory allows on a GPU.

    python -m bench.sampler                     mixed, smollm2
    python -m bench.sampler --only smollm2      one part
    python -m bench.gpu --step decode           on a GPU; or requests
    python -m bench.sampler --peers FOLDER/bin/python …     engines of other environments too
    python -m bench.sampler --tiny              the same lines in seconds; writes no file

mixed     A random Qwen3 of 5M parameters; 64 prompts of 16 to 256 tokens with 16, 32, 64 or 128
          new ones each, greedy, fp32; the peers' tokens are compared with ours.
smollm2   SmolLM2-135M, 64 new tokens at temperature 1, in fp32 and in bf16: 8 prompts × G = 8,
          and 64 prompts that are all different. All engines share a group's prompt; `generate`,
          which shares none, is left out: it takes ten times as long.
decode    Random Qwen3-8B in bf16: decode steps against the ceiling, where weights, keys and values
          are only read, each once a step, at the card's copy rate. Goal: 80 % at batch 64, 4k.
requests  Random Qwen3-0.6B in bf16, 256 requests at once, prompts and answers of 100 to 1,024
          tokens, temperature 0.6: nano-vllm's own bench.

On a CPU each engine has one thread, and a row is the tokens a CPU second of the median round.
A useful token is one that was asked for. Peers and how to install them: bench/peers.py.

Results: bench/results/sampler_PART.json. Tests: pytest tests/test_bench.py
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config  # noqa: E402

from bench import common, peers  # noqa: E402
from sampler import Sampler  # noqa: E402

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN3_0_6B = SMALL | {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN3_8B = QWEN3_0_6B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
TINY = SMALL | {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
ENGINES = ["generate, left-padded", "OpenVINO GenAI", "vLLM"]
SPARE = 2e9  # bytes beside weights and pool: logits, graphs, workspaces


def random_model(shape: dict, dtype=torch.float32, where="cpu"):
    """A random Qwen3 that never stops by itself."""
    torch.manual_seed(0)
    no_specials = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    with torch.device(where):
        config = Qwen3Config(**shape, **no_specials)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


# --- beside other engines, on a CPU ---------------------------------------------------------------


def compete(
    model, folder: str, work: dict, engines: list[str], pythons: list[str], rounds: int
) -> list[dict]:
    """A row for each engine on the same work (see bench/peers.py), one after the other."""
    prompts = [prompt for prompt in work["prompts"] for _ in range(work["copies"])]
    wanted = [count for count in work["wanted"] for _ in range(work["copies"])]
    lengths = [len(prompt) + count + 16 for prompt, count in zip(prompts, wanted)]
    dtype = getattr(torch, work["precision"])
    sampler = Sampler(model, max_tokens=sum(lengths), dtype=dtype)
    answers = []

    def ours():
        options = {"temperature": work["temperature"], "seed": len(answers)}
        done = sampler.generate(prompts, max_new_tokens=wanted, **options)
        answers.append([completion.tokens for completion in done])

    found = {
        "MARS": {"seconds": common.interleaved({"": ours}, rounds)[""], "answers": answers[-1]}
    }
    for name in engines:
        found[name] = peers.first(name, pythons, rounds=rounds, folder=folder, **work)
    rows = []
    for name, peer in found.items():
        row = {"engine": name, "precision": work["precision"]}
        rows.append(row)
        if "failed" in peer:
            row["failed"] = peer["failed"]
            continue
        speeds = common.spread([sum(wanted) / seconds for seconds in peer["seconds"]])
        row |= {f"tokens/s, {key}": round(speed, 1) for key, speed in speeds.items()}
        row["× MARS"] = round(speeds["median"] / rows[0]["tokens/s, median"], 2)
        if not work["temperature"]:
            row["rows equal"] = sum(a == b for a, b in zip(peer["answers"], answers[-1]))
    return rows


def mixed(tiny: bool, pythons: list[str]) -> list[dict]:
    rng = random.Random(0)
    count, lengths = (4, (2, 4)) if tiny else (64, (16, 32, 64, 128))
    shape = TINY if tiny else SMALL
    prompts = [random_tokens(rng, rng.randint(16, 256), shape["vocab_size"]) for _ in range(count)]
    wanted = [lengths[i % len(lengths)] for i in range(count)]
    work = {"prompts": prompts, "copies": 1, "wanted": wanted, "temperature": 0}
    model = random_model(shape)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        work["precision"] = "float32"
        return compete(model, folder, work, ENGINES, pythons, 1 if tiny else 5)


def pieces_of_text(tokenizer, count: int) -> list[list[int]]:
    """`count` prompts out of this repository's own pages, of 64 to 700 tokens, 382 on average."""
    text = "\n".join(path.read_text() for path in sorted((common.ROOT / "docs").glob("*.md")))
    ids = tokenizer(text)["input_ids"]
    lengths = [64 + 636 * (i % 8) // 7 for i in range(count)]
    step = len(ids) // count
    return [ids[i * step : i * step + length] for i, length in enumerate(lengths)]


def smollm2(tiny: bool, pythons: list[str]) -> list[dict]:
    if tiny:
        return []  # it needs the weights; `mixed` runs the same lines
    from plumbing import models

    folder = str(models.smollm2(common.ROOT / ".cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for precision in ("float32", "bfloat16"):
        for name, count, copies in (("8 prompts × 8", 8, 8), ("all different", 64, 1)):
            prompts = pieces_of_text(tokenizer, count)
            work = {"prompts": prompts, "copies": copies, "wanted": [64] * count}
            work |= {"temperature": 1.0, "precision": precision}
            for row in compete(model, folder, work, ENGINES[1:], pythons, rounds=5):
                rows.append({"prompts": name} | row)
            common.save("sampler_smollm2", "python -m bench.sampler --only smollm2", rows)
    return rows


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


def needed_bytes(shape: dict, tokens: int) -> float:
    """Memory of the model, the sampler's copy of it, and a pool of `tokens`."""
    embedding = (
        0 if shape["tie_word_embeddings"] else 2 * shape["vocab_size"] * shape["hidden_size"]
    )
    return 2 * (weight_bytes(shape) + embedding) + tokens * token_bytes(shape) + SPARE


def make_sampler(shape: dict, tokens: int, rows: int) -> Sampler:
    """A sampler of a random model; MemoryError unless it fits the GPU."""
    if needed_bytes(shape, tokens) > common.free_bytes():
        raise MemoryError(f"needs {needed_bytes(shape, tokens) / 1e9:.0f} GB")
    model = random_model(shape, torch.bfloat16, common.device())
    return Sampler(model, max_tokens=tokens, max_sequences=rows)


def predict_decode(shape: dict, rows: int, context: int, copy: float) -> dict:
    """The ceiling, and 80 % of it, as the audit's sum of parts has it."""
    size = weight_bytes(shape) + rows * context * token_bytes(shape)
    seconds = size / copy / 0.8
    return {"GB a step": size / 1e9, "ms a step": 1e3 * seconds, "share of ceiling": 0.8}


def decode(shape: dict, rows: int, context: int, steps: int, copy: float, rounds: int = 3) -> dict:
    """Milliseconds a decode step of `rows` rows that all hold `context` tokens."""
    ahead = rows * context // 8192 + 16  # tokens that the first row has when the last is prefilled
    tokens = rows * (context + rounds * steps + ahead + 64)
    sampler = make_sampler(shape, tokens, rows)
    rng = random.Random(0)
    for _ in range(rows):
        prompt = random_tokens(rng, context, shape["vocab_size"])
        sampler.submit(sampler.open(), prompt, max_new_tokens=rounds * steps + ahead + 16)
    while sampler.busy and sampler.stats["prefilled_tokens"] < rows * (context - 1):
        sampler.step()
    for _ in range(8):
        sampler.step()  # what is made late is there
    taken = []
    for _ in range(rounds):
        start = common.clock()
        for _ in range(steps):
            sampler.step()
        taken.append((common.clock() - start) / steps)
    seconds = statistics.median(taken)
    size = weight_bytes(shape) + rows * (context + rounds * steps // 2) * token_bytes(shape)
    row = {"ms a step": 1e3 * seconds, "tokens/s": rows / seconds}
    return row | {"share of ceiling": size / seconds / copy}


def request_work(count: int, low: int, high: int) -> tuple[list[list[int]], list[int]]:
    """(prompts, new tokens of each) as nano-vllm's bench draws them."""
    rng = random.Random(0)
    prompts = [random_tokens(rng, rng.randint(low, high), 10_000) for _ in range(count)]
    return prompts, [rng.randint(low, high) for _ in range(count)]


def predict_requests(shape: dict, prompts, wanted, copy: float) -> dict:
    """60 % of the ceiling over all decode steps: prefill and the last few rows take the rest."""
    size = 0
    for step in range(max(wanted)):
        alive = [len(p) + step for p, count in zip(prompts, wanted) if count > step]
        size += weight_bytes(shape) + sum(alive) * token_bytes(shape)
    speed = sum(wanted) * copy / size
    return {"GB": size / 1e9, "tokens/s": 0.6 * speed, "share of ceiling": 0.6}


def requests(shape: dict, prompts, wanted, copy: float) -> dict:
    """Sampled tokens a second of all requests at once."""
    prompts = [[token % shape["vocab_size"] for token in prompt] for prompt in prompts]
    tokens = sum(len(prompt) + count + 128 for prompt, count in zip(prompts, wanted))
    sampler = make_sampler(shape, tokens, len(prompts))
    sampler.generate(prompts[:2], max_new_tokens=8, temperature=0.6)
    start = common.clock()
    done = sampler.generate(prompts, max_new_tokens=wanted, temperature=0.6)
    speed = sum(len(completion.tokens) for completion in done) / (common.clock() - start)
    ceiling = predict_requests(shape, prompts, wanted, copy)["tokens/s"] / 0.6
    return {"tokens/s": speed, "share of ceiling": speed / ceiling}


def decode_rows(tiny: bool, rows: list[dict], write, rate: dict, cases: int = 4) -> None:
    """The goal's case first; `cases` of all."""
    shape, steps = (TINY, 2) if tiny else (QWEN3_8B, 64)
    sizes = ((2, 24),) if tiny else ((64, 4096), (64, 1024), (1, 4096), (128, 4096))
    for batch, context in sizes[:cases]:
        name = {"model": "Qwen3-8B", "rows": batch, "context": context}
        run = partial(decode, shape, batch, context, steps, rate["copy"])
        common.measure(rows, write, name, predict_decode(shape, batch, context, rate["copy"]), run)


def request_rows(tiny: bool, rows: list[dict], write, rate: dict) -> None:
    work = request_work(3, 4, 9) if tiny else request_work(256, 100, 1024)
    shape = TINY if tiny else QWEN3_0_6B
    name = {"model": "Qwen3-0.6B", "requests": len(work[0])}
    run = partial(requests, shape, *work, rate["copy"])
    common.measure(rows, write, name, predict_requests(shape, *work, rate["copy"]), run)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = {"mixed": mixed, "smollm2": smollm2}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--tiny", action="store_true", help="small shapes; writes no file")
    parser.add_argument("--peers", nargs="+", default=[], metavar="PYTHON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.only:
        rows = parts[part](options.tiny, [sys.executable, *options.peers])
        print(f"\n{part}\n{common.table(rows)}", flush=True)
        if not options.tiny:
            common.save(f"sampler_{part}", f"python -m bench.sampler --only {part}", rows)


if __name__ == "__main__":
    main()
