"""Decode kernels against their references, references against transformers, and mutants.

On a GPU the Triton forms run there; elsewhere they run in Triton's interpreter.
"""

import math
import sys
from functools import partial

import pytest
import torch
from helpers.tiny import lively
from hypothesis import given
from hypothesis import strategies as st
from kernel_forms import DEVICE, needs_triton
from mutants import load_mutant, read_mutants

import kernels
from kernels import decode, paged

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
# The interpreter warns of −inf − (−inf), which is masked after.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# The interpreter gets bf16 wrong.
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


@pytest.fixture
def triton_form(monkeypatch):
    monkeypatch.setenv("MARS_KERNELS", "triton")


def convert(case, dtype):
    """The case on the test's device, its floating-point tensors as own copies in `dtype`."""
    converted = dict(case)
    for name, x in case.items():
        if torch.is_tensor(x):
            kind = dtype if x.is_floating_point() else x.dtype
            converted[name] = x.clone().to(DEVICE, kind)
    return converted


def attention_case(
    lengths, Hq=4, Hkv=2, Dh=32, page_size=32, *, spare=2, scale=0.1, layout=None, dtype=torch.float
):
    """Arguments of paged_attention.

    What must not be read is NaN in the pages and far outside the pool in the block table.
    """
    generator = torch.Generator().manual_seed(0)
    B = len(lengths)
    width = max(1, math.ceil(max(lengths, default=0) / page_size)) + spare
    count = B * width + 1
    k_pages, v_pages = torch.full((2, count, page_size, Hkv, Dh), math.nan)
    table = torch.full((B, width), 2**30, dtype=torch.int32)
    free = torch.randperm(count, generator=generator).tolist()
    for row, length in enumerate(lengths):
        for start in range(0, length, page_size):
            page = free.pop()
            count = min(page_size, length - start)
            table[row, start // page_size] = page
            k_pages[page, :count] = 2 * torch.randn(count, Hkv, Dh, generator=generator)
            v_pages[page, :count] = torch.randn(count, Hkv, Dh, generator=generator)
    case = {
        "q": torch.randn(B, Hq, Dh, generator=generator),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "scale": scale,
    }
    table = table.to(DEVICE)
    return convert(case, dtype) | {"block_table": layout(table) if layout else table}


# A GPU's exp2 is approximate.
ATOL = 1e-5 if DEVICE == "cuda" else 2e-6


def check_attention(function, case, atol=ATOL):
    out = function(**case)
    truth = paged.reference(**convert(case, torch.float64))
    assert out.dtype == case["q"].dtype
    assert out.shape == truth.shape
    if len(out):
        assert (out.double() - truth).abs().max() <= atol


ATTENTION_CASES = {
    "odd lengths and padding rows": dict(lengths=[1, 0, 131, 77, 0]),
    "page boundaries": dict(lengths=[31, 32, 33, 64, 65, 96], Hq=2, Hkv=1),
    "nothing but padding": dict(lengths=[0, 0]),
    "no row": dict(lengths=[]),
    "page of 16": dict(lengths=[16, 17, 150, 5], page_size=16),
    "page of 256, head of 128": dict(lengths=[257, 2], page_size=256, Dh=128, Hq=2, Hkv=1, spare=0),
    "multi-head": dict(lengths=[33, 70], Hq=3, Hkv=3),
    "group of 7": dict(lengths=[33, 70], Hq=14, Hkv=2),
    "one page in the table": dict(lengths=[5, 32], spare=0),
    "part of a wider table": dict(lengths=[33, 64, 1], layout=lambda table: table[:, :3]),
    "columns of the table together": dict(lengths=[33, 64, 1], layout=lambda x: x.T.clone().T),
    # Scores of ±10⁴: without the running maximum the exponentials overflow.
    "large scores": dict(lengths=[50, 97], scale=300.0, atol=1e-2),
    "fp16": dict(lengths=[1, 33, 150, 0], dtype=torch.float16, atol=2e-3),
}


@needs_triton
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention(name, triton_form):
    case = dict(ATTENTION_CASES[name])
    atol = case.pop("atol", ATOL)
    check_attention(kernels.paged_attention, attention_case(**case), atol)


def check_splits(module, monkeypatch, poisoned):
    """Pages of 32 and of 8 in blocks of 16 tokens and three splits of a row, some of them empty.

    A mutant answers, wrongly, only where pool and table are readable everywhere.
    """
    monkeypatch.setattr(module, "BUFFER_BYTES", 1)  # the smallest block
    monkeypatch.setattr(module, "LEAST_PIECE", 1)
    function = partial(module.triton_paged_attention, splits=3)
    for page_size in (32, 8):
        case = attention_case([67, 0, 1, 33], page_size=page_size)
        if not poisoned:
            case["k_pages"] = case["k_pages"].nan_to_num(1.5)
            case["v_pages"] = case["v_pages"].nan_to_num(1.5)
            case["block_table"] = case["block_table"] % len(case["k_pages"])
        check_attention(function, case)


@needs_triton
def test_splits(monkeypatch):
    check_splits(paged, monkeypatch, poisoned=True)


@needs_triton
def test_nan_stays_in_its_row(triton_form):
    """A broken row is seen as NaN (not hidden as zeros) and touches no other row."""
    case = attention_case([40, 70, 33])
    clean = kernels.paged_attention(**case)
    case["q"][1] = math.nan
    broken = kernels.paged_attention(**case)
    assert broken[1].isnan().all() and torch.equal(broken[[0, 2]], clean[[0, 2]])


@given(
    rows=st.integers(0, 512),
    kv_heads=st.integers(1, 40),
    capacity=st.integers(1, 200_000),
    block=st.sampled_from([16, 32, 128]),
    at_once=st.integers(1, 2000),
)
def test_split_count_is_the_cheapest(rows, kv_heads, capacity, block, at_once):
    def cost(splits):
        waves = math.ceil(rows * kv_heads * splits / at_once)
        split_size = math.ceil(capacity / splits / block) * block
        return waves * (split_size + paged.TOKENS_PER_START)

    splits = paged.split_count(rows, kv_heads, capacity, block, at_once)
    most = min(paged.MAX_PARTS, math.ceil(capacity / paged.LEAST_PIECE))
    assert 1 <= splits <= most
    assert all(cost(splits) <= cost(other) for other in (1, most, max(1, splits - 1)))


@needs_triton
def test_splits_are_planned_for_the_rows_and_not_for_the_width_of_the_table(monkeypatch):
    """A table of a CUDA graph is as wide as the pool; the rows have one pool together."""
    planned = []
    monkeypatch.setattr(paged, "split_count", lambda *given: planned.append(given) or 1)
    case = attention_case([9, 2, 40, 1], spare=50)
    case["block_table"] = case["block_table"].repeat(1, 4)
    check_attention(paged.triton_paged_attention, case)
    (given,) = planned  # and no launch for ranges that nobody has
    rows, kv_heads, capacity = given[:3]
    assert (rows, kv_heads) == (4, 2)
    assert capacity == 32 * math.ceil(len(case["k_pages"]) / 4) < case["block_table"].shape[1] * 32


def norm_case(B=5, D=123, *, first=False, size=1.0):
    generator = torch.Generator().manual_seed(0)
    x, residual = size * torch.randn(2, B, D, generator=generator)
    weight = 1 + torch.randn(D, generator=generator)
    return {"x": x, "residual": None if first else residual, "weight": weight, "eps": 1e-2}


def rope_case(B=5, Hq=4, Hkv=2, Dh=32, *, norm=True):
    generator = torch.Generator().manual_seed(0)
    angle = 10 * torch.randn(B, Dh // 2, generator=generator).repeat(1, 2)
    q_weight, k_weight = 1 + torch.randn(2, Dh, generator=generator)
    # The last of 20 slots stays free, for a mutant that writes into the next one.
    slots = torch.randperm(19, generator=generator)[:B]
    slots[1::3] = -1
    k_pages, v_pages = torch.randn(2, 5, 4, Hkv, Dh, generator=generator)
    return {
        "qkv": 0.3 * torch.randn(B, (Hq + 2 * Hkv) * Dh, generator=generator),
        "q_weight": q_weight if norm else None,
        "k_weight": k_weight if norm else None,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "slots": slots,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "eps": 1e-2,
    }


def silu_case(B=3, F=1337):
    return {"gate_up": 4 * torch.randn(B, 2 * F, generator=torch.Generator().manual_seed(0))}


def outputs(function, case):
    """Everything the function gives or writes."""
    out = function(**case)
    if isinstance(out, tuple):
        return out
    if "k_pages" in case:
        return out, case["k_pages"], case["v_pages"]
    return (out,)


def check_small(name, module, case):
    """fp32 within rounding of the reference, half precision the same but for one in 200."""
    function = getattr(module, name)
    reference = getattr(decode, name + "_reference")
    for dtype in (torch.float32, *HALVES):
        mine = outputs(function, convert(case, dtype))
        theirs = outputs(reference, convert(case, dtype))
        for out, right in zip(mine, theirs, strict=True):
            assert out.dtype == dtype
            if dtype == torch.float32:
                assert (out - right).abs().max() <= 2e-6 * right.abs().max().clamp(min=1)
            else:
                assert (out != right).float().mean() <= 0.005


SMALL_CASES = {
    "add_rms_norm": [norm_case(), norm_case(first=True), norm_case(1, 256, size=0.05)],
    "qk_norm_rope_store": [
        rope_case(),
        rope_case(2, norm=False),
        rope_case(3, 3, 3, 16),
        rope_case(1, 8, 1, 64),
    ],
    "silu_mul": [silu_case(), silu_case(1, 8)],
}


@needs_triton
@pytest.mark.parametrize("name", SMALL_CASES)
def test_small_kernels(name, triton_form):
    for case in SMALL_CASES[name]:
        check_small(name, decode, case)


@needs_triton
@pytest.mark.parametrize(
    "name, change",
    [
        ("paged_attention", dict(block_table=torch.zeros(2, 3, dtype=torch.int64))),
        ("paged_attention", dict(q=torch.zeros(2, 4, 32, dtype=torch.float16))),
        ("paged_attention", dict(kv_ranges=torch.zeros(1, 5, dtype=torch.int32))),
        ("paged_attention", attention_case([5, 40], Dh=48)),
        ("add_rms_norm", dict(weight=torch.zeros(7))),
        ("add_rms_norm", dict(x=torch.zeros(123, 5).T)),
        ("qk_norm_rope_store", dict(q_weight=None)),
        ("silu_mul", dict(gate_up=torch.zeros(8, 3).T)),
    ],
)
def test_misuse_is_refused(name, change, triton_form):
    """Wrong shapes, types and layouts, of which one of each is tried."""
    case = attention_case([5, 40])
    if name in SMALL_CASES:
        case = convert(SMALL_CASES[name][0], torch.float32)
    case |= {key: x.to(DEVICE) if torch.is_tensor(x) else x for key, x in change.items()}
    with pytest.raises(ValueError, match=name + ": "):
        getattr(kernels, name)(**case)


def assert_same(mine, theirs):
    """Bit for bit; on a GPU, whose sums depend on the shape around them, by rounding."""
    if DEVICE == "cuda" and mine.dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)
    else:
        assert (mine != theirs).float().mean() <= (0.005 if DEVICE == "cuda" else 0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama"])
def test_references_round_as_transformers_does(kind, dtype):
    """Norm after a residual sum, QK norm with rotation, SiLU product."""
    model = lively(kind).model.to(DEVICE, dtype)  # 4 query heads over 2 key heads of 8
    layer = model.layers[0]
    attn = layer.self_attn
    x, residual = torch.randn(2, 9, 32, device=DEVICE).to(dtype)
    normed, total = decode.add_rms_norm_reference(
        x, residual, layer.input_layernorm.weight, model.config.rms_norm_eps
    )
    assert torch.equal(total, residual + x)
    assert_same(normed, layer.input_layernorm(residual + x))

    cos, sin = model.rotary_emb(x[None], torch.arange(9, device=DEVICE)[None])
    q, k, v = (torch.randn(9, heads, 8, device=DEVICE).to(dtype) for heads in (4, 2, 2))
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8, device=DEVICE, dtype=dtype)
    normed_heads = hasattr(attn, "q_norm")
    weights = (attn.q_norm.weight, attn.k_norm.weight) if normed_heads else (None, None)
    mine = decode.qk_norm_rope_store_reference(
        torch.cat((q, k, v), 1).flatten(1),
        *weights,
        cos[0],
        sin[0],
        torch.arange(9, device=DEVICE),
        k_pages,
        v_pages,
        model.config.rms_norm_eps,
    )
    if normed_heads:
        q = attn.q_norm(q)
        k = attn.k_norm(k)
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    q, k = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    assert_same(mine, q[0].transpose(0, 1))
    assert_same(k_pages.flatten(0, 1)[:9], k[0].transpose(0, 1))
    assert torch.equal(v_pages.flatten(0, 1)[:9], v)

    gate_up = torch.randn(9, 96, device=DEVICE).to(dtype)
    theirs = layer.mlp.act_fn(gate_up[:, :48]) * gate_up[:, 48:]
    assert_same(decode.silu_mul_reference(gate_up), theirs)


ATTENTION_MUTANTS = read_mutants(  # of kernels/paged.py
    """
mask one too far :: valid = start + j < last → valid = start + j <= last
mask one too short :: valid = start + j < last → valid = start + j < last - 1
no mask on scores :: tl.where(valid[None, :], score, float("-inf")) → score
no scale :: input_precision="ieee") * scale → input_precision="ieee")
natural scale for base 2 :: scale * math.log2(math.e) → scale
heads of a group strided :: HQ + kv_head * HEADS_PER_KEY → HQ + kv_head
key head of the neighbour :: (slot * HKV + kv_head) → (slot * HKV + HKV - 1 - kv_head)
sum not rescaled :: running_sum * shrink + → running_sum +
values not rescaled :: acc * shrink[:, None] + weighted → acc + weighted
merge reads the next head's parts :: mask=part < parts, other=0.0
    → mask=part < PARTS_PADDED, other=0.0
merge without rescaling :: tl.exp2(part_max - tl.max(part_max, 0)) → 1.0
merge takes empty parts :: used = part_sum != 0.0 → used = part_sum == part_sum
padding row divides by zero :: tl.where(total == 0.0, 1.0, total) → total
offset in page lost :: (start % PAGE + j) → j
first page for a whole block :: (start + j) // PAGE → (start + 0 * j) // PAGE
table of the first row :: block_table_ptr + begin.to(tl.int64) * row_stride → block_table_ptr
splits overlap :: last = tl.minimum(first + split_size, range_last) → last = range_last
"""
)
SMALL_MUTANTS = read_mutants(  # of kernels/decode.py
    """
norm: mean over the block :: tl.sum(row * row, 0) / D → tl.sum(row * row, 0) / BLOCK
norm: no eps :: (row * row, 0) / D + eps → (row * row, 0) / D
norm: residual lost :: round_to(row + residual, dtype) → round_to(residual, dtype)
norm: not rounded :: unit = round_to(row * tl.rsqrt(tl.sum(row * row, 0) / D + eps), dtype)
    → unit = row * tl.rsqrt(tl.sum(row * row, 0) / D + eps)
norm: sum not rounded :: round_to(row + residual, dtype) → row + residual
rope: other way round :: (first_cos - round_to( → (first_cos + round_to(
rope: unrounded product :: round_to(first * cos_first, dtype) → first * cos_first
rope: unrounded norm :: round_to(first * shrink, dtype) → (first * shrink)
rope: weight of q for k :: weight_ptr = k_weight_ptr → weight_ptr = q_weight_ptr
rope: norm over half a head :: + tl.sum(second * second, 0) → * 2
rope: values rotated too :: if head >= HQ + HKV: → if head >= HQ + 2 * HKV:
rope: -1 stored :: slot = tl.load(slots_ptr + row) → slot = tl.abs(tl.load(slots_ptr + row))
rope: key in the wrong head :: (slot * HKV + head - HQ) * DH
    → (slot * HKV + HQ + HKV - 1 - head) * DH
silu: other sign :: tl.exp(-gate) → tl.exp(gate)
silu: gate and up swapped :: gate = tl.load(gate_ptr + f → gate = tl.load(gate_ptr + WIDTH + f
silu: not rounded :: act = round_to(gate / (1.0 + tl.exp(-gate)), dtype)
    → act = gate / (1.0 + tl.exp(-gate))
silu: last column lost :: (act * up).to(dtype), mask=inside
    → (act * up).to(dtype), mask=f < WIDTH - 1
"""
)
MUTATED = {"norm": "add_rms_norm", "rope": "qk_norm_rope_store", "silu": "silu_mul"}


@needs_triton
@pytest.mark.parametrize("name", ATTENTION_MUTANTS)
def test_attention_mutants_are_caught(name, tmp_path, monkeypatch):
    mutant = load_mutant("kernels/paged.py", *ATTENTION_MUTANTS[name], tmp_path)
    with pytest.raises(AssertionError):
        check_splits(mutant, monkeypatch, poisoned=False)


@needs_triton
@pytest.mark.parametrize("name", SMALL_MUTANTS)
def test_small_mutants_are_caught(name, tmp_path, triton_form):
    function = MUTATED[name.partition(":")[0]]
    mutant = load_mutant("kernels/decode.py", *SMALL_MUTANTS[name], tmp_path)
    with pytest.raises(AssertionError):
        for case in SMALL_CASES[function]:
            check_small(function, mutant, case)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(32, 8, 128, 16), (32, 8, 128, 256), (12, 12, 64, 16)])
def test_bf16_on_the_gpu(shape):
    """No further off float64 than PyTorch's own attention, and the same bits twice."""
    case = attention_case([1, 0, 700, 4097, 2048, 15], *shape, dtype=torch.bfloat16)
    truth = paged.reference(**convert(case, torch.float64))
    mine = kernels.paged_attention(**case)
    error = (mine.double() - truth).abs().max()
    theirs = (paged.reference(**case).double() - truth).abs().max()
    assert error <= 1.5 * theirs + 1e-3
    assert all(torch.equal(mine, kernels.paged_attention(**case)) for _ in range(3))
