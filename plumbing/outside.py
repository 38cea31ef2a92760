"""What a run needs from outside: this machine, tools, questions, servers, the model to start from.

`environment` checks all of this before any work, and one sentence names everything that is missing.
It also chooses between the toy and the real world.

Tests: pytest tests/test_mars.py tests/test_credit.py
"""

import datetime
import functools
import importlib.util
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import kernels
import processes
import tasks.questions
import trainer
from atomic import reason
from config import Config, UserError, uses_bf16
from plumbing import models
from sampler import vllm
from tasks import grading
from tasks.questions import Question
from tools import KNOWN, Tool, python, search
from toy import base_model, world

# How long a rank waits for another. One rank's rollouts may take hours longer than another's, but
# ranks meet after them on the CPU (gloo). A long wait between GPUs (NCCL) is an error.
CPU_PATIENCE = datetime.timedelta(days=1)
GPU_PATIENCE = datetime.timedelta(minutes=30)


@dataclass
class Machine:
    """The device and the rank of this process."""

    device: torch.device
    rank: int
    ranks: int
    bf16: bool  # whether sampler and trainer compute in bf16; else in fp32

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights that are not trained."""
        return torch.bfloat16 if self.bf16 else torch.float32


def environment(
    config: Config,
    machine: Machine,
    *,
    training: bool,
    start: Path | str | None = None,
    more_tools: Sequence[Tool] = (),
    questions: Callable[[Config, list[str], bool], tuple] | None = None,
    grade: Callable[[Question, str], float | None] | None = None,
    base_model: Callable[[str, int], Path] = base_model.build,
) -> dict:
    """Fields of a Run, and "servers" and "kv_tokens". UserError lists all that is missing.

    `start` replaces --model. A fork can bring tools, a function in place of
    `training_and_held_out`, a grader, and a function of (--cache, --seed) that makes the model of
    `--model toy`.
    """
    problems = []

    def collect_problem(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except UserError as error:
            problems.append(str(error))

    collect_problem(check_machine, config, machine)
    tracker = importlib.util.find_spec(config.track)  # a folder without __init__.py has no origin
    if training and config.track != "none" and not (tracker and tracker.origin):
        problems.append(f"--track {config.track} needs its package: pip install {config.track}")
    grade = grade or collect_problem(grading.grader, config.grader)
    names = collect_problem(usable_tools, config, machine.rank, more_tools) or []
    pair = collect_problem(questions or training_and_held_out, config, names, training)
    question, held_out = pair or (None, [])
    tools = collect_problem(make_tools, config, "train", names) or []
    eval_tools = collect_problem(make_tools, config, "eval", names) or []
    urls = [url for url in config.server.split(",") if url]
    servers = collect_problem(vllm.connect, urls, config.tool_seconds) if config.server else []
    if start is None and config.model != "toy":
        start = collect_problem(models.find, config.model, config.cache)
    elif start is None and not problems:  # it takes minutes, so only for a run that can start
        start = collect_problem(base_model, config.cache, config.seed)
    plan = None
    if start:
        collect_problem(trainer.check_positions, start, config.longest())
        sizes = {"longest": config.longest(), "world": machine.ranks, "device": machine.device}
        sizes |= {"config": config, "training": training}
        plan = collect_problem(trainer.memory_plan, start, **sizes)
    problems = list(dict.fromkeys(problems))  # both splits can have the same problem
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        items = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        raise UserError(f"cannot start, {len(problems)} things are missing: {items}")
    kv_tokens, memory = plan
    return {
        "start": start,
        "memory": memory,
        "kv_tokens": kv_tokens,
        "servers": servers,
        "grade": grade,
        "question": question,
        "eval_questions": held_out,
        "tools": tools + list(more_tools),
        "eval_tools": eval_tools + list(more_tools),
    }


# ------------------------------------------------------------------------------- the machine


def place(config: Config) -> Machine:
    """This process's device and rank, from torchrun's variables."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        rank, ranks, local = (int(os.environ.get(name, value)) for name, value in defaults.items())
        if not 0 <= rank < ranks or local < 0:
            raise ValueError
    except ValueError:
        raise UserError(f"{', '.join(defaults)} are not what torchrun sets: unset them") from None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if local >= gpus:
            raise UserError(
                f"more processes than this machine's {gpus} GPUs: lower --nproc_per_node"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return Machine(device, rank, ranks, uses_bf16(config, device.type == "cuda"))


def join(config: Config) -> Machine:
    """This process's place. If there are several processes, it joins their group."""
    machine = place(config)
    cuda = machine.device.type == "cuda"
    if machine.ranks > 1 and not dist.is_initialized():
        sys.excepthook = processes.end_at_once
        # Objects, such as samples, go by way of the CPU.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        try:
            dist.init_process_group(backend, timeout=GPU_PATIENCE)
        except ValueError as error:
            raise UserError(
                f"WORLD_SIZE is {machine.ranks}, but this is none of torchrun's processes "
                f"({error}): start with torchrun, or unset WORLD_SIZE"
            ) from None
        except RuntimeError as error:
            raise UserError(
                f"{machine.ranks} processes cannot reach each other ({reason(error)}); between "
                "machines set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network's interface"
            ) from None
        gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
        gloo._set_default_timeout(CPU_PATIENCE)
        if cuda:
            # GPUs that cannot reach each other fail now, not after an hour of rollouts.
            dist.all_reduce(torch.zeros(1, device=machine.device))
    elif machine.ranks == 1 and not cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(config.threads, os.cpu_count() or 1))
    return machine


def check_machine(config: Config, machine: Machine) -> None:
    """UserError if the machine cannot do what options and environment variables ask for."""
    cuda = machine.device.type == "cuda"
    if config.bf16 == "off" and cuda:
        raise UserError("--bf16 off: attention on CUDA takes bf16 only; leave it out")
    kernels.use_triton(torch.zeros(0, device=machine.device))  # UserError for a bad MARS_KERNELS
    if config.fsdp and machine.ranks == 1:
        raise UserError("--fsdp shards over processes: start with torchrun, or give --no-fsdp")
    if 0 < config.max_calls < machine.ranks:
        raise UserError(f"--max_calls must be at least 1 for each of {machine.ranks} processes")


# ------------------------------------------------------------------------------- tools


def usable_tools(config: Config, rank: int, more_tools: Sequence[Tool]) -> list[str]:
    """The names of --tools that are not among `more_tools`. UserError for an unknown name.

    Where Python can't be jailed the toy goes on without it; a real run is refused.
    """
    extras = [tool.name for tool in more_tools]
    names = [name.removesuffix(":raw") for name in config.tools.split(",") if name]
    choices = [*KNOWN, *extras]
    unknown = [name for name in names if name not in choices]
    if unknown:
        raise UserError(f"--tools: unknown tool '{unknown[0]}'; choose from {','.join(choices)}")
    names = [name for name in dict.fromkeys(names) if name not in extras]
    if not names and not extras:
        raise UserError("--tools is empty: at least one of search, scholar, python is needed")
    obstacle = python.available() if "python" in names else None
    if obstacle:
        names.remove("python")
        if config.data != "toy" or not names:
            raise UserError(f"{obstacle}; leave python out of --tools")
        if rank == 0:
            print(f"{obstacle}; going on without Python and its questions", flush=True)
    return names


def make_tools(config: Config, split: str, names: list[str]) -> list[Tool]:
    """The tools of --tools. The toy searches the world of `split`, other runs a back end."""
    return [Tool(name, *KNOWN[name], make_call(config, split, name)) for name in names]


def make_call(config: Config, split: str, name: str) -> Callable:
    """The function behind a tool."""
    if name == "python":
        return python.tool
    if config.data == "toy" and not config.docs and config.search == "local":
        return search.local(world.world(split, config.seed).documents[name], config.top_k)
    docs = config.eval_docs if split == "eval" and config.eval_docs else config.docs
    return search.make(
        config.search,
        scholar=name == "scholar",
        k=config.top_k,
        docs=docs or None,
        cache=config.cache,
        pages=config.pages,
        passage_words=config.passage_words,
        block=config.block.split(","),
    )


# ------------------------------------------------------------------------------- questions


def training_and_held_out(
    config: Config, names: list[str], training: bool
) -> tuple[Callable[[int], Question] | None, list[Question]]:
    """The endless stream of training questions, and the held-out ones.

    The held-out questions are those of --eval_data. Without it they are drawn from --data, and
    training has the rest. Without training there is no stream.
    """
    if config.data == "toy":
        # --tools removes tools but not their questions, so that accuracies can be compared. Only
        # where Python cannot be jailed are its questions removed too.
        kinds = world.TOOLS
        if "python" not in names and python.available() is not None:
            kinds = ("search", "scholar")
        numbers = range(config.eval_questions)
        held_out = [world.question("eval", config.seed, i, kinds) for i in numbers]
        return lambda i: world.question("train", config.seed, i, kinds), held_out
    if not config.data:
        raise UserError("no questions: name them with --data, a JSONL file or a set such as nq")
    limit = config.eval_questions or None
    if not training:
        source = config.eval_data or config.data
        return None, tasks.questions.load_questions(source, limit=limit, seed=config.seed)
    rest, held_out = tasks.questions.split(
        config.data, config.eval_data, held_out=limit, seed=config.seed
    )
    if len(rest) < config.questions:
        raise UserError(
            f"{config.data} leaves {len(rest)} training questions, fewer than --questions "
            f"{config.questions} a step; give more, or lower --eval_questions or --questions"
        )
    return Questions(rest, config.seed), held_out


class Questions:
    """Training questions 0, 1, 2, …: each once per epoch. Every epoch has another order."""

    def __init__(self, loaded: list[Question], seed: int):
        self.loaded = loaded
        self.seed = seed
        self.order = functools.lru_cache(maxsize=2)(self.draw)  # a step may need two epochs

    def __call__(self, i: int) -> Question:
        epoch, place = divmod(i, len(self.loaded))
        return self.loaded[self.order(epoch)[place]]

    def draw(self, epoch: int) -> list[int]:
        """An epoch's order of questions. Each part of it has about the same share of every set.

        A set's questions lie at equal distances, and the place of its first one is random. In a
        fully random order a step once had six questions of one kind in eight, and its update
        taught that kind's habits to the other.
        """
        sizes = Counter(question.source for question in self.loaded)
        counts = Counter()  # source -> its questions so far
        offsets = {s: random.Random(f"{self.seed} {epoch} {s}").random() for s in sizes}
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.loaded), generator=generator).tolist()
        positions = {}
        for index in shuffled:
            source = self.loaded[index].source
            counts[source] += 1
            positions[index] = (counts[source] - offsets[source]) / sizes[source]
        return sorted(shuffled, key=positions.__getitem__)
