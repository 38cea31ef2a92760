"""What a step of MARS costs, on paper: tokens, searches, memory, floating-point operations, least time for them.

A step has Q questions × G trajectories. A trajectory makes `calls` tool calls; each fills `chunks` System 1 prompts.
With n = Q·G, m = System 1 samples per trajectory, L layers and D, Hq, Hkv, Dh, V as everywhere:

    forward     2·(P_body·tokens + V·D·tokens with logits) + 4·L·Hq·Dh·(query, key) pairs     pairs = length²/2 a sample
    backward    twice the forward; --checkpointing adds one more forward
    sampling    prefill every given token once (a question's prompt once for all G), decode every sampled one
    training    System 2: n whole contexts; System 1: balanced to min(m, 1)·n samples; logits for sampled tokens only;
                questions whose rewards are all equal are left out (`flat_share`, 0 unless set)
    memory      policy.memory_parts: fp32 weights, gradients, moments (sharded by --fsdp), bf16 copies, KV pool, loss

Times are floors, not measured: operations / peak product, bytes / peak copy, of the ceilings below; no communication,
no launches, no waiting for tools or for the longest trajectory. What has no source is our assumption and says so:
change it with --set.

    python -m bench.cost                                  toy, 0.6B, 1.7B, 8B on 1 and 8 GPUs -> bench/results/cost.json
    python -m bench.cost --set note_tokens=2048 group=8   another assumption for the paper's workload (writes nothing)
    python -m bench.cost --check runs/toy                 the toy's predictions beside a run's last 20 steps
                                                          -> bench/results/cost_check.json
"""
import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from trainer import policy
from plumbing.files import read_lines
from bench import common
from config import UserError, fail

PEAK_FLOPS = 790e12     # bf16 product on one H200; these two were measured elsewhere, not by this repository
PEAK_BYTES = 4.3e12     # copy, bytes a second


@dataclass(frozen=True)
class Shape:
    """A Qwen3 architecture; all have RMS norms on queries and keys, a gated MLP and no biases."""
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
        """Weights of the products in all layers: what a token costs in the forward pass, halved."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        norms = self.layers * (2 * self.hidden + 2 * self.head_size) + self.hidden
        return self.body + norms + self.head * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of bf16 keys and values a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    def forward(self, tokens: float, pairs: float, logits: float) -> float:
        """Floating-point operations; a multiplication and an addition are two."""
        return 2 * self.body * tokens + 4 * self.layers * self.heads * self.head_size * pairs + 2 * self.head * logits


SHAPES = [      # the toy: toy_base.new_model; the others: config.json of Qwen/Qwen3-0.6B, -1.7B, -8B
    Shape("toy", 2, 128, 4, 4, 32, 384, 370, True),
    Shape("0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True),
    Shape("1.7B", 28, 2048, 16, 8, 128, 6144, 151936, True),
    Shape("8B", 36, 4096, 32, 8, 128, 12288, 151936, False)]


@dataclass(frozen=True)
class Workload:
    """What a step asks of any model. Numbers a call, a sample or a trajectory are means; tokens are the model's own."""
    questions: float
    group: float
    calls: float            # tool calls per trajectory
    distilled: float        # of these, System 1 reads the result; all of them go to a search
    chunks: float           # System 1 samples a distilled call
    chunk_tokens: float     # read by a System 1 sample: documents, purpose, wording
    note_tokens: float      # sampled by it
    prompt_tokens: float    # System 2's prompt
    step_tokens: float      # sampled by System 2 a call
    wrap_tokens: float      # given to it a call, beside the notes
    answer_tokens: float    # its last step
    rows: int = 256         # conversations decoded together
    kv_tokens: int = 65536
    flat_share: float = 0   # of the questions: all rewards equal, so no gradient and no training
    fsdp: bool = False
    checkpointing: bool = False


# The toy: config's defaults; the rest counted on its own questions, looked up without a fault (the tests count again).
TOY = Workload(questions=16, group=8, calls=1.5, distilled=1.3, chunks=2.13, chunk_tokens=54.3, note_tokens=4.54,
               prompt_tokens=9.5, step_tokens=9.5, wrap_tokens=2.1, answer_tokens=3.05)
# The paper's setting (config.PAPER). † = one secondary digest; "ours": no source found, an assumption.
PAPER = Workload(questions=32, group=16,                        # †
                 calls=2.2, distilled=2.2,                      # about 22 pages a question on HLE, 10 a call (ours)
                 chunks=2, chunk_tokens=20_500,                 # ours: 4,000 tokens per page, so 5 of 10 fit into †23,552
                 note_tokens=512, step_tokens=512, answer_tokens=512,       # ours; the limits † are 8,192 and 28,672
                 prompt_tokens=600, wrap_tokens=20,             # ours
                 rows=256, kv_tokens=180_000, fsdp=True, checkpointing=True)


# ---------------------------------------------------------------------------------------------- arithmetic

def tokens(w: Workload) -> dict[str, float]:
    """Samples and tokens of one step, all trajectories together."""
    n, m = w.questions * w.group, w.distilled * w.chunks
    sampled = w.calls * w.step_tokens + w.answer_tokens
    notes = w.calls * w.wrap_tokens + m * w.note_tokens
    learns = n * (1 - w.flat_share)                             # trajectories with an advantage
    drawn = learns * min(m, 1)                                  # System 1's samples that enter the loss
    return {"trajectories": n, "calls": n * w.calls, "search_calls": n * w.distilled, "judge_calls": n,
            "sys1_samples": n * m, "sys1_read": n * m * w.chunk_tokens, "sys1_sampled": n * m * w.note_tokens,
            "sys2_context": w.prompt_tokens + notes + sampled, "sys2_given": n * (w.prompt_tokens + notes),
            "sys2_sampled": n * sampled,
            "prefilled": n * m * w.chunk_tokens + w.questions * w.prompt_tokens + n * notes,
            "decoded": n * (m * w.note_tokens + sampled),
            "trained": learns * (w.prompt_tokens + notes + sampled) + drawn * (w.chunk_tokens + w.note_tokens),
            "with_loss": learns * sampled + drawn * w.note_tokens}


def operations(shape: Shape, w: Workload) -> dict[str, float]:
    """Floating-point operations of one step: prefill, decode, train."""
    t = tokens(w)
    sys1_length, learns = w.chunk_tokens + w.note_tokens, t["trajectories"] * (1 - w.flat_share)
    pairs = {"sys1 read": t["sys1_samples"] * w.chunk_tokens ** 2 / 2, "sys1": t["sys1_samples"] * sys1_length ** 2 / 2,
             "sys2": t["trajectories"] * t["sys2_context"] ** 2 / 2}
    given = pairs["sys2"] * t["sys2_given"] / (t["sys2_given"] + t["sys2_sampled"])     # as if spread evenly
    written = pairs["sys1"] - pairs["sys1 read"] + pairs["sys2"] - given
    trained = learns * (t["sys2_context"] ** 2 + min(1, w.distilled * w.chunks) * sys1_length ** 2) / 2
    return {"prefill": shape.forward(t["prefilled"], pairs["sys1 read"] + given, 0),
            "decode": shape.forward(t["decoded"], written, t["decoded"]),
            "train": 3 * shape.forward(t["trained"], trained, t["with_loss"])
                     + w.checkpointing * shape.forward(t["trained"], trained, 0)}


def floors(shape: Shape, w: Workload, gpus: int) -> dict[str, float]:
    """The least seconds that prefill, decode and training can take on `gpus` H200s; see the module's docstring."""
    t, needed = tokens(w), operations(shape, w)
    read = (t["sys1_sampled"] * (w.chunk_tokens + w.note_tokens / 2)    # keys and values that sampled tokens see
            + t["sys2_sampled"] * (w.prompt_tokens + t["sys2_context"]) / 2)
    chain = w.calls * w.step_tokens + w.distilled * w.note_tokens + w.answer_tokens     # of a trajectory, in turn
    passes = max(t["decoded"] / gpus / w.rows, read / gpus / w.kv_tokens, chain)        # bound by rows, pool or chain
    weights = 2 * (shape.parameters - (0 if shape.tied else shape.head))
    traffic = passes * weights + shape.kv_bytes * read / gpus
    return {"prefill": needed["prefill"] / gpus / PEAK_FLOPS,
            "decode": max(traffic / PEAK_BYTES, needed["decode"] / gpus / PEAK_FLOPS),
            "train": needed["train"] / gpus / PEAK_FLOPS}


def memory(shape: Shape, w: Workload, gpus: int) -> dict[str, float]:
    """Bytes a GPU by purpose, before activations: what a run plans (and prints) before it starts."""
    described = SimpleNamespace(vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
                                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                                head_dim=shape.head_size, tie_word_embeddings=shape.tied)
    config = SimpleNamespace(system1="train", kl_beta=0, fsdp=w.fsdp, kv_tokens=w.kv_tokens)
    return policy.memory_parts(described, shape.parameters, config=config, world=gpus, cuda=True)


# ---------------------------------------------------------------------------------------------- against a run

def measured(lines: list[dict], records: list[dict], trajectories: float) -> dict[str, float]:
    """The quantities of `tokens` as a toy run counted them: means over `lines` of metrics.jsonl, texts of `records`."""
    def average(key):
        return mean(line[key] for line in lines)
    found = {"calls": trajectories * average("calls_per_question"), "sys1_samples": average("sys1_samples"),
             "sys1_sampled": average("sys1_tokens"), "sys2_sampled": average("sys2_tokens"),
             "with_loss": average("trained_tokens")}
    chunks = [chunk for record in records for turn in record["turns"] for chunk in turn["chunks"]]
    if chunks:                                                  # a word is a token in the toy
        found["sys1_read"] = found["sys1_samples"] * mean(len(chunk["prompt"].split()) for chunk in chunks)
        found["sys2_context"] = mean(len(" ".join(s["text"] for s in record["segments"]).split()) for record in records)
    return found


def check(folder: Path) -> list[dict]:
    """Predicted beside measured, for a toy run's last 20 steps; the share of flat questions is the measured one."""
    try:
        saved = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder} holds no run: name the folder of a toy run, such as runs/toy") from None
    if saved.get("data") != "toy":
        raise UserError(f"{folder} is no run of the toy, whose workload is the one that can be predicted")
    lines = read_lines(folder / "metrics.jsonl")[-20:]
    if not lines:
        raise UserError(f"{folder} has no finished step yet")
    path = folder / "rollouts" / f"step_{lines[-1]['step']}.jsonl"
    records = [r for r in read_lines(path) if r["split"] == "train"] if path.exists() else []
    predicted = tokens(dataclasses.replace(TOY, questions=saved["questions"], group=saved["group"],
                                           flat_share=mean(line["zero_variance_share"] for line in lines)))
    found = measured(lines, records, predicted["trajectories"])
    return [{"a step": name, "predicted": round(predicted[name], 1), "measured": round(value, 1),
             "measured/predicted": round(value / predicted[name], 3)} for name, value in found.items()]


# ---------------------------------------------------------------------------------------------- command

def rows_of(pairs: list[tuple[Shape, Workload]]) -> list[dict]:
    """One row for each model on 1 and on 8 GPUs."""
    rows = []
    for shape, w in pairs:
        needed = {name: count / 1e15 for name, count in operations(shape, w).items()}
        for gpus in (1, 8):
            least, parts = floors(shape, w, gpus), memory(shape, w, gpus)
            rows.append({"model": shape.name, "parameters": shape.parameters, "GPUs": gpus,
                         **{f"{name} PFLOP": value for name, value in needed.items()},
                         **{f"{name} s, floor": value for name, value in least.items()},
                         "GiB a GPU": sum(parts.values()) / 2**30})
    return rows


def workload_table(workloads: dict[str, Workload]) -> str:
    counts = {name: tokens(w) for name, w in workloads.items()}
    return common.table([{"a step": key, **{name: f"{count[key]:,.0f}" for name, count in counts.items()}}
                         for key in counts["toy"]])


def changed(workload: Workload, settings: list[str]) -> Workload:
    """The workload with name=value settings."""
    types = {field.name: field.type for field in dataclasses.fields(Workload)}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in types or not number >= 0:
            raise UserError(f"--set {setting}: give NAME=VALUE, a number of at least 0; names: {', '.join(types)}")
        workload = dataclasses.replace(workload, **{name: types[name](number)})
    return workload


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of the paper's workload")
    reader.add_argument("--check", type=Path, metavar="RUN", help="compare with a run of the toy")
    options = reader.parse_args()
    try:
        paper = changed(PAPER, options.set)
        checked = check(options.check) if options.check else []
    except UserError as error:
        return fail(error)
    workloads = {"toy": TOY, "paper's": paper}
    rows = rows_of([(shape, TOY if shape.name == "toy" else paper) for shape in SHAPES])
    print(f"{workload_table(workloads)}\n\nFloors, not measured: {PEAK_FLOPS / 1e12:.0f} TFLOP/s (bf16 product) and "
          f"{PEAK_BYTES / 1e12} TB/s a GPU; no communication, launches, tools. Memory before activations.\n"
          f"{common.table(rows)}")
    if checked:
        print(f"\nThe toy as predicted, no look-up failing, and {options.check}, last steps\n{common.table(checked)}")
        print(common.save("cost_check", f"python -m bench.cost --check {options.check}", checked))
    elif not options.set:
        described = {name: dataclasses.asdict(w) | {"a step": tokens(w)} for name, w in workloads.items()}
        print(common.save("cost", "python -m bench.cost", rows, workloads=described,
                          shapes=[dataclasses.asdict(shape) for shape in SHAPES]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
