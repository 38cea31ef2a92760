"""Shared prefixes: fewer tokens through the model, the same loss and gradient."""

import copy

import pytest
import torch
from helpers.tiny import CPU, KINDS, OBJECTIVE, make_samples, saved, weigh
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from rollout import Sample
from trainer import attention, prefixes


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory.mktemp(request.param))


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


def pack(samples, capacity=10_000, device=CPU, **options):
    return trainer.micro_batches(samples, weigh(samples), capacity, device, **options)


def step(folder, batches, device=CPU, **options):
    """Loss, gradients by name, and each owner's log-probs in the order of its tokens."""
    loaded = trainer.load_model(folder, device)
    policy = trainer.Policy(loaded, bf16=False, **options)
    stats = trainer.backward(policy, batches, [None] * len(batches), **OBJECTIVE)
    logprobs = {}
    for batch, numbers in zip(batches, stats):
        for owner, logprob in zip(batch.owner.tolist(), numbers["logprob"].tolist()):
            logprobs.setdefault(owner, []).append(logprob)
    loss = sum(float(numbers["loss"]) for numbers in stats)
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    return loss, gradients, logprobs


@pytest.mark.parametrize("capacity", [10_000, 60, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_shared_prefixes_leave_loss_gradient_and_log_probs_as_they_are(folder, capacity, recompute):
    samples = family()
    loss, gradients, logprobs = step(folder, pack(samples, pack=False))
    batches = pack(samples, capacity)
    assert (len(batches) > 1) == (capacity < 100)
    other_loss, other_gradients, other_logprobs = step(
        folder, batches, recompute_activations=recompute
    )
    assert other_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        # A bias of the keys has no gradient: softmax does not see it.
        assert (gradient - other_gradients[name]).norm() < 1e-4 * gradient.norm() + 1e-7, name
    assert logprobs.keys() == other_logprobs.keys()
    for owner, logprob in logprobs.items():
        assert logprob == pytest.approx(other_logprobs[owner], abs=1e-4)


def test_a_shared_prefix_is_input_once():
    samples = family()
    (batch,) = pack(samples)
    ends = [max((i for i, own in enumerate(s.mask) if own), default=0) for s in samples]
    beginnings = {
        tuple(sample.tokens[:n])
        for sample, end in zip(samples, ends, strict=True)
        for n in range(1, end + 1)
    }
    assert batch.tokens.numel() == sum(batch.lengths) == len(beginnings) < sum(ends) / 2


def test_a_change_in_one_sample_moves_no_other_samples_log_probs(folder):
    """The masks are right for those before and after it in the row."""
    samples = family()
    policy = trainer.Policy(trainer.load_model(folder, CPU), bf16=False)
    (batch,) = pack(samples)
    before = trainer.logprob(policy, batch, 1.0)
    place = samples[5].mask.index(True)
    samples[5].tokens[place] = (samples[5].tokens[place] + 1) % 61
    (changed,) = pack(samples)
    after = trainer.logprob(policy, changed, 1.0)
    for index in range(len(samples)):
        difference = (before[batch.owner == index] - after[changed.owner == index]).abs().max()
        assert (difference > 1e-4) == (index == 5)


texts = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=12)


@settings(max_examples=200)
@given(texts, st.integers(1, 40))
def test_every_prediction_knows_its_sample_and_its_tokens(texts, capacity):
    """Whatever samples have in common: the keys of each spell it, and limits hold."""
    samples = []
    for text in texts:
        sample = Sample("sys2", question_index=0, attempt=len(samples))
        sample.advantage, sample.copies = 1.0, 1
        sample.append_given(text[:1])
        sample.tokens += text[1:]
        sample.mask += [True] * (len(text) - 1)
        sample.logprobs += [-1.0] * (len(text) - 1)
        samples.append(sample)
    found = {index: [] for index in range(len(samples))}
    for batch in pack(samples, capacity):
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
            whole = tuple(samples[index].tokens[:-1])
            assert any(text[: len(whole)] == whole for text in spelled)
        for i, index in enumerate(owners):
            place = batch.positions[0, batch.loss_positions[i]].item() + 1
            assert batch.target[i] == samples[index].tokens[place]
            assert row[batch.loss_positions[i]] == samples[index].tokens[place - 1]
            found[index].append(place)
    for index, sample in enumerate(samples):
        assert found[index] == list(range(1, len(sample.tokens)))


def test_samples_that_share_nothing_are_packed_first_fit_decreasing():
    """Nothing is gathered for them, and one that shares a word with its neighbour is no kin."""
    inputs = [[word] * length for word, length in enumerate((30, 70, 20, 50))]
    inputs.append([3] + [9] * 9)
    bins = prefixes.pack(inputs, [1] * 5, 100)
    assert sorted(map(sorted, bins)) == [[0, 1], [2, 3, 4]]
    _, _, added, rows_of = prefixes.lay_out(inputs[:4])
    assert prefixes.keys_of(added, rows_of, CPU) is None


def test_the_cuda_branch_aligns_queries_at_the_end(monkeypatch):
    """packed_attention's CUDA branch, with a plain stand-in for `varlen`, beside the CPU's."""
    (batch,) = pack(family())
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, h, batch.tokens.numel(), 16, generator=generator) for h in (4, 2, 2)]
    given = {"lengths": batch.lengths, "cu_seqlens": batch.cu_seqlens, "keys": batch.keys}
    expected, _ = attention.packed_attention(None, *heads, **given)

    def varlen(q, k, v, bounds, scale):
        """Each sequence's queries see all keys up to their own, counted from the end."""
        query_bounds, key_bounds, longest, longest_key = bounds
        assert longest == max(batch.lengths) and longest_key == max(batch.keys.lengths)
        out = []
        for i in range(len(query_bounds) - 1):
            queries = q[query_bounds[i] : query_bounds[i + 1]].transpose(0, 1)
            own = slice(key_bounds[i], key_bounds[i + 1])
            keys, values = (x[own].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
            ahead = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool)
            ahead = ahead.triu(keys.shape[1] - queries.shape[1] + 1)
            scores = queries @ keys.mT / 4
            out.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values)
        return torch.cat(out, 1).transpose(0, 1)

    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(attention, "flash_attn_varlen_func", None)
    monkeypatch.setattr(attention, "varlen", varlen)
    found, _ = attention.packed_attention(None, *(x.as_subclass(OnCuda) for x in heads), **given)
    assert torch.allclose(found, expected, atol=1e-5)
