"""From options to everything that a run or an evaluation needs: folder, questions, tools,
format, model, sampler.

The only file that knows both the toy and the real world. All checks of the environment happen
here, before anything is written.
"""

import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoTokenizer

import kernels
import trainer
from config import MAY_CHANGE, Config, UserError
from plumbing import files
from driver import Driver
from rollout import Format, Game, Method, Trajectory
from sampler import Sampler
from tasks import grading
from tasks.chat import ChatFormat
from tasks.questions import Question, load_questions, split
from tools import KNOWN, Tool, python, search
from toy import base_model, language, world


@dataclass
class Run:
    """All that is alive in a run. Ranks hold equal weights and share out the questions."""

    method: Method
    config: Config
    folder: Path
    lock: IO | None  # holds the folder
    device: torch.device
    rank: int
    world: int
    start: Path | str  # the model that this run began with
    tokenizer: object
    chat: Format
    driver: Driver
    sampler: Sampler  # plays every role whose weights are trained
    samplers: dict[str, Sampler]  # role -> who plays it
    grade: Callable[[Question, str], float]
    tools: list[Tool]
    eval_tools: list[Tool]  # the toy's held-out world has a corpus of its own
    question: (
        Callable[[int], Question] | None
    )  # the i-th of an endless stream; None without training
    eval_questions: list[Question]
    policy: torch.nn.Module | None = None  # these three only in training
    optimizer: torch.optim.Optimizer | None = None
    reference: torch.nn.Module | None = None
    skipped: int = 0  # steps in a row without a finite gradient

    def rollouts(
        self,
        batch: list[tuple[int, Question]],
        attempts: int,
        *,
        step: int | str,
        tools: list[Tool],
        temperature: float = 1.0,
        top_p: float = 1.0,
        on_event: Callable[[str, str], None] | None = None,
    ) -> list[Trajectory]:
        """`attempts` trajectories for each (place in the batch, question), all in one running
        batch of the sampler.
        """
        game = Game(
            driver=self.driver,
            samplers=self.samplers,
            chat=self.chat,
            tools={tool.name: tool.call for tool in tools},
            grade=self.grade,
            config=self.config,
            step=step,
            temperature=temperature,
            top_p=top_p,
        )
        if on_event:
            game.on_event = on_event
        episodes = [
            game.play(self.method, question, place, attempt)
            for place, question in batch
            for attempt in range(attempts)
        ]
        hidden = bool(self.rank or on_event) or not sys.stderr.isatty()
        if hidden:
            return self.driver.run(episodes)
        stats = self.sampler.stats
        start = time.perf_counter()
        before = stats["decoded_tokens"]
        with tqdm(
            total=len(episodes), desc=f"rollouts {step}", unit="trajectory", leave=False
        ) as bar:

            def show(done: int) -> None:
                rate = (stats["decoded_tokens"] - before) / (time.perf_counter() - start)
                shown = {name: stats[name] for name in ("running", "waiting", "pages_in_use")}
                bar.set_postfix({"tokens/s": f"{rate:.0f}", **shown}, refresh=False)
                bar.update(done - bar.n)

            return self.driver.run(episodes, show)


@dataclass
class Questions:
    """Training questions, called with 0, 1, 2, …: every one once an epoch, each epoch in an
    order of its own.
    """

    loaded: list[Question]
    seed: int

    def __call__(self, i: int) -> Question:
        epoch, place = divmod(i, len(self.loaded))
        return self.loaded[epoch_order(len(self.loaded), self.seed, epoch)[place]]


@functools.lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


@dataclass
class World:
    """What comes from outside the model."""

    plan: str  # memory, in one line
    grade: Callable[[Question, str], float]
    names: list[str]  # of the tools
    question: Callable[[int], Question] | None
    eval_questions: list[Question]
    tools: list[Tool] = field(default_factory=list)


def build(
    method: Method,
    config: Config,
    *,
    training: bool,
    folder: Path | None = None,
    more_tools: Sequence[Tool] = (),
) -> Run:
    """A Run; with `training` also policy, optimizer and, if there is a KL term, the reference.

    The run's folder is claimed first, so that no second start can take it, and given back if
    anything is missing. UserError lists everything that is missing. `folder`: none is claimed,
    for a caller that writes no run.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    device = pick_device(config, ranks)
    lock = None
    if folder is None:
        folder, lock = claim_folder(config, rank)
    try:
        return assemble(method, config, training, folder, lock, device, rank, ranks, more_tools)
    except BaseException:
        if lock:
            files.release(folder, lock)
        raise


def assemble(
    method: Method,
    config: Config,
    training: bool,
    folder: Path,
    lock: IO | None,
    device: torch.device,
    rank: int,
    ranks: int,
    more_tools: Sequence[Tool],
) -> Run:
    """The parts of `build` that need the folder to be ours."""
    start = start_model(config, rank)
    outside = environment(config, start, ranks, rank, device, training, more_tools)
    tokenizer = load_tokenizer(start)
    chat = make_format(method, config, tokenizer, outside.tools)
    asked = list(outside.eval_questions)
    if isinstance(outside.question, Questions):
        asked += outside.question.loaded
    for question in asked:
        method.fits(config, chat, question)

    state = None
    if training and config.resume:
        state = trainer.newest(folder)
    model = load_start(config, state[1] / "model" if state else start, device, training)
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise UserError(
            f"{start} has {len(tokenizer)} tokens in its tokenizer and {known} in its model: "
            f"use two "
            "that belong together"
        )
    cuda = device.type == "cuda"
    sampler = make_sampler(config, model, device)
    samplers = dict.fromkeys(method.roles, sampler)
    base = None
    if config.frozen() or (
        training and config.kl_beta
    ):  # both need the model that the run began with
        dtype = torch.bfloat16 if cuda else torch.float32
        base = trainer.load_model(
            start, device if config.kl_beta else "cpu", dtype=dtype, training=training
        )
    if config.frozen():
        samplers |= dict.fromkeys(config.frozen(), make_sampler(config, base, device))
    deterministic = config.deterministic
    if deterministic is None:
        deterministic = not cuda
    run = Run(
        method=method,
        config=config,
        folder=folder,
        lock=lock,
        device=device,
        rank=rank,
        world=ranks,
        start=start,
        tokenizer=tokenizer,
        chat=chat,
        driver=Driver(list(dict.fromkeys(samplers.values())), deterministic=deterministic),
        sampler=sampler,
        samplers=samplers,
        grade=outside.grade,
        tools=outside.tools,
        eval_tools=make_tools(config, "eval", outside.names) + list(more_tools),
        question=outside.question,
        eval_questions=outside.eval_questions,
    )
    if rank == 0:
        where = f"{config.search} {config.docs}".strip()
        if searches_toy(config):
            where = "the toy's world"
        print(
            f"model {start} on {device}, {ranks} process(es), sampler: {sampler.path}; search: "
            f"{where}; "
            f"tools: {', '.join(tool.name for tool in run.tools)}; reward: "
            f"{config.grader}\n{outside.plan}",
            flush=True,
        )
    if training:
        policy = trainer.Policy(
            model, bf16=cuda, recompute_activations=config.recompute_activations
        )
        run.policy = trainer.parallel(policy, fsdp=config.fsdp, device=device)
        run.optimizer = trainer.make_optimizer(run.policy, config.lr, config.weight_decay)
        if config.kl_beta:
            run.reference = trainer.Policy(base.requires_grad_(False), bf16=cuda)
        if state:
            trainer.load_optimizer(state[1], run.policy, run.optimizer)
    return run


def load_start(config: Config, start: Path | str, device: torch.device, training: bool):
    """The model: in fp32 for the trainer; else in the sampler's type, on the host, for only the
    copy goes to the device.
    """
    if not training:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return trainer.load_model(start, "cpu", dtype=dtype, training=False)
    # FSDP takes the model to the device a layer at a time, and cuts each.
    model = trainer.load_model(
        start, "cpu" if config.fsdp else device, dtype=torch.float32, training=True
    )
    trainer.check_exact(model)
    return model


def make_sampler(config: Config, model, device: torch.device) -> Sampler:
    """The sampler, whose pool must hold the longest context in whole pages."""
    page = 64 if device.type == "cuda" else 16
    pages = config.kv_tokens // page
    if config.longest() > pages * page:
        needed = -(-config.longest() // page) * page
        raise UserError(
            f"--kv_tokens {config.kv_tokens} is smaller than one context of {config.longest()} "
            f"tokens in whole pages; "
            f"raise it to at least {needed}, or lower the episode's limits"
        )
    try:
        return Sampler(
            model, max_tokens=config.kv_tokens, max_sequences=config.max_sequences, device=device
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def environment(
    config: Config,
    start: Path | str,
    ranks: int,
    rank: int,
    device: torch.device,
    training: bool,
    more_tools: Sequence[Tool],
) -> World:
    """All that comes from outside. UserError lists all that is missing."""
    problems = []

    def attempt(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except UserError as error:
            problems.append(str(error))

    attempt(check_machine, config, device)
    plan = attempt(
        trainer.memory_plan,
        start,
        config=config,
        longest=config.longest(),
        world=ranks,
        device=device,
        training=training,
    )
    grade = attempt(grading.grader, config.grader)
    names = attempt(usable_tools, config, rank, more_tools) or []
    questions = attempt(training_and_held_out, config, names, training) or (None, [])
    tools = attempt(make_tools, config, "train", names) or []
    keys = [name for name in ("SERPER_API_KEY", "JINA_API_KEY") if not os.environ.get(name)]
    if config.search == "serper" and config.pages == "jina" and len(keys) == 2:
        # make_tools names one missing key at a time.
        problems.append(
            "JINA_API_KEY is not set either: export it, or read pages with --pages fetch"
        )
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        listed = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        raise UserError(f"cannot start, {len(problems)} things are missing: {listed}")
    return World(plan, grade, names, *questions, tools + list(more_tools))


def pick_device(config: Config, ranks: int) -> torch.device:
    """The process's device; joins the process group when there are several."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch finds no CUDA GPU here; use --device cpu or install a CUDA "
            "build of torch"
        )
    if ranks > 1 and "MASTER_ADDR" not in os.environ:
        raise UserError(
            "WORLD_SIZE is set, but nothing else of torchrun: start with torchrun, or unset it"
        )
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if config.device != "cpu" and torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise UserError(
                f"{local + 1} processes on this machine, but only {torch.cuda.device_count()} "
                f"GPUs: "
                "lower --nproc_per_node"
            )
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    if ranks > 1 and not dist.is_initialized():
        # Ranks wait for the slowest one's rollouts and for rank 0's write of a state: longer
        # than the default.
        patience = datetime.timedelta(hours=2)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    elif ranks == 1 and device.type == "cpu":
        torch.set_num_threads(min(config.threads, os.cpu_count() or 1))
    return device


def check_machine(config: Config, device: torch.device) -> None:
    """What the options and the environment ask of the machine."""
    kernels.use_triton(torch.zeros(0, device=device))  # refuses a MARS_KERNELS that cannot be had
    if config.preset == "paper" and device.type == "cpu":
        raise UserError(
            "--preset paper needs CUDA GPUs and PyTorch finds none; 8 of 80 GB train Qwen3-8B, "
            "one trains a "
            "0.6B model (--model Qwen/Qwen3-0.6B --no-fsdp)"
        )
    if config.fsdp and not dist.is_initialized():
        raise UserError(
            "--fsdp shards over processes; start them with torchrun --nproc_per_node=N mars.py "
            "--fsdp …"
        )


# --------------------------------------------------------------------------------------- the folder


def claim_folder(config: Config, rank: int) -> tuple[Path, IO | None]:
    """runs/NAME/, ours from this moment on, and the lock that holds it; rank 0 claims it for all.

    UserError if it is somebody else's, if it exists without --resume or the other way round, or
    if settings differ.
    """
    claimed = [None, ""]
    lock = None
    if rank == 0:
        try:
            lock = claim_name(config)
            claimed = [config.name, ""]
        except UserError as error:
            claimed = [None, str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(claimed)
    name, problem = claimed
    if problem:
        raise UserError(problem)
    config.name = name
    return Path(config.runs) / name, lock


def claim_name(config: Config) -> IO:
    """Claims the folder of config.name, or of the first free name."""
    runs = Path(config.runs)
    if config.resume:
        if not config.name:
            raise UserError("--resume needs the run's --name")
        return claim_again(config, runs / config.name)
    if config.name:
        folder = runs / config.name
        check_writable(folder)
        lock = claim_new(folder)
        if lock is None:
            raise UserError(
                f"{folder} exists: add --resume to go on with it, or choose another --name"
            )
        return lock
    base = Path(config.model).name
    check_writable(runs / base)
    for number in range(1, 100_000):
        config.name = base if number == 1 else f"{base}-{number}"
        lock = claim_new(runs / config.name)
        if lock:
            return lock
    raise UserError(f"{runs} holds 100,000 runs of this name; choose one with --name")


def claim_new(folder: Path) -> IO | None:
    """The lock of a folder that holds nothing yet, or None."""
    if folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {".lock"}):
        return None
    lock = files.claim(folder)
    if lock and set(os.listdir(folder)) != {".lock"}:  # another start was here in between
        lock.close()
        return None
    return lock


def claim_again(config: Config, folder: Path) -> IO:
    """The lock of the run that is resumed."""
    if not (folder / "config.json").exists():
        raise UserError(f"nothing to resume: there is no run at {folder}")
    saved = files.read_json(folder / "config.json")
    changed = [
        f"{name} ({saved.get(name)} -> {value})"
        for name, value in vars(config).items()
        if name not in MAY_CHANGE and saved.get(name) != value
    ]
    if changed:
        raise UserError(
            f"the run at {folder} was started with other settings: {', '.join(changed)}; "
            "resume with the same ones"
        )
    check_writable(folder)
    lock = files.claim(folder)
    if lock is None:
        raise UserError(f"another process works on {folder}; wait until it has ended")
    state = trainer.newest(folder)
    if state and state[0] > config.steps:
        lock.close()
        raise UserError(
            f"the run at {folder} has done {state[0]} steps already; give --steps {state[0]} "
            f"or more"
        )
    return lock


def check_writable(folder: Path) -> None:
    """UserError if the folder cannot be made or written."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")


# --------------------------------------------------------------------------------- model and format


def start_model(config: Config, rank: int) -> Path | str:
    """The model to start from; the toy's is made at the first use, by rank 0."""
    if config.model != "toy":
        return config.model
    if rank == 0:
        base_model.build(config.cache, config.seed)
    if dist.is_initialized():
        dist.barrier()
    return base_model.build(config.cache, config.seed)


def load_tokenizer(start: Path | str):
    """The model's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load a tokenizer from {start}: {reason}") from None


def make_format(method: Method, config: Config, tokenizer, tools: list[Tool]) -> Format:
    """How the roles speak: the toy's language if the tokenizer knows it, else the model's own
    chat template.
    """
    if "<s2>" in tokenizer.get_vocab():
        return language.ToyFormat(tokenizer, [tool.name for tool in tools])
    return ChatFormat(tokenizer, method.words(config, tools), tools)


# ------------------------------------------------------------------------------ tools and questions


def usable_tools(config: Config, rank: int, more_tools: Sequence[Tool] = ()) -> list[str]:
    """The names of --tools.

    Where Python can't be jailed the toy goes on without it; a real run is refused.
    """
    added = [tool.name for tool in more_tools]
    names = list(dict.fromkeys(name for name in config.tools.split(",") if name))
    listed = getattr(config, "distill", "").split(",")
    for option, given in (("tools", names), ("distill", listed)):
        known = [*KNOWN, *added]
        unknown = [name for name in given if name and name not in known]
        if unknown:
            raise UserError(
                f"--{option}: unknown tool '{unknown[0]}'; choose from {', '.join(known)}, "
                f"separated by commas"
            )
    names = [name for name in names if name not in added]
    if not names and not added:
        raise UserError("--tools is empty: at least one of search, scholar, python is needed")
    reason = python.available() if "python" in names else None
    others = ",".join(name for name in names if name != "python")
    if reason and (config.data != "toy" or not others):
        advice = (
            f"leave it out with --tools {others}" if others else "name another one with --tools"
        )
        raise UserError(f"{reason}; {advice}")
    if reason and rank == 0:
        print(f"{reason}; going on without Python and its questions", flush=True)
    return [name for name in names if name != "python" or not reason]


def searches_toy(config: Config) -> bool:
    """Whether search and scholar look into the toy's world."""
    return config.data == "toy" and not config.docs and config.search == "local"


def make_tools(config: Config, split: str, names: list[str]) -> list[Tool]:
    """The tools of --tools. The toy searches the world of `split`; everything else its backend."""
    return [Tool(name, *KNOWN[name], make_call(config, split, name)) for name in names]


def make_call(config: Config, split: str, name: str) -> Callable:
    """The function behind a tool."""
    if name == "python":
        return python.tool
    if searches_toy(config):
        return search.local(world.world(split, config.seed).documents[name], config.top_k)
    return search.make(
        config.search,
        scholar=name == "scholar",
        k=config.top_k,
        docs=config.docs or None,
        cache=config.cache,
        pages=config.pages,
        passage_words=config.passage_words,
        block=[host for host in config.block.split(",") if host],
    )


def training_and_held_out(
    config: Config, names: list[str], training: bool
) -> tuple[Callable[[int], Question] | None, list[Question]]:
    """The endless stream of training questions, and the held-out ones.

    Held out are --eval_data, or else questions drawn from --data, whose others are trained on.
    Without training there are only the held-out ones.
    """
    if config.data == "toy":
        # --tools takes tools away, not questions: so an arm shows what it loses.
        # Without a jail both go.
        kinds = world.TOOLS
        if "python" not in names and python.available() is not None:
            kinds = ("search", "scholar")
        numbers = range(config.eval_questions)
        held_out = [world.question("eval", config.seed, i, kinds) for i in numbers]
        return lambda i: world.question("train", config.seed, i, kinds), held_out
    if not config.data:
        raise UserError(
            "no questions: name them with --data (a JSONL file, hub:OWNER/REPO/file.jsonl, or "
            "a mix like "
            "nq/train:2,own.jsonl:1)"
        )
    limit = config.eval_questions or None
    if not training:
        source = config.eval_data or config.data
        return None, load_questions(source, limit=limit, seed=config.seed)
    loaded, held_out = split(config.data, config.eval_data, held_out=limit, seed=config.seed)
    if len(loaded) < config.questions:
        raise UserError(
            f"{config.data} leaves {len(loaded)} training questions, fewer than --questions "
            f"{config.questions} a step; "
            "give more, or lower --eval_questions or --questions"
        )
    return Questions(loaded, config.seed), held_out
