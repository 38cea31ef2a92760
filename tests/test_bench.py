"""The long benches without long runs.

Tables of invented runs, resumption, the cost's arithmetic, the soak's eye, stand-ins for the
sampler's rivals. Run: pytest tests/test_bench.py
"""

import argparse
import ctypes
import dataclasses
import fcntl
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import mars
import sampler
from bench import ablations, arms, common, cost, credit, engines, matpo, soak
from bench import sampler as sampler_bench
from binpack import pack_documents
from config import UserError, resolve
from plumbing import surroundings
from tools import search
from toy import base_model, language, world
from trainer import memory_plan

# ------------------------------------------------------------------------- ablations


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    runs = tmp_path / "runs"
    runs.mkdir()
    return argparse.Namespace(
        runs=runs,
        cache=tmp_path / "cache",
        steps=4,
        quick=False,
        jobs=2,
        seeds=[0, 1],
        arms=["full", "balance_off"],
        table=True,
        out="ablations",
    )


def metrics(values: list[float]) -> list[dict]:
    """The lines of a run that was evaluated before each of its steps and after the last."""
    always = {
        "sys1_tokens": 100,
        "sys2_tokens": 200,
        "trained_tokens": 50,
        "seconds_rollout": 1.0,
        "seconds_train": 0.5,
        "pages_in_use": 0,
        "zero_variance_share": 0.5,
        "calls_per_question": 1.5,
    }
    lines = []
    for step, value in enumerate(values[:-1]):
        scores = {"eval_accuracy": value, "eval_greedy": value + 0.1, "eval_step": step}
        lines.append({"step": step, "reward": value, "sys1_samples": 10 * step} | always | scores)
    last = lines[-1]
    for key in ("eval_accuracy", "eval_greedy", "eval_step"):
        last[key + "_before"] = last[key]
    last["eval_accuracy"] = values[-1]
    last["eval_greedy"] = values[-1] + 0.1
    last["eval_step"] = len(values) - 1
    return lines


def as_jsonl(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def settings(arm: str, seed: int, options) -> dict:
    return dataclasses.asdict(ablations.settings(ablations.arguments(arm, seed, options)))


def invent(options, arm: str, seed: int, values: list[float], **other) -> Path:
    """A run's folder as mars.py would leave it, with these accuracies."""
    folder = options.runs / f"{arm}-{seed}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings(arm, seed, options) | other))
    (folder / "metrics.jsonl").write_text(as_jsonl(metrics(values)))
    return folder


def test_every_arm_is_accepted_changes_something_and_stands_in_a_panel(options):
    base = settings("full", 0, options)
    for arm in ablations.ARMS:
        changed = settings(arm, 0, options)
        changes = {key for key in base if changed[key] != base[key]} - {"name"}
        assert len(changes) == (arm != "full"), (arm, changes)
        panels = [arms for arms in ablations.PANELS.values() if arm in arms]
        assert panels and all("full" in arms for arms in panels), arm


def test_evaluations_are_read_with_those_before_the_last_step():
    found = ablations.accuracies(metrics([0.1, 0.2, 0.3]))
    assert found == {0: (0.1, 0.2), 1: (0.2, pytest.approx(0.3)), 2: (0.3, 0.4)}


def test_tables_tell_mean_spread_and_differences_seed_by_seed(options, capsys):
    invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    invent(options, "full", 1, [0.1, 0.4, 0.5, 0.6, 0.7])
    invent(options, "balance_off", 0, [0.2, 0.4, 0.5, 0.6, 0.6])
    invent(options, "balance_off", 1, [0.1, 0.3, 0.4, 0.5, 0.6])
    assert ablations.tabulate(options) == 0
    saved = json.loads((common.RESULTS / "ablations.json").read_text())
    full, off = saved["rows"]
    assert off["accuracy"]["4"] == {"mean": pytest.approx(0.6), "min": 0.6, "max": 0.6}
    assert full["accuracy"]["0"] == {"mean": pytest.approx(0.15), "min": 0.1, "max": 0.2}
    assert full["greedy"]["4"]["max"] == pytest.approx(0.9)
    expected = {"mean": -0.15, "min": -0.2, "max": -0.1}
    assert off["difference end"] == pytest.approx(expected)
    assert off["difference average"]["mean"] == pytest.approx(mean([-0.125, -0.1]))
    assert full["difference end"] is None
    assert full["sys1_samples"] == mean([0, 10, 20, 30]) and full["seconds"] == 1.5
    assert {"date", "cpu", "commit", "versions"} <= saved.keys() and len(saved["runs"]) == 4
    out = capsys.readouterr().out
    assert "60.0 (60.0 … 60.0)" in out and "-15.0 (-20.0 … -10.0)" in out
    assert "NOT THERE" not in out
    assert (common.RESULTS / "ablations.png").stat().st_size > 10_000


def test_what_failed_or_is_missing_is_listed_and_kept_out_of_the_means(options, capsys):
    invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    invent(options, "full", 1, [0.1, 0.2])  # half of it
    how = {"exit": 2, "why": "exit 2: no space", "cpu_seconds": 1.0}
    (options.runs / "balance_off-0.run.json").write_text(json.dumps(how))
    invent(options, "balance_off", 1, [0.1, 0.3, 0.4, 0.5, 0.6], lr=0.5)
    assert ablations.tabulate(options) == 1
    out = capsys.readouterr().out
    for expected in (
        "full, seed 1: part",
        "balance_off, seed 0: exit 2: no space",
        "balance_off, seed 1: made with other settings (lr 0.5)",
    ):
        assert f"NOT THERE: {expected}" in out
    full, off = json.loads((common.RESULTS / "ablations.json").read_text())["rows"]
    assert full["seeds"] == [0] and full["accuracy"]["4"]["mean"] == 0.8
    assert off["seeds"] == []


def test_a_longer_run_serves_a_shorter_table(options):
    folder = invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"steps": 6}))
    run = ablations.look("full", 0, options)
    assert run.state == "complete" and len(run.lines) == 4
    assert sorted(run.accuracies) == [0, 1, 2, 3, 4]
    assert run.accuracies[4] == (0.8, pytest.approx(0.9))


def test_no_run_at_all_is_one_sentence(options):
    with pytest.raises(UserError, match="no complete run"):
        ablations.tabulate(options)
    assert not common.RESULTS.exists()


FAKE = """
import json, sys
from pathlib import Path
arguments, lines, config = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
print("ran", *arguments)
if arguments[0] == "mars.py":
    runs = Path(arguments[arguments.index("--runs") + 1])
    folder = runs / arguments[arguments.index("--name") + 1]
    if "balance_off-1" in folder.name:
        sys.exit("mars: the disk is full")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "metrics.jsonl").write_text(lines)
"""


@pytest.fixture
def started(monkeypatch, options):
    """Instead of mars.py a small program that leaves the same files; the list of command lines."""
    commands = []
    lines = as_jsonl(metrics([0.1, 0.2, 0.3, 0.4, 0.5]))

    def start(command, log):
        commands.append(command)
        config = {}
        if command[0] == "mars.py":
            given = [word for word in command[1:] if word != "--resume"]
            config = dataclasses.asdict(ablations.settings(given))
        fake = [sys.executable, "-c", FAKE, json.dumps(command), lines, json.dumps(config)]
        with open(log, "a") as file:
            return subprocess.Popen(fake, stdout=file, stderr=subprocess.STDOUT)

    monkeypatch.setattr(ablations, "start", start)
    return commands


def test_complete_runs_are_skipped_half_ones_resumed_failed_ones_tried_again(
    options, started, capsys
):
    invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    invent(options, "full", 1, [0.1, 0.2])
    ablations.train(options)
    resumed = {}
    for command in started:
        if command[0] == "mars.py":
            resumed[command[command.index("--name") + 1]] = "--resume" in command
    assert resumed == {"full-1": True, "balance_off-0": False, "balance_off-1": False}
    for seed, command in enumerate(started[:2]):
        build = f"base_model.build({str(options.cache)!r}, {seed}, threads=1)"
        assert command[1] == f"from toy import base_model; {build}"
    assert "balance_off-1: failed, exit 1" in capsys.readouterr().out
    failed = ablations.look("balance_off", 1, options)
    assert failed.why == "exit 1: mars: the disk is full"
    done = ablations.look("balance_off", 0, options)
    assert done.state == "complete" and done.cpu_seconds > 0
    assert ablations.look("full", 1, options).state == "complete"
    started.clear()
    ablations.train(options)
    runs = [command for command in started if command[0] == "mars.py"]
    assert [command[command.index("--name") + 1] for command in runs] == ["balance_off-1"]


def test_the_command_that_makes_a_base_model_is_python(options, monkeypatch):
    """The fake above never runs it, so here it is compiled and its names are looked up."""
    commands = []
    monkeypatch.setattr(ablations, "pool", lambda found, *_: commands.extend(found))
    made = []
    monkeypatch.setattr(base_model, "build", lambda *given, **more: made.append((given, more)))
    ablations.make_base_models(options)
    for _, (_, program) in commands:
        exec(program, {})
    cache = str(options.cache)
    assert made == [((cache, 0), {"threads": 1}), ((cache, 1), {"threads": 1})]


def test_two_at_once_in_one_folder_are_refused(options, started):
    with open(options.runs / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another bench is"):
            ablations.train(options)
    assert started == []


def test_pool_keeps_to_its_number_and_leaves_no_process_when_interrupted(tmp_path, monkeypatch):
    processes, alive = [], []

    def start(command, log):
        processes.append(subprocess.Popen([sys.executable, "-c", command[0]]))
        alive.append(sum(process.returncode is None for process in processes))
        return processes[-1]

    monkeypatch.setattr(ablations, "start", start)
    ended = []
    naps = [(str(i), ["import time; time.sleep(0.05)"]) for i in range(5)]
    ablations.pool(naps, tmp_path, 2, lambda found: ended.append(found.name))
    assert sorted(ended) == list("01234") and max(alive) == 2
    processes.clear()

    def interrupt(_):
        raise KeyboardInterrupt

    two = [("quick", ["pass"]), ("slow", ["import time; time.sleep(60)"])]
    with pytest.raises(KeyboardInterrupt):
        ablations.pool(two, tmp_path, 2, interrupt)
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)


def test_taking_a_tool_away_takes_no_question_away(monkeypatch):
    config = mars.MarsConfig(eval_questions=40)

    def load(*names):
        stream, held_out = surroundings.training_and_held_out(config, list(names), True)
        return [stream(i) for i in range(40)], held_out

    monkeypatch.setattr(surroundings.python, "available", lambda: None)
    assert load("search", "scholar", "python") == load("search")
    kinds = {"toy-one", "toy-two", "toy-age", "toy-scholar"}
    assert {question.source for question in load("search")[1]} == kinds
    monkeypatch.setattr(surroundings.python, "available", lambda: "no jail here")
    for names in (["search", "scholar"], ["search"]):
        assert {question.source for question in load(*names)[1]} == kinds - {"toy-age"}


# ------------------------------------------------------------------------------ cost


def qwen3(shape: cost.Shape, **more) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        head_dim=shape.head_size,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        **more,
    )


def name_of(shape: cost.Shape) -> str:
    return shape.name


@pytest.mark.parametrize("shape", cost.SHAPES, ids=name_of)
def test_parameters_are_those_that_transformers_makes(shape):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3(shape))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_the_toys_shape_is_the_toys():
    with torch.device("meta"):
        model = base_model.new_model(len(language.vocabulary()))
    assert cost.SHAPES[0].parameters == sum(p.numel() for p in model.parameters())


def test_operations_are_those_that_pytorch_counts():
    """Stock attention computes all T² pairs, and logits everywhere: then the formula is exact."""
    shape = dataclasses.replace(cost.SHAPES[0], heads=8, tied=False)
    length = 24
    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3(shape, attn_implementation="eager"))
        ids = torch.zeros(1, length, dtype=torch.long)
        with FlopCounterMode(display=False) as forward:
            logits = model(ids).logits
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    expected = shape.forward(length, length**2, length)
    # The angles of the rotary embedding, frequency × position, are a product too.
    rotary = 2 * shape.head_size // 2 * length
    assert forward.get_total_flops() - expected in (0, rotary)
    assert backward.get_total_flops() == 2 * expected


def test_the_toys_workload_is_what_flawless_look_ups_make():
    config = mars.MarsConfig()
    asked = world.world("train", 0)
    find = {}
    for corpus, documents in asked.documents.items():
        find[corpus] = search.local(documents, config.top_k)
    rng = random.Random(0)
    plans = [world.draw_plan(asked, rng) for _ in range(600)]
    count = Counter()
    for plan in plans:
        count["calls"] += len(plan.hops)
        count["distilled"] += len(plan.hops)
        count["prompts"] += 2 + len(plan.text.split())
        count["answers"] += 2 + len(plan.answer.split())
        if plan.expression:
            count["calls"] += 1
            count["steps"] += len(f"<call> python {plan.expression} <eot>".split())
        for corpus, name, attribute in plan.hops:
            purpose = f"{attribute} of {name}"
            count["steps"] += len(f"<call> {corpus} {name} <purpose> {purpose} <eot>".split())
            texts = [document.text for document in find[corpus](name)]
            lengths = [1 + len(text.split()) for text in texts]
            wording = len(f"<s1> <purpose> {purpose} <eot>".split())
            fact = asked.sentence(name, attribute)
            for chunk in pack_documents(lengths, config.sys1_prompt - wording):
                told = any(fact in texts[i] for i in chunk)
                note = fact if told else "none ."
                count["samples"] += 1
                count["read"] += wording + sum(lengths[i] for i in chunk)
                count["notes"] += len(note.split()) + 1
    n = len(plans)
    counted = {
        "calls": count["calls"] / n,
        "distilled": count["distilled"] / n,
        "chunks": count["samples"] / count["distilled"],
        "chunk_tokens": count["read"] / count["samples"],
        "note_tokens": count["notes"] / count["samples"],
        "prompt_tokens": count["prompts"] / n,
        "step_tokens": count["steps"] / count["calls"],
        "answer_tokens": count["answers"] / n,
    }
    for name, value in counted.items():
        assert getattr(cost.TOY, name) == pytest.approx(value, rel=0.04), name
    for name in ("questions", "group", "max_sequences", "kv_tokens"):
        assert getattr(cost.TOY, name) == getattr(config, name), name


def paper():
    return resolve(mars.MarsConfig, {"preset": "paper"}, presets=mars.METHOD.presets)


def test_the_papers_workload_is_the_presets():
    preset = paper()
    shared = "questions group max_sequences kv_tokens fsdp recompute_activations"
    for name in shared.split():
        assert getattr(cost.PAPER, name) == getattr(preset, name), name
    assert cost.PAPER.chunk_tokens <= preset.sys1_prompt
    assert cost.PAPER.note_tokens <= preset.sys1_response
    assert cost.tokens(cost.PAPER)["sys2_context"] <= preset.sys2_context


def test_token_counts_by_hand():
    w = cost.Workload(
        questions=2,
        group=3,
        calls=2,
        distilled=1,
        chunks=2,
        chunk_tokens=10,
        note_tokens=4,
        prompt_tokens=5,
        step_tokens=6,
        wrap_tokens=1,
        answer_tokens=3,
    )
    t = cost.tokens(w)
    assert t["sys1_samples"] == 12 and t["sys1_read"] == 120 and t["sys1_sampled"] == 48
    assert t["sys2_sampled"] == 6 * 15 and t["sys2_context"] == 5 + 2 + 8 + 15
    assert t["prefilled"] == 120 + 2 * 5 + 6 * 10 and t["decoded"] == 48 + 90
    # 12 System 1 samples are balanced to 6.
    assert t["with_loss"] == 90 + 6 * 4 and t["trained"] == 6 * 30 + 6 * 14
    half = cost.tokens(dataclasses.replace(w, flat_share=0.5))
    assert half["with_loss"] == t["with_loss"] / 2 and half["trained"] == t["trained"] / 2
    assert half["decoded"] == t["decoded"]
    # Fewer samples than attempts all stay.
    few = cost.tokens(dataclasses.replace(w, chunks=0.5))
    assert few["with_loss"] == 90 + 3 * 4


@pytest.mark.parametrize("shape", cost.SHAPES[1:], ids=name_of)
def test_floors_shrink_with_gpus_but_never_below_the_longest_chain(shape):
    one = cost.floors(shape, cost.PAPER, 1)
    eight = cost.floors(shape, cost.PAPER, 8)
    for part in ("train", "prefill"):
        assert one[part] == pytest.approx(8 * eight[part])
    assert one["decode"] / 8 <= eight["decode"] * (1 + 1e-9) and eight["decode"] < one["decode"]
    chain = cost.PAPER.calls * 1024 + 512
    least = chain * 2 * shape.body / cost.PEAK_BYTES
    assert cost.floors(shape, cost.PAPER, 10_000)["decode"] > least


def test_recomputing_costs_one_more_forward_pass():
    shape, w = cost.SHAPES[1], cost.PAPER
    kept = dataclasses.replace(w, recompute_activations=False)
    t = cost.tokens(w)
    more = cost.operations(shape, w)["train"] - cost.operations(shape, kept)["train"]
    assert more > 2 * shape.body * t["trained"]
    assert 3 * more < cost.operations(shape, kept)["train"]


def test_trainers_and_servers_take_turns():
    """A step is rollouts, training and new weights; two bytes a parameter go to each machine."""
    shape, w = cost.SHAPES[3], cost.PAPER
    few = cost.fleet(shape, w, trainers=8, servers=8)
    many = cost.fleet(shape, w, trainers=8, servers=24)
    assert few["GB a sync"] == 2 * shape.parameters / 1e9
    assert few["sync s, disk"] == pytest.approx(2 * 2 * shape.parameters / cost.DISK)
    assert many["sync s, disk"] == pytest.approx(2 * few["sync s, disk"]), "three machines read"
    assert few["sync s, NCCL"] == pytest.approx(8 * 2 * shape.parameters / cost.NETWORK)
    both = cost.floors(shape, w, 8)
    assert few["rollouts s"] == pytest.approx(both["prefill"] + both["decode"])
    assert few["train s"] == many["train s"] == both["train"]
    parts = ("rollouts s", "train s", "sync s, disk")
    assert few["step s, disk"] == pytest.approx(sum(few[part] for part in parts))
    # The number of servers at which sampling takes as long as training, or a little less.
    match = few["servers to match"]
    assert cost.fleet(shape, w, 8, match)["rollouts s"] <= few["train s"]
    assert cost.fleet(shape, w, 8, match - 1)["rollouts s"] > few["train s"]
    alone = sum(cost.memory(shape, w, 8).values()) / 2**30
    assert few["GiB a trainer"] < alone - 2 * shape.parameters / 2**30, "no sampler beside it"


@pytest.mark.parametrize(
    "shape, gpus", [(cost.SHAPES[1], 1), (cost.SHAPES[3], 8)], ids=["0.6B on 1", "8B on 8"]
)
def test_memory_is_what_a_run_plans(shape, gpus, tmp_path, monkeypatch):
    qwen3(shape).save_pretrained(tmp_path)
    large = SimpleNamespace(total_memory=1 << 50)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: large)
    preset = paper()
    line = memory_plan(
        str(tmp_path),
        config=preset,
        longest=preset.longest(),
        world=gpus,
        device=torch.device("cuda"),
    )
    planned = float(re.search(r"([\d.]+) before activations", line)[1])
    counted = sum(cost.memory(shape, cost.PAPER, gpus).values()) / 2**30
    assert counted == pytest.approx(planned, abs=0.01)


def test_check_puts_prediction_beside_measurement(options):
    folder = invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    rows = {row["a step"]: row for row in cost.check(folder)}
    calls = rows["calls"]
    assert calls["predicted"] == calls["measured"] == 192.0
    assert calls["measured/predicted"] == 1.0
    assert rows["sys1_samples"]["measured"] == 15
    assert rows["sys1_samples"]["predicted"] == pytest.approx(354.4, abs=0.1)
    half = cost.tokens(cost.TOY)["with_loss"] / 2
    assert rows["with_loss"]["predicted"] == pytest.approx(half, abs=0.1)
    assert "sys1_read" not in rows, "no records, no figure"


@pytest.mark.parametrize("saved", [None, {"data": "nq"}])
def test_check_refuses_what_is_no_run_of_the_toy(tmp_path, saved):
    if saved:
        (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="run"):
        cost.check(tmp_path)


def test_assumptions_can_be_set():
    w = cost.changed(cost.PAPER, ["note_tokens=2048", "max_sequences=64"])
    assert w.note_tokens == 2048.0
    assert w.max_sequences == 64 and isinstance(w.max_sequences, int)


@pytest.mark.parametrize("bad", ["notes=3", "group", "group=many", "group=-1", "calls=nan"])
def test_a_bad_assumption_is_one_sentence(bad):
    with pytest.raises(UserError, match=re.escape(f"--set {bad}")):
        cost.changed(cost.PAPER, [bad])


def test_an_endless_assumption_is_one_sentence():
    with pytest.raises(UserError, match="--set kv_tokens=inf"):
        cost.changed(cost.PAPER, ["kv_tokens=inf"])


# ------------------------------------------------------------------------------ soak


def looks(memory, pid: int = 7, first: int = 0) -> list[dict]:
    """A look at a process every 5 steps, at which its memory was so."""
    samples = []
    for i, value in enumerate(memory):
        known = {"open_files": 6, "threads": 37, "children": 0, "temporary_files": 0}
        step = {"step": first + 5 * i, "pid": pid, "rss": value, "peak": value + 10}
        samples.append(step | known)
    return samples


def test_slope_of_the_memory_after_warm_up():
    warm = [400 + 3 * i for i in range(20)]  # up to step 100
    found = soak.slope(looks(warm + [500 + 0.2 * i for i in range(180)]), 100)
    expected = {"per_100_steps": 4, "start": 500, "end": 535.8, "flat": True}
    assert found == pytest.approx(expected)
    assert not soak.slope(looks([500 + 0.3 * i for i in range(200)]), 100)["flat"]
    noise = random.Random(0)
    steady = soak.slope(looks(warm + [500 + noise.gauss(0, 10) for _ in range(180)]), 100)
    assert steady["flat"] and abs(steady["per_100_steps"]) < 1


def test_slope_looks_at_one_process_only_and_says_when_it_knows_nothing():
    grown = [500 + i for i in range(100)]
    samples = looks([300] * 30, pid=1) + looks(grown, pid=2, first=150)
    found = soak.slope(samples, 100)
    assert found["per_100_steps"] == pytest.approx(20)
    assert found["start"] == pytest.approx(520)
    assert soak.slope(looks([1, 2]), 0) is None


def test_findings_name_leaks_leftovers_and_collapse():
    lines = metrics([0.2, 0.9, 0.5, 0.4])
    lines[1]["pages_in_use"] = 3
    left = {"processes": ["sleep 60"], "temporary_files": []}
    found = soak.judge(lines, looks([500] * 10), left, 3)
    assert found["steps_with_pages_in_use"] == 1 and found["steps_with_pages_counted"] == 3
    expected = {"best": 0.9, "last": 0.4, "fall": pytest.approx(0.5)}
    assert found["accuracy"]["sampled"] == expected
    text = soak.tell(found)
    for part in ("after 1 of 3 steps", "1 processes", "fell by 0.500", "flat"):
        assert part in text
    assert soak.judge([], [], left, 3)["memory"] is None


def test_the_table_by_stretches_covers_every_step():
    lines = metrics([0.1] * 10)
    for line in lines:
        line |= dict.fromkeys(soak.KEYS, float(line["step"]))
    lines[0]["sys1_entropy"] = None  # of a step that trained nothing
    rows = soak.by_stretch(lines, looks([100, 200]), 4)
    means = [(row["steps"], row["reward"]) for row in rows]
    assert means == [("0-3", 1.5), ("4-7", 5.5), ("8-8", 8.0)]
    assert [row["rss_mib"] for row in rows] == [100, 200, None]
    assert rows[0]["accuracy"] == 0.1 and rows[0]["sys1_entropy"] == 2


RUN = """
import json, os, subprocess, sys, tempfile, time
from pathlib import Path
value = lambda name: sys.argv[sys.argv.index(name) + 1]
folder = Path(value("--runs")) / value("--name")
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(json.dumps({"resumed": "--resume" in sys.argv}))
if value("--steps") == "5":
    sys.exit("mars: no luck")
kept = open(os.devnull)
if value("--steps") == "4":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(tempfile.gettempdir(), "forgotten").write_text("")
lines = LINES
for line in lines:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))
    time.sleep(0.3)
"""


@pytest.fixture
def soaked(tmp_path, monkeypatch):
    """soak.run with a mars.py of our own: 4 steps leave an orphan and a file, 3 nothing, 5 fail."""
    monkeypatch.setattr(soak, "ROOT", tmp_path)

    def prepared(steps):
        program = RUN.replace("LINES", repr(metrics([0.1] * (steps + 1))))
        (tmp_path / "mars.py").write_text(program)
        return argparse.Namespace(
            runs=tmp_path / "runs", name=f"soak{steps}", steps=steps, every=1, cache=tmp_path
        )

    yield prepared
    ctypes.CDLL(None).prctl(soak.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_run_is_watched_and_one_that_is_complete_is_not_run_again(soaked):
    options = soaked(3)
    nothing = {"processes": [], "temporary_files": []}
    assert soak.run(options) == nothing
    file = options.runs / "soak3.samples.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert {sample["step"] for sample in samples} <= {0, 1, 2} and len(samples) >= 2
    for sample in samples:
        assert sample["rss"] > 1 and sample["open_files"] >= 4 and sample["children"] == 0
    before = (options.runs / "soak3" / "metrics.jsonl").read_bytes()
    assert soak.run(options) == nothing
    assert (options.runs / "soak3" / "metrics.jsonl").read_bytes() == before
    picture = soak.plot(metrics([0.1] * 4), samples, options.runs / "soak.png")
    assert picture.stat().st_size > 5_000


def test_orphans_and_forgotten_files_are_found(soaked):
    left = soak.run(soaked(4))
    for pid in soak.children(os.getpid()):
        if b"sleep(60)" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert len(left["processes"]) == 1 and "sleep(60)" in left["processes"][0]
    assert left["temporary_files"] == ["forgotten"]


def test_a_run_that_fails_is_one_sentence_and_is_resumed_next_time(soaked):
    options = soaked(5)
    for _ in range(2):
        with pytest.raises(UserError, match=r"exit code 1.*soak5\.log"):
            soak.run(options)
    assert "no luck" in (options.runs / "soak5.log").read_text()
    saved = json.loads((options.runs / "soak5" / "config.json").read_text())
    assert saved == {"resumed": True}


@pytest.mark.parametrize("leaky", [False, True])
def test_the_logged_number_of_pages_shows_a_conversation_that_was_not_closed(
    leaky, tmp_path, monkeypatch
):
    base_model.new_model(len(language.vocabulary())).save_pretrained(tmp_path / "base")
    language.make_tokenizer().save_pretrained(tmp_path / "base")
    if leaky:
        monkeypatch.setattr(sampler.Sampler, "close", lambda self, conversation: None)
    given = ["--model", str(tmp_path / "base"), "--runs", str(tmp_path), "--name", "run"]
    given += ["--steps", "1", "--questions", "2", "--group", "2", "--eval_questions", "1"]
    given += ["--threads", "1", "--kv_tokens", "8192", "--cache", str(tmp_path)]
    assert mars.main(given) == 0
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert (json.loads(line)["pages_in_use"] > 0) == leaky


def test_matplotlib_waits_for_a_picture():
    program = (
        "import sys; from bench import ablations, cost, soak; sys.exit('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ablations.ROOT)
    assert done.returncode == 0


# ---------------------------------------------------------------- the sampler's rivals

# What bench/engines.py uses of each package. A stand-in's answer is the prompt's first token.
STAND_INS = {
    "vllm.py": """
from types import SimpleNamespace as Result
print("a word of the engine")
__version__ = "1.2"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, min_tokens, ignore_eos, detokenize):
        assert temperature == 0 and min_tokens == max_tokens and ignore_eos
        self.count = max_tokens

class LLM:
    def __init__(self, *, model, dtype, max_model_len, enforce_eager, enable_prefix_caching, **_):
        assert dtype == "float32" and not enable_prefix_caching

    def generate(self, inputs, options, use_tqdm):
        print("another word")
        answers = []
        for given, option in zip(inputs, options, strict=True):
            tokens = (given["prompt_token_ids"][0],) * option.count
            answers.append(Result(outputs=[Result(token_ids=tokens)]))
        return answers
""",
    "openvino.py": """
class Tensor:
    def __init__(self, array):
        assert array.ndim == 2
        self.first = int(array[0, 0])
""",
    "openvino_genai.py": """
import os
from types import SimpleNamespace as Result
__version__ = "3.4"

class SchedulerConfig:
    pass

class GenerationConfig:
    def __init__(self, *, max_new_tokens, ignore_eos, eos_token_id, do_sample):
        assert ignore_eos and not do_sample
        self.count = max_new_tokens

class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        assert os.path.exists(folder) and device == "CPU"
        assert not scheduler.enable_prefix_caching
        assert properties["INFERENCE_NUM_THREADS"] == 1

    def generate(self, inputs, options):
        print("a word of the engine")
        answers = []
        for given, option in zip(inputs, options, strict=True):
            answers.append(Result(m_generation_ids=[[given.first] * option.count]))
        return answers
""",
    "optimum/__init__.py": "",
    "optimum/intel.py": """
import os

class OVModelForCausalLM:
    @classmethod
    def from_pretrained(cls, folder, *, export, compile, load_in_8bit):
        assert export and not load_in_8bit
        return cls()

    def save_pretrained(self, folder):
        os.mkdir(folder)
""",
}


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    for name, text in STAND_INS.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return packages


@pytest.fixture
def bare_python(tmp_path):
    """A Python that sees no installed package."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def start_engines(tmp_path, *pythons):
    """All engines on two prompts that want two tokens and one."""
    folder = tmp_path / "model"
    folder.mkdir()
    return engines.start_engines(pythons, str(folder), [[5, 6], [7]], [2, 1])


def test_other_engines_work_in_processes_of_their_own(stand_ins, tmp_path):
    running, absent = start_engines(tmp_path, sys.executable)
    assert list(running) == ["OpenVINO GenAI", "vLLM, compiled", "vLLM, eager"]
    assert absent == {}
    versions = [engine.version for engine in running.values()]
    assert versions == ["3.4", "1.2", "1.2"]
    for name, engine in running.items():
        before = engine.seconds
        assert engine.run() == [[5, 5], [7]], "what the engine prints is not its answer"
        assert 0 < before < engine.seconds
        if name.startswith("vLLM"):
            assert "another word" in engine.log.read_text()
        engine.close()
        assert engine.process.returncode is not None


def test_engines_that_no_environment_has_are_not_installed(bare_python, tmp_path):
    running, absent = start_engines(tmp_path, bare_python)
    assert running == {}
    assert absent == dict.fromkeys(engines.ENGINES, "not installed")


def test_each_engine_takes_the_first_environment_that_has_it(stand_ins, bare_python, tmp_path):
    # -S hides installed packages, numpy too, but not those of PYTHONPATH.
    running, absent = start_engines(tmp_path, bare_python, sys.executable)
    assert absent == {}
    assert running["vLLM, eager"].process.args[0] == bare_python
    assert running["OpenVINO GenAI"].process.args[0] == sys.executable
    for engine in running.values():
        engine.close()


@pytest.mark.parametrize("where", ["at its start", "at its work"])
def test_an_engine_that_fails_says_why_in_its_row(where, stand_ins, tmp_path):
    broken = stand_ins / "vllm.py"
    failure = 'raise ValueError("no such CPU")'
    if where == "at its start":
        broken.write_text(failure)
    else:
        broken.write_text(STAND_INS["vllm.py"].replace('print("another word")', failure))
    running, absent = start_engines(tmp_path, sys.executable)
    running["OpenVINO GenAI"].close()
    assert list(running) == ["OpenVINO GenAI"]
    assert set(absent.values()) == {"failed: ValueError: no such CPU"}


def test_a_python_that_is_not_there_is_a_cell_of_the_table(tmp_path):
    running, absent = start_engines(tmp_path, str(tmp_path / "nothing"))
    assert running == {}
    assert all(reason.startswith("failed: ") for reason in absent.values())


def test_the_clock_counts_the_seconds_of_other_processes():
    engine = SimpleNamespace(seconds=3.0)

    def work():
        engine.seconds += 100
        return [[1], [2]]

    peers = {"MARS": lambda: [[1], [3]], "other": work}
    seconds, answers = sampler_bench.race(peers, [engine], rounds=2)
    assert seconds["other"] == pytest.approx([100, 100], abs=1)
    assert seconds["MARS"] == pytest.approx([0, 0], abs=1)
    row = sampler_bench.engine_row("other", 500, {**seconds, "MARS": [50, 200]}, answers)
    assert row["tokens/s, median"] == 5 and row["rows equal"] == 1
    assert row["× min"] == pytest.approx(0.5, abs=0.01)
    assert row["× max"] == pytest.approx(2, abs=0.02)


def test_the_cpu_table_has_a_line_for_every_engine(stand_ins, tmp_path, monkeypatch):
    (stand_ins / "openvino_genai.py").write_text('raise OSError("no such library")')
    monkeypatch.setattr(sampler_bench, "workload", lambda quick: ([[5, 6], [7]], [2, 1]))
    rows = sampler_bench.cpu(quick=True, pythons=[sys.executable])
    by_name = {row["engine"]: row for row in rows}
    for name in ("MARS", "generate, left-padded", "generate, sorted", "generate_batch"):
        assert by_name[name]["rows equal"] == 2, name
    for name in ("vLLM, compiled", "vLLM, eager"):
        assert by_name[name]["version"] == "1.2"
        assert by_name[name]["tokens/s, median"] > 0
    failed = by_name["OpenVINO GenAI"]
    assert failed["tokens/s, median"] == "failed: OSError: no such library"
    assert len(by_name) == len(rows) == 7


def test_a_beginning_in_common_is_prefilled_once():
    """Full pages of it; the last token of each prompt is read by the first step of decoding."""
    for row in sampler_bench.alike(quick=True):
        common_tokens = int(row["in common"] * 64) // 16 * 16
        assert row["prefilled"] == common_tokens + 8 * (63 - common_tokens)
        assert row["without sharing"] == 8 * 63


def run_main(monkeypatch, *arguments):
    """bench.sampler's main, whose settings end with the test."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["bench.sampler", *arguments])
    sampler_bench.main()


def test_environments_of_engines_are_an_option(tmp_path, monkeypatch):
    given = []

    def cpu(quick, pythons):
        given.append((quick, pythons))
        return [{"engine": "MARS"}]

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setitem(sampler_bench.PARTS, "cpu", cpu)
    run_main(monkeypatch, "--only", "cpu")
    run_main(monkeypatch, "--only", "cpu", "--quick", "--engines-python", "a", "b")
    assert given == [(False, [sys.executable]), (True, ["a", "b"])]
    saved = json.loads((tmp_path / "sampler_cpu.json").read_text())
    assert saved["rows"] == [{"engine": "MARS"}]


def test_the_gpu_parts_file_keeps_the_copy_rate(tmp_path, monkeypatch):
    """Its shares of the ceiling cannot be checked without it."""

    def gpu(quick):
        common.save("sampler_gpu", "command", [{"rows": 1}], copy_bytes_a_second=4e12)
        return [{"rows": 1}]

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setitem(sampler_bench.PARTS, "gpu", gpu)
    run_main(monkeypatch, "--only", "gpu")
    saved = json.loads((tmp_path / "sampler_gpu.json").read_text())
    assert saved["copy_bytes_a_second"] == 4e12


# ------------------------------------------------------------------------- arms of recipes


def write_run(folder, accuracies: list[float], step_costs: dict[str, float], every: int = 2):
    """A run of a recipe as its folder tells it: an evaluation every few steps, and at the end."""
    lines = [{"step": step, **step_costs} for step in range(every * (len(accuracies) - 1))]
    for number, accuracy in enumerate(accuracies):
        last = number == len(accuracies) - 1
        line = lines[-1 if last else number * every]
        scores = {"eval_step": number * every, "eval_accuracy": accuracy, "eval_greedy": accuracy}
        scores |= {key: accuracy / 2 for key in credit.SCORES}
        line.update(scores)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text("{}")
    ended = {"cpu_seconds": 10, "commit": "abc"}
    folder.with_name(f"{folder.name}.run.json").write_text(json.dumps(ended))


def test_arms_of_a_recipe_are_summed_up_over_complete_runs(tmp_path):
    costs = dict.fromkeys(matpo.COSTS, 3.0)
    write_run(tmp_path / "matpo-0", [0.1, 0.5, 0.8], costs)
    write_run(tmp_path / "matpo-1", [0.3, 0.7, 0.9], costs)
    write_run(tmp_path / "matpo-2", [0.3, 0.7], costs)  # not complete
    (row,) = matpo.summarise(argparse.Namespace(runs=tmp_path, steps=4))
    assert row["arm"] == "matpo" and row["seeds"] == 2
    assert row["accuracy"][4] == {"mean": pytest.approx(0.85), "min": 0.8, "max": 0.9}
    assert row["worker_tokens"] == 3 and row["cpu_seconds"] == 10
    assert "85.0 (80.0 … 90.0)" in matpo.report([row])
    matpo.plot([row], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    with pytest.raises(UserError, match="more than --steps 2"):
        matpo.summarise(argparse.Namespace(runs=tmp_path, steps=2))


def test_rules_of_credit_are_summed_up(tmp_path):
    costs = {"trained_tokens": 7, "grad_norm": 0.5}
    costs |= {f"{role}_{what}": 2 for role in credit.ROLES for what in ("samples", "tokens")}
    write_run(tmp_path / "role-0", [0.2, 0.4, 0.8], costs)
    write_run(tmp_path / "input-1", [0.2, 0.4, 0.6], costs)
    rows = credit.summarise(argparse.Namespace(runs=tmp_path, steps=4))
    assert [row["arm"] for row in rows] == ["role", "input"]
    assert rows[0]["system"][4]["mean"] == 0.4 and rows[0]["samples"] == 6
    assert "40.0 (40.0 … 40.0)" in credit.report(rows)
    credit.plot(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_arms_run_what_is_missing_and_resume_what_is_half_done(tmp_path, monkeypatch):
    write_run(tmp_path / "matpo-0", [0.1, 0.5, 0.8], {})
    write_run(tmp_path / "single-0", [0.1, 0.5], {})
    started = []
    monkeypatch.setattr(arms, "pool", lambda commands, *rest: started.extend(commands))
    options = argparse.Namespace(runs=tmp_path, cache=tmp_path, steps=4, jobs=1)
    listed = [("matpo", 0), ("single", 0), ("no_recap", 1)]
    arms.train(options, "siblings.matpo", "delegation", matpo.ARMS, listed)
    bases, runs = started[:2], dict(started[2:])
    assert [name for name, _ in bases] == ["base-0", "base-1"]
    assert list(runs) == ["single-0", "no_recap-1"]
    assert runs["single-0"][-2:] == ["--no-delegate", "--resume"]
    assert runs["no_recap-1"][-3:] == ["--steps", "4", "--no-recap"]
