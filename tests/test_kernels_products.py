"""oneDNN's products beside fp64: gradients, the fused loss, and a whole policy."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny import CPU, OBJECTIVE, make_samples, model, weigh
from test_kernels_loss import CASES, LL, check, make_case, use_small_chunks

import kernels
import trainer
from kernels import products

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch has no oneDNN here"
)


@pytest.fixture
def counted(monkeypatch):
    """As on a machine where oneDNN is faster; the mock that counts its products."""
    watched = Mock(side_effect=products.onednn)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "onednn", watched)
    return watched


def gradients(function, dtype, bias: bool):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 37, 24), (19, 24), (19,)][: 2 + bias]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    y = function(*[x.requires_grad_() for x in inputs])
    above = torch.randn(y.shape, generator=generator).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, above)]


@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_its_gradients_are_those_of_fp64(bias, counted):
    found = gradients(products.linear, torch.float32, bias)
    assert counted.call_count == 3
    for value, truth in zip(found, gradients(F.linear, torch.float64, bias), strict=True):
        assert value.dtype == torch.float32
        assert (value - truth).norm() < 1e-6 * truth.norm()  # bf16 would be off by 4e-3
    gradients(products.linear, torch.float64, bias)
    with torch.autocast("cpu", torch.bfloat16):
        products.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert counted.call_count == 3, "other types and autocast are PyTorch's"


@pytest.mark.parametrize("name", ["usual", "all masked"])
def test_the_fused_loss_by_onednn(name, counted, monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", "reference")
    use_small_chunks(LL, monkeypatch)
    check(kernels.linear_grpo_loss, make_case(**CASES[name], device="cpu"))
    assert counted.called == (name == "usual")


def test_a_policy_with_adapters_by_onednn(counted, monkeypatch):
    found = []
    for faster in (True, False):
        monkeypatch.setattr(products, "onednn_is_faster", lambda faster=faster: faster)
        plain = model("qwen2")
        trainer.add_adapters(plain, 3, seed=0)
        policy = trainer.Policy(plain, bf16=False, recompute_activations=True)
        (batch,) = trainer.micro_batches(make_samples(), weigh(make_samples()), 10_000, CPU)
        trainer.backward(policy, [batch], **OBJECTIVE)
        found.append([p.grad for p in policy.parameters() if p.requires_grad])
        assert counted.call_count > 2 * 7 * 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cpu", ["AMD avx2 avx512f", "AMD avx2", "GenuineIntel avx512f"])
def test_onednn_is_taken_where_mkl_stops_at_avx2_and_the_processor_does_not(cpu, monkeypatch):
    monkeypatch.setattr(products.Path, "exists", lambda self: True)
    monkeypatch.setattr(products.Path, "read_text", lambda self: cpu)
    assert products.onednn_is_faster.__wrapped__() is (cpu == "AMD avx2 avx512f")
