"""The sampler against transformers' own engines, on the same work, in useful tokens per second.

    python -m bench.sampler                  what this machine can run (with a GPU: its part alone)
    python -m bench.sampler --only cpu       one part of: cpu, grpo, growth, gpu
    python -m bench.sampler --quick          small shapes, to see that it works; writes no file

cpu     Random Qwen3 with 4 layers, hidden 256, 8/4 heads of 32, vocabulary 4,096; fp32, one thread.
        64 prompts of 16 to 256 tokens with 16, 32, 64 or 128 new ones each, greedy.
        A useful token is one that was asked for: a row that `generate` carries past its wanted
        length costs time and counts nothing. Peers, whose tokens are compared with ours:
        - `generate`, left-padded (goal: 2.5 times its speed);
        - `generate`, sorted by wanted length in batches of 16, which knows the lengths (1.6 times);
        - transformers' continuous batching with each request's own limit (3.5 times), at 512
          tokens a batch, its best of 256 to 2,048.
        Engines take turns; the clock counts CPU seconds.
grpo    The same model on rollouts: 8 questions × 16 trajectories, a prompt of 512 tokens, three
        turns of 48 new tokens with a tool result of 200 in between. With and without sharing the
        prompt's pages, with and without keeping a conversation's pages between its turns.
        "prefilled" counts computed positions that were not sampled for; "least" each of them once.
growth  Tokens a CPU second against the number of requests, and of decode against the context.
gpu     Random Qwen3-8B in bf16: decode tokens/s against the ceiling, which is the bytes of weights,
        keys and values over the copy rate of the card at hand; peers; whole jobs.
        Goals: 80 % of the ceiling at batch 64 and 4k; 3 times generate_batch.
        The attention kernel alone: bench/attention.py.

Against another checkout, in turn: python -m bench.sampler_pair FOLDER
Results: bench/results/sampler_{cpu,grpo,growth,gpu}.json
"""

import argparse
import inspect
import logging
import os
import random
import statistics
import time
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from bench.common import (  # noqa: E402
    copy_rate,
    fits,
    interleaved,
    save,
    spread,
    table,
    why,
)
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
UNMEASURED = "not yet measured"
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


def make_model(shape, dtype=torch.float32, device="cpu"):
    """A random Qwen3 that never stops by itself."""
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen3Config(
            **shape, eos_token_id=None, bos_token_id=None, pad_token_id=None, dtype=dtype
        )
        return Qwen3ForCausalLM(config).to(dtype).eval()


def random_tokens(rng, count, vocabulary):
    return [rng.randrange(vocabulary) for _ in range(count)]


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
    return [row[longest : longest + count] for row, count in zip(out.tolist(), wanted)]


def generate_sorted(model, prompts, wanted, size=16):
    """`generate` on batches of similar wanted length."""
    order, out = sorted(range(len(prompts)), key=lambda i: wanted[i]), [None] * len(prompts)
    for begin in range(0, len(order), size):
        batch = order[begin : begin + size]
        for i, tokens in zip(
            batch, generate(model, [prompts[i] for i in batch], [wanted[i] for i in batch])
        ):
            out[i] = tokens
    return out


def batching_config(**options):
    """Pages of 256 tokens: `page_size`, which transformers called `block_size` before 5.18."""
    names = inspect.signature(ContinuousBatchingConfig).parameters
    name = "page_size" if "page_size" in names else "block_size"
    return ContinuousBatchingConfig(**{name: 256}, **options)


def generate_batch(model, prompts, wanted, **options):
    """transformers' continuous batching as `generate_batch` runs it, with each request's limit."""
    blocks = sum((len(p) + w) // 256 + 1 for p, w in zip(prompts, wanted)) + 8
    engine = batching_config(num_blocks=blocks, **options)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max(wanted), eos_token_id=-1, pad_token_id=0
    )
    done = {}
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=engine, block=True, timeout=5
    ) as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=count)
            for prompt, count in zip(prompts, wanted)
        ]
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before it was done")
    return [done[name] for name in names]


# ---------------------------------------------------------------- cpu


def cpu(quick):
    """Rows of the table; see the head of this file."""
    rng, count = random.Random(0), 8 if quick else 64
    prompts = [random_tokens(rng, rng.randint(16, 256), SMALL["vocab_size"]) for _ in range(count)]
    wanted = [
        ((4, 8) if quick else (16, 32, 64, 128))[i % (2 if quick else 4)] for i in range(count)
    ]
    model = make_model(SMALL)
    sampler, answers = Sampler(model, max_tokens=32768), {}

    def ours():
        answers["MARS"] = [
            c.tokens for c in sampler.generate(prompts, max_new_tokens=wanted, temperature=0)
        ]

    def peer(name, function, **options):
        def call():
            answers[name] = function(model, prompts, wanted, **options)

        return call

    engines = {
        "MARS": ours,
        "generate, left-padded": peer("generate, left-padded", generate),
        "generate, sorted": peer("generate, sorted", generate_sorted),
        "generate_batch": peer("generate_batch", generate_batch, max_batch_tokens=512),
    }
    seconds = interleaved(engines, rounds=1 if quick else 5)
    rows, goals = [], {"generate, left-padded": 2.5, "generate, sorted": 1.6, "generate_batch": 3.5}
    for name in engines:
        speed = spread([sum(wanted) / s for s in seconds[name]])
        ratio = statistics.median(
            theirs / our for theirs, our in zip(seconds[name], seconds["MARS"])
        )
        equal = sum(a == b for a, b in zip(answers[name], answers["MARS"]))
        rows.append(
            {
                "engine": name,
                **{f"tokens/s, {k}": round(v) for k, v in speed.items()},
                "MARS is × faster": round(ratio, 2),
                "goal": goals.get(name, ""),
                "rows equal": equal,
            }
        )
    return rows


# ---------------------------------------------------------------- grpo


def rollouts(sampler, questions, results, group, new, keep):
    """Runs all trajectories to their end. keep=False gives pages back between the turns."""
    running = {}

    def ask(conversation, tokens, *names):
        running[sampler.submit(conversation, tokens, max_new_tokens=new, seed=hashed(*names))] = (
            names
        )

    for question, prompt in enumerate(questions):
        for k in range(group):
            ask(sampler.open(), prompt, question, k, 0)
    while sampler.busy:
        for request in sampler.step():
            question, k, turn = running.pop(request)
            conversation, result = request.conversation, results[question][turn]
            if turn == len(results[question]) - 1:
                sampler.close(conversation)
            elif keep:
                ask(conversation, result, question, k, turn + 1)
            else:
                sampler.close(conversation)
                ask(sampler.open(), conversation.tokens + result, question, k, turn + 1)


def grpo(quick):
    questions, group, prompt, result, new = (2, 3, 40, 10, 4) if quick else (8, 16, 512, 200, 48)
    rng, model, turns = random.Random(0), make_model(SMALL), 3
    texts = [random_tokens(rng, prompt, SMALL["vocab_size"]) for _ in range(questions)]
    results = [
        [random_tokens(rng, result, SMALL["vocab_size"]) for _ in range(turns)]
        for _ in range(questions)
    ]
    pool = 2 * questions * group * (prompt + turns * (result + new))
    least = questions * (prompt - 1) + questions * group * (turns - 1) * result
    rows, samplers, functions, prefilled = [], {}, {}, {}
    for share in (True, False):
        for keep in (True, False):
            samplers[share, keep] = Sampler(model, max_tokens=pool, share_prompts=share)

            def run(share=share, keep=keep):
                sampler = samplers[share, keep]
                before = sampler.stats["prefilled_tokens"]
                rollouts(sampler, texts, results, group, new, keep)
                prefilled[share, keep] = sampler.stats["prefilled_tokens"] - before

            functions[share, keep] = run
    seconds = interleaved(functions, rounds=1 if quick else 5)
    useful = questions * group * turns * new
    best = statistics.median(seconds[True, True])
    for (share, keep), times in seconds.items():
        rows.append(
            {
                "prompt shared": share,
                "pages kept": keep,
                **{
                    f"tokens/s, {k}": round(v)
                    for k, v in spread([useful / s for s in times]).items()
                },
                "× time of both": round(statistics.median(times) / best, 2),
                "prefilled": prefilled[share, keep],
                "× least": round(prefilled[share, keep] / least, 2),
            }
        )
    return rows


# ---------------------------------------------------------------- growth


def growth(quick):
    """Tokens a CPU second against requests, and of decode alone against context.

    Requests have 32 tokens and 16 new ones; decode has 4 rows and 32 new tokens.
    """
    rng = random.Random(0)
    model = make_model({**SMALL, "num_hidden_layers": 2, "hidden_size": 128})
    rows = []
    for count in (16, 64) if quick else (16, 64, 256, 1024, 4096):
        sampler = Sampler(model, max_tokens=16384)
        prompts = [random_tokens(rng, 32, SMALL["vocab_size"]) for _ in range(count)]
        options = dict(max_new_tokens=16, temperature=0)
        run = {"": partial(sampler.generate, prompts, **options)}
        seconds = statistics.median(interleaved(run, 1 if quick else 5)[""])
        rows.append(
            {
                "requests": count,
                "context": 32,
                "tokens/s": round(16 * count / seconds),
                "µs a token": round(1e6 * seconds / (16 * count), 1),
                "KV GB/s": "",
            }
        )
    for context in (256, 1024) if quick else (256, 1024, 4096, 16384):
        sampler = Sampler(model, max_tokens=4 * (context + 64))
        start_together(
            sampler, [random_tokens(rng, context, SMALL["vocab_size"]) for _ in range(4)], 32
        )
        before, start = sampler.stats["decoded_tokens"], time.process_time()
        while sampler.busy:
            sampler.step()
        seconds, tokens = time.process_time() - start, sampler.stats["decoded_tokens"] - before
        read = (
            tokens * context * 2 * 2 * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 4
        )  # 2 layers, fp32
        rows.append(
            {
                "requests": 4,
                "context": context,
                "tokens/s": round(tokens / seconds),
                "µs a token": round(1e6 * seconds / tokens, 1),
                "KV GB/s": round(read / seconds / 1e9, 1),
            }
        )
    return rows


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
    s = QWEN3_8B
    layers = s["num_hidden_layers"]
    kv_heads = s["num_key_value_heads"]
    heads = s["num_attention_heads"] + kv_heads
    layer = s["hidden_size"] * (2 * heads * s["head_dim"] + 3 * s["intermediate_size"])
    weights = 2 * (layers * layer + s["vocab_size"] * s["hidden_size"])
    cache = rows * context * 2 * layers * kv_heads * s["head_dim"] * 2
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
    seconds = wall(lambda: [sampler.step() for _ in range(steps)])
    for conversation in conversations:
        sampler.close(conversation)
    sampler.step()
    return steps * len(prompts) / seconds


def gpu(quick):
    """Rows of the table. Each is saved as soon as it is measured: a call may be cut."""
    cases = [(rows, context) for rows in (64, 1, 128) for context in (4096, 1024)]
    if quick:
        cases = cases[:2]
    if not torch.cuda.is_available():
        return [
            {"rows": rows, "context": context, "MARS decode": UNMEASURED} for rows, context in cases
        ]
    rate = copy_rate()
    model = make_model(QWEN3_8B, torch.bfloat16, "cuda")
    measured = []
    for rows, context in cases:
        row = {"rows": rows, "context": context}
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
    if not fits(weights + cache):
        row["MARS decode"] = (
            f"needs {(weights + cache) / 2**30:.0f} GiB more than this card has free"
        )
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
    sampler = None  # the pool makes room for the peers
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


COMMAND = "python -m bench.sampler --only {}"
PARTS = {"cpu": cpu, "grpo": grpo, "growth": growth, "gpu": gpu}


def main():
    parser = argparse.ArgumentParser(description="The sampler against transformers' engines.")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=["gpu"] if torch.cuda.is_available() else list(PARTS),
    )
    parser.add_argument("--quick", action="store_true", help="small shapes; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for part in options.only:
        rows = PARTS[part](options.quick)
        print(f"\n{part}\n{table(rows)}", flush=True)
        if not options.quick and (part != "gpu" or torch.cuda.is_available()):
            print(
                "written:", save(f"sampler_{part}", f"python -m bench.sampler --only {part}", rows)
            )


if __name__ == "__main__":
    main()
