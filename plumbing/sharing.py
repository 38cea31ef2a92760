"""Attempts shared out over the ranks, so that no GPU waits for the one with the longest attempts.

Attempts differ several times in length. Eight simulated ranks were busy for 0.77 of a step if each
had whole questions, and for 0.91 with units of four attempts (docs/LOG.md, 2026-11-27).

Tests: pytest tests/test_rollout.py -k ranks
"""

import asyncio
import itertools

import processes
from rollout import Env, Trajectory, play_batch
from tasks.questions import Question
from tools import Tool

UNIT = 4  # attempts at a question that a rank takes together
BATCHES = itertools.count()  # a batch's number, on all ranks the same


def play_shared(
    run, shares: list[list[tuple[int, Question]]], attempts: int, tools: list[Tool], **options
) -> list[Trajectory]:
    """play_batch of each rank's share, on all ranks together. A rank that is done helps the others.

    An attempt's draws do not depend on its rank. Each rank returns its own questions' trajectories.
    """
    name = next(BATCHES)
    by_owner: list[list[Trajectory]] = [[] for _ in shares]  # rank of the question -> trajectories

    async def work(env: Env) -> None:
        for owner in [*range(run.rank, run.ranks), *range(run.rank)]:  # its own questions first
            firsts = range(0, attempts, UNIT)
            units = [(*pair, first) for pair in shares[owner] for first in firsts]
            while (number := processes.next_number(f"{name} {owner}")) < len(units):
                index, question, first = units[number]
                keys = [(question, index, n) for n in range(attempts)[first : first + UNIT]]
                by_owner[owner] += await asyncio.gather(*(env.play(run.method, *k) for k in keys))

    # An open attempt cannot move to another rank. So a rank opens a quarter of an equal share at
    # once, or more if its pool has room for contexts of half the greatest length.
    share = sum(map(len, shares)) * attempts // run.ranks
    pool = run.sampler.pages.count * run.sampler.pages.size  # in tokens
    workers = max(share // 4, 2 * pool // run.config.longest(), UNIT) // UNIT
    play_batch(run, [], 0, tools, lambda env: [work(env) for _ in range(workers)], **options)
    return sorted(processes.deliver(by_owner), key=lambda one: (one.question_index, one.attempt))
