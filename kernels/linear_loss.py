"""Hidden states × LM head → log-prob, entropy, GRPO loss and its gradients, without the [N, V] logits in memory."""
import torch

import grpo

CHUNK_BYTES_CPU = 64 << 20
CHUNK_TOKENS_CUDA = 3584


def chunk_size(tokens, vocabulary, on_cuda):
    """Tokens a chunk."""
    return CHUNK_TOKENS_CUDA if on_cuda else max(1, CHUNK_BYTES_CPU // (4 * vocabulary))


def wide(x):
    """fp32, or fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def row_stats(z, target):
    """z [C, V] becomes z − max in place; returns log-prob [C], entropy [C], log Σ exp [C]."""
    z -= z.amax(-1, keepdim=True)
    e = z.exp()
    total = e.sum(-1)
    mean = torch.linalg.vecdot(e, z) / total
    return z.gather(-1, target[:, None])[:, 0] - total.log(), total.log() - mean, total.log()


class LinearGRPO(torch.autograd.Function):
    """Loss and both gradients in one pass: each chunk's logits, dlogits, dhidden and dweight follow at once."""

    @staticmethod
    def forward(ctx, hidden, weight, target, old_logprob, advantage, token_weight, ref_logprob, temperature, options):
        N, V = len(hidden), len(weight)
        head = wide(weight)
        logprob, entropy = (torch.empty(N, dtype=head.dtype, device=hidden.device) for _ in range(2))
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty(hidden.shape, dtype=head.dtype, device=hidden.device) if need_hidden else None
        d_weight = torch.zeros_like(head) if need_weight else None
        size = chunk_size(N, V, hidden.is_cuda)
        for start in range(0, N, size):
            part = slice(start, start + size)
            h = wide(hidden[part])
            z = (h @ head.T).div_(temperature)
            logprob[part], entropy[part], lse = row_stats(z, target[part])
            if not (need_hidden or need_weight):
                continue
            with torch.enable_grad():
                lp = logprob[part].detach().clone().requires_grad_()
                ref = None if ref_logprob is None else ref_logprob[part]
                loss, _ = grpo.grpo_loss(lp, old_logprob[part], advantage[part], token_weight[part], ref_logprob=ref, **options)
                (g,) = torch.autograd.grad(loss, lp)
            g = (g / temperature)[:, None]
            dz = z.sub_(lse[:, None]).exp_().mul_(-g).scatter_add_(1, target[part][:, None], g)
            if need_hidden:
                torch.mm(dz, head, out=d_hidden[part])
            if need_weight:
                d_weight.addmm_(dz.T, h)
        loss, stats = grpo.grpo_loss(logprob, old_logprob, advantage, token_weight, ref_logprob=ref_logprob, **options)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(logprob, entropy, *stats.values())
        return loss, logprob, entropy, *stats.values()

    @staticmethod
    def backward(ctx, grad, *_):
        gradients = (None if d is None else (d * grad).to(t) for d, t in zip(ctx.saved_tensors, ctx.dtypes))
        return *gradients, None, None, None, None, None, None, None


def linear_grpo_loss(hidden, weight, target, old_logprob, advantage, token_weight, *, ref_logprob=None,
                     clip_low=0.2, clip_high=0.2, kl_beta=0.0, temperature=1.0):
    """Σ w·ℓ over the tokens of non-zero weight, with gradients into hidden and weight; see the module docstring."""
    N = len(hidden)
    live = token_weight.nonzero()[:, 0]
    pick = (lambda x: x) if len(live) == N else (lambda x: x.index_select(0, live))
    ref = None if ref_logprob is None else pick(ref_logprob).detach()
    options = {"clip_low": clip_low, "clip_high": clip_high, "kl_beta": kl_beta}
    loss, logprob, entropy, *numbers = LinearGRPO.apply(
        pick(hidden), weight, pick(target), pick(old_logprob), pick(advantage), pick(token_weight), ref, temperature, options)
    stats = dict(zip(("clip_share", "ratio_mean", "ratio_max", "kl"), numbers))
    stats["entropy_mean"] = entropy.mean() if len(live) else entropy.sum()
    for name, value in (("logprob", logprob), ("entropy", entropy)):
        stats[name] = value if len(live) == N else torch.zeros(N, dtype=value.dtype, device=value.device).index_copy(0, live, value)
    return loss, stats


@torch.no_grad()
def linear_logprob(hidden, weight, target, *, temperature=1.0):
    """(log-prob [N], entropy [N]) of target under softmax(hidden @ weight.T / temperature), fp32, no gradient."""
    head = wide(weight)
    logprob, entropy = (torch.empty(len(hidden), dtype=head.dtype, device=hidden.device) for _ in range(2))
    size = chunk_size(len(hidden), len(weight), hidden.is_cuda)
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        z = (wide(hidden[part]) @ head.T).div_(temperature)
        logprob[part], entropy[part], _ = row_stats(z, target[part])
    return logprob, entropy
