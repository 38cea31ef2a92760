"""Micro-batches: every loss token knows its sample; shared prefixes change no loss, no gradient."""

import copy

import pytest
import torch
from helpers.tiny import CPU, KINDS, make_samples, model, pack, step
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forms import use_library

import trainer
from rollout import Sample
from trainer import attention, prefixes


def family() -> list[Sample]:
    """Of each sample a twin, one that is shorter, and one that ends otherwise."""
    samples = []
    for sample in make_samples(5):
        last = max(i for i, own in enumerate(sample.mask) if own)
        twin, shorter, other = (copy.deepcopy(sample) for _ in range(3))
        twin.advantage = -2.0
        for name in ("tokens", "mask", "logprobs"):
            setattr(shorter, name, getattr(shorter, name)[:last])
        place = 2 * last // 3
        other.tokens[place] = (other.tokens[place] + 1) % 61
        samples += [sample, twin, shorter, other]
    return samples


def step_with_logprobs(kind, batches, **options):
    """Loss, gradients by name, and each owner's log-probs in the order of its tokens."""
    loss, gradients, stats = step(trainer.Policy(model(kind), bf16=False, **options), batches)
    logprobs = {}
    for batch, numbers in zip(batches, stats):
        for owner, logprob in zip(batch.owner.tolist(), numbers["logprob"].tolist()):
            logprobs.setdefault(owner, []).append(logprob)
    return loss, gradients, logprobs


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_leave_loss_gradient_and_log_probs_as_they_are(kind):
    samples = family()
    loss, gradients, logprobs = step_with_logprobs(kind, pack(samples, pack=False))
    for capacity, recompute in ((10_000, True), (60, False)):
        batches = pack(samples, capacity)
        assert (len(batches) > 1) == (capacity < 100)
        found = step_with_logprobs(kind, batches, recompute_activations=recompute)
        other_loss, other_gradients, other_logprobs = found
        assert other_loss == pytest.approx(loss, abs=1e-5)
        for name, gradient in gradients.items():
            # A bias of the keys has no gradient: softmax does not see it.
            error = (gradient - other_gradients[name]).norm()
            assert error < 1e-4 * gradient.norm() + 1e-7, name
        assert logprobs.keys() == other_logprobs.keys()
        for owner, logprob in logprobs.items():
            assert logprob == pytest.approx(other_logprobs[owner], abs=1e-4)


def test_a_shared_prefix_is_input_once_and_counts_once():
    samples = family()
    samples = samples[::2] + samples[1::2]  # kin are no neighbours yet
    (batch,) = pack(samples)
    ends = [max((i for i, own in enumerate(s.mask) if own), default=0) for s in samples]
    beginnings = {
        tuple(sample.tokens[:n])
        for sample, end in zip(samples, ends, strict=True)
        for n in range(1, end + 1)
    }
    assert batch.tokens.numel() == sum(batch.lengths) == len(beginnings) < sum(ends) / 2
    kin = [[0] * 9 + [word] for word in range(9)]
    # Seven of them have 9 + 7 tokens and 70 keys, eight would have too many keys.
    assert prefixes.pack(kin, [1] * 9, 18) == [[0, 1, 2, 3, 4, 5, 6], [7, 8]]
    # A quarter of the sample that shares, not of the one before it.
    assert [prefixes.shared_prefix([7] * 4, [7] * 4 + [8] * n) for n in (12, 13)] == [4, 0]


# Tokens of few kinds, so that much is shared, and whether each is sampled.
texts = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12), max_size=12
)


def sample_of(number: int, text: list[tuple[int, bool]]) -> Sample:
    """A sample whose every number is its own."""
    tokens, mask = zip(*text)
    sample = Sample("sys2", question_index=0, attempt=number, advantage=number + 0.5)
    sample.tokens = list(tokens)
    sample.mask = [False, *mask[1:]]
    sample.logprobs = [-number - i / 16 for i in range(len(tokens))]
    return sample


@settings(max_examples=200)
@given(texts, st.integers(1, 40))
def test_every_prediction_knows_its_sample_and_its_tokens(texts, capacity):
    """Whatever samples have in common: the keys of each spell it, and limits hold."""
    samples = [sample_of(number, text) for number, text in enumerate(texts)]
    weights = [-16 * torch.tensor(sample.logprobs) for sample in samples]
    ends = [max((i for i, own in enumerate(s.mask) if own), default=0) for s in samples]
    found = [[] for _ in samples]
    for batch in trainer.micro_batches(samples, weights, capacity, CPU):
        row = batch.tokens[0].tolist()
        keys = batch.keys
        if keys is None:  # nothing is shared
            keys = prefixes.Keys(batch.lengths, torch.arange(len(row)), batch.cu_seqlens)
        bounds = keys.cu_seqlens.tolist()
        spelled = set()
        for start, end, own in zip(bounds[:-1], bounds[1:], batch.lengths, strict=True):
            rows = keys.indices[start:end]
            spelled.add(tuple(row[i] for i in rows))
            assert batch.positions[0, rows].tolist() == list(range(end - start))
            assert own > 0 and rows[-own:].diff().eq(1).all()
        owners = batch.owner.tolist()
        if len(set(owners)) > 1:
            assert len(row) <= capacity and len(owners) <= capacity
            assert len(keys.indices) <= prefixes.MAX_KEYS_PER_TOKEN * capacity
        for index in set(owners):
            whole = tuple(samples[index].tokens[: ends[index]])
            assert any(text[: len(whole)] == whole for text in spelled)
        for i, index in enumerate(owners):
            sample = samples[index]
            place = batch.positions[0, batch.loss_positions[i]].item() + 1
            assert batch.target[i] == sample.tokens[place]
            assert row[batch.loss_positions[i]] == sample.tokens[place - 1]
            assert batch.weight[i] == weights[index][place]
            assert batch.behaviour_logprob[i] == batch.old_logprob[i] == sample.logprobs[place]
            assert batch.advantage[i] == sample.advantage
            found[index].append(place)
    assert found == [[i for i, own in enumerate(sample.mask) if own] for sample in samples]


def test_a_sample_that_is_not_well_formed_is_refused():
    samples = make_samples(2)
    samples[0].logprobs.pop()
    with pytest.raises(ValueError, match="differ in length"):
        pack(samples)
    samples[1].mask[0] = True
    with pytest.raises(ValueError, match="no token predicts it"):
        pack(samples[1:])


def test_samples_that_share_nothing_are_packed_first_fit_decreasing():
    """Nothing is gathered for them, and two that begin with the same word are no kin."""
    inputs = [[0] * 40, [1] * 60, [1] + [9] * 39]
    assert prefixes.pack(inputs, [1] * 3, 100) == [[0, 1], [2]]
    _, _, added, rows_of = prefixes.lay_out(inputs)
    assert prefixes.keys_of(added, rows_of, CPU) is None


def test_no_mask_outlives_its_micro_batch():
    (batch,) = pack(family())
    policy = trainer.Policy(model("qwen3"), bf16=False)
    trainer.logprob(policy, batch, temperature=1.0)
    assert batch.keys.masks is None
    step(policy, [batch])
    assert batch.keys.masks is None


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("library", ["flash-attn 4", "flash-attn 2", "torch"])
def test_the_cuda_branch_aligns_queries_at_the_end(library, monkeypatch):
    """packed_attention's CUDA branch, by plain forms of each library, beside the CPU's."""
    (batch,) = pack(family())
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, h, batch.tokens.numel(), 16, generator=generator) for h in (4, 2, 2)]
    expected, _ = attention.packed_attention(None, *heads, packing=batch)
    use_library(library, monkeypatch)
    on_cuda = (x.as_subclass(OnCuda) for x in heads)
    found, _ = attention.packed_attention(None, *on_cuda, packing=batch)
    assert torch.allclose(found, expected, atol=1e-5)
