"""What a batch of trajectories adds up to, over all ranks: the numbers of metrics.jsonl and of the evaluation's table."""
import torch
import torch.distributed as dist

from rollout import Trajectory


def add(totals: dict, more: dict) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + value


def reduced(sums: dict) -> dict:
    """Sums over all ranks. Every rank must bring the same keys."""
    if not dist.is_initialized():
        return sums
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor([float(v) for v in sums.values()], dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return dict(zip(sums, tensor.tolist()))


def rollout_sums(trajectories: list[Trajectory]) -> dict:
    """What a batch of trajectories adds up to, over all ranks; rollout_metrics and evaluate.table divide it."""
    names = [f"{role}_{what}" for role in ("sys1", "sys2") for what in ("samples", "tokens", "nats")]
    sums = dict.fromkeys(("trajectories", "graded", "reward", "calls", "steps", "malformed", "failed", "empty", "demanded",
                          "groups", "flat", "cut", *names), 0)
    groups = {}
    for t in trajectories:
        problems = [turn.problem or "" for turn in t.turns]
        add(sums, {"trajectories": 1, "graded": t.reward is not None, "reward": t.reward or 0.0, "steps": len(t.turns),
                   "calls": sum(turn.step.call is not None for turn in t.turns), "demanded": t.ended != "answer",
                   "malformed": sum(p.startswith("malformed") for p in problems), "empty": problems.count("no results"),
                   "failed": sum(p.startswith("tool failed") for p in problems),
                   "cut": sum(c.truncated for turn in t.turns for c in turn.chunks)})
        if t.reward is not None:
            groups.setdefault(t.sample.group, set()).add(t.reward)
        for s in (t.sample, *t.sys1_samples()):
            add(sums, {f"{s.role}_samples": 1, f"{s.role}_tokens": sum(s.mask), f"{s.role}_nats": -sum(s.logprobs)})
    add(sums, {"groups": len(groups), "flat": sum(len(rewards) == 1 for rewards in groups.values())})
    return reduced(sums)


def rollout_metrics(trajectories: list[Trajectory], seconds: float) -> dict:
    """The step's line in metrics.jsonl, as far as the rollouts tell. Entropy: mean −log p of the sampled tokens."""
    s = rollout_sums(trajectories)

    def per(a, b):
        return s[a] / s[b] if s[b] else 0.0
    return {"reward": per("reward", "graded"), "calls_per_question": per("calls", "trajectories"),
            "sys1_samples": int(s["sys1_samples"]), "sys1_tokens": int(s["sys1_tokens"]), "sys2_tokens": int(s["sys2_tokens"]),
            "sys1_length": per("sys1_tokens", "sys1_samples"), "sys2_length": per("sys2_tokens", "sys2_samples"),
            "sys1_entropy": per("sys1_nats", "sys1_tokens"), "sys2_entropy": per("sys2_nats", "sys2_tokens"),
            "malformed_share": per("malformed", "steps"), "tool_error_share": per("failed", "calls"),
            "empty_share": per("empty", "calls"), "demanded_share": per("demanded", "trajectories"),
            "judge_failures": int(s["trajectories"] - s["graded"]), "truncated_chunks": int(s["cut"]),
            "zero_variance_share": per("flat", "groups"), "tokens_per_second": (s["sys1_tokens"] + s["sys2_tokens"]) / seconds}


