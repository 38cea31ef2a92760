"""One question becomes one trajectory: System 2 reasons and calls tools, System 1 distils what they return.

    (1)  s_i, (t_i, p_i) = π_sys2(c_i)                                 `system2_step`
    (2)  õ_i = π_sys1(Bin-Packing(o_i^(1) … o_i^(n_i)), p_i)           `distil`: one System 1 sample per chunk, in parallel
    (3)  c_{i+1} = c_i ⊕ {s_i, t_i, p_i, õ_i}                          `extend`, until System 2 answers: `episode`

Tokens, loss masks and log-probs are stored as they arise (`Sample`) and never remade: a role's own context is never decoded
and encoded again. (Only the purpose passes through text, from System 2's step into System 1's prompt.) An episode is straight-
line async code; `Driver` runs hundreds of them over one sampler, so that whatever is ready, of either role and at any turn,
shares one running batch.

Our choices where the paper is silent: every limit ends in a demand to answer rather than in silence; a malformed step gets a
correction and the episode goes on; the notes of a call's chunks are joined in the order of the chunks.
"""
import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from binpack import pack_documents
from config import Config
from tasks.chat import Step
from sampler import Completion, Conversation, Sampler
from tasks.questions import Question
from tools import Document, ToolError


@dataclass
class Sample:
    """What one role wrote in one context: the unit of training. The three lists have one entry per token."""
    role: str                                               # "sys1" | "sys2"
    group: int                                              # the question's place in the batch: the key of its groups
    trajectory: int                                         # k of G
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)          # True: sampled by this role, so it carries loss
    logprobs: list[float] = field(default_factory=list)     # the sampler's log-prob; 0 where given
    reward: float | None = None                             # its trajectory's
    advantage: float = 0.0
    drawn: int = 0                                          # times it stands in the training batch after balancing

    def give(self, tokens: list[int]) -> None:
        """Appends tokens that this role reads: prompt, chunk, notes."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def take(self, completion: Completion) -> None:
        """Appends tokens that this role sampled, the stop token included."""
        self.tokens += completion.tokens
        self.mask += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs


@dataclass
class Chunk:
    """Documents that System 1 read at once, and what it wrote."""
    documents: list[int]                                    # indices into the turn's documents
    tokens: int
    truncated: bool
    sample: Sample


@dataclass
class Turn:
    """One step of System 2 and what came of it."""
    sampled: list[int]
    step: Step
    problem: str | None = None                              # "malformed: …" | "tool failed: …" | "no results" | "judge failed: …"
    documents: list[Document] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)        # the documents' tokens
    chunks: list[Chunk] = field(default_factory=list)
    capacity: int = 0                                       # tokens that fit into one chunk
    seconds: float = 0.0                                    # spent in the tool


@dataclass
class Trajectory:
    """One attempt at a question: System 2's sample (its whole context), its turns with System 1's samples, and the reward."""
    question: Question
    sample: Sample
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    ended: str = ""                                         # "answer" | "answer on demand" | "no answer"
    reward: float | None = None                             # None: the judge could not be reached; leaves the group

    def sys1_samples(self) -> list[Sample]:
        """System 1's samples, in the order in which they were asked for."""
        return [chunk.sample for turn in self.turns for chunk in turn.chunks]


@dataclass
class Setting:
    """Everything an episode needs."""
    driver: "Driver"
    sampler: Sampler                                        # plays System 2
    sys1_sampler: Sampler                                   # the same one, unless System 1 is frozen
    format: object                                          # prompts.ChatFormat or toy.ToyFormat; their methods: prompts.py
    tools: dict[str, Callable[[str], list[Document]]]
    grade: Callable[[Question, str], float]                 # answer -> reward; may block; ToolError if it cannot tell
    config: Config                                          # read for the limits and the arms
    step: int | str                                         # names the draws: the training step, or "eval"
    temperature: float = 1.0
    top_p: float = 1.0
    say: Callable[[str, str], None] = lambda kind, text: None   # tells somebody who watches (`mars.py ask`)

    def seed(self, question: Question, *names) -> int:
        """The seed of one completion: a hash of its names, so that no draw depends on what was drawn before."""
        key = repr((self.config.seed, self.step, question.id, *names)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


async def episode(setting: Setting, question: Question, group: int, k: int) -> Trajectory:
    """One trajectory, from the question to its reward."""
    trajectory = Trajectory(question, Sample("sys2", group, k))
    conversation = setting.sampler.open()
    try:
        given, final = setting.format.system2_prompt(question.text), False                          # c_0
        while not trajectory.ended:
            turn = await system2_step(setting, trajectory, conversation, given, final)              # (1)
            if turn.step.answer is not None:
                trajectory.answer, trajectory.ended = turn.step.answer, "answer on demand" if final else "answer"
            elif final:
                trajectory.ended = "no answer"
            else:
                notes = await observe(setting, trajectory, turn)                                    # (2)
                given, final = extend(setting, trajectory, notes)                                   # (3)
    finally:
        setting.sampler.close(conversation)
    setting.say("answer", trajectory.answer or "")
    await reward(setting, trajectory)
    return trajectory


async def system2_step(setting: Setting, trajectory: Trajectory, conversation: Conversation, given: list[int],
                       final: bool) -> Turn:
    """Formula (1): s_i, (t_i, p_i) = π_sys2(c_i). `given` completes the context c_i; `final`: it demanded an answer."""
    config, sample = setting.config, trajectory.sample
    sample.give(given)
    room = config.sys2_context - len(sample.tokens) - (0 if final else reserve(config, setting.format))
    completion = await setting.driver.sample(
        setting.sampler, conversation, given, max_new_tokens=min(room, config.step_tokens),
        temperature=setting.temperature, top_p=setting.top_p, stop_ids=setting.format.stop_ids,
        seed=setting.seed(trajectory.question, sample.trajectory, "sys2", len(trajectory.turns)))
    sample.take(completion)
    if completion.finish == "length":
        step = Step(error=f"the step was cut after {len(completion.tokens)} tokens; be shorter")
    else:
        step = setting.format.parse(completion.tokens, final=final)
    turn = Turn(completion.tokens, step, problem=step.error and f"malformed: {step.error}")
    trajectory.turns.append(turn)
    setting.say("system 2", setting.format.decode(completion.tokens))
    return turn


async def observe(setting: Setting, trajectory: Trajectory, turn: Turn) -> list[list[int]] | str:
    """What System 2 gets to see of its call: the notes as token ids, or one sentence of ours when there are none."""
    call, config = turn.step.call, setting.config
    if call is None:
        return turn.step.error

    def run_tool() -> list[Document]:
        start = time.perf_counter()
        try:
            return setting.tools[call.tool](call.argument)
        finally:
            turn.seconds = time.perf_counter() - start      # the tool's own, without the wait for its turn
    try:
        turn.documents = await setting.driver.outside(run_tool)
    except ToolError as error:
        turn.problem = f"tool failed: {error}"
        setting.say("failed", str(error))
        return f"error: the tool failed ({error})"
    if not turn.documents:
        turn.problem = "no results"
        return "no results"
    setting.say("found", "; ".join(document.title or document.id for document in turn.documents))
    distilled = call.tool in config.distill.split(",")
    documents = [setting.format.document(d) if distilled else setting.format.encode(d.text) for d in turn.documents]
    turn.lengths = [len(tokens) for tokens in documents]
    if distilled and config.system1 != "none":
        return await distil(setting, trajectory, turn, documents)
    share = config.sys2_context // config.max_turns         # raw text: an even share of System 2's context for each turn
    return [tokens[:share // len(documents)] for tokens in documents]


async def distil(setting: Setting, trajectory: Trajectory, turn: Turn, documents: list[list[int]]) -> list[list[int]]:
    """Formula (2): õ_i = π_sys1(Bin-Packing(o_i^(1) … o_i^(n_i)), p_i). Returns one note (token ids) per chunk."""
    config, format, question = setting.config, setting.format, trajectory.question
    purpose = turn.step.call.purpose if config.purpose == "on" else ""
    turn.capacity = config.sys1_prompt - len(format.system1_prompt([], purpose, question.text))
    if config.packing == "ffd":
        bins = pack_documents(turn.lengths, turn.capacity)
    else:
        bins = [[index] for index in range(len(documents))]

    async def note(bin: list[int]) -> list[int]:
        tokens = [token for index in bin for token in documents[index][:turn.capacity]]
        chunk = Chunk(bin, len(tokens), any(turn.lengths[index] > turn.capacity for index in bin),
                      Sample("sys1", trajectory.sample.group, trajectory.sample.trajectory))
        turn.chunks.append(chunk)
        names = (trajectory.sample.trajectory, "sys1", len(trajectory.turns), len(turn.chunks))
        chunk.sample.give(format.system1_prompt(tokens, purpose, question.text))
        conversation = setting.sys1_sampler.open()
        try:
            completion = await setting.driver.sample(
                setting.sys1_sampler, conversation, chunk.sample.tokens, max_new_tokens=config.sys1_response,
                temperature=setting.temperature, top_p=setting.top_p, stop_ids=format.stop_ids,
                seed=setting.seed(question, *names))
        finally:
            setting.sys1_sampler.close(conversation)
        chunk.sample.take(completion)
        setting.say("system 1", format.decode(completion.tokens))
        return format.note(completion.tokens)

    return await asyncio.gather(*map(note, bins))


def extend(setting: Setting, trajectory: Trajectory, notes: list[list[int]] | str) -> tuple[list[int], bool]:
    """Formula (3): c_{i+1} = c_i ⊕ {s_i, t_i, p_i, õ_i}. The step stands in the context already; returns the ids of õ_i in
    their wrapping, and whether they end in the demand to answer: at the last turn, or when the context is nearly full."""
    config, format = setting.config, setting.format
    close = [] if trajectory.turns[-1].sampled[-1] in format.stop_ids else format.close_step()
    room = config.sys2_context - len(trajectory.sample.tokens) - len(close)

    def wrap(final):
        return format.message(notes, final=final) if isinstance(notes, str) else format.observation(notes, final=final)

    final = len(trajectory.turns) >= config.max_turns - 1
    given = wrap(final)
    if len(given) > room - reserve(config, format) - 1:     # not even one token for a step, and a demand after it
        final, given = True, wrap(True)
    over = len(given) - (room - config.answer_tokens)
    if over > 0:                                            # `reserve` left room for the bare demand: cut the notes
        joined = [token for note in notes for token in note] if not isinstance(notes, str) else []
        given = format.observation([joined[:max(0, len(joined) - over)]], final=True)
    return close + given, final


def reserve(config: Config, format) -> int:
    """Tokens of System 2's context kept free at every step, so that a demand to answer and the answer always fit."""
    return config.answer_tokens + len(format.close_step()) + len(format.observation([[]], final=True))


async def reward(setting: Setting, trajectory: Trajectory) -> None:
    """Binary reward for the trajectory and for all of its samples. A judge that cannot be reached is no reward, not 0."""
    try:
        trajectory.reward = 0.0 if trajectory.answer is None else await setting.driver.outside(
            setting.grade, trajectory.question, trajectory.answer)
    except ToolError as error:
        trajectory.turns[-1].problem = f"judge failed: {error}"
    for sample in (trajectory.sample, *trajectory.sys1_samples()):
        sample.reward = trajectory.reward


class Driver:
    """Runs episodes (coroutines) over samplers: what they ask for shares one running batch, their tools run in threads.

    lockstep: a tool's result is handed over only when nothing is left to decode, so the batches, and with them the last bits
    of every log-prob, do not depend on how long a tool took. Off, a result is handed over at once, and tool waits cost nothing.
    """

    def __init__(self, samplers: list[Sampler], *, lockstep: bool, threads: int = 32):
        self.samplers, self.lockstep = samplers, lockstep
        self.threads = ThreadPoolExecutor(threads)
        self.requests: dict[int, asyncio.Future] = {}       # id of an open request -> who waits for it
        self.calls: list[tuple[asyncio.Future, asyncio.Future]] = []    # (running tool, gate before its result)

    async def sample(self, sampler: Sampler, conversation: Conversation, tokens: list[int], **options) -> Completion:
        """Appends `tokens` to the conversation and samples; see Sampler.submit."""
        request = sampler.submit(conversation, tokens, **options)
        self.requests[id(request)] = future = asyncio.get_running_loop().create_future()
        return await future

    async def outside(self, function: Callable, *arguments):
        """Calls a blocking function of the outside world in a thread."""
        loop = asyncio.get_running_loop()
        running, gate = loop.run_in_executor(self.threads, function, *arguments), loop.create_future()
        self.calls.append((running, gate))
        await gate
        return running.result()

    def run(self, episodes: list[Coroutine], watch: Callable[[int], None] | None = None) -> list:
        """Runs the episodes to their ends; their results, in order. `watch(done)` is called as they end."""
        return asyncio.run(self._run(episodes, watch))

    async def _run(self, episodes, watch):
        tasks = [asyncio.ensure_future(e) for e in episodes]
        try:
            while not all(task.done() for task in tasks):
                for _ in range(5):                          # up to every episode's next wait (future -> note -> gather -> …)
                    await asyncio.sleep(0)
                await self._step()
                if watch:
                    watch(sum(task.done() for task in tasks))
                for task in tasks:
                    if task.done():
                        task.result()                       # an error in one episode ends the run
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.requests.clear()
            self.calls.clear()

    async def _step(self):
        """One sampler step, or, when nothing decodes, a wait for the tools."""
        busy = [sampler for sampler in self.samplers if sampler.busy]
        for sampler in busy:
            for request in sampler.step():
                future = self.requests.pop(id(request))
                if future.cancelled():
                    continue
                if request.error:
                    future.set_exception(FloatingPointError(request.error))
                else:
                    future.set_result(request.completion)
        if self.calls and not busy:
            await asyncio.wait([running for running, _ in self.calls],
                               return_when=asyncio.ALL_COMPLETED if self.lockstep else asyncio.FIRST_COMPLETED)
        if not (self.lockstep and busy):
            for running, gate in self.calls:
                if running.done() and not gate.done():
                    gate.set_result(None)
            self.calls = [(running, gate) for running, gate in self.calls if not gate.done()]


def record(trajectory: Trajectory, format, step: int, split: str) -> dict:
    """A trajectory as one JSON line of rollouts/step_N.jsonl: every message, call, document, note, reward and advantage."""
    sample = trajectory.sample
    segments, start = [], 0
    for end in range(1, len(sample.tokens) + 1):
        if end == len(sample.tokens) or sample.mask[end] != sample.mask[start]:
            segments.append({"text": format.decode(sample.tokens[start:end]), "trained": sample.mask[start]})
            start = end

    def chunk_record(chunk: Chunk, turn: Turn) -> dict:
        prompt = chunk.sample.mask.index(True)
        return {"documents": chunk.documents, "tokens": chunk.tokens, "capacity": turn.capacity,
                "truncated": chunk.truncated, "prompt": format.decode(chunk.sample.tokens[:prompt]),
                "note": format.decode(chunk.sample.tokens[prompt:]), "note_tokens": len(chunk.sample.tokens) - prompt,
                "advantage": chunk.sample.advantage, "drawn": chunk.sample.drawn}

    turns = [{"text": format.decode(turn.sampled), "call": turn.step.call and vars(turn.step.call),
              "answer": turn.step.answer, "error": turn.problem, "seconds_tool": round(turn.seconds, 4),
              "documents": [{**vars(d), "tokens": n} for d, n in zip(turn.documents, turn.lengths)],
              "chunks": [chunk_record(chunk, turn) for chunk in turn.chunks]} for turn in trajectory.turns]
    return {"step": step, "split": split, "question_id": trajectory.question.id, "question": trajectory.question.text,
            "gold": list(trajectory.question.golden_answers), "trajectory": sample.trajectory, "answer": trajectory.answer,
            "ended": trajectory.ended, "reward": trajectory.reward, "advantage": sample.advantage,
            "trained": bool(sample.drawn), "segments": segments, "turns": turns}
