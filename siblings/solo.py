"""Shared by MIFO and BVPO: one role that answers about a page at once, and written answers.

Nobody sampled a written answer: it is a teacher's, or one of a pair. It becomes a trajectory like
any other. The trainer's own log-probs take the place of the sampler's, so that ρ is 1.

    <doc> ada joined labs . ada born 1968 . … <purpose> employer of ada <eot>      the prompt
    labs birth <answer> 1968 <eot>                                                 the answer

Only the last word is graded. The pages are those of marsrl_toy.py.

Tests: pytest tests/test_mifo.py tests/test_bvpo.py
"""

import shlex
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import kernels
import trainer
from config import Config, UserError, option
from plumbing.start import Run
from rollout import Context, Env, Sample, Trajectory, Turn
from sampler import Completion
from tasks.format import Action, Format
from tasks.questions import Question
from tools import Tool
from toy.language import ToyFormat

ROLE = "solver"
AT_ONCE = "at once"  # the kind of question whose prompt ends in <answer>
# Written answers need these values.
FIXED = {"loss_mean": "sample", "temperature": 1.0, "inner_steps": 1, "grader": "em"}
FIXED |= {"fsdp": False, "lora_rank": 0}
UNREAD = {"tools": "", "search": "local", "docs": "", "top_k": 3}  # by methods without tools
# train.main needs at least one tool, though nobody calls any.
NO_TOOL = Tool("none", "argument", "nobody calls it", lambda argument: [])


@dataclass
class SoloConfig(Config):
    """Options with defaults for these toys."""

    tools: str = ""  # nobody calls one
    context: int = option(40, "tokens of the longest sample", heading="limits")
    answer_tokens: int = option(6, "tokens of an answer, with its mark")

    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.context

    def check(self, training: bool) -> None:
        """Refuses other questions than the toy's, and other values than FIXED."""
        super().check(training)
        self.at_least(1, "answer_tokens")
        if self.data != "toy":
            raise UserError("only the toy's questions have written answers: leave --data out")
        refuse_others(self, FIXED | UNREAD if training else {})


def refuse_others(config: Config, values: dict) -> None:
    """UserError if an option has another value than the one that its method can honour."""
    for name, value in values.items():
        if getattr(config, name) != value:
            flag = f"--no-{name}" if value is False else f"--{name} {shlex.quote(str(value))}"
            raise UserError(f"this method needs {flag}")


class Language(ToyFormat):
    """How the role speaks."""

    def prompt(self, role: str, *, question: str, at_once: bool = False) -> list[int]:
        """The page, then the question, which comes after the last full stop."""
        page, stop, request = question.rpartition(" . ")
        prompt = [self.control["<doc>"], *self.encode(page + stop)]
        prompt += [self.control["<purpose>"], *self.encode(request), self.eot]
        return [*prompt, self.control["<answer>"]] if at_once else prompt

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """The answer is the last word before <eot>."""
        words = self.text(tokens).split()
        if words[-1:] != ["<eot>"]:
            return Action(error="the answer was cut")
        return self.read_answer(words[-2:-1])


def prompt_of(chat: Format, question: Question) -> list[int]:
    """The prompt of a question."""
    return chat.prompt(ROLE, question=question.text, at_once=question.source == AT_ONCE)


async def episode(env: Env, trajectory: Trajectory) -> None:
    """One answer."""
    async with Context(env, trajectory, ROLE) as solver:
        prompt = prompt_of(env.chat, trajectory.question)
        completion = await solver.write(prompt, env.config.answer_tokens, 0)
    set_answer(solver, env.chat, completion.tokens)


def set_answer(solver: Context, chat: Format, tokens: list[int]) -> None:
    """Records a completion as the context's turn and the trajectory's answer."""
    action = chat.parse(tokens)
    problem = action.error and f"malformed: {action.error}"
    solver.turns.append(Turn(tokens, action, problem))
    solver.trajectory.answer = action.answer
    solver.trajectory.ended = "no answer" if action.error else "answer"


def written(
    chat: Format, question: Question, place: int, attempt: int, text: str, reward: float
) -> Trajectory:
    """A trajectory with the completion `text`, whose words are tokens.

    Its log-probs are 0: the caller replaces them by those of `score`.
    """
    trajectory = Trajectory(question, place, attempt, reward=reward)
    solver = Context(None, trajectory, ROLE)
    tokens = chat.tokenizer.convert_tokens_to_ids(text.split())
    solver.sample.append_given(prompt_of(chat, question))
    solver.sample.append_sampled(Completion(tokens, [0.0] * len(tokens), "stop"))
    solver.sample.reward = reward
    set_answer(solver, chat, tokens)
    return trajectory


def of_all_ranks(run: Run, questions: list[Question]) -> list[Question]:
    """The questions of all ranks, in the order of the stream, as one process has them."""
    if run.ranks == 1:
        return questions
    parts = [None] * run.ranks
    dist.all_gather_object(parts, questions)
    return sorted(sum(parts, []), key=lambda question: int(question.id.rpartition("-")[2]))


@torch.no_grad()
def score(policy: trainer.Policy, samples: list[Sample]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies (nats) of each sample's own tokens: a tensor for each sample."""
    weights = [torch.ones(len(sample.tokens)) for sample in samples]
    lengths = [len(sample.tokens) - 1 for sample in samples]
    device = next(policy.parameters()).device
    batch = trainer.make_micro_batch(samples, weights, lengths, device)
    numbers = kernels.linear_logprob(*policy.hidden(batch), batch.target)
    counts = [sum(sample.mask) for sample in samples]
    logprobs, entropies = (values.cpu().split(counts) for values in numbers)
    return list(logprobs), list(entropies)


def words(config: SoloConfig, tools: list[Tool]):
    """Refuses chat models."""
    raise UserError("this method speaks its toy's language: leave --model out")


def fits(config: SoloConfig, chat: Format, question: Question) -> None:
    """Raises UserError if a question leaves no room for an answer."""
    longest = len(prompt_of(chat, question)) + config.answer_tokens
    if longest > config.context:
        raise UserError(
            f"question {question.id} with an answer takes up to {longest} tokens, more than "
            f"--context {config.context}: raise it"
        )
