"""Warm start: supervised training on demonstrations before RL.

A 135M model without training does not know the call format: nearly every step is malformed, every
group of attempts earns 0, and RL has no signal. A few minutes of demonstrations teach the format.

The loss is the one of RL: with advantage 1 and ratio 1 its gradient is that of the negative
log-likelihood. Each role's loss is a mean over its tokens. With a mean per sequence a short answer
would weigh as much as a long call, and the model would learn to answer at once.

    python warm_start.py --model smollm2 --data demonstrations.jsonl --out warm
    python mars.py --model warm …

A line of the file is {"messages": [{"role": …, "content": …}, …]}, and the assistant's messages
are learned. `--from_run runs/NAME --out FILE` writes a file of a run's right attempts, with the
very tokens that were sampled. A recipe needs no file (see recipes/almanac.py): `play` runs a
method's own episode with given texts in place of samples, so all tokens are those of RL.

Tests: pytest tests/test_warm_start.py
"""

import asyncio
import itertools
import json
import math
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

import grpo
import trainer
from atomic import made_once
from config import Config, UserError, fail, no_option, option, parse, parser, uses_bf16
from plumbing import folders, logbook, models
from rollout import Env, Method, Sample, Trajectory
from sampler import Completion
from tasks.chat import ChatFormat, is_mark, render
from tasks.questions import Question
from tools import Tool, discard_output, show

ROLES = ("system", "developer", "user", "assistant", "tool")
Batch = dict[str, list[Sample]]  # role -> its samples; one batch is one optimizer step
Batches = Callable[[object], Iterator[Batch]]  # tokenizer -> batches


@dataclass
class WarmStart:
    """The options, each with its help."""

    model: str = option("smollm2", "the model to start from: smollm2, a folder, a hub name")
    data: str = option("", "a file of demonstrations, as JSON lines")
    from_run: str = option("", "a run whose right attempts are written to --out, for --data")
    out: str = option("warm", "the folder to write, as transformers loads it, or the file")
    steps: int = option(64, "optimizer steps")
    demonstrations: int = option(6, "per step: an assistant's messages, or played episodes")
    lr: float = option(2e-4, "learning rate, for a 135M model; a larger model needs less")
    warmup: int = option(5, "steps of linear warm-up, then linear decay to 0")
    seed: int = option(0, "seed of the demonstrations' order")
    cache: str = option(".cache", "the folder for base models that are made here")
    bf16: Literal["auto", "on", "off"] = option("auto", "the arithmetic; auto: on CUDA")
    micro_tokens: int = option(4096, "tokens per micro-batch")
    threads: int = no_option(2)  # PyTorch's on a CPU, unless OMP_NUM_THREADS is set

    def check(self) -> None:
        """Raises UserError if an option is out of range."""
        for name in ("steps", "demonstrations", "micro_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < 1:
            raise UserError(f"--lr must be between 0 and 1, got {self.lr}")


# ---------------------------------------------------------------------------------------- training


def train(options: WarmStart, batches: Batches, folder: Path) -> None:
    """Trains the model that --model names and writes it to `folder`, with its tokenizer.

    `batches` must yield at least as many batches as steps.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(options.threads, os.cpu_count() or 1))
    if device.type != "cpu" and options.bf16 == "off":
        raise UserError("--bf16 off: attention on CUDA takes bf16 only; leave it out")
    start = models.find(options.model, options.cache)
    tokenizer = models.load_tokenizer(start)
    work = list(itertools.islice(batches(tokenizer), options.steps))
    samples = [sample for batch in work for members in batch.values() for sample in members]
    trainer.check_positions(start, max(len(sample.tokens) for sample in samples))
    model = trainer.load_model(start, device)
    bf16 = uses_bf16(options, device.type == "cuda")
    policy = trainer.Policy(model, bf16=bf16, compiler=trainer.compiler_of(device))
    optimizer = trainer.make_optimizer(policy, options.lr)
    for step, batch in enumerate(work):
        for param_group in optimizer.param_groups:
            param_group["lr"] = options.lr * trainer.schedule(step, options.warmup, options.steps)
        losses = learn(policy, optimizer, batch, options, device)
        line = ", ".join(f"{role} {loss:.3f}" for role, loss in losses.items())
        try:
            print(f"warm start: step {step + 1}/{options.steps}, nats a token: {line}", flush=True)
        except OSError as error:  # Whoever makes the folder would blame the folder.
            discard_output()
            raise UserError(f"what is printed cannot be written ({error.strerror})") from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learn(
    policy: trainer.Policy, optimizer, batch: Batch, options: WarmStart, device
) -> dict[str, float]:
    """One optimizer step. Returns each role's loss before it, in nats per token."""
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
        samples, weights, options.micro_tokens, device, pack=policy.can_pack
    )
    optimizer.zero_grad(set_to_none=True)
    stats = trainer.backward(policy, micro_batches, on_policy=True, temperature=1.0)
    if not math.isfinite(trainer.clip_gradient(policy, 1.0)):
        raise UserError("the gradient is not finite; lower --lr")
    optimizer.step()
    losses = dict.fromkeys(batch, 0.0)
    for micro_batch, outputs in zip(micro_batches, stats):
        parts = (-outputs["logprob"] * micro_batch.weight).tolist()
        for owner, part in zip(micro_batch.owner.tolist(), parts):
            losses[samples[owner].role] += part
    return losses


# ----------------------------------------------------------------------- demonstrations of a method


class DoesNotFit(Exception):
    """A demonstration is longer than the role's token limit."""


@dataclass
class Demonstrator:
    """Takes the place of the driver: nothing is sampled, and tools are called at once."""

    chat: ChatFormat

    async def sample(
        self, writer, conversation: list[int], prompt, *, max_new_tokens, stop_ids, **options
    ) -> Completion:
        """The writer's text as the role's own tokens."""
        conversation += prompt
        text = writer.say(self.chat.text(conversation))
        tokens = self.chat.encode_own(text) + [stop_ids[0]]
        if len(tokens) > max_new_tokens:
            raise DoesNotFit
        conversation += tokens
        return Completion(tokens, [0.0] * len(tokens), "stop")

    async def call(self, function: Callable, seconds: float):
        """The result of a tool or a grader."""
        return function()


def play(
    method: Method,
    config: Config,
    chat: ChatFormat,
    tools: list[Tool],
    grade: Callable[[Question, str], float],
    question: Question,
    say: dict[str, Callable[[str], str]],
) -> Trajectory:
    """Runs the method's own episode. `say[role]` maps the text of a context to the role's text."""

    def writer(words: Callable[[str], str]) -> SimpleNamespace:
        """Takes the place of a role's sampler. Its conversation is a list of tokens."""
        return SimpleNamespace(say=words, open=list, close=lambda conversation: None)

    env = Env(
        driver=Demonstrator(chat),
        samplers={role: writer(words) for role, words in say.items()},
        chat=chat,
        tools={tool.name: tool.call for tool in tools},
        grade=grade,
        config=config,
        step="demonstration",
    )
    return asyncio.run(env.play(method, question, 0, 0))


# ------------------------------------------------------------------------ demonstrations in a file


def from_file(options: WarmStart) -> Batches:
    """Batches of a file's demonstrations. Each pass over them has a new order."""
    if not options.data:
        raise UserError("--data is missing: a file of demonstrations, as JSON lines")
    path = Path(options.data)
    try:
        # splitlines() would also split at characters that JSON allows within a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--data: cannot read JSON lines in {path} ({error})") from None
    places = {f"{path}, line {n}": line for n, line in enumerate(lines, 1) if line.strip()}
    talks = {place: read_line(line, place) for place, line in places.items()}
    if not talks:
        raise UserError(f"{path} holds no demonstration")

    def batches(tokenizer) -> Iterator[Batch]:
        samples = []
        for place, talk in talks.items():
            try:
                samples += samples_of(talk, tokenizer)
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
        rng = random.Random(f"warm start {options.seed}")
        rounds = (rng.sample(samples, len(samples)) for _ in itertools.count())
        stream = itertools.chain.from_iterable(rounds)
        while True:
            batch: Batch = {}
            for sample in itertools.islice(stream, options.demonstrations):
                batch.setdefault(sample.role, []).append(sample)
            yield batch

    return batches


def read_line(line: str, place: str) -> list[dict] | dict:
    """The messages of a line, or the context that --from_run wrote. UserError if it is neither."""
    try:
        record = json.loads(line)
        if record.keys() == {"role", "ids", "texts"}:
            sampled = [logbook.unpack_ids(piece) for piece in record["ids"]][1::2]
            if any(sampled) and isinstance(record["role"], str):
                return record
        messages = record["messages"]
        json.dumps(messages, ensure_ascii=False).encode()  # ValueError for a lone surrogate
        # A template might ignore any other field of a message.
        is_valid = record.keys() == {"messages"} and all(
            message.keys() == {"role", "content"}
            and message["role"] in ROLES
            and isinstance(message["content"], str)
            for message in messages
        )
        is_valid = is_valid and messages[-1]["role"] == "assistant"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
        is_valid = False
    if not is_valid:
        raise UserError(
            f'{place}: it is not {{"messages": [{{"role": …, "content": …}}, …]}} and nothing '
            f"else, with the roles {', '.join(ROLES)}, and with the assistant's words at the end, "
            "nor a whole context of --from_run"
        )
    return messages


def samples_of(messages: list[dict] | dict, tokenizer) -> list[Sample]:
    """One sample for each of the assistant's messages: the context, and the tokens with loss.

    The model's template writes all text. It may rewrite earlier messages (Qwen3's drops their
    thoughts), so each message is rendered with only those before it. A run's context is one sample.
    """
    if isinstance(messages, dict):
        return [sample_of(messages, tokenizer)]
    marks = {i for i, token in tokenizer.added_tokens_decoder.items() if is_mark(token)}
    marks.discard(tokenizer.unk_token_id)
    samples = []
    for message in messages:  # A text with one of the model's marks could forge a turn.
        if marks.intersection(tokenizer.encode(message["content"], add_special_tokens=False)):
            raise UserError(f"a text contains a mark of the model's own: {message['content']:.80}")
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        context = render(messages[:number], tokenizer, True)
        text = render(messages[: number + 1], tokenizer, False)  # with the message
        tokens = tokenizer.encode(text.removeprefix(context), add_special_tokens=False)
        ends = [i for i, token in enumerate(tokens) if token in marks]
        if not ends or not text.startswith(context):
            raise UserError(
                "the model's chat template rewrites a prompt, or does not end a message with a mark"
            )
        # Templates write a line break after the mark. RL never samples it, so it is not learned.
        tokens = tokens[: ends[-1] + 1]
        sample = Sample("assistant", 0, 0)
        sample.append_given(tokenizer.encode(context, add_special_tokens=False))
        sample.append_sampled(Completion(tokens, [0.0] * len(tokens), "stop"))
        samples.append(sample)
    return samples


# ----------------------------------------------------------------------- demonstrations of a run


def from_run(run: Path) -> list[dict]:
    """The contexts of a run's right attempts at training questions, without repetitions."""
    keys = {}  # (role, *ids) -> None, in the order of the files
    for path in folders.rollout_files(run).values():
        for record in folders.read_lines(path):
            if record["split"] == "train" and "ids" in record and (record["reward"] or 0) >= 1:
                keys |= dict.fromkeys((c["role"], *c["ids"]) for c in contexts_of(record))
    if not keys:
        raise UserError(f"{run} holds no right attempt at a training question with its token ids")
    tokenizer = models.load_tokenizer(run / "checkpoint")
    # The texts are for human readers. Later they show whether a tokenizer is the run's.
    return [{"role": role, "ids": ids, "texts": texts_of(ids, tokenizer)} for role, *ids in keys]


def contexts_of(context: dict) -> Iterator[dict]:
    """A context of a rollout record, and those that its turns opened."""
    yield context
    for turn in context.get("turns", ()):
        for reader in turn["chunks"]:
            yield from contexts_of(reader)


def texts_of(ids: list[str], tokenizer) -> list[str]:
    """The text of each piece of a context."""
    return [tokenizer.decode(logbook.unpack_ids(piece)) for piece in ids]


def sample_of(context: dict, tokenizer) -> Sample:
    """The sample of a context of `from_run`. UserError if another tokenizer made its tokens."""
    if texts_of(context["ids"], tokenizer) != context["texts"]:
        raise UserError("the demonstrations' tokens are not this model's: take the run's --model")
    sample = Sample(context["role"], 0, 0)
    for number, piece in enumerate(map(logbook.unpack_ids, context["ids"])):
        if number % 2 == 0:  # Given and sampled pieces alternate.
            sample.append_given(piece)
        else:
            sample.append_sampled(Completion(piece, [0.0] * len(piece), "stop"))
    return sample


# ------------------------------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        options = WarmStart(**parse(parser(WarmStart, __doc__), arguments))
        options.check()
        out = Path(options.out)
        if os.path.lexists(out):
            raise UserError(f"{out} exists: choose another --out")
        if options.from_run:
            contexts = from_run(Path(options.from_run))
            folders.write_whole(out, folders.as_lines(contexts))
            show(f"{len(contexts)} contexts written to {out}: learn them with --data {out}")
            return 0
        batches = from_file(options)
        trained = []
        made_once(out, lambda path: trained.append(train(options, batches, path)))
        if not trained:  # another process made the folder while this one waited
            raise UserError(f"{out} exists: choose another --out")
        show(f"written to {out}: use it with --model {out}")
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        fail("interrupted; no half-written folder is left, so start again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
