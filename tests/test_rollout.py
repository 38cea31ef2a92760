"""The episode with scripted roles: every way a trajectory can go, and what is written down where it arises."""
import time
from types import SimpleNamespace

import pytest
import torch

from toy import world as toy
from config import Config
from rollout import Driver, Sample, Setting, episode, record
from sampler import Completion, Sampler
from tasks.grading import exact_match
from tasks.questions import Question
from tools import Document, ToolError

FORMAT = toy.ToyFormat(toy.make_tokenizer())
QUESTION = Question("q1", "when was ada baker born ?", ("1968",), "toy")
PAGES = [Document("d1", "", "", "ada baker born 1968 . the weather was mild that week ."),
         Document("d2", "", "", "bob cohen wrote about ada baker ."), Document("d3", "", "", "see also the list of records .")]
CALL = "<call> search ada baker <purpose> birth of ada baker <eot>"


class Script:
    """Stands in for the sampler: answers requests of a role, in order, with the given texts; remembers what it was asked."""

    def __init__(self, system2: list[str] | str, system1: str = "ada baker born 1968 . <eot>"):
        self.always = system2 if isinstance(system2, str) else None         # one text: said at every step until an answer is demanded
        self.system2, self.system1, self.queue, self.asked, self.closed = list(system2), system1, [], [], 0

    busy = property(lambda self: bool(self.queue))

    def open(self):
        return SimpleNamespace(tokens=[])

    def close(self, conversation):
        self.closed += 1

    def submit(self, conversation, tokens, *, max_new_tokens, seed, **options):
        conversation.tokens += tokens
        is_sys1 = conversation.tokens[0] == FORMAT.control["<s1>"]
        text = self.system1 if is_sys1 else self.always or self.system2.pop(0)
        if self.always and conversation.tokens[-1] == FORMAT.control["<answer>"]:
            text = "1968 <eot>"
        new = FORMAT.tokenizer.encode(text, add_special_tokens=False)
        finish = "stop" if new[-1] == FORMAT.eot and len(new) <= max_new_tokens else "length"
        new = new[:max_new_tokens]
        self.asked.append(("sys1" if is_sys1 else "sys2", FORMAT.decode(tokens), max_new_tokens, seed))
        conversation.tokens += new
        self.queue.append(SimpleNamespace(error=None, completion=Completion(new, [-0.5] * len(new), finish)))
        return self.queue[-1]

    def step(self):
        done, self.queue = self.queue, []
        return done


def play(system2, *, search=lambda query: PAGES, grade=None, **options):
    """One scripted episode: (trajectory, what the sampler was asked)."""
    script = Script(system2)
    config = Config(**{"top_k": 3, **options})
    tools = {"search": search, "scholar": search, "python": lambda code: [Document("python", "", "", "12\n")]}
    driver = Driver([script], lockstep=True)
    grade = grade or (lambda question, answer: float(exact_match(answer, question.golden_answers)))
    setting = Setting(driver, script, script, FORMAT, tools, grade, config, step=0)
    (trajectory,) = driver.run([episode(setting, QUESTION, 0, 0)])
    assert script.closed == len([a for a in script.asked if a[0] == "sys1"]) + 1, "every conversation gives its pages back"
    return trajectory, script.asked


def text(sample: Sample, trained: bool) -> str:
    return FORMAT.decode([t for t, m in zip(sample.tokens, sample.mask) if m == trained])


def test_call_distil_answer():
    trajectory, asked = play([CALL, "<answer> 1968 <eot>"])
    assert (trajectory.answer, trajectory.ended, trajectory.reward) == ("1968", "answer", 1.0)
    assert text(trajectory.sample, True) == f"{CALL} <answer> 1968 <eot>"
    notes = " ".join(["ada baker born 1968 ."] * len(trajectory.turns[0].chunks))
    assert text(trajectory.sample, False) == f"<s2> when was ada baker born ? <eot> <resp> {notes} <eot>"
    for sample in (trajectory.sample, *trajectory.sys1_samples()):
        assert len(sample.tokens) == len(sample.mask) == len(sample.logprobs) and sample.reward == 1.0
        assert all((logprob != 0) == trained for logprob, trained in zip(sample.logprobs, sample.mask))


def test_system1_sees_packed_documents_and_the_purpose_and_is_trained_on_its_note_only():
    trajectory, asked = play([CALL, "<answer> 1968 <eot>"], sys1_prompt=30)
    turn = trajectory.turns[0]
    assert sorted(i for chunk in turn.chunks for i in chunk.documents) == [0, 1, 2] and 1 < len(turn.chunks) <= 3
    for chunk in turn.chunks:
        assert chunk.tokens <= turn.capacity == 30 - len(FORMAT.system1_prompt([], "birth of ada baker"))
        documents = " ".join(f"<doc> {PAGES[i].text}" for i in chunk.documents)
        assert text(chunk.sample, False) == f"<s1> {documents} <purpose> birth of ada baker <eot>"
        assert text(chunk.sample, True) == "ada baker born 1968 . <eot>"


def test_a_long_document_is_cut_into_a_chunk_of_its_own():
    long = [Document("long", "", "", "ada " * 200), PAGES[2]]
    trajectory, _ = play([CALL, "<answer> 1968 <eot>"], search=lambda query: long, sys1_prompt=30)
    cut = next(chunk for chunk in trajectory.turns[0].chunks if chunk.documents == [0])
    assert cut.truncated and cut.tokens == trajectory.turns[0].capacity


def test_answer_on_the_first_turn():
    trajectory, _ = play(["<answer> 1970 <eot>"])
    assert (trajectory.ended, trajectory.reward, len(trajectory.turns), trajectory.sys1_samples()) == ("answer", 0.0, 1, [])


@pytest.mark.parametrize("step, why", [("when was <eot>", "starts with"), ("<call> fax ada <purpose> birth <eot>", "unknown tool"),
                                       ("<call> search ada baker <eot>", "purpose"), (CALL.replace("<eot>", "of ada") * 3, "cut")])
def test_a_malformed_step_is_corrected_and_counted(step, why):
    trajectory, asked = play([step, "<answer> 1968 <eot>"])
    assert trajectory.turns[0].problem.startswith("malformed") and why in trajectory.turns[0].problem
    assert "error" in asked[1][1] and trajectory.reward == 1.0
    assert trajectory.turns[0].step.call is None


def test_a_step_that_was_cut_is_closed_by_us_not_by_the_model():
    trajectory, asked = play([CALL.replace(" <eot>", " ada" * 40), "<answer> 1968 <eot>"], step_tokens=14)
    assert asked[1][1].startswith("<eot>"), "the missing end of the step is given, so it carries no loss"
    assert text(trajectory.sample, True).count("<eot>") == 1


def test_a_tool_that_fails_is_told_and_never_looks_like_an_empty_result():
    def broken(query):
        raise ToolError("the service is down")
    failed, asked = play([CALL, "<answer> 1968 <eot>"], search=broken)
    empty, asked_empty = play([CALL, "<answer> 1968 <eot>"], search=lambda query: [])
    assert failed.turns[0].problem == "tool failed: the service is down" and empty.turns[0].problem == "no results"
    assert asked[1][1] == "<resp> error <eot>" and asked_empty[1][1] == "<resp> none . <eot>"
    assert failed.sys1_samples() == empty.sys1_samples() == []


def test_the_last_turn_must_answer():
    trajectory, asked = play([CALL, CALL, "1968 <eot>"], max_turns=3)
    assert asked[-1][1].endswith("<eot> <answer>") and (trajectory.ended, trajectory.reward) == ("answer on demand", 1.0)
    silent, _ = play([CALL, CALL, CALL], max_turns=3)
    assert (silent.ended, silent.answer, silent.reward) == ("no answer", None, 0.0)


@pytest.mark.parametrize("context", [36, 37, 38, 40, 43, 47, 52, 58, 65, 73, 82, 99])
@pytest.mark.parametrize("step", [CALL, "when was <eot>", CALL.replace("<eot>", "ada") * 3])
def test_a_full_context_ends_in_a_demand_that_always_fits(context, step):
    """Calls, malformed steps and cut steps without end, at every size of the context: an answer is always reached."""
    trajectory, asked = play(step, sys2_context=context, max_turns=50)
    assert len(trajectory.sample.tokens) <= context
    assert (trajectory.ended, trajectory.reward) == ("answer on demand", 1.0)


def test_arms():
    unpacked, _ = play([CALL, "<answer> 1968 <eot>"], packing="off")
    assert [chunk.documents for chunk in unpacked.turns[0].chunks] == [[0], [1], [2]]
    _, asked = play([CALL, "<answer> 1968 <eot>"], purpose="off")
    assert all("birth" not in said for role, said, *_ in asked if role == "sys1")


def test_without_system1_raw_text_goes_to_system2_within_its_budget():
    trajectory, asked = play([CALL, "<answer> 1968 <eot>"], system1="none")
    assert trajectory.sys1_samples() == [] and all(role == "sys2" for role, *_ in asked)
    seen = asked[1][1]
    assert "<doc> ada baker born" in seen and len(seen.split()) <= 160 // 5 + 2


def test_python_output_reaches_system2_as_it_is_unless_it_is_distilled():
    call = "<call> python 1980 - 1968 <eot>"
    direct, asked = play([call, "<answer> 12 <eot>"])
    assert asked[1][1] == "<resp> 12 <eot>" and direct.sys1_samples() == []
    distilled, asked = play([call, "<answer> 12 <eot>"], distill="search,scholar,python")
    assert len(distilled.sys1_samples()) == 1


def test_a_judge_out_of_reach_is_no_reward_rather_than_zero():
    def down(question, answer):
        raise ToolError("judge is down")
    trajectory, _ = play([CALL, "<answer> 1968 <eot>"], grade=down)
    assert trajectory.reward is None and all(s.reward is None for s in trajectory.sys1_samples())
    assert trajectory.turns[-1].problem == "judge failed: judge is down"


def test_draws_are_named_and_all_different():
    _, asked = play([CALL, CALL, "<answer> 1968 <eot>"])
    seeds = [seed for *_, seed in asked]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [seed for *_, seed in play([CALL, CALL, "<answer> 1968 <eot>"])[1]]
    assert set(seeds).isdisjoint(seed for *_, seed in play([CALL, CALL, "<answer> 1968 <eot>"], seed=1)[1])


def test_record_holds_the_whole_trajectory():
    trajectory, _ = play([CALL, "<answer> 1968 <eot>"])
    line = record(trajectory, FORMAT, 3, "train")
    assert "".join(f" {s['text']}" for s in line["segments"]).strip() == FORMAT.decode(trajectory.sample.tokens)
    assert line["turns"][0]["call"] == {"tool": "search", "argument": "ada baker", "purpose": "birth of ada baker"}
    assert [d["id"] for d in line["turns"][0]["documents"]] == ["d1", "d2", "d3"]
    assert line["turns"][0]["chunks"][0]["note"] == "ada baker born 1968 . <eot>"


# ------------------------------------------------------------------------------------------------ the driver, over the real sampler

@pytest.fixture(scope="module")
def sampler():
    from toy import base_model as toy_base
    torch.manual_seed(0)
    return Sampler(toy_base.new_model(len(FORMAT.tokenizer)), max_tokens=8192)


def slow_chain(driver, sampler, seconds, order):
    async def chain():
        conversation = sampler.open()
        for i, wait in enumerate(seconds):
            await driver.sample(sampler, conversation, [5, 6], max_new_tokens=4, seed=i)
            await driver.outside(time.sleep, wait)
        sampler.close(conversation)
        order.append(sum(seconds))
    return chain()


def test_tool_waits_cost_nothing(sampler):
    """12 chains of tool waits run beside each other: wall time is that of the slowest chain, not of the sum."""
    waits = [[0.05] * 3] * 11 + [[0.25] * 3]
    driver, order = Driver([sampler], lockstep=False), []
    start = time.perf_counter()
    driver.run([slow_chain(driver, sampler, w, order) for w in waits])
    wall, slowest, total = time.perf_counter() - start, 0.75, sum(map(sum, waits))
    assert slowest < wall < slowest + 0.6 < total, f"{wall:.2f} s"
    assert order[-1] == pytest.approx(0.75), "the others did not wait for the slowest"


def test_lockstep_batches_do_not_depend_on_the_tools_speed(sampler):
    """The same requests with tools of other speeds: the same log-probs, bit for bit."""
    def play(speeds):
        driver = Driver([sampler], lockstep=True)

        async def chain(k):
            conversation, got = sampler.open(), []
            for turn in range(3):
                got.append(await driver.sample(sampler, conversation, [7 + k, 9], max_new_tokens=3 + k % 3, seed=k))
                await driver.outside(time.sleep, speeds[(k + turn) % len(speeds)])
            sampler.close(conversation)
            return [(c.tokens, c.logprobs) for c in got]
        return driver.run([chain(k) for k in range(6)])
    assert play([0.0]) == play([0.03, 0.0, 0.01])


def test_an_error_in_one_episode_ends_the_run_and_leaves_no_task(sampler):
    driver = Driver([sampler], lockstep=False)

    async def bad():
        await driver.outside(lambda: 1 / 0)

    async def good():
        conversation = sampler.open()
        try:
            while True:
                await driver.sample(sampler, conversation, [5], max_new_tokens=2, seed=0)
        finally:
            sampler.close(conversation)
    with pytest.raises(ZeroDivisionError):
        driver.run([good(), bad()])
    assert not sampler.busy and sampler.step() == []


# ------------------------------------------------------------------------------------------------ forking: the README's examples

def test_a_protocol_of_ones_own_is_an_async_function(sampler):
    """Draft, then critique, then answer: another multi-agent method over the same driver and records."""
    driver = Driver([sampler], lockstep=True)

    async def critic(question_ids: list[int]) -> list[Sample]:
        samples = []
        for role in ("draft", "critique", "answer"):
            sample = Sample(role, group=0, trajectory=0)
            sample.give(question_ids + [t for s in samples for t in s.tokens[len(question_ids):]])
            conversation = sampler.open()
            sample.take(await driver.sample(sampler, conversation, sample.tokens, max_new_tokens=5, seed=len(samples)))
            sampler.close(conversation)
            samples.append(sample)
        return samples
    for samples in driver.run([critic([10, 11]), critic([12])]):
        assert [s.role for s in samples] == ["draft", "critique", "answer"] and all(any(s.mask) for s in samples)
