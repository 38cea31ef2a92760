"""Hours that a step of the paper's setting takes on 8 H100s: arithmetic around the real scheduler.

    python -m bench.cost            prints a table within a minute, on one core

Attempts run through driver.py and sampler/scheduler.py, and a clock adds what each step of the
sampler would cost. The paper states limits only. The usual lengths are our assumption, and the
hours depend on it. Not counted: waiting for tools, pages that two readers have in common, questions
whose attempts all earned the same, the exchange of weights (it overlaps with other work).

Tests: pytest tests/test_bench.py
"""

import argparse
import asyncio
import random
from functools import partial
from statistics import mean

from bench.common import table
from bench.sampler import QWEN3_8B, token_bytes, weight_bytes
from driver import Driver
from mars import PAPER, MarsConfig
from sampler.request import Conversation, Request
from sampler.scheduler import Scheduler

CONFIG = MarsConfig(**{name: value for name, value in PAPER.items() if name != "name"})
GPUS = 8
SCALE = 64  # tokens that one simulated token stands for: a page of the KV cache on CUDA

# One H100: a copy's bytes a second, a large product's FLOP/s (measured, docs/findings.md).
COPY, PRODUCT = 2.97e12, 775e12
# A decode step reads at the rate of a copy, and launches and draws take 1.5 ms. Both are fitted to
# two steps of an H200 (3 and 12 rows of 24k tokens: 7.6 and 15.2 ms).
READ, STEP_SECONDS = COPY, 1.5e-3
PREFILL, LINEAR = 0.84 * PRODUCT, 0.88 * PRODUCT  # a layer's products in rollouts, in training
LOSS = 0.79 * PRODUCT  # with gradients (measured)
# One long sequence forward: flash-attn 4, by a measured prefill of 24k tokens (PyTorch: 314e12).
# Packed sequences forward and backward: FlashAttention 2, published.
ATTENTION, PACKED, BACKWARD = 580e12, 350e12, 270e12
# Bytes of a token in a layer, counted on fake tensors: operations one by one, and compiled.
EAGER, COMPILED = 3312e3, 900e3

VOCABULARY, D, F, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, _ = QWEN3_8B.values()
LAYER = D * (2 * HEADS * HEAD_SIZE + 2 * KV_HEADS * HEAD_SIZE + 3 * F)  # weights in products
PAIR = 4 * HEADS * HEAD_SIZE * LAYERS  # FLOPs of a query and a key
WEIGHTS, TOKEN = weight_bytes(QWEN3_8B), token_bytes(QWEN3_8B)

# Tokens of a question, average tokens of a step and of a note, average calls, chunks per call.
QUESTION, STEP, NOTE, CALLS, CHUNKS = 1536, 800, 600, 4, 5
SPREAD = 0.5  # σ of two log-normal factors on the number of calls: a question's and an attempt's
MOST_CALLS = (CONFIG.sys2_context - QUESTION) // (STEP + CHUNKS * NOTE)


def prefill_seconds(begin: int, end: int) -> float:
    """Seconds that tokens begin:end of a context take to prefill."""
    pairs = (end**2 - begin**2) / 2
    return (end - begin) * 2 * LAYERS * LAYER / PREFILL + PAIR * pairs / ATTENTION


def decode_seconds(tokens: int) -> float:
    """Seconds of a decode step whose rows hold `tokens` tokens together."""
    return (WEIGHTS + tokens * TOKEN) / READ + STEP_SECONDS


def training_seconds(length: int, sampled: int, elementwise: float) -> float:
    """Seconds of a sample's forward and backward pass; activations are computed twice."""
    products = LAYERS * (8 * LAYER - 2 * D * F)  # A layer's last product is not recomputed.
    seconds = length * (products / LINEAR + LAYERS * elementwise / (0.88 * COPY))
    seconds += PAIR * length**2 / 2 * (2 / PACKED + 2.5 / BACKWARD)
    return seconds + sampled * 6 * VOCABULARY * D / LOSS


class Rank:
    """One GPU's sampler, as the driver uses it: the real scheduler, with a clock as its device."""

    def __init__(self, pool: int, ranks: list["Rank"]):
        self.ranks = ranks
        # A simulated step stands for SCALE steps, each of which prefills up to 8,192 tokens.
        sizes = {"pages": pool // SCALE, "page_size": 1, "max_sequences": CONFIG.max_sequences}
        self.scheduler = Scheduler(**sizes, prefill_chunk=8192)
        self.close = self.scheduler.close
        self.clock = 0.0  # seconds
        self.rows = []  # number of rows of each decode step
        self.samples = []  # (tokens, sampled tokens) of each sample that is trained

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.requests)

    def submit(self, conversation: Conversation, tokens: list[int], **options) -> Request:
        request = Request(conversation, tokens, **options)
        self.scheduler.submit(request)
        return request

    def step(self) -> list[Request]:
        """SCALE steps of the sampler, unless another rank's clock is behind."""
        if self.clock > min(rank.clock for rank in self.ranks if rank.busy):
            return []
        _, prefill, _, decode = self.scheduler.schedule(unread=False)
        if prefill is not None:
            for end, first, last in zip(prefill.host_lengths, prefill.starts, prefill.starts[1:]):
                self.clock += prefill_seconds(SCALE * (end - (last - first)), SCALE * end)
        if decode is not None:
            rows = len(decode.requests)
            self.rows.append(rows)
            self.clock += SCALE * decode_seconds(SCALE * sum(decode.batch.host_lengths))
            self.scheduler.collect(decode, [0] * rows, [0.0] * rows)
        finished, self.scheduler.finished = self.scheduler.finished, []
        return finished


async def play(driver: Driver, rank: Rank, calls: int, name: str) -> None:
    """An attempt: `calls` times a step of System 2 and a note on each chunk, then a last step."""
    rng = random.Random(name)

    async def ask(conversation: Conversation, prompt: int, average: int, limit: int) -> int:
        """The number of tokens of an answer, drawn exponentially. No two prompts share a page."""
        tokens = [rng.getrandbits(60)] + [0] * (prompt // SCALE - 1)
        new = max(1, round(min(rng.expovariate(1 / average), limit) / SCALE))
        completion = await driver.sample(rank, conversation, tokens, max_new_tokens=new)
        return SCALE * len(completion.tokens)

    async def read() -> int:
        reader = Conversation()
        length = await ask(reader, CONFIG.sys1_prompt, NOTE, CONFIG.sys1_response)
        rank.close(reader)
        return length

    system2 = Conversation()
    sampled = await ask(system2, QUESTION, STEP, CONFIG.step_tokens)
    for _ in range(calls):
        lengths = await asyncio.gather(*(read() for _ in range(CHUNKS)))
        sampled += await ask(system2, sum(lengths), STEP, CONFIG.step_tokens)
    rank.close(system2)
    rank.samples.append((SCALE * len(system2.tokens), sampled))
    # Balancing draws one note.
    rank.samples.append((CONFIG.sys1_prompt + lengths[0], lengths[0]))


def play_step(pool: int, unit: int, at_once: int) -> list[Rank]:
    """The ranks after a step. At any time each plays `at_once` units of `unit` attempts.

    A rank that has begun all its own units takes those of others, unless they are whole questions.
    """
    rng = random.Random(0)
    factor = partial(rng.lognormvariate, -(SPREAD**2) / 2, SPREAD)  # 1 on average
    ranks = []
    ranks += [Rank(pool, ranks) for _ in range(GPUS)]
    driver = Driver(ranks, deterministic=True)
    queues = [[] for _ in ranks]
    for question in range(CONFIG.questions):
        average = CALLS * factor()
        calls = [min(max(1, round(average * factor())), MOST_CALLS) for _ in range(CONFIG.group)]
        attempts = [(count, f"{question} {number}") for number, count in enumerate(calls)]
        units = [attempts[start : start + unit] for start in range(0, CONFIG.group, unit)]
        queues[question * GPUS // CONFIG.questions] += units

    async def work(number: int) -> None:
        order = queues[number:] + queues[:number]  # its own questions first
        for queue in order if unit < CONFIG.group else order[:1]:
            while queue:
                await asyncio.gather(
                    *(play(driver, ranks[number], *attempt) for attempt in queue.pop(0))
                )

    driver.run([work(number) for number in range(GPUS) for _ in range(at_once)])
    return ranks


def row(name: str, pool: int, unit: int, at_once: int, elementwise: float) -> dict:
    """Hours of a step and of a run."""
    ranks = play_step(pool, unit, at_once)
    rollouts = max(rank.clock for rank in ranks) / 3600
    samples = [sample for rank in ranks for sample in rank.samples]
    training = sum(training_seconds(*sample, elementwise) for sample in samples) / GPUS / 3600
    return {
        "setting": name,
        "readers at once": mean(count for rank in ranks for count in rank.rows),
        "rollouts, h": rollouts,
        "training, h": training,
        "step, h": rollouts + training,
        f"{CONFIG.steps} steps, h": CONFIG.steps * (rollouts + training),
    }


SETTINGS = [  # the arguments of `row`; on 80 GB the preset has a pool of 333,842 tokens
    ("pool of 80,000, own questions", 80_000, 16, 4, EAGER),
    ("pool of 333,842, own questions", 333_842, 16, 4, COMPILED),
    ("pool of 333,842, shared in fours", 333_842, 4, 4, COMPILED),
]

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(table([row(*setting) for setting in SETTINGS]))
