"""From a Config to everything that a run or an evaluation needs: questions, tools, format, model, sampler, folder.

The only file that knows both the toy and the real world; all checks of the environment happen here, before anything is written.
"""
import datetime
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoTokenizer

from trainer import policy as trainer
from tasks import grading
from tasks import questions as tasks
from toy import world as toy
from toy import base_model as toy_base
from config import MAY_CHANGE, Config, UserError
from tasks.chat import ChatFormat
from rollout import Driver, Setting, Trajectory, episode, reserve
from sampler import Sampler
from tasks.questions import Question
from tools import Document, python, search

Tool = Callable[[str], list[Document]]
Tools = dict[str, Tool]


@dataclass
class Run:
    """All that is alive in a run. Ranks hold equal weights and share out the questions."""
    config: Config
    folder: Path
    device: torch.device
    rank: int
    world: int
    start: Path | str                                       # the model that this run began with
    tokenizer: object
    format: object
    driver: Driver
    sampler: Sampler
    sys1_sampler: Sampler                                   # the same one, unless System 1 is frozen
    grade: Callable[[Question, str], float]
    tools: Tools
    eval_tools: Tools                                       # the toy's held-out world has a corpus of its own
    question: Callable[[int], Question]                     # the i-th of an endless stream
    eval_questions: list[Question]
    episode: Callable = episode                             # the protocol: rollout.episode, or one of your own
    policy: torch.nn.Module | None = None                   # these three only in training
    optimiser: torch.optim.Optimizer | None = None
    reference: torch.nn.Module | None = None
    skipped: int = 0                                        # steps in a row without a finite gradient

    def rollouts(self, batch: list[tuple[int, Question]], attempts: int, *, step: int | str, tools: Tools,
                 temperature: float = 1.0, top_p: float = 1.0, say=None) -> list[Trajectory]:
        """`attempts` trajectories for each (place in the batch, question), all in one running batch of the sampler."""
        setting = Setting(driver=self.driver, sampler=self.sampler, sys1_sampler=self.sys1_sampler, format=self.format,
                          tools=tools, grade=self.grade, config=self.config, step=step, temperature=temperature, top_p=top_p,
                          say=say or (lambda kind, text: None))
        episodes = [self.episode(setting, q, place, k) for place, q in batch for k in range(attempts)]
        stats, start, before = self.sampler.stats, time.perf_counter(), self.sampler.stats["decoded_tokens"]
        with tqdm(total=len(episodes), desc=f"rollouts {step}", unit="trajectory", leave=False,
                  disable=bool(self.rank or say) or not sys.stderr.isatty()) as bar:
            def watch(done: int) -> None:
                rate = (stats["decoded_tokens"] - before) / (time.perf_counter() - start)
                bar.set_postfix({"tokens/s": f"{rate:.0f}", **{n: stats[n] for n in ("running", "waiting", "pages_in_use")}},
                                refresh=False)
                bar.update(done - bar.n)
            return self.driver.run(episodes, None if bar.disable else watch)


def build(config: Config, *, training: bool, folder: Path | None = None) -> Run:
    """A Run; with `training` also policy, optimiser and, if there is a KL term, the reference.

    Nothing is written before all of this stands (but the cache). UserError lists everything that is missing.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = pick_device(config, world)
    folder = folder or run_folder(config, rank)
    start = base_model(config, rank)
    plan, grade, names, (stream, held_out), tools = environment(config, start, world, rank, device, training)
    tokenizer = load_tokenizer(start)
    form = make_format(config, tokenizer, names)
    check_lengths(config, form, getattr(stream, "loaded", []) + held_out)

    state = trainer.newest(folder) if training and config.resume else None
    cuda, host = device.type == "cuda", torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    if training:                                            # FSDP takes it to the device a layer at a time, and cuts each
        model = trainer.load_model(state[1] / "model" if state else start, host if config.fsdp else device)
    else:                                                   # only the sampler's copy goes to the device
        model = trainer.load_model(start, host, dtype=dtype)
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise UserError(f"{start} has {len(tokenizer)} tokens in its tokenizer and {known} in its model: use two that belong together")
    sizes = {"max_tokens": config.kv_tokens, "max_rows": config.rows, "device": device}
    sampler, frozen, base = Sampler(model, **sizes), None, None
    if config.system1 == "frozen" or (training and config.kl_beta):         # both need the model that the run began with
        base = trainer.load_model(start, device if config.kl_beta else host, dtype=dtype)
    if config.system1 == "frozen":
        frozen = Sampler(base, **sizes)
    lockstep = config.lockstep == "on" or (config.lockstep == "auto" and not cuda)
    driver = Driver([sampler, frozen] if frozen else [sampler], lockstep=lockstep)
    run = Run(config=config, folder=folder, device=device, rank=rank, world=world, start=start, tokenizer=tokenizer, format=form,
              driver=driver, sampler=sampler, sys1_sampler=frozen or sampler, grade=grade, tools=tools,
              eval_tools=make_tools(config, "eval", names), question=stream, eval_questions=held_out)
    if rank == 0:
        where = "the toy's world" if searches_toy(config) else f"{config.search} {config.docs}".strip()
        print(f"model {start} on {device}, {world} process(es), sampler: {sampler.path}; search: {where}; "
              f"tools: {', '.join(names)}; reward: {config.grader}\n{plan}", flush=True)
    if training:
        policy = trainer.Policy(model, bf16=cuda, checkpointing=config.checkpointing)
        run.policy = trainer.parallel(policy, fsdp=config.fsdp, device=device)
        run.optimiser = torch.optim.AdamW(run.policy.parameters(), config.lr, betas=(0.9, 0.95),
                                          weight_decay=config.weight_decay)
        run.reference = trainer.Policy(base.requires_grad_(False), bf16=cuda) if config.kl_beta else None
        if state:
            trainer.load_optimiser(state[1], run.policy, run.optimiser)
    return run


def environment(config: Config, start: Path | str, world: int, rank: int, device: torch.device, training: bool) -> tuple:
    """(memory plan, grader, tool names, questions, tools): all that comes from outside. UserError lists all that is missing."""
    problems = []

    def attempt(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except UserError as error:
            problems.append(str(error))
    attempt(check_machine, config, device)
    plan = attempt(trainer.memory_plan, start, config=config, world=world, device=device, training=training)
    grade = attempt(grading.grader, config.grader)
    names = attempt(usable_tools, config, rank) or []
    questions = attempt(load_questions, config, names, training)
    tools = attempt(make_tools, config, "train", names)
    keys = [name for name in ("SERPER_API_KEY", "JINA_API_KEY") if not os.environ.get(name)]
    if config.search == "serper" and config.pages == "jina" and len(keys) == 2:
        problems.append("JINA_API_KEY is not set either: export it, or read pages with --pages fetch")   # make names one key
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        listed = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        raise UserError(f"cannot start, {len(problems)} things are missing: {listed}")
    return plan, grade, names, questions, tools


def pick_device(config: Config, world: int) -> torch.device:
    """The process's device; joins the process group when there are several."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu or install a CUDA build of torch")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if config.device != "cpu" and torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise UserError(f"{local + 1} processes on this machine, but only {torch.cuda.device_count()} GPUs: "
                            "lower --nproc_per_node")
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    else:
        device = torch.device("cpu")
    if world > 1 and not dist.is_initialized():
        # Ranks wait for the slowest one's rollouts and for rank 0's write of a state: longer than the default of 10 minutes
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(hours=2))
    elif world == 1 and device.type == "cpu":
        torch.set_num_threads(min(config.threads, os.cpu_count() or 1))
    return device


def check_machine(config: Config, device: torch.device) -> None:
    """What the options ask of the machine."""
    if config.preset == "paper" and device.type == "cpu":
        raise UserError("--preset paper needs CUDA GPUs and PyTorch finds none; 8 of 80 GB train Qwen3-8B, one trains a 0.6B "
                        "model (--model Qwen/Qwen3-0.6B --no-fsdp)")
    if config.fsdp and not dist.is_initialized():
        raise UserError("--fsdp shards over processes; start them with torchrun --nproc_per_node=N mars.py --fsdp …")


def run_folder(config: Config, rank: int) -> Path:
    """runs/NAME/, not created yet. UserError if it exists without --resume, or the other way round, or settings differ."""
    runs = Path(config.runs)
    if not config.name:
        if config.resume:
            raise UserError("--resume needs the run's --name")
        config.name = free_name(runs, Path(config.model).name)
    if dist.is_initialized():                               # rank 0 may already create what the others still look for
        names = [config.name]
        dist.broadcast_object_list(names)
        config.name = names[0]
    folder, saved = runs / config.name, {}
    if config.resume:
        if not (folder / "config.json").exists():
            raise UserError(f"nothing to resume: there is no run at {folder}")
        saved = json.loads((folder / "config.json").read_text())
        changed = [f"{k} ({saved.get(k)} -> {v})" for k, v in vars(config).items()
                   if k not in MAY_CHANGE and saved.get(k) != v]
        if changed:
            raise UserError(f"the run at {folder} was started with other settings: {', '.join(changed)}; "
                            "resume with the same ones")
    elif folder.exists():
        raise UserError(f"{folder} exists: add --resume to go on with it, or choose another --name")
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}; choose another folder with --runs")
    if dist.is_initialized():
        dist.barrier()                                      # nobody creates the folder before all have looked
    return folder


def free_name(runs: Path, base: str) -> str:
    """base, base-2, base-3, …: the first that no run has."""
    return next(name for name in (base, *(f"{base}-{i}" for i in range(2, 100_000))) if not (runs / name).exists())


def base_model(config: Config, rank: int) -> Path | str:
    """The model to start from; the toy's is made at the first use, by rank 0."""
    if config.model != "toy":
        return config.model
    if rank == 0:
        toy_base.build(config.cache, config.seed)
    if dist.is_initialized():
        dist.barrier()
    return toy_base.build(config.cache, config.seed)


def load_tokenizer(start: Path | str):
    """The model's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(start)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a tokenizer from {start}: {str(error).splitlines()[0]}") from None


def usable_tools(config: Config, rank: int) -> list[str]:
    """The names of --tools. Where Python can't be jailed the toy goes on without it; a real run is refused."""
    names = [name for name in config.tools.split(",") if name]
    reason = python.available() if "python" in names else None
    if reason and config.data != "toy":
        raise UserError(f"{reason}; leave it out with --tools search,scholar")
    if reason and rank == 0:
        print(f"{reason}; going on without Python and its questions", flush=True)
    return [name for name in names if name != "python" or not reason]


def make_format(config: Config, tokenizer, names: list[str]):
    """How both roles speak: the toy's language if the tokenizer knows it, else the model's own chat template."""
    if "<s2>" in tokenizer.get_vocab():
        return toy.ToyFormat(tokenizer, names)
    return ChatFormat(tokenizer, tools=names, purpose=config.purpose == "on", question_in_system1=config.question_in_system1)


def searches_toy(config: Config) -> bool:
    """Whether search and scholar look into the toy's world."""
    return config.data == "toy" and not config.docs and config.search == "local"


def make_tools(config: Config, split: str, names: list[str]) -> Tools:
    """Name -> callable. The toy searches the world of `split`; everything else its backend."""
    made: Tools = {}
    for name in names:
        if name == "python":
            made[name] = python.tool
        elif searches_toy(config):
            made[name] = search.local(toy.world(split, config.seed).documents[name], config.top_k)
        else:
            made[name] = search.make(config.search, scholar=name == "scholar", k=config.top_k, docs=config.docs or None,
                                     cache=config.cache, pages=config.pages if config.search == "serper" else "none")
    return made


def load_questions(config: Config, names: list[str], training: bool) -> tuple[Callable[[int], Question] | None, list[Question]]:
    """The endless stream of training questions, and the held-out ones: --eval_data, or else drawn from --data, whose others
    are trained on. Without training only the held-out ones."""
    if config.data == "toy":
        # --tools takes tools away, not questions: so an arm shows what it loses. A machine without a jail drops both.
        kinds = toy.TOOLS if "python" in names or python.available() is None else ("search", "scholar")
        held_out = [toy.question("eval", config.seed, i, kinds) for i in range(config.eval_questions)]
        return lambda i: toy.question("train", config.seed, i, kinds), held_out
    if not config.data:
        raise UserError("no questions: name them with --data (a JSONL file, hub:OWNER/REPO/file.jsonl, or a mix like "
                        "nq/train:2,own.jsonl:1)")
    held_out = tasks.load_questions(config.eval_data or config.data, limit=config.eval_questions or None, seed=config.seed)
    if not training:
        return None, held_out
    reserved = set() if config.eval_data else {question.id for question in held_out}
    loaded = [q for q in tasks.load_questions(config.data, seed=config.seed) if q.id not in reserved]
    if len(loaded) < config.questions:
        raise UserError(f"{config.data} leaves {len(loaded)} training questions, fewer than --questions {config.questions} "
                        "a step; give more, or lower --eval_questions or --questions")

    def stream(i: int) -> Question:                         # every question once an epoch, each epoch in an order of its own
        epoch, place = divmod(i, len(loaded))
        return loaded[epoch_order(len(loaded), config.seed, epoch)[place]]
    stream.loaded = loaded
    return stream, held_out


@functools.lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def check_lengths(config: Config, form, questions: list[Question]) -> None:
    """UserError for a question that leaves no room: in System 2's context for a step, a demand and an answer, in System 1's
    prompt for a document beside the longest purpose."""
    for question in questions:
        length = len(form.system2_prompt(question.text))
        if length + config.step_tokens + reserve(config, form) > config.sys2_context:
            raise UserError(f"question {question.id} takes {length} tokens and leaves no room in --sys2_context "
                            f"{config.sys2_context}: raise it")
        frame = len(form.system1_prompt([], "", question.text)) + config.step_tokens        # a purpose is part of a step
        if config.system1 != "none" and frame >= config.sys1_prompt:
            raise UserError(f"--sys1_prompt {config.sys1_prompt} leaves no room for documents: instructions and a purpose of "
                            f"--step_tokens {config.step_tokens} take up to {frame}; raise it")
