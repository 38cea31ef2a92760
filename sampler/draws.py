"""Draws of tokens. A draw depends on the logits and on (seed, index) alone.

The t-th new token of a request is drawn with a uniform number that is hashed from the request's
seed and t. A random generator has a state, which would make a draw depend on earlier draws.
A draw needs one uniform number, whose place in the cumulative distribution is the token (inverse
transform sampling). Most engines draw V numbers.

Shapes: B rows, V vocabulary. Tests: pytest tests/test_sampler.py -k "draw or uniform or top_p"
"""

import math

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1
LAST = 1 - 2.0**-48  # the largest uniform number


def hash64(*numbers: int) -> int:
    """A 64-bit hash of integers (each taken modulo 2^64), by splitmix64's finaliser."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Doubles in [0, 1) from (seed, index) alone: splitmix64's index-th output.

    seed uint64 [B], index int64 [B] -> fp64 [B]. The numbers have 48 bits, so that u · total is
    always below total in fp64.
    """
    x = seed + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(16)
    return x.astype(np.float64) * 2.0**-48


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row and its log-prob at temperature 1: logits [B, V] fp32."""
    best, tokens = logits.max(-1)
    return tokens, best - logits.logsumexp(-1)


def sample_token(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | None,
    top_p: Tensor | None,
    buffer: Tensor | None = None,
    *,
    any_greedy: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob: logits fp32 [B, V], uniforms fp64 [B] -> both [B].

    temperature [B]: 0 is greedy; None means 1 for all rows. top_p [B]: only the likeliest tokens
    whose probabilities sum to it can be drawn; None means 1 for all rows. The log-prob is always
    that of the full vocabulary at the temperature (at 1 for a greedy row). buffer: an fp32 tensor
    for the probabilities, which is resized and overwritten (allocating it anew takes longer).
    any_greedy: whether a temperature may be 0, so that a maximum of all logits is needed too.
    """
    any_greedy &= temperature is not None
    if any_greedy:
        is_greedy = temperature == 0
        temperature = torch.where(is_greedy, 1.0, temperature)
    if temperature is not None:
        logits = logits / temperature[:, None]
    out = None if buffer is None else buffer.resize_(logits.shape)
    probs = torch.softmax(logits, -1, out=out)
    candidates = probs if top_p is None else keep_likeliest(probs, top_p)
    # Draw a block of the vocabulary and then a token in it. One running sum over all tokens would
    # take longer than the softmax.
    blocks = candidates.unflatten(1, (-1, math.gcd(logits.shape[1], 256)))
    block, uniforms = draw(blocks.sum(-1), uniforms)
    rows = torch.arange(len(blocks), device=blocks.device)
    place, _ = draw(blocks[rows, block], uniforms)
    tokens = block * blocks.shape[2] + place
    if any_greedy:
        tokens = torch.where(is_greedy, logits.max(-1).indices, tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws an index per row, with probabilities proportional to weights [B, n].

    Returns the first indices [B] at which the running sum of the weights exceeds u times their
    total, and new uniform numbers in [0, 1) [B]: how far u · total lies within that weight, as a
    share of it. An index of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)
    index = index.clamp_(max=weights.shape[1] - 1)  # The index of a row of NaN is n.
    weight = weights.gather(1, index)
    place = (threshold - cumulative.gather(1, index)) / weight + 1
    return index[:, 0], place[:, 0].clamp_(0, LAST)


def keep_likeliest(probs: Tensor, top_p: Tensor) -> Tensor:
    """probs [B, V], but 0 outside the smallest set of likeliest tokens that sums to top_p [B]."""
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    outside = before >= top_p[:, None]
    # A row with top_p 1 keeps all its tokens. `before` alone might drop some of them, because
    # rounded probabilities may sum to more than 1.
    outside &= (top_p < 1)[:, None]
    return probs.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), 0.0)
