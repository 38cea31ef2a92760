"""The scheduler under the real engine, with a model that knows when it reads a wrong page.

The stand-in for a model keeps one number a token in the pool: a hash of the token and of all
numbers before it, as they are read from the pages. A stale page, a wrong place or a lost token
changes the number and with it the logits, so every answer can be checked exactly, and thousands of
steps take a second.
"""

import functools
import random
from unittest import mock

import numpy as np
import pytest
import torch

from sampler import Sampler, engine, hash64
from sampler.draws import sample_token, uniform

V = 29
PAGE = 4
LOGITS = torch.randn(97, V, generator=torch.Generator().manual_seed(0))


class ExactModel:
    """Writes hashes of contexts into the pages and answers with logits that depend on them."""

    cache_dtype = torch.float64
    vocabulary = V
    layers = 1
    kv_heads = 1
    head_size = 1
    weights = 0  # their number, which is in every hash

    def write(self, batch, row, i, pool):
        """Token i of the batch, which belongs to `row`."""
        memory = pool.view(2, -1)[0].numpy()
        places = np.arange(batch.positions[i].item())
        pages = batch.block_table[row].numpy()[places // PAGE].astype(np.int64)
        before = memory[pages * PAGE + places % PAGE]
        value = digest((self.weights, *before.tolist()), batch.ids[i].item())
        memory[batch.slots[i].item()] = value
        return value

    def fill(self, batch, pool):
        for row in range(len(batch.lengths)):
            for i in range(batch.starts[row], batch.starts[row + 1]):
                self.write(batch, row, i, pool)

    def decode(self, batch, pool):
        values = []
        for row in range(len(batch.lengths)):
            values.append(self.write(batch, row, row, pool))
        return LOGITS[[int(value) % len(LOGITS) for value in values]]

    def load(self, model):
        self.weights += 1


def digest(before, token):
    """48 bits, which fp64 holds exactly."""
    return float(hash((before, token)) % (1 << 48))


@functools.cache
def value_of(tokens, weights=0):
    """The number that belongs to the last of these tokens."""
    before = tuple(value_of(tokens[:end], weights) for end in range(1, len(tokens)))
    return digest((weights, *before), tokens[-1])


def make(**options):
    options = {"max_tokens": 16 * PAGE, "page_size": PAGE, **options}
    with mock.patch.object(engine, "Model", lambda *_: ExactModel()):
        return Sampler(torch.nn.Linear(1, 1), buckets=False, **options)


def check_answer(request, context, weights=()):
    """Each token is the draw of a row that is alone and reads a perfect cache.

    weights: the numbers of the weights that drew the tokens, if they are not the first ones.
    """
    assert request.error is None
    assert request.completion.tokens == request.tokens
    count = len(request.tokens)
    tokens = list(context) + request.tokens
    weights = weights or [0] * count
    values = [value_of(tuple(tokens[: len(context) + i]), weights[i]) for i in range(count)]
    seeds = np.full(count, hash64(request.seed), np.uint64)
    expected, logprobs = sample_token(
        LOGITS[[int(value) % len(LOGITS) for value in values]],
        torch.from_numpy(uniform(seeds, np.arange(count))),
        torch.full((count,), request.temperature),
        torch.full((count,), request.top_p),
    )
    assert request.tokens == expected.tolist()
    assert np.allclose(request.logprobs, logprobs, atol=1e-5)


def check_state(engine, conversations):
    """Every page, row and list is accounted for, exactly, by the conversations that are open."""
    scheduler = engine.scheduler
    pages = scheduler.pages
    held = [page for c in conversations for page in c.block_table]
    assert pages.references == [held.count(page) for page in range(pages.count)]
    assert sorted([*pages.free, *pages.kept, *set(held)]) == list(range(pages.count))
    assert engine.pages_in_use == len(set(held))

    requests = sorted(scheduler.requests, key=lambda request: request.number)
    assert set(requests) == {c.request for c in conversations if c.request}
    rows = [request.row for request in requests if request.row is not None]
    assert sorted(rows + scheduler.rows.free) == list(range(len(scheduler.rows.length)))
    assert scheduler.waiting == [request for request in requests if request.row is None]


def run_all(engine):
    while engine.busy:
        engine.step()


class History:
    """Random submits, turns, closes and new weights over a tiny pool, each answer checked."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.contexts = {}
        self.weights = {}  # request -> the number of the weights that drew each of its tokens
        self.conversations = []
        self.chained = 0
        self.found = 0  # kept pages that were taken over
        self.engine = make(
            max_tokens=self.rng.randint(4, 12) * PAGE,
            max_sequences=self.rng.randint(1, 6),
            prefill_chunk=self.rng.randint(1, 20),
            overlap=self.rng.random() < 0.5,
        )
        self.prompts = [self.random_tokens(length) for length in (1, 4, 6, 7)]
        stem = self.random_tokens(6)
        self.prompts += [stem[:4], stem[:5], stem, *(stem + self.random_tokens(n) for n in (1, 3))]
        copy_pages = self.engine._copy_pages

        def watched(copies):
            targets = set()
            for source, target in copies:
                self.chained += source in targets
                targets.add(target)
            copy_pages(copies)

        self.engine._copy_pages = watched
        pages = self.engine.pages
        fork = pages.fork

        def watched_fork(block_table, tokens):
            self.found += len(pages.kept.keys() & block_table)
            return fork(block_table, tokens)

        pages.fork = watched_fork

    def random_tokens(self, count):
        return [self.rng.randrange(V) for _ in range(count)]

    def submit(self, conversation, tokens):
        request = self.engine.submit(
            conversation,
            tokens,
            max_new_tokens=self.rng.randint(1, 6),
            temperature=self.rng.choice((0, 0.7, 1, 1)),
            top_p=self.rng.choice((1, 1, 0.8)),
            stop_ids=self.rng.choice(((), (3, 5))),
            seed=self.rng.choice((0, -1, 7, 2**63)),
        )
        self.contexts[request] = list(conversation.tokens)
        self.weights[request] = []

    def note_weights(self):
        for request, weights in self.weights.items():
            new = len(request.tokens) - len(weights)
            weights += [self.engine.model.weights] * new

    def act(self):
        resting = [c for c in self.conversations if c.request is None]
        action = self.rng.random()
        if action < 0.2:  # several attempts at one prompt, as in a group
            prompt = self.rng.choice(self.prompts)
            for _ in range(self.rng.randint(1, 3)):
                self.conversations.append(self.engine.open())
                self.submit(self.conversations[-1], prompt)
        elif action < 0.35 and resting and len(resting[0].tokens) <= 2 * PAGE:
            self.submit(resting[0], self.random_tokens(self.rng.randint(1, 3)))
        elif action < 0.45 and self.conversations:
            conversation = self.rng.choice(self.conversations)
            self.conversations.remove(conversation)
            self.engine.close(conversation)
        elif action < 0.47:
            self.engine._postprocess()
            self.note_weights()
            if self.rng.random() < 0.5:
                self.engine.lend_pool()
            self.engine.load_weights(None)
            assert self.engine.pages_in_use == 0, "pages of the old weights"
        else:
            self.step()
        check_state(self.engine, self.conversations)

    def step(self):
        done = self.engine.step()
        self.note_weights()
        for request in done:
            check_answer(request, self.contexts[request], self.weights.pop(request))

    def run(self, actions=60):
        for _ in range(actions):
            self.act()
        steps = 0
        while self.engine.busy:
            self.step()
            steps += 1
            assert steps < 5_000, "a request waits for ever"
        for conversation in self.conversations:
            self.engine.close(conversation)
        check_state(self.engine, [])


def test_any_history_gives_exact_answers():
    """Tiny pools, groups of one prompt, forks and preemptions in one admission: all is exact."""
    preemptions = 0
    chained = 0
    found = 0
    for seed in range(50):
        history = History(seed)
        history.run()
        preemptions += history.engine.stats["preemptions"]
        chained += history.chained
        found += history.found
    assert preemptions > 300
    assert found > 50, "kept pages were hardly ever taken over"
    assert chained >= 3, "no fork was made of a page that is itself still to be copied"


def prefilled(prompts, **options):
    """Tokens prefilled for prompts that are all submitted at once, each answer checked."""
    engine = make(max_tokens=64 * PAGE, **options)
    requests = []
    for seed, prompt in enumerate(prompts):
        requests.append(engine.submit(engine.open(), prompt, max_new_tokens=3, seed=seed))
    run_all(engine)
    for request in requests:
        check_answer(request, request.given)
    count = sum(len(request.given) for request in requests)
    # The last token of a prompt is not prefilled; the first step of decoding reads it.
    stats = engine.stats
    assert stats["prefilled_tokens"] + stats["shared_tokens"] == count - len(requests)
    return stats["prefilled_tokens"]


def test_what_prompts_have_in_common_is_prefilled_once():
    """All of an equal prompt, and the full pages of a tree, whoever came first.

    Each shares most with its neighbour among the sorted ones.
    """
    tree = [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 5], [6]]
    prompts = [[token for node in path for token in [node] * PAGE] + [8, 9] for path in tree]
    pages = len({tuple(path[:end]) for path in tree for end in range(1, len(path) + 1)})
    for seed in range(20):
        random.Random(seed).shuffle(prompts)
        for chunk in (3, 1000):
            assert prefilled(2 * prompts, prefill_chunk=chunk) == pages * PAGE + len(prompts)
    # Decoding computes the last token of a prompt, so its page is not shared.
    whole = [1] * 2 * PAGE
    for pair in ([whole, [*whole, 20, 21]], [[*whole, 20, 21], whole]):
        assert prefilled(pair) == 2 * PAGE - 1 + PAGE + 1


def test_pages_of_a_closed_conversation_are_prefilled_again_only_under_new_weights():
    """The chunk that a later attempt finds again; full pages only."""
    engine = make(max_tokens=16 * PAGE)
    chunk = list(range(4 * PAGE + 1))

    def read(prompt):
        before = engine.stats["prefilled_tokens"]
        engine.generate([prompt], max_new_tokens=1)
        return engine.stats["prefilled_tokens"] - before

    whole, rest = 4 * PAGE + 2, 2
    assert [read(chunk + task) for task in ([1, 2], [3, 4], [1, 2])] == [whole, rest, rest]
    engine.load_weights(None)
    assert [read(chunk + task) for task in ([1, 2], [3, 4])] == [whole, rest]
    read([9] * 13 * PAGE)  # needs their memory
    assert read([*chunk, 1, 2]) > rest


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_prefills_what_is_new_and_nothing_twice(overlap):
    """Its own tokens and the last sampled one, but for the newest, which the first step reads."""
    engine = make(overlap=overlap)
    talk = engine.open()
    for turn in range(3):
        request = engine.submit(talk, [1, 2, 3], max_new_tokens=4, seed=turn)
        context = list(talk.tokens)
        run_all(engine)
        check_answer(request, context)
        assert engine.stats["prefilled_tokens"] == 3 * (turn + 1) - 1


def test_the_oldest_request_is_never_starved():
    """Older conversations that submit later, again and again, don't hold up a first request."""
    engine = make(max_tokens=16 * PAGE)
    older = [engine.open() for _ in range(200)]
    young = engine.open()
    first = engine.submit(young, list(range(8)), max_new_tokens=36)
    running = 0
    steps = 0
    while not first.done:
        while running < 4:
            conversation = older.pop()
            prompt = [len(older) % V] * 8
            engine.submit(conversation, prompt, max_new_tokens=12, seed=len(older))
            running += 1
        running -= len(engine.step())
        steps += 1
        assert steps <= 36
    assert engine.stats["preemptions"] > 0
    check_answer(first, range(8))


def test_who_rests_gives_way_only_where_it_must_and_the_youngest_first():
    engine = make(max_tokens=6 * PAGE, overlap=True)
    old, young, newest = (engine.open() for _ in range(3))
    for conversation, token in ((young, 1), (old, 2), (newest, 3)):  # two pages each
        engine.submit(conversation, [token] * 5, max_new_tokens=1)
        if conversation is not newest:
            run_all(engine)
    engine.step()  # the newest one's last token is under way
    last = engine.submit(engine.open(), [4] * 5, max_new_tokens=1)
    assert len(engine.step()) == 1 and old.block_table and young.block_table
    run_all(engine)
    check_answer(last, [4] * 5)
    assert old.block_table and young.block_table and not newest.block_table


def test_who_rests_keeps_its_pages_while_giving_them_up_would_not_suffice():
    engine = make(max_tokens=8 * PAGE)
    resting = [engine.submit(engine.open(), [token] * 2, max_new_tokens=1) for token in (1, 2)]
    run_all(engine)
    running = engine.submit(engine.open(), [3] * 3 * PAGE, max_new_tokens=PAGE)
    engine.step()
    waiting = engine.submit(engine.open(), [4] * 5 * PAGE, max_new_tokens=1)
    engine.step()
    assert all(request.conversation.block_table for request in resting)
    run_all(engine)
    check_answer(running, [3] * 3 * PAGE)
    check_answer(waiting, [4] * 5 * PAGE)


def test_rows_wait_as_little_as_they_can():
    """A finished row is replaced at the next step; a long prefill stops nobody who decodes."""
    engine = make(max_sequences=2, prefill_chunk=4)
    requests = []
    for length, new in ((2, 3), (41, 2), (1, 4)):
        requests.append(engine.submit(engine.open(), [length % V] * length, max_new_tokens=new))
    ended = {}
    for step in range(1, 13):
        ended |= dict.fromkeys(engine.step(), step)
    # 40 tokens are ten chunks. The others never waited for them.
    assert [ended[request] for request in requests] == [3, 12, 7]
