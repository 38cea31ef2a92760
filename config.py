"""The options that all methods share, and the command line that sets them.

Each option has its default for the toy and its reason, which is its help. A method adds its own
options in a subclass (mars.MarsConfig). An unknown or ill-typed option is one sentence and exit
code 2.
"""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

# Micro-batches differ in size: in segments of fixed size a GPU's memory would become fragmented.
# PyTorch reads this at the first use of a GPU.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class UserError(Exception):
    """Bad input or environment: one sentence. Commands print it and exit with 2."""


def key_of(variable: str) -> str:
    """A service's key from the environment; UserError, without the value, if it is no key."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"{variable} is not set to a key: export {variable}=…, or do without it")
    return key


TRAIN = "train"  # a flag of options that only training reads, so that eval and ask refuse them
# A flag of what --resume may change: the method stays the same, the last bits of a float may not.
RESUME = "resume"


def option(default, reason: str, *flags: str, heading: str = ""):
    """A field that is an option. Its reason is its help; a heading begins a group of the help.

    A subclass that changes only the default writes `steps: int = 60`; whatever it leaves out stays.
    """
    about = {"reason": reason, **dict.fromkeys(flags)} | ({"heading": heading} if heading else {})
    return dataclasses.field(default=default, metadata=about)


def no_option(default, *flags: str):
    """A field that is no option: recipes set it, in a preset."""
    return dataclasses.field(default=default, metadata={"option": False, **dict.fromkeys(flags)})


def describe(options: type) -> dict[str, dict]:
    """Field name -> what its class and the base classes said about it."""
    about = {}
    for part in reversed(options.__mro__[:-1]):
        for field in dataclasses.fields(part):
            about[field.name] = about.get(field.name, {}) | dict(field.metadata)
    return about


def fields_with(options: type, flag: str) -> set[str]:
    """Names of the fields that have a flag."""
    return {name for name, about in describe(options).items() if flag in about}


@dataclass
class Config:
    """A field is an option of the same name."""

    preset: str = option("toy", "source of other defaults: toy, or a method's", heading="the run")
    name: str = option("", "runs/NAME/; empty: one that is free", RESUME)
    runs: str = option("runs", "folder of all runs", RESUME)
    seed: int = option(0, "of every draw, of the toy's world and of its base model")
    steps: int = option(40, "rollout batches; on the toy more add a little", TRAIN, RESUME)
    resume: bool = option(
        False, "go on with runs/NAME and its options; begin it if it is not there", RESUME
    )
    keep_every: int = option(0, "keep the state of every n-th step too; 0: none", TRAIN, RESUME)
    track: Literal["none", "trackio", "wandb"] = option(
        "none", "a live view of the metrics", TRAIN, RESUME
    )
    eval_every: int = option(20, "steps between evaluations on held-out questions", TRAIN, RESUME)
    eval_questions: int = option(200, "200 questions: a standard error of at most 3.5 points")
    cache: str = option(".cache", "base model, search index, search answers", RESUME)

    model: str = option("toy", '"toy", "smollm2", a folder, a hub name', TRAIN, heading="the world")
    data: str = option("toy", 'training questions: "toy", or what tasks.questions reads')
    eval_data: str = option("", "held-out; empty: the toy's other world, or from `data`", TRAIN)
    grader: Literal["em", "judge"] = option("em", "reward 1: exact match, or an LLM judge says yes")
    search: Literal["local", "serper", "retriever"] = option("local", "where the tools look")
    docs: str = option("", "file or folder for --search local; empty: the toy's world")
    pages: Literal["none", "jina"] = option("none", "how pages behind serper's results are read")
    block: str = option("", "comma-separated hosts whose results are dropped: they publish answers")
    top_k: int = option(3, "results per call: about 100 words in the toy")
    tools: str = option("search,scholar,python", "what may be called")

    questions: int = option(16, "per step", TRAIN, heading="reinforcement learning")
    group: int = option(8, "G: attempts per question; eval: 1 unless given")
    resample: int = option(0, "ask up to N times more, until --questions groups differ", TRAIN)
    temperature: float = option(1.0, "of sampling, and so of the distribution in the loss")
    lr: float = option(5e-4, "learning rate; at 1e-3 one of three toy seeds slipped late", TRAIN)
    inner_steps: int = option(1, "optimizer steps per batch, each on part of the questions", TRAIN)
    advantage: Literal["std", "mean"] = option("std", "(r − mean) / std; mean: r − mean", TRAIN)
    loss_mean: Literal["sample", "token"] = option("sample", "what loss terms are means of", TRAIN)
    kl_beta: float = option(0.0, "λ; needs a reference model in memory", TRAIN)
    lora_rank: int = option(0, "of adapters beside frozen weights; 0: train all weights", TRAIN)
    importance: Literal["auto", "token", "sequence", "off"] = option(
        "auto", "correction for the sampler; auto: sequence with --server, else off", TRAIN
    )
    max_mismatch_kl: float = option(
        0.0, "stop if sampler and trainer differ more; 0: in fp32 1e-6, in bf16 0.01", TRAIN, RESUME
    )

    server: str = option("", "URLs of vLLM servers, comma-separated", RESUME, heading="the machine")
    bf16: Literal["auto", "on", "off"] = option("auto", "the arithmetic; auto: on CUDA")
    max_calls: int = option(0, "calls of services before the run stops; 0: any", RESUME)
    fsdp: bool = option(False, "shard the trainer's state: from about 3B parameters on", TRAIN)
    recompute_activations: bool = option(False, "in the backward pass", TRAIN, RESUME)
    micro_tokens: int = option(8192, "tokens per micro-batch of the trainer", TRAIN, RESUME)
    kv_tokens: int = option(0, "tokens of KV pool; 0: what fits on CUDA, else 65536", RESUME)
    # no options
    clip: float = no_option(0.2)  # ε, down and up; the paper's is unknown (our choice)
    warmup: int = no_option(1)  # steps of linear warm-up
    top_p: float = no_option(1.0)  # nucleus of the sampled evaluation; training has none
    decay: bool = no_option(False)  # linear decay to 0 at --steps, or where --resume puts them
    beta1: float = no_option(0.9)  # of AdamW; lower it in a short run: momentum lasts long
    importance_cap: float = no_option(3.0)  # cuts a token's ratio; a sequence above it is masked
    eval_docs: str = no_option("")  # documents for the held-out questions; empty: those of `docs`
    passage_words: int = no_option(200)  # documents are cut into passages of so many; 0: none are
    tool_seconds: float = no_option(600.0, RESUME)  # a call that takes longer has failed
    max_sequences: int = no_option(256, RESUME)  # decoded together at most
    threads: int = no_option(1, RESUME)  # PyTorch's on a CPU, unless OMP_NUM_THREADS is set

    def longest(self) -> int:
        """Tokens of the method's longest sample; a subclass says how many."""
        raise NotImplementedError

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
        counts = "steps questions eval_every inner_steps micro_tokens top_k group"
        self.at_least(1, *counts.split())
        counts = "eval_questions seed lora_rank keep_every resample max_calls kv_tokens"
        self.at_least(0, *counts.split())
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
                nothing = "none" if name == "pages" else "''"
                raise UserError(f"--{name} has no use with {others}: give --{name} {nothing}")
        if training:
            self.at_least(1, "eval_questions")  # a run measures itself on them
            self.at_least(2, "group")  # attempts at one question are compared
            if self.temperature == 0:
                raise UserError("--temperature 0 makes all attempts at a question the same")
            if self.inner_steps > self.questions:
                raise UserError("--questions must be at least --inner_steps: each step needs one")


def uses_bf16(options, cuda: bool) -> bool:
    """Whether sampler and trainer compute in bf16, by `options.bf16`. Trained weights stay fp32."""
    return options.bf16 == "on" or (options.bf16 == "auto" and cuda)


# ------------------------------------------------------------------------------- the command line


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that answers misuse in one sentence."""

    def error(self, message):
        sys.exit(fail(message))


def parser(options: type, description: str | None, unread: Collection[str] = ()) -> OneLineParser:
    """Every field of `options` as an option, unless it is `no_option`; the help lacks `unread`."""
    command_line = OneLineParser(
        usage=argparse.SUPPRESS,
        description=description,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group = command_line
    descriptions = describe(options)
    for field in dataclasses.fields(options):
        about = descriptions[field.name]
        if "heading" in about:
            group = command_line.add_argument_group(about["heading"])
        if not about.get("option", True):
            continue
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.type) is Literal:
            kind = {"choices": get_args(field.type)}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__}
        text = f"{about['reason']} [{field.default}]".replace("%", "%%")
        text = argparse.SUPPRESS if field.name in unread else text
        group.add_argument(f"--{field.name}", help=text, **kind)
    return command_line


def parse(command_line: OneLineParser, arguments: list[str]) -> dict:
    """The options that the arguments give, by name."""
    return vars(command_line.parse_args(arguments))


def fail(message: str | Exception) -> int:
    """Prints one sentence on standard error, escaped and shortened; returns exit code 2."""
    line = " ".join(str(message).split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    if len(line) > 2000:
        line = f"{line[:1500]} … {line[-400:]}"
    print(f"mars: {line}", file=sys.stderr, flush=True)
    return 2


def discard_output() -> None:
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
    own = (saved or {}) | given
    values = presets.get(preset, {}) | {name: own[name] for name in names & own.keys()}
    config = options(**values)
    config.check(training)
    return config
