"""The sampler's attention: the cascade of a CPU against the plain form, and the packed prefill."""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forms import needs_triton, use_library
from mutants import load_mutant, read_mutants

import kernels
from kernels import paged, varlen
from kernels.paged import reference, triton_paged_attention
from sampler import Sampler, attention, plan
from sampler.plan import Batch, plan_kv_ranges

PAGE = 4


def random_tree(seed: int, count: int, page_size: int):
    """Block tables and lengths of rows whose beginnings are a random tree, in plan_decode's order.

    Each row forks an earlier one at a random page, or begins anew; its last page is its own.
    """
    rng = random.Random(seed)
    free = list(range(count * 12))
    rng.shuffle(free)
    tables = []
    for _ in range(count):
        before = rng.choice([[], *tables])
        shared = before[: rng.randint(0, max(0, len(before) - 1))]
        tables.append(shared + [free.pop() for _ in range(rng.randint(1, 10 - len(shared)))])
    tables.sort(key=lambda table: np.array(table, np.int32).tobytes())
    lengths = [len(table) * page_size - rng.randrange(page_size) for table in tables]
    width = max(map(len, tables))
    # After a row's end the table has the numbers of an earlier row.
    block_table = [table + [rng.randrange(12)] * (width - len(table)) for table in tables]
    return np.array(block_table, np.int32), lengths


def decode_case(seed, count, page_size, heads, kv_heads, size=8, padding=0, dtype=torch.float32):
    """Arguments of the cascade; keys and values that no row owns are NaN."""
    table, lengths = random_tree(seed, count, page_size)
    torch.manual_seed(seed)
    pool = torch.full((2, count * 12, page_size, kv_heads, size), torch.nan, dtype=dtype)
    for row, length in zip(table, lengths, strict=True):
        for i in range(0, length, page_size):
            used = min(page_size, length - i)
            shape = 2, used, kv_heads, size
            pool[:, row[i // page_size], :used] = torch.randn(shape, dtype=dtype)
    lengths += [0] * padding
    table = F.pad(torch.from_numpy(table), (0, 0, 0, padding))
    device_lengths = torch.tensor(lengths, dtype=torch.int32)
    batch = Batch(None, None, None, table, device_lengths, host_lengths=lengths)
    q = torch.randn(count + padding, heads, size, dtype=dtype)
    return q, *pool, batch, 0.7


def error_of(case):
    """Largest difference of the cascade to the plain form."""
    q, k_pages, v_pages, batch, scale = case
    out = attention.cascade(*case)
    expected = reference(q, k_pages, v_pages, batch.block_table, batch.lengths, scale=scale)
    return (out - expected).abs().max().item()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 14),
    page_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    least=st.sampled_from([1, 500, 4000]),
    padding=st.integers(0, 2),
)
def test_the_cascade_is_plain_attention(seed, count, page_size, heads, least, padding):
    """This holds for any tree of prefixes. A NaN that no row owns reaches no output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LEAST_NUMBERS", least)
        assert error_of(decode_case(seed, count, page_size, *heads, padding=padding)) < 1e-5
        again = decode_case(seed, count, page_size, *heads, dtype=torch.float64)
        assert error_of(again) < 1e-12


def test_large_scores_do_not_overflow():
    """Scores of ±10⁴: without the maximum the exponentials overflow."""
    *case, _ = decode_case(5, 8, PAGE, 4, 2)
    assert error_of((*case, 500.0)) < 1e-2


@pytest.mark.parametrize("library", ["torch", "torch 2.11", "flash-attn 2", "flash-attn 4"])
def test_varlen_prefill_passes_the_right_bounds(monkeypatch, library):
    """The CUDA prefill, by plain forms of each library, against the row-wise form."""
    use_library(library, monkeypatch)
    k_pages, v_pages = torch.randn(2, 24, PAGE, 2, 16)
    table = torch.stack([torch.randperm(24)[:5] for _ in range(3)]).int()
    lengths = torch.tensor([17, 9, 4], dtype=torch.int32)
    # The last 5 of 17, all 9, the last one of 4.
    batch = Batch(None, None, None, table, lengths, [0, 5, 14, 15], [17, 9, 4])
    args = torch.randn(15, 4, 16), k_pages, v_pages, batch, 0.25
    torch.testing.assert_close(attention.packed_attention(*args), attention.row_attention(*args))


def test_flash_attn_4_is_for_hopper_and_blackwell_and_comes_first(monkeypatch):
    q = torch.zeros(1, 2, 128)

    def chosen(*libraries, major=9, q=q):
        for name in ("flash_attn_4", "flash_attn_2"):
            monkeypatch.setattr(varlen, name, name if name in libraries else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        return varlen.choose_flash_attention(q)

    both = "flash_attn_4", "flash_attn_2"
    by_major = [chosen(*both, major=major)[-1] for major in (8, 9, 10, 12)]
    assert by_major == ["2", "4", "4", "2"]
    assert chosen(*both, q=torch.zeros(1, 2, 256)) == "flash_attn_2"
    assert chosen("flash_attn_4", major=8) is chosen() is None


@needs_triton
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 8),
    page_size=st.sampled_from([3, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    least=st.sampled_from([1, 8, 10**6]),
    buffer=st.sampled_from([1024, 2048]),
    splits=st.sampled_from([None, 1, 3]),
    queries=st.sampled_from([4, 64]),
)
def test_shared_ranges_change_nothing_but_the_reads(
    seed, count, page_size, heads, least, buffer, splits, queries
):
    """The kernel with a batch's ranges is plain attention for any tree of prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LEAST_TOKENS", least)
        patch.setattr(paged, "RANGE_QUERIES", queries)
        patch.setattr(paged, "BUFFER_BYTES", buffer)
        patch.setattr(paged, "LEAST_PIECE", 1)
        *tensors, batch, scale = decode_case(seed, count, page_size, *heads, size=16)
        max_rows = paged.max_rows_of_range(heads[0] // heads[1])
        table, lengths = batch.block_table.numpy(), np.array(batch.host_lengths)
        ranges = torch.from_numpy(plan_kv_ranges(table, lengths, page_size, max_rows))
        arguments = *tensors, batch.block_table, batch.lengths
        out = triton_paged_attention(*arguments, scale=scale, kv_ranges=ranges, splits=splits)
        torch.testing.assert_close(out, reference(*arguments, scale=scale), rtol=1e-5, atol=1e-5)


RANGE_MUTANTS = read_mutants(  # of kernels/paged.py
    """
last row forgotten :: m < (end - begin) * HEADS_PER_KEY → m < (end - begin - 1) * HEADS_PER_KEY
levels in one part :: level * shared_splits + split → split
parts that no split wrote :: torch.zeros_like(part_max) → torch.ones_like(part_max)
heads of other keys :: m // HEADS_PER_KEY * HQ + m % HEADS_PER_KEY → m
each range begins at 0 :: first = range_first + split * split_size → first = split * split_size
"""
)


def check_ranges(module):
    """A prompt of four rows, and a turn of two of them after it."""
    prompt, turn = [0, 1, 2], [3, 4]
    table = [prompt + turn + [5 + i] for i in range(2)] + [prompt + [8 + i, 0, 0] for i in range(2)]
    lengths = [24, 21, 14, 13]
    torch.manual_seed(0)
    q = torch.randn(4, 4, 16)
    pages = torch.randn(2, 12, PAGE, 2, 16)
    ranges = plan_kv_ranges(np.array(table, np.int32), np.array(lengths), PAGE, 8)
    assert ranges[:2].tolist() == [[0, 4, 0, 12, 0], [0, 2, 12, 20, 1]], "both are read once"
    assert (ranges[2:, 3] - ranges[2:, 2]).tolist() == [4, 1, 2, 1], "the rest is each row's own"
    table, lengths, ranges = (torch.tensor(x, dtype=torch.int32) for x in (table, lengths, ranges))
    out = module.triton_paged_attention(
        q, *pages, table, lengths, scale=0.5, kv_ranges=ranges, splits=2
    )
    expected = reference(q, *pages, table, lengths, scale=0.5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("name", [None, *RANGE_MUTANTS])
def test_ranges_of_two_levels_and_their_mutants(name, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "LEAST_TOKENS", 1)
    module = paged
    if name is not None:
        module = load_mutant("kernels/paged.py", *RANGE_MUTANTS[name], tmp_path)
    monkeypatch.setattr(module, "BUFFER_BYTES", 1024)  # blocks of 16 tokens
    monkeypatch.setattr(module, "LEAST_PIECE", 1)
    with pytest.raises(AssertionError) if name else contextlib.nullcontext():
        check_ranges(module)


@needs_triton
def test_a_sampler_on_the_kernels_chooses_the_same_tokens(monkeypatch):
    """All kernels are Triton's. Groups share a prompt, and batches are padded."""
    model = tiny.lively("Qwen3", num_hidden_layers=1, head_dim=16)
    prompts = [[i, *range(4)] for i in (1, 1, 2, 2)]

    def answers():
        sampler = Sampler(model, max_tokens=400, page_size=4, buckets=True, max_sequences=6)
        return sampler.generate(prompts, max_new_tokens=2)

    plain = answers()
    monkeypatch.setenv("MARS_KERNELS", "triton")
    monkeypatch.setattr(plan, "LEAST_TOKENS", 1)
    counts = []
    launch = kernels.paged_attention

    def count_shared(*args, kv_ranges, **options):
        counts.append(int(kv_ranges[: -len(args[0])].any(1).sum()))
        return launch(*args, kv_ranges=kv_ranges, **options)

    monkeypatch.setattr(kernels, "paged_attention", count_shared)
    for mine, theirs in zip(answers(), plain, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert max(counts) >= 2, "both groups read their prompt together"
