"""The options that all methods share, and the command line that sets them.

Each option has its default for the toy and its reason on one line: the reason is its help, and the
comments between the fields are the help's headings. A method adds its own options in a subclass
(mars.MarsConfig). An unknown or ill-typed option is one sentence and exit code 2.
"""

import argparse
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

# Micro-batches differ in size: in segments of fixed size a GPU's memory would become fragmented.
# PyTorch reads this at the first use of a GPU.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class UserError(Exception):
    """Bad input or environment: one sentence. Commands print it and exit with 2."""


def no_option(default):
    """A field that is no option: recipes set it, in a preset."""
    return dataclasses.field(default=default, metadata={"option": False})


@dataclass
class Config:
    """A field is an option of the same name; a subclass adds `longest()`, its longest sample."""

    # the run
    preset: str = "toy"  # where the other defaults come from: toy, or one of the method's
    name: str = ""  # runs/NAME/; empty: one that is free
    runs: str = "runs"  # folder of all runs
    seed: int = 0  # of every draw, of the toy's world and of its base model
    steps: int = 40  # rollout batches; on the toy more add a few points
    resume: bool = False  # go on from the newest whole state of runs/NAME
    track: Literal["none", "trackio", "wandb"] = "none"  # a live view of the metrics
    eval_every: int = 20  # steps between evaluations on held-out questions, sampled and greedy
    eval_questions: int = 200  # 200 questions: a standard error of at most 3.5 points
    cache: str = ".cache"  # base model, search index, search answers
    # model, questions, tools
    model: str = "toy"  # "toy", "smollm2", or what transformers loads (a folder, a hub name)
    data: str = "toy"  # training questions: "toy", or what tasks.questions.load_questions reads
    eval_data: str = ""  # held-out questions; empty: the toy's other world, or a draw from `data`
    grader: Literal["em", "judge"] = "em"  # reward 1: exact match, or an LLM judge says yes
    search: Literal["local", "serper", "retriever"] = "local"  # where search and scholar look
    docs: str = ""  # --search local: a file or a folder of documents; empty: the toy's world
    pages: Literal["none", "jina"] = "none"  # how pages behind serper's results are read
    block: str = ""  # hosts, by commas, whose results are dropped: those that publish the answers
    top_k: int = 3  # results per call: about 100 words in the toy
    tools: str = "search,scholar,python"  # what may be called
    # reinforcement learning
    questions: int = 16  # per step
    group: int = 8  # G: attempts per question
    temperature: float = 1.0  # of sampling, and so of the distribution that the loss differentiates
    lr: float = 5e-4  # learning rate, the toy's; at 1e-3 one seed of three slipped late
    warmup: int = 1  # steps of linear warm-up, then constant
    inner_steps: int = 1  # optimizer steps per batch of rollouts, each on a part of the questions
    advantage: Literal["std", "mean"] = "std"  # (r − mean) / std; mean: r − mean (Dr. GRPO)
    loss_mean: Literal["sample", "token"] = "sample"  # what each term of the loss is a mean over
    kl_beta: float = 0.0  # λ; needs a reference model in memory
    lora_rank: int = 0  # train adapters of this rank beside frozen weights; 0: all weights
    importance: Literal["auto", "token", "sequence", "off"] = "auto"  # auto: sequence with --server
    max_mismatch_kl: float = 0.0  # stop if sampler and trainer differ more; 0: fp32 1e-6, bf16 0.01
    # the machine
    server: str = ""  # URLs, by commas, of vLLM servers that sample instead: docs/engines.md
    bf16: Literal["auto", "on", "off"] = "auto"  # arithmetic of sampler and trainer; auto: on CUDA
    threads: int = 1  # PyTorch's, on a CPU with one process; a second thread hardly pays
    fsdp: bool = False  # shard the trainer's state (needed from about 3B parameters on)
    recompute_activations: bool = False  # in the backward pass, instead of keeping them
    micro_tokens: int = 8192  # tokens per micro-batch of the trainer
    kv_tokens: int = 65536  # tokens in the sampler's KV pool
    # no options
    clip: float = no_option(0.2)  # ε, down and up; the paper's is unknown (our choice)
    top_p: float = no_option(1.0)  # nucleus of the sampled evaluation; training has none
    decay: bool = no_option(False)  # linear decay to 0 at --steps, or where --resume puts them
    beta1: float = no_option(0.9)  # of AdamW; in a short run less: momentum outlives its gradient
    importance_cap: float = no_option(3.0)  # cuts a token's ratio; a sequence above it is masked
    eval_docs: str = no_option("")  # documents for the held-out questions; empty: those of `docs`
    passage_words: int = no_option(200)  # documents are cut into passages of so many; 0: none are
    tool_seconds: float = no_option(600.0)  # a call that takes longer has failed
    max_sequences: int = no_option(256)  # decoded together at most

    # Options that only training reads, so that eval and ask refuse them.
    for_training = frozenset(
        "steps resume track eval_every model eval_data questions group lr warmup inner_steps "
        "advantage loss_mean kl_beta lora_rank importance max_mismatch_kl fsdp "
        "recompute_activations micro_tokens".split()
    )
    # What --resume may change: the method stays the same, the last bits of a float may not.
    may_change = frozenset(
        "name runs steps resume track eval_every cache threads micro_tokens "
        "tool_seconds kv_tokens max_sequences server recompute_activations max_mismatch_kl".split()
    )

    def frozen(self) -> set[str]:
        """Roles that the start's weights play."""
        return set()

    def needs_start(self) -> bool:
        """Whether the start's weights are needed to the end: for a role, adapters or a KL term."""
        return bool(self.frozen() or self.lora_rank or self.kl_beta)

    def correction(self) -> str:
        """How weights correct for the sampler: "token", "sequence" or "off"; `auto` resolved."""
        if self.importance == "auto":
            return "sequence" if self.server else "off"
        return self.importance

    def at_least(self, least: int, *names: str) -> None:
        """UserError if one of the named options is below `least`."""
        for name in names:
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")

    def check(self, training: bool) -> None:
        """Refuses values that contradict each other: UserError with one sentence."""
        counts = "steps questions eval_every inner_steps micro_tokens kv_tokens"
        self.at_least(1, *counts.split(), "top_k", "threads", "group")
        self.at_least(0, "eval_questions", "seed", "lora_rank", "warmup")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value >= 1 << 31:  # PyTorch's own numbers are of fixed size
                raise UserError(f"--{field.name} must be below {1 << 31}, got {value}")
            if field.type is float and not 0 <= value < 1e30:  # NaN, and what fp32 cannot hold
                raise UserError(f"--{field.name} must lie between 0 and 1e30, got {value}")
        if self.temperature and not 1e-3 <= self.temperature <= 1e4:  # what the sampler takes
            raise UserError(f"--temperature {self.temperature}: give 0, or 0.001 to 10000")
        if self.name == ".." or Path(self.name).name != self.name:
            raise UserError("--name is one plain folder name; --runs says where the folder lies")
        of_use = {
            "docs": self.search == "local",
            "block": self.search != "local",
            "pages": self.search == "serper",
            "eval_data": self.data != "toy",
        }
        for name, read in of_use.items():
            if getattr(self, name) not in ("", "none") and not read:
                others = f"--search {self.search} and --data {self.data}"
                raise UserError(f"--{name} has no use with {others}")
        if training:
            self.at_least(1, "eval_questions")  # a run measures itself on them
            self.at_least(2, "group")  # attempts at one question are compared
            if self.temperature == 0:
                raise UserError("--temperature 0 makes all attempts at a question the same")
            if self.inner_steps > self.questions:
                raise UserError("--questions must be at least --inner_steps: each step needs one")


def uses_bf16(config: Config, cuda: bool) -> bool:
    """Whether sampler and trainer compute in bf16. Weights that are trained stay fp32 beside it."""
    return config.bf16 == "on" or (config.bf16 == "auto" and cuda)


# ------------------------------------------------------------------------------- the command line


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that answers misuse in one sentence."""

    def error(self, message):
        sys.exit(fail(message))


def parser(options: type, description: str, unread: Collection[str] = ()) -> OneLineParser:
    """Every field of `options` as an option, unless it is `no_option`; the help lacks `unread`."""
    made = OneLineParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    sources = [inspect.getsource(part) for part in reversed(options.__mro__[:-1])]
    made.format_help = lambda: help_text(description, *sources, unread=unread)
    for field in dataclasses.fields(options):
        if not field.metadata.get("option", True):
            continue
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.type) is Literal:
            kind = {"choices": get_args(field.type)}
        else:
            kind = {"type": field.type}
        made.add_argument(f"--{field.name}", **kind)
    return made


def parse(made: OneLineParser, arguments: list[str]) -> dict:
    """What a command line gives, by name."""
    return vars(made.parse_args(arguments))


# An option's line: its name, its type, its default, its reason. A heading is a comment line.
FIELD = re.compile(r"    (\w+): (.+?) = (.+?)  # (.*)")
HEADING = re.compile(r"    # (.*)")
KINDS = {"str": "TEXT", "int": "N", "float": "X", "bool": ""}


def help_text(description: str, *sources: str, unread: Collection[str] = ()) -> str:
    """The help of a command, read from the source of the classes that hold its options."""
    lines = [description.strip(), "", "A switch is turned on by --NAME and off by --no-NAME."]
    for number, source in enumerate(sources):
        heading = "options"
        for line in source.splitlines():
            title = HEADING.fullmatch(line)
            field = FIELD.fullmatch(line)
            if title:
                heading = title[1]
            elif field and any(f"\n    {field[1]}: " in later for later in sources[number + 1 :]):
                continue  # a subclass has a default of its own
            elif field and field[1] not in unread and not field[3].startswith("no_option"):
                if heading:
                    lines.append(f"\n{heading}:")
                    heading = ""
                lines.append(option_line(*field.groups()))
    return "\n".join(lines) + "\n"


def option_line(name: str, kind: str, default: str, reason: str) -> str:
    """An option in the help: `  --steps N                          rollout batches; … [40]`."""
    choices = "|".join(re.findall(r'"(.*?)"', kind))
    shown = f"--{name} {choices or KINDS[kind]}"
    return f"  {shown:<34} {reason}" + ("" if default == '""' else f" [{default}]")


def help_at_once(description: str, path: str) -> None:
    """Answers `--help` of a method's file and ends, before that file loads torch for seconds."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        source = Path(path).read_text(encoding="utf-8")
        options = re.search(r"^class \w+\(Config\):\n(    .*\n|\n)*", source, re.MULTILINE)
        print(help_text(description, inspect.getsource(Config), options[0]), end="")
        sys.exit(0)


def fail(message: str) -> int:
    """Prints one sentence on standard error, escaped and shortened; returns exit code 2."""
    line = " ".join(str(message).split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    if len(line) > 2000:
        line = f"{line[:1500]} … {line[-400:]}"
    print(f"mars: {line}", file=sys.stderr, flush=True)
    return 2


def drop_output() -> None:
    """From here on nothing is printed: Python would try once more at its end, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def resolve(
    options: type[Config],
    given: dict,
    *,
    presets: dict[str, dict],
    saved: dict | None = None,
    training: bool = True,
) -> Config:
    """Defaults < preset < a saved run's settings < the command line; checked."""
    names = {field.name for field in dataclasses.fields(options)}
    preset = given.get("preset", "toy")
    if preset not in ("toy", *presets):
        raise UserError(f"--preset {preset}: choose from {', '.join(['toy', *presets])}")
    told = (saved or {}) | given
    values = presets.get(preset, {}) | {name: told[name] for name in names & told.keys()}
    config = options(**values)
    config.check(training)
    return config
