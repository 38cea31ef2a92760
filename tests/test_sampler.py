"""The sampler against transformers: the same greedy tokens and the same log-probs.

Whatever is shared, preempted, cut into chunks or resumed, an answer must be the one that the stock
model gives to the whole text. The scheduler alone: tests/test_scheduler.py.
"""

import copy
import functools
import gc
import math
import random
import weakref

import numpy as np
import pytest
import torch
from helpers import tiny

from sampler import Sampler, hash64
from sampler import model as decoder
from sampler.draws import keep_likeliest, sample_token, uniform

V = tiny.SHAPE["vocab_size"]
PAGE = 4
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
HEADS = dict(head_dim=16, num_key_value_heads=4)
BIASES = dict(attention_bias=True, mlp_bias=True)
KINDS = {
    "qwen3 grouped tied": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen2 grouped": ("Qwen2", dict(head_dim=16, num_key_value_heads=1, tie_word_embeddings=False)),
    "llama grouped": ("Llama", dict(head_dim=16)),
    "llama biased yarn": ("Llama", dict(HEADS | BIASES, rope_parameters=YARN)),
    "mistral": ("Mistral", dict(head_dim=16, sliding_window=None)),
    "smollm3": ("SmolLM3", dict(head_dim=16, no_rope_layers=[1, 0])),
}
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE, 23)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)


@functools.cache
def model_of(kind, seed=0):
    name, options = KINDS[kind]
    return tiny.lively(name, seed, **options)


def prompts_of(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(V) for _ in range(length)] for length in lengths]


@torch.no_grad()
def stock_answer(model, tokens, count, temperature=1.0):
    """A text's last `count` tokens by the stock model over the whole text.

    Its own choice at each place, and the fp32 log-probs of the text's tokens.
    """
    ids = torch.tensor([tokens], device=model.device)
    logits = model(ids).logits[0, -count - 1 : -1].float() / temperature
    logprobs = logits.log_softmax(-1).cpu().gather(1, ids[0, -count:, None].cpu())[:, 0]
    return logits.argmax(-1).tolist(), logprobs


def check(model, prompt, completion, temperature=0, tolerance=1e-4):
    """Greedy tokens are those of the stock model, and any tokens' log-probs."""
    tokens = completion.tokens
    best, logprobs = stock_answer(model, prompt + tokens, len(tokens), temperature or 1)
    assert temperature or tokens == best
    assert (logprobs - torch.tensor(completion.logprobs)).abs().max() < tolerance


def make(kind, **options):
    options = {"max_tokens": 1024, "page_size": PAGE, **options}
    return Sampler(model_of(kind), **options)


@pytest.fixture(params=["packed weights", "plain weights"])
def weights(request, monkeypatch):
    """With oneDNN's packed products, as far as this processor has them, and without any."""
    if request.param == "plain weights":
        monkeypatch.setattr(decoder, "has_packed_products", lambda dtype: False)


@on_devices
@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_log_probs_are_those_of_transformers(kind, device):
    """Ragged prompts in padded batches, page boundaries hit exactly, a pool too small for all.

    On CUDA in fp32, with graphs and Triton kernels.
    """
    options = dict(max_tokens=64, overlap=True, buckets=True)
    sampler = make(kind, device=device, dtype=torch.float32, **options)
    prompts = prompts_of()
    tolerance = 1e-4 if device == "cpu" else 1e-3
    sampled = dict(max_new_tokens=8, temperature=0.6, top_p=0.9, seed=1)
    for draws in (dict(max_new_tokens=14, temperature=0), sampled):
        out = sampler.generate(prompts, **draws)
        for prompt, completion in zip(prompts, out, strict=True):
            check(model_of(kind), prompt, completion, draws["temperature"], tolerance)
            assert completion.finish == "length"
    assert sampler.pages_in_use == 0
    assert sampler.stats["preemptions"] > 0
    assert device == "cpu" or sampler.graphs.captured


@on_devices
@pytest.mark.usefixtures("weights")
def test_bf16_turns_draws_and_new_weights(device):
    """What training on a GPU runs: bf16, chunks, three turns, top-p, and new weights under graphs.

    The log-probs must be no further from the fp32 truth than twice what the stock modules' are in
    bf16. On a CPU the pages and the head are fp32, and hold bf16's values.
    """
    models = [tiny.lively("Qwen3", seed, hidden_size=256, head_dim=64) for seed in range(2)]
    errors = []  # (ours, the stock modules')
    options = dict(max_tokens=4096, page_size=16, prefill_chunk=5)
    sampler = Sampler(models[0], **options, device=device, dtype=torch.bfloat16)
    for model in models:
        sampler.load_weights(model)
        rounded = copy.deepcopy(model).to(device, torch.bfloat16)
        talks = [sampler.open() for _ in range(5)]
        for turn in range(3):
            requests = []
            for i, talk in enumerate(talks):
                tokens = prompts_of([3 + 7 * i], seed=turn)[0]
                request = sampler.submit(talk, tokens, max_new_tokens=9, top_p=0.9, seed=turn)
                requests.append(request)
            while sampler.busy:
                sampler.step()
            for request in requests:
                tokens = request.conversation.tokens
                _, truth = stock_answer(model, tokens, 9)
                _, stock = stock_answer(rounded, tokens, 9)
                ours = torch.tensor(request.completion.logprobs)
                errors.append([(truth - other).abs().max().item() for other in (ours, stock)])
        for talk in talks:
            sampler.close(talk)
    worst, worst_stock = map(max, zip(*errors))
    assert 0 < worst < 2 * worst_stock
    assert sampler.pages_in_use == 0
    if device == "cuda":
        assert sampler.graphs.captured
    else:
        assert sampler.pool.dtype == sampler.model.weights["head"].dtype == torch.float32
        assert torch.equal(sampler.pool, sampler.pool.bfloat16().float())


def test_a_lent_pool_is_held_by_nobody_and_made_again():
    """Nor are the graphs, at once; then new weights, in a conversation that goes on as well."""
    kind = "qwen3 grouped tied"
    sampler = make(kind, overlap=True, buckets=True, max_sequences=4)
    prompts = prompts_of((9, 9, 5, 2))
    talk = sampler.open()
    sampler.submit(talk, prompts[0], max_new_tokens=3, temperature=0)
    sampler.step()
    parts = [weakref.ref(sampler.graphs), weakref.ref(sampler.pool.untyped_storage())]
    gc.disable()
    try:
        sampler.lend_pool()
        assert all(part() is None for part in parts)
    finally:
        gc.enable()
    sampler.load_weights(model_of(kind, seed=1))
    assert sampler.pool is None, "the weights come before the pool"
    while sampler.busy:
        sampler.step()
    context = list(talk.tokens)
    again = sampler.submit(talk, [5], max_new_tokens=3, temperature=0)
    out = sampler.generate(prompts, max_new_tokens=6, temperature=0)
    for prompt, completion in zip([*prompts, [*context, 5]], [*out, again.completion], strict=True):
        check(model_of(kind, seed=1), prompt, completion)


def test_a_row_s_successive_draws_are_independent_uniforms():
    u = uniform(np.full(20_000, hash64(7), np.uint64), np.arange(20_000))
    assert 0 <= u.min() <= u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    seeds = np.array([hash64(0, i) for i in range(20_000)], np.uint64)
    v = uniform(seeds, np.zeros(20_000, np.int64))
    counts = np.bincount((v * 50).astype(int), minlength=50)
    assert len(counts) == 50 and abs(counts - 400).max() < 100
    assert hash64(-1) == hash64(2**64 - 1)
    assert len({hash64(1, 2), hash64(2, 1), hash64(1), hash64(1, 0)}) == 4


@pytest.mark.parametrize(
    "size, temperature, top_p",  # blocks of 256, 8, 1 and 256 tokens
    [(1024, None, None), (1000, 0.7, None), (997, 1.3, 0.8), (512, None, 0.5)],
)
def test_each_token_is_drawn_by_the_uniforms_of_its_part_of_the_running_sum(
    size, temperature, top_p
):
    """Log-probs are those of all tokens at the temperature, whatever top-p leaves."""
    torch.manual_seed(0)
    logits = torch.randn(1, size)
    expected = (logits[0] / (temperature or 1)).log_softmax(-1)
    probs = expected.double().exp()
    if top_p:  # the smallest set of likeliest tokens that reaches top_p
        order = probs.argsort(descending=True)
        count = int((probs[order].cumsum(0) < top_p).sum()) + 1
        probs[order[count:]] = 0
    kept = probs.nonzero()[:, 0]
    middles = (probs.cumsum(0) - probs / 2)[kept] / probs.sum()

    def drawn(uniforms):
        rows = len(uniforms)
        options = [option and torch.full((rows,), option) for option in (temperature, top_p)]
        return sample_token(logits.expand(rows, -1), uniforms, *options)

    tokens, logprobs = drawn(middles)
    assert torch.equal(tokens, kept)
    torch.testing.assert_close(logprobs, expected[kept], rtol=0, atol=1e-6)
    # The first and the last uniform never pick a token of probability zero.
    logits[0, :3] = logits[0, -3:] = -math.inf
    first, last = drawn(torch.tensor([0.0, 1 - 2.0**-48], dtype=torch.float64))[0].tolist()
    assert 3 <= first < last < size - 3


def test_top_p_of_a_neighbour_drops_no_token_of_a_row_without_it():
    """Rounded probabilities may sum to more than 1."""
    probs = torch.full((2, 4), 0.4)
    kept = keep_likeliest(probs, torch.tensor([1.0, 0.5]))
    assert torch.equal(kept > 0, torch.tensor([[True] * 4, [True, True, False, False]]))


REFUSED = {
    "tokens must be at least one": dict(tokens=[]),
    f"tokens must be .* to {V - 1}": dict(tokens=[1, V]),
    "max_new_tokens is 0": dict(max_new_tokens=0),
    "temperature is nan": dict(temperature=math.nan),
    "top_p is 0": dict(top_p=0.0),
    "can never fit the KV pool of 64 tokens": dict(tokens=[1] * 40, max_new_tokens=26),
}


def test_bad_requests_are_refused_and_leave_no_trace():
    sampler = make("llama grouped", max_tokens=64)
    (prompt,) = prompts_of([40])
    conversation = sampler.open()
    for sentence, options in REFUSED.items():
        with pytest.raises(ValueError, match=sentence):
            sampler.submit(conversation, **{"tokens": [3, 4], "max_new_tokens": 2, **options})
        assert not conversation.tokens
    # 65 positions never fit 64 slots, but the newest token needs no slot.
    again = sampler.submit(conversation, prompt, max_new_tokens=25, temperature=0)
    with pytest.raises(ValueError, match="open request"):
        sampler.submit(conversation, prompt, max_new_tokens=3)
    while sampler.busy:
        sampler.step()
    check(model_of("llama grouped"), prompt, again.completion)
    sampler.close(conversation)
    with pytest.raises(ValueError, match="closed"):
        sampler.submit(conversation, prompt, max_new_tokens=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_raises_at_once(temperature):
    model = tiny.lively("Llama")
    torch.nn.init.constant_(model.model.embed_tokens.weight[7], math.nan)
    sampler = Sampler(model, max_tokens=64, page_size=PAGE, overlap=True, buckets=True)
    sampler.generate([[1, 2, 3]], max_new_tokens=1, stop_ids=[7])
    with pytest.raises(FloatingPointError, match="NaN"):
        sampler.generate([[1, 2, 7, 4], [5, 6]], max_new_tokens=6, temperature=temperature)
