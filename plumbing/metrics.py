"""The numbers of metrics.jsonl: sums over the trajectories and updates of all ranks.

Means of an update count only live tokens: those with a weight in the loss. A rollout's mean
log-probs count all sampled tokens.

Tests: pytest tests/test_metrics.py
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

from processes import sum_over_ranks
from rollout import Method, Sample, Trajectory
from tasks.questions import Question
from tools.search import UNREAD
from trainer import MicroBatch


def ratio(part: float, whole: float) -> float:
    """part / whole, or 0 if the whole is 0."""
    return part / whole if whole else 0.0


def differing(trajectories: list[Trajectory]) -> dict[int, bool]:
    """question_index -> whether this rank's graded attempts at it differ in reward."""
    rewards = defaultdict(set)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.question_index].add(trajectory.reward)
    return {index: len(seen) > 1 for index, seen in rewards.items()}


def rollout_sums(trajectories: list[Trajectory]) -> Counter:
    """The sums of a batch of trajectories, over all ranks."""
    return sum_over_ranks(local_sums(trajectories))


def local_sums(trajectories: list[Trajectory]) -> Counter:
    """The sums of this rank's trajectories."""
    sums = Counter()
    for trajectory in trajectories:
        answered = trajectory.answer is not None
        lost = trajectory.ended.startswith("lost")
        sums["trajectories"] += 1
        sums["demanded"] += not lost and trajectory.ended != "answer"
        sums["answered"] += answered
        sums["lost"] += lost
        if trajectory.reward is not None:
            sums["graded"] += 1
            sums["reward"] += trajectory.reward
        elif not lost:
            sums["unjudged"] += 1
        called = any(turn.action.call for context in trajectory.contexts for turn in context.turns)
        sums["unaided"] += answered and not called
        for context in trajectory.contexts:
            sample = context.sample
            tokens = sum(sample.mask)
            sums[f"{context.role}_samples"] += 1
            sums[f"{context.role}_tokens"] += tokens
            if trajectory.reward is not None:
                kind = "right" if trajectory.reward > 0.5 else "wrong"
                sums[f"{context.role}_{kind}_tokens"] += tokens
                sums[f"{context.role}_{kind}_logprob"] += math.fsum(sample.logprobs)
            calls = [turn.action.call for turn in context.turns if turn.action.call]
            sums["calls"] += len(calls)
            sums["repeated"] += sum(call in calls[:i] for i, call in enumerate(calls))
            sums["cut"] += bool(context.chunk and context.chunk.truncated)
            for turn in context.turns:
                problem = turn.problem or ""
                sums["steps"] += 1
                sums["malformed"] += problem.startswith("malformed")
                sums["empty"] += problem == "no results"
                sums["failed"] += problem.startswith("tool failed")
                sums["documents"] += len(turn.documents)
                sums["unread"] += sum(one.text.startswith(UNREAD) for one in turn.documents)
    groups = differing(trajectories)
    sums["groups"] = len(groups)
    sums["flat"] = len(groups) - sum(groups.values())  # nothing is learned there
    return sums


def failures(s: Counter) -> dict[str, float]:
    """The failures of the outside world, from the sums of some trajectories."""
    return {
        "tool_error_share": ratio(s["failed"], s["calls"]),
        "unread_share": ratio(s["unread"], s["documents"]),
        "judge_failures": s["unjudged"],
        "judge_failure_share": ratio(s["unjudged"], s["answered"]),
        "lost_share": ratio(s["lost"], s["trajectories"]),
    }


def rollout_metrics(trajectories: list[Trajectory], method: Method, seconds: float) -> dict:
    """The part of a step's line in metrics.jsonl that comes from the rollouts."""
    s = rollout_sums(trajectories)
    metrics = {
        "reward": s["reward"] / s["graded"] if s["graded"] else None,
        "calls_per_question": ratio(s["calls"], s["trajectories"]),
        "malformed_share": ratio(s["malformed"], s["steps"]),
        "empty_share": ratio(s["empty"], s["calls"]),
        "demanded_share": ratio(s["demanded"], s["trajectories"]),
        "unaided_share": ratio(s["unaided"], s["answered"]),
        "repeated_share": ratio(s["repeated"], s["calls"]),
        "truncated_chunks": s["cut"],
        "zero_variance_share": ratio(s["flat"], s["groups"]),
        "tokens_per_second": sum(s[f"{role}_tokens"] for role in method.roles) / seconds,
        **failures(s),
    }
    for role in method.roles:
        for kind in ("right", "wrong"):
            tokens = s[f"{role}_{kind}_tokens"]
            mean = s[f"{role}_{kind}_logprob"] / tokens if tokens else None
            metrics[f"{role}_logprob_{kind}"] = mean
        metrics[f"{role}_samples"] = s[f"{role}_samples"]
        metrics[f"{role}_tokens"] = s[f"{role}_tokens"]
        metrics[f"{role}_length"] = ratio(s[f"{role}_tokens"], s[f"{role}_samples"])
    return metrics | method_metrics(trajectories, method)


def method_metrics(trajectories: list[Trajectory], method: Method) -> dict[str, float]:
    """The method's own numbers of a batch, over all ranks, without those that no rank counted."""
    counted = method.metrics(trajectories)
    parts = sum_over_ranks({name: part for name, (part, _) in counted.items()})
    wholes = sum_over_ranks({name: whole for name, (_, whole) in counted.items()})
    return {name: parts[name] / whole for name, whole in wholes.items() if whole}


def right_by_kind(
    trajectories: list[Trajectory], questions: list[Question]
) -> dict[str, list[int]]:
    """kind -> [right, asked], over all ranks; empty if all `questions` are of one kind."""
    asked = Counter(question.source for question in questions)
    if len(asked) < 2:
        return {}
    right = [t for t in trajectories if (t.reward or 0) > 0.5]
    right = sum_over_ranks(Counter(t.question.source for t in right))
    return {kind: [right[kind], asked[kind]] for kind in sorted(asked)}


def owned_by(batch: MicroBatch, owners: list[int]) -> torch.Tensor:
    """[N]: which loss tokens belong to one of the samples `owners`."""
    return torch.isin(batch.owner, torch.tensor(owners, device=batch.owner.device))


def update_metrics(
    scored: list[tuple[MicroBatch, dict, list[Sample]]], roles: Iterable[str]
) -> dict:
    """The part of a step's line in metrics.jsonl that comes from the update.

    `scored`: this rank's micro-batches with the loss's stats, and the samples that they point into.
    A role's entropy is the mean, over its live tokens, of the entropy of the distribution that each
    was drawn from; None without such tokens.
    """
    sums = Counter()
    for batch, numbers, samples in scored:
        live = batch.weight != 0  # [N]
        count = int(live.sum())
        sums["loss"] += float(numbers["loss"])
        sums["tokens"] += len(live)
        sums["live"] += count
        sums["clipped"] += float(numbers["clip_share"]) * count
        sums["kl"] += float(numbers["kl"]) * count
        for role in roles:
            owners = [i for i, sample in enumerate(samples) if sample.role == role]
            owned = live & owned_by(batch, owners)
            sums[f"{role}_entropy"] += float(numbers["entropy"][owned].sum())
            sums[f"{role}_live"] += int(owned.sum())
    sums = sum_over_ranks(sums)
    metrics = {
        "loss": sums["loss"],
        "clip_share": ratio(sums["clipped"], sums["live"]),
        "kl": ratio(sums["kl"], sums["live"]),
        "trained_tokens": sums["tokens"],
        "masked_share": ratio(sums["tokens"] - sums["live"], sums["tokens"]),
    }
    for role in roles:
        live = sums[f"{role}_live"]
        metrics[f"{role}_entropy"] = sums[f"{role}_entropy"] / live if live else None
    return metrics


# ------------------------------------------------------------------------- how sure a share is


Z_95 = 1.959964  # the normal distribution holds 95 % within this many standard deviations


def wilson_interval(correct: float, total: float) -> tuple[float, float]:
    """The 95 % interval (low, high) of the share correct / total, by Wilson's score.

    It stays honest for few questions and for shares near 0 and 1.
    """
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    shrink = 1 + Z_95**2 / total
    centre = (share + Z_95**2 / (2 * total)) / shrink
    variance = share * (1 - share) / total + Z_95**2 / (4 * total**2)
    half = Z_95 / shrink * math.sqrt(variance)
    # Rounding must not push the interval past the share itself.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def clustered_interval(means: Sequence[float], attempts: int) -> tuple[float, float]:
    """The 95 % interval of the mean of `means`: one for each question, over its `attempts`.

    Attempts at one question resemble each other, so they tell less than independent answers would.
    The variance of the questions' means gives the effective sample size: how many independent
    answers would tell as much, at most the number of all attempts. Wilson's score takes it as the
    total.
    """
    mean = statistics.fmean(means)
    independent = len(means)  # where no variance can be measured
    if len(means) > 1 and (variance := statistics.variance(means) / len(means)):
        independent = min(attempts * len(means), mean * (1 - mean) / variance)
    return wilson_interval(mean * independent, independent)


def with_interval(right: float, asked: float) -> str:
    """A share in percent with its 95 % interval: "50.0% (23.7%–76.3%)"."""
    low, high = wilson_interval(right, asked)
    return f"{ratio(right, asked):.1%} ({low:.1%}–{high:.1%})"


def sign_test(gained: int, lost: int) -> float:
    """The two-sided p-value of McNemar's exact test, for two models on the same questions.

    gained: the questions that only the second model has right. lost: those that only the first has.
    If both were equally good, such a question would be either model's with probability 1/2. The
    p-value is the probability of a split that is at least as uneven.
    """
    changed = gained + lost
    as_uneven = sum(math.comb(changed, rarer) for rarer in range(min(gained, lost) + 1))
    return min(1.0, 2 * as_uneven / 2**changed)
