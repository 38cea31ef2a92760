"""Warm start: the gradient is that of cross-entropy, and only the assistant's words are learned."""

import base64
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers.chat import (
    CHATML_MARKS,
    LLAMA,
    LLAMA_MARKS,
    QWEN3,
    QWEN25,
    TAGS,
    random_model,
    tokenizer,
)
from helpers.tiny import CPU, make_samples, model
from transformers import AutoModelForCausalLM, AutoTokenizer

import mars
import trainer
import warm_start
from config import UserError
from tasks.chat import ChatFormat
from tasks.questions import Question
from tools import KNOWN, Document, Tool
from warm_start import WarmStart

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who joined acro corp?"},
    {"role": "assistant", "content": "a search"},
    {"role": "user", "content": "ada baker"},
    {"role": "assistant", "content": "ada"},
]
PIECE = base64.b64encode(zlib.compress(bytes(40))).decode()  # ten token ids


def batch_of(samples):
    return {role: [s for s in samples if s.role == role] for role in ("sys2", "sys1")}


def cross_entropy(stock, samples):
    """{role: the mean over its tokens}, by the stock model, one sample at a time."""
    losses = {}
    for role, members in batch_of(samples).items():
        total = 0
        for sample in members:
            tokens = torch.tensor(sample.tokens)
            trained = torch.tensor(sample.mask[1:])
            logits = stock(tokens[None]).logits[0, :-1][trained]
            total = total + F.cross_entropy(logits, tokens[1:][trained], reduction="sum")
        losses[role] = total / sum(sum(sample.mask) for sample in members)
    return losses


# An optimizer that leaves the gradient to be looked at.
NO_STEP = SimpleNamespace(zero_grad=lambda set_to_none: None, step=lambda: None)


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("capacity", [40, 10_000])
def test_loss_and_gradient_are_those_of_cross_entropy(capacity):
    policy = trainer.Policy(model("llama"), bf16=False)
    samples = make_samples()
    for sample in samples:  # demonstrations have no log-probs of a sampler
        sample.logprobs = [-50.0] * len(sample.tokens)
        sample.advantage = -3.0
    stock = model("llama")
    expected = cross_entropy(stock, samples)
    sum(expected.values()).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in stock.parameters()]))
    options = WarmStart(micro_tokens=capacity)
    losses = warm_start.learn(policy, NO_STEP, batch_of(samples), options, CPU)
    for role, loss in losses.items():
        assert loss == pytest.approx(expected[role].item(), abs=1e-5)
    scale = min(1.0, 1 / norm)  # the gradient's norm is held to 1
    here = dict(policy.model.named_parameters())
    for name, parameter in stock.named_parameters():
        assert torch.allclose(here[name].grad, parameter.grad * scale, atol=1e-5), name
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="lower --lr"):  # the gradient is no number
        warm_start.learn(policy, NO_STEP, batch_of(samples), options, CPU)


def learned(sample, tok):
    """What carries loss."""
    return tok.decode([token for token, own in zip(sample.tokens, sample.mask) if own])


@pytest.mark.parametrize("template", [QWEN25, LLAMA])
def test_the_assistant_is_learned_and_nobody_else(template):
    marks = LLAMA_MARKS if template == LLAMA else ("<|im_start|>", "<|im_end|>")
    end = marks[-1]
    tok = tokenizer(template, marks=marks, eos=end)
    for number, sample in zip((3, 5), warm_start.samples_of(TALK, tok), strict=True):
        assert learned(sample, tok) == TALK[number - 1]["content"] + end
        whole = tok.apply_chat_template(TALK[:number], tokenize=False)
        # The line break after the last mark is not learned.
        assert whole in (tok.decode(sample.tokens), tok.decode(sample.tokens) + "\n")
        assert len(sample.tokens) == len(sample.mask) == len(sample.logprobs)


def test_a_template_may_rewrite_what_came_before():
    """Qwen3's drops the thoughts of earlier messages; they are learned where they were the last."""
    talk = [dict(message) for message in TALK]
    talk[2]["content"] = "<think>\nwell\n</think>\n\na search"
    tok = tokenizer(QWEN3, eos="<|im_end|>")
    first, second = [tok.decode(sample.tokens) for sample in warm_start.samples_of(talk, tok)]
    assert "well" in first and "well" not in second and "a search" in second


def test_a_line_that_a_model_could_not_learn_as_it_is_is_named(tmp_path):
    """Without tools, calls and turns that a template might leave out, and the answer at its end."""
    asked, answered = TALK[1:3]
    path = tmp_path / "data.jsonl"
    for line in (
        {"messages": [asked, answered | {"tool_calls": []}]},
        {"messages": [asked, answered], "tools": []},
        {"messages": [asked, answered | {"role": "Assistant"}, answered]},
        {"messages": [asked, answered, asked]},
        [],
        "[" * 100_000,
        {"role": "sys2", "ids": [PIECE, PIECE[:-6]], "texts": ["a", "a"]},
        {"role": "sys2", "ids": [PIECE, "AAAA"], "texts": ["a", "a"]},
        {"role": "sys2", "ids": [PIECE], "texts": ["a"]},  # nothing was sampled
        {"role": ["sys2"], "ids": [PIECE, PIECE], "texts": ["a", "a"]},
    ):
        line = line if isinstance(line, str) else json.dumps(line)
        path.write_text(json.dumps({"messages": TALK}) + f"\n{line}\n")
        with pytest.raises(UserError, match="line 2: it is not"):
            warm_start.from_file(WarmStart(data=str(path)))


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_text_with_a_mark_of_the_models_own_is_refused(eos, special):
    """It could forge a turn, or teach to stop in the middle. Marks need no name, tags are none."""
    marks = CHATML_MARKS if special else ()
    tok = tokenizer(QWEN25, marks, [*TAGS, *CHATML_MARKS[len(marks) :]], eos)
    for mark in CHATML_MARKS:
        talk = [{"role": "user", "content": f"q{mark}"}, TALK[2]]
        with pytest.raises(UserError, match="mark of the model's own"):
            warm_start.samples_of(talk, tok)
    said = "<think>hm</think><tool_call>{}</tool_call>"
    (sample,) = warm_start.samples_of([TALK[1], {"role": "assistant", "content": said}], tok)
    assert learned(sample, tok) == said + "<|im_end|>"


@pytest.mark.parametrize("special", [True, False])
def test_a_played_demonstration_has_the_tokens_of_one_in_a_file(special):
    """Thoughts and calls are tokens; a mark that it quotes stays text; no note holds a thought."""
    marks, tags = (CHATML_MARKS + TAGS, ()) if special else (CHATML_MARKS, TAGS)
    tok = tokenizer(QWEN25, marks, tags, "<|im_end|>")
    call = {"name": "search", "arguments": {"query": "ada"}, "purpose": "year"}
    step = f"<think>\nhm\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    steps = iter([step, "<answer>1968</answer>"])
    quoted = "<think>hm</think>1968<|im_end|>"
    say = {"sys2": lambda read: next(steps), "sys1": lambda read: quoted}
    tools = [Tool("search", *KNOWN["search"], call=lambda query: [Document("1", "", "", "x")])]
    limits = {"sys2_context": 5000, "step_tokens": 500, "sys1_prompt": 3000, "sys1_response": 99}
    config = mars.MarsConfig(tools="search", **limits)
    chat = ChatFormat(tok, mars.words(config, tools), tools)
    question = Question("q", "Who?", ("1968",), "x")
    played = warm_start.play(mars.METHOD, config, chat, tools, lambda q, a: 1.0, question, say)
    sys2, sys1 = (
        [t for t, own in zip(context.sample.tokens, context.sample.mask) if own]
        for context in played.contexts
    )
    (filed,) = warm_start.samples_of([TALK[1], {"role": "assistant", "content": step}], tok)
    assert tok.decode(sys1) == quoted + "<|im_end|>"
    assert chat.text(chat.note(sys1)) == "1968<|im_end|>"
    assert played.turns[0].sampled == [t for t, own in zip(filed.tokens, filed.mask) if own]


def test_every_demonstration_comes_once_a_round(tmp_path):
    """U+2028 may stand within a text, and blank lines around."""
    path = tmp_path / "data.jsonl"
    texts = [f"answer\u2028{i}" for i in range(5)]
    talks = [[TALK[1], {"role": "assistant", "content": text}] for text in texts]
    lines = [json.dumps({"messages": talk}, ensure_ascii=False) for talk in talks]
    path.write_text("\n\n".join(lines), encoding="utf-8-sig")
    tok = tokenizer(QWEN25, eos="<|im_end|>")
    batches = warm_start.from_file(WarmStart(data=str(path), demonstrations=2))(tok)
    drawn = [sample for _ in range(5) for sample in next(batches)["assistant"]]
    said = [learned(sample, tok).removesuffix("<|im_end|>") for sample in drawn]
    assert sorted(said[:5]) == sorted(said[5:]) == texts
    assert said[:5] != said[5:]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    random_model(folder)
    return folder


@pytest.fixture
def command(start, tmp_path):
    """A function that runs the command with these options; it returns its exit code."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    here = {"data": tmp_path / "data.jsonl", "out": tmp_path / "warm"}

    def run(**given):
        options = {"model": start, **here, **given}
        return warm_start.main([f"--{name}={value}" for name, value in options.items()])

    return run


def test_the_command_writes_a_model_that_has_learned(command, tmp_path, capsys):
    options = {"steps": 60, "lr": 0.01, "demonstrations": 2}
    assert command(**options) == 0
    assert "nats a token: assistant" in capsys.readouterr().out
    tok = AutoTokenizer.from_pretrained(tmp_path / "warm")
    warm = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    asked = tok.apply_chat_template(TALK[:2], add_generation_prompt=True, return_tensors="pt")
    made = warm.generate(**asked, max_new_tokens=12, do_sample=False)
    assert "assistant\na search<|im_end|>" in tok.decode(made[0])
    assert command(**options) == 2 and "exists" in capsys.readouterr().err


def test_a_demonstration_longer_than_the_model_is_refused(command, tmp_path, capsys):
    talk = [{"role": "user", "content": "?" * 3000}, TALK[2]]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": talk}))
    assert command() == 2
    assert "2048 positions, fewer than one context of" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert warm_start.main([f"--from_run={tmp_path}/absent", f"--out={tmp_path}/demos"]) == 2
    assert "absent holds no right attempt" in capsys.readouterr().err


def test_a_line_that_does_not_suit_the_model_is_named(command, tmp_path, capsys):
    with open(tmp_path / "data.jsonl", "a") as file:
        file.write(json.dumps({"messages": [TALK[1] | {"content": "<|im_end|>"}, TALK[2]]}))
    assert command() == 2
    assert "data.jsonl, line 2: a text contains a mark" in capsys.readouterr().err


def test_a_folder_that_another_process_wrote_meanwhile_is_not_this_one_s(command, tmp_path, capsys):
    """Its options were others, and this process has trained nothing."""
    os.mkfifo(tmp_path / "late")
    with ThreadPoolExecutor() as pool:
        code = pool.submit(command, data=tmp_path / "late")
        with open(tmp_path / "late", "w") as file:  # opens when the command reads it
            (tmp_path / "warm").mkdir()
            file.write(json.dumps({"messages": TALK}))
    assert code.result() == 2 and "exists" in capsys.readouterr().err


def test_fp32_on_cuda_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="--bf16 off"):
        warm_start.train(WarmStart(model="nowhere", bf16="off"), None, tmp_path)


def test_an_output_that_nobody_takes_is_not_blamed_on_the_folder(
    command, tmp_path, capsys, monkeypatch
):
    lost = Mock(side_effect=BrokenPipeError(32, "Broken pipe"))
    monkeypatch.setattr(warm_start, "print", lost, raising=False)
    monkeypatch.setattr(warm_start, "discard_output", Mock())
    assert command() == 2
    assert "what is printed cannot be written (Broken pipe)" in capsys.readouterr().err
    assert not any(path.is_dir() for path in tmp_path.iterdir())


@pytest.mark.parametrize("given, code", [({"model": "nowhere"}, 2), ({}, 130)])
def test_what_ends_early_leaves_nothing(command, tmp_path, capsys, monkeypatch, given, code):
    monkeypatch.setattr(warm_start, "learn", Mock(side_effect=KeyboardInterrupt))
    assert command(**given) == code
    said = capsys.readouterr().err
    assert said.startswith("mars: ") and said.count("\n") == 1
    assert not any(path.is_dir() for path in tmp_path.iterdir()), "nor an unfinished one"
