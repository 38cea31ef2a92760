"""GRPO for two systems that share one reward: advantages, balancing, token weights, loss.

For one question System 2 makes G samples (one per attempt) and System 1 makes M (one per chunk).
Each System 1 sample takes its attempt's reward. In this order:

    A_sys2 = (r − mean over the G) / std over the G      `group_advantages` on System 2's samples
    A_sys1 = (r − mean over the M) / std over the M      the same on System 1's: its own group
    G of System 1's M samples are drawn                  `balance`, after all have an advantage
    L = L_sys2 + L_sys1, each a mean over its samples    `token_weights` for the means
        of −(1/|y|) Σ_t min(ρ_t A, clip(ρ_t, 1−ε, 1+ε) A)    `grpo_loss`, which adds λ·KL

System 2's sequence spans all turns of its attempt. On policy, with one optimizer step per batch,
ρ is 1 and the gradient is the plain policy gradient.

docs/choices.md lists our choices where the paper is silent, and their options.

Tests: pytest tests/test_grpo.py
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Sequence[Hashable], *, divide: bool = True) -> Tensor:
    """Normalises rewards, one per sample, within their groups: (r − mean) / std, fp32.

    The std is the population's, without an epsilon, so the rewards' scale does not matter. Without
    `divide` it is r − mean (Dr. GRPO, arXiv 2503.20783). `groups[i]` is the group of sample i, as a
    hashable key. Groups may have any size and order. A sample alone in its group gets 0, and so do
    equal rewards. ValueError if a reward is not finite or the lengths differ.

    >>> group_advantages(torch.tensor([1., 0., 0., 1.]), ["a", "a", "b", "a"])    # "b" stands alone
    tensor([ 0.7071, -1.4142,  0.0000,  0.7071])
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards for {len(groups)} group keys")
    if not torch.isfinite(rewards).all():
        raise ValueError(
            "a reward is not finite; leave a trajectory without a reward out of its group"
        )
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = torch.zeros(len(groups))
    for indices in members.values():
        reward = rewards[indices].double()
        if reward.min() < reward.max():
            spread = reward.std(correction=0) if divide else 1.0
            advantages[indices] = ((reward - reward.mean()) / spread).float()
    return advantages


def balance(sys1_indices: Sequence[int], target: int, generator: torch.Generator) -> list[int]:
    """Draws `target` (System 2's number) of one question's M System 1 samples, uniformly.

    M > target: `target` of them without replacement. 0 < M < target: each of them, and random ones
    again up to `target`. M = 0: none. Returns elements of `sys1_indices`.
    """
    m = len(sys1_indices)
    if m == 0:
        return []
    if m >= target:
        draws = torch.randperm(m, generator=generator)[:target].tolist()
    else:
        repeats = torch.randint(m, (target - m,), generator=generator).tolist()
        draws = [*range(m), *repeats]
    return [sys1_indices[i] for i in draws]


def token_weights(
    masks: list[Tensor],
    counts: float,
    *,
    loss_weights: Sequence[float] | None = None,
    mean: str = "sample",
) -> list[Tensor]:
    """Each token's weight in the loss: an fp32 tensor [T] for each sample.

    It is loss_weight / (|y| · `counts`) where the mask is True, else 0; |y| is the mask's sum.
    `loss_weights` says how often each sample counts (default 1). `counts` is the sum of the loss
    weights of all samples of this loss term in the update, over all ranks. So losses are simply
    summed over micro-batches and ranks. With `mean` "token" the weight is loss_weight / `counts`,
    and `counts` is the number of trained tokens, each times its sample's loss weight. ValueError if
    there are samples and `counts` is not above 0.
    """
    if masks and not counts > 0:
        raise ValueError(f"counts is {counts} for {len(masks)} samples: it must be above 0")
    loss_weights = [1] * len(masks) if loss_weights is None else loss_weights
    sizes = [1 if mean == "token" else mask.sum().clamp(min=1) for mask in masks]
    return [
        mask.float() / (size * counts) * loss_weight
        for mask, size, loss_weight in zip(masks, sizes, loss_weights, strict=True)
    ]


def importance_weights(gap: Tensor, cap: float, owner: Tensor | None = None) -> Tensor:
    """Factors [N] that correct tokens' weights where the sampler's policy is not quite π_old.

    `gap` [N] is the trainer's log-prob less the sampler's: a token's ratio π_old / π_sampler
    is exp(gap). Without `owner` the factor is this ratio, cut at `cap` (truncated importance
    sampling). `owner` [N] says which sample a token belongs to. With it the factor is the product
    of all ratios of the sample, and 0 above `cap`, which leaves the sample out (sequence_mask in
    TRL, Seq-MIS in verl).
    """
    if owner is None:
        return torch.exp(gap).clamp(max=cap)
    samples = int(owner.max()) + 1 if len(owner) else 0
    total = torch.zeros(samples, dtype=torch.float64, device=gap.device)
    total.index_add_(0, owner, gap.double())
    ratio = torch.exp(total)
    return torch.where(ratio <= cap, ratio, 0.0)[owner].float()


def grpo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_beta: float = 0.0,
    ref_logprob: Tensor | None = None,
) -> tuple[Tensor, dict]:
    """Σ w·ℓ over tokens [N], ℓ = −min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A) + kl_beta·KL.

    ρ = exp(logprob − old_logprob). KL is k3 = exp(d) − d − 1 with d = ref_logprob − logprob
    (Schulman, 2020), if a reference is given. Plain PyTorch, any dtype.

    This is the only definition of the loss. The fused kernel calls it for one chunk of tokens after
    the other, on every device. So a token's ℓ may depend on that token's inputs only.

    The gradient. The minimum is the clipped term only where the policy has moved too far in the
    direction of A: ρ > 1+clip_high with A > 0, or ρ < 1−clip_low with A < 0. There the term is
    constant, and the token has no gradient. Everywhere else dℓ/dlogprob = −ρA. The KL term adds
    kl_beta·(1 − exp(d)).

    A token of weight 0 is masked: its values, even NaN, do not enter the loss and get no gradient.
    The stats are means over the tokens of nonzero weight, and 0 if there are none.
    """
    live = weight != 0
    logprob = torch.where(live, logprob, 0.0)
    old_logprob = torch.where(live, old_logprob, 0.0)
    advantage = torch.where(live, advantage, 0.0)
    log_ratio = logprob - old_logprob
    # Where A ≥ 0 the clip makes the loss constant at large ρ. Capping log ρ there changes nothing
    # and keeps exp from overflowing, which would make the gradient 0 · inf.
    log_ratio = torch.where(advantage < 0, log_ratio, log_ratio.clamp(max=80))
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = -torch.minimum(unclipped, clipped)
    kl = torch.zeros_like(loss)
    if ref_logprob is not None:
        d = torch.where(live, ref_logprob, 0.0) - logprob
        kl = torch.expm1(d) - d
        if kl_beta:  # without it an infinite KL would give 0 · inf
            loss = loss + kl_beta * kl
    with torch.no_grad():
        tokens = live.sum().clamp(min=1)
        stats = {
            "clip_share": ((clipped < unclipped) & live).sum() / tokens,
            "kl": (kl * live).sum() / tokens,
        }
    return (weight * loss).sum(), stats
