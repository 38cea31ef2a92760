"""The sampler against other engines, on the same work, in useful tokens per second.

    python -m bench.sampler                  what this machine can run (with a GPU: its part alone)
    python -m bench.sampler --only cpu       one part of: cpu, grpo, alike, growth, gpu
    python -m bench.sampler --quick          small shapes, to see that it works; writes no file
    python -m bench.sampler --only cpu --engines-python FOLDER/bin/python [more of them]
                                             engines of other environments beside ours

cpu     Random Qwen3 with 4 layers, hidden 256, 8/4 heads of 32, vocabulary 4,096; fp32, one thread.
        64 prompts of 16 to 256 tokens with 16, 32, 64 or 128 new ones each, greedy.
        A useful token is one that was asked for: a row that `generate` carries past its wanted
        length costs time and counts nothing. Peers, whose tokens are compared with ours:
        - `generate`, left-padded (goal: 2.5 times its speed);
        - `generate`, sorted by wanted length in batches of 16, so it knows the lengths (1.6 times);
        - transformers' continuous batching with each request's own limit (3.5 times), at 512
          tokens a batch, its best of 256 to 2,048;
        - OpenVINO GenAI and vLLM, where an environment has them (engines.py: how to install them).
        Engines take turns; the clock counts CPU seconds.
grpo    The same model on rollouts: 8 questions × 16 trajectories, a prompt of 512 tokens, three
        turns of 48 new tokens with a tool result of 200 in between. With and without sharing the
        prompt's pages, with and without keeping a conversation's pages between its turns.
        "prefilled" counts computed positions that were not sampled for; "least" each of them once.
alike   64 different prompts of 256 tokens that begin alike, 16 new tokens each, with and without
        sharing the pages of the beginning.
growth  Tokens a CPU second against the number of requests, and of decode against the context.
gpu     Random Qwen3-8B in bf16: decode tokens/s against the ceiling, which is the bytes of weights,
        keys and values over the copy rate of the card at hand; peers; whole jobs.
        Goals: 80 % of the ceiling at batch 64 and 4k; 3 times generate_batch.
        The attention kernel alone: bench/attention.py.

Against another checkout, in turn: python -m bench.sampler_pair FOLDER
Results: bench/results/sampler_{cpu,grpo,alike,growth,gpu}.json
"""

import argparse
import inspect
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from transformers import (  # noqa: E402
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.common import copy_rate, fits, interleaved, save, spread, table, why  # noqa: E402
from bench.engines import start_engines  # noqa: E402
from sampler import Sampler, hashed  # noqa: E402

SMALL = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=32768,
)
QWEN3_8B = dict(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)
UNMEASURED = "not yet measured"
COMMAND = "python -m bench.sampler --only {}"


def make_model(shape, dtype=torch.float32, device="cpu"):
    """A random Qwen3 that never stops by itself."""
    torch.manual_seed(0)
    no_specials = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    with torch.device(device):
        config = Qwen3Config(**shape, **no_specials, dtype=dtype)
        return Qwen3ForCausalLM(config).to(dtype).eval()


def random_tokens(rng, count, vocabulary=SMALL["vocab_size"]):
    return [rng.randrange(vocabulary) for _ in range(count)]


def speeds(tokens, seconds):
    """Columns of a table: tokens a second in the median round, the slowest and the fastest."""
    measured = spread([tokens / each for each in seconds])
    return {f"tokens/s, {name}": round(speed) for name, speed in measured.items()}


# ---------------------------------------------------------------- peers


def generate(model, prompts, wanted):
    """transformers' `generate` on one left-padded batch: all rows run to the longest length."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(wanted),
        do_sample=False,
        pad_token_id=0,
    )
    answers = out[:, longest:].tolist()
    return [answer[:count] for answer, count in zip(answers, wanted)]


def generate_sorted(model, prompts, wanted, size=16):
    """`generate` on batches of similar wanted length."""
    order = sorted(range(len(prompts)), key=lambda i: wanted[i])
    answers = {}
    for begin in range(0, len(order), size):
        batch = order[begin : begin + size]
        done = generate(model, [prompts[i] for i in batch], [wanted[i] for i in batch])
        answers.update(zip(batch, done))
    return [answers[i] for i in range(len(prompts))]


def batching_config(**options):
    """Pages of 256 tokens: `page_size`, which transformers called `block_size` before 5.18."""
    names = inspect.signature(ContinuousBatchingConfig).parameters
    name = "page_size" if "page_size" in names else "block_size"
    return ContinuousBatchingConfig(**{name: 256}, **options)


def generate_batch(model, prompts, wanted, **options):
    """transformers' continuous batching as `generate_batch` runs it, with each request's limit."""
    lengths = [len(prompt) + count for prompt, count in zip(prompts, wanted)]
    blocks = sum(length // 256 + 1 for length in lengths) + 8
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max(wanted), eos_token_id=-1, pad_token_id=0
    )
    done = {}
    with model.continuous_batching_context_manager(
        generation_config=greedy,
        continuous_batching_config=batching_config(num_blocks=blocks, **options),
        block=True,
        timeout=5,
    ) as manager:
        names = []
        for prompt, count in zip(prompts, wanted):
            names.append(manager.add_request(prompt, max_new_tokens=count))
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before it was done")
    return [done[name] for name in names]


# ---------------------------------------------------------------- cpu

GOALS = {"generate, left-padded": 2.5, "generate, sorted": 1.6, "generate_batch": 3.5}


def workload(quick):
    """Prompts, and how many new tokens each one wants."""
    rng = random.Random(0)
    count = 8 if quick else 64
    lengths = (4, 8) if quick else (16, 32, 64, 128)
    prompts = [random_tokens(rng, rng.randint(16, 256)) for _ in range(count)]
    wanted = [lengths[i % len(lengths)] for i in range(count)]
    return prompts, wanted


def cpu(quick, pythons):
    """Rows of the table; see the head of this file. pythons: of environments with engines."""
    prompts, wanted = workload(quick)
    model = make_model(SMALL)
    sampler = Sampler(model, max_tokens=32768)

    def ours():
        done = sampler.generate(prompts, max_new_tokens=wanted, temperature=0)
        return [completion.tokens for completion in done]

    peers = {
        "MARS": ours,
        "generate, left-padded": partial(generate, model, prompts, wanted),
        "generate, sorted": partial(generate_sorted, model, prompts, wanted),
        "generate_batch": partial(generate_batch, model, prompts, wanted, max_batch_tokens=512),
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engines, absent = start_engines(pythons, folder, prompts, wanted)
        for name, engine in engines.items():
            peers[name] = engine.run
        try:
            seconds, answers = race(peers, engines.values(), rounds=1 if quick else 5)
        finally:
            for engine in engines.values():
                engine.close()

    rows = [engine_row(name, sum(wanted), seconds, answers) for name in peers]
    for row in rows:
        if row["engine"] in engines:
            row["version"] = engines[row["engine"]].version
    for name, reason in absent.items():
        rows.append({"engine": name, "tokens/s, median": reason})
    return rows


def race(peers, engines, rounds):
    """Lets all peers do the work in turn. Returns CPU seconds by round and tokens, by name.

    Some peers are `engines` of other processes, so the clock adds the seconds that those report.
    """
    answers = {}

    def keep(name, run):
        answers[name] = run()

    def clock():
        return time.process_time() + sum(engine.seconds for engine in engines)

    functions = {name: partial(keep, name, run) for name, run in peers.items()}
    return interleaved(functions, rounds, clock), answers


def engine_row(name, tokens, seconds, answers):
    """A line of the CPU table. A ratio is of two measurements of one round."""
    ratios = [theirs / ours for theirs, ours in zip(seconds[name], seconds["MARS"])]
    equal = [theirs == ours for theirs, ours in zip(answers[name], answers["MARS"])]
    return {
        "engine": name,
        **speeds(tokens, seconds[name]),
        "MARS is × faster": round(statistics.median(ratios), 2),
        "× min": round(min(ratios), 2),
        "× max": round(max(ratios), 2),
        "goal": GOALS.get(name, ""),
        "rows equal": sum(equal),
    }


# ---------------------------------------------------------------- grpo


def rollouts(sampler, prompts, results, group, new, keep):
    """Runs all trajectories to their end. keep=False gives pages back between the turns."""
    running = {}  # request -> (question, trajectory, turn)

    def ask(conversation, tokens, *place):
        request = sampler.submit(conversation, tokens, max_new_tokens=new, seed=hashed(*place))
        running[request] = place

    for question, prompt in enumerate(prompts):
        for trajectory in range(group):
            ask(sampler.open(), prompt, question, trajectory, 0)
    while sampler.busy:
        for request in sampler.step():
            question, trajectory, turn = running.pop(request)
            conversation = request.conversation
            tokens = results[question][turn]
            last = turn == len(results[question]) - 1
            if last or not keep:
                sampler.close(conversation)
            if last:
                continue
            if not keep:
                tokens = conversation.tokens + tokens
                conversation = sampler.open()
            ask(conversation, tokens, question, trajectory, turn + 1)


def grpo(quick):
    """Rows of the table; see the head of this file."""
    questions, group, length, result, new = (2, 3, 40, 10, 4) if quick else (8, 16, 512, 200, 48)
    turns = 3
    rng = random.Random(0)
    model = make_model(SMALL)
    prompts = [random_tokens(rng, length) for _ in range(questions)]
    results = []
    for _ in range(questions):
        results.append([random_tokens(rng, result) for _ in range(turns)])
    pool = 2 * questions * group * (length + turns * (result + new))
    least = questions * (length - 1) + questions * group * (turns - 1) * result

    functions = {}
    prefilled = {}
    for share in (True, False):
        for keep in (True, False):
            sampler = Sampler(model, max_tokens=pool, share_prompts=share)

            def run(sampler=sampler, share=share, keep=keep):
                before = sampler.stats["prefilled_tokens"]
                rollouts(sampler, prompts, results, group, new, keep)
                prefilled[share, keep] = sampler.stats["prefilled_tokens"] - before

            functions[share, keep] = run
    seconds = interleaved(functions, rounds=1 if quick else 5)

    useful = questions * group * turns * new
    best = statistics.median(seconds[True, True])
    rows = []
    for (share, keep), times in seconds.items():
        row = {
            "prompt shared": share,
            "pages kept": keep,
            **speeds(useful, times),
            "× time of both": round(statistics.median(times) / best, 2),
            "prefilled": prefilled[share, keep],
            "× least": round(prefilled[share, keep] / least, 2),
        }
        rows.append(row)
    return rows


# ---------------------------------------------------------------- alike


def alike(quick):
    """Rows of the table; see the head of this file."""
    count, length, new = (8, 64, 4) if quick else (64, 256, 16)
    rng = random.Random(0)
    model = make_model(SMALL)
    rows = []
    for share in (0, 1 / 4, 1 / 2, 3 / 4, 7 / 8):
        beginning = random_tokens(rng, int(share * length))
        rest = length - len(beginning)
        prompts = [[*beginning, *random_tokens(rng, rest)] for _ in range(count)]
        functions = {}
        prefilled = {}
        for shared in (True, False):
            sampler = Sampler(model, max_tokens=2 * count * length, share_prompts=shared)

            def run(sampler=sampler, shared=shared, prompts=prompts, prefilled=prefilled):
                before = sampler.stats["prefilled_tokens"]
                sampler.generate(prompts, max_new_tokens=new, temperature=0)
                prefilled[shared] = sampler.stats["prefilled_tokens"] - before

            functions[shared] = run
        times = interleaved(functions, rounds=1 if quick else 5)
        without = statistics.median(times[False])
        row = {
            "in common": share,
            "prefilled": prefilled[True],
            "without sharing": prefilled[False],
            **speeds(count * new, times[True]),
            "× faster": round(without / statistics.median(times[True]), 2),
        }
        rows.append(row)
    return rows


# ---------------------------------------------------------------- growth


def growth(quick):
    """Tokens a CPU second against requests, and of decode alone against context.

    Requests have 32 tokens and 16 new ones; decode has 4 rows and 32 new tokens.
    """
    layers = 2
    rng = random.Random(0)
    model = make_model({**SMALL, "num_hidden_layers": layers, "hidden_size": 128})
    rows = []
    for count in (16, 64) if quick else (16, 64, 256, 1024, 4096):
        sampler = Sampler(model, max_tokens=16384)
        prompts = [random_tokens(rng, 32) for _ in range(count)]
        job = partial(sampler.generate, prompts, max_new_tokens=16, temperature=0)
        times = interleaved({"job": job}, rounds=1 if quick else 5)["job"]
        rows.append(growth_row(count, 32, 16 * count, statistics.median(times)))
    for context in (256, 1024) if quick else (256, 1024, 4096, 16384):
        sampler = Sampler(model, max_tokens=4 * (context + 64))
        start_together(sampler, [random_tokens(rng, context) for _ in range(4)], 32)
        before = sampler.stats["decoded_tokens"]
        start = time.process_time()
        while sampler.busy:
            sampler.step()
        seconds = time.process_time() - start
        tokens = sampler.stats["decoded_tokens"] - before
        row = growth_row(4, context, tokens, seconds)
        key_bytes = layers * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 4  # fp32
        row["KV GB/s"] = round(tokens * context * 2 * key_bytes / seconds / 1e9, 1)
        rows.append(row)
    return rows


def growth_row(requests, context, tokens, seconds):
    return {
        "requests": requests,
        "context": context,
        "tokens/s": round(tokens / seconds),
        "µs a token": round(1e6 * seconds / tokens, 1),
        "KV GB/s": "",
    }


def start_together(sampler, prompts, new):
    """Prefills each prompt in a conversation; then all decode `new` tokens from one step on."""
    conversations = [sampler.open() for _ in prompts]
    for conversation, prompt in zip(conversations, prompts):
        sampler.submit(conversation, prompt, max_new_tokens=1)
    while sampler.busy:
        sampler.step()
    for conversation in conversations:
        sampler.submit(conversation, [0], max_new_tokens=new)
    return conversations


# ---------------------------------------------------------------- gpu


def step_bytes(rows, context):
    """Bytes of the weights, and of the keys and values, that one decode step reads."""
    shape = QWEN3_8B
    layers = shape["num_hidden_layers"]
    hidden = shape["hidden_size"]
    kv_heads = shape["num_key_value_heads"]
    head_dim = shape["head_dim"]
    # The query and output projections have all heads, those of keys and values the few.
    attention = 2 * hidden * (shape["num_attention_heads"] + kv_heads) * head_dim
    mlp = 3 * hidden * shape["intermediate_size"]
    head = hidden * shape["vocab_size"]
    weights = 2 * (layers * (attention + mlp) + head)
    cache = rows * context * 2 * layers * kv_heads * head_dim * 2
    return weights, cache


def ceiling(rows, context, bytes_a_second):
    """Tokens/s if weights and keys and values were only read, each once a step."""
    return rows * bytes_a_second / sum(step_bytes(rows, context))


def wall(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def decode_speed(sampler, prompts, steps):
    """Tokens/s of `steps` decode steps with all prompts in pages, after eight steps to warm up."""
    conversations = start_together(sampler, prompts, steps + 16)
    for _ in range(8):
        sampler.step()

    def decode():
        for _ in range(steps):
            sampler.step()

    seconds = wall(decode)
    for conversation in conversations:
        sampler.close(conversation)
    sampler.step()
    return steps * len(prompts) / seconds


def gpu(quick):
    """Rows of the table; see the head of this file.

    Each one is saved here as soon as it is measured, for a call may be cut.
    """
    sizes = (64,) if quick else (64, 1, 128)
    cases = [{"rows": rows, "context": context} for rows in sizes for context in (4096, 1024)]
    if not torch.cuda.is_available():
        return [row | {"MARS decode": UNMEASURED} for row in cases]
    rate = copy_rate()
    model = make_model(QWEN3_8B, torch.bfloat16, "cuda")
    measured = []
    for row in cases:
        measured.append(row)
        try:
            gpu_row(row, model, rate, new=64, rounds=1 if quick else 5)
        except Exception as error:
            row["MARS decode"] = why(error)
        torch.cuda.empty_cache()
        print(table([row]), flush=True)
        if not quick:
            save("sampler_gpu", COMMAND.format("gpu"), measured, copy_bytes_a_second=rate)
    return measured


def gpu_row(row, model, rate, new, rounds):
    """Fills one line of the GPU table, in tokens/s.

    A whole job is `rows` prompts of `context` tokens and `new` tokens for each.
    """
    rng = random.Random(0)
    rows = row["rows"]
    context = row["context"]
    prompts = [random_tokens(rng, context, QWEN3_8B["vocab_size"]) for _ in range(rows)]
    wanted = [new] * rows
    tokens = rows * (context + 320)
    weights, cache = step_bytes(rows, context + 320)
    # The sampler has a copy of the weights of its own.
    needed = weights + cache
    if not fits(needed):
        row["MARS decode"] = f"needs {needed / 2**30:.0f} GiB more than this card has free"
        return
    sampler = Sampler(model, max_tokens=tokens, max_sequences=rows)
    speed = statistics.median(decode_speed(sampler, prompts, new) for _ in range(rounds))
    best = ceiling(rows, context + 40, rate)
    row["ceiling"] = round(best)
    row["MARS decode"] = round(speed)
    row["% of ceiling"] = round(100 * speed / best, 1)

    def job():
        sampler.generate(prompts, max_new_tokens=new, temperature=0)

    wall(job)
    row["MARS whole job"] = round(new * rows / wall(job))
    sampler = None  # The pool makes room for the peers.
    torch.cuda.empty_cache()

    def decode_only():
        both = wall(lambda: generate(model, prompts, wanted))
        prefill = wall(lambda: generate(model, prompts, [1] * rows))
        return (new - 1) * rows / (both - prefill)

    def whole_job():
        return new * rows / wall(lambda: generate_batch(model, prompts, wanted))

    row["generate decode"] = gpu_peer(decode_only)
    row["generate_batch whole job"] = gpu_peer(whole_job)
    if isinstance(row["generate_batch whole job"], int):
        row["×"] = round(row["MARS whole job"] / row["generate_batch whole job"], 2)


def gpu_peer(measure):
    """A peer's tokens/s after a warm-up; one that does not run here is a cell, not the end."""
    try:
        measure()
        return round(measure())
    except Exception as error:
        return why(error)


PARTS = {"cpu": cpu, "grpo": grpo, "alike": alike, "growth": growth, "gpu": gpu}


def main():
    parser = argparse.ArgumentParser(description="The sampler against other engines.")
    default = ["gpu"] if torch.cuda.is_available() else list(PARTS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=default)
    parser.add_argument("--quick", action="store_true", help="small shapes; writes no file")
    parser.add_argument(
        "--engines-python",
        nargs="+",
        default=[sys.executable],
        metavar="PYTHON",
        help="of environments that have OpenVINO GenAI or vLLM (default: this one)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for part in options.only:
        more = [options.engines_python] if part == "cpu" else []
        rows = PARTS[part](options.quick, *more)
        print(f"\n{part}\n{table(rows)}", flush=True)
        if part != "gpu" and not options.quick:
            print("written:", save(f"sampler_{part}", COMMAND.format(part), rows))


if __name__ == "__main__":
    main()
