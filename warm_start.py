"""Warm start: supervised training on demonstrations, before RL has anything to choose from.

The paper starts from 7B models, which speak a call format when they are told of it. A model of
135M does not: untaught, nearly every step is malformed and every group of attempts earns 0. A few
minutes of demonstrations give it the form.

RL's own loss does the supervised training. With advantage 1 and ratio 1 the gradient of
grpo.grpo_loss is that of the negative log-likelihood, so packing, kernels and optimizer are RL's as
well. Each role's loss is a mean over its tokens. A mean per sequence would let a
short answer weigh as much as a long call, and the model would learn to answer at once.

    python -m warm_start --data demonstrations.jsonl --out warm
    python -m warm_start --data atlas --out warm     demonstrations of recipes/atlas.py
    python mars.py --model warm …

A line of the file is {"messages": [{"role": …, "content": …}, …]}; the assistant's messages are
learned. A line is refused if the model could not learn just what it says: for a role of another
name, a field that a template may not read, a mark such as <|im_end|> within a text.

`play` makes demonstrations of any method instead. It runs the method's own episode, with given
texts where a role would sample. So the contexts are those of RL to the last token.

Tests: pytest tests/test_warm_start.py
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import grpo
import trainer
from config import MOST_THREADS, Config, UserError, fail, parse, parser, uses_bf16
from plumbing import smollm2, surroundings
from plumbing.cache import made_once
from rollout import Env, Method, Sample, Trajectory
from sampler import Completion
from tasks.format import Format
from tasks.questions import Question
from tools import Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
Batch = dict[str, list[Sample]]  # role -> its samples; one batch is one optimizer step
Batches = Callable[[object], Iterator[Batch]]  # makes them out of a tokenizer


@dataclass
class WarmStart:
    """The options, each with its reason."""

    model: str = smollm2.NAME  # what to start from: smollm2, a folder, a hub name
    data: str = "atlas"  # JSON lines of {"messages": […]}; or atlas, atlas-long
    out: str = "warm"  # the folder to write, as transformers loads it
    steps: int = 64  # optimizer steps; the atlas preset takes 20
    demonstrations: int = 6  # per step
    lr: float = 2e-4  # of a 135M model; a larger one wants less
    warmup: int = 5  # steps of linear warm-up; then the rate falls in a line
    seed: int = 0  # of the demonstrations' order, and of the atlas
    cache: str = ".cache"  # where a model that is made here is kept
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is one
    bf16: Literal["auto", "on", "off"] = "auto"  # the arithmetic; auto: on CUDA
    threads: int = 2  # PyTorch's, on a CPU
    micro_tokens: int = 4096  # tokens per micro-batch
    share_prefixes: bool = False  # compute what demonstrations begin with alike once

    def check(self) -> None:
        """Refuses what makes no sense: UserError with one sentence."""
        for name in ("steps", "demonstrations", "threads", "micro_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.threads > MOST_THREADS:
            raise UserError(f"--threads {self.threads}: give at most {MOST_THREADS}")
        if not 0 < self.lr < 1:
            raise UserError(f"--lr must lie between 0 and 1, got {self.lr}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")


# ---------------------------------------------------------------------------------------- training


def train(
    options: WarmStart,
    start: Path | str,
    batches: Batches,
    folder: Path,
) -> None:
    """Trains the model at `start` and writes it to `folder`, with its tokenizer.

    There have to be at least as many batches as steps.
    """
    device = torch.device("cpu")
    if options.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    tokenizer = surroundings.load_tokenizer(start)
    model = trainer.load_model(start, device, training=True)
    surroundings.check_vocabulary(tokenizer, model, start)
    # A table of positions ends; rotations go on.
    longest = math.inf
    if not any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        longest = getattr(model.config, "max_position_embeddings", math.inf)
    policy = trainer.Policy(model, bf16=uses_bf16(options, device.type == "cuda"))
    optimizer = trainer.make_optimizer(policy, options.lr, weight_decay=0.0)
    for step, batch in zip(range(options.steps), batches(tokenizer)):
        length = max(len(sample.tokens) for sample in itertools.chain(*batch.values()))
        if length > longest:
            raise UserError(f"a demonstration has {length} tokens, the model {longest} positions")
        for parameters in optimizer.param_groups:
            parameters["lr"] = options.lr * trainer.schedule(step, options.warmup, options.steps)
        losses = learn(policy, optimizer, batch, options, device)
        listed = ", ".join(f"{role} {loss:.3f}" for role, loss in losses.items())
        print(f"warm start: step {step + 1}/{options.steps}, nats a token: {listed}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learn(
    policy: trainer.Policy, optimizer, batch: Batch, options: WarmStart, device
) -> dict[str, float]:
    """One optimizer step. Returns each role's negative log-likelihood before it, nats a token."""
    samples = []
    weights = []
    for members in batch.values():
        masks = [torch.tensor(sample.mask) for sample in members]  # [T] each
        count = sum(sum(sample.mask) for sample in members)
        samples += members
        weights += grpo.token_weights(masks, count, mean="token")
    for sample in samples:
        sample.advantage = 1.0
    micro_batches = trainer.micro_batches(
        samples, weights, options.micro_tokens, device, share_prefixes=options.share_prefixes
    )
    for micro_batch in micro_batches:
        micro_batch.old_logprob = None  # ρ is 1
    optimizer.zero_grad(set_to_none=True)
    references = [None] * len(micro_batches)
    # As ρ is 1, nothing is clipped.
    objective = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
    stats = trainer.backward(policy, micro_batches, references, **objective)
    if not math.isfinite(trainer.gradient_norm(policy, 1.0)):
        raise UserError("the gradient is not finite; lower --lr")
    optimizer.step()
    losses = dict.fromkeys(batch, 0.0)
    for micro_batch, numbers in zip(micro_batches, stats):
        shares = (-numbers["logprob"] * micro_batch.weight).tolist()
        for owner, part in zip(micro_batch.owner.tolist(), shares):
            losses[samples[owner].role] += part
    return losses


# ----------------------------------------------------------------------- demonstrations of a method


@dataclass
class Writer:
    """Sits where a role's sampler would: `say` makes what it writes out of what it has read."""

    say: Callable[[str], str]

    def open(self) -> list[int]:
        return []

    def close(self, conversation: list[int]) -> None:
        pass


class DoesNotFit(Exception):
    """A demonstration is longer than the method lets a role write."""


@dataclass
class Demonstrator:
    """Sits where the driver would: nobody samples, and tools are called at once."""

    chat: Format

    async def sample(
        self, writer: Writer, conversation: list[int], given, *, max_new_tokens, stop_ids, **options
    ) -> Completion:
        """What the writer says, as the role's own tokens."""
        conversation += given
        said = self.chat.encode(writer.say(self.chat.decode(conversation))) + [stop_ids[0]]
        if len(said) > max_new_tokens:
            raise DoesNotFit
        conversation += said
        return Completion(said, [0.0] * len(said), "stop")

    async def call(self, function: Callable, seconds: float):
        """The result of a tool or a grader."""
        return function()


def play(
    method: Method,
    config: Config,
    chat: Format,
    tools: list[Tool],
    grade: Callable[[Question, str], float],
    question: Question,
    say: dict[str, Callable[[str], str]],
) -> Trajectory:
    """The method's own episode, with `say` (role -> what it writes) in place of a model."""
    env = Env(
        driver=Demonstrator(chat),
        samplers={role: Writer(words) for role, words in say.items()},
        chat=chat,
        tools={tool.name: tool.call for tool in tools},
        grade=grade,
        config=config,
        step="demonstration",
    )
    return asyncio.run(env.play(method, question, 0, 0))


# ------------------------------------------------------------------------ demonstrations in a file


def from_file(options: WarmStart) -> Batches:
    """Batches of a file's demonstrations, in a new order every time that all were seen."""
    conversations = read(Path(options.data))

    def batches(tokenizer) -> Iterator[Batch]:
        samples = []
        for number, messages in conversations:
            with place_of_errors(f"{options.data}, line {number}"):
                samples.append(sample_of(messages, tokenizer))
        rng = random.Random(f"warm start {options.seed}")
        orders = (rng.sample(samples, len(samples)) for _ in itertools.count())
        stream = itertools.chain.from_iterable(orders)
        while True:
            yield {"assistant": list(itertools.islice(stream, options.demonstrations))}

    return batches


def read(path: Path) -> list[tuple[int, list[dict]]]:
    """(its number, its messages) of every line. UserError names the first line that is wrong."""
    try:
        # Not splitlines(), which also cuts at marks that JSON allows within a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"cannot read the demonstrations in {path} ({reason}): give a file of JSON lines, "
            "atlas or atlas-long"
        ) from None
    conversations = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with place_of_errors(f"{path}, line {number}"):
            conversations.append((number, messages_of(line)))
    if not conversations:
        raise UserError(f"{path} holds no demonstration")
    return conversations


@contextlib.contextmanager
def place_of_errors(place: str) -> Iterator[None]:
    """Puts the place in front of what is refused within."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def messages_of(line: str) -> list[dict]:
    """A line's messages; UserError says what is wrong with it."""
    try:
        record = json.loads(line, object_pairs_hook=without_repeats)
        messages = record["messages"]
        known = all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages)
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known or not messages:
        raise UserError('it is not {"messages": [{"role": …, "content": …}, …]}')
    fields = {name for message in messages for name in message} - {"role", "content"}
    if "tools" in record:
        fields.add("tools")
    if fields:
        raise UserError(f'"{min(fields)}" is not read: write everything into the contents')
    for message in messages:
        if message["role"] not in ROLES:
            raise UserError(f"the role {message['role']!r} is not one of {', '.join(ROLES)}")
        if message["content"] != message["content"].encode("utf-8", "ignore").decode():
            raise UserError("a text holds half a character, a lone surrogate")
        if message["role"] == "assistant" and not message["content"].strip():
            raise UserError("the assistant says nothing")
    if messages[0]["role"] == "assistant":
        raise UserError("the assistant speaks first, with nothing to answer")
    if messages[-1]["role"] != "assistant":
        raise UserError("the assistant says nothing after the last message")
    return messages


def without_repeats(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object; ValueError if it names a field twice, of which Python would drop the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a field stands twice")
    return made


def sample_of(messages: list[dict], tokenizer) -> Sample:
    """A conversation as one sample: the assistant's messages carry loss, each with its end mark.

    The model's template writes everything. UserError if it rewrites earlier messages when later
    ones are added, or if a text holds a mark of the model's own, with which it could forge a turn.
    """
    marks = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    for message in messages:
        found = marks.intersection(tokenizer.encode(message["content"], add_special_tokens=False))
        if found:
            raise UserError(
                f"a text holds the model's mark {tokenizer.decode(min(found))}: write it otherwise"
            )
    sample = Sample("assistant", 0, 0)
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = rendered(messages[:number], tokenizer, True)
        through = rendered(messages[: number + 1], tokenizer, False)
        if not through.startswith(before):
            raise UserError("the model's chat template does not begin an answer as it is asked for")
        if not before.startswith(written):
            raise UserError(
                "the model's chat template rewrites earlier messages when later ones are added: "
                "give lines with one message of the assistant each"
            )
        said = tokenizer.encode(through[len(before) :], add_special_tokens=False)
        ends = [i for i, token in enumerate(said) if token in marks]
        if not ends:
            raise UserError("the model's chat template does not close a message with a mark")
        # Templates write a line break after the mark. RL never samples it, so it is not learned.
        said = said[: ends[-1] + 1]
        given = before[len(written) :]
        sample.append_given(tokenizer.encode(given, add_special_tokens=False))
        sample.append_sampled(Completion(said, [0.0] * len(said), "stop"))
        end = tokenizer.decode(said[-1])
        written = through[: through.rindex(end) + len(end)]
    return sample


def rendered(messages: list[dict], tokenizer, prompt: bool) -> str:
    """The template's text; with `prompt` it ends where the assistant begins."""
    try:  # the template is a program from outside
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:
        raise UserError(f"the model's chat template failed: {error}") from None


# ------------------------------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    written = []
    try:
        options = WarmStart(**parse(parser(WarmStart, __doc__), arguments))
        options.check()
        folder = Path(os.path.normpath(options.out))  # "x/.." is the folder that is there
        if os.path.lexists(folder):
            raise UserError(f"{folder} exists: choose another --out")
        batches = demonstrations(options)
        start = options.model
        if start == smollm2.NAME:
            start = smollm2.build(options.cache)

        def make(unfinished: Path) -> None:
            train(options, start, batches, unfinished)
            written.append(folder)

        made_once(folder, make, option="--out")
        if not written:  # another process made it, perhaps from other demonstrations
            raise UserError(f"another process wrote {folder} meanwhile: choose another --out")
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        if written and folder.exists():
            fail(f"interrupted when {folder} was written already, whole")
        else:
            fail("interrupted: no folder was written; start again")
        return 130
    print(f"written to {folder}: use it with --model {folder}")
    return 0


def demonstrations(options: WarmStart) -> Batches:
    """What --data names."""
    from recipes import atlas

    if options.data in atlas.PRESETS:
        return atlas.demonstrations(options.data, options.seed, options.demonstrations)
    return from_file(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
