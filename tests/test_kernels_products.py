"""oneDNN's products beside fp64: gradients, and a whole policy. The loss: test_kernels_loss.py."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny import make_samples, model, pack, step

import trainer
from kernels import products

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch has no oneDNN here"
)


RULE = products.onednn_is_faster.__wrapped__  # as it stands, before any test forces it


def test_products_are_by_onednn_in_fp32_and_in_every_layer(monkeypatch):
    """That this changes no gradient is tested where `products_by` is used."""
    counted = Mock(side_effect=products.onednn)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "onednn", counted)
    x = torch.ones(2, 3, requires_grad=True)
    weight = torch.ones(4, 3, requires_grad=True)
    products.linear(x, weight).sum().backward()
    assert counted.call_count == 3, "one forward, two backward"
    products.linear(x.double(), weight.double()).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        products.linear(x, weight)
    assert counted.call_count == 3, "other types and autocast are PyTorch's"
    for adapters in (False, True):
        counted.reset_mock()
        plain = model("qwen2")
        if adapters:
            trainer.add_adapters(plain, 3, seed=0)
        step(trainer.Policy(plain, bf16=False, recompute_activations=True), pack(make_samples()))
        assert counted.call_count > 2 * 7 * 2, "all seven products of both layers"


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
        results = []
        for function, dtype in ((products.linear, torch.float32), (F.linear, torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in given]
            y = function(*leaves)
            assert y.dtype == dtype
            results.append([y, *torch.autograd.grad(y, leaves, above.to(dtype))])
        for value, truth in zip(*results, strict=True):
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
