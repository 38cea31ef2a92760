"""linear_logprob, linear_grpo_loss, grpo_loss: both forms against float64, and mutants of them.

On a GPU the Triton form runs there; elsewhere it runs in Triton's interpreter.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_forms import DEVICE, FORMS, without_triton
from mutants import load_mutant, read_mutants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import grpo
import kernels
from config import UserError
from kernels import backend
from kernels import linear_loss as LL


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", request.param)
    return request.param


def use_small_chunks(module, monkeypatch):
    """Chunks of 16 tokens and blocks of 128 logits: several of both and a remainder below."""
    monkeypatch.setattr(module, "CHUNK_TOKENS_CUDA", 16)
    monkeypatch.setattr(module, "CHUNK_TOKENS_CPU", 16)
    monkeypatch.setattr(module, "CHUNK_BYTES_CPU", 0)
    for config in (module.STATS_CONFIG, module.GRADIENT_CONFIG):
        monkeypatch.setitem(config, "BLOCK", 128)


@pytest.fixture
def small_chunks(monkeypatch):
    use_small_chunks(LL, monkeypatch)


def make_tokens(logprob, generator, clip=(0.2, 0.28), masked=0.3):
    """old, advantage, weight, ref for float64 log-probs [N].

    The ratios lie all around both edges of the clip; what is masked is NaN or inf.
    """
    N = len(logprob)
    edges = torch.tensor([1 - clip[0], 1 + clip[1]]).double()
    edges = edges[torch.randint(0, 2, (N,), generator=generator)]
    # Just inside or outside an edge.
    close = edges * (1 + 1e-3 * torch.randn(N, generator=generator).sign())
    spread = (0.4 * torch.randn(N, generator=generator)).double().exp()
    ratio = torch.where(torch.rand(N, generator=generator) < 0.5, close, spread)
    noise = torch.randn(N, generator=generator).double()
    tokens = {
        "old_logprob": logprob - ratio.log(),
        "advantage": torch.randn(N, generator=generator).double(),
        "token_weight": (torch.rand(N, generator=generator).double() + 0.1) / max(N, 1),
        "ref_logprob": logprob + 0.5 * noise,
    }
    dead = torch.rand(N, generator=generator) < masked
    tokens["token_weight"][dead] = 0
    tokens["advantage"][dead] = math.inf
    tokens["old_logprob"][dead] = math.nan
    tokens["ref_logprob"][dead] = math.nan
    return {name: x.float() for name, x in tokens.items()}


def make_case(
    N=37,
    D=123,
    V=507,
    *,
    seed=0,
    temperature=0.8,
    kl_beta=0.04,
    dtype=torch.float32,
    peaked=False,
    masked=0.3,
    master=False,
    device=DEVICE,
):
    """Arguments of linear_grpo_loss.

    Logits have a standard deviation of 3; peaked: of 18, with the target often on top. master: an
    fp32 weight whatever the dtype of hidden.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) * 3 / D**0.5
    target = torch.randint(0, V, (N,), generator=generator)
    if peaked:
        hidden[::2] = 2 * weight[target[::2]] * D**0.5
    hidden = hidden.to(dtype)
    weight = weight.to(dtype)
    logits = hidden.double() @ weight.double().T / temperature
    logprob = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    tokens = make_tokens(logprob, generator, masked=masked)
    dead = tokens["token_weight"] == 0
    hidden[dead] = math.nan
    target[dead] = -100
    if master:
        weight = weight.float()
    if not kl_beta:
        del tokens["ref_logprob"]
    tokens |= {"hidden": hidden, "weight": weight, "target": target}
    case = {name: x.to(device) for name, x in tokens.items()}
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": kl_beta, "temperature": temperature}
    return case | options


CASES = {
    "usual": dict(),
    "no KL, T = 1": dict(kl_beta=0, temperature=1),
    "peaked": dict(peaked=True, temperature=1.3),
    "one token": dict(N=1, masked=0),
    "D = 252, V = 1024": dict(N=20, D=252, V=1024, seed=3),
    "bf16": dict(dtype=torch.bfloat16),
    "bf16 over master weights": dict(dtype=torch.bfloat16, master=True),
    "all masked": dict(masked=1.0),
    "no token": dict(N=0),
}


def run(function, case):
    """(loss, stats, gradient of hidden, gradient of weight); backward starts from 2."""
    hidden = case["hidden"].detach().clone().requires_grad_()
    weight = case["weight"].detach().clone().requires_grad_()
    loss, stats = function(**case | {"hidden": hidden, "weight": weight})
    (2 * loss).backward()
    return loss.detach(), stats, hidden.grad, weight.grad


def as_double(case):
    floats = {name: x for name, x in case.items() if torch.is_tensor(x) and x.is_floating_point()}
    return case | {name: x.double() for name, x in floats.items()}


def near(name, value, truth, atol):
    """AssertionError unless |value − truth| ≤ atol everywhere (NaN fails)."""
    error = (value.double() - truth.double()).abs()
    assert not error.numel() or error.max() <= atol, f"{name}: off by {error.max():.2e}"


def near_direction(name, value, truth, rtol):
    """AssertionError unless the error's norm is at most rtol times the truth's norm."""
    error = (value.double() - truth).norm()
    assert error <= rtol * truth.norm() + 1e-30, f"{name}: off by {error:.2e} of {truth.norm()}"


def check(function, case):
    """AssertionError unless function agrees with the plain reference in float64."""
    loss, stats, d_hidden, d_weight = run(function, case)
    true_loss, true_stats, true_hidden, true_weight = run(LL.reference, as_double(case))
    dead = case["token_weight"] == 0
    # In bf16 both gradients and dz are rounded to 8 bits. Peaked logits, of up to 215 and so
    # rounded by 8e-6, gave 2e-5 on a GPU.
    rtol = 3e-5 if DEVICE == "cuda" else 1e-5
    if case["hidden"].dtype == torch.bfloat16:
        rtol = 5e-3
    assert loss.dtype == stats["logprob"].dtype == torch.float32
    assert not any(x.requires_grad for x in stats.values())
    assert d_hidden.dtype == case["hidden"].dtype
    assert d_weight.dtype == case["weight"].dtype
    assert not d_hidden[dead].any(), "a masked token has a gradient"
    near("log-prob", stats["logprob"], true_stats["logprob"], 1e-5)
    near("entropy", stats["entropy"], true_stats["entropy"], 2e-5)
    near("loss", loss, true_loss, 1e-5)
    near_direction("gradient of hidden", d_hidden, true_hidden, rtol)
    near_direction("gradient of weight", d_weight, true_weight, rtol)
    assert stats.keys() == {"loss", "logprob", "entropy", "clip_share", "kl"}
    assert stats.keys() == true_stats.keys()
    for name in ("loss", "clip_share", "kl"):
        near(name, stats[name], true_stats[name], 3e-5)


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("name", CASES)
def test_linear_loss(name, form, small_chunks):
    check(kernels.linear_grpo_loss, make_case(**CASES[name]))


@pytest.mark.usefixtures("products_by")
def test_linear_logprob(form, small_chunks):
    case = make_case(masked=0)
    inputs = case["hidden"], case["weight"], case["target"]
    logprob, entropy = kernels.linear_logprob(*inputs, temperature=0.8)
    _, stats = LL.reference(**as_double(case))
    near("log-prob", logprob, stats["logprob"], 1e-5)
    near("entropy", entropy, stats["entropy"], 2e-5)
    assert logprob.dtype == torch.float32
    nothing = kernels.linear_logprob(inputs[0][:0], inputs[1], inputs[2][:0])
    assert nothing[0].shape == nothing[1].shape == (0,)


def test_an_edit_of_the_formula_reaches_the_fused_loss(form, small_chunks, monkeypatch):
    """A fork that doubles grpo.grpo_loss doubles the fused loss and both its gradients."""
    case = make_case()
    loss, _, *gradients = run(kernels.linear_grpo_loss, case)
    plain = grpo.grpo_loss

    def doubled(*args, **options):
        loss, stats = plain(*args, **options)
        return 2 * loss, stats | {"forked": loss}

    monkeypatch.setattr(grpo, "grpo_loss", doubled)
    forked, stats, *doubles = run(kernels.linear_grpo_loss, case)
    assert forked == stats["loss"] == 2 * loss != 0
    assert torch.equal(stats["forked"], loss), "statistics of a fork reach the caller"
    assert all(torch.equal(double, 2 * x) for double, x in zip(doubles, gradients))


@given(st.integers(0, 20_000), st.sampled_from([300, 151_936]), st.booleans())
def test_chunks_cover_each_token_once(N, V, on_cuda):
    parts = LL.cut_into_chunks(N, V, on_cuda)
    assert [i for part in parts for i in range(N)[part]] == list(range(N))
    sizes = [part.stop - part.start for part in parts]
    limit = LL.CHUNK_TOKENS_CUDA if on_cuda else max(LL.CHUNK_TOKENS_CPU, 2**22 // V)
    assert all(0 < size <= limit for size in sizes) and len(parts) == math.ceil(N / limit)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if torch.is_tensor(out):
            self.elements = max(self.elements, out.numel())
        return out


def onednn_flops(a, weight, *_, **__):
    """The operations of oneDNN's product, which PyTorch's counter does not know."""
    return 2 * math.prod(a) * weight[0]


def test_three_products_and_no_logits(small_chunks, products_by):
    """2·N·D·V operations for the logits and for each gradient; the logits of one chunk."""
    known, kinds = {}, {torch.ops.aten.mm, torch.ops.aten.addmm}
    if "oneDNN" in products_by:
        known = {torch.ops.mkldnn._linear_pointwise: onednn_flops}
        kinds = known.keys()
    case = make_case(N=64, D=8, V=507, masked=0, kl_beta=0, device="cpu")
    check(kernels.linear_grpo_loss, case)
    for trained in ([], ["hidden"], ["hidden", "weight"]):
        given = {name: case[name].clone().requires_grad_() for name in trained}
        counter = FlopCounterMode(display=False, custom_mapping=known)
        with counter, LargestTensor() as largest:
            loss, _ = kernels.linear_grpo_loss(**case | given)
            if trained:
                loss.backward()
        assert counter.get_total_flops() == (1 + len(trained)) * 2 * 64 * 8 * 507
        assert counter.get_flop_counts()["Global"].keys() <= kinds
        assert largest.elements == 16 * 507


def test_autocast_rounds_hidden_but_not_logits(form):
    case = make_case(dtype=torch.bfloat16, masked=0)
    # What lies between two numbers of bf16 is rounded away.
    hidden = case["hidden"].float() * (1 + 2**-12)
    widened = case | {"hidden": hidden, "weight": case["weight"].float()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        _, stats = kernels.linear_grpo_loss(**widened)
    truth = LL.reference(**as_double(case))[1]["logprob"]
    near("log-prob", stats["logprob"], truth, 1e-5)


@pytest.mark.parametrize(
    "change",
    [
        dict(target=torch.full((37,), 507)),
        dict(target=torch.full((37,), -1)),
        dict(advantage=torch.zeros(5)),
        dict(hidden=torch.zeros(37, 123).half()),
    ],
)
def test_misuse_is_refused(change, form):
    case = make_case(masked=0) | {name: x.to(DEVICE) for name, x in change.items()}
    with pytest.raises(ValueError, match="linear|fp16|vocabulary of 507"):
        kernels.linear_grpo_loss(**case)


@pytest.mark.usefixtures("products_by")
def test_any_layout_of_hidden_and_target(form, small_chunks):
    case = make_case(masked=0)
    apart = torch.stack((case["target"], torch.zeros_like(case["target"])), 1)[:, 0]
    other = {"target": apart, "hidden": case["hidden"].T.contiguous().T}
    check(kernels.linear_grpo_loss, case | other)


def test_an_unknown_form_is_refused(monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", "cuda")
    with pytest.raises(UserError, match="MARS_KERNELS"):
        backend.use_triton(torch.zeros(1))


LINEAR_MUTANTS = read_mutants(  # of kernels/linear_loss.py, in its Triton form if named so
    """
mask dropped :: live = token_weight.nonzero()[:, 0] → live = torch.ones(N).nonzero()[:, 0]
temperature dropped :: if temperature != 1: → if False:
temperature dropped from the gradient :: c = c / temperature → pass
off-target columns dropped :: (-c / total) → (0 * total)
target column dropped :: dz = dz.scatter_add_(-1, target[:, None], c[:, None]) → pass
scale of backward dropped :: d_hidden = d_hidden * grad → pass
only one chunk in dW :: add_matmul_fp32(d_weight, dz.T, h) → matmul_fp32(dz.T, h)
first chunk of dW lost :: return matmul_fp32(a, b) → return 0 * (a @ b)
loss: old log-prob forgotten :: grpo.grpo_loss(logprob, **chunk,
    → grpo.grpo_loss(logprob, **chunk | {"old_logprob": logprob.detach()},
loss: lower clip forgotten :: "clip_low": clip_low → "clip_low": 1e9
loss: upper clip forgotten :: "clip_high": clip_high → "clip_high": 1e9
loss: KL forgotten :: "kl_beta": kl_beta → "kl_beta": 0.0
loss: tokens of another chunk :: {name: x[part] for → {name: x.roll(1)[part] for
Triton: temperature dropped :: other=-1e30) * inverse_temperature → other=-1e30)
Triton: temperature dropped from p :: other=0.0) * inverse_temperature → other=0.0)
Triton: temperature dropped from dz :: tl.load(c_ptr + row) * inverse_temperature
    → tl.load(c_ptr + row)
Triton: off-target columns dropped :: 1.0, 0.0) - p) → 1.0, 0.0))
Triton: target column dropped :: tl.where(column == target, 1.0, 0.0) → 0.0
Triton: sum not rescaled :: total = shrink * total + e → total = total + e
Triton: lanes merged as they are :: total = tl.sum(shrink * total, 0) → total = tl.sum(total, 0)
Triton: entropy's moment not shifted :: shrink * (moment + total * (highest - new))
    → shrink * moment
Triton: last block not masked :: mask=column < V, other=-1e30 → mask=column < V, other=0.0
"""
)


@pytest.mark.parametrize("name", LINEAR_MUTANTS)
def test_linear_mutants_are_caught(name, tmp_path, monkeypatch):
    form = "triton" if name.startswith("Triton") else "reference"
    if form == "triton" and without_triton():
        pytest.skip(without_triton())
    monkeypatch.setenv("MARS_KERNELS", form)
    mutant = load_mutant("kernels/linear_loss.py", *LINEAR_MUTANTS[name], tmp_path)
    use_small_chunks(mutant, monkeypatch)
    cases = make_case(N=200 if DEVICE == "cuda" else 37), make_case(peaked=True)
    for case in cases:  # with real targets in masked tokens, so that the mutant answers
        case["target"].clamp_(min=0)
    with pytest.raises(AssertionError):
        for case in cases:
            check(mutant.linear_grpo_loss, case)
