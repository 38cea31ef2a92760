"""linear_logprob, linear_grpo_loss, grpo_loss: both forms against float64, and mutants that the same checks must catch.

On a GPU the Triton form runs there; elsewhere it runs in Triton's interpreter. `PYTHONPATH=. python
tests/test_kernels_loss.py` compiles the kernels for Hopper (no GPU needed) and prints what they use.
"""
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import grpo
import kernels
from mutants import load_mutant
from config import UserError

LL, GL = (importlib.import_module(f"kernels.{name}") for name in ("linear_loss", "grpo_loss"))
ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")
FORMS = ["reference", pytest.param("triton", marks=needs_triton)]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", request.param)
    return request.param


def use_small_chunks(module, monkeypatch):
    for name, value in {"CHUNK_TOKENS_CUDA": 16, "CHUNK_TOKENS_CPU": 16, "CHUNK_BYTES_CPU": 0}.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks and a remainder for the cases below."""
    use_small_chunks(LL, monkeypatch)


def make_tokens(logprob, generator, clip=(0.2, 0.28), masked=0.3):
    """old, advantage, weight, ref for float64 log-probs [N]: ratios all around both clip edges, NaN where masked."""
    N = len(logprob)
    edges = torch.tensor([1 - clip[0], 1 + clip[1]]).double()[torch.randint(0, 2, (N,), generator=generator)]
    close = edges * (1 + 1e-3 * torch.randn(N, generator=generator).sign())          # just inside or outside an edge
    spread = (0.4 * torch.randn(N, generator=generator)).double().exp()
    ratio = torch.where(torch.rand(N, generator=generator) < 0.5, close, spread)
    tokens = {"old_logprob": logprob - ratio.log(), "advantage": torch.randn(N, generator=generator).double(),
              "token_weight": (torch.rand(N, generator=generator).double() + 0.1) / max(N, 1),
              "ref_logprob": logprob + 0.5 * torch.randn(N, generator=generator).double()}
    dead = torch.rand(N, generator=generator) < masked
    tokens["token_weight"][dead] = 0
    tokens["advantage"][dead] = math.inf
    tokens["old_logprob"][dead] = tokens["ref_logprob"][dead] = math.nan
    return {name: x.float() for name, x in tokens.items()}


def make_case(N=37, D=123, V=507, *, seed=0, temperature=0.8, kl_beta=0.04, dtype=torch.float32, peaked=False,
              masked=0.3):
    """Arguments of linear_grpo_loss. Logits have a standard deviation of 3 (peaked: 18, the target often on top)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) * 3 / D ** 0.5
    target = torch.randint(0, V, (N,), generator=generator)
    if peaked:
        hidden[::2] = 2 * weight[target[::2]] * D ** 0.5
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logprob = (hidden.double() @ weight.double().T / temperature).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    tokens = make_tokens(logprob, generator, masked=masked)
    dead = tokens["token_weight"] == 0
    hidden[dead], target[dead] = math.nan, -100
    if not kl_beta:
        del tokens["ref_logprob"]
    tensors = {"hidden": hidden, "weight": weight, "target": target, **tokens}
    return {**{name: x.to(DEVICE) for name, x in tensors.items()},
            "clip_low": 0.2, "clip_high": 0.28, "kl_beta": kl_beta, "temperature": temperature}


CASES = {"usual": dict(), "no KL, T = 1": dict(kl_beta=0, temperature=1),
         "peaked": dict(peaked=True, temperature=1.3), "one token": dict(N=1, masked=0), "one word": dict(V=1),
         "D = 252, V = 1024": dict(N=20, D=252, V=1024, seed=3),
         "bf16": dict(dtype=torch.bfloat16), "all masked": dict(masked=1.0), "no token": dict(N=0)}


def run(function, case, scale=1.0):
    """(loss, stats, gradient of hidden, gradient of weight); scale: backward starts from it instead of 1."""
    leaves = {name: case[name].detach().clone().requires_grad_() for name in ("hidden", "weight")}
    loss, stats = function(**{**case, **leaves})
    (loss * scale).backward()
    return loss.detach(), stats, leaves["hidden"].grad, leaves["weight"].grad


def as_double(case):
    return {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in case.items()}


def near(name, value, truth, atol):
    """Raises AssertionError unless |value − truth| ≤ atol everywhere (NaN fails)."""
    error = (value.double() - truth.double()).abs()
    assert error.numel() == 0 or error.max() <= atol, f"{name}: off by {error.max():.2e}, allowed {atol:.2e}"


def near_direction(name, value, truth, rtol):
    """Raises AssertionError unless the error's norm is at most rtol times the truth's norm."""
    error, size = (value.double() - truth).norm(), truth.norm()
    assert error <= rtol * size + 1e-30, f"{name}: relative error {error / size:.2e}, allowed {rtol:.2e}"


def check(function, case):
    """Raises AssertionError unless function agrees with the plain reference in float64."""
    loss, stats, d_hidden, d_weight = run(function, case, scale=2.0)
    true_loss, true_stats, true_hidden, true_weight = run(LL.reference, as_double(case), scale=2.0)
    dead = case["token_weight"] == 0
    rough = case["hidden"].dtype == torch.bfloat16                   # gradients and dz are rounded to 8 bits there
    assert loss.dtype == stats["logprob"].dtype == torch.float32 and not stats["logprob"].requires_grad
    assert d_hidden.dtype == case["hidden"].dtype and d_weight.dtype == case["weight"].dtype
    assert not d_hidden[dead].any(), "a masked token has a gradient"
    near("log-prob", stats["logprob"], true_stats["logprob"], 1e-5)
    near("entropy", stats["entropy"], true_stats["entropy"], 2e-5)
    near("loss", loss, true_loss, 1e-5)
    near_direction("gradient of hidden", d_hidden, true_hidden, 5e-3 if rough else 1e-5)
    near_direction("gradient of weight", d_weight, true_weight, 5e-3 if rough else 1e-5)
    assert stats.keys() == true_stats.keys()
    for name in stats.keys() - {"logprob", "entropy"}:
        near(name, stats[name], true_stats[name], 3e-5)


def check_tokens(function, seed=0, N=700):
    """As `check`, for the loss on given log-probs."""
    generator = torch.Generator().manual_seed(seed)
    logprob = -3 * torch.rand(N, generator=generator).double()
    tokens = {name: x.to(DEVICE) for name, x in make_tokens(logprob, generator).items()}
    weight = tokens.pop("token_weight")
    logprob = logprob.float().to(DEVICE)
    logprob[weight == 0] = math.nan
    ref = tokens.pop("ref_logprob")
    for kl in ({}, {"ref_logprob": ref, "kl_beta": 0.04}):
        results = []
        for f, kind in ((function, torch.float32), (grpo.grpo_loss, torch.float64)):
            leaf = logprob.detach().to(kind).clone().requires_grad_()
            loss, stats = f(leaf, *(x.to(kind) for x in tokens.values()), weight.to(kind), clip_low=0.2, clip_high=0.28,
                            **{name: x.to(kind) if torch.is_tensor(x) else x for name, x in kl.items()})
            (3 * loss).backward()
            results.append((loss.detach(), stats, leaf.grad))
        (loss, stats, gradient), (true_loss, true_stats, true_gradient) = results
        near("loss", loss, true_loss, 1e-6)
        near("gradient", gradient, true_gradient, 1e-5 * true_gradient.abs().max())
        assert stats.keys() == true_stats.keys() and not gradient[weight == 0].any()
        for name in stats:
            near(name, stats[name], true_stats[name], 1e-6)


# ---------------------------------------------------------------- the real thing passes

@pytest.mark.parametrize("name", CASES)
def test_linear_loss(name, form, small_chunks):
    check(kernels.linear_grpo_loss, make_case(**CASES[name]))


@pytest.mark.parametrize("N", [1, 700, 1024, 2500])
def test_grpo_loss(N, form):
    check_tokens(kernels.grpo_loss, seed=N, N=N)


def test_small_kl_keeps_its_digits(form):
    """k3 ≈ d²/2: exp(d) − 1 − d in fp32 has no digit left at d = 1e-4."""
    logprob, d = torch.zeros(5, device=DEVICE), torch.tensor([1e-4, -1e-4, 1e-3, 0.49, 0.51], device=DEVICE)
    zero, one = torch.zeros_like(d), torch.ones_like(d)
    _, stats = kernels.grpo_loss(logprob, zero, zero, one, kl_beta=1.0, ref_logprob=d)
    for i in range(5):
        loss, _ = kernels.grpo_loss(logprob[i:i + 1], zero[:1], zero[:1], one[:1], kl_beta=1.0, ref_logprob=d[i:i + 1])
        truth = math.expm1(d[i].double()) - d[i].double()
        assert abs(loss - truth) < 2e-3 * truth


def test_linear_logprob(form, small_chunks):
    case = make_case(masked=0)
    logprob, entropy = kernels.linear_logprob(case["hidden"], case["weight"], case["target"], temperature=0.8)
    _, stats = LL.reference(**as_double(case))
    near("log-prob", logprob, stats["logprob"], 1e-5)
    near("entropy", entropy, stats["entropy"], 2e-5)
    assert logprob.dtype == torch.float32
    assert kernels.linear_logprob(case["hidden"][:0], case["weight"], case["target"][:0])[0].shape == (0,)


def test_reference_against_scalar_arithmetic():
    """The reference that all else is held against, token by token in Python floats."""
    case = as_double(make_case(N=12, D=5, V=7))
    loss, stats = LL.reference(**case)
    expected, clipped, live = 0.0, 0, 0
    columns = {name: x.tolist() for name, x in case.items() if torch.is_tensor(x)}
    for i, w in enumerate(columns["token_weight"]):
        if w == 0:
            continue
        z = [sum(a * b for a, b in zip(columns["hidden"][i], row)) / 0.8 for row in columns["weight"]]
        lse = math.log(sum(map(math.exp, z)))
        logprob = z[columns["target"][i]] - lse
        ratio, A = math.exp(logprob - columns["old_logprob"][i]), columns["advantage"][i]
        d = columns["ref_logprob"][i] - logprob
        bounded = min(max(ratio, 0.8), 1.28)
        expected += w * (-min(ratio * A, bounded * A) + 0.04 * (math.exp(d) - d - 1))
        clipped, live = clipped + (bounded * A < ratio * A), live + 1
        assert abs(stats["logprob"][i] - logprob) < 1e-12
        assert abs(stats["entropy"][i] + sum(math.exp(x - lse) * (x - lse) for x in z)) < 1e-12
    assert abs(loss - expected) < 1e-12 and abs(stats["clip_share"] - clipped / live) < 1e-6 and 0 < clipped < live


@pytest.mark.parametrize("function", [LL.reference, kernels.linear_grpo_loss])
def test_gradcheck(function, small_chunks):
    case = as_double(make_case(N=9, D=6, V=11))
    hidden, weight = (case.pop(name).nan_to_num().requires_grad_() for name in ("hidden", "weight"))
    torch.autograd.gradcheck(lambda h, w: function(h, w, **case)[0], (hidden, weight))


def test_gradcheck_tokens():
    generator = torch.Generator().manual_seed(0)
    logprob = -torch.rand(50, generator=generator).double()
    tokens = {name: x.double() for name, x in make_tokens(logprob, generator, masked=0).items()}
    tokens["weight"] = tokens.pop("token_weight")
    torch.autograd.gradcheck(lambda x: GL.reference(x, kl_beta=0.04, **tokens)[0], logprob.requires_grad_())


# ---------------------------------------------------------------- what else the contract says

def test_bitwise_reproducible(form, small_chunks):
    case = make_case()
    first, second = (run(kernels.linear_grpo_loss, case) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2]) and torch.equal(first[3], second[3])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 23), seed=st.integers(0, 9))
def test_cutting_the_tokens_changes_nothing(cut, seed):
    """Sums travel: two calls on the two parts of the tokens add up to one call on all of them."""
    case = make_case(N=23, D=16, V=50, seed=seed)
    per_token = [name for name, x in case.items() if torch.is_tensor(x) and name != "weight"]
    whole = run(kernels.linear_grpo_loss, case)
    parts = [run(kernels.linear_grpo_loss, case | {name: case[name][part] for name in per_token})
             for part in (slice(cut), slice(cut, None))]
    near("loss", parts[0][0] + parts[1][0], whole[0], 1e-6)
    near_direction("gradient of hidden", torch.cat([p[2] for p in parts]), whole[2].double(), 1e-5)
    near_direction("gradient of weight", parts[0][3] + parts[1][3], whole[3].double(), 1e-5)


def test_three_products_and_no_logits(small_chunks):
    """2·N·D·V operations three times with gradients, once without; no tensor of more than a chunk's logits."""
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if torch.is_tensor(out):
                self.elements = max(self.elements, out.numel())
            return out
    case = make_case(N=64, D=8, V=507, masked=0, kl_beta=0)
    case = {name: x.cpu() if torch.is_tensor(x) else x for name, x in case.items()}
    with FlopCounterMode(display=False) as trained, Largest() as largest:
        run(kernels.linear_grpo_loss, case)
    with FlopCounterMode(display=False) as evaluated:
        kernels.linear_grpo_loss(**case)
    product = 2 * 64 * 8 * 507
    assert trained.get_total_flops() == 3 * product and evaluated.get_total_flops() == product
    assert largest.elements == 16 * 507


def test_only_wanted_gradients_are_made():
    case = make_case(N=8, D=8, V=50)
    frozen = case | {"hidden": case["hidden"].clone().requires_grad_()}
    with FlopCounterMode(display=False) as counter:
        kernels.linear_grpo_loss(**frozen)[0].backward()
    live = int((case["token_weight"] != 0).sum())
    assert counter.get_total_flops() == 2 * 2 * live * 8 * 50 and frozen["hidden"].grad is not None


def test_empty_batch_touches_both_inputs(form):
    for name in ("all masked", "no token"):
        loss, stats, d_hidden, d_weight = run(kernels.linear_grpo_loss, make_case(**CASES[name]))
        assert loss == 0 and not d_hidden.any() and not d_weight.any()
        assert stats["clip_share"] == stats["entropy_mean"] == 0


def test_bf16_hidden_with_fp32_weight(form):
    """A bf16 forward pass over fp32 master weights: the weight's gradient keeps fp32."""
    case = make_case(dtype=torch.bfloat16)
    mixed = run(kernels.linear_grpo_loss, case | {"weight": case["weight"].float()})
    plain = run(LL.reference, as_double(case))
    assert mixed[2].dtype == torch.bfloat16 and mixed[3].dtype == torch.float32
    near_direction("gradient of weight", mixed[3], plain[3], 5e-3)


def test_autocast_rounds_hidden_but_not_logits(form):
    case = make_case(dtype=torch.bfloat16, masked=0)
    wide = case | {"hidden": case["hidden"].float(), "weight": case["weight"].float()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        _, stats = kernels.linear_grpo_loss(**wide)
    near("log-prob", stats["logprob"], LL.reference(**as_double(case))[1]["logprob"], 1e-5)


@pytest.mark.parametrize("change", [dict(target=torch.zeros(37)), dict(advantage=torch.zeros(5)), dict(temperature=0.0),
                                    dict(weight=torch.zeros(507, 4)), dict(hidden=torch.zeros(37, 123).half())])
def test_misuse_is_refused(change):
    case = make_case(masked=0) | change
    with pytest.raises(ValueError):
        kernels.linear_grpo_loss(**{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in case.items()})


def test_unknown_form_is_refused(monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", "cuda")
    with pytest.raises(UserError, match="MARS_KERNELS"):
        kernels.linear_logprob(*(make_case(masked=0)[name] for name in ("hidden", "weight", "target")))


@pytest.mark.parametrize("prelude, outcome", [
    ("import sys; sys.modules['triton'] = None", "ok"),                                   # macOS: no Triton at all
    ("import os; os.environ['MARS_KERNELS'] = 'triton'", "TRITON_INTERPRET=1"),       # on CPU without the interpreter
])
def test_other_machines(prelude, outcome):
    code = prelude + ("; import torch, kernels\ntry: kernels.linear_logprob(torch.zeros(2, 3), torch.zeros(4, 3), "
                      "torch.zeros(2, dtype=torch.int64)); print('ok')\nexcept Exception as error: print(error)")
    clean = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "MARS_KERNELS")}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert outcome in result.stdout, result.stderr


# ---------------------------------------------------------------- mutants must be caught

LINEAR_MUTANTS = {   # what is broken: (form, line of kernels/linear_loss.py, what it becomes)
    "mask dropped": ("reference", "live = token_weight.nonzero()[:, 0]", "live = torch.ones(N).nonzero()[:, 0]"),
    "temperature dropped": ("reference", "if temperature != 1:", "if False:"),
    "temperature dropped from the gradient": ("reference", "softmax, c / temperature", "softmax, c"),
    "off-target columns dropped": ("reference", "(-c / total)", "(0 * total)"),
    "target column dropped": ("reference", ".scatter_add_(-1, target[:, None], c[:, None])", ""),
    "scale of backward dropped": ("reference", "d_hidden = d_hidden * grad", "pass"),
    "only one chunk in dW": ("reference", "add_product(d_weight, dz.T, h)", "d_weight = product(dz.T, h)"),
    "Triton: temperature dropped": ("triton", "other=-1e30) * inverse_temperature", "other=-1e30)"),
    "Triton: temperature dropped from p": ("triton", "other=0.0) * inverse_temperature", "other=0.0)"),
    "Triton: temperature dropped from dz": ("triton", "tl.load(c_p + row) * inverse_temperature", "tl.load(c_p + row)"),
    "Triton: off-target columns dropped": ("triton", "1.0, 0.0) - p)", "1.0, 0.0))"),
    "Triton: target column dropped": ("triton", "tl.where(column == target, 1.0, 0.0)", "0.0"),
    "Triton: sum not rescaled": ("triton", "total = scale * total + e", "total = total + e"),
    "Triton: lanes merged as they are": ("triton", "total = tl.sum(scale * total, 0)", "total = tl.sum(total, 0)"),
    "Triton: entropy's moment not shifted": ("triton", "scale * (moment + total * (high - new))", "scale * moment"),
    "Triton: last block not masked": ("triton", "mask=column < V, other=-1e30", "mask=column < V, other=0.0"),
}
TRITON_TOKEN_MUTANTS = {   # the same for kernels/grpo_loss.py
    "mask dropped": ("live = weight != 0.0", "live = token < N"),
    "ratio dropped": ("ratio = tl.exp(logprob - old)", "ratio = tl.exp(logprob - logprob)"),
    "lower clip dropped": ("tl.maximum(ratio, floor)", "ratio"),
    "upper clip dropped": ("tl.minimum(tl.maximum(ratio, floor), ceiling)", "tl.maximum(ratio, floor)"),
    "clip dropped from the gradient": ("tl.where(clipped < unclipped, 0.0, -unclipped)", "-unclipped"),
    "the larger branch": ("-tl.minimum(unclipped, clipped)", "-tl.maximum(unclipped, clipped)"),
    "weight dropped from the gradient": ("gradient * weight", "gradient"),
    "KL dropped from the loss": ("loss += kl_beta * kl", "loss += 0.0"),
    "KL dropped from the gradient": ("gradient -= kl_beta * (kl + d)", "gradient -= 0.0"),
    "KL's direction": ("d = tl.load(ref_p + token, mask=live, other=0.0) - logprob",
                       "d = logprob - tl.load(ref_p + token, mask=live, other=0.0)"),
}


def keep(**changes):
    """A mutant of grpo.grpo_loss: some arguments replaced by what a fused path that forgot them would compute."""
    def mutant(logprob, old_logprob, advantage, weight, **options):
        given = {"old_logprob": old_logprob, "advantage": advantage, "weight": weight} | options
        given |= {name: change(logprob, given) for name, change in changes.items() if name in given}
        return grpo.grpo_loss(logprob, **given)
    return mutant


PLAIN_TOKEN_MUTANTS = {
    "mask dropped": keep(weight=lambda logprob, given: torch.where(given["weight"] == 0, 1e-9, given["weight"])),
    "ratio dropped": keep(old_logprob=lambda logprob, given: logprob.detach()),
    "lower clip dropped": keep(clip_low=lambda logprob, given: 1e9),
    "upper clip dropped": keep(clip_high=lambda logprob, given: 1e9),
    "KL dropped": keep(kl_beta=lambda logprob, given: 0.0),
    "sign of the advantage": keep(advantage=lambda logprob, given: -given["advantage"]),
}


def masked_but_valid(case):
    """Real targets in the masked tokens too, so that a mutant that takes them in gives a wrong answer and no crash."""
    return case | {"target": case["target"].clamp(min=0)}


def caught(checks):
    """Whether one of the checks fails on its answer (a crash would be no catch)."""
    for one in checks:
        try:
            one()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", LINEAR_MUTANTS)
def test_linear_mutants_are_caught(name, tmp_path, monkeypatch):
    form, line, becomes = LINEAR_MUTANTS[name]
    if form == "triton" and kernels.triton is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("MARS_KERNELS", form)
    mutant = load_mutant("kernels/linear_loss.py", line, becomes, tmp_path)
    use_small_chunks(mutant, monkeypatch)
    for config in (mutant.STATS_CONFIG, mutant.GRADIENT_CONFIG):
        monkeypatch.setitem(config, "BLOCK", 128)
    cases = make_case(N=200 if DEVICE == "cuda" else 37), make_case(peaked=True)
    assert caught([partial(check, mutant.linear_grpo_loss, masked_but_valid(case)) for case in cases])


@needs_triton
@pytest.mark.parametrize("name", TRITON_TOKEN_MUTANTS)
def test_triton_token_mutants_are_caught(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", "triton")
    mutant = load_mutant("kernels/grpo_loss.py", *TRITON_TOKEN_MUTANTS[name], tmp_path)
    assert caught([partial(check_tokens, mutant.grpo_loss)])


@pytest.mark.parametrize("name", PLAIN_TOKEN_MUTANTS)
def test_plain_token_mutants_are_caught(name, form, monkeypatch):
    mutant = PLAIN_TOKEN_MUTANTS[name]
    assert caught([partial(check_tokens, mutant)])
    if name != "mask dropped":                                       # masked tokens do not come that far
        monkeypatch.setattr(LL, "grpo_loss", mutant)
        assert caught([partial(check, LL.linear_grpo_loss, make_case())])


# ---------------------------------------------------------------- compiled for Hopper

def cross_compile():
    """name -> {"usage": cubin's resource line, "ttir": …} for every kernel of the two files, for sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    tool = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    token_types = ["*fp32"] * 7 + ["i32"] + ["fp32"] * 3
    row_types = {"stats": ["*fp32", "*i64", "*fp32", "*fp32", "*fp32", "i32", "fp32"],
                 "gradient": ["*fp32", "*i64", "*fp32", "*fp32", "*bf16", "i32", "i32", "fp32"]}
    variants = {"stats": (LL.stats_kernel, row_types["stats"], LL.STATS_CONFIG, (0, 5)),
                "gradient": (LL.gradient_kernel, row_types["gradient"], LL.GRADIENT_CONFIG, (0, 4, 5, 6)),
                "gradient, odd V": (LL.gradient_kernel, row_types["gradient"], LL.GRADIENT_CONFIG, (0, 4)),
                "loss": (GL.grpo_kernel, token_types, GL.CONFIG | {"HAS_REF": False, "SUMS": GL.SUMS}, range(6)),
                "loss with KL": (GL.grpo_kernel, token_types, GL.CONFIG | {"HAS_REF": True, "SUMS": GL.SUMS}, range(6))}
    found = {}
    for name, (kernel, types, config, aligned) in variants.items():
        constants = {key: value for key, value in config.items() if key != "num_warps"}
        signature = dict(zip(kernel.arg_names, types)) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants,
                           attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config["num_warps"]})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        found[name] = {"usage": re.search(r"REG:\S+ STACK:\S+ SHARED:\S+ LOCAL:\S+", usage)[0],
                       "ttir": compiled.asm["ttir"], "ptx": compiled.asm["ptx"]}
    return found


@pytest.fixture(scope="module")
def hopper():
    """cross_compile() in a process of its own: in this one the kernels may be the interpreter's."""
    if kernels.triton is None or sys.platform != "linux":
        pytest.skip("needs Triton's compiler")
    compiling = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--json"]
    result = subprocess.run(command, cwd=ROOT, env=compiling, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_no_register_spills_on_hopper(hopper):
    for name, kernel in hopper.items():
        assert "STACK:0 " in kernel["usage"] and "LOCAL:0" in kernel["usage"], (name, kernel["usage"])


def test_rows_are_read_in_16_byte_pieces(hopper):
    assert "ld.global.v4" in hopper["stats"]["ptx"] and "ld.global.v4" in hopper["gradient"]["ptx"]
    assert "st.global.v4" in hopper["gradient"]["ptx"]


def test_block_is_read_before_any_thread_writes(hopper):
    """dz takes the place of z: in the loop all loads come first, then the barrier, then the stores."""
    order = re.findall(r"ld\.global\.v4|bar\.sync|st\.global", hopper["gradient"]["ptx"])
    assert re.fullmatch(r"(ld\.global\.v4 )+bar\.sync (st\.global )+", " ".join(order) + " ")


def test_row_offsets_are_64_bits(hopper):
    """N·V passes 2³¹: every offset of a row is computed and added as i64."""
    for name in ("stats", "gradient"):
        ttir = hopper[name]["ttir"]
        assert re.search(r"arith\.muli .* : i64", ttir) and not re.search(r"arith\.muli .* : i32", ttir)
        offsets = re.findall(r"tt\.addptr .* : !tt\.ptr<\w+>, (i\d+)", ttir)
        assert offsets and set(offsets) == {"i64"}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU with 20 GB free")
def test_more_than_2_31_logits():
    """One chunk of 2³¹ + logits: the last rows equal the same rows alone."""
    C, V = 14_200, 151_936
    z = torch.randn(C, V, device="cuda")
    target = torch.randint(0, V, (C,), device="cuda")
    tail = z[-3:].clone()
    parts = LL.triton_stats(z, target, 1.0), LL.triton_stats(tail, target[-3:], 1.0)
    assert C * V > 2 ** 31 and all(torch.equal(a[-3:], b) for a, b in zip(*parts))
    c = torch.randn(C, device="cuda")
    whole = LL.triton_gradient(z, target, parts[0][2], c, 1.0, torch.bfloat16)
    assert torch.equal(whole[-3:], LL.triton_gradient(tail, target[-3:], parts[1][2], c[-3:], 1.0, torch.bfloat16))


if __name__ == "__main__":
    compiled = cross_compile()
    if "--json" in sys.argv:
        print(json.dumps(compiled))
    else:
        for name, kernel in compiled.items():
            print(f"{name:16}  {kernel['usage']}")
