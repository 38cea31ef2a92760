"""From options to a Run, which has all that a run works with.

Tests: pytest tests/test_mars.py tests/test_frozen.py
"""

import functools
import hashlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

import trainer
from config import RESUME, Config, UserError, fields_with
from driver import AnySampler, Driver
from plumbing import folders, models
from plumbing.outside import Machine, Questions, environment, join
from processes import from_first_rank, on_first_rank
from rollout import Method
from sampler import Sampler, vllm
from tasks.chat import ChatFormat
from tasks.format import Format
from tasks.questions import Question
from tools import Tool
from toy.language import ToyFormat

# -------------------------------------------------------------------------------------- the run


@dataclass
class Run(Machine):
    """All that a run works with. Ranks hold equal weights and share out the questions."""

    method: Method
    config: Any  # the method's own subclass of Config
    folder: Path  # runs/NAME; an evaluation sets it after `build`
    # What `environment` finds.
    start: Path | str  # the model that it begins with
    memory: str  # the plan, in one line
    grade: Callable[[Question, str], float | None]
    tools: list[Tool]
    eval_tools: list[Tool]  # the toy's held-out world has a corpus of its own
    # The i-th training question, for every i; None unless training.
    question: Callable[[int], Question] | None
    eval_questions: list[Question]
    # The model at work.
    tokenizer: Any
    chat: Format
    driver: Driver
    sampler: AnySampler  # plays every role whose weights are trained
    samplers: dict[str, AnySampler]  # role -> who plays it
    # Only training has these three, and the reference only with a KL term.
    policy: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    reference: Callable | None = None  # what trainer.logprob takes
    skipped: int = 0  # updates in a row without a finite gradient
    resampled: int = 0  # further questions that --resample has played
    tracker: Any = None  # on rank 0 of a run with --track
    fingerprint: str = ""  # of the training questions and the held-out ones
    lock: IO | None = None  # keeps other processes out of the folder until the end


def build(
    method: Method,
    config: Config,
    *,
    training: bool,
    frozen: Path | None = None,
    language: Callable[[object, list[str]], Format] = ToyFormat,
    **additions,
) -> Run:
    """A Run; with `training` also its folder, policy, optimizer and reference (for a KL term).

    The folder is made last; without --name it is named after the model. `frozen`: the model that
    plays frozen roles in an evaluation. `language`: makes a toy's format from its tokenizer and the
    tools' names. `additions` are those of `environment`.
    """
    machine = join(config)
    folder = Path(config.runs) / config.name
    lock = state = own_start = None
    if config.resume:  # The weights are the run's own: --model may have changed or be gone.
        lock = on_first_rank(lambda: reopen(config, method.name))
        state = trainer.newest(folder)
        if os.path.lexists(folder / trainer.FROZEN):
            frozen = own_start = folder / trainer.FROZEN
        elif state and not config.needs_start():
            own_start = state[1] / "model"
    elif training:
        on_first_rank(lambda: folders.refuse_run(Path(config.runs), config.name))
    outside = environment(config, machine, training=training, start=own_start, **additions)
    start = outside["start"]
    servers = outside.pop("servers")
    sampler_config = replace(config, kv_tokens=outside.pop("kv_tokens"))  # from the memory plan
    tokenizer = models.load_tokenizer(start)
    chat = make_format(method, config, start, tokenizer, outside["tools"], language)
    questions = first_questions(config, outside["question"]) + outside["eval_questions"]
    fingerprint = hashlib.sha256(repr(questions).encode()).hexdigest()
    if config.resume:
        on_first_rank(lambda: refuse_other_questions(folder, fingerprint))
    for question in questions:
        method.fits(config, chat, question)

    # With adapters the base is the start, and make_trainer reads the state's adapters.
    origin = state[1] / "model" if state and not config.lora_rank else start
    model, first = load_models(config, machine, origin, frozen or start, training)
    if len(tokenizer) > models.vocabulary(model):
        raise UserError(f"{start}: its tokenizer has more tokens than its model knows")
    if config.server:
        sampler = make_remote(config, servers, origin, model, machine)
    else:
        sampler = make_sampler(sampler_config, model, machine)
    samplers = dict.fromkeys(method.roles, sampler)
    if config.frozen():
        samplers |= dict.fromkeys(config.frozen(), make_sampler(sampler_config, first, machine))
    # On a CPU a rerun gives the same bits, however slow the tools are.
    deterministic = machine.device.type == "cpu" and not config.server
    if training and not config.resume:  # All checks have passed.
        lock = on_first_rank(lambda: new_folder(config, Path(config.model).resolve().name))
        config.name = from_first_rank(config.name)
    run = Run(
        **vars(machine),
        **outside,
        method=method,
        config=config,
        folder=Path(config.runs) / config.name,
        tokenizer=tokenizer,
        chat=chat,
        driver=Driver(list(dict.fromkeys(samplers.values())), deterministic=deterministic),
        sampler=sampler,
        samplers=samplers,
        fingerprint=fingerprint,
        lock=lock,
    )
    if run.rank == 0:
        print(
            f"model {start} on {run.device}, {run.ranks} process(es), sampler: {sampler.label}; "
            f"tools: {', '.join(tool.name for tool in run.tools)}; reward: {config.grader}\n"
            f"{run.memory}",
            flush=True,
        )
    if training:
        make_trainer(run, model, first, state)
    return run


def make_format(method: Method, config: Config, start, tokenizer, tools, language) -> Format:
    """How the roles speak: a toy's language, or a chat model's template with the method's words."""
    if "<s2>" in tokenizer.get_vocab():  # Only a toy's language has it as a token.
        return language(tokenizer, [tool.name for tool in tools])
    return ChatFormat(tokenizer, method.words(config, tools), tools, models.declared_ends(start))


def first_questions(config: Config, question: Callable[[int], Question] | None) -> list[Question]:
    """All training questions where they are loaded, else those of the first step."""
    if isinstance(question, Questions):
        return question.loaded
    return [question(i) for i in range(config.questions)] if question else []


def load_models(config: Config, machine: Machine, origin, first, training: bool) -> tuple:
    """The model from `origin`, and the model from `first`, with which the run began.

    Only frozen roles and the KL term need the second model. Without them, or with adapters, one
    model is returned twice: with its adapters off, it is the model that the run began with.
    """
    # The sampler copies from the CPU, and FSDP takes layer by layer to the device. Trained weights
    # are fp32. All others, such as those beside adapters, have the dtype of the arithmetic.
    device = machine.device if training and not config.fsdp else "cpu"
    dtype = torch.float32 if training and not config.lora_rank else machine.dtype
    model = trainer.load_model(origin, device, dtype=dtype)
    if config.lora_rank or not (config.frozen() or config.kl_beta):
        return model, model
    first_device = machine.device if config.kl_beta else "cpu"
    return model, trainer.load_model(first, first_device, dtype=machine.dtype)


def make_trainer(run: Run, model, first, state: tuple[int, Path] | None) -> None:
    """Sets the run's policy, optimizer and reference, from `state` if the run is resumed."""
    config = run.config
    if config.lora_rank:
        trainer.add_adapters(model, config.lora_rank, config.seed)
        if state:
            trainer.read_adapters(state[1] / "model", model)
            run.sampler.load_weights(model)
    arithmetic = {"bf16": run.bf16, "compiler": trainer.compiler_of(run.device)}
    policy = trainer.Policy(model, recompute_activations=config.recompute_activations, **arithmetic)
    if run.rank == 0 and arithmetic["compiler"] and policy.can_pack:
        print("the first step compiles the layers: about a minute more, an estimate", flush=True)
    run.policy = trainer.parallel(policy, fsdp=config.fsdp, device=run.device)
    if config.server:
        run.sampler.score = functools.partial(trainer.score, run.policy)  # which may be sharded
    run.optimizer = trainer.make_optimizer(run.policy, config.lr, config.beta1)
    if config.kl_beta and config.lora_rank:
        run.reference = trainer.reference(run.policy)
    elif config.kl_beta:
        run.reference = trainer.Policy(first.requires_grad_(False), **arithmetic)
    if state:
        trainer.load_optimizer(state[1], run.policy, run.optimizer)


# ---------------------------------------------------------------------------------- its folder


def take_options(options: dict) -> dict:
    """The given options. With --resume they override the run's; without such a run one begins.

    Every rank reads the run's options before it joins the others; rank 0 writes them later.
    """
    if not options.get("resume"):
        return options
    if not options.get("name"):
        raise UserError("--resume needs the --name of the run that goes on or begins")
    runs = options.get("runs", Config.runs)
    folder = Path(runs) / options["name"]
    if not folders.resumable(folder):
        return options | {"resume": False}
    return folders.read_json(folder / "config.json") | {"runs": runs} | options


def new_folder(config: Config, base: str) -> IO:
    """Makes runs/NAME; without --name the first free one of base, base-2, base-3, …"""
    alternatives = (f"{base}-{number}" for number in itertools.count(2))
    names = [config.name] if config.name else itertools.chain([base], alternatives)
    for name in names:
        folder = Path(config.runs) / name
        lock = folders.make(folder) and folders.lock(folder)
        if lock:
            # A killed evaluation may have left its mark, with which no run could be resumed.
            (folder / "table.json").unlink(missing_ok=True)
            config.name = name
            return lock
    raise UserError(f"{config.runs}/{config.name} exists by now: choose another --name")


def reopen(config: Config, method: str) -> IO:
    """The lock of the run that is resumed. UserError if it cannot go on with these settings."""
    folder = Path(config.runs) / config.name
    lock = reclaim(config, method)
    state = trainer.newest(folder)
    # The link `checkpoint` is made with the first saved state and never removed.
    if state is None and os.path.lexists(folder / "checkpoint"):
        raise UserError(f"{folder} holds no whole state to go on from; choose another --name")
    if state and state[0] > config.steps:
        raise UserError(f"the run at {folder} has done {state[0]} steps: give --steps that or more")
    return lock


def reclaim(config: Config, method: str) -> IO:
    """The lock of a folder that exists. UserError if its settings or its method differ."""
    folder = Path(config.runs) / config.name
    lock = folders.lock(folder)
    if lock is None:
        raise UserError(f"another process works on {folder}; wait until it has ended")
    # An option that an older version did not have gets its default.
    saved = vars(type(config)()) | folders.read_json(folder / "config.json")
    may_change = fields_with(type(config), RESUME)
    changed = [
        f"{name} ({saved[name]} -> {value})"
        for name, value in vars(config).items()
        if name not in may_change and saved[name] != value
    ]
    if changed:
        raise UserError(
            f"the run at {folder} was started with other settings: {', '.join(changed)}; "
            "leave these options out, or choose another --name"
        )
    owner = folders.read_json(folder / "method.json")["name"]
    if owner != method:
        raise UserError(f"{folder} was made by the method {owner}: resume it with its own file")
    return lock


def refuse_other_questions(folder: Path, fingerprint: str) -> None:
    """UserError if a resumed run would ask other questions. A state only stores their numbers."""
    # A run of an older version has no fingerprint.
    if folders.read_json(folder / "method.json").get("questions", fingerprint) != fingerprint:
        raise UserError(
            f"{folder} was started with other questions (an evaluation also with other weights or "
            "documents): put those files back as they were, or choose another --name"
        )


# ------------------------------------------------------------------------------- its sampler


def make_sampler(config: Config, model, machine: Machine) -> Sampler:
    """The sampler. UserError if its pool of whole pages cannot hold the longest context."""
    try:
        sampler = Sampler(
            model,
            max_tokens=config.kv_tokens,
            max_sequences=config.max_sequences,
            device=machine.device,
            dtype=machine.dtype,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    room = sampler.pages.count * sampler.pages.size
    if config.longest() > room:
        raise UserError(
            f"--kv_tokens {config.kv_tokens} makes whole pages of {room} tokens, fewer than one "
            f"context of {config.longest()}; raise it, or lower the episode's limits"
        )
    return sampler


def make_remote(
    config: Config, servers: list[vllm.Server], origin: Path | str, model, machine: Machine
) -> vllm.Remote:
    """The servers as a sampler. They read the run's folder and must take the longest context."""

    def write(policy_model) -> str:
        weights = Path(config.runs) / config.name / "weights"
        return trainer.write_model(weights, policy_model, machine.dtype)

    sampler = vllm.Remote(
        servers,
        vocabulary=models.vocabulary(model),
        seconds=config.tool_seconds,
        parallel=config.max_sequences,
        write=write,
        score=functools.partial(trainer.score, trainer.Policy(model, bf16=machine.bf16)),
        # On the probe's unlikely tokens two bf16 forms of SmolLM2 differ by 0.09 on average.
        tolerance=0.5 if machine.bf16 else 1e-3,
    )
    if config.longest() > sampler.positions:
        raise UserError(
            f"a server takes contexts of {sampler.positions} tokens, fewer than one of "
            f"{config.longest()}; raise its limit (vLLM: --max-model-len)"
        )
    path = Path(origin)
    sampler.load_folder(str(path.resolve() if path.exists() else origin))
    return sampler
