"""What a step of MARS costs, on paper: tokens, searches, memory, operations, the least time.

A step has Q questions × G attempts. An attempt makes `calls` tool calls, and each fills `chunks`
System 1 prompts. With n = Q·G, m = System 1 samples per attempt, L layers, and D, Hq, Hkv, Dh, V
as everywhere:

    forward     2·(body weights·tokens + V·D·tokens with logits) + 4·L·Hq·Dh·(query, key) pairs,
                where a sample has length²/2 pairs
    backward    twice the forward; --recompute_activations adds one more forward
    sampling    prefill every given token once (a question's prompt once for all G), decode every
                sampled one
    training    System 2: n whole contexts. System 1: balanced to min(m, 1)·n samples. Logits for
                sampled tokens only. Questions whose rewards are all equal are left out
                (`flat_share`, 0 unless set).
    memory      what a run plans before it starts, without activations

With servers (docs/engines.md) rollouts and training have GPUs of their own and take turns, so a
step is rollouts + training + new weights. By disk these are written once and read once a machine;
over NCCL rank 0 sends them to one server after the other.

Times are floors and not measured: operations / peak product, bytes / peak copy, of the ceilings
below. There is no communication, no launch, and no wait for tools or for the longest attempt.
What has no source is our assumption and says so; change it with --set.

    python -m bench.cost                            toy, 0.6B, 1.7B, 8B on 1 and 8 GPUs
                                                    and trainers with servers
                                                    -> bench/results/cost.json
    python -m bench.cost --set note_tokens=2048     another assumption for the paper's workload
                                                    (writes nothing)
    python -m bench.cost --check runs/toy           the toy's predictions beside a run's last 20
                                                    steps -> bench/results/cost_check.json

Tests: pytest tests/test_bench.py
"""

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from bench import common
from config import Config, UserError, fail
from plumbing.folders import read_lines

# Of one H200. Both were measured elsewhere, not by this repository.
PEAK_FLOPS = 790e12  # bf16 product
PEAK_BYTES = 4.3e12  # copy, bytes a second
# Ways that new weights go, bytes a second: our assumptions.
DISK = 2e9  # of the storage that trainers and servers share, whoever writes or reads
NETWORK = 40e9  # of one GPU's port, at four fifths of 400 Gbit/s
MACHINE = 8  # GPUs, whose servers share what was read from disk


@dataclass(frozen=True)
class Shape:
    """A Qwen3 architecture: RMS norms on queries and keys, a gated MLP, no biases."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    tied: bool

    @property
    def body(self) -> int:
        """Weights of the products in all layers: half of what a token costs forward."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head(self) -> int:
        """Weights of the LM head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_size) + self.hidden
        tables = 1 if self.tied else 2
        return self.body + norms + tables * self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes of bf16 keys and values a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    def forward(self, tokens: float, pairs: float, logits: float) -> float:
        """Floating-point operations; a multiplication and an addition are two."""
        products = 2 * self.body * tokens
        attention = 4 * self.layers * self.heads * self.head_size * pairs
        return products + attention + 2 * self.head * logits


# The toy: toy.base_model.new_model. The others: config.json of Qwen/Qwen3-0.6B, -1.7B, -8B, -32B.
SHAPES = [
    Shape("toy", 2, 128, 4, 4, 32, 384, 370, True),
    Shape("0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True),
    Shape("1.7B", 28, 2048, 16, 8, 128, 6144, 151936, True),
    Shape("8B", 36, 4096, 32, 8, 128, 12288, 151936, False),
    Shape("32B", 64, 5120, 64, 8, 128, 25600, 151936, False),
]
# Model, GPUs that train, GPUs that serve, one server each.
FLEETS = [("8B", 8, 8), ("8B", 8, 24), ("32B", 16, 16), ("32B", 8, 24)]


@dataclass(frozen=True)
class Workload:
    """What a step asks of any model.

    Numbers a call, a sample or an attempt are means. Tokens are the model's own.
    """

    questions: float
    group: float
    calls: float  # tool calls per attempt
    distilled: float  # those of them whose result System 1 reads; all go to a search
    chunks: float  # System 1 samples a distilled call
    chunk_tokens: float  # read by a System 1 sample: documents, purpose, wording
    note_tokens: float  # sampled by it
    prompt_tokens: float  # System 2's prompt
    step_tokens: float  # sampled by System 2 a call
    wrap_tokens: float  # given to it a call, beside the notes
    answer_tokens: float  # its last step
    max_sequences: int = 256  # decoded together
    kv_tokens: int = 65536
    flat_share: float = 0  # of the questions: all rewards equal, so nothing to train on
    fsdp: bool = False
    recompute_activations: bool = False


# Sizes are the defaults of the configuration. The rest was counted on the toy's own questions,
# looked up without a fault. The tests count again.
TOY = Workload(
    questions=16,
    group=8,
    calls=1.5,
    distilled=1.3,
    chunks=2.13,
    chunk_tokens=54.3,
    note_tokens=4.54,
    prompt_tokens=9.5,
    step_tokens=9.5,
    wrap_tokens=2.1,
    answer_tokens=3.05,
)
# The paper's setting (mars.PAPER). † = one secondary digest. "ours": no source, an assumption.
PAPER = Workload(
    questions=32,  # †
    group=16,  # †
    calls=2.2,  # about 22 pages a question on HLE; 10 a call is ours
    distilled=2.2,
    chunks=2,  # ours: 4,000 tokens a page, so that 5 of 10 fit into †23,552
    chunk_tokens=20_500,
    note_tokens=512,  # ours; the limit is †8,192
    prompt_tokens=600,  # ours
    step_tokens=512,  # ours; the limit of all is †28,672
    wrap_tokens=20,  # ours
    answer_tokens=512,  # ours
    max_sequences=256,
    kv_tokens=120_000,
    fsdp=True,
    recompute_activations=True,
)


# ----------------------------------------------------------------------- arithmetic


def tokens(w: Workload) -> dict[str, float]:
    """Samples and tokens of one step, all attempts together."""
    n = w.questions * w.group
    m = w.distilled * w.chunks
    sampled = w.calls * w.step_tokens + w.answer_tokens
    notes = w.calls * w.wrap_tokens + m * w.note_tokens
    context = w.prompt_tokens + notes + sampled
    learning = n * (1 - w.flat_share)  # attempts with an advantage
    drawn = learning * min(m, 1)  # System 1 samples in the loss
    return {
        "trajectories": n,
        "calls": n * w.calls,
        "search_calls": n * w.distilled,
        "judge_calls": n,
        "sys1_samples": n * m,
        "sys1_read": n * m * w.chunk_tokens,
        "sys1_sampled": n * m * w.note_tokens,
        "sys2_context": context,
        "sys2_given": n * (w.prompt_tokens + notes),
        "sys2_sampled": n * sampled,
        "prefilled": n * m * w.chunk_tokens + w.questions * w.prompt_tokens + n * notes,
        "decoded": n * (m * w.note_tokens + sampled),
        "trained": learning * context + drawn * (w.chunk_tokens + w.note_tokens),
        "with_loss": learning * sampled + drawn * w.note_tokens,
    }


def operations(shape: Shape, w: Workload) -> dict[str, float]:
    """Floating-point operations of one step: prefill, decode, train."""
    t = tokens(w)
    sys1_length = w.chunk_tokens + w.note_tokens
    # (query, key) pairs: those of given tokens are prefilled, those of sampled ones decoded.
    sys1_pairs = t["sys1_samples"] * sys1_length**2 / 2
    sys1_given = t["sys1_samples"] * w.chunk_tokens**2 / 2
    sys2_pairs = t["trajectories"] * t["sys2_context"] ** 2 / 2
    # In System 2's contexts, given and sampled tokens count as if spread evenly.
    sys2_given = sys2_pairs * t["sys2_given"] / (t["sys2_given"] + t["sys2_sampled"])
    given = sys1_given + sys2_given
    sampled = sys1_pairs + sys2_pairs - given

    learning = t["trajectories"] * (1 - w.flat_share)
    drawn = learning * min(1, w.distilled * w.chunks)
    trained = (learning * t["sys2_context"] ** 2 + drawn * sys1_length**2) / 2
    train = 3 * shape.forward(t["trained"], trained, t["with_loss"])
    if w.recompute_activations:
        train += shape.forward(t["trained"], trained, 0)
    return {
        "prefill": shape.forward(t["prefilled"], given, 0),
        "decode": shape.forward(t["decoded"], sampled, t["decoded"]),
        "train": train,
    }


def floors(shape: Shape, w: Workload, gpus: int) -> dict[str, float]:
    """The least seconds that prefill, decode and training can take on `gpus` H200s."""
    t = tokens(w)
    needed = operations(shape, w)
    # Keys and values that all sampled tokens read.
    sys1_read = t["sys1_sampled"] * (w.chunk_tokens + w.note_tokens / 2)
    sys2_read = t["sys2_sampled"] * (w.prompt_tokens + t["sys2_context"]) / 2
    read = (sys1_read + sys2_read) / gpus
    # A forward pass of decoding reads all weights. Passes are bound by the sequences decoded
    # together, by the KV pool, or by the tokens of one attempt, each of which needs the last.
    chain = w.calls * w.step_tokens + w.distilled * w.note_tokens + w.answer_tokens
    passes = max(t["decoded"] / gpus / w.max_sequences, read / w.kv_tokens, chain)
    weights = 2 * (shape.parameters - (0 if shape.tied else shape.head))
    traffic = passes * weights + shape.kv_bytes * read
    per_second = gpus * PEAK_FLOPS
    return {
        "prefill": needed["prefill"] / per_second,
        "decode": max(traffic / PEAK_BYTES, needed["decode"] / per_second),
        "train": needed["train"] / per_second,
    }


def fleet(shape: Shape, w: Workload, trainers: int, servers: int) -> dict[str, float]:
    """The least seconds of a step in which `servers` GPUs sample and then `trainers` GPUs train."""
    sampling = floors(shape, w, servers)
    rollouts = sampling["prefill"] + sampling["decode"]
    train = floors(shape, w, trainers)["train"]
    weights = 2 * shape.parameters  # bf16
    disk = (1 + math.ceil(servers / MACHINE)) * weights / DISK
    return {
        "rollouts s": rollouts,
        "train s": train,
        "GB a sync": weights / 1e9,
        "sync s, disk": disk,
        "sync s, NCCL": servers * weights / NETWORK,  # one after the other, see sampler/nccl.py
        "step s, disk": rollouts + train + disk,
        "trainers work": train / (rollouts + train + disk),
        # With as many, sampling would take as long as training.
        "servers to match": math.ceil(servers * rollouts / train),
        "GiB a trainer": sum(memory(shape, w, trainers, server="elsewhere").values()) / 2**30,
    }


def memory(shape: Shape, w: Workload, gpus: int, server: str = "") -> dict[str, float]:
    """Bytes a GPU by purpose, before activations: what a run plans before it starts."""
    from trainer.memory import memory_parts  # loads torch

    described = SimpleNamespace(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.tied,
    )
    config = Config(server=server, fsdp=w.fsdp, kv_tokens=w.kv_tokens)
    return memory_parts(described, shape.parameters, config=config, world=gpus, cuda=True)


# -------------------------------------------------------------------- against a run


def measured(lines: list[dict], records: list[dict], trajectories: float) -> dict[str, float]:
    """The quantities of `tokens` as a toy run counted them.

    They are means over `lines` of metrics.jsonl. `records` give the texts, in which a word is a
    token.
    """

    def average(key: str) -> float:
        return mean(line[key] for line in lines)

    found = {
        "calls": trajectories * average("calls_per_question"),
        "sys1_samples": average("sys1_samples"),
        "sys1_sampled": average("sys1_tokens"),
        "sys2_sampled": average("sys2_tokens"),
        "with_loss": average("trained_tokens"),
    }
    read = []
    contexts = []
    for record in records:
        for turn in record["turns"]:
            read += [len(chunk["prompt"].split()) for chunk in turn["chunks"]]
        text = " ".join(segment["text"] for segment in record["segments"])
        contexts.append(len(text.split()))
    if read:
        found["sys1_read"] = found["sys1_samples"] * mean(read)
        found["sys2_context"] = mean(contexts)
    return found


def check(folder: Path) -> list[dict]:
    """Predicted beside measured, for a toy run's last 20 steps.

    The share of flat questions is the measured one.
    """
    try:
        saved = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{folder} holds no run: name the folder of a toy run, such as runs/toy"
        ) from None
    if saved.get("data") != "toy":
        raise UserError(
            f"{folder} is no run of the toy, whose workload is the one that can be predicted"
        )
    lines = read_lines(folder / "metrics.jsonl")[-20:]
    if not lines:
        raise UserError(f"{folder} has no finished step yet")
    path = folder / "rollouts" / f"step_{lines[-1]['step']}.jsonl"
    records = []
    if path.exists():
        records = [record for record in read_lines(path) if record["split"] == "train"]
    workload = dataclasses.replace(
        TOY,
        questions=saved["questions"],
        group=saved["group"],
        flat_share=mean(line["zero_variance_share"] for line in lines),
    )
    predicted = tokens(workload)
    rows = []
    for name, value in measured(lines, records, predicted["trajectories"]).items():
        rows.append(
            {
                "a step": name,
                "predicted": round(predicted[name], 1),
                "measured": round(value, 1),
                "measured/predicted": round(value / predicted[name], 3),
            }
        )
    return rows


# -------------------------------------------------------------------------- command


def rows_of(pairs: list[tuple[Shape, Workload]]) -> list[dict]:
    """One row for each model on 1 and on 8 GPUs."""
    rows = []
    for shape, w in pairs:
        needed = operations(shape, w)
        for gpus in (1, 8):
            row = {"model": shape.name, "parameters": shape.parameters, "GPUs": gpus}
            row |= {f"{name} PFLOP": number / 1e15 for name, number in needed.items()}
            least = floors(shape, w, gpus)
            row |= {f"{name} s, floor": seconds for name, seconds in least.items()}
            row["GiB a GPU"] = sum(memory(shape, w, gpus).values()) / 2**30
            rows.append(row)
    return rows


def fleet_rows(w: Workload) -> list[dict]:
    """One row for each of FLEETS."""
    shapes = {shape.name: shape for shape in SHAPES}
    rows = []
    for name, trainers, servers in FLEETS:
        row = {"model": name, "trainers": trainers, "servers": servers}
        rows.append(row | fleet(shapes[name], w, trainers, servers))
    return rows


def workload_table(workloads: dict[str, Workload]) -> str:
    """The tokens of a step, one column a workload."""
    counts = {name: tokens(w) for name, w in workloads.items()}
    rows = []
    for key in counts["toy"]:
        row = {"a step": key}
        for name, count in counts.items():
            row[name] = f"{count[key]:,.0f}"
        rows.append(row)
    return common.table(rows)


def changed(workload: Workload, settings: list[str]) -> Workload:
    """The workload with name=value settings."""
    types = {field.name: field.type for field in dataclasses.fields(Workload)}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        # Not a number is refused too: it is not at least 0.
        if name not in types or not 0 <= number < float("inf"):
            names = ", ".join(types)
            raise UserError(
                f"--set {setting}: give NAME=VALUE, a number of at least 0; names: {names}"
            )
        workload = dataclasses.replace(workload, **{name: types[name](number)})
    return workload


def main() -> int:
    """The command line; returns the exit code."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="of the paper's workload"
    )
    reader.add_argument("--check", type=Path, metavar="RUN", help="compare with a run of the toy")
    options = reader.parse_args()
    try:
        paper = changed(PAPER, options.set)
        checked = check(options.check) if options.check else []
    except UserError as error:
        return fail(error)

    workloads = {"toy": TOY, "paper's": paper}
    rows = rows_of([(shape, TOY if shape.name == "toy" else paper) for shape in SHAPES])
    print(workload_table(workloads))
    print(
        f"\nFloors, not measured: {PEAK_FLOPS / 1e12:.0f} TFLOP/s (bf16 product) and "
        f"{PEAK_BYTES / 1e12} TB/s a GPU; no communication, launches, tools. "
        "Memory before activations."
    )
    print(common.table(rows))
    fleets = fleet_rows(paper)
    print(
        f"\nTrainers and servers take turns. New weights: {DISK / 1e9:g} GB/s of shared disk, "
        f"{NETWORK / 1e9:g} GB/s of a port, both assumed"
    )
    print(common.table(fleets))
    if checked:
        print(f"\nThe toy as predicted, no look-up failing, and {options.check}, last steps")
        print(common.table(checked))
        print(common.save("cost_check", f"python -m bench.cost --check {options.check}", checked))
    elif not options.set:
        described = {}
        for name, w in workloads.items():
            described[name] = dataclasses.asdict(w) | {"a step": tokens(w)}
        shapes = [dataclasses.asdict(shape) for shape in SHAPES]
        line = "python -m bench.cost"
        more = {"workloads": described, "shapes": shapes, "fleets": fleets}
        print(common.save("cost", line, rows, **more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
