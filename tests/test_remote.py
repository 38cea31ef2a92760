"""Servers in the sampler's place: protocols, weights, faults, what is never trained on."""

import json
import math
import socket
import time
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.engine import Engine

import driver
import trainer
from config import UserError
from sampler import Lost, Sampler, remote

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
    model = trainer.load_model(other, torch.device("cpu"), training=False)
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
        "/update_weight_version",
        "/resume",
        "/weight_info",
    ]


def test_a_model_folder_is_written_whole_and_the_newest_two_stay(tmp_path):
    model = tiny.model("qwen3")
    written = [trainer.write_model(tmp_path / "weights", model, torch.bfloat16) for _ in range(4)]
    assert [Path(path).name for path in written] == ["000001", "000002", "000003", "000004"]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["000003", "000004"]
    loaded = trainer.load_model(written[-1], torch.device("cpu"), training=False)
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
    sampler = connected(engine, folder=folder, seconds=1.0)
    engine.faults += [FAULTS[name]] * 1000
    start = time.perf_counter()
    with pytest.raises(Lost, match="no answer within 1 seconds; the last failure, http"):
        one(sampler)
    assert 0.5 < time.perf_counter() - start < 2
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
        engine.version = f"{sampler.version}.another"
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


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "ftp://x", "http://me@127.0.0.1:9", "127.0.0.1"]
)
def test_what_is_no_server_is_one_sentence(url):
    with pytest.raises(UserError, match="--server"):
        remote.connect([url], "vllm", 2.0)


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
