"""Early warning of a collapse: signs that a policy unlearns what it could.

A sign is watched as the mean of five steps, beside the best such mean of the run so far. Its limit
is what separates the toy's runs that learn from those that a learning rate of 2e-3 or 3e-3 spoils
(docs/running.md). The log-prob of right attempts is the sign of arXiv 2512.04220: it falls before
the reward does. Tests: pytest tests/test_collapse.py
"""

from collections.abc import Iterable

WINDOW = 5  # steps
# key: how far above the run's lowest mean it may rise
RISES = {"malformed_share": 0.10, "unaided_share": 0.10}
FALL = 0.10  # nats per token, of right attempts, below the run's highest mean


def warnings(lines: list[dict], roles: Iterable[str]) -> list[str]:
    """A sentence for each sign that has passed its limit with the last line of metrics.jsonl."""
    before = signs(lines[:-1], roles)
    return [sign for sign in signs(lines, roles) if sign not in before]


def signs(lines: list[dict], roles: Iterable[str]) -> list[str]:
    """A sentence for each sign that is beyond its limit."""
    found = []
    for key, limit in RISES.items():
        means = running_means(lines, key)
        if means and means[-1] - min(means) > limit:
            found.append(f"{key} has risen by more than {limit:.2f}")
    for role in roles:
        key = f"{role}_logprob_right"
        means = running_means(lines, key)
        if means and max(means) - means[-1] > FALL:
            found.append(f"{key} has fallen by more than {FALL:.2f} nats per token")
    return found


def running_means(lines: list[dict], key: str) -> list[float]:
    """Means of WINDOW steps in a row that logged the key."""
    values = [line[key] for line in lines if line.get(key) is not None]
    sums = [sum(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    return [total / WINDOW for total in sums]
