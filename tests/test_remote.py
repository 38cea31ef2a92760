"""Servers in the sampler's place: protocols, weights, faults, what is never trained on."""

import json
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.engine import Engine

import driver
from sampler import Sampler, remote

REPO = Path(__file__).parent.parent
STOPS = (3, 7, 11, 19, 23, 31)
OPTIONS = {"temperature": 1.0, "stop_ids": STOPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same model with other weights."""
    model = tiny.model("qwen3")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    path = tmp_path_factory.mktemp("other")
    model.save_pretrained(path)
    return path


@pytest.fixture
def engine(folder):
    made = Engine(folder)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "FIRST_REST", 0.02)


def connected(*engines, kind="vllm", seconds=10.0, folder=None, vocabulary=61, **options):
    """A Remote before these stand-ins, which have loaded `folder` if it is given."""
    servers = remote.connect([engine.url for engine in engines], kind, 5.0)
    made = remote.Remote(
        servers,
        vocabulary=vocabulary,
        seconds=seconds,
        parallel=64,
        write=lambda path: str(path),
        **options,
    )
    if folder:
        made.load_folder(str(folder))
    return made


def converse(sampler, count=12, turns=3, **options):
    """`count` conversations of several turns: what each completion was."""

    async def talk(k):
        conversation = sampler.open()
        got = []
        for turn in range(turns):
            given = [5 + (k + 3 * turn + i) % 50 for i in range(3 + k % 4)]
            completion = await runner.sample(
                sampler,
                conversation,
                given,
                max_new_tokens=4 + k % 5,
                seed=1000 * k + turn,
                **OPTIONS | options,
            )
            got.append(completion)
        sampler.close(conversation)
        return got

    runner = driver.Driver([sampler], deterministic=False)
    return runner.run([talk(k) for k in range(count)])


def tokens(talks):
    return [[completion.tokens for completion in talk] for talk in talks]


def one(sampler, **options):
    """One answer to one prompt."""
    ((completion,),) = converse(sampler, count=1, turns=1, **options)
    return completion


# ------------------------------------------------------------ the same answers as in the process


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_answers_are_those_of_a_sampler_in_the_process(engine, folder, kind, temperature):
    local = converse(Sampler(tiny.model("qwen3"), max_tokens=8192), temperature=temperature)
    far = converse(connected(engine, kind=kind, folder=folder), temperature=temperature)
    assert tokens(far) == tokens(local)
    for mine, theirs in zip(sum(far, []), sum(local, [])):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert mine.finish == theirs.finish
        assert mine.server == engine.url
    assert {c.finish for c in sum(local, [])} == {"stop", "length"}, "both ends occur"
    asked = [body for path, body in engine.seen if path in ("/v1/completions", "/generate")]
    assert len(asked) == 36 and "text" not in json.dumps(asked), "ids only, each asked for once"
