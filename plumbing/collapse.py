"""Early warning of a collapse: signs that a policy unlearns what it could.

A sign is watched as the mean of five steps, beside the best such mean of the run so far. It counts
when it is worse by more than its limit, and by more than twice what it changes from one step to the
next: a role with few samples is noisy. The limits were chosen so that runs of the toy at the
default learning rate hardly ever pass them, and runs at 2e-3 or 3e-3 do (docs/running.md). The
log-prob of right attempts is the sign of arXiv 2512.04220: it falls before the reward does.

Tests: pytest tests/test_collapse.py
"""

from collections.abc import Iterable
from statistics import mean

WINDOW = 5  # steps
SHARES = ("malformed_share", "unaided_share")
RISE = 0.10  # of a share, above the run's lowest mean
FALL = 0.10  # nats per token, of right attempts, below the run's highest mean


def warnings(lines: list[dict], roles: Iterable[str]) -> list[str]:
    """A sentence for each sign that has passed its limit with the last line of metrics.jsonl."""
    before = signs(lines[:-1], roles)
    return [sign for sign in signs(lines, roles) if sign not in before]


def signs(lines: list[dict], roles: Iterable[str]) -> list[str]:
    """A sentence for each sign that is beyond its limit."""
    found = []
    for key in SHARES:
        if has_risen([line.get(key) for line in lines], RISE):
            found.append(f"{key} has risen by more than {RISE:.2f}")
    for role in roles:
        key = f"{role}_logprob_right"
        losses = [-line[key] for line in lines if line.get(key) is not None]
        if has_risen(losses, FALL):
            found.append(f"{key} has fallen by more than {FALL:.2f} nats per token")
    return found


def has_risen(values: list[float | None], limit: float) -> bool:
    """Whether the newest mean of WINDOW steps lies above the lowest, beyond limit and noise."""
    values = [value for value in values if value is not None]
    if len(values) < WINDOW:
        return False
    ends = range(WINDOW, len(values) + 1)
    means = [mean(values[end - WINDOW : end]) for end in ends]
    noise = mean(abs(after - before) for before, after in zip(values, values[1:]))
    return means[-1] - min(means) > max(limit, 2 * noise)
