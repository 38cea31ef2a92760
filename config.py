"""Every knob of a run, with its default for the toy and its reason; the command line that sets them; the paper's values.

What is given on the command line wins over `--preset paper`, which wins over the defaults. An unknown or ill-typed option is
one sentence and exit code 2.
"""
import argparse
import dataclasses
import sys
from dataclasses import dataclass
from typing import Literal, get_args, get_origin



class UserError(Exception):
    """Bad input, configuration or environment: one sentence that says what to do. Commands print it and exit with 2."""


@dataclass
class Config:
    """Every knob, its default for the toy and why. Any field is an option of the same name: `--lr 3e-4`."""
    preset: Literal["toy", "paper"] = "toy"     # where the other defaults come from
    # the run
    name: str = ""                          # runs/NAME/; empty: toy, toy-2, … whichever is free
    runs: str = "runs"                      # folder of all runs
    seed: int = 0                           # of every draw, of the toy's world and of its base model
    steps: int = 120                        # rollout batches; the toy's curve is flat after this
    resume: bool = False                    # go on from the newest whole state of runs/NAME
    save_every: int = 10                    # steps between states on disk: what a kill can cost
    eval_every: int = 20                    # steps between evaluations on held-out questions, sampled and greedy
    eval_questions: int = 200               # 200 questions: a standard error of at most 3.5 points
    # model, questions, tools
    model: str = "toy"                      # "toy", or anything that transformers loads (a folder, a hub name)
    data: str = "toy"                       # training questions: "toy", or what tasks.load_questions reads
    eval_data: str = ""                     # held-out questions; empty: the toy's other world, or the head of `data`
    grader: Literal["em", "judge"] = "em"   # reward 1: exact match, or an LLM judge says yes
    search: Literal["local", "serper", "retriever"] = "local"
    docs: str = ""                          # --search local: a folder of .txt/.md, or JSONL; empty: the toy's world
    pages: Literal["none", "jina", "fetch"] = "none"    # read the pages behind the search results, and how
    top_k: int = 3                          # results per call: about 100 words in the toy
    tools: str = "search,scholar,python"
    distill: str = "search,scholar"         # whose output System 1 reads; the toy's Python output is one number
    cache: str = ".cache"                   # base model, search index, search answers
    max_tool_error_share: float = 0.5       # more failed calls than this in a step: the run stops
    # arms for study
    system1: Literal["train", "frozen", "none"] = "train"   # frozen: played by the start's weights; none: raw text to System 2
    balance: Literal["on", "off"] = "on"    # bring System 1's samples to System 2's number
    packing: Literal["ffd", "off"] = "ffd"  # off: one document per chunk
    purpose: Literal["on", "off"] = "on"    # off: System 1 is not told what to look for
    shared_group: bool = False              # System 1 inherits System 2's advantage instead of having its own group
    question_in_system1: bool = False       # show System 1 the question too (chat models)
    # an episode's limits, in tokens where not said otherwise
    max_turns: int = 5                      # steps of System 2; the last one must answer
    sys2_context: int = 160                 # prompt, steps and notes together
    step_tokens: int = 14                   # one step of System 2
    answer_tokens: int = 6                  # kept free for an answer on demand
    sys1_prompt: int = 76                   # a chunk (about 69) with the wording and the purpose around it
    sys1_response: int = 12                 # a note: one fact is 5 or 6 words
    # reinforcement learning
    questions: int = 16                     # per step
    group: int = 8                          # G: trajectories per question
    temperature: float = 1.0                # of sampling, and so of the distribution that the loss differentiates
    top_p: float = 1.0                      # less is refused, and told why: the loss differentiates the full distribution
    eval_top_p: float = 1.0                 # nucleus of the sampled evaluation
    lr: float = 5e-4                        # a 474k model wants much; 1e-3 is faster, but slipped late on one seed of three
    warmup: int = 1                         # steps of linear warm-up, then constant
    weight_decay: float = 0.0               # of AdamW
    clip_grad: float = 1.0                  # the gradient's largest norm; 0: no limit
    clip_low: float = 0.2                   # ε; the paper's is unknown (our choice)
    clip_high: float = 0.2                  # ε upwards; a larger one is DAPO's "clip higher"
    kl_beta: float = 0.0                    # λ; needs a reference model in memory
    inner_steps: int = 1                    # optimiser steps per batch of rollouts, each on its share of the questions
    tis: float = 0.0                        # cap of a truncated importance weight trainer/sampler; 0: none
    # the machine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1                        # PyTorch's, on CPU, one process; a second one hardly pays for the toy
    fsdp: bool = False                      # shard the trainer's state (needed from about 3B parameters on)
    checkpointing: bool = False             # recompute activations in the backward pass
    micro_tokens: int = 8192                # tokens per micro-batch of the trainer
    kv_tokens: int = 65536                  # tokens in the sampler's KV pool
    rows: int = 256                         # conversations decoded together
    lockstep: Literal["auto", "on", "off"] = "auto"     # bit-equal reruns despite tools of varying speed; auto: on CPU


# What --resume may change: the method stays the same, the last bits of a float may not
MAY_CHANGE = {"name", "runs", "steps", "resume", "save_every", "eval_every", "cache", "threads", "max_tool_error_share",
              "micro_tokens", "kv_tokens", "rows", "checkpointing"}


# The paper's setting. † = one secondary digest of v2's PDF; "ours" = no source found. Sources: README, "What is ours".
PAPER = dict(
    name="paper", model="Qwen/Qwen3-8B",                    # v2; v1 used Qwen2.5-7B-Instruct
    data="", search="serper", pages="jina", grader="judge",     # † judge: Qwen2.5-72B-Instruct with HLE's prompt
    steps=150, questions=32, group=16,                      # † 32 questions per batch, G = 16; number of steps: ours
    temperature=1.0, top_p=1.0, eval_top_p=0.95,            # † 0.95 throughout; here 1.0 in training (ours, see top_p)
    lr=1e-6, kl_beta=0.0, warmup=10,                        # † lr 1e-6, λ = 0, entropy coefficient 0; warm-up: ours
    max_turns=10, sys2_context=3072 + 28672,                # † at most 10 turns; System 2 prompt 3,072, response 28,672
    sys1_prompt=23552, sys1_response=8192,                  # † System 1 prompt 23,552, response 8,192
    step_tokens=8192, answer_tokens=2048,                   # ours
    top_k=10, distill="search,scholar,python",              # ours; formula (2) makes no exception for Python
    question_in_system1=True,                               # ours: MATPO found it crucial for its workers
    fsdp=True, checkpointing=True, micro_tokens=16384, kv_tokens=180_000, rows=256, eval_questions=512, eval_every=10)


def parser(description: str) -> argparse.ArgumentParser:
    """An argparse parser that answers misuse in one line, with every field of Config as an option."""
    class OneLine(argparse.ArgumentParser):
        def error(self, message):
            sys.exit(fail(message))

    made = OneLine(description=description, epilog="config.py explains every option; [its default].", allow_abbrev=False,
                   formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    for field in dataclasses.fields(Config):
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))      # --shared_group or --shared-group
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.type) is Literal:
            kind = {"choices": get_args(field.type)}
        else:
            kind = {"type": field.type, "metavar": field.type.__name__.upper()}
        made.add_argument(*names, **kind, help=f"[{field.default}]")
    return made


def from_command_line(arguments: list[str], description: str = "") -> Config:
    """The Config that a command line asks for."""
    return resolve(vars(parser(description).parse_args(arguments)))


def fail(message: str) -> int:
    """Prints one sentence on standard error; returns exit code 2."""
    print(f"mars: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return 2


def resolve(given: dict, saved: dict | None = None, *, training: bool = True) -> Config:
    """Defaults, then a preset, then a saved run's settings, then what was given on the command line; checked."""
    given = dict(given)
    preset = PAPER if given.get("preset") == "paper" else {}
    names = {field.name for field in dataclasses.fields(Config)}
    config = Config(**{**preset, **{k: v for k, v in (saved or {}).items() if k in names},
                       **{k: v for k, v in given.items() if k in names}})
    check(config, training)
    return config


def check(config: Config, training: bool = True) -> None:
    """Refuses values that contradict each other or the method: UserError with one sentence."""
    for name in ("steps", "questions", "group", "max_turns", "step_tokens", "answer_tokens", "sys1_response", "save_every",
                 "eval_every", "inner_steps", "micro_tokens", "kv_tokens", "rows", "top_k", "threads"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(config, name)}")
    for name in ("lr", "warmup", "weight_decay", "clip_grad", "clip_low", "clip_high", "kl_beta", "tis", "max_tool_error_share",
                 "eval_questions"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise UserError(f"--{name} must be a finite number of at least 0, got {getattr(config, name)}")
    if config.top_p != 1.0:
        raise UserError("--top_p below 1 is for evaluation (--eval_top_p): the loss differentiates the full distribution, "
                        "which a truncated sampler does not draw from")
    if config.temperature < 0 or (training and config.temperature == 0) or not 0 < config.eval_top_p <= 1:
        raise UserError("--temperature must be above 0 in training, and --eval_top_p in (0, 1]")
    known = {"search", "scholar", "python"}
    for name in ("tools", "distill"):
        unknown = [tool for tool in getattr(config, name).split(",") if tool and tool not in known]
        if unknown:
            raise UserError(f"--{name}: unknown tool '{unknown[0]}'; choose from search, scholar, python, separated by commas")
    if not config.tools:
        raise UserError("--tools is empty: System 2 needs at least one of search, scholar, python")
    if config.inner_steps > config.questions:
        raise UserError(f"--inner_steps {config.inner_steps} is more than --questions {config.questions}: "
                        "each step needs a question")
    if config.sys2_context > config.kv_tokens or config.sys1_prompt + config.sys1_response > config.kv_tokens:
        raise UserError(f"--kv_tokens {config.kv_tokens} is smaller than one context; raise it or lower the episode's limits")
    if config.step_tokens + 2 * config.answer_tokens > config.sys2_context:
        raise UserError("--sys2_context leaves no room for a step and an answer; raise it")
    if config.group < 2:
        raise UserError("--group must be at least 2: the advantage compares trajectories of one question")
    if config.max_turns < 2:
        raise UserError("--max_turns must be at least 2: a step that calls a tool and one that answers")
    if training and config.eval_questions < 1:
        raise UserError("--eval_questions must be at least 1: a run measures itself on held-out questions")
