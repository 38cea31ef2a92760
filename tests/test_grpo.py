"""The objective's plain form: advantages, balancing, weights, loss.

Laws by hypothesis; mutants that the same checks must catch.
"""

import math
import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutants import load_mutant, read_mutants

import grpo

rewards = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.integers(0, 4)), min_size=1, max_size=30
)


@given(rewards, st.floats(0.1, 10), st.floats(-5, 5), st.booleans())
def test_an_advantage_is_a_rewards_distance_from_its_groups_mean(pairs, scale, shift, divide):
    """In standard deviations, so a scale changes nothing; without the division as it is."""
    groups = [group for _, group in pairs]
    given = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64) * scale + shift
    result = grpo.group_advantages(given, groups, divide=divide)
    assert result.dtype == torch.float32
    for (reward, group), advantage in zip(pairs, result.tolist()):
        members = [r for r, g in pairs if g == group]
        unit = statistics.pstdev(members) if divide else 1 / scale
        expected = (reward - statistics.mean(members)) / (unit or 1)
        assert advantage == pytest.approx(expected, abs=1e-5)


def test_bad_rewards_are_refused_and_none_are_none():
    with pytest.raises(ValueError, match="not finite"):
        grpo.group_advantages(torch.tensor([1.0, float("nan")]), [0, 0])
    with pytest.raises(ValueError, match="2 rewards for 1"):
        grpo.group_advantages(torch.ones(2), [0])
    assert grpo.group_advantages(torch.zeros(0), []).tolist() == []


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 2**32))
def test_balance_draws_down_without_and_up_with_repetition(m, target, seed):
    indices = [100 + i for i in range(m)]
    drawn = grpo.balance(indices, target, torch.Generator().manual_seed(seed))
    assert drawn == grpo.balance(indices, target, torch.Generator().manual_seed(seed))
    assert set(drawn) <= set(indices) and len(drawn) == (target if m else 0)
    if m >= target:
        assert len(set(drawn)) == target
    elif m:
        assert set(drawn) == set(indices)


def test_balance_draws_uniformly():
    generator, counts = torch.Generator().manual_seed(0), Counter()
    for _ in range(4000):
        counts.update(grpo.balance(range(5), 2, generator))
    assert all(abs(counts[i] - 1600) < 5 * math.sqrt(4000 * 0.4 * 0.6) for i in range(5))


masks_of_samples = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=8
)


@given(masks_of_samples, st.sampled_from(["sample", "token"]))
def test_token_weights_are_those_of_a_mean_over_samples_or_over_tokens(masks, mean):
    tokens = sum(map(sum, masks))
    count = len(masks) if mean == "sample" else max(1, tokens)
    weights = grpo.token_weights([torch.tensor(m) for m in masks], count, mean=mean)
    for mask, weight in zip(masks, weights):
        size = max(1, sum(mask)) if mean == "sample" else 1
        assert weight.tolist() == pytest.approx([m / (size * count) for m in mask])
    with pytest.raises(ValueError):
        grpo.token_weights([torch.ones(1)], 0)


def batch(n=64, seed=0, masked=0.3):
    g = torch.Generator().manual_seed(seed)
    logprob = -torch.rand(n, generator=g, dtype=torch.float64) * 3
    old = logprob + torch.randn(n, generator=g, dtype=torch.float64) * 0.3
    advantage = torch.randn(n, generator=g, dtype=torch.float64)
    weight = torch.rand(n, generator=g, dtype=torch.float64) * (torch.rand(n, generator=g) > masked)
    ref = logprob + torch.randn(n, generator=g, dtype=torch.float64) * 0.3
    return logprob, old, advantage, weight, ref


def by_hand(logprob, old, advantage, weight, ref, low=0.2, high=0.3, beta=0.05):
    """The formula in the paper, token by token: loss, gradient into logprob, share of clipped."""
    loss, gradient, cut = 0.0, [], []
    for lp, o, a, w, r in zip(*(x.tolist() for x in (logprob, old, advantage, weight, ref))):
        if w == 0:
            gradient.append(0.0)
            continue
        ratio = math.exp(lp - o)
        clipped = min(max(ratio, 1 - low), 1 + high)
        k3 = math.exp(r - lp) - (r - lp) - 1
        loss += w * (-min(ratio * a, clipped * a) + beta * k3)
        moves = ratio * a <= clipped * a
        cut.append(not moves)
        gradient.append(w * (-ratio * a * moves + beta * (1 - math.exp(r - lp))))
    return loss, gradient, sum(cut) / len(cut)


def agrees(loss_function) -> bool:
    """Whether a loss equals the hand computation in value and gradient. A mutant's must not."""
    results = []
    for seed in range(3):
        logprob, old, advantage, weight, ref = batch(seed=seed)
        expected, gradient, share = by_hand(logprob, old, advantage, weight, ref)
        masked = weight == 0
        old[masked], advantage[masked], ref[masked] = math.nan, math.inf, math.nan
        logprob.requires_grad_()
        bounds = {"clip_low": 0.2, "clip_high": 0.3, "kl_beta": 0.05}
        loss, stats = loss_function(logprob, old, advantage, weight, **bounds, ref_logprob=ref)
        (got,) = torch.autograd.grad(loss, logprob)
        results += [loss.item() == pytest.approx(expected), got.tolist() == pytest.approx(gradient)]
        results.append(float(stats["clip_share"]) == pytest.approx(share))
    return all(results)


# Log-probs of trainer and sampler, and whose tokens they are. Ratios by hand:
#   sample 0: 2 · 0.5 · 1.5 = 1.5   sample 1: 4 · 1 = 4   sample 2: 1/8   sample 3: 2 · 1.5 = 3
RATIOS = [2.0, 4.0, 0.5, 0.125, 1.0, 1.5, 2.0, 1.5]
OWNERS = [0, 1, 0, 2, 1, 0, 3, 3]
TOKEN = [2.0, 3.0, 0.5, 0.125, 1.0, 1.5, 2.0, 1.5]  # cut at 3
SEQUENCE = [1.5, 0.0, 1.5, 0.125, 0.0, 1.5, 3.0, 3.0]  # sample 1 is masked


def weighs_by_hand(weights) -> bool:
    """Whether both kinds of weights are those above, and keep for a gap of 0 what stands there."""
    gap = torch.tensor(RATIOS, dtype=torch.float64).log()
    owner = torch.tensor(OWNERS)
    cap = 3.0 + 1e-9  # a logarithm and back rounds
    empty = torch.zeros(0)
    return (
        weights(gap, cap).tolist() == pytest.approx(TOKEN)
        and weights(gap, cap, owner).tolist() == pytest.approx(SEQUENCE)
        and weights(0 * gap, 1.0, owner).tolist() == [1.0] * 8
        and weights(empty, 3.0, empty.long()).shape == (0,)
    )


@pytest.mark.parametrize("d", [1e-4, -1e-4, 1e-3, 0.49, 0.51])
def test_small_kl_keeps_its_digits(d):
    """k3 ≈ d²/2: exp(d) − 1 − d in fp32 has no digit left at d = 1e-4."""
    zero = torch.zeros(1)
    loss, stats = grpo.grpo_loss(zero, zero, zero, zero + 1, kl_beta=1.0, ref_logprob=zero + d)
    assert [loss.item(), stats["kl"].item()] == pytest.approx([math.expm1(d) - d] * 2, rel=2e-3)


# A token (advantage, old log-prob, the reference's or None), its loss and its gradient; its own
# log-prob is 0.
EXTREMES = [
    # exp(100) is inf in fp32: clipped, or with A = 0, it must not become 0 · inf = NaN.
    (1.0, -100.0, None, -1.2, 0.0),
    (1.0, -math.inf, None, -1.2, 0.0),
    (0.0, -math.inf, None, 0.0, 0.0),
    # Here the loss is truly that large: it must show as inf, so that the step is skipped.
    (-1.0, -100.0, None, math.inf, math.inf),
    # k3 = exp(d) − 1 − d for d → −∞: its slope along logp is 1, not 0 and not NaN.
    (0.0, 0.0, -1e8, 0.5 * 1e8, 0.5),
    (0.0, 0.0, -math.inf, math.inf, 0.5),
]


@pytest.mark.parametrize("A, old, ref, loss, gradient", EXTREMES)
def test_numbers_at_the_end_of_their_range(A, old, ref, loss, gradient):
    """The token is beside a usual one, which keeps its own gradient."""
    tokens = {
        "logprob": torch.tensor([0.0, -1.0]),
        "old_logprob": torch.tensor([old, -1.1]),
        "advantage": torch.tensor([A, 1.0]),
        "weight": torch.tensor([0.5, 0.5]),
        "clip_high": 0.2,
    }
    if ref is not None:
        tokens |= {"ref_logprob": torch.tensor([ref, -1.0]), "kl_beta": 0.5}
    usual = -math.exp(0.1)
    logprob = tokens["logprob"].requires_grad_()
    total, _ = grpo.grpo_loss(**tokens)
    total.backward()
    assert total.item() == pytest.approx(0.5 * (loss + usual), rel=1e-5)
    assert logprob.grad.tolist() == pytest.approx([0.5 * gradient, 0.5 * usual], rel=1e-5)


CHECKS = {"grpo_loss": agrees, "importance_weights": weighs_by_hand}
MUTANTS = read_mutants(  # each drops or bends one term of grpo.py
    """
grpo_loss: mask :: live = weight != 0 → live = weight == weight
grpo_loss: weight :: (weight * loss).sum() → loss[live].sum()
grpo_loss: old log-prob :: logprob - old_logprob → logprob - logprob.detach()
grpo_loss: lower clip :: ratio.clamp(1 - clip_low, 1 + clip_high) → ratio.clamp(max=1 + clip_high)
grpo_loss: upper clip :: ratio.clamp(1 - clip_low, 1 + clip_high) → ratio.clamp(min=1 - clip_low)
grpo_loss: swapped clips :: ratio.clamp(1 - clip_low, 1 + clip_high)
    → ratio.clamp(1 - clip_high, 1 + clip_low)
grpo_loss: minimum :: torch.minimum → torch.maximum
grpo_loss: sign :: loss = -torch → loss = torch
grpo_loss: advantage :: unclipped = ratio * advantage → unclipped = ratio * advantage.abs()
grpo_loss: KL :: loss = loss + kl_beta * kl → loss = loss
grpo_loss: KL's direction :: ref_logprob, 0.0) - logprob → ref_logprob, 0.0) * 2 - logprob
grpo_loss: KL's −d :: torch.expm1(d) - d → torch.expm1(d)
importance_weights: cut :: torch.exp(gap).clamp(max=cap) → torch.exp(gap)
importance_weights: cut from below :: .clamp(max=cap) → .clamp(min=cap)
importance_weights: mask :: torch.where(ratio <= cap, ratio, 0.0) → ratio
importance_weights: cut for mask :: torch.where(ratio <= cap, ratio, 0.0) → ratio.clamp(max=cap)
importance_weights: mask without weight :: ratio <= cap, ratio, 0.0
    → ratio <= cap, 1.0 + 0 * ratio, 0.0
importance_weights: mean for sum :: torch.exp(total) → torch.exp(total / owner.bincount())
importance_weights: sign :: gap.double() → -gap.double()
importance_weights: everybody's :: [owner].float() → [0 * owner].float()
"""
)


@pytest.mark.parametrize("name", CHECKS)
def test_it_equals_the_computation_by_hand(name):
    assert CHECKS[name](getattr(grpo, name))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, tmp_path):
    function = name.partition(":")[0]
    mutant = load_mutant("grpo.py", *MUTANTS[name], tmp_path)
    assert not CHECKS[function](getattr(mutant, function))
