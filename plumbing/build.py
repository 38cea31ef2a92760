"""From options to all that a run needs.

All checks of the environment happen here, before anything is written but the claim of the folder.
"""

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import kernels
import trainer
from config import Config, UserError, uses_bf16
from driver import Driver
from plumbing import smollm2, surroundings, tracker
from plumbing.claims import claim_folder
from plumbing.run import Run
from rollout import Method
from sampler import Sampler, nccl, remote, servers
from tasks import grading
from tasks.format import Format
from tasks.questions import Question
from tools import Tool
from toy import base_model
from toy.language import ToyFormat

ENGINES = {"vllm": servers.VLLM, "sglang": servers.SGLang, "vllm_nccl": nccl.NCCL}


@dataclass
class Machine:
    """This process's place."""

    device: torch.device
    rank: int
    ranks: int
    bf16: bool  # the arithmetic of sampler and trainer, else fp32

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of all weights that are not trained."""
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass
class Additions:
    """What a fork brings of its own; what is left out comes from the options."""

    more_tools: Sequence[Tool] = ()
    question: Callable[[int], Question] | None = None
    eval_questions: list[Question] | None = None
    # Instead of the two above, where they follow from the options: (options, names of the tools,
    # whether to train) -> both.
    questions: Callable[[Config, list[str], bool], tuple] | None = None
    grade: Callable[[Question, str], float] | None = None
    base_model: Callable[[str, int], Path] | None = None  # cache, seed -> what --model toy means
    # The tokenizer and the tools' names -> how the roles speak, for such a base model.
    language: Callable[[object, list[str]], Format] | None = None


@dataclass
class Outside:
    """What comes from outside the model."""

    start: Path | str  # the model to start from
    memory: str  # the plan, in one line
    grade: Callable[[Question, str], float]
    question: Callable[[int], Question] | None
    eval_questions: list[Question]
    tools: list[Tool]
    eval_tools: list[Tool]
    servers: list[servers.Server]


def build(
    method: Method,
    config: Config,
    *,
    training: bool,
    folder: Path | None = None,
    base: str = "",
    frozen: Path | None = None,
    **additions,
) -> Run:
    """A Run; with `training` also policy, optimizer and, if there is a KL term, the reference.

    The run's folder is claimed first, so that no second start can take it, and given back if
    anything is missing. Without --name it is called after `base`, else after the model. `folder`:
    none is claimed, for a caller that writes no run. `frozen`: the model that plays frozen roles in
    an evaluation. `additions` are the fields of Additions. UserError lists everything that is
    missing.
    """
    machine = join(config)
    claim = None
    if folder is None:
        base = base or Path(config.model).resolve().name
        folder, claim = claim_folder(config, method.name, machine.rank, base)
    try:
        more = Additions(**additions)
        run = assemble(method, config, machine, folder, training, frozen, more)
    except BaseException:
        if claim:
            claim.release()
        raise
    run.claim = claim
    return run


def assemble(
    method: Method,
    config: Config,
    machine: Machine,
    folder: Path,
    training: bool,
    frozen: Path | None,
    additions: Additions,
) -> Run:
    """What `build` builds when the folder is ours."""
    kept = None
    if training and config.resume and os.path.lexists(folder / trainer.FROZEN):
        kept = folder / trainer.FROZEN  # its --model may have changed since, or be gone
    outside = environment(config, machine, training, additions, kept)
    start = outside.start
    tokenizer = surroundings.load_tokenizer(start)
    chat = surroundings.make_format(
        method, config, tokenizer, outside.tools, additions.language or ToyFormat
    )
    asked = list(outside.eval_questions)
    if isinstance(outside.question, surroundings.Questions):
        asked += outside.question.loaded
    elif additions.question:
        asked += [additions.question(i) for i in range(config.questions)]
    for question in asked:
        method.fits(config, chat, question)

    state = trainer.newest(folder) if training and config.resume else None
    origin = start
    if state and not config.lora_rank:
        origin = state[1] / "model"
    model = load_model(config, origin, machine, training)
    surroundings.check_vocabulary(tokenizer, model, start)
    # Both a frozen role and the KL term need the model that the run began with. With adapters that
    # is the model itself, as long as it has none or they are off.
    base = model
    if not config.lora_rank and (config.frozen() or (training and config.kl_beta)):
        device = machine.device if config.kl_beta else "cpu"
        base = trainer.load_model(frozen or start, device, dtype=machine.dtype, training=False)
        surroundings.check_same_vocabulary(base, frozen or start, model, origin)
    if config.server:
        sampler = make_remote(config, outside.servers, model, machine, folder)
        if not config.lora_rank:  # else it gets adapters below, beside the model of its start
            path = Path(origin)
            sampler.load_folder(str(path.resolve()) if path.exists() else str(origin))
    else:
        sampler = make_sampler(config, model, machine)
    samplers = dict.fromkeys(method.roles, sampler)
    if config.frozen():
        samplers |= dict.fromkeys(config.frozen(), make_sampler(config, base, machine))
    deterministic = config.deterministic
    if deterministic is None:
        deterministic = not machine.cuda and not config.server
    run = Run(
        method=method,
        config=config,
        folder=folder,
        device=machine.device,
        rank=machine.rank,
        ranks=machine.ranks,
        start=start,
        tokenizer=tokenizer,
        chat=chat,
        driver=Driver(list(dict.fromkeys(samplers.values())), deterministic=deterministic),
        sampler=sampler,
        samplers=samplers,
        grade=outside.grade,
        tools=outside.tools,
        eval_tools=outside.eval_tools,
        question=outside.question,
        eval_questions=outside.eval_questions,
    )
    introduce(run, start, outside.memory)
    if training:
        make_trainer(run, model, base, machine, state)
    return run


def make_trainer(run: Run, model, base, machine: Machine, state: tuple[int, Path] | None) -> None:
    """Adds to a run what learns: policy, optimizer, reference, as of `state` if it is resumed.

    `base` is the model that the run began with, where a frozen role or the KL term needs it.
    """
    config = run.config
    if config.lora_rank:
        for role in config.frozen():
            if not config.fsdp:  # which would cut the sampler's copy up
                run.samplers[role].share_weights(model)
        trainer.add_adapters(model, config.lora_rank, config.seed)
        if state:
            trainer.read_adapters(state[1] / "adapter", model)
        if state or config.server:
            run.sampler.load_weights(model)
    policy = trainer.Policy(
        model, bf16=machine.bf16, recompute_activations=config.recompute_activations
    )
    run.policy = trainer.parallel(policy, fsdp=config.fsdp, device=machine.device)
    run.optimizer = trainer.make_optimizer(run.policy, config.lr, config.weight_decay, config.beta1)
    if config.kl_beta and config.lora_rank:
        run.reference = trainer.reference(run.policy)
    elif config.kl_beta:
        run.reference = trainer.Policy(base.requires_grad_(False), bf16=machine.bf16)
    if state:
        trainer.load_optimizer(state[1], run.policy, run.optimizer)


def introduce(run: Run, start: Path | str, memory: str) -> None:
    """Two lines about what is about to run."""
    if run.rank:
        return
    config = run.config
    where = f"{config.search} {config.docs}".strip()
    if surroundings.searches_toy(config):
        where = "the toy's world"
    if config.eval_docs:
        where += f", for held-out questions {config.eval_docs}"
    tools = ", ".join(tool.name for tool in run.tools)
    print(
        f"model {start} on {run.device}, {run.ranks} process(es), sampler: {run.sampler.path}; "
        f"search: {where}; tools: {tools}; reward: {config.grader}\n{memory}",
        flush=True,
    )


def environment(
    config: Config,
    machine: Machine,
    training: bool,
    additions: Additions,
    start: Path | str | None = None,
) -> Outside:
    """All that comes from outside. UserError lists all that is missing.

    `start`: the model to start from, if it is not the one that --model names.
    """
    problems = []
    memory = ""

    def attempt(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except UserError as error:
            problems.append(str(error))

    attempt(check_machine, config, machine)
    if training and config.track != "none":
        attempt(tracker.library, config.track)
    grade = additions.grade or attempt(grading.grader, config.grader)
    names = attempt(surroundings.usable_tools, config, machine.rank, additions.more_tools) or []
    question = additions.question
    held_out = additions.eval_questions
    if held_out is None:
        questions = additions.questions or surroundings.training_and_held_out
        pair = attempt(questions, config, names, training)
        question, held_out = pair or (None, [])
    tools = attempt(surroundings.make_tools, config, "train", names) or []
    eval_tools = attempt(surroundings.make_tools, config, "eval", names) or []
    found = []
    if config.server:
        urls = [url for url in config.server.split(",") if url]
        engine = ENGINES[config.engine]
        if engine is nccl.NCCL:
            attempt(nccl.check, machine.cuda)
        found = attempt(
            servers.connect, urls, engine, config.tool_seconds, adapters=config.lora_rank > 0
        )
    # The toy's model takes two minutes to make: not for a run that cannot start.
    if start is None and (not problems or config.model != "toy"):
        start = attempt(start_model, config, machine, additions.base_model or base_model.build)
    if start:
        memory = attempt(
            trainer.memory_plan,
            start,
            config=config,
            longest=config.longest(),
            world=machine.ranks,
            device=machine.device,
            training=training,
        )
    problems = list(dict.fromkeys(problems))  # both splits miss the same
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        listed = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        raise UserError(f"cannot start, {len(problems)} things are missing: {listed}")
    more = list(additions.more_tools)
    tools += more
    eval_tools += more
    return Outside(start, memory, grade, question, held_out, tools, eval_tools, found)


# ------------------------------------------------------------------------------- the machine


def place(config: Config) -> Machine:
    """This process's device and rank. UserError if the environment and the options disagree."""
    rank = number_from("RANK", 0)
    ranks = number_from("WORLD_SIZE", 1)
    local = number_from("LOCAL_RANK", 0)
    if not 0 <= rank < ranks:
        raise UserError(f"RANK is {rank} of WORLD_SIZE {ranks}: start with torchrun, or unset both")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise UserError(
            "--device cuda: PyTorch finds no CUDA GPU here; use --device cpu or install a CUDA "
            "build of torch"
        )
    if ranks > 1 and "MASTER_ADDR" not in os.environ:
        raise UserError(
            "WORLD_SIZE is set, but nothing else of torchrun: start with torchrun, or unset it"
        )
    device = torch.device("cpu")
    if config.device != "cpu" and gpus:
        if local >= gpus:
            raise UserError(
                f"{local + 1} processes on this machine, but only {gpus} GPUs: lower "
                "--nproc_per_node"
            )
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    return Machine(device, rank, ranks, uses_bf16(config, device.type == "cuda"))


def join(config: Config) -> Machine:
    """This process's place; it joins the process group when there are several."""
    machine = place(config)
    if machine.ranks > 1 and not dist.is_initialized():
        # Ranks wait for the slowest one's rollouts, and while rank 0 writes a state.
        patience = datetime.timedelta(hours=2)
        backend = "nccl" if machine.cuda else "gloo"
        dist.init_process_group(backend, timeout=patience)
    elif machine.ranks == 1 and not machine.cuda:
        torch.set_num_threads(min(config.threads, os.cpu_count() or 1))
    return machine


def number_from(variable: str, default: int) -> int:
    """A whole number from the environment, as torchrun sets it."""
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        raise UserError(f"{variable} is no number: start with torchrun, or unset it") from None


def check_machine(config: Config, machine: Machine) -> None:
    """What the options and the environment ask of the machine."""
    if config.bf16 == "off" and machine.cuda:
        raise UserError("--bf16 off: attention on CUDA takes bf16 only; leave it out")
    kernels.use_triton(torch.zeros(0, device=machine.device))  # UserError for a bad MARS_KERNELS
    if config.preset == "paper" and not machine.cuda:
        raise UserError(
            "--preset paper needs CUDA GPUs and PyTorch finds none; 8 of 80 GB train Qwen3-8B, one "
            "trains a 0.6B model (--model Qwen/Qwen3-0.6B --no-fsdp)"
        )
    if config.fsdp and machine.ranks == 1:
        raise UserError(
            "--fsdp shards over processes; start them with torchrun --nproc_per_node=N mars.py "
            "--fsdp …"
        )


# ------------------------------------------------------------------------------- the models


def start_model(config: Config, machine: Machine, make: Callable[[str, int], Path]) -> Path | str:
    """The model to start from; the toy's and SmolLM2 are made at the first use, by rank 0."""
    if config.model == smollm2.NAME:
        return smollm2.build(config.cache)  # ranks wait for the first one
    if config.model != "toy":
        return config.model
    if machine.rank == 0:
        make(config.cache, config.seed)
    if dist.is_initialized():
        dist.barrier()
    return make(config.cache, config.seed)


def load_model(config: Config, origin: Path | str, machine: Machine, training: bool):
    """The model that is trained, in fp32, or else the one that the sampler copies.

    Under adapters its weights are frozen, so they have the arithmetic's type.
    """
    if not training:
        return trainer.load_model(origin, "cpu", dtype=machine.dtype, training=False)
    # FSDP takes the model to the device a layer at a time, and cuts each.
    device = "cpu" if config.fsdp else machine.device
    dtype = machine.dtype if config.lora_rank else torch.float32
    model = trainer.load_model(origin, device, dtype=dtype, training=False)
    trainer.check_exact(model, longest=config.longest())
    return model


def make_sampler(config: Config, model, machine: Machine) -> Sampler:
    """The sampler, whose pool must hold the longest context in whole pages."""
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
    positions = sampler.forward.positions
    if positions is not None and config.longest() > positions:
        raise UserError(
            f"the model knows {positions} positions, fewer than one context of "
            f"{config.longest()}; lower the episode's limits"
        )
    room = sampler.pages.count * sampler.pages.size
    if config.longest() > room:
        raise UserError(
            f"--kv_tokens {config.kv_tokens} makes whole pages of {room} tokens, fewer than one "
            f"context of {config.longest()}; raise it, or lower the episode's limits"
        )
    return sampler


def make_remote(
    config: Config, found: list[servers.Server], model, machine: Machine, folder: Path
) -> remote.Remote:
    """The servers as a sampler. They must take the longest context, and read the run's folder."""

    def write(model) -> str:
        return trainer.write_model(folder / "weights", model, machine.dtype)

    def keep(model) -> str:
        return nccl.keep(found, model, machine.dtype, machine.device)

    in_memory = config.engine == "vllm_nccl" and not config.lora_rank
    sampler = remote.Remote(
        found,
        vocabulary=model.get_input_embeddings().num_embeddings,
        seconds=config.tool_seconds,
        parallel=config.max_sequences,
        write=keep if in_memory else write,
    )
    if config.longest() > sampler.positions:
        raise UserError(
            f"a server takes contexts of {sampler.positions} tokens, fewer than one of "
            f"{config.longest()}; raise its limit (vLLM: --max-model-len)"
        )
    return sampler
