"""Everything that needs a GPU, in parts of at most ten minutes, the most wanted evidence first.

    python -m bench.gpu --part 1 --out FOLDER     one part, its results in FOLDER
    python -m bench.gpu                           all parts, one after the other (40 minutes)
    python -m bench.gpu --list                    what each part runs, and how long it may

Each step is a command of its own with a limit; what a step leaves of its time goes to the next one.
The benches write each row as it is measured, so a step that is cut loses only what it had not yet
measured. FOLDER gets their JSON files, gpu_part_N.json (how each step went) and gpu_part_N.log;
without --out it is bench/results. The machine needs torch, triton, transformers and pytest; git,
bm25s and the peers may be missing.

Two steps are measured here, beside what others print:

throughput  256 requests at once on a random Qwen3-0.6B in bf16, prompts and answers of 100 to 1,024
            tokens, temperature 0.6: nano-vllm's own bench, whose printed figure is the sampled
            tokens a second. Its row stands beside ours where `nanovllm` is installed.
toy         10 steps of `python mars.py`: seconds a step after the first, which compiles.

Exit: 0 all went well, 1 a step failed or was cut, 2 there is no CUDA device.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from bench import common
from plumbing.folders import read_lines

ROOT = Path(__file__).parent.parent
PART_SECONDS = 570
KERNEL_TESTS = ["tests/test_kernels_loss.py", "tests/test_kernels_decode.py"]
# part -> step -> (seconds, what `python -m` runs). A GPU session may end after any of them.
PARTS = {
    1: {
        "tests that need a GPU": (200, ["pytest", "-m", "gpu", "-rs"]),
        "attention, the goal's shape": (
            70,
            ["bench.attention", "--only", "gpu", "--no-peers", "--rows", "64", "--context", "4096"],
        ),
        "loss": (100, ["bench.kernels", "--only", "gpu", "--no-peers"]),
        "attention's candidates": (
            80,
            ["bench.attention", "--only", "sweep", "--no-peers", "--rows", "64"],
        ),
        "toy": (120, ["bench.gpu", "--row", "toy"]),
    },
    2: {
        "kernel tests on the GPU": (150, ["pytest", *KERNEL_TESTS, "-m", "not gpu"]),
        "training step": (220, ["bench.train_step"]),
        "attention": (200, ["bench.attention", "--only", "gpu", "small"]),
    },
    3: {
        "throughput": (170, ["bench.gpu", "--row", "throughput"]),
        "sampler": (400, ["bench.sampler", "--only", "gpu"]),
    },
    4: {
        "loss and peers": (400, ["bench.kernels", "--only", "gpu", "accuracy"]),
        "all of attention's candidates": (170, ["bench.attention", "--only", "sweep"]),
    },
}


# --- the parts ------------------------------------------------------------------------------------


def run(command, seconds, log):
    """Runs `python -m command`; its output goes to the screen and to the open file `log`.

    Returns (outcome, seconds taken, last line that is not blank).
    """
    start = time.time()
    environment = os.environ | {"MARS_BENCH_RESULTS": str(common.RESULTS)}
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    timer = threading.Timer(seconds, end, [process])
    timer.start()
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        log.write(line)
        log.flush()
        last = line.strip() or last
    code = process.wait()
    cut = not timer.is_alive()
    timer.cancel()
    outcome = "ok"
    if cut:
        outcome = f"cut after {seconds:.0f} s"
    elif code != 0:
        outcome = f"failed, exit {code}"
    return outcome, time.time() - start, last[:100]


def end(process):
    """Ends a step and what it started: a process that holds the GPU would disturb the next step."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass


def run_part(part) -> bool:
    """Runs the steps of one part; whether all of them went well."""
    common.RESULTS.mkdir(parents=True, exist_ok=True)
    rows = []
    left = 0.0
    with open(common.RESULTS / f"gpu_part_{part}.log", "w") as log:
        for name, (seconds, command) in PARTS[part].items():
            title = f"\n=== {name}: python -m {' '.join(command)}\n"
            print(title, end="", flush=True)
            log.write(title)
            left += seconds
            outcome, taken, last = run(command, left, log)
            left -= taken
            rows.append({"step": name, "outcome": outcome, "seconds": taken, "last line": last})
            common.save(f"gpu_part_{part}", f"python -m bench.gpu --part {part}", rows)
    print(f"\n=== part {part}\n{common.table(rows)}", flush=True)
    return all(row["outcome"] == "ok" for row in rows)


# --- throughput -----------------------------------------------------------------------------------

QWEN3_0_6B = dict(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)


def throughput_work():
    """(prompts, lengths of the answers) of the 256 requests."""
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        length = rng.randint(100, 1024)
        prompts.append([rng.randint(0, 10_000) for _ in range(length)])
    return prompts, [rng.randint(100, 1024) for _ in prompts]


def pool_tokens(prompts, wanted, page_size=256):
    """Tokens of KV pages that hold every request to its end, with a page to spare for each."""
    total = 0
    for prompt, count in zip(prompts, wanted, strict=True):
        total += ((len(prompt) + count) // page_size + 2) * page_size
    return total


def model_bytes(shape, itemsize=2) -> int:
    """Bytes of a Qwen3's weights; norms are too small to count."""
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    attention = 2 * heads * shape["head_dim"] * shape["hidden_size"]
    feed_forward = 3 * shape["hidden_size"] * shape["intermediate_size"]
    layers = shape["num_hidden_layers"] * (attention + feed_forward)
    tables = 1 if shape["tie_word_embeddings"] else 2
    return itemsize * (layers + tables * shape["vocab_size"] * shape["hidden_size"])


def pool_bytes(shape, tokens, itemsize=2) -> int:
    """Bytes of the keys and values of so many tokens."""
    head = shape["num_key_value_heads"] * shape["head_dim"]
    return 2 * shape["num_hidden_layers"] * head * itemsize * tokens


def throughput_bytes() -> float:
    """Memory of our row: the model, the sampler's copy of it, the pool, logits and workspace."""
    logits = 2 * 4 * 256 * QWEN3_0_6B["vocab_size"]
    pool = pool_bytes(QWEN3_0_6B, pool_tokens(*throughput_work()))
    return 2 * model_bytes(QWEN3_0_6B) + pool + logits + 2e9


def throughput_of_mars(model, prompts, wanted):
    from sampler import Sampler

    sampler = Sampler(model, max_tokens=pool_tokens(prompts, wanted))
    sampler.generate(prompts[:8], max_new_tokens=8, temperature=0.6)
    start = common.gpu_clock()
    answers = sampler.generate(prompts, max_new_tokens=wanted, temperature=0.6)
    seconds = common.gpu_clock() - start
    return sum(len(answer.tokens) for answer in answers) / seconds


def throughput_of_nano_vllm(model, prompts, wanted):
    """As its own bench measures it. It needs the model and a tokenizer in a folder."""
    from nanovllm import LLM, SamplingParams
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        words = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        engine = LLM(folder, enforce_eager=False, max_model_len=4096)
    limits = []
    for count in wanted:
        limits.append(SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count))
    engine.generate(prompts[:8], limits[:8], use_tqdm=False)
    start = common.gpu_clock()
    engine.generate(prompts, limits, use_tqdm=False)
    return sum(wanted) / (common.gpu_clock() - start)


def throughput() -> list[dict]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if not common.fits(throughput_bytes()):
        return [{"engine": "MARS", "note": f"needs {throughput_bytes() / 1e9:.0f} GB"}]
    prompts, wanted = throughput_work()
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = Qwen3Config(**QWEN3_0_6B, eos_token_id=None, dtype=torch.bfloat16)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    engines = {"MARS": throughput_of_mars, "nano-vllm": throughput_of_nano_vllm}
    rows = []
    for name, measure in engines.items():
        row = {"engine": name, "requests": len(prompts), "sampled tokens": sum(wanted)}
        try:
            row["tokens/s"] = measure(model, prompts, wanted)
        except Exception as error:
            row["note"] = common.why(error)
        torch.cuda.empty_cache()
        rows.append(row)
        common.save("gpu_throughput", "python -m bench.gpu --row throughput", rows)
    return rows


# --- ten steps of the toy -------------------------------------------------------------------------


def step_seconds(metrics: list[dict]) -> dict:
    """Seconds a step of a run, its first step apart, and its sampled tokens a second."""
    later = metrics[1:]
    row = {"steps": len(metrics)}
    for part in ("rollout", "train"):
        row[f"s {part}, first"] = metrics[0][f"seconds_{part}"]
        row[f"s {part}"] = statistics.median(line[f"seconds_{part}"] for line in later)
    row["sampled tokens/s"] = statistics.median(line["tokens_per_second"] for line in later)
    row["largest mismatch_kl"] = max(line["mismatch_kl"] for line in metrics)
    return row


def toy() -> list[dict]:
    """`python mars.py` for 10 steps; its metrics.jsonl is kept as toy_metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", "10", "--eval_questions", "20", "--runs", folder, "--name", "toy"]
        subprocess.run([sys.executable, "mars.py", *options], cwd=ROOT, check=True)
        metrics = Path(folder) / "toy" / "metrics.jsonl"
        common.RESULTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(metrics, common.RESULTS / "toy_metrics.jsonl")
        rows = [step_seconds([line for line in read_lines(metrics) if "loss" in line])]
    common.save("gpu_toy", "python -m bench.gpu --row toy", rows)
    return rows


ROWS = {"throughput": throughput, "toy": toy}


def main():
    parser = argparse.ArgumentParser(description="All GPU tests and benches, in parts.")
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--list", action="store_true", help="show the parts and end")
    parser.add_argument("--row", choices=ROWS, help="measure this alone")
    options = parser.parse_args()
    if options.list:
        for part in options.part:
            for name, (seconds, command) in PARTS[part].items():
                print(f"{part}  {seconds:4} s  {name}: python -m {' '.join(command)}")
        return 0
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu measures on a GPU; PyTorch sees no CUDA device here.\n")
    if options.out is not None:
        common.RESULTS = options.out.resolve()
    if options.row is not None:
        print(common.table(ROWS[options.row]()))
        return 0
    went_well = [run_part(part) for part in options.part]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
