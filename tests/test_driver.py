"""The driver, over the real sampler: what shares a batch, what waits for what, how it ends."""

import functools
import signal
import threading
import time

import pytest
import torch

from driver import Driver
from sampler import Sampler
from tools import ToolError
from toy import base_model, language


@pytest.fixture
def sampler():
    torch.manual_seed(0)
    return Sampler(base_model.new_model(len(language.make_tokenizer())), max_tokens=8192)


async def speak(driver, sampler, times=1):
    """An episode of some turns, or without an end."""
    conversation = sampler.open()
    try:
        while times:
            await driver.sample(sampler, conversation, [5], max_new_tokens=2)
            times -= 1
    finally:
        sampler.close(conversation)


def test_a_slow_tool_delays_no_other_episode(sampler):
    """Its call returns only when the other episode has come to its end."""
    driver = Driver([sampler], deterministic=False)
    ended = threading.Event()

    async def quick():
        await speak(driver, sampler, 3)
        await driver.call(lambda: None, 60)
        ended.set()

    assert driver.run([driver.call(lambda: ended.wait(60), 60), quick()])[0]


def test_deterministic_batches_do_not_depend_on_the_tools_speed(sampler):
    """The same requests with tools of other speeds: the same log-probs, bit for bit."""

    def play(speeds):
        driver = Driver([sampler], deterministic=True)

        async def chain(k):
            conversation = sampler.open()
            got = []
            for turn in range(3):
                options = {"max_new_tokens": 3 + k % 3, "seed": k}
                got.append(await driver.sample(sampler, conversation, [7 + k, 9], **options))
                wait = speeds[(k + turn) % len(speeds)]
                await driver.call(functools.partial(time.sleep, wait), 10)
            sampler.close(conversation)
            return [(completion.tokens, completion.logprobs) for completion in got]

        return driver.run([chain(k) for k in range(6)])

    assert play([0.0]) == play([0.03, 0.0, 0.01])


def test_more_calls_than_threads_are_handed_over_together(sampler):
    """Of 80 calls, at most 8 at once, none is lost; a deterministic driver waits for all."""
    driver = Driver([sampler], deterministic=True, max_calls=8)
    running = []
    most = []

    def tool():
        running.append(1)
        most.append(len(running))
        time.sleep(0.005)
        running.pop()
        return "done"

    assert driver.run([driver.call(tool, 10) for _ in range(80)]) == ["done"] * 80
    assert 1 < max(most) <= 8


def test_an_error_in_one_episode_ends_the_run_and_leaves_nothing_open(sampler):
    driver = Driver([sampler], deterministic=False)
    with pytest.raises(ZeroDivisionError):
        driver.run([speak(driver, sampler, -1), driver.call(lambda: 1 / 0, 10)])
    assert not sampler.busy and sampler.step() == [] and sampler.pages_in_use == 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_answer_that_is_late_or_never_comes_is_a_failure(sampler, deterministic):
    """A neighbour decodes all the while, so that nobody looks at the deadline in time."""
    driver = Driver([sampler], deterministic=deterministic)
    never = threading.Event()
    returned = threading.Event()

    def late():
        time.sleep(0.3)
        returned.set()

    async def failure(tool):
        with pytest.raises(ToolError, match="no answer within 0.1 seconds"):
            await driver.call(tool, 0.1)

    async def neighbour():
        while not returned.is_set():
            await speak(driver, sampler)
        await speak(driver, sampler, 3)

    episodes = [failure(late), neighbour(), driver.call(lambda: 5, 10)]
    assert driver.run(episodes) == [None, None, 5]
    # The second call waits for the first one's place, and the third for that of the second.
    driver.max_calls = 1
    watchdog = threading.Timer(20, never.set)
    watchdog.start()
    hung = [failure(never.wait), failure(never.wait)]
    assert driver.run([*hung, driver.call(lambda: 5, 10)]) == [None, None, 5]
    assert not never.is_set()
    watchdog.cancel()
    never.set()


def test_ctrl_c_ends_a_run_while_a_tool_hangs():
    """The tool's thread keeps no process alive."""
    driver = Driver([], deterministic=True)
    never = threading.Event()
    threads = []

    def hang():
        threads.append(threading.current_thread())
        never.wait(100)

    interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        driver.run([driver.call(hang, 1000)])
    assert threads[0].is_alive() and threads[0].daemon
    never.set()
