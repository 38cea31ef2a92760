"""The options that all methods share, and the command line that sets them.

Each has its default for the toy and its reason, on one line: the reason is its help. A method
adds its own options in a subclass (mars.MarsConfig). What is given on the command line wins
over a preset, which wins over the defaults. An unknown or ill-typed option is one sentence and
exit code 2.
"""

import argparse
import dataclasses
import inspect
import re
import sys
from dataclasses import dataclass
from typing import Literal, get_args, get_origin


class UserError(Exception):
    """Bad input, configuration or environment: one sentence that says what to do.

    Commands print it and exit with 2.
    """


MOST_THREADS = 1024  # OpenMP crashes at a million


@dataclass
class Config:
    """Any field is an option of the same name: `--lr 3e-4`, `--fsdp`, `--no-fsdp`."""

    preset: str = "toy"  # where the other defaults come from: toy, or one of the method's
    # the run
    name: str = ""  # runs/NAME/; empty: toy, toy-2, … whichever is free
    runs: str = "runs"  # folder of all runs
    seed: int = 0  # of every draw, of the toy's world and of its base model
    steps: int = 120  # rollout batches; the toy's curve is flat after this
    resume: bool = False  # go on from the newest whole state of runs/NAME
    save_every: int = 10  # steps between states on disk: what a kill can cost
    track: Literal["none", "tensorboard", "trackio", "wandb"] = "none"  # a live view of the metrics
    eval_every: int = 20  # steps between evaluations on held-out questions, sampled and greedy
    eval_questions: int = 200  # 200 questions: a standard error of at most 3.5 points
    eval_samples: int = 1  # k of eval's avg@k and pass@k; a run's own evaluations make one attempt
    # model, questions, tools
    model: str = "toy"  # "toy", "smollm2", or what transformers loads (a folder, a hub name)
    data: str = "toy"  # training questions: "toy", or what tasks.questions.load_questions reads
    eval_data: str = ""  # held-out questions; empty: the toy's other world, or the head of `data`
    grader: Literal["em", "judge"] = "em"  # reward 1: exact match, or an LLM judge says yes
    search: Literal["local", "serper", "retriever"] = "local"  # where search and scholar look
    docs: str = ""  # --search local: a file or a folder of documents; empty: the toy's world
    eval_docs: str = ""  # documents for the held-out questions; empty: those of `docs`
    pages: Literal["none", "jina"] = "none"  # how pages behind serper's results are read
    passage_words: int = 200  # long documents are cut into passages of so many words; 0: none are
    block: str = ""  # hosts, by commas, whose results are dropped: those that publish the answers
    top_k: int = 3  # results per call: about 100 words in the toy
    tools: str = "search,scholar,python"  # what may be called
    tool_seconds: float = 600.0  # a call that takes longer has failed
    max_tool_error_share: float = 0.5  # the run stops if more calls or judgements of a step fail
    cache: str = ".cache"  # base model, search index, search answers
    # reinforcement learning
    questions: int = 16  # per step
    group: int = 8  # G: attempts per question
    temperature: float = 1.0  # of sampling, and so of the distribution that the loss differentiates
    top_p: float = 1.0  # nucleus of the sampled evaluation; training draws from everything
    lr: float = 5e-4  # the toy's; at 1e-3 one seed of three slipped late on one CPU
    warmup: int = 1  # steps of linear warm-up, then constant
    decay: bool = False  # linear decay to 0 at --steps, also if --resume gives more of them
    weight_decay: float = 0.0  # of AdamW
    beta1: float = 0.9  # of AdamW; in a run of a few steps less: momentum outlives its gradient
    clip_grad: float = 1.0  # the gradient's largest norm; 0: no limit
    advantage: Literal["std", "mean"] = "std"  # r − mean, over std or not (Dr. GRPO)
    loss_mean: Literal["sample", "token"] = "sample"  # what each term of the loss is a mean over
    refill: int = 0  # times that a question whose G rewards are equal is replaced by another
    clip_low: float = 0.2  # ε; the paper's is unknown (our choice)
    clip_high: float = 0.2  # ε upwards; a larger one is DAPO's "clip higher"
    kl_beta: float = 0.0  # λ; needs a reference model in memory
    inner_steps: int = 1  # optimizer steps per batch of rollouts, each on a part of the questions
    lora_rank: int = 0  # train adapters of this rank beside frozen weights; 0: all weights
    importance: Literal["auto", "token", "sequence", "off"] = "auto"  # auto: sequence with --server
    importance_cap: float = 3.0  # a token's ratio is cut to it; a sequence above it is masked
    # rollouts on serving engines: docs/engines.md
    server: str = ""  # URLs, by commas, of servers (or of their router) that sample instead
    engine: Literal["vllm", "sglang", "vllm_nccl"] = "vllm"  # what they run; nccl: weights by NCCL
    max_mismatch_kl: float = 0.0  # a run stops if a server is further off; 0: fp32 1e-6, bf16 0.01
    # the machine
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is one
    bf16: Literal["auto", "on", "off"] = "auto"  # arithmetic of sampler and trainer; auto: on CUDA
    threads: int = 1  # PyTorch's, on CPU, one process; a second one hardly pays for the toy
    fsdp: bool = False  # shard the trainer's state (needed from about 3B parameters on)
    recompute_activations: bool = False  # in the backward pass, instead of keeping them
    micro_tokens: int = 8192  # tokens per micro-batch of the trainer
    share_prefixes: bool = False  # compute what samples begin with alike once; pays if that is much
    kv_tokens: int = 65536  # tokens in the sampler's KV pool
    max_sequences: int = 256  # decoded together at most
    deterministic: bool | None = None  # bit-equal reruns, however slow a tool is; unset: on CPU

    # Options that only training reads, so that eval and ask refuse them.
    for_training = frozenset(
        "steps resume track save_every eval_every model eval_data questions group lr warmup "
        "decay weight_decay beta1 clip_grad clip_low clip_high kl_beta lora_rank inner_steps "
        "importance importance_cap fsdp max_mismatch_kl advantage loss_mean refill "
        "recompute_activations micro_tokens share_prefixes preset".split()
    )

    def longest(self) -> int:
        """Tokens of the longest sample."""
        raise NotImplementedError("a method's options say how long its samples get")

    def reading(self) -> int:
        """Tokens of documents that a role reads at once."""
        return self.longest()

    def frozen(self) -> set[str]:
        """Roles that the start's weights play: those of the option that has the choice `frozen`."""
        return set()

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
        counts = (
            "steps questions save_every eval_every inner_steps micro_tokens kv_tokens "
            "max_sequences top_k threads group tool_seconds eval_samples"
        )
        self.at_least(1, *counts.split())
        self.at_least(0, "eval_questions", "passage_words", "seed", "refill", "lora_rank", "warmup")
        if self.beta1 >= 1:
            raise UserError(f"--beta1 must be below 1, got {self.beta1}")
        if self.clip_low > 1:
            raise UserError(f"--clip_low must be at most 1, got {self.clip_low}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float and not 0 <= value <= 1e30:
                raise UserError(f"--{field.name} must be finite and at least 0, got {value}")
            if isinstance(value, str) and not value.isprintable():
                raise UserError(f"--{field.name} holds a character that cannot be printed")
            if field.type is int and abs(value) >= 2**40:
                raise UserError(f"--{field.name} {value} is too large")
        if self.threads > MOST_THREADS:
            raise UserError(f"--threads {self.threads}: give at most {MOST_THREADS}")
        if self.max_sequences > 65536:
            raise UserError(f"--max_sequences {self.max_sequences}: give at most 65536")
        if self.temperature > 100 or 0 < self.temperature < 1e-3:
            raise UserError(f"--temperature {self.temperature}: give 0, or from 0.001 to 100")
        if self.eval_samples > 1 and self.temperature == 0:
            raise UserError("--eval_samples: at --temperature 0 all attempts are the same; give 1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p must be in (0, 1], got {self.top_p}")
        plain = set(self.name).isdisjoint("/\\\0") and self.name not in (".", "..")
        if not plain or len(self.name.encode()) > 200:
            raise UserError("--name is one plain folder name; --runs says where the folder lies")
        if self.data == "toy" and self.eval_data:
            raise UserError("--eval_data belongs to questions of your own: name --data as well")
        if self.pages != "none" and self.search != "serper":
            raise UserError(f"--pages {self.pages} reads what --search serper finds: add that")
        if self.block and not self.block.strip(" ,"):
            raise UserError("--block names no host: give hosts by commas")
        if self.block and self.search == "local":
            raise UserError("--block drops what the web finds: it has no use with --search local")
        if self.docs and self.search != "local":
            raise UserError(f"--docs is searched by --search local, not by {self.search}")
        for name in ("engine", "max_mismatch_kl"):
            if getattr(self, name) != getattr(type(self), name) and not self.server:
                raise UserError(f"--{name} belongs to --server: add that, or leave it out")
        if self.server and self.deterministic:
            raise UserError("--deterministic cannot be had with --server: a server batches anew")
        if self.eval_docs and not self.docs:
            raise UserError("--eval_docs goes with documents of your own: name --docs as well")
        if self.longest() > self.kv_tokens and not self.server:
            raise UserError(
                f"--kv_tokens {self.kv_tokens} is smaller than one context of {self.longest()} "
                "tokens; raise it, or lower the episode's limits"
            )
        if training:
            self.check_training()

    def check_training(self) -> None:
        """Refuses what cannot be trained with."""
        if self.temperature == 0:
            raise UserError("--temperature 0 makes all attempts at a question the same")
        if self.eval_questions < 1:
            raise UserError("--eval_questions must be at least 1: a run measures itself on them")
        if self.eval_samples > 1:
            raise UserError("--eval_samples is for the command eval: a run makes one attempt")
        if self.group < 2:
            raise UserError("--group must be at least 2: attempts at one question are compared")
        corrected = self.correction() != "off"
        if corrected and not self.importance_cap:
            raise UserError("--importance_cap 0 leaves nothing to train on: give one above 0")
        if self.importance_cap != type(self).importance_cap and not corrected:
            raise UserError("--importance_cap is read with --is token or --is sequence: add one")
        if self.inner_steps > self.questions:
            raise UserError(
                f"--inner_steps {self.inner_steps} is more than --questions {self.questions}: each "
                "needs a question"
            )


def uses_bf16(config: Config, cuda: bool) -> bool:
    """Whether sampler and trainer compute in bf16. Weights that are trained stay fp32 beside it."""
    return config.bf16 == "on" or (config.bf16 == "auto" and cuda)


# What --resume may change: the method stays the same, the last bits of a float may not.
MAY_CHANGE = set(
    "name runs steps resume track save_every eval_every eval_samples cache threads micro_tokens "
    "share_prefixes max_tool_error_share tool_seconds kv_tokens max_sequences server engine "
    "recompute_activations max_mismatch_kl".split()
)

# Spellings that were given up, and what to write today.
RENAMED = {
    "rows": "--max_sequences N",
    "tis": "--is token --importance_cap X",
    "lockstep": "--deterministic or --no-deterministic",
    "checkpointing": "--recompute_activations",
    "eval_top_p": "--top_p X",
}


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that answers misuse in one sentence."""

    def error(self, message):
        sys.exit(fail(message))


def parser(config: type[Config], description: str) -> OneLineParser:
    """Every field of `config` as an option, with its comment as the help."""
    made = OneLineParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    reasons = comments(config)
    for field in dataclasses.fields(config):
        # --shared_group or --shared-group
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        if field.name == "importance":
            names["--is"] = None  # which Python keeps from being the field's name
        if field.type in (bool, bool | None):
            kind = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.type) is Literal:
            kind = {"choices": get_args(field.type)}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__.upper()}
        reason = reasons.get(field.name, "").replace("%", "%%")
        made.add_argument(*names, **kind, help=f"{reason} [{field.default}]")
    return made


def comments(config: type[Config]) -> dict[str, str]:
    """field name -> the comment behind it, on the same line of the source."""
    found = {}
    for part in reversed(config.__mro__[:-1]):
        found |= re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(part), re.MULTILINE)
    return found


def parse(made: OneLineParser, arguments: list[str]) -> dict:
    """What a command line gives, by name. Old spellings are answered with the new ones."""
    for argument, value in zip(arguments, [*arguments[1:], ""]):
        name = argument.removeprefix("--").split("=")[0].replace("-", "_")
        if argument.startswith("--") and name in RENAMED:
            raise UserError(f"--{name} is now written {RENAMED[name]}")
        if name == "no_balance" or (argument == "--balance" and value in ("on", "off")):
            raise UserError("--balance takes a value now: uniform, advantage or none")
        if argument in ("--packing", "--purpose") and value in ("on", "off", "ffd"):
            written = argument.replace("--", "--no-") if value == "off" else argument
            raise UserError(f"{argument} takes no value: write {written}")
    return vars(made.parse_args(arguments))


def fail(message: str) -> int:
    """Prints one sentence on standard error; returns exit code 2."""
    print(f"mars: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return 2


def resolve(
    config: type[Config],
    given: dict,
    *,
    presets: dict[str, dict],
    saved: dict | None = None,
    training: bool = True,
) -> Config:
    """Defaults < preset < a saved run's settings < the command line; checked."""
    names = {field.name for field in dataclasses.fields(config)}
    preset = given.get("preset", "toy")
    if preset not in ("toy", *presets):
        raise UserError(f"--preset {preset}: choose from {', '.join(['toy', *presets])}")
    values = dict(presets.get(preset, {}))
    values |= {name: value for name, value in (saved or {}).items() if name in names}
    values |= {name: value for name, value in given.items() if name in names}
    made = config(**values)
    for field in dataclasses.fields(config):
        if not is_a(getattr(made, field.name), field.type):
            raise UserError(
                f"the saved setting {field.name}={getattr(made, field.name)!r} is not one of this "
                f"version's; set it with --{field.name}"
            )
    made.check(training)
    return made


def is_a(value, kind) -> bool:
    """Whether a value has a field's type."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)
