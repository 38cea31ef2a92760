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


RULE = products.onednn_is_faster.__wrapped__  # as it stands, before any test forces it


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


LAYOUTS = {
    "as made": lambda x: x.contiguous(),
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "repeated": lambda x: x[..., :1].expand(x.shape) if x.numel() else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (6,), (2, 0), (2, 3)], ids=str)
def test_a_product_of_any_size_and_layout(rows, layout, products_by):
    """No row, one row, no numbers in a row: products and both gradients are those of fp64."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs, bias in [(0, 4, 1), (4, 0, 1), (1, 1, 0), (7, 5, 0), (7, 5, 1)]:
        shapes = [(*rows, inputs), (outputs, inputs), (outputs,)][: 2 + bias]
        given = [LAYOUTS[layout](torch.randn(shape, generator=generator)) for shape in shapes]
        above = LAYOUTS[layout](torch.randn(*rows, outputs, generator=generator))
        found = []
        for function, dtype in ((products.linear, torch.float32), (F.linear, torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in given]
            y = function(*leaves)
            found.append([y, *torch.autograd.grad(y, leaves, above.to(dtype))])
        for value, truth in zip(*found, strict=True):
            torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-5)
        if len(rows) == 1:
            x, weight = given[:2]
            truth = x.double() @ weight.double().t()
            product = products.matmul(x, weight.t()).double()
            torch.testing.assert_close(product, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cpu", ["AuthenticAMD", "GenuineIntel"])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_onednn_is_taken_where_mkl_stops_at_avx2_and_pytorch_does_not(cpu, capability, monkeypatch):
    monkeypatch.setattr(products.Path, "exists", lambda self: True)
    monkeypatch.setattr(products.Path, "read_text", lambda self: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    faster = (cpu, capability) == ("AuthenticAMD", "AVX512")
    assert RULE() is faster
