"""The sampler against transformers: the same greedy tokens and the same log-probs.

Whatever is shared, preempted, cut into chunks or resumed, an answer must be the one that the stock
model gives to the whole text. The scheduler alone: tests/test_scheduler.py.
"""

import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import tiny

from sampler import Sampler, hashed
from sampler.draws import sample_token, uniform

V = tiny.SHAPE["vocab_size"]
PAGE = 4
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
HEADS = dict(head_dim=16, num_key_value_heads=4)
BIASES = dict(attention_bias=True, mlp_bias=True)
KINDS = {
    "qwen3 grouped tied": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen2 grouped": (
        "Qwen2",
        dict(head_dim=16, num_key_value_heads=1, tie_word_embeddings=False),
    ),
    "llama grouped": ("Llama", dict(head_dim=16)),
    "llama biased yarn": (
        "Llama",
        dict(HEADS | BIASES, rope_parameters=YARN),
    ),
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


def prompt_of(length, seed=0):
    return prompts_of((length,), seed)[0]


@functools.cache
@torch.no_grad()
def generated(kind, prompt, new):
    """What transformers' own greedy `generate` says."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model_of(kind).generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def last_logprobs(model, tokens, count, temperature=1.0):
    """fp32 log-probs of a text's last `count` tokens, by the stock model over the whole text."""
    ids = torch.tensor([tokens], device=model.device)
    logits = model(ids).logits[0, -count - 1 : -1].float() / temperature
    return logits.log_softmax(-1).cpu().gather(1, ids[0, -count:, None].cpu())[:, 0]


def logprob_error(model, prompt, completion, temperature=1.0):
    """Largest difference to the stock model's log-probs."""
    tokens = completion.tokens
    expected = last_logprobs(model, prompt + tokens, len(tokens), temperature)
    return (expected - torch.tensor(completion.logprobs)).abs().max().item()


def make(kind, **options):
    options = {"max_tokens": 1024, "page_size": PAGE, **options}
    return Sampler(model_of(kind), **options)


def finish(sampler):
    """Runs the sampler until nothing is left; completions in the order of submission."""
    done = []
    while sampler.busy:
        done += sampler.step()
    done.sort(key=lambda request: request.number)
    return [request.completion for request in done]


def nothing_leaked(sampler):
    held = sampler.pages_in_use or any(sampler.pages.references) or sampler.scheduler.holders
    return not held


# ---------------------------------------------------------------- exact


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind, device):
    """Ragged prompts in one batch, page boundaries hit exactly: equal tokens, log-probs to 1e-4.

    On CUDA in fp32, with graphs, Triton kernels and one step of host lag.
    """
    sampler = make(kind, device=device, dtype=torch.float32)
    prompts = prompts_of()
    out = sampler.generate(prompts, max_new_tokens=14, temperature=0)
    for prompt, completion in zip(prompts, out, strict=True):
        assert completion.tokens == generated(kind, tuple(prompt), 14)
        assert completion.finish == "length"
        error = logprob_error(model_of(kind), prompt, completion)
        assert error < (1e-4 if device == "cpu" else 1e-3)
    assert nothing_leaked(sampler)
    assert device == "cpu" or sampler.overlap and sampler.graphs.captured
    sampled = sampler.generate(prompts, max_new_tokens=8, temperature=0.6, top_p=0.9, seed=1)
    for prompt, completion in zip(prompts, sampled, strict=True):  # at the sampling temperature
        error = logprob_error(model_of(kind), prompt, completion, 0.6)
        assert error < (1e-4 if device == "cpu" else 1e-3)


@on_devices
def test_bf16_turns_draws_and_new_weights(device):
    """What training on a GPU runs: bf16, chunks, three turns, top-p, and new weights under graphs.

    The log-probs must be no further from the fp32 truth than twice what the stock modules' are in
    bf16. On a CPU the pages and the head are fp32, and hold bf16's values.
    """
    models = [tiny.lively("Qwen3", seed, hidden_size=256, head_dim=64) for seed in range(2)]
    worst = 0.0
    worst_stock = 0.0
    sampler = Sampler(
        models[0],
        max_tokens=4096,
        page_size=16,
        prefill_chunk=5,
        device=device,
        dtype=torch.bfloat16,
    )
    for model in models:
        sampler.load_weights(model)
        rounded = copy.deepcopy(model).to(device, torch.bfloat16)
        talks = [sampler.open() for _ in range(5)]
        for turn in range(3):
            requests = []
            for i, talk in enumerate(talks):
                tokens = prompt_of(3 + 7 * i, seed=turn)
                seed = hashed(turn, i)
                requests.append(
                    sampler.submit(talk, tokens, max_new_tokens=9, top_p=0.9, seed=seed)
                )
            finish(sampler)
            for request in requests:
                tokens = request.conversation.tokens
                truth = last_logprobs(model, tokens, 9)
                stock = last_logprobs(rounded, tokens, 9)
                ours = torch.tensor(request.completion.logprobs)
                worst = max(worst, (truth - ours).abs().max().item())
                worst_stock = max(worst_stock, (truth - stock).abs().max().item())
        for talk in talks:
            sampler.close(talk)
    assert 0 < worst < 2 * worst_stock
    assert nothing_leaked(sampler)
    if device == "cuda":
        assert sampler.graphs.captured
    else:
        assert sampler.pool.dtype == sampler.model.weights["head"].dtype == torch.float32
        assert torch.equal(sampler.pool, sampler.pool.bfloat16().float())


def test_draws_depend_on_seed_and_place_only():
    """Sampled tokens are the same alone, in a crowd and after preemption; another seed differs."""
    prompts = prompts_of()
    kind = "qwen3 grouped tied"
    crowded = make(kind, overlap=True, buckets=True, max_tokens=64)
    crowd = crowded.generate(prompts, max_new_tokens=20, seed=5)
    assert crowded.stats["preemptions"] > 0
    for i, prompt in enumerate(prompts):
        sampler = make(kind)
        sampler.submit(sampler.open(), prompt, max_new_tokens=20, seed=hashed(5, i))
        (alone,) = finish(sampler)
        assert alone.tokens == crowd[i].tokens
        assert np.allclose(alone.logprobs, crowd[i].logprobs, atol=1e-5)
    other = make(kind).generate(prompts, max_new_tokens=20, seed=6)
    assert crowd[0].tokens != other[0].tokens


# ---------------------------------------------------------------- draws


def chi_squared_is_plausible(tokens, probs):
    """Counts of tokens against probabilities; places that expect fewer than five count as one."""
    expected = probs.double().numpy() * len(tokens)
    counts = np.bincount(tokens, minlength=len(probs))
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    counts = np.append(counts[common], counts[~common].sum())
    freedom = len(expected) - 1
    used = expected > 0
    if counts[~used].any():
        return False
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
@torch.no_grad()
def test_ten_thousand_draws_match_the_softmax(temperature, top_p):
    prompt = prompt_of(6)
    logits = model_of("qwen2 grouped")(torch.tensor([prompt])).logits[0, -1]
    probs = F.softmax(logits / temperature, -1)
    if top_p < 1:  # the smallest set of likeliest tokens that reaches top_p
        order = probs.argsort(descending=True)
        kept = order[: int((probs[order].cumsum(0) < top_p).sum()) + 1]
        probs = torch.zeros_like(probs).scatter(0, kept, probs[kept])
        probs /= probs.sum()
    sampler = make("qwen2 grouped", max_tokens=4096)
    out = sampler.generate(
        [prompt] * 10_000, max_new_tokens=1, temperature=temperature, top_p=top_p, seed=3
    )
    tokens = [completion.tokens[0] for completion in out]
    assert chi_squared_is_plausible(tokens, probs)
    sharper = probs**1.2 / (probs**1.2).sum()
    assert not chi_squared_is_plausible(tokens, sharper)  # it can tell a temperature


def test_a_row_s_successive_draws_are_independent_uniforms():
    u = uniform(np.full(20_000, hashed(7), np.uint64), np.arange(20_000))
    assert 0 <= u.min()
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    seeds = np.array([hashed(0, i) for i in range(20_000)], np.uint64)
    v = uniform(seeds, np.zeros(20_000, np.int64))
    assert chi_squared_is_plausible((v * 50).astype(int), torch.full((50,), 0.02))
    assert hashed(-1) == hashed(2**64 - 1)
    assert hashed(1, 2) != hashed(2, 1)
    assert hashed(3) != hashed(3, 0)


@pytest.mark.parametrize("size", [1024, 1000, 997])  # blocks of 256, 8 and 1 tokens
def test_each_token_is_drawn_by_the_uniforms_of_its_part_of_the_running_sum(size):
    torch.manual_seed(0)
    logits = torch.randn(1, size)
    ends = logits[0].double().softmax(-1).cumsum(0)
    middles = ends - logits[0].double().softmax(-1) / 2
    tokens, logprobs = sample_token(logits.expand(size, -1), middles, None, None)
    assert torch.equal(tokens, torch.arange(size))
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1), rtol=0, atol=1e-6)
    # The first and the last uniform never pick a token of probability zero.
    logits[0, :3] = logits[0, -3:] = -math.inf
    edges = torch.tensor([0.0, 1 - 2.0**-48], dtype=torch.float64)
    assert sample_token(logits.expand(2, -1), edges, None, None)[0].tolist() == [3, size - 4]


def test_top_p_of_a_neighbour_changes_nothing():
    """A row without top-p draws the same tokens beside a row that has one, the rarest ones too."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(1, 20_000)).sort().values.expand(64, -1)
    cumulative = logits[0].log_softmax(-1).exp().cumsum(0, dtype=torch.float64)
    rarest = torch.arange(1, 65)
    uniforms = (cumulative[rarest] + cumulative[rarest - 1]) / 2 / cumulative[-1]
    alone, _ = sample_token(logits, uniforms, None, None)
    assert torch.equal(alone, rarest)
    top_p = torch.ones(64)
    top_p[::2] = 0.5
    beside, _ = sample_token(logits, uniforms, None, top_p)
    assert torch.equal(beside[1::2], rarest[1::2])
    assert not (beside == rarest)[::2].any()


# ---------------------------------------------------------------- conversations


def test_rows_wait_as_little_as_they_can():
    """A finished row is replaced at the next step; a long prefill stops nobody who decodes."""
    sampler = make("llama grouped", max_sequences=2, prefill_chunk=4)
    short, long = prompts_of((2, 41))
    requests = []
    for prompt, new in ((short, 3), (long, 2), (short[:1], 4)):
        conversation = sampler.open()
        requests.append(sampler.submit(conversation, prompt, max_new_tokens=new, temperature=0))
    ended = {}
    for step in range(1, 13):
        ended |= dict.fromkeys(sampler.step(), step)
    # 40 tokens are ten chunks. The others never waited for them.
    assert [ended[request] for request in requests] == [3, 12, 7]


# ---------------------------------------------------------------- what submit takes and refuses

REFUSED = {
    "tokens must be at least one": dict(tokens=[]),
    f"tokens must be .* to {V - 1}": dict(tokens=[1, V]),
    "max_new_tokens 0": dict(max_new_tokens=0),
    "temperature nan": dict(temperature=math.nan),
    "top_p 0": dict(top_p=0.0),
    "can never fit the KV pool of 64 tokens": dict(tokens=[1] * 40, max_new_tokens=26),
}


def test_bad_requests_are_refused_and_leave_no_trace():
    """Before anything changes: bystanders go on, and the conversation can be used."""
    sampler = make("llama grouped", max_tokens=64)
    prompt = prompt_of(40)
    bystander = sampler.submit(sampler.open(), prompt[:7], max_new_tokens=6, temperature=0)
    sampler.step()
    conversation = sampler.open()
    for sentence, options in REFUSED.items():
        with pytest.raises(ValueError, match=sentence):
            sampler.submit(conversation, **{"tokens": [3, 4], "max_new_tokens": 2, **options})
        assert not conversation.tokens
    # 65 positions never fit 64 slots, but the newest token needs no slot.
    again = sampler.submit(conversation, prompt, max_new_tokens=25, temperature=0)
    with pytest.raises(ValueError, match="open request"):
        sampler.submit(conversation, prompt, max_new_tokens=3)
    finish(sampler)
    assert bystander.completion.tokens == generated("llama grouped", tuple(prompt[:7]), 6)
    assert again.completion.tokens == generated("llama grouped", tuple(prompt), 25)
    sampler.close(conversation)
    with pytest.raises(ValueError, match="closed"):
        sampler.submit(conversation, prompt, max_new_tokens=3)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_raises_at_once(temperature):
    model = tiny.lively("Llama")
    torch.nn.init.constant_(model.model.embed_tokens.weight[7], math.nan)
    sampler = Sampler(model, max_tokens=64, page_size=PAGE, overlap=True, buckets=True)
    sampler.generate([[1, 2, 3]], max_new_tokens=1, stop_ids=[7])
    with pytest.raises(FloatingPointError, match="NaN"):
        sampler.generate([[1, 2, 7, 4], [5, 6]], max_new_tokens=6, temperature=temperature)


def test_who_gives_way_when_pages_run_out(monkeypatch):
    """Idle conversations first, then the newest request, and never the oldest one."""
    kind = "llama grouped"
    sampler = make(kind, max_tokens=64)
    gave = []
    preempt = sampler.scheduler._preempt

    def watched(conversation):
        gave.append((conversation, conversation.idle))
        preempt(conversation)

    monkeypatch.setattr(sampler.scheduler, "_preempt", watched)
    idle, newest, oldest = (sampler.open() for _ in range(3))
    sampler.submit(idle, prompt_of(13, seed=1), max_new_tokens=1, temperature=0)
    finish(sampler)
    prompts = prompts_of((6, 6), seed=2)
    requests = []
    # The order of the requests decides, and not the age of their conversations.
    for conversation, prompt in zip((oldest, newest), prompts, strict=True):
        requests.append(sampler.submit(conversation, prompt, max_new_tokens=30, temperature=0))
    finish(sampler)
    assert gave[:2] == [(idle, True), (newest, False)]
    assert (oldest, False) not in gave
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.completion.tokens == generated(kind, tuple(prompt), 30)
