"""The sampler against transformers: same greedy tokens and log-probs, whatever is shared, preempted or resumed."""
import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from transformers import (GemmaConfig, GemmaForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig,
                          LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

from sampler import forward
from sampler.forward import Batch, unsupported
from sampler import Sampler, hashed, sample_token, uniform

V, PAGE = 96, 4
SMALL = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=256, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
             pad_token_id=None)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "qwen3 grouped tied": (Qwen3ForCausalLM, Qwen3Config, dict(num_key_value_heads=2, head_dim=16,
                                                               tie_word_embeddings=True)),
    "qwen3 multi-head": (Qwen3ForCausalLM, Qwen3Config, dict(num_key_value_heads=4, head_dim=8,
                                                             tie_word_embeddings=False)),
    "qwen2 grouped": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=1, tie_word_embeddings=False)),
    "qwen2 multi-head tied": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama grouped": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=2)),
    "llama biased yarn": (LlamaForCausalLM, LlamaConfig, dict(
        num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=YARN)),
    "qwen3 heads of 12": (Qwen3ForCausalLM, Qwen3Config, dict(num_key_value_heads=2, head_dim=12)),    # no power of two
    "gemma": (GemmaForCausalLM, GemmaConfig, dict(num_key_value_heads=1, head_dim=16)),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig, dict()),
    "qwen2 windows": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2, use_sliding_window=True,
                                                          sliding_window=6, max_window_layers=1)),
}
OWN = [kind for kind in KINDS if kind not in ("qwen3 heads of 12", "gemma", "gpt-neox", "qwen2 windows")]
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE, 23)


@functools.cache
def model_of(kind, seed=0):
    """A random tiny model with biases and norms that matter."""
    cls, config, options = KINDS[kind]
    torch.manual_seed(seed)
    model = cls(config(**SMALL, **options)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name and not name.endswith("bias") else 0.0, 0.2)
    return model


def prompts_of(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(V) for _ in range(length)] for length in lengths]


@functools.cache
def generated(kind, prompt, new):
    ids = torch.tensor([prompt])
    out = model_of(kind).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt):].tolist()


@torch.no_grad()
def logprob_error(model, prompt, completion, temperature=1.0):
    """Largest difference to the fp32 log-softmax of the stock model over the whole text."""
    logits = model(torch.tensor([prompt + completion.tokens])).logits[0].float()
    logprobs = F.log_softmax(logits / temperature, -1)[len(prompt) - 1:-1]
    expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    return (expected - torch.tensor(completion.logprobs)).abs().max().item()


def make(kind, **options):
    return Sampler(model_of(kind), **{"max_tokens": 1024, "page_size": PAGE, **options})


def nothing_leaked(sampler):
    return len(sampler.pages.free) == sampler.pages.count and not any(sampler.pages.references) and not sampler.scheduler.holders


# ---------------------------------------------------------------- exact

@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind):
    """Ragged prompts, page boundaries hit exactly, in one batch: tokens equal, log-probs to 1e-4."""
    sampler, prompts = make(kind), prompts_of()
    assert sampler.path == ("own forward" if kind in OWN else "stock modules")
    out = sampler.generate(prompts, max_new_tokens=14, temperature=0)
    for prompt, completion in zip(prompts, out):
        assert completion.tokens == generated(kind, tuple(prompt), 14) and completion.finish == "length"
        assert logprob_error(model_of(kind), prompt, completion) < 1e-4
    assert nothing_leaked(sampler) and sampler.stats["preemptions"] == 0


@pytest.mark.parametrize("kind", ["qwen3 grouped tied", "gemma"])
@pytest.mark.parametrize("options", [
    dict(max_tokens=40), dict(prefill_chunk=3), dict(max_sequences=2), dict(own_forward=False),
    dict(max_tokens=64, overlap=True, buckets=True), dict(dtype=torch.float64)], ids=",".join)
def test_greedy_whatever_the_engine_does(kind, options):
    """A pool that forces preemption, chunked prefill, few rows, the fallback, host lag and padding: the same tokens."""
    sampler, prompts = make(kind, **options), prompts_of() + prompts_of((23, 5 * PAGE))
    out = sampler.generate(prompts, max_new_tokens=14, temperature=0)
    assert [c.tokens for c in out] == [generated(kind, tuple(prompt), 14) for prompt in prompts]
    assert nothing_leaked(sampler) and (sampler.stats["preemptions"] > 0) == ("max_tokens" in options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")])])
@torch.no_grad()
def test_bf16_turns_draws_and_new_weights(device):
    """What training on a GPU runs: bf16, chunked prefill, three turns, top-p, new weights (under captured graphs there).

    The log-probs must be no further from the fp32 truth than twice what the stock modules' are in bf16.
    """
    def build(seed):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**SMALL | dict(hidden_size=256), num_key_value_heads=2, head_dim=64)).eval()
    models, worst, stock = (build(0), build(1)), 0.0, 0.0
    sampler = Sampler(models[0], max_tokens=4096, page_size=16, prefill_chunk=5, device=device, dtype=torch.bfloat16)
    for model in models:
        sampler.load_weights(model)
        rounded, talks = copy.deepcopy(model).to(device, torch.bfloat16), [sampler.open() for _ in range(5)]
        for turn in range(3):
            requests = [sampler.submit(talk, prompts_of((3 + 7 * i,), seed=turn)[0], max_new_tokens=9, top_p=0.9,
                                       seed=hashed(turn, i)) for i, talk in enumerate(talks)]
            finish(sampler)
            for request in requests:
                ids = torch.tensor([request.conversation.tokens])
                truth, theirs = (of(ids.to(of.device)).logits[0, -10:-1].float().log_softmax(-1).cpu().gather(
                    1, ids[0, -9:, None])[:, 0] for of in (model, rounded))
                worst = max(worst, (truth - torch.tensor(request.completion.logprobs)).abs().max().item())
                stock = max(stock, (truth - theirs).abs().max().item())
        for talk in talks:
            sampler.close(talk)
    assert 0 < worst < 2 * stock and nothing_leaked(sampler)
    assert device == "cpu" or sampler.decoder.graphs


@pytest.mark.parametrize("options", [{}, dict(max_tokens=64), dict(overlap=True, buckets=True, max_tokens=64)])
def test_draws_depend_on_seed_and_place_only(options):
    """Sampled tokens are the same alone, in a crowd, and after preemption; another seed gives others."""
    prompts, kind = prompts_of(), "qwen3 grouped tied"
    crowd = make(kind, **options).generate(prompts, max_new_tokens=20, seed=5)
    for i, prompt in enumerate(prompts):
        sampler = make(kind)
        sampler.submit(sampler.open(), prompt, max_new_tokens=20, seed=hashed(5, i))
        alone = finish(sampler)[0]
        assert alone.tokens == crowd[i].tokens
        assert np.allclose(alone.logprobs, crowd[i].logprobs, atol=1e-5)
    assert crowd[0].tokens != make(kind).generate(prompts, max_new_tokens=20, seed=6)[0].tokens


def finish(sampler):
    """Runs the sampler until nothing is left; completions in the order of submission."""
    done = []
    while sampler.busy:
        done += sampler.step()
    return [request.completion for request in sorted(done, key=lambda request: request.number)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_at_the_sampling_temperature(temperature):
    prompts = prompts_of()
    out = make("llama grouped").generate(prompts, max_new_tokens=8, temperature=temperature, top_p=0.9, seed=1)
    assert max(logprob_error(model_of("llama grouped"), p, c, temperature) for p, c in zip(prompts, out)) < 1e-4


def test_rows_of_all_kinds_share_a_batch():
    """Greedy, cold, hot and top-p rows at once: each as if it were alone."""
    sampler, prompt = make("qwen2 grouped"), prompts_of((7,))[0]
    kinds = [dict(temperature=0), dict(temperature=0.5), dict(temperature=2.0), dict(top_p=0.3),
             dict(temperature=0, top_p=0.3)]
    for i, options in enumerate(kinds):
        sampler.submit(sampler.open(), prompt, max_new_tokens=9, seed=i, **options)
    for i, (options, together) in enumerate(zip(kinds, finish(sampler))):
        alone = make("qwen2 grouped")
        alone.submit(alone.open(), prompt, max_new_tokens=9, seed=i, **options)
        assert finish(alone)[0].tokens == together.tokens
        if options.get("temperature") == 0:
            assert together.tokens == generated("qwen2 grouped", tuple(prompt), 9)


# ---------------------------------------------------------------- draws

def chi_squared_is_plausible(tokens, probs):
    """Counts of tokens against probabilities; places that expect fewer than five draws are taken together."""
    expected, counts = probs.double().numpy() * len(tokens), np.bincount(tokens, minlength=len(probs))
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    counts = np.append(counts[common], counts[~common].sum())
    freedom, used = len(expected) - 1, expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom) and not counts[~used].any()


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
@torch.no_grad()
def test_ten_thousand_draws_match_the_softmax(temperature, top_p):
    prompt = prompts_of((6,))[0]
    probs = F.softmax(model_of("qwen2 grouped")(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
    if top_p < 1:                                           # the smallest set of likeliest tokens that reaches top_p
        order = probs.argsort(descending=True)
        kept = order[:int((probs[order].cumsum(0) < top_p).sum()) + 1]
        probs = torch.zeros_like(probs).scatter(0, kept, probs[kept])
        probs /= probs.sum()
    out = make("qwen2 grouped", max_tokens=4096).generate([prompt] * 10_000, max_new_tokens=1, temperature=temperature,
                                                         top_p=top_p, seed=3)
    tokens = [completion.tokens[0] for completion in out]
    assert chi_squared_is_plausible(tokens, probs)
    assert not chi_squared_is_plausible(tokens, probs ** 1.2 / (probs ** 1.2).sum())   # it can tell a temperature


def test_a_row_s_successive_draws_are_independent_uniforms():
    u = uniform(np.full(20_000, hashed(7), np.uint64), np.arange(20_000))
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    seeds = np.array([hashed(0, i) for i in range(20_000)], np.uint64)
    v = uniform(seeds, np.zeros(20_000, np.int64))
    assert chi_squared_is_plausible((v * 50).astype(int), torch.full((50,), 0.02))
    assert hashed(-1) == hashed(2 ** 64 - 1) and hashed(1, 2) != hashed(2, 1) and hashed(3) != hashed(3, 0)


def test_edges_of_the_draw():
    """The first and the last uniform never pick a token of probability zero."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]]).expand(2, -1)
    tokens, logprobs = sample_token(logits, torch.tensor([0.0, 1 - 2.0 ** -48], dtype=torch.float64), None, None)
    assert tokens.tolist() == [1, 3]
    assert torch.allclose(logprobs, F.log_softmax(torch.tensor([0.0, 1.0]), -1))


# ---------------------------------------------------------------- conversations

@pytest.mark.parametrize("options", [{}, dict(max_tokens=96), dict(overlap=True, buckets=True), dict(prefill_chunk=5)])
def test_turns_extend_a_context_exactly(options):
    """Three conversations of three turns: log-probs equal a fresh forward over the text; nothing is prefilled twice."""
    kind, rng = "qwen3 grouped tied", random.Random(1)
    sampler = make(kind, **options)
    conversations = [sampler.open() for _ in range(3)]
    sampled = {conversation: [] for conversation in conversations}
    given = 0
    for turn in range(3):
        for i, conversation in enumerate(conversations):
            tokens = [rng.randrange(V) for _ in range(2 + 3 * i + 4 * turn)]
            given += len(tokens)
            sampler.submit(conversation, tokens, max_new_tokens=5 + i, seed=10 * turn + i)
        while sampler.busy:
            for request in sampler.step():
                places = range(len(request.conversation.tokens))[-len(request.tokens):]
                sampled[request.conversation] += list(zip(places, request.tokens, request.logprobs))
    for conversation in conversations:
        logits = model_of(kind)(torch.tensor([conversation.tokens])).logits[0].float()
        for place, token, logprob in sampled[conversation]:
            assert conversation.tokens[place] == token
            assert abs(F.log_softmax(logits[place - 1], -1)[token].item() - logprob) < 1e-4
    if "max_tokens" not in options:                         # a turn: its tokens, the last sampled one, not the newest
        assert sampler.stats["prefilled_tokens"] == given - 3 and sampler.stats["preemptions"] == 0
    else:
        assert sampler.stats["preemptions"] > 0
    for conversation in conversations:
        sampler.close(conversation)
        sampler.close(conversation)
    assert nothing_leaked(sampler)


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1, 3 * PAGE + 2])
def test_a_group_shares_its_prompt(length):
    """The prompt is prefilled once, followers share its full pages, and all say what they would have said alone."""
    prompt, kind = prompts_of((length,))[0], "qwen3 grouped tied"
    sampler = make(kind, prefill_chunk=5)                   # followers meet a leader in the middle of its prefill
    shared = sampler.generate([prompt] * 5, max_new_tokens=9, seed=2)
    apart = make(kind, share_prompts=False)
    assert [c.tokens for c in shared] == [c.tokens for c in apart.generate([prompt] * 5, max_new_tokens=9, seed=2)]
    assert len({tuple(c.tokens) for c in shared}) > 1
    assert sampler.stats["prefilled_tokens"] == length - 1 and sampler.stats["shared_tokens"] == 4 * (length - 1)
    assert apart.stats["prefilled_tokens"] == 5 * (length - 1) and nothing_leaked(sampler)


def test_sharing_really_shares_pages():
    sampler, prompt = make("llama grouped"), prompts_of((4 * PAGE + 2,))[0]
    conversations = [sampler.open() for _ in range(3)]
    for i, conversation in enumerate(conversations):
        sampler.submit(conversation, prompt, max_new_tokens=1, seed=i)
    finish(sampler)
    tables = [conversation.block_table for conversation in conversations]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4] and len({table[4] for table in tables}) == 3
    sampler.close(conversations[0])                         # the pages live on while somebody holds them
    late = sampler.open()
    sampler.submit(late, prompt, max_new_tokens=6, temperature=0)
    assert finish(sampler)[0].tokens == generated("llama grouped", tuple(prompt), 6) and late.block_table[:4] == tables[1][:4]


def test_a_fork_of_a_fork_made_in_the_same_step():
    """The leader gives way between two forks of its prompt: the second is copied from the first one's copy."""
    sampler, prompt = make("llama grouped", max_tokens=16), prompts_of((6,))[0]
    leader = sampler.open()
    sampler.submit(leader, prompt, max_new_tokens=1, temperature=0)
    finish(sampler)
    for _ in range(2):
        sampler.submit(sampler.open(), prompt, max_new_tokens=3, temperature=0)
    first, second = finish(sampler)
    assert sampler.stats["preemptions"] >= 1 and sampler.stats["shared_tokens"] == 10
    for completion in (first, second):
        assert completion.tokens == generated("llama grouped", tuple(prompt), 3)
        assert logprob_error(model_of("llama grouped"), prompt, completion) < 1e-4


def test_top_p_of_a_neighbour_changes_nothing():
    """A row without top-p draws the same tokens whether its neighbour has one or not, the least likely ones too."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(1, 20_000)).expand(64, -1)
    cumulative = logits[0].log_softmax(-1).exp().cumsum(0, dtype=torch.float64)
    rarest = logits[0].argsort()[:64]
    uniforms = (cumulative[rarest] + cumulative[rarest - 1]) / 2 / cumulative[-1]
    alone, _ = sample_token(logits, uniforms, None, None)
    assert torch.equal(alone, rarest)
    top_p = torch.ones(64)
    top_p[::2] = 0.5
    beside, _ = sample_token(logits, uniforms, None, top_p)
    assert torch.equal(beside[1::2], rarest[1::2]) and not (beside == rarest)[::2].any()


def test_a_prompt_is_only_shared_if_it_is_the_same():
    sampler, prompt = make("llama grouped"), prompts_of((9,))[0]
    sampler.generate([prompt, prompt[:-1], prompt + [3]], max_new_tokens=1)
    assert sampler.stats["shared_tokens"] == 0 and sampler.stats["prefilled_tokens"] == 8 + 7 + 9


def test_idle_conversations_give_way_and_come_back():
    """A pool full of conversations that wait for tools: new work is done, and they go on as if nothing had happened."""
    kind, prompts = "qwen2 multi-head tied", prompts_of((20, 21, 22))
    sampler = make(kind, max_tokens=72)
    idle = [sampler.open() for _ in prompts]
    for conversation, prompt in zip(idle, prompts):
        sampler.submit(conversation, prompt, max_new_tokens=2, temperature=0)
    finish(sampler)
    before = [list(conversation.tokens) for conversation in idle]
    sampler.generate(prompts_of((40,), seed=9), max_new_tokens=8)
    assert sampler.stats["preemptions"] > 0
    for conversation in idle:
        sampler.submit(conversation, [5], max_new_tokens=4, temperature=0)
    for tokens, completion in zip(before, finish(sampler)):
        assert completion.tokens == generated(kind, tuple(tokens + [5]), 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_tokens(overlap):
    """A stop token ends a row and belongs to it; the row's place is refilled; nothing sampled after it is seen."""
    kind, prompts = "qwen3 grouped tied", prompts_of()
    free = [generated(kind, tuple(prompt), 14) for prompt in prompts]
    stops = {free[0][3], free[1][0], free[4][7]}
    sampler = make(kind, overlap=overlap, max_sequences=3)
    for prompt, tokens, completion in zip(prompts, free, sampler.generate(prompts, max_new_tokens=14, temperature=0,
                                                                         stop_ids=stops)):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), 14)
        assert completion.tokens == tokens[:end] and len(completion.logprobs) == end
        assert completion.finish == ("stop" if tokens[end - 1] in stops else "length")
    assert nothing_leaked(sampler)


def test_rows_wait_as_little_as_they_can():
    """A finished row is replaced at the next step; a long prefill does not stop those who decode."""
    sampler = make("llama grouped", max_sequences=2, prefill_chunk=4)
    short, long = prompts_of((2, 41))
    requests = [sampler.submit(sampler.open(), short, max_new_tokens=3, temperature=0),
                sampler.submit(sampler.open(), long, max_new_tokens=2, temperature=0),
                sampler.submit(sampler.open(), short[:1], max_new_tokens=4, temperature=0)]
    ended = {}
    while sampler.busy:
        for request in sampler.step():
            ended[request] = sampler.steps
    assert [ended[request] for request in requests] == [3, 12, 7]      # 40 tokens: ten chunks; the others never waited


@pytest.mark.parametrize("overlap", [False, True])
def test_load_weights(overlap):
    """New weights: running and idle conversations go on exactly as a fresh model would, nothing old is shared."""
    kind, other, prompt = "qwen3 grouped tied", model_of("qwen3 grouped tied", seed=1), prompts_of((11,))[0]
    sampler = make(kind, overlap=overlap)
    idle, running = sampler.open(), sampler.open()
    sampler.submit(idle, prompt, max_new_tokens=3, temperature=0)
    finish(sampler)
    request = sampler.submit(running, prompt, max_new_tokens=8, temperature=0)
    for _ in range(4):
        sampler.step()
    sampler.load_weights(other)
    assert nothing_leaked(sampler)
    context = list(running.tokens)
    sampler.submit(idle, [1, 2], max_new_tokens=3, temperature=0)
    for tokens, conversation in ((context, running), (list(idle.tokens), idle)):
        with torch.no_grad():
            while sampler.busy:
                sampler.step()
            ids = torch.tensor([tokens])
            full = other.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                  max_new_tokens=len(conversation.tokens) - len(tokens))
        assert conversation.tokens == full[0].tolist()
    assert request.done and len(context) > len(prompt)
    fresh = make(kind)
    fresh.load_weights(other)
    assert (fresh.generate([prompt], max_new_tokens=9, temperature=0)[0].tokens
            != generated(kind, tuple(prompt), 9))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10 ** 6), pages=st.integers(12, 40), rows=st.integers(1, 6), chunk=st.integers(1, 20),
       lag=st.booleans())
def test_any_history_gives_the_same_answers(seed, pages, rows, chunk, lag):
    """Random submits, turns, closes, steps over a small pool: right counts, and the answers of a roomy sampler."""
    rng, kind = random.Random(seed), "qwen2 grouped"
    sampler = make(kind, max_tokens=pages * PAGE, max_sequences=rows, prefill_chunk=chunk, overlap=lag, buckets=lag)
    prompts, conversations, answers = prompts_of((1, 6, 9, 12)), [], []

    def step():
        for request in sampler.step():
            answers.append((request, list(request.conversation.tokens)))
        used = [page for conversation in sampler.scheduler.live for page in conversation.block_table]
        assert sampler.pages.references == [used.count(page) for page in range(pages)]
        assert sorted(sampler.pages.free + sorted(set(used))) == list(range(pages))
        assert all(len(c.block_table) * PAGE >= c.num_cached_tokens for c in sampler.scheduler.live)

    for _ in range(60):
        action = rng.random()
        idle = [c for c in conversations if c.request is None and not c.closed]
        if action < 0.25:
            conversations.append(sampler.open())
            sampler.submit(conversations[-1], rng.choice(prompts), max_new_tokens=rng.randint(1, 9),
                           seed=rng.randint(0, 3))
        elif action < 0.4 and idle and len(idle[0].tokens) < 25:
            sampler.submit(idle[0], [rng.randrange(V) for _ in range(rng.randint(1, 6))],
                           max_new_tokens=rng.randint(1, 9), seed=1)
        elif action < 0.5 and conversations:
            sampler.close(rng.choice(conversations))
        else:
            step()
    while sampler.busy:
        step()
    roomy = make(kind)
    for request, tokens in answers:
        assert request.error is None
        context, conversation = tokens[:-len(request.tokens)], roomy.open()
        roomy.submit(conversation, context, max_new_tokens=request.max_new_tokens, seed=request.seed)
        assert finish(roomy)[0].tokens == request.tokens
        roomy.close(conversation)
    for conversation in conversations:
        sampler.close(conversation)
    assert nothing_leaked(sampler)


# ---------------------------------------------------------------- which forward

def test_unsupported_is_strict():
    """Everything that our own forward would get wrong goes to the stock modules."""
    assert all(unsupported(model_of(kind)) is None for kind in OWN)
    assert "GemmaForCausalLM" in unsupported(model_of("gemma")) and "sliding" in unsupported(model_of("qwen2 windows"))
    tiny = dict(SMALL, num_key_value_heads=2)
    assert "gelu" in unsupported(LlamaForCausalLM(LlamaConfig(**tiny, hidden_act="gelu")))
    dynamic = LlamaForCausalLM(LlamaConfig(**tiny, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4,
                                                                    "factor": 2.0}))
    assert "dynamic" in unsupported(dynamic)
    with pytest.raises(ValueError, match="dynamic"):        # one row's length would change the others' rotation
        Sampler(dynamic, max_tokens=64)
    adapted = LlamaForCausalLM(LlamaConfig(**tiny))

    class Adapted(torch.nn.Linear):
        """Stands for a LoRA or a quantised layer."""
    adapted.model.layers[1].mlp.down_proj = Adapted(48, 32, bias=False)
    assert "down_proj" in unsupported(adapted)
    adapted.model.layers[1].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    adapted.lm_head.bias = torch.nn.Parameter(torch.ones(V))
    assert "biased" in unsupported(adapted)


def decode_batch(lengths, pages=24, heads=4, kv_heads=2, size=16, page=PAGE):
    torch.manual_seed(0)
    width = -(-max(lengths) // page)
    table = torch.stack([torch.randperm(pages)[:width] for _ in lengths]).int()
    k_pages, v_pages = torch.randn(2, pages, page, kv_heads, size)
    batch = Batch(None, None, None, table, torch.tensor(lengths, dtype=torch.int32), spans=list(lengths))
    return torch.randn(len(lengths), heads, size), k_pages, v_pages, batch


@pytest.mark.parametrize("lengths", [(1,), (4,), (17, 16, 8, 5, 4, 3, 1), (33, 2, 1)])
@pytest.mark.parametrize("window", [None, 5])
def test_decode_attentions_agree(lengths, window):
    """Sparse products, gathered pages and the kernel's entry point against a loop in fp64."""
    q, k_pages, v_pages, batch = decode_batch(lengths)
    for row, length in enumerate(lengths):
        place = torch.arange(0 if window is None else max(0, length - window), length)
        k, v = (pages[batch.table[row, place // PAGE].long(), place % PAGE].double().repeat_interleave(2, 1)
                for pages in (k_pages, v_pages))
        weight = (torch.einsum("hd,nhd->hn", q[row].double(), k) * 0.25).softmax(-1)
        expected = torch.einsum("hn,nhd->hd", weight, v)
        forms = [forward.sparse_decode, forward.gather_decode] + ([] if window else [
            lambda *args: forward.cuda_decode(*args[:-1])])
        for form in forms:
            assert (form(q, k_pages, v_pages, batch, 0.25, window)[row] - expected).abs().max() < 1e-5


def test_rows_of_similar_length_are_taken_together():
    """At most half of a group is padding, unless it is little; every row is in one group."""
    assert forward.similar([16000] + [100] * 200) == [(0, 2), (2, 201)]
    assert forward.similar([300, 200, 17, 1, 0, 0]) == [(0, 6)] and forward.similar([5]) == [(0, 1)]
    assert forward.similar([9000, 8000, 5000, 1200, 1100, 1]) == [(0, 5), (5, 6)]


@pytest.mark.parametrize("form", [forward.sparse_decode, forward.gather_decode])
def test_decode_never_reads_others_pages(form):
    """NaN in every slot that is not a row's own leaves the row clean."""
    q, k_pages, v_pages, batch = decode_batch((9, 6, 1))
    batch.table = torch.arange(9, dtype=torch.int32).view(3, 3)
    clean = form(q, k_pages, v_pages, batch, 0.25)
    for row, length in enumerate((9, 6, 1)):
        own = torch.zeros(24 * PAGE, dtype=bool)
        own[row * 3 * PAGE:row * 3 * PAGE + length] = True
        k, v = (pages.masked_fill(~own.view(24, PAGE, 1, 1), math.nan) for pages in (k_pages, v_pages))
        batch.plans = {}                                    # a plan is good for one step
        assert torch.allclose(form(q, k, v, batch, 0.25)[row], clean[row])


@pytest.mark.parametrize("gqa", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_prefill_passes_the_right_bounds(monkeypatch, gqa, window):
    """The CUDA prefill, with varlen_attn replaced by a loop of the same signature, against the row-wise form."""
    import torch.nn.attention.varlen as varlen

    def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size):
        out = []
        for i in range(len(cu_q) - 1):
            (a, b), (c, d) = cu_q[i:i + 2].tolist(), cu_k[i:i + 2].tolist()
            assert b - a <= max_q and d - c <= max_k and window_size[1] == 0
            query, key = torch.arange(d - c - (b - a), d - c)[:, None], torch.arange(d - c)
            mask = (key <= query) & ((key >= query - window_size[0]) | (window_size[0] < 0))
            row = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])),
                                                 scale=scale, attn_mask=mask, enable_gqa=True)
            out.append(row[0].transpose(0, 1))
        return torch.cat(out)

    def new(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa
        return attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)

    def old(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert key.shape[1] == query.shape[1]
        return attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)

    monkeypatch.setattr(varlen, "varlen_attn", new if gqa else old)
    _, k_pages, v_pages, batch = decode_batch((17, 9, 4))
    batch.starts = [0, 5, 14, 15]                           # the last 5 of 17, all 9, the last one of 4
    q = torch.randn(15, 4, 16)
    args = q, k_pages, v_pages, batch, 0.25, window
    assert torch.allclose(forward.varlen_prefill(*args), forward.row_prefill(*args), atol=1e-5)


def test_small_operations_equal_the_kernels():
    """rotate_and_store, the CPU's form, against kernels.qk_norm_rope_store; padding rows store nothing."""
    import kernels
    torch.manual_seed(0)
    angle = torch.randn(7, 8).repeat(1, 2)
    slots = torch.tensor([3, 40, 11, 0, 8, -1, -1])
    for norms in ((None, None), tuple(torch.randn(2, 16))):
        results = []
        for function in (kernels.qk_norm_rope_store, forward.rotate_and_store):
            torch.manual_seed(1)
            pages = torch.zeros(2, 12, PAGE, 2, 16)
            q = function(torch.randn(7, 8 * 16), *norms, angle.cos(), angle.sin(), slots, pages[0], pages[1], 1e-6)
            results.append((q, pages))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results))


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("tokens, options, sentence", [
    ([], {}, "tokens is empty"),
    ([1, V], {}, f"token id {V} is outside the model's vocabulary of {V}"),
    ([-1], {}, "token id -1 is outside"),
    ([1], dict(max_new_tokens=0), "max_new_tokens must be at least 1"),
    ([1], dict(temperature=-1.0), "temperature must be 0"),
    ([1], dict(temperature=math.nan), "temperature must be 0"),
    ([1], dict(top_p=0.0), "top_p must be above 0"),
    ([1] * 40, dict(max_new_tokens=26), "40 tokens and 26 new ones can never fit the KV pool of 64 tokens"),
])
def test_bad_requests_are_refused_in_one_sentence(tokens, options, sentence):
    sampler = make("llama grouped", max_tokens=64)
    conversation = sampler.open()
    with pytest.raises(ValueError, match=sentence) as error:
        sampler.submit(conversation, tokens, **{"max_new_tokens": 2, **options})
    assert "\n" not in str(error.value) and not conversation.tokens and not sampler.busy
    with pytest.raises(ValueError, match=sentence):
        sampler.generate([[2], tokens], **{"max_new_tokens": 2, **options})
    assert nothing_leaked(sampler) and not sampler.busy and not sampler.step()


def test_a_request_that_just_fits_is_taken():
    """65 positions never fit 64 slots, but the newest token needs no slot."""
    sampler, prompt = make("llama grouped", max_tokens=64), prompts_of((40,))[0]
    completion, = sampler.generate([prompt], max_new_tokens=25, temperature=0)
    assert completion.tokens == generated("llama grouped", tuple(prompt), 25)


def test_misuse_of_a_conversation_is_refused():
    sampler = make("llama grouped")
    conversation = sampler.open()
    request = sampler.submit(conversation, [1, 2], max_new_tokens=3)
    with pytest.raises(ValueError, match="open request"):
        sampler.submit(conversation, [3], max_new_tokens=3)
    with pytest.raises(ValueError, match="other requests run"):
        sampler.generate([[1]], max_new_tokens=1)
    sampler.step()
    sampler.close(conversation)
    assert "was closed" in request.error and request.done and nothing_leaked(sampler)
    with pytest.raises(ValueError, match="closed"):
        sampler.submit(conversation, [3], max_new_tokens=3)
    with pytest.raises(ValueError, match="is smaller than one page of 4; raise max_tokens"):
        make("llama grouped", max_tokens=PAGE - 1)
    with pytest.raises(ValueError, match="2 prompts, but 1 values"):
        sampler.generate([[1], [2]], max_new_tokens=[1])


@pytest.mark.parametrize("options", [{}, dict(overlap=True, buckets=True), dict(dtype=torch.bfloat16),
                                     dict(own_forward=False)])
def test_nan_ends_one_request_and_no_other(options):
    """A poisoned embedding: its row ends with an error that names request and step; all others are as they would be."""
    cls, config, extra = KINDS["llama grouped"]
    torch.manual_seed(0)
    model = cls(config(**SMALL, **extra)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
    prompts = [[token if token != 7 else 8 for token in prompt] for prompt in prompts_of((5, 9, 6))]
    sampler = Sampler(model, max_tokens=64, page_size=PAGE, **options)
    alone = sampler.generate(prompts[:1], max_new_tokens=6)[0].tokens
    prompts[1][4] = 7
    requests = [sampler.submit(sampler.open(), prompt, max_new_tokens=6, seed=hashed(0, i))
                for i, prompt in enumerate(prompts)]
    while sampler.busy:
        sampler.step()
    bad = requests[1]
    assert bad.completion is None and all(
        part in bad.error for part in (f"request {bad.number}:", "NaN", "sampler step"))
    assert requests[0].completion.tokens == alone and len(requests[2].completion.tokens) == 6
    assert torch.isfinite(sampler.pool).all()               # whoever gets its pages next is safe
    for request in requests:
        sampler.close(request.conversation)
    with pytest.raises(RuntimeError, match="NaN"):
        sampler.generate(prompts, max_new_tokens=6)
    assert torch.isfinite(sampler.pool).all() and nothing_leaked(sampler)


def test_idle_conversations_give_way_to_those_that_run():
    """A pool full of contexts that wait for their tools does not make new requests run one after the other."""
    sampler = make("llama grouped", max_tokens=64)
    idle = [sampler.open() for _ in range(3)]
    for conversation, prompt in zip(idle, prompts_of((18, 17, 19), seed=1)):
        sampler.submit(conversation, prompt, max_new_tokens=1, temperature=0)
    finish(sampler)
    assert len(sampler.pages.free) < 4
    prompts = prompts_of((8, 8, 8, 8), seed=2)
    requests = [sampler.submit(sampler.open(), prompt, max_new_tokens=6, temperature=0) for prompt in prompts]
    most = 0
    while sampler.busy:
        sampler.step()
        most = max(most, sampler.stats["running"])
    assert most == 4
    for prompt, request in zip(prompts, requests):
        assert request.completion.tokens == generated("llama grouped", tuple(prompt), 6)
    again = sampler.submit(idle[0], [5], max_new_tokens=3, temperature=0)       # recomputed, with the same context
    finish(sampler)
    assert again.completion.tokens == generated("llama grouped", tuple(idle[0].tokens[:-3]), 3)


def test_who_gives_way_when_pages_run_out(monkeypatch):
    """Idle conversations first, then the newest request; never the oldest, so that something always gets done."""
    sampler, gave = make("llama grouped", max_tokens=64), []
    preempt = sampler.scheduler._preempt
    monkeypatch.setattr(sampler.scheduler, "_preempt", lambda conversation: (gave.append((conversation, conversation.idle)),
                                                                preempt(conversation)))
    idle, old, young = (sampler.open() for _ in range(3))
    sampler.submit(idle, prompts_of((13,), seed=1)[0], max_new_tokens=1, temperature=0)
    finish(sampler)
    requests = [sampler.submit(conversation, prompt, max_new_tokens=30, temperature=0)
                for conversation, prompt in zip((old, young), prompts_of((6, 6), seed=2))]
    finish(sampler)
    assert gave[:2] == [(idle, True), (young, False)] and (old, False) not in gave
    for prompt, request in zip(prompts_of((6, 6), seed=2), requests):
        assert request.completion.tokens == generated("llama grouped", tuple(prompt), 30)


def test_an_exception_leaves_the_sampler_usable(monkeypatch):
    """With a step under way on the device too."""
    sampler, prompt = make("llama grouped", overlap=True), prompts_of((5,))[0]
    decode, calls = sampler._decode, []

    def interrupted(plan):
        calls.append(sampler.unread)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode(plan)
    monkeypatch.setattr(sampler, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.generate([prompt], max_new_tokens=9)
    assert calls[-1] is not None and not sampler.busy and nothing_leaked(sampler)
    assert sampler.generate([prompt], max_new_tokens=4, temperature=0)[0].tokens == generated("llama grouped", tuple(prompt), 4)


# ---------------------------------------------------------------- on a GPU

@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", OWN)
def test_cuda_graphs_and_host_lag(kind):
    """fp32 on CUDA: graphs, Triton kernels and one step of host lag give the tokens of `generate` on the CPU."""
    sampler, prompts = make(kind, device="cuda", dtype=torch.float32, max_tokens=128), prompts_of()
    out = sampler.generate(prompts, max_new_tokens=14, temperature=0)
    for prompt, completion in zip(prompts, out):
        assert completion.tokens == generated(kind, tuple(prompt), 14)
        assert logprob_error(model_of(kind), prompt, completion) < 1e-3
    assert nothing_leaked(sampler) and sampler.overlap and sampler.decoder.graphs
