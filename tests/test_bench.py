"""The benches that a CPU runs: tables of arms, peers in their own processes, forms that agree."""

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mars
import trainer
from bench import ablate, arms, atlas, common, peers, train_step
from bench import kernels as loss
from bench import sampler as bench
from config import parse, parser, resolve
from sampler import Sampler
from siblings import marsrl, matpo

RATE = {"copy": 1e9, "product": 1e9}


def nothing(rows):
    """In the place of what writes rows."""


# ---------------------------------------------------------------- common


def test_a_row_has_its_prediction_before_it_is_measured_and_keeps_a_failure():
    seen = []

    def write(rows):
        seen.append([dict(row) for row in rows])

    rows = []
    common.measure(rows, write, {"form": "good"}, {"ms": 2.0}, lambda: {"ms": 3.0})
    common.measure(rows, write, {"form": "bad"}, {}, lambda: {}["no such peer"])
    assert seen[0] == [{"form": "good", "predicted ms": 2.0}]
    assert seen[1] == [{"form": "good", "predicted ms": 2.0, "ms": 3.0}]
    assert "KeyError" in seen[-1][1]["failed"]
    lines = common.table(rows).splitlines()
    assert [len(line.split()) for line in lines[:2]] == [5, 3]


def test_rounds_are_interleaved_and_the_first_is_not_counted():
    order = []
    functions = {name: lambda name=name: order.append(name) for name in "ab"}
    times = common.interleaved(functions, rounds=2, clock=lambda: len(order))
    assert order == list("ababab")
    assert times == {"a": [1, 1], "b": [1, 1]}


def test_a_result_tells_who_measured_and_git_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    path = common.save("name", "the command", [{"row": 1}], tmp_path / "new", more=2)
    saved = json.loads(path.read_text())
    assert path == tmp_path / "new" / "name.json" and list(path.parent.iterdir()) == [path]
    assert saved["rows"] == [{"row": 1}] and saved["more"] == 2 and saved["commit"] is None
    assert torch.__version__.startswith(saved["versions"]["torch"].partition("+")[0])


# ---------------------------------------------------------------- arms of the toys

CONFIGS = {
    "mars": (mars.MarsConfig, mars.METHOD),
    "matpo": (matpo.MatpoConfig, matpo.METHOD),
    "marsrl": (marsrl.METHOD.config, marsrl.METHOD),
}


@pytest.mark.parametrize("method", ablate.ARMS)
def test_every_arm_is_accepted_and_changes_something(method):
    config, made = CONFIGS[method]
    first, *_ = ablate.ARMS[method]
    settings = {}
    for arm, changed in ablate.ARMS[method].items():
        given = parse(parser(config, ""), ["--steps", "9", *changed])
        settings[arm] = asdict(resolve(config, given, presets=made.presets))
    for arm, changed in settings.items():
        assert arm == first or changed != settings[first], arm


def metrics(method: str, values: list[float], every: int = 2) -> list[str]:
    """Lines of a run that is evaluated every few steps; the last line may hold two evaluations."""
    steps = every * (len(values) - 1)
    lines = []
    for step in range(steps):
        line = {"step": step}
        last = step == steps - 1
        evaluated = {step: "_before" if last else ""} if step % every == 0 else {}
        if last:
            evaluated[steps] = ""
        for done, when in evaluated.items():
            line[f"eval_step{when}"] = done
            for key in ablate.SCORES[method].values():
                line[key + when] = values[done // every]
        lines.append(json.dumps(line))
    return lines


def invent(runs: Path, method: str, name: str, values: list[float], every: int = 2) -> None:
    (runs / name).mkdir(parents=True)
    (runs / name / "config.json").write_text("{}")
    lines = metrics(method, values, every)
    (runs / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_evaluations_are_read_with_the_one_before_the_last_step():
    for every in (1, 2):
        lines = [json.loads(line) for line in metrics("mars", [0.1, 0.2, 0.3], every)]
        found = ablate.evaluations(lines, "mars")
        assert {step: both["greedy"] for step, both in found.items()} == {
            0: 0.1,
            every: 0.2,
            2 * every: 0.3,
        }


def test_arms_are_compared_seed_by_seed_over_complete_runs(tmp_path):
    invent(tmp_path, "mars", "full-0", [0.1, 0.5, 0.9])
    invent(tmp_path, "mars", "full-1", [0.1, 0.3, 0.7])
    invent(tmp_path, "mars", "purpose_off-0", [0.1, 0.2, 0.4])
    invent(tmp_path, "mars", "purpose_off-1", [0.1, 0.2, 0.2])
    invent(tmp_path, "mars", "purpose_off-2", [0.1, 0.2])  # not at its end
    rows = ablate.summarise("mars", tmp_path, 4)
    assert [(row["arm"], list(row["seeds"])) for row in rows] == [
        ("full", [0, 1]),
        ("purpose_off", [0, 1]),
    ]
    # Averages after step 0: full 0.7 and 0.5, the arm 0.3 and 0.2.
    assert ablate.differences(rows[1], rows[0], "sampled") == pytest.approx([-0.4, -0.3])
    shown = ablate.report(rows, "mars", 4)
    assert "80.0 (70.0 … 90.0)" in shown and "-35.0 (-40.0 … -30.0)" in shown
    ablate.plot(rows, "mars", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_complete_runs_are_skipped_half_ones_resumed_failed_ones_named(tmp_path, monkeypatch):
    invent(tmp_path, "matpo", "matpo-0", [0.1, 0.5, 0.9])
    invent(tmp_path, "matpo", "single-0", [0.1, 0.5])
    started = []

    def start(line, **options):
        started.append(line[1:])
        return SimpleNamespace(returncode=int("no_recap-0" in line))

    monkeypatch.setattr(ablate.subprocess, "run", start)
    options = argparse.Namespace(
        runs=tmp_path,
        cache=tmp_path,
        arms=["matpo", "single", "no_recap"],
        seeds=[0],
        steps=4,
        jobs=1,
    )
    assert ablate.run_missing("matpo", options) == ["no_recap-0"]
    assert [line[line.index("--name") + 1] for line in started] == ["single-0", "no_recap-0"]
    assert [line[-1] for line in started] == ["--resume", "--no-recap"]


# ---------------------------------------------------------------- the atlas


def test_seeds_are_pooled_and_models_compared_question_by_question(tmp_path, monkeypatch):
    """Of each evaluation a small record stays, which is all that the table needs."""
    marks = {  # questions 0, 1, …: a 1 for each right answer
        "start-0-sampled": "1100",
        "start-1-sampled": "0000",
        "rl-0-sampled": "0111",
        "rl-1-sampled": "1111",
        "frozen-0-sampled": "0011",
    }

    def carry_out(study, options, line, name):
        assert line[:1] == ["eval"] and line[line.index("--temperature") + 1] == "1.0"
        folder = options.runs / name
        (folder / "rollouts").mkdir(parents=True)
        lines = [{"question_id": str(i), "reward": int(m)} for i, m in enumerate(marks[name])]
        (folder / "rollouts" / "step_0.jsonl").write_text("\n".join(map(json.dumps, lines)))
        share = marks[name].count("1") / len(marks[name])
        made = [{"set": "all", "questions": len(marks[name]), "accuracy": share}]
        (folder / "table.json").write_text(json.dumps(made))

    monkeypatch.setattr(arms, "carry_out", carry_out)
    runs, kept = tmp_path / "runs", tmp_path / "records"
    options = argparse.Namespace(runs=runs, records=kept, seeds=[0, 1], eval_questions="4")
    kept.mkdir()
    for name in marks:
        arm, seed, _ = name.split("-")
        run = runs / f"{arm}-{seed}"
        run.mkdir(parents=True)
        made = vars(mars.MarsConfig(seed=int(seed), model="START"))
        (run / "config.json").write_text(json.dumps(made))
        (run / "metrics.jsonl").write_text('{"calls_per_question": 2, "seconds_train": 5}\n')
        arms.evaluate(atlas.STUDY, options, "rl" if arm == "start" else arm, run, name)
    shutil.rmtree(runs)
    start, run, frozen = arms.summarise(atlas.STUDY, options)
    assert run["calls"] == 2 and run["seconds"] == 5 and "calls" not in start
    assert start["all"][0] == 2 / 8 and run["all"][0] == 7 / 8 and "against rl" not in run
    assert run["against start"] == "+6 −1"
    assert run["p start"] == pytest.approx(2 * 8 / 2**7)
    assert (frozen["arm"], frozen["against rl"]) == ("frozen", "+0 −1")
    assert "88% (53%–98%)" in arms.report([run])


# ---------------------------------------------------------------- the sampler and its peers


def test_generate_has_our_tokens_in_a_process_of_its_own():
    ours, generate, *others = bench.mixed(True, [sys.executable])
    assert ours["rows equal"] == generate["rows equal"] == 4
    assert generate["tokens/s, median"] > 0 and generate["× MARS"] > 0
    assert [row["failed"] for row in others] == ["not installed"] * 2


def test_a_peer_that_fails_says_why(tmp_path):
    assert peers.first("vLLM", [str(tmp_path / "none")], 1)["failed"].startswith("[Errno 2]")
    reply = peers.first("generate, left-padded", [sys.executable], 1, folder=str(tmp_path))
    assert reply["failed"].startswith("TypeError: generate() missing")


def test_weights_and_pages_are_counted_as_they_are_made():
    """Qwen3-8B has 8.19e9 weights and 144 KiB of keys and values a token; 0.6B 0.596e9."""
    for shape in (bench.QWEN3_8B, bench.QWEN3_0_6B):
        model = bench.random_model(shape, where="meta")
        matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        embedding = shape["vocab_size"] * shape["hidden_size"]
        looked_up = 0 if shape["tie_word_embeddings"] else embedding
        assert bench.weight_bytes(shape) == 2 * (matrices - looked_up)
    assert bench.token_bytes(bench.QWEN3_8B) == 144 * 1024


def test_the_ceiling_of_requests_reads_each_step_once():
    shape = bench.TINY
    predicted = bench.predict_requests(shape, [[0] * 3, [0] * 5], [1, 2], copy=1.0)
    # Step 0 reads 3 + 5 tokens, step 1 the 6 of the second request.
    size = 2 * bench.weight_bytes(shape) + (8 + 6) * bench.token_bytes(shape)
    assert predicted["GB"] == pytest.approx(size / 1e9)
    assert predicted["tokens/s"] == pytest.approx(0.6 * 3 / size)


# ---------------------------------------------------------------- the loss and the training step


def test_our_loss_is_nearer_to_float64_than_bf16_logits():
    rows = []
    loss.accuracy(True, rows, nothing)
    errors = {row["form"]: row.get("log-prob error, mean") for row in rows}
    for form in ("MARS, PyTorch form", "MARS, Triton form"):
        assert errors[form] < 1e-5 < errors["plain PyTorch, bf16 logits"]
    assert "liger" in rows[-1].get("failed", "liger")


def test_operations_are_what_pytorch_counts():
    """Plain attention computes the upper half too. A small product makes the rotations."""
    shape = bench.TINY
    policy = trainer.Policy(bench.random_model(shape), bf16=False)
    samples = train_step.draw_samples(2, 1 / 64, shape["vocab_size"])
    cpu = torch.device("cpu")
    packed = trainer.micro_batches(samples, train_step.weigh(samples), 128, cpu)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        train_step.packed_step(policy, packed)
    squares = sum(length**2 for batch in packed for length in batch.lengths)
    heads = shape["num_attention_heads"] * shape["head_dim"]
    masked = 6 * shape["num_hidden_layers"] * heads * squares
    counted = train_step.operations(shape, packed) + masked
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.001)


def test_a_form_with_another_loss_is_a_failure(monkeypatch):
    rows = []
    train_step.steps(True, rows, nothing, RATE)
    assert not any("failed" in row for row in rows)
    assert rows[0]["tokens computed"] < rows[2]["tokens computed"]
    padded = train_step.padded_step

    def wrong(*given, **options):
        total, computed = padded(*given, **options)
        return total + 1e-3, computed

    monkeypatch.setattr(train_step, "padded_step", wrong)
    rows = []
    train_step.steps(True, rows, nothing, RATE)
    assert ["another loss" in row.get("failed", "") for row in rows] == [False, True, True]


def test_samples_are_as_the_docstring_says():
    samples = train_step.draw_samples(200, 1 / 16, 128)
    for role, median, share in (("sys2", 400, 1 / 3), ("sys1", 120, 1 / 5)):
        lengths = sorted(len(s.tokens) for s in samples if s.role == role)
        trained = sum(sum(s.mask) for s in samples if s.role == role)
        assert len(lengths) == 200 and lengths[-1] <= 1984
        assert abs(lengths[100] / median - 1) < 0.2
        assert abs(trained / sum(lengths) / share - 1) < 0.05


def test_our_grpo_step_trains_what_it_sampled_and_shared_prompts_once():
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    steps = []
    for apart in (False, True):
        model = bench.random_model(bench.TINY)
        steps.append(train_step.our_step(model, prompts, 3, 2, apart))
    assert steps[1]["tokens trained"] == 3 * (6 + 4) + 6 * 1  # the last token is no input
    assert steps[0]["tokens trained"] < steps[1]["tokens trained"] - 3 * 4
    sampler = Sampler(bench.random_model(bench.TINY), max_tokens=512)
    samples = train_step.rollout(sampler, prompts, 3, 2)
    assert [sum(sample.mask) for sample in samples] == [2] * 6
