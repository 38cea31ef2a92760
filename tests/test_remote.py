"""Servers in the sampler's place: protocols, weights, faults, what is never trained on."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny
from helpers.engine import Engine

import driver
import mars
import train
import trainer
from config import UserError
from plumbing import build
from rollout import Context, Turn
from sampler import Lost, Sampler, nccl, remote, servers
from siblings import marsrl, matpo
from siblings import marsrl_toy as verification
from siblings import matpo_toy as delegation
from tasks.format import Action
from toy import base_model, language
from trainer import lora

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
    made = remote.Remote(
        servers.connect([engine.url for engine in engines], build.ENGINES[kind], 5.0),
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
        try:
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
        finally:
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


# ---------------------------------------------------------------- answers as in the process


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


def test_a_request_tells_all_that_a_server_would_fill_in_by_itself(engine, folder):
    """Nothing is left to a generation_config: top-k and penalties are off in every request."""
    for kind in ("vllm", "sglang"):
        one(connected(engine, kind=kind, folder=folder), temperature=0.7)
    vllm = next(body for path, body in engine.seen if path == "/v1/completions")
    sglang = next(body for path, body in engine.seen if path == "/generate")["sampling_params"]
    for body in (vllm, sglang):
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
        assert (body["temperature"], body["top_p"]) == (0.7, 1.0)
        assert body["stop_token_ids"] == sorted(STOPS)
    assert vllm["ignore_eos"], "only our stop tokens stop"
    assert "ignore_eos" not in sglang, "there it would switch off our stop tokens too"


def test_it_refuses_what_a_sampler_refuses(engine, folder):
    sampler = connected(engine, folder=folder)
    talk = sampler.open()
    for ids, options, said in (
        ([61], {}, "outside the model's vocabulary"),
        ([], {}, "at least one token"),
        ([5] * 500, {"max_new_tokens": 20}, "can never fit"),
        ([5], {"top_p": 0.0}, "top_p"),
    ):
        with pytest.raises(ValueError, match=said):
            sampler.submit(talk, ids, **{"max_new_tokens": 4} | options)
    assert not sampler.busy and not talk.tokens


# ---------------------------------------------------------------- new weights


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_new_weights_reach_every_server_and_their_answers(engine, folder, other, kind):
    second = Engine(folder)
    sampler = connected(engine, second, kind=kind, folder=folder)
    before = tokens(converse(sampler, temperature=0.0))
    sampler.load_weights(other)
    after = tokens(converse(sampler, temperature=0.0))
    model = trainer.load_model(other, torch.device("cpu"))
    assert after == tokens(converse(Sampler(model, max_tokens=8192), temperature=0.0)) != before
    versions = [server.version for server in sampler.servers]
    assert versions == [engine.version, second.version]
    assert len(set(versions)) == 2, "every load has a version of its own"
    assert [made.loaded for made in (engine, second)] == [[str(folder), str(other)]] * 2
    asked = [
        sum("o" in path and "prompt" in body or "input_ids" in body for path, body in e.seen)
        for e in (engine, second)
    ]
    assert min(asked) > 20, "conversations are shared out"
    second.stop()


def test_vllm_pauses_before_it_reloads_and_forgets_its_prefixes_before_it_resumes(engine, folder):
    connected(engine, folder=folder)
    commands = [path for path, _ in engine.seen]
    start = commands.index("/pause")
    assert commands[start:] == [
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/resume",
        "/update_weight_version",
        "/weight_info",
    ]


def test_a_load_that_did_not_resume_is_not_taken_for_whole(engine, folder, other, monkeypatch):
    """Else the server would stay paused: its version says that there is nothing to load."""
    sampler = connected(engine, folder=folder)
    send = servers.VLLM.send
    failing = iter([True])

    def first_resume_fails(self, path, *rest):
        if path == "/resume" and next(failing, False):
            raise OSError("closed")
        return send(self, path, *rest)

    monkeypatch.setattr(servers.VLLM, "send", first_resume_fails)
    sampler.load_weights(other)
    assert engine.resumed.is_set() and one(sampler).tokens
    assert engine.loaded == [str(folder), str(other), str(other)]


def test_what_a_run_that_was_killed_in_a_sync_leaves_behind(engine, folder, other, monkeypatch):
    """A paused server with half of a sync done. The next run's first load makes it whole."""
    killed = connected(engine, folder=folder)

    def ends_there(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(servers.VLLM, "change_weights", ends_there)
        with pytest.raises(KeyboardInterrupt):
            killed.load_weights(other)
    assert not engine.resumed.is_set()
    version = engine.version
    again = connected(engine, folder=other)
    assert one(again).tokens and engine.resumed.is_set()
    assert engine.version != version and engine.loaded == [str(folder), str(other)]


def test_a_model_folder_is_written_whole_and_the_newest_two_stay(tmp_path):
    model = tiny.model("qwen3")
    written = [trainer.write_model(tmp_path / "weights", model, torch.bfloat16) for _ in range(4)]
    assert [Path(path).name for path in written] == ["000001", "000002", "000003", "000004"]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["000003", "000004"]
    loaded = trainer.load_model(written[-1], torch.device("cpu"))
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), weight.bfloat16().float()), name


def test_weights_that_the_disk_does_not_take_are_one_sentence(tmp_path):
    (tmp_path / "weights").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write the weights .*--resume"):
        trainer.write_model(tmp_path / "weights", tiny.model("qwen3"), torch.float32)


def test_a_router_is_asked_for_its_servers(engine, folder):
    """New weights must reach each of them, so they are spoken to directly."""
    router = Engine(folder)
    router.workers = [engine.url]
    sampler = connected(router, folder=folder)
    assert [server.url for server in sampler.servers] == [engine.url]
    assert one(sampler).server == engine.url
    router.stop()


# ---------------------------------------------------------------- faults


def status(code, **headers):
    return lambda handler, answer: handler.says({"error": "planted"}, code, **headers)


def drop(handler, answer):
    handler.connection.shutdown(socket.SHUT_RDWR)


def close_in_the_middle(handler, answer):
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(json.dumps(answer).encode()[:40])


def hang(handler, answer):
    time.sleep(3)


def drip(handler, answer):
    """A byte at a time, each long before a socket's own time-out."""
    handler.send_response(200)
    handler.end_headers()
    for byte in json.dumps(answer).encode():
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.1)


def twice(handler, answer):
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(json.dumps(answer).encode() * 2)


def changed(change):
    """A fault that spoils a vLLM answer."""

    def fault(handler, answer):
        change(answer["choices"][0])
        handler.says(answer)

    return fault


def put(name, value):
    def change(choice):
        choice["logprobs"]["token_logprobs"][-1:] = [value] if name == "logprob" else []
        if name == "token":
            choice["logprobs"]["token_logprobs"].append(-1.0)
            choice["token_ids"][-1] = value

    return changed(change)


def cut(choice):
    choice["token_ids"].pop()
    choice["logprobs"]["token_logprobs"].pop()


def goes_on(choice):
    choice["token_ids"].insert(0, STOPS[0])
    choice["logprobs"]["token_logprobs"].insert(0, -1.0)


FAULTS = {
    "429": status(429, Retry_After="0"),
    "500": status(500),
    "503": status(503),
    "dropped": drop,
    "closed in the middle": close_in_the_middle,
    "slow": hang,
    "no JSON": lambda handler, answer: handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n<html>"),
    "another shape": lambda handler, answer: handler.says({"choices": []}),
    "fewer log-probs": put("fewer", None),
    "log-prob null": put("logprob", None),
    "log-prob NaN": put("logprob", math.nan),
    "log-prob above 0": put("logprob", 0.5),
    "id above the vocabulary": put("token", 61),
    "id below 0": put("token", -1),
    "id that is no integer": put("token", 5.0),
    "cut": changed(cut),
    "empty": changed(
        lambda choice: (choice["token_ids"].clear(), choice["logprobs"]["token_logprobs"].clear())
    ),
    "goes on after a stop token": changed(goes_on),
    "log-prob without end": put("logprob", -(10**400)),
    "drips": drip,
    "huge": lambda handler, answer: handler.says(answer | {"padding": "x" * (9 << 20)}),
    "twice": twice,
    "to another prompt": changed(lambda choice: choice["prompt_token_ids"].append(5)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_tried_again_and_leaves_no_trace(engine, folder, name):
    sampler = connected(engine, folder=folder, seconds=4.0)
    want = converse(sampler, count=3)
    engine.faults += [FAULTS[name], FAULTS[name]]
    got = converse(sampler, count=3)
    assert tokens(got) == tokens(want)
    assert sampler.stats["failures"] == 2 and not engine.faults
    assert not sampler.busy and sampler.pages_in_use == 0


@pytest.mark.parametrize("name", ["500", "cut", "fewer log-probs", "slow"])
def test_a_fault_that_lasts_is_one_sentence_at_the_deadline(engine, folder, name):
    sampler = connected(engine, folder=folder)
    sampler.seconds = 1.0  # a busy machine may take longer to load
    engine.faults += [FAULTS[name]] * 1000
    start = time.perf_counter()
    with pytest.raises(Lost, match=r"no answer within 1 seconds \(.*http"):
        one(sampler)
    assert 0.5 < time.perf_counter() - start < 3
    assert not sampler.busy and sampler.pages_in_use == 0


def test_a_request_that_is_refused_is_not_repeated(engine, folder):
    sampler = connected(engine, folder=folder)
    engine.faults += [status(400)]
    with pytest.raises(Lost, match="HTTP 400"):
        one(sampler)
    assert sum(path == "/v1/completions" for path, _ in engine.seen) == 1


def test_a_lost_server_leaves_its_conversations_to_the_others(engine, folder):
    second = Engine(folder)
    sampler = connected(engine, second, folder=folder)
    want = tokens(converse(sampler))
    second.stop()
    got = converse(sampler)
    assert tokens(got) == want
    assert {completion.server for completion in sum(got, [])} == {engine.url}


def test_a_server_that_was_started_anew_loads_the_weights_before_it_counts(engine, folder, other):
    """It comes back with the weights of its start; no sample of theirs is handed out."""
    sampler = connected(engine, folder=folder)
    sampler.load_weights(other)
    want = tokens(converse(sampler, temperature=0.0))
    port = engine.server_port
    engine.stop()
    again = Engine(folder, port)
    assert tokens(converse(sampler, temperature=0.0)) == want
    assert again.loaded == [str(other)]
    again.stop()


def test_an_answer_from_before_a_reload_does_not_count(engine, folder, other):
    """Both loads are of the same weights, but what was drawn in between may not be."""
    sampler = connected(engine, folder=other)

    def reloaded_meanwhile(handler, answer):
        engine.version += "again"
        handler.says(answer)

    engine.faults.append(reloaded_meanwhile)
    one(sampler)
    assert sampler.stats["failures"] == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_dies_during_the_reload_loads_again(engine, folder, other, kind, monkeypatch):
    sampler = connected(engine, kind=kind, folder=folder)
    load = engine.load
    deaths = [1, 1]

    def dies(path):
        if deaths:
            deaths.pop()
            raise OSError("planted")  # the handler ends without an answer
        load(path)

    monkeypatch.setattr(engine, "load", dies)
    sampler.load_weights(other)
    assert engine.loaded[-1] == str(other) and not deaths


def test_a_reload_that_changes_nothing_is_noticed(engine, folder, other, monkeypatch):
    sampler = connected(engine, folder=folder, seconds=2.0)
    monkeypatch.setattr(Engine, "version", "default", raising=False)
    monkeypatch.setattr(type(sampler.servers[0]), "held", lambda *_: "default")
    with pytest.raises(UserError, match="were not loaded .* holds 'default' after loading"):
        sampler.load_weights(other)


def test_servers_that_are_away_are_one_sentence(engine, folder, other):
    sampler = connected(engine, folder=folder, seconds=1.5)
    engine.stop()
    with pytest.raises(UserError, match=f"{engine.url}: Connection refused.*--resume"):
        sampler.load_weights(other)


def test_one_server_that_is_away_does_not_hold_the_others_up(engine, folder, other):
    second = Engine(folder)
    sampler = connected(engine, second, folder=folder)
    second.stop()
    sampler.load_weights(other)
    assert engine.loaded[-1] == str(other)
    assert one(sampler).server == engine.url


def test_a_server_that_another_run_takes_over_stops_the_run(engine, folder, other):
    """Two runs would undo each other's loads for as long as their deadlines last."""
    mine = connected(engine, folder=folder)
    one(mine)
    theirs = connected(engine, folder=other)  # at its start it may find the weights of any run
    with pytest.raises(UserError, match=f"another run loads its weights into {engine.url}"):
        one(mine)
    with pytest.raises(UserError, match="another run"):
        mine.load_weights(folder)
    assert one(theirs).tokens


def test_a_server_that_was_away_during_a_sync_is_still_ours(engine, folder, other, monkeypatch):
    second = Engine(folder)
    sampler = connected(engine, second, folder=folder, seconds=4.0)
    load = second.load
    monkeypatch.setattr(second, "load", lambda path: time.sleep(3))
    sampler.load_weights(other)
    monkeypatch.setattr(second, "load", load)
    converse(sampler)
    assert second.loaded == [str(folder), str(other)]
    second.stop()


def test_a_server_is_named_in_several_ways(engine, folder):
    """Each server counts once, and the /v1 that clients of OpenAI's protocol write may stand."""
    urls = [engine.url, f"{engine.url}/", f" {engine.url}/v1"]
    (found,) = servers.connect(urls, servers.VLLM, 5.0)
    assert (found.url, found.model, found.positions) == (engine.url, "toy", 512)


def test_a_server_may_have_an_address_of_the_sixth_version(folder, monkeypatch):
    monkeypatch.setattr(Engine, "address_family", socket.AF_INET6)
    monkeypatch.setattr(Engine, "host", "::1")
    made = Engine(folder)
    url = f"http://[::1]:{made.server_port}"
    (found,) = servers.connect([url], servers.VLLM, 5.0)
    assert found.model == "toy" and found.url == url
    made.stop()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "ftp://x", "http://me@127.0.0.1:9", "127.0.0.1"]
)
def test_what_is_no_server_is_one_sentence(url):
    with pytest.raises(UserError, match="--server"):
        servers.connect([url], servers.VLLM, 2.0)


def test_closing_a_conversation_ends_its_request(engine, folder):
    sampler = connected(engine, folder=folder)
    engine.faults.append(hang)
    talk = sampler.open()
    request = sampler.submit(talk, [5, 6], max_new_tokens=4)
    sampler.close(talk)
    sampler.close(talk)
    assert request.done and not sampler.busy and sampler.pages_in_use == 0
    assert sampler.step() == []
    assert one(sampler).tokens


# ---------------------------------------------------------------- whole runs


async def episode(env, trajectory):
    """Two turns and a reader, none of which a random model can get wrong."""

    async def read(number):
        async with Context(env, trajectory, "sys1") as reader:
            await reader.write([7 + number, 12], 5, number)
            return reader.sample.tokens[-1]

    async with Context(env, trajectory, "sys2") as system2:
        given = env.chat.prompt("sys2", question=trajectory.question.text)
        for turn in range(2):
            step = await system2.write(given, 6, turn)
            system2.turns.append(Turn(step.tokens, Action(error="none")))
            given = list(await asyncio.gather(*(read(number) for number in range(2))))
        trajectory.answer = env.chat.text(step.tokens)
        trajectory.ended = "answer"


METHOD = dataclasses.replace(mars.METHOD, episode=episode)
SMALL = "--questions 2 --group 4 --eval_questions 2 --eval_every 9 --steps 3 --tool_seconds 60"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random model that speaks the toy's language."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("toy")
    tokenizer = language.make_tokenizer()
    base_model.new_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def play(toy, *options, grade=lambda question, answer: float(len(answer) % 2)):
    """The exit code of a run in this process."""
    given = ["--model", str(toy), *SMALL.split(), *map(str, options)]
    return train.main(METHOD, given, "", grade=grade)


def lines_of(run):
    return [json.loads(line) for line in open(Path(run) / "metrics.jsonl")]


def weights_in(folder):
    return trainer.load_model(folder, torch.device("cpu")).state_dict()


@pytest.fixture(scope="module")
def own(toy, tmp_path_factory):
    """A run in the process."""
    folder = tmp_path_factory.mktemp("own")
    assert play(toy, "--runs", folder, "--name", "own") == 0
    return folder / "own"


@pytest.fixture
def server(toy, tmp_path, monkeypatch):
    """A stand-in with the random model, before which the run's folder lies in tmp_path."""
    monkeypatch.chdir(tmp_path)
    made = Engine(toy)
    yield made
    made.stop()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_on_a_server_ends_with_the_weights_of_a_run_in_the_process(toy, own, server, kind):
    options = ["--name", "served", "--server", server.url, "--engine", kind, "--is", "off"]
    assert play(toy, *options) == 0
    served = Path("runs/served")
    for step in range(3):
        texts = [segments_of(run, step) for run in (own, served)]
        assert texts[0] == texts[1], "the same draws"
    moved = 0.0
    for name, start in weights_in(toy).items():
        end = weights_in(own / "checkpoint")[name]
        # Batches differ, and so may the last bits of a log-prob.
        assert torch.allclose(weights_in(served / "checkpoint")[name], end, atol=1e-4), name
        moved = max(moved, float((end - start).abs().max()))
    assert moved > 1e-3, "three steps of up to 5e-4 each"
    for line in lines_of(served):
        assert line["mismatch_kl"] < 1e-10 and line["lost_share"] == line["pages_in_use"] == 0
        assert line["trained_tokens"] > 0 < line["seconds_sync"]
    # The start's weights, and those after each step from the run's folder.
    assert [Path(path).name for path in server.loaded[1:]] == ["000001", "000002", "000003"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_with_lora_a_server_gets_adapters_beside_the_model_of_its_start(
    toy, server, kind, tmp_path
):
    """Greedy answers of the end are those of the checkpoint, where they are merged in."""
    options = ["--engine", kind, "--is", "off", "--lora_rank", "4", "--lr", "0.005"]
    assert play(toy, "--name", "served", "--server", server.url, *options) == 0
    assert play(toy, "--name", "own", *options[2:]) == 0
    served, own = Path("runs/served"), Path("runs/own")
    for step in range(3):
        assert segments_of(served, step) == segments_of(own, step), "the same draws"
    assert [line["mismatch_kl"] < 1e-10 for line in lines_of(served)] == [True] * 3
    assert len(server.loaded) == 4 and len(server.adapters) == 1, "former ones are dropped"
    for folder in sorted((served / "weights").iterdir()):
        files = sorted(path.name for path in folder.iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
    asked = [body for path, body in server.seen if path in ("/v1/completions", "/generate")]
    names = {body.get("lora_path") or body["model"] for body in asked}
    assert len(names) == 4 and all(name.startswith("mars-") for name in names)
    # It goes on with the adapters of the state, on a server that knows nothing of them.
    again = Engine(toy)
    options += ["--resume", "--steps", "4"]
    assert play(toy, "--name", "served", "--server", again.url, *options) == 0
    assert lines_of(served)[3]["mismatch_kl"] < 1e-10 and len(again.loaded) == 2
    again.stop()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_lost_its_adapters_loads_them_again(engine, tmp_path, kind):
    model = tiny.model("qwen3")
    trainer.add_adapters(model, 4, seed=0)
    with torch.no_grad():
        for layer in lora.adapted(model).values():
            layer.lora_B.normal_(std=0.1)
    sampler = connected(engine, kind=kind)
    for one_server in sampler.servers:
        one_server.adapters = True
    sampler.write = lambda model: trainer.write_model(tmp_path / "weights", model, torch.float32)
    sampler.load_weights(model)
    local = Sampler(tiny.model("qwen3"), max_tokens=8192)
    local.load_weights(model)
    want = tokens(converse(local, temperature=0.0))
    assert tokens(converse(sampler, temperature=0.0)) == want
    plain = Sampler(tiny.model("qwen3"), max_tokens=8192)
    assert tokens(converse(plain, temperature=0.0)) != want, "they make a difference"
    port = engine.server_port
    engine.stop()
    again = Engine(engine.folder, port)
    assert tokens(converse(sampler, temperature=0.0)) == want
    assert len(again.loaded) == 1
    again.stop()


def test_eval_and_ask_play_on_a_server(toy, own, server, capsys):
    for name, options in (("near", []), ("far", ["--server", server.url])):
        line = ["eval", str(own), "--runs", "runs", "--name", name, "--temperature", "0"]
        assert train.main(METHOD, [*line, *options], "", grade=lambda *_: 1.0) == 0
    near, far = (Path(f"runs/{name}/predictions.json").read_text() for name in ("near", "far"))
    assert near == far
    assert server.loaded == [str((own / "state/step_000003/model").resolve())]
    answers = []
    for options in ([], ["--server", server.url]):
        assert train.main(METHOD, ["ask", str(own), "who ?", *options], "") == 0
        answers.append([x for x in capsys.readouterr().out.split("\n") if "answer |" in x])
    assert answers[0] == answers[1] != []


def test_two_ranks_share_the_servers(toy, server, tmp_path):
    """Rank 0 brings the weights, and both sample with them.

    The random model earns nothing; with a KL term its samples are scored all the same.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", "mars.py"]
    command += ["--model", toy, *SMALL.split(), "--kl_beta", "0.1", "--threads", "1"]
    command += ["--runs", tmp_path / "runs", "--name", "served", "--server", server.url]
    done = subprocess.run(
        [str(word) for word in command], cwd=REPO, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert len(server.loaded) == 4, "the start and three steps, once each"
    for line in lines_of("runs/served"):
        assert 0 < line["mismatch_kl"] < 1e-10 and line["lost_share"] == 0


@pytest.mark.parametrize("recipe, base", [(matpo, delegation), (marsrl, verification)])
def test_a_recipe_plays_on_a_server(recipe, base, tmp_path, monkeypatch):
    """The same two steps as in the process."""
    monkeypatch.chdir(tmp_path)
    model = base.build(tmp_path / "base", threads=1, steps=(8, 8))
    engine = Engine(model)
    line = ["--model", str(model), *SMALL.split(), "--steps", "2", "--is", "off"]
    assert recipe.main([*line, "--name", "own"]) == 0
    assert recipe.main([*line, "--name", "served", "--server", engine.url]) == 0
    for step in range(2):
        texts = [segments_of(Path("runs") / name, step) for name in ("own", "served")]
        assert texts[0] == texts[1] != []
    assert len(engine.loaded) == 3
    assert all(line["mismatch_kl"] < 1e-10 for line in lines_of("runs/served"))
    engine.stop()


@pytest.fixture
def vllm(monkeypatch):
    """The parts of vLLM that the NCCL transfer calls, as they are documented; NCCL is left out."""
    sent = []

    class Sender:
        def __init__(self, place, client, source):
            self.parts = place, client, source

        def send_weights(self):
            place, client, source = self.parts
            pairs = list(source)
            told = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
            assert told == [(name, w.dtype, tuple(w.shape)) for name, w in pairs]
            sent.append((place, client.url, dict(pairs)))

        def shutdown(self):
            sent.append("left")

    class Client:
        def __init__(self, url, timeout):
            self.url = url
            assert 0 < timeout <= 10

        def shutdown_weight_transfer_engine(self):
            sent.append("server left")

    transfer = SimpleNamespace(
        HTTPVLLMWeightSyncClient=Client,
        ParamMeta=lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape),
        WeightTransferTrainerFactory=SimpleNamespace(
            trainer_init=lambda place, *, client, source: Sender(place, client, source)
        ),
    )
    engine = SimpleNamespace(NCCLTrainerInitInfo=lambda **place: place)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", transfer)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", engine)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return sent


def test_nccl_brings_what_the_trainer_holds_and_brings_it_again(engine, folder, vllm):
    """Whole, once each, in bf16; a server that was started anew gets them too."""
    sampler = connected(engine, kind="vllm_nccl", folder=folder)
    model = tiny.model("qwen3")
    sampler.write = lambda model: nccl.keep(sampler.servers, model, torch.bfloat16, tiny.CPU)
    sampler.load_weights(model)
    assert engine.loaded == [str(folder)], "the start came by disk"
    engine.version = "default"  # as after a new start
    sampler.servers[0].version = ""
    one(sampler)
    first, second = vllm[:3], vllm[3:]
    assert [x[1:] for x in (first, second)] == [["server left", "left"]] * 2
    for (place, url, weights), *_ in (first, second):
        assert url == engine.url and place["world_size"] == 3 and place["rank"] == 0
        assert place["master_address"] == "127.0.0.1" and place["master_port"] > 0
        saved = tiny.model("qwen3").state_dict()
        tied = set(saved) - set(weights)
        assert tied <= {"lm_head.weight"}
        for name, weight in weights.items():
            assert torch.equal(weight, saved[name].bfloat16()), name


def test_nccl_needs_a_gpu_and_vllm(toy, server, capsys):
    assert play(toy, "--name", "x", "--server", server.url, "--engine", "vllm_nccl") == 2
    assert "--engine vllm_nccl needs a GPU and the package vllm" in capsys.readouterr().err


def segments_of(run, step):
    lines = (run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line)["segments"] for line in lines]


def test_killed_in_the_middle_and_brought_back_the_run_goes_on(toy, own, tmp_path, monkeypatch):
    """A server process dies in the second step's rollouts; it comes back with its start's weights.

    The run ends with the weights of one that nothing happened to.
    """
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [serve(toy, port)]
    asked = []
    ask = servers.VLLM.ask

    def kill_once(server, *arguments):
        asked.append(server)
        if len(asked) == 24 + 48 + 20:  # the evaluation, a step, a part of the next one
            processes[0].kill()
            processes[0].wait()
            processes.append(serve(toy, port))
        return ask(server, *arguments)

    monkeypatch.setattr(servers.VLLM, "ask", kill_once)
    try:
        options = ["--name", "served", "--server", f"http://127.0.0.1:{port}", "--is", "off"]
        options += ["--tool_seconds", "250"]
        assert play(toy, *options) == 0
    finally:
        for process in processes:
            process.kill()
    assert len(processes) == 2
    for name, end in weights_in(own / "checkpoint").items():
        assert torch.allclose(weights_in("runs/served/checkpoint")[name], end, atol=1e-4), name
    assert all(line["lost_share"] == 0 for line in lines_of("runs/served"))


def serve(folder, port):
    """A stand-in as a process of its own, once it answers."""
    command = [sys.executable, str(REPO / "tests/helpers/engine.py"), str(folder), str(port)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_resumed_run_brings_its_state_to_another_server(toy, own, server):
    options = ["--name", "served", "--is", "off", "--server"]
    assert play(toy, *options, server.url, "--steps", "2") == 0
    other = Engine(toy)
    assert play(toy, *options, other.url, "--resume") == 0
    assert [Path(path).parent.name for path in other.loaded] == ["step_000002", "weights"]
    for name, end in weights_in(own / "checkpoint").items():
        assert torch.allclose(weights_in("runs/served/checkpoint")[name], end, atol=1e-4), name
    other.stop()


def test_a_frozen_role_stays_with_our_own_sampler(toy, server):
    """The servers hold the trained weights alone."""
    options = ["--name", "served", "--server", server.url, "--system1", "frozen", "--steps", "2"]
    assert play(toy, *options) == 0
    for line in lines_of("runs/served"):
        assert line["mismatch_kl"] < 1e-10 and line["lost_share"] == 0
    prompts = [body["prompt"] for path, body in server.seen if path == "/v1/completions"]
    readers = [prompt for prompt in prompts if prompt[1] == 12 and len(prompt) == 2]
    assert prompts and not readers


def test_a_lost_trajectory_is_counted_and_not_trained_on(toy, server):
    """Of the first step's eight attempts three are refused for good, after the evaluation."""
    server.faults += [None] * 24 + [status(400)] * 3
    assert play(toy, "--name", "served", "--server", server.url) == 0
    first, *later = lines_of("runs/served")
    assert first["lost_share"] == 3 / 8 and all(line["lost_share"] == 0 for line in later)
    assert first["judge_failures"] == first["judge_failure_share"] == 0, "nobody was asked"
    lines = open("runs/served/rollouts/step_0.jsonl")
    records = [line for line in map(json.loads, lines) if line["split"] == "train"]
    lost = [line for line in records if "HTTP 400" in line["ended"]]
    assert len(records) == 8 and len(lost) == 3
    assert all(line["reward"] is None and not line["trained"] for line in lost)


def test_too_many_lost_trajectories_stop_the_run(toy, server, capsys):
    server.faults += [status(400)] * 10**6
    options = ["--name", "served", "--server", server.url]
    assert play(toy, *options) == 2
    assert "100% of the trajectories of step 0 failed" in capsys.readouterr().err
    (record, *_) = map(json.loads, open("runs/served/rollouts/step_0.jsonl"))
    assert "HTTP 400" in record["ended"] and record["reward"] is None


# ---------------------------------------------------------------- never trust a sync


def raw_logprobs(engine, temperature):
    """Log-probs that leave the temperature out, as vLLM's are by default."""
    plain = engine.sample

    def sample(ids, **options):
        made = plain(ids, **options)
        model = engine.model
        with torch.no_grad():
            logits = model(torch.tensor([ids + made.tokens])).logits[0].log_softmax(-1)
        places = range(len(ids) - 1, len(ids) + len(made.tokens) - 1)
        made.logprobs = [float(logits[i, t]) for i, t in zip(places, made.tokens)]
        return made

    return sample


def cut_distribution(engine):
    """A generation_config's nucleus, with the log-probs of the nucleus."""
    plain = engine.sample

    def sample(ids, **options):
        made = plain(ids, **options | {"top_p": 0.8})
        made.logprobs = [logprob - math.log(0.8) * 0.9 for logprob in made.logprobs]
        made.logprobs = [min(0.0, logprob) for logprob in made.logprobs]
        return made

    return sample


def test_log_probs_without_the_temperature_stop_the_run(toy, server, capsys):
    server.sample = raw_logprobs(server, 0.5)
    options = ["--name", "served", "--server", server.url, "--temperature", "0.5"]
    assert play(toy, *options) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"mars: {server.url} does not sample what is")
    assert "--logprobs-mode processed_logprobs" in said
    assert not Path("runs/served/state").exists(), "nothing was trained"


def test_a_cut_distribution_stops_the_run(toy, server, capsys):
    server.sample = cut_distribution(server)
    assert play(toy, "--name", "served", "--server", server.url) == 2
    assert "--generation-config vllm" in capsys.readouterr().err


def test_weights_that_a_reload_did_not_change_stop_the_run_at_the_next_step(toy, server, capsys):
    """The server says that it has loaded, and still samples with the start's weights."""
    load = server.load
    server.load = lambda folder: load(toy)
    assert play(toy, "--name", "served", "--server", server.url) == 2
    assert f"{server.url} does not sample what is trained" in capsys.readouterr().err
    assert len(lines_of("runs/served")) == 1, "the first step was sound"


def test_the_server_at_fault_is_named_among_sound_ones(toy, server, capsys):
    """Seven sound servers would hide one that is stale in the mean."""
    stale = Engine(toy)
    load = stale.load
    stale.load = lambda folder: load(toy)
    options = ["--name", "served", "--server", f"{server.url},{stale.url}"]
    assert play(toy, *options) == 2
    said = capsys.readouterr().err
    assert f"{stale.url} does not sample" in said and f"{server.url} does" not in said
    stale.stop()


def test_the_threshold_is_an_option(toy, server):
    server.sample = cut_distribution(server)
    options = ["--name", "served", "--server", server.url, "--max_mismatch_kl", "10"]
    assert play(toy, *options) == 0
    assert all(line["mismatch_kl"] > 1e-3 for line in lines_of("runs/served"))


# ---------------------------------------------------------------- importance weights


@pytest.mark.parametrize("kind", ["token", "sequence", "off"])
def test_what_is_trained_is_weighed_by_the_gap_to_the_sampler(kind):
    """`prepare`, beside each sample scored by itself with the stock model."""
    model = tiny.model("qwen3")
    samples = tiny.make_samples()
    config = mars.MarsConfig(importance=kind, importance_cap=1.5, micro_tokens=60)
    run = SimpleNamespace(
        config=config,
        policy=trainer.Policy(tiny.model("qwen3"), bf16=False),
        reference=None,
        ranks=1,
        device=tiny.CPU,
    )
    gaps = []
    for sample in samples:
        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0].log_softmax(-1)
        sampled = [i for i, own in enumerate(sample.mask) if own]
        scored = torch.tensor([float(logits[i - 1, sample.tokens[i]]) for i in sampled])
        drawn = scored - 0.3 * torch.randn(len(sampled))  # what a sampler that is off would say
        for i, logprob in zip(sampled, drawn.tolist()):
            sample.logprobs[i] = logprob
        gaps.append(scored - drawn)
    terms = {role: [s for s in samples if s.role == role] for role in ("sys2", "sys1")}
    kept, batches, _ = train.prepare(run, terms)
    plain = {role: 1 / len(members) for role, members in terms.items()}
    masked = 0
    for batch in batches:
        for owner in set(batch.owner.tolist()):
            mine = batch.owner == owner
            sample = kept[owner]
            gap = gaps[samples.index(sample)]
            ratio = float(gap.sum().exp())
            factor = {
                "token": gap.exp().clamp(max=1.5),
                "sequence": torch.full_like(gap, ratio if ratio <= 1.5 else 0.0),
                "off": torch.ones_like(gap),
            }[kind]
            masked += float(factor.sum()) == 0
            want = factor * plain[sample.role] / len(gap)
            assert torch.allclose(batch.weight[mine], want, rtol=1e-4)
            old = batch.behaviour_logprob[mine]
            if kind != "off":
                old = old + gap
            assert torch.allclose(batch.old_logprob[mine], old, atol=1e-5)
    assert masked == 0 or kind == "sequence"
    assert masked or kind != "sequence", "some sample leaves the bound"


# ---------------------------------------------------------------- options


BAD = {
    "--server ,": "--server names no URL",
    "--server ftp://x": "--server is 'ftp://x': give http",
    "--server http://127.0.0.1:9": "--server http://127.0.0.1:9 is no VLLM server: Connection ref",
    "--server URL --deterministic": "--deterministic cannot be had with --server",
    "--server URL --sys2_context 600": "a server takes contexts of 512 tokens",
    "--is token --importance_cap 0": "--importance_cap 0 leaves nothing to train on",
    "--server URL --importance_cap 0": "--importance_cap 0 leaves nothing to train on",
    "--server URL --is off --importance_cap 2": "--importance_cap is read with --is",
    "--engine sglang": "--engine belongs to --server",
    "--max_mismatch_kl 0.1": "--max_mismatch_kl belongs to --server",
    "--importance_cap 2": "--importance_cap is read with --is token or --is sequence",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_options_are_one_sentence_and_nothing_is_written(toy, server, capsys, given):
    given_now = given.replace("URL", server.url).split()
    assert play(toy, "--name", "bad", *given_now) == 2
    said = capsys.readouterr().err
    assert BAD[given] in said and said.count("\n") == 1
    assert not Path("runs/bad").exists()
