"""vLLM servers in the sampler's place: protocol, weights, faults, what is never trained on."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.engine import Engine
from helpers.launch import launch
from loopback import Loopback, drops, says
from test_mars import records_of
from transformers import AutoModelForCausalLM

import driver
import mars
import train
import trainer
from config import UserError
from plumbing import folders
from rollout import Context, Turn
from sampler import Lost, Sampler, vllm
from tasks.format import Action
from toy import base_model, language

REPO = Path(__file__).parent.parent
STOPS = (3, 7, 11, 19, 23, 31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same model with other weights."""
    path = tmp_path_factory.mktemp("other")
    AutoModelForCausalLM.from_config(tiny.model("qwen3").config).save_pretrained(path)
    return path


@pytest.fixture
def engine(folder):
    engine = Engine(folder)
    yield engine
    engine.stop()


second = engine  # the same fixture once more: another server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(vllm, "PAUSE", 0.02)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def connected(*engines, folder):
    """A Remote before these stand-ins, which have loaded `folder`.

    "New weights" are the path of a folder, and that folder's model scores the probe.
    """

    def score(tokens):
        return trainer.score(trainer.Policy(load(remote.folder), bf16=False), tokens)

    servers = vllm.connect([f"{engine.url}/v1" for engine in engines], 10.0)
    remote = vllm.Remote(servers, 61, 10.0, 64, write=str, score=score, tolerance=1e-3)
    remote.load_weights(folder)
    return remote


def converse(sampler, count=12, temperature=1.0):
    """`count` conversations of three turns: what each completion was."""

    async def talk(k):
        conversation = sampler.open()
        turns = []
        for turn in range(3):
            given = [5 + (k + 3 * turn + i) % 50 for i in range(3 + k % 4)]
            limits = {"max_new_tokens": 4 + k % 5, "stop_ids": STOPS, "temperature": temperature}
            seed = 1000 * k + turn
            turns.append(await runner.sample(sampler, conversation, given, seed=seed, **limits))
        sampler.close(conversation)
        return turns

    runner = driver.Driver([sampler], deterministic=False)
    return runner.run([talk(k) for k in range(count)])


def tokens(talks):
    return [[completion.tokens for completion in talk] for talk in talks]


def asked(engine):
    """The requests for samples, without those for the probe's log-probs."""
    paths = [body for path, body in engine.seen if path == "/v1/completions"]
    return [body for body in paths if "prompt_logprobs" not in body]


@pytest.mark.parametrize("variable", ["MARS_SERVER_KEY", "VLLM_API_KEY"])
def test_a_server_gets_its_key_and_no_error_shows_a_refused_key(monkeypatch, variable):
    def guarded(handler):
        given = handler.headers.get("Authorization")
        card = {"data": [{"id": "m", "max_model_len": 100}]}
        (says(card) if given == "Bearer secret" else says(f"bad {given}", 401))(handler)

    server = Loopback()
    server.replies = [guarded]
    monkeypatch.setenv(variable, "secret")
    assert vllm.connect([server.url], 5.0)[0].model == "m"
    for wrong, message in (("hunter2", "401.*MARS_SERVER_KEY"), ("hunter\n2", variable)):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(UserError, match=message) as error:
            vllm.connect([server.url], 5.0)
        assert "hunter" not in str(error.value)
    server.stop()


def test_answers_are_those_of_a_sampler_in_the_process(engine, folder):
    local = converse(Sampler(tiny.model("qwen3"), max_tokens=8192), temperature=0.7)
    far = converse(connected(engine, folder=folder), temperature=0.7)
    assert tokens(far) == tokens(local)
    for mine, theirs in zip(sum(far, []), sum(local, [])):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert mine.finish == theirs.finish and mine.server == engine.url
    assert {c.finish for c in sum(local, [])} == {"stop", "length"}, "both ends occur"
    assert len(asked(engine)) == 36, "each was asked for once"
    for body in asked(engine):  # nothing is left to a generation_config
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
        assert (body["temperature"], body["top_p"]) == (0.7, 1.0)
        assert body["stop_token_ids"] == sorted(STOPS) and body["ignore_eos"]
        assert all(type(token) is int for token in body["prompt"])


def test_new_weights_reach_every_server_that_is_not_lost(engine, second, folder, other):
    sampler = connected(engine, second, folder=folder)
    before = tokens(converse(sampler, temperature=0.0))
    sampler.load_weights(other)
    after = tokens(converse(sampler, temperature=0.0))
    local = Sampler(load(other), max_tokens=8192)
    assert after == tokens(converse(local, temperature=0.0)) != before
    for server in (engine, second):
        assert server.loaded == [str(folder), str(other)]
        assert len(asked(server)) > 20, "conversations are shared out"
        commands = [path for path, _ in server.seen]
        start = commands.index("/pause")
        order = "/pause /collective_rpc /reset_prefix_cache /resume /v1/completions"
        assert commands[start : start + 6] == [*order.split(), "/update_weight_version"]
    second.stop()
    sampler.load_weights(folder)
    talks = converse(sampler, temperature=0.0)
    assert tokens(talks) == before
    assert {completion.server for completion in sum(talks, [])} == {engine.url}
    engine.load(str(other))  # as if it was started anew with its first weights
    engine.version = "default"
    assert tokens(converse(sampler, temperature=0.0)) == before
    assert engine.loaded[3:] == [str(other), str(folder)]
    engine.load = lambda path: None  # vLLM silently keeps its weights if others have another shape
    with pytest.raises(UserError, match=f"{engine.url}.* another model than the run"):
        sampler.load_weights(other)


def test_a_load_whose_check_got_no_answer_is_checked_later(engine, second, folder, other):
    """The second server keeps its former weights, and first its score gets lost."""
    sampler = connected(engine, second, folder=folder)
    second.load = lambda path: None
    score, second.score = second.score, lambda ids: 1 / 0
    sampler.load_weights(other)
    second.score = score
    with pytest.raises(UserError, match=f"{second.url}.* still its former weights"):
        converse(sampler)


def test_a_model_folder_is_written_whole_and_the_newest_two_stay(tmp_path):
    model = tiny.model("qwen3")
    written = [trainer.write_model(tmp_path, model, torch.bfloat16) for _ in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000004"]
    loaded = load(written[-1]).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded[name].float(), weight.bfloat16().float()), name


def instead(reply):
    return lambda handler, answer: reply(handler)


REFUSED = instead(says("planted", 400))


def changed(change):
    """A fault that spoils an answer: change(tokens, log-probs, choice)."""

    def fault(handler, answer):
        choice = answer["choices"][0]
        change(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice)
        says(answer)(handler)

    return fault


FAULTS = {
    "429": instead(says("planted", 429)),
    "dropped": instead(drops),
    "fewer log-probs": changed(lambda ids, logprobs, _: logprobs.pop()),
    "log-prob NaN": changed(lambda ids, logprobs, _: logprobs.__setitem__(-1, math.nan)),
    "id above the vocabulary": changed(lambda ids, logprobs, _: ids.__setitem__(-1, 61)),
    "cut": changed(lambda ids, logprobs, _: (ids.pop(), logprobs.pop())),
    "goes on after a stop token": changed(
        lambda ids, logprobs, _: (ids.insert(0, STOPS[0]), logprobs.insert(0, -1.0))
    ),
    "to another prompt": changed(lambda ids, _, choice: choice["prompt_token_ids"].append(5)),
}


def test_a_fault_is_asked_again_and_leaves_no_trace(engine, folder):
    sampler = connected(engine, folder=folder)
    want = tokens(converse(sampler, count=3))
    for name, fault in FAULTS.items():
        before = len(asked(engine))
        engine.faults += [fault, fault]
        assert tokens(converse(sampler, count=3)) == want, name
        assert len(asked(engine)) == before + 9 + 2 and not engine.faults, name
        assert not sampler.busy, name
    sampler.seconds = 0.1
    engine.faults += [FAULTS["cut"]] * 1000
    with pytest.raises(Lost, match=r"no answer within 0.1 seconds \(.*http"):
        converse(sampler, count=1)


async def episode(env, trajectory):
    """Two turns with two readers each, none of which a random model can get wrong."""

    async def read(number):
        async with Context(env, trajectory, "sys1") as reader:
            await reader.write([7 + number, 12], 5, number)
            return reader.sample.tokens[-1]

    async with Context(env, trajectory, "sys2") as system2:
        given = env.chat.prompt("sys2", question=trajectory.question.text)
        for turn in range(2):
            step = await system2.write(given, 6, turn)
            system2.turns.append(Turn(step.tokens, Action(error="none")))
            given = [await read(number) for number in range(2)]
        trajectory.answer = env.chat.text(step.tokens)
        trajectory.ended = "answer"


METHOD = dataclasses.replace(mars.METHOD, episode=episode)
SMALL = "--questions 2 --inner_steps 1 --group 4 --eval_questions 2 --eval_every 9 --steps 2"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random model that speaks the toy's language."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("toy")
    tokenizer = language.make_tokenizer()
    base_model.new_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def play(toy, *options):
    """The exit code of a run in this process."""
    given = ["--model", str(toy), *SMALL.split(), *map(str, options)]
    return train.main(METHOD, given, "", grade=lambda question, answer: float(len(answer) % 2))


def lines_of(run):
    return folders.read_lines(Path(run) / "metrics.jsonl")


def segments_of(run):
    """What the first step of a run sampled."""
    return [record["segments"] for record in records_of(Path(run), 0)]


@pytest.fixture(scope="module")
def own(toy, tmp_path_factory):
    """A run whose sampler is in the process."""
    folder = tmp_path_factory.mktemp("own")
    assert play(toy, "--runs", folder, "--name", "own") == 0
    return folder / "own"


@pytest.fixture
def server(toy, tmp_path, monkeypatch):
    """A stand-in with the random model, before which the run's folder lies in tmp_path."""
    monkeypatch.chdir(tmp_path)
    engine = Engine(toy)
    yield engine
    engine.stop()


def test_a_run_on_a_server_ends_with_the_weights_of_a_run_in_the_process(toy, own, server):
    options = ["--name", "served", "--importance", "off", "--server"]
    assert play(toy, *options, server.url, "--steps", "1") == 0
    # The start's weights, and those after the step from the run's folder.
    assert [Path(path).name for path in server.loaded[1:]] == ["000001"]
    again = Engine(toy)  # a resumed run brings its state to another server
    assert play(toy, *options, again.url, "--resume") == 0
    assert [Path(path).parent.name for path in again.loaded] == ["step_000001", "weights"]
    again.stop()
    # The file of the other step holds an evaluation more.
    assert segments_of("runs/served") == segments_of(own), "the same draws"
    folders = toy, own / "checkpoint", "runs/served/checkpoint"
    start, end, served = (load(path).state_dict() for path in folders)
    for name in end:  # batches differ, and so may the last bits of a log-prob
        assert torch.allclose(served[name], end[name], atol=1e-4), name
    assert max(float((end[name] - start[name]).abs().max()) for name in start) > 5e-4
    for line in lines_of("runs/served"):
        assert line["mismatch_kl"] < 1e-10 and line["lost_share"] == line["pages_in_use"] == 0
        assert line["trained_tokens"] > 0 < line["seconds_sync"]


def test_a_server_gets_the_trained_model_with_its_adapters_merged_in(toy, server):
    """A frozen role stays with our own sampler."""
    options = ["--name", "served", "--lora_rank", "4", "--system1", "frozen", "--server"]
    assert play(toy, *options, server.url, "--steps", "1") == 0
    assert play(toy, *options, server.url, "--resume") == 0
    assert len(server.loaded) == 5, "the start and a step; the start, the state and a step"
    for line in lines_of("runs/served"):
        assert line["mismatch_kl"] < 1e-10 and line["lost_share"] == 0
    prompts = [body["prompt"] for body in asked(server)]
    readers = [prompt for prompt in prompts if prompt[1] == 12 and len(prompt) == 2]
    assert prompts and not readers


def test_eval_plays_on_a_server(own, server):
    for name, options in (("near", []), ("far", ["--server", server.url])):
        line = ["eval", str(own), "--runs", "runs", "--name", name, "--temperature", "0"]
        assert train.main(METHOD, [*line, *options], "", grade=lambda *_: 1.0) == 0
    assert segments_of("runs/near") == segments_of("runs/far")
    assert server.loaded == [str((own / "state/step_000002/model").resolve())]


def test_two_ranks_share_the_servers(toy, server, tmp_path):
    """Rank 0 brings the weights, and both sample with them.

    The random model earns nothing; with a KL term its samples are scored all the same.
    """
    line = ["--model", toy, *SMALL.split(), "--group", 2, "--kl_beta", "0.1"]
    line += ["--runs", tmp_path / "runs", "--name", "served", "--server", server.url, "--steps", 1]
    assert launch(REPO / "mars.py", *line, log=tmp_path / "log") == 0
    assert len(server.loaded) == 2, "the start and a step, once each"
    (line,) = lines_of("runs/served")
    assert 0 < line["mismatch_kl"] < 1e-10 and line["lost_share"] == 0


def test_a_lost_trajectory_is_counted_and_not_trained_on(toy, server, capsys):
    """Of the first step's eight attempts three are refused for good, after the evaluation."""
    server.faults += [None] * 24 + [REFUSED] * 3 + [None] * 45 + [REFUSED] * 10**5
    assert play(toy, "--name", "served", "--server", server.url) == 2
    first = lines_of("runs/served")[0]
    assert first["lost_share"] == 3 / 8 and first["judge_failures"] == 0, "nobody was asked"
    records = [line for line in records_of(Path("runs/served"), 0) if line["split"] == "train"]
    lost = [line for line in records if "HTTP 400" in line["ended"]]
    assert len(records) == 8 and len(lost) == 3
    assert all(line["reward"] is None and not line["trained"] for line in lost)
    assert "of the trajectories of step" in capsys.readouterr().err, "too many stop the run"


@pytest.mark.parametrize("factor, order", [(0.5, 1), (2, -1)])
def test_a_server_of_another_distribution_stops_the_run(toy, server, capsys, factor, order):
    """It is named, and no sound one beside it, which would hide it in the mean.

    At 2 importance weights leave out every sample.
    """
    bad = Engine(toy)
    plain = bad.sample

    def sample(ids, **options):
        completion = plain(ids, **options)
        completion.logprobs = [logprob * factor for logprob in completion.logprobs]
        return completion

    bad.sample = sample
    few = ["--questions", "1", "--eval_questions", "1"]
    urls = ",".join([server.url, bad.url][::order])
    assert play(toy, *few, "--name", "served", "--server", urls) == 2
    printed = capsys.readouterr().err
    assert f"{bad.url} does not sample what is trained" in printed and "--logprobs-mode" in printed
    assert f"{server.url} does" not in printed
    assert not Path("runs/served/state").exists(), "nothing was trained"
    bad.stop()
