"""The long benches without long runs: tables of invented runs, resumption, the cost's arithmetic, the soak's eye."""
import argparse
import ctypes
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import mars
from trainer import policy
import sampler
from toy import language
from toy import world as toy
from toy import base_model as toy_base
from bench import ablations, common, cost, soak
from binpack import pack_documents
from config import Config, UserError, parser, resolve
from tools import search


# ---------------------------------------------------------------------------------------------- ablations

@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    runs = tmp_path / "runs"
    runs.mkdir()
    return argparse.Namespace(runs=runs, cache=tmp_path / "cache", steps=4, quick=False, jobs=2, seeds=[0, 1],
                              arms=["full", "balance_off"], table=True)


def metrics(values: list[float]) -> list[dict]:
    """The lines of a run that was evaluated before each of its steps and after the last."""
    always = {"sys1_tokens": 100, "sys2_tokens": 200, "trained_tokens": 50, "seconds_rollout": 1.0,
              "seconds_train": 0.5, "pages_in_use": 0, "zero_variance_share": 0.5, "calls_per_question": 1.5}
    lines = [{"step": step, "reward": value, "sys1_samples": 10 * step, **always, "eval_accuracy": value,
              "eval_greedy": value + 0.1, "eval_step": step} for step, value in enumerate(values[:-1])]
    last = lines[-1]
    for key in ("eval_accuracy", "eval_greedy", "eval_step"):
        last[key + "_before"] = last[key]
    end = {"eval_accuracy": values[-1], "eval_greedy": values[-1] + 0.1, "eval_step": len(values) - 1}
    return lines[:-1] + [last | end]


def invent(options, arm: str, seed: int, values: list[float], **other) -> Path:
    """A run's folder as mars.py would leave it, with these accuracies."""
    folder = options.runs / f"{arm}-{seed}"
    folder.mkdir()
    config = resolve(vars(parser("").parse_args(ablations.arguments(arm, seed, options))))
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config) | other))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(values)))
    return folder


def test_every_arm_is_accepted_changes_something_and_stands_in_a_panel(options):
    base = resolve(vars(parser("").parse_args(ablations.arguments("full", 0, options))))
    for arm in ablations.ARMS:
        config = resolve(vars(parser("").parse_args(ablations.arguments(arm, 0, options))))
        changes = {k for k, v in vars(config).items() if v != getattr(base, k)} - {"name"}
        assert len(changes) == (arm != "full"), (arm, changes)
        assert any(arm in arms and "full" in arms for _, arms in ablations.PANELS), arm


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
    assert off["difference end"] == pytest.approx({"mean": -0.15, "min": -0.2, "max": -0.1})
    assert off["difference average"]["mean"] == pytest.approx(mean([-0.125, -0.1]))
    assert full["sys1_samples"] == mean([0, 10, 20, 30]) and full["seconds"] == 1.5
    assert {"date", "cpu", "commit", "versions"} <= saved.keys() and len(saved["runs"]) == 4
    out = capsys.readouterr().out
    assert "60.0 (60.0 … 60.0)" in out and "-15.0 (-20.0 … -10.0)" in out and "NOT THERE" not in out
    assert (common.RESULTS / "ablations.png").stat().st_size > 10_000


def test_what_failed_or_is_missing_is_listed_and_kept_out_of_the_means(options, capsys):
    invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    invent(options, "full", 1, [0.1, 0.2])                                  # half of it
    (options.runs / "balance_off-0.run.json").write_text('{"exit": 2, "why": "exit 2: no space", "cpu_seconds": 1.0}')
    invent(options, "balance_off", 1, [0.1, 0.3, 0.4, 0.5, 0.6], lr=0.5)     # of another setting
    assert ablations.tabulate(options) == 1
    out = capsys.readouterr().out
    for expected in ("full, seed 1: part", "balance_off, seed 0: exit 2: no space",
                     "balance_off, seed 1: made with other settings (lr 0.5)"):
        assert f"NOT THERE: {expected}" in out
    rows = json.loads((common.RESULTS / "ablations.json").read_text())["rows"]
    assert rows[0]["seeds"] == [0] and rows[0]["accuracy"]["4"]["mean"] == 0.8 and rows[1]["seeds"] == []


def test_a_longer_run_serves_a_shorter_table(options):
    folder = invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"steps": 6}))
    run = ablations.look("full", 0, options)
    assert run["state"] == "complete" and sorted(run["accuracies"]) == [0, 1, 2, 3, 4] and len(run["lines"]) == 4
    assert run["accuracies"][4] == (0.8, pytest.approx(0.9))


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
    folder = Path(arguments[arguments.index("--runs") + 1]) / arguments[arguments.index("--name") + 1]
    if "balance_off-1" in folder.name:
        sys.exit("mars: the disk is full")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "metrics.jsonl").write_text(lines)
"""


@pytest.fixture
def started(monkeypatch, options):
    """Instead of mars.py a small program that leaves the same files; the list of command lines."""
    commands, lines = [], "".join(json.dumps(line) + "\n" for line in metrics([0.1, 0.2, 0.3, 0.4, 0.5]))

    def start(command, log):
        commands.append(command)
        given = [a for a in command[1:] if a != "--resume"]
        config = dataclasses.asdict(resolve(vars(parser("").parse_args(given)))) if command[0] == "mars.py" else {}
        fake = [sys.executable, "-c", FAKE, json.dumps(command), lines, json.dumps(config)]
        with open(log, "a") as file:
            return subprocess.Popen(fake, stdout=file, stderr=subprocess.STDOUT)
    monkeypatch.setattr(ablations, "start", start)
    return commands


def test_complete_runs_are_skipped_half_ones_resumed_failed_ones_tried_again(options, started, capsys):
    invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    invent(options, "full", 1, [0.1, 0.2])
    ablations.train(options)
    runs = {c[c.index("--name") + 1]: "--resume" in c for c in started if c[0] == "mars.py"}
    assert runs == {"full-1": True, "balance_off-0": False, "balance_off-1": False}
    build = f"from toy import base_model; base_model.build({str(options.cache)!r}, %d, threads=1)"
    assert [c[1] for c in started[:2]] == [build % 0, build % 1]
    assert "balance_off-1: failed, exit 1" in capsys.readouterr().out
    assert ablations.look("balance_off", 1, options)["why"] == "exit 1: mars: the disk is full"
    assert all(ablations.look(*run, options)["state"] == "complete" for run in (("balance_off", 0), ("full", 1)))
    assert ablations.look("balance_off", 0, options)["cpu_seconds"] > 0
    started.clear()
    ablations.train(options)
    assert [c[c.index("--name") + 1] for c in started if c[0] == "mars.py"] == ["balance_off-1"]


def test_two_at_once_in_one_folder_are_refused(options, started):
    import fcntl
    with open(options.runs / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another bench.ablations"):
            ablations.train(options)
    assert started == []


def test_pool_keeps_to_its_number_and_leaves_no_process_when_it_is_interrupted(tmp_path, monkeypatch):
    processes, most = [], 0

    def start(command, log):
        nonlocal most
        processes.append(subprocess.Popen([sys.executable, "-c", command[0]]))
        most = max(most, sum(p.returncode is None for p in processes))
        return processes[-1]
    monkeypatch.setattr(ablations, "start", start)
    ended, naps = [], [(str(i), ["import time; time.sleep(0.05)"]) for i in range(5)]
    ablations.pool(naps, tmp_path, 2, lambda name, *_: ended.append(name))
    assert sorted(ended) == list("01234") and most == 2
    processes.clear()

    def interrupt(*_):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ablations.pool([("quick", ["pass"]), ("slow", ["import time; time.sleep(60)"])], tmp_path, 2, interrupt)
    assert len(processes) == 2 and all(p.poll() is not None for p in processes)


# ---------------------------------------------------------------------------------------------- an arm without a tool

def test_taking_a_tool_away_takes_no_question_away(monkeypatch):
    from plumbing import build
    def load(*names):
        return build.load_questions(Config(eval_questions=40), list(names), True)
    monkeypatch.setattr(build.python, "available", lambda: None)
    whole, without = load("search", "scholar", "python"), load("search")
    assert whole[1] == without[1] and [whole[0](i) for i in range(40)] == [without[0](i) for i in range(40)]
    assert {q.source for q in whole[1]} == {"toy-one", "toy-two", "toy-age", "toy-scholar"}
    monkeypatch.setattr(build.python, "available", lambda: "no jail here")
    for names in (["search", "scholar"], ["search"]):
        assert {q.source for q in load(*names)[1]} == {"toy-one", "toy-two", "toy-scholar"}


# ---------------------------------------------------------------------------------------------- cost

def qwen3(shape: cost.Shape, **more) -> Qwen3Config:
    return Qwen3Config(vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
                       num_hidden_layers=shape.layers, num_attention_heads=shape.heads, head_dim=shape.head_size,
                       num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied, **more)


@pytest.mark.parametrize("shape", cost.SHAPES, ids=lambda shape: shape.name)
def test_parameters_are_those_that_transformers_makes(shape):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3(shape))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_the_toys_shape_is_the_toys():
    with torch.device("meta"):
        model = toy_base.new_model(len(language.vocabulary()))
    assert cost.SHAPES[0].parameters == sum(p.numel() for p in model.parameters())


def test_operations_are_those_that_pytorch_counts():
    """Stock attention computes all T² pairs, and logits at every place: the formula of these, to the last operation."""
    shape, length = dataclasses.replace(cost.SHAPES[0], heads=8, tied=False), 24
    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3(shape, attn_implementation="eager"))
        ids = torch.zeros(1, length, dtype=torch.long)
        with FlopCounterMode(display=False) as forward:
            logits = model(ids).logits
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    rotary = 2 * shape.head_size // 2 * length              # angles = frequency × position, as a product
    assert forward.get_total_flops() - shape.forward(length, length ** 2, length) in (0, rotary)
    assert backward.get_total_flops() == 2 * shape.forward(length, length ** 2, length)


def test_the_toys_workload_is_what_flawless_look_ups_make():
    world, rng = toy.world("train", 0), random.Random(0)
    find = {corpus: search.local(pages, Config().top_k) for corpus, pages in world.documents.items()}
    plans = [toy.draw_plan(world, rng) for _ in range(600)]
    count = dict.fromkeys(("calls", "distilled", "samples", "read", "notes", "prompts", "steps", "answers"), 0)
    for plan in plans:
        mars.add(count, {"calls": len(plan.hops) + bool(plan.expression), "distilled": len(plan.hops),
                         "prompts": 2 + len(plan.text.split()), "answers": 2 + len(plan.answer.split()),
                         "steps": len(f"<call> python {plan.expression} <eot>".split()) if plan.expression else 0})
        for corpus, name, attribute in plan.hops:
            found, fact = find[corpus](name), world.sentence(name, attribute)
            wording = 3 + len(f"{attribute} of {name}".split())             # <s1> … <purpose> … <eot>
            lengths = [1 + len(d.text.split()) for d in found]
            mars.add(count, {"steps": len(f"<call> {corpus} {name} <purpose> {attribute} of {name} <eot>".split())})
            for bin in pack_documents(lengths, Config().sys1_prompt - wording):
                note = fact if any(fact in found[i].text for i in bin) else "none ."
                read = wording + sum(lengths[i] for i in bin)
                mars.add(count, {"samples": 1, "read": read, "notes": len(note.split()) + 1})
    n = len(plans)
    counted = {"calls": count["calls"] / n, "distilled": count["distilled"] / n,
               "chunks": count["samples"] / count["distilled"], "chunk_tokens": count["read"] / count["samples"],
               "note_tokens": count["notes"] / count["samples"], "prompt_tokens": count["prompts"] / n,
               "step_tokens": count["steps"] / count["calls"], "answer_tokens": count["answers"] / n}
    for name, value in counted.items():
        assert getattr(cost.TOY, name) == pytest.approx(value, rel=0.04), name
    settings = Config()
    for name in ("questions", "group", "rows", "kv_tokens"):
        assert getattr(cost.TOY, name) == getattr(settings, name)


def test_the_papers_workload_is_the_presets():
    preset = resolve({"preset": "paper"})
    for name in ("questions", "group", "rows", "kv_tokens", "fsdp", "checkpointing"):
        assert getattr(cost.PAPER, name) == getattr(preset, name), name
    assert cost.PAPER.chunk_tokens <= preset.sys1_prompt and cost.PAPER.note_tokens <= preset.sys1_response
    assert cost.tokens(cost.PAPER)["sys2_context"] <= preset.sys2_context


def test_token_counts_by_hand():
    w = cost.Workload(questions=2, group=3, calls=2, distilled=1, chunks=2, chunk_tokens=10, note_tokens=4,
                      prompt_tokens=5, step_tokens=6, wrap_tokens=1, answer_tokens=3)
    t = cost.tokens(w)
    assert t["sys1_samples"] == 12 and t["sys1_read"] == 120 and t["sys1_sampled"] == 48
    assert t["sys2_sampled"] == 6 * 15 and t["sys2_context"] == 5 + 2 + 8 + 15
    assert t["prefilled"] == 120 + 2 * 5 + 6 * 10 and t["decoded"] == 48 + 90
    assert t["with_loss"] == 90 + 6 * 4 and t["trained"] == 6 * 30 + 6 * 14                # 12 samples, balanced to 6
    half = cost.tokens(dataclasses.replace(w, flat_share=0.5))
    assert half["with_loss"] == t["with_loss"] / 2 and half["trained"] == t["trained"] / 2
    assert half["decoded"] == t["decoded"]
    few = cost.tokens(dataclasses.replace(w, chunks=0.5))           # fewer samples than trajectories: all stay
    assert few["with_loss"] == 90 + 3 * 4


@pytest.mark.parametrize("shape", cost.SHAPES[1:], ids=lambda shape: shape.name)
def test_floors_shrink_with_gpus_but_never_below_the_longest_chain(shape):
    one, eight = (cost.floors(shape, cost.PAPER, gpus) for gpus in (1, 8))
    assert one["train"] == pytest.approx(8 * eight["train"]) and one["prefill"] == pytest.approx(8 * eight["prefill"])
    chain = cost.PAPER.calls * 1024 + 512
    assert cost.floors(shape, cost.PAPER, 10_000)["decode"] > chain * 2 * shape.body / cost.PEAK_BYTES
    assert one["decode"] / 8 <= eight["decode"] * (1 + 1e-9) and eight["decode"] < one["decode"]


@pytest.mark.parametrize("shape, gpus", [(cost.SHAPES[1], 1), (cost.SHAPES[3], 8)], ids=["0.6B on 1", "8B on 8"])
def test_memory_is_what_a_run_plans(shape, gpus, tmp_path, monkeypatch):
    qwen3(shape).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 50))
    preset = resolve({"preset": "paper"})
    line = policy.memory_plan(str(tmp_path), config=preset, world=gpus, device=torch.device("cuda"))
    planned = float(re.search(r"([\d.]+) before activations", line)[1])
    assert sum(cost.memory(shape, cost.PAPER, gpus).values()) / 2**30 == pytest.approx(planned, abs=0.01)


def test_check_puts_prediction_beside_measurement(options):
    folder = invent(options, "full", 0, [0.2, 0.5, 0.6, 0.7, 0.8])
    rows = {row["a step"]: row for row in cost.check(folder)}
    assert rows["calls"] == {"a step": "calls", "predicted": 192.0, "measured": 192.0, "measured/predicted": 1.0}
    assert rows["sys1_samples"]["measured"] == 15 and rows["sys1_samples"]["predicted"] == pytest.approx(354.4, abs=0.1)
    assert rows["with_loss"]["predicted"] == pytest.approx(cost.tokens(cost.TOY)["with_loss"] / 2, abs=0.1)
    assert "sys1_read" not in rows, "no records, no figure"
    for folder, saved in ((options.runs, None), (options.runs / "other", {"data": "nq"})):
        folder.mkdir(exist_ok=True)
        if saved:
            (folder / "config.json").write_text(json.dumps(saved))
        with pytest.raises(UserError, match="run"):
            cost.check(folder)


def test_assumptions_can_be_set_and_bad_ones_are_one_sentence():
    w = cost.changed(cost.PAPER, ["note_tokens=2048", "rows=64"])
    assert w.note_tokens == 2048.0 and w.rows == 64 and isinstance(w.rows, int)
    for bad in ("notes=3", "rows", "rows=many", "rows=-1", "calls=nan"):
        with pytest.raises(UserError, match=re.escape(f"--set {bad}")):
            cost.changed(cost.PAPER, [bad])


# ---------------------------------------------------------------------------------------------- soak

def looks(memory, pid: int = 7, first: int = 0) -> list[dict]:
    return [{"step": first + 5 * i, "pid": pid, "rss": value, "peak": value + 10, "open_files": 6, "threads": 37,
             "children": 0, "temporary_files": 0} for i, value in enumerate(memory)]


def test_slope_of_the_memory_after_warm_up():
    warm = [400 + 3 * i for i in range(20)]                                 # 5 steps a look: warm-up ends at step 100
    found = soak.slope(looks(warm + [500 + 0.2 * i for i in range(180)]), 100)
    assert found == pytest.approx({"per_100_steps": 4, "start": 500, "end": 535.8, "flat": True})
    assert not soak.slope(looks([500 + 0.3 * i for i in range(200)]), 100)["flat"]
    noise = random.Random(0)
    steady = soak.slope(looks(warm + [500 + noise.gauss(0, 10) for _ in range(180)]), 100)
    assert steady["flat"] and abs(steady["per_100_steps"]) < 1


def test_slope_looks_at_one_process_only_and_says_when_it_knows_nothing():
    samples = looks([300] * 30, pid=1) + looks([500 + i for i in range(100)], pid=2, first=150)
    found = soak.slope(samples, 100)
    assert found["per_100_steps"] == pytest.approx(20) and found["start"] == pytest.approx(520)
    assert soak.slope(looks([1, 2]), 0) is None


def test_findings_name_leaks_leftovers_and_collapse():
    lines = metrics([0.2, 0.9, 0.5, 0.4])
    lines[1]["pages_in_use"] = 3
    found = soak.judge(lines, looks([500] * 10), {"processes": ["sleep 60"], "temporary_files": []}, 3)
    assert found["steps_with_pages_in_use"] == 1 and found["steps_with_pages_counted"] == 3
    assert found["accuracy"]["sampled"] == {"best": 0.9, "last": 0.4, "fall": pytest.approx(0.5)}
    text = soak.tell(found)
    assert "after 1 of 3 steps" in text and "1 processes" in text and "fell by 0.500" in text and "flat" in text


def test_the_table_by_stretches_covers_every_step():
    lines = [line | dict.fromkeys(soak.KEYS, float(line["step"])) for line in metrics([0.1] * 10)]
    rows = soak.by_stretch(lines, looks([100, 200]), 4)
    assert [(row["steps"], row["reward"]) for row in rows] == [("0-3", 1.5), ("4-7", 5.5), ("8-8", 8.0)]
    assert [row["rss_mib"] for row in rows[:2]] == [100, 200] and rows[0]["accuracy"] == 0.1


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
    """soak.run with a mars.py of our own: 4 steps leave an orphan and a file, 3 leave nothing, 5 fail."""
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    yield lambda steps: (
        (tmp_path / "mars.py").write_text(RUN.replace("LINES", repr(metrics([0.1] * (steps + 1))))),
        argparse.Namespace(runs=tmp_path / "runs", name=f"soak{steps}", steps=steps, every=1, cache=tmp_path))[1]
    ctypes.CDLL(None).prctl(soak.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_run_is_watched_and_one_that_is_complete_is_not_run_again(soaked):
    options = soaked(3)
    assert soak.run(options) == {"processes": [], "temporary_files": []}
    samples = [json.loads(line) for line in open(options.runs / "soak3.samples.jsonl")]
    assert {sample["step"] for sample in samples} <= {0, 1, 2} and len(samples) >= 2
    assert all(sample["rss"] > 1 and sample["open_files"] >= 4 and sample["children"] == 0 for sample in samples)
    before = (options.runs / "soak3" / "metrics.jsonl").read_bytes()
    assert soak.run(options) == {"processes": [], "temporary_files": []}
    assert (options.runs / "soak3" / "metrics.jsonl").read_bytes() == before
    assert soak.draw(metrics([0.1] * 4), samples, options.runs / "soak.png").stat().st_size > 5_000


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
        with pytest.raises(UserError, match="exit code 1.*soak5.log"):
            soak.run(options)
    assert "no luck" in (options.runs / "soak5.log").read_text()
    assert json.loads((options.runs / "soak5" / "config.json").read_text()) == {"resumed": True}


@pytest.mark.parametrize("leaky", [False, True])
def test_the_logged_number_of_pages_shows_a_conversation_that_was_not_closed(leaky, tmp_path, monkeypatch):
    toy_base.new_model(len(language.vocabulary())).save_pretrained(tmp_path / "base")
    language.make_tokenizer().save_pretrained(tmp_path / "base")
    if leaky:
        monkeypatch.setattr(sampler.Sampler, "close", lambda self, conversation: None)
    assert mars.main(["--model", str(tmp_path / "base"), "--runs", str(tmp_path), "--name", "run", "--steps", "1",
                      "--questions", "2", "--group", "2", "--eval_questions", "1", "--threads", "1",
                      "--kv_tokens", "8192", "--cache", str(tmp_path)]) == 0
    (line,) = [json.loads(text) for text in open(tmp_path / "run" / "metrics.jsonl")]
    assert (line["pages_in_use"] > 0) == leaky
