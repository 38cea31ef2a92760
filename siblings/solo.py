"""What MIFO and BVPO share: one role reads a page and answers in one go; and written answers.

A written answer is one that nobody sampled: a teacher's, or one of a pair. It becomes a trajectory
like any other. The trainer's own log-probs stand in the place of a sampler's, so that ρ is 1.

    <doc> ada joined labs . ada born 1968 . … <purpose> employer of ada <eot>      is given
    labs birth <answer> 1968 <eot>                                                 is answered

What counts is the last word. The pages are those of marsrl_toy.py.

Tests: pytest tests/test_mifo.py tests/test_bvpo.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import kernels
import trainer
from config import Config, UserError, option
from plumbing.start import Run
from rollout import Completion, Context, Env, Sample, Trajectory, Turn
from tasks.format import Action, Format
from tasks.questions import Question
from tools import Tool
from toy.language import ToyFormat

ROLE = "solver"
AT_ONCE = "at once"  # the kind of question whose prompt ends in <answer>
# What a written answer's loss, and the state between steps, are made for.
FIXED = {"loss_mean": "sample", "temperature": 1.0, "inner_steps": 1, "grader": "em"}
FIXED |= {"resume": False, "fsdp": False, "lora_rank": 0}
# train.main needs at least one tool, though nobody calls any.
NO_TOOL = Tool("none", "argument", "nobody calls it", lambda argument: [])


@dataclass
class SoloConfig(Config):
    """Defaults for these toys."""

    tools: str = ""  # nobody calls one
    context: int = option(40, "tokens of the longest sample", heading="limits")
    answer_tokens: int = option(6, "an answer, its mark included")

    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.context

    def check(self, training: bool) -> None:
        """Refuses what the written answers, or the state between steps, cannot work with."""
        super().check(training)
        self.at_least(1, "answer_tokens")
        if self.data != "toy":
            raise UserError("written answers are known for the toy's questions: leave --data out")
        for name, value in FIXED.items() if training else ():
            if getattr(self, name) != value:
                raise UserError(f"--{name} is not for this method: its loss is made for {value}")


class Language(ToyFormat):
    """How the role speaks."""

    def prompt(self, role: str, *, question: str, at_once: bool = False) -> list[int]:
        """The page, then what is asked about it: what stands behind the last full stop."""
        page, stop, asked = question.rpartition(" . ")
        made = [self.control["<doc>"], *self.encode(page + stop)]
        made += [self.control["<purpose>"], *self.encode(asked), self.eot]
        return [*made, self.control["<answer>"]] if at_once else made

    def parse(self, tokens: list[int], *, final: bool = False) -> Action:
        """The last word before the end is the answer."""
        words = self.text(tokens).split()
        if words[-1:] != ["<eot>"]:
            return Action(error="the answer was cut")
        return self.read_answer(words[-2:-1])


def prompt_of(chat: Format, question: Question) -> list[int]:
    """What the role is given."""
    return chat.prompt(ROLE, question=question.text, at_once=question.source == AT_ONCE)


async def episode(env: Env, trajectory: Trajectory) -> None:
    """One answer."""
    async with Context(env, trajectory, ROLE) as solver:
        given = prompt_of(env.chat, trajectory.question)
        completion = await solver.write(given, env.config.answer_tokens, 0)
    note_answer(solver, env.chat, completion.tokens)


def note_answer(solver: Context, chat: Format, tokens: list[int]) -> None:
    """Notes what was said as the context's turn and the trajectory's answer."""
    action = chat.parse(tokens)
    problem = action.error and f"malformed: {action.error}"
    solver.turns.append(Turn(tokens, action, problem))
    solver.trajectory.answer = action.answer
    solver.trajectory.ended = "no answer" if action.error else "answer"


def written(
    chat: Format, question: Question, place: int, attempt: int, said: str, reward: float
) -> Trajectory:
    """A trajectory in which the role says `said`, words of the tokenizer.

    Its log-probs are 0: the caller puts those of `score` in their place.
    """
    trajectory = Trajectory(question, place, attempt, reward=reward)
    solver = Context(None, trajectory, ROLE)
    tokens = chat.tokenizer.convert_tokens_to_ids(said.split())
    solver.sample.append_given(prompt_of(chat, question))
    solver.sample.append_sampled(Completion(tokens, [0.0] * len(tokens), "stop"))
    solver.sample.reward = reward
    note_answer(solver, chat, tokens)
    return trajectory


def of_all_ranks(run: Run, questions: list[Question]) -> list[Question]:
    """All ranks' questions in the order of the stream, which is the order of one process."""
    if run.ranks == 1:
        return questions
    parts = [None] * run.ranks
    dist.all_gather_object(parts, questions)
    return sorted(sum(parts, []), key=lambda question: int(question.id.rpartition("-")[2]))


@torch.no_grad()
def score(policy: trainer.Policy, samples: list[Sample]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of what each sample says, and the entropies there in nats: a tensor a sample."""
    weights = [torch.ones(len(sample.tokens)) for sample in samples]
    lengths = [len(sample.tokens) - 1 for sample in samples]
    device = next(policy.parameters()).device
    batch = trainer.make_micro_batch(samples, weights, lengths, device)
    found = kernels.linear_logprob(*policy.hidden(batch), batch.target)
    counts = [sum(sample.mask) for sample in samples]
    logprobs, entropies = (numbers.cpu().split(counts) for numbers in found)
    return list(logprobs), list(entropies)


def words(config: SoloConfig, tools: list[Tool]):
    """There are none for chat models."""
    raise UserError("this method speaks its toy's language: leave --model out")


def fits(config: SoloConfig, chat: Format, question: Question) -> None:
    """UserError if a question leaves no room for an answer."""
    longest = len(prompt_of(chat, question)) + config.answer_tokens
    if longest > config.context:
        raise UserError(
            f"question {question.id} with an answer takes up to {longest} tokens, more than "
            f"--context {config.context}: raise it"
        )
