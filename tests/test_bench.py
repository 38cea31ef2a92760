"""The benches that a CPU runs: tables of arms, peers in their own processes, forms that agree."""

import argparse
import json
import shutil
import sys
from dataclasses import asdict

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
from siblings import marsrl, matpo

# ---------------------------------------------------------------- common


def test_a_row_has_its_prediction_before_it_is_measured_and_keeps_a_failure(tmp_path):
    made = common.Bench("name", "the command", tmp_path / "new")
    seen = []

    def good():
        seen[:] = json.loads((tmp_path / "new" / "name.json").read_text())["rows"]
        return {"ms": 3.0}

    made.measure({"form": "good"}, good, {"ms": 2.0})
    made.measure({"form": "bad"}, lambda: {}["no such peer"])
    assert seen == [{"form": "good", "predicted ms": 2.0}]
    saved = json.loads((tmp_path / "new" / "name.json").read_text())
    assert saved["rows"][0] == seen[0] | {"ms": 3.0}
    assert "KeyError" in saved["rows"][1]["failed"] and saved["command"] == "the command"
    assert saved["rates"]["copy"] > 0 and saved["versions"]["torch"]
    lines = common.table(made.rows).splitlines()
    assert [len(line.split()) for line in lines[:2]] == [5, 3]


def test_the_first_round_is_not_counted(monkeypatch):
    calls = []
    monkeypatch.setattr(common, "clock", lambda: len(calls) ** 2)
    times = common.timed(lambda: calls.append(1), rounds=2)
    assert times == [3, 5]
    assert common.spread("s", times) == {"s, median": 4, "s, min": 3, "s, max": 5}


# ---------------------------------------------------------------- arms of the toys

CONFIGS = {
    "mars": (mars.MarsConfig, mars.METHOD),
    "matpo": (matpo.MatpoConfig, matpo.METHOD),
    "marsrl": (marsrl.METHOD.config, marsrl.METHOD),
}


@pytest.mark.parametrize("method", ablate.ARMS)
def test_every_arm_is_accepted_and_changes_something(method):
    config, made = CONFIGS[method]
    settings = []
    for changed in ablate.ARMS[method].values():
        given = parse(parser(config, ""), ["--steps", "9", *changed])
        settings.append(asdict(resolve(config, given, presets=made.presets)))
    assert settings[0] not in settings[1:]


def invent(runs, name: str, values: list[float]) -> None:
    """A run that was evaluated every two steps; its last line holds two evaluations."""
    keys = ablate.SCORES["mars"].values()
    *early, before, after = values
    lines = []
    for i, value in enumerate(early):
        lines.append({"step": 2 * i, "eval_step": 2 * i} | dict.fromkeys(keys, value))
    last = 2 * len(values) - 2
    lines.append({"step": last - 1, "eval_step_before": last - 2, "eval_step": last})
    lines[-1] |= {f"{key}_before": before for key in keys} | dict.fromkeys(keys, after)
    (runs / name).mkdir(parents=True)
    (runs / name / "config.json").write_text("{}")
    (runs / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_arms_are_compared_seed_by_seed_over_complete_runs(tmp_path):
    invent(tmp_path, "full-0", [0.1, 0.5, 0.9])
    invent(tmp_path, "full-1", [0.1, 0.3, 0.7])
    invent(tmp_path, "purpose_off-0", [0.1, 0.2, 0.4])
    invent(tmp_path, "purpose_off-1", [0.1, 0.2, 0.2])
    invent(tmp_path, "purpose_off-2", [0.1, 0.2])  # not at its end
    rows = ablate.summarise("mars", tmp_path, 4)
    assert [(row["arm"], list(row["seeds"])) for row in rows] == [
        ("full", [0, 1]),
        ("purpose_off", [0, 1]),
    ]
    # Averages after step 0: full 0.7 and 0.5, the arm 0.3 and 0.2.
    assert ablate.differences(rows[1], rows[0], "sampled") == pytest.approx([-0.4, -0.3])
    shown = ablate.report(rows, "mars", 4)
    assert "80.0 (70.0 … 90.0)" in shown and "-35.0 (-40.0 … -30.0)" in shown


def test_complete_runs_are_skipped_and_half_ones_resumed(tmp_path, monkeypatch):
    invent(tmp_path, "full-0", [0.1, 0.5, 0.9])
    invent(tmp_path, "replica-0", [0.1, 0.5])
    started = []
    monkeypatch.setattr(ablate.subprocess, "run", lambda line, **_: started.append(line[1:]))
    options = argparse.Namespace(runs=tmp_path, cache=tmp_path, seeds=[0], steps=4)
    options.arms = ["full", "replica", "purpose_off"]
    ablate.run_missing("mars", options)
    assert [line[line.index("--name") + 1] for line in started] == ["replica-0", "purpose_off-0"]
    assert [line[-1] for line in started] == ["--resume", "--no-purpose"]


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
    made = common.Bench(tiny=True)
    bench.mixed(made)
    ours, generate, *others = made.rows
    assert ours["rows equal"] == generate["rows equal"] == 4 and generate["× MARS"] > 0
    assert all("No module named" in row["failed"] for row in others)
    with pytest.raises(RuntimeError, match="generate.. missing"):  # a peer that fails says why
        peers.first("generate, left-padded", [sys.executable], 1, folder="none")


def test_weights_and_pages_are_counted_as_they_are_made():
    """Qwen3-8B has 8.19e9 weights and 144 KiB of keys and values a token; 0.6B 0.596e9."""
    for shape in (bench.QWEN3_8B, bench.QWEN3_0_6B):
        model = bench.random_model(shape, "meta")
        matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        embedding = shape["vocab_size"] * shape["hidden_size"]
        looked_up = 0 if shape["tie_word_embeddings"] else embedding
        assert bench.weight_bytes(shape) == 2 * (matrices - looked_up)
    assert bench.token_bytes(bench.QWEN3_8B) == 144 * 1024
    # Of two requests step 0 reads 3 + 5 tokens, step 1 the 6 of the second one.
    size = 2 * bench.weight_bytes(bench.TINY) + (8 + 6) * bench.token_bytes(bench.TINY)
    assert bench.bytes_of_requests(bench.TINY, [3, 5], [1, 2]) == size


# ---------------------------------------------------------------- the loss and the training step


def test_our_loss_is_nearer_to_float64_than_bf16_logits():
    made = common.Bench(tiny=True)
    loss.accuracy(made)
    ours, plain, trl, liger = made.rows
    for key in ("log-prob error, mean", "max"):
        assert ours[key] < 1e-5 < plain[key] < 0.1 and trl[key] > 1e-5
    assert ours["gradient error, hidden"] < 0.01 and ours["gradient error, weight"] < 0.01
    assert "liger" in liger.get("failed", "liger")


def test_operations_are_what_pytorch_counts():
    """Plain attention computes the upper half too. A small product makes the rotations."""
    shape = bench.TINY
    policy = trainer.Policy(bench.random_model(shape), bf16=False)
    samples = train_step.draw_samples(2, 1 / 64, shape["vocab_size"])
    packed = train_step.make_batches(samples, 128, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        train_step.packed_step(policy, packed)
    squares = sum(length**2 for batch in packed for length in batch.lengths)
    heads = shape["num_attention_heads"] * shape["head_dim"]
    masked = 6 * shape["num_hidden_layers"] * heads * squares
    counted = train_step.operations(shape, packed) + masked
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.001)


def test_a_form_with_another_loss_is_a_failure(monkeypatch):
    made = common.Bench(tiny=True)
    train_step.steps(made)
    assert not any("failed" in row for row in made.rows)
    assert made.rows[0]["tokens computed"] < made.rows[2]["tokens computed"]
    padded = train_step.padded_step

    def wrong(*given, **options):
        total, computed = padded(*given, **options)
        return total + 1e-3, computed

    monkeypatch.setattr(train_step, "padded_step", wrong)
    made = common.Bench(tiny=True)
    train_step.steps(made)
    assert ["another loss" in row.get("failed", "") for row in made.rows] == [False, True, True]


def test_samples_are_as_the_docstring_says():
    samples = train_step.draw_samples(200, 1 / 16, 128)
    for role, median, share in (("sys2", 400, 1 / 3), ("sys1", 120, 1 / 5)):
        lengths = sorted(len(s.tokens) for s in samples if s.role == role)
        trained = sum(sum(s.mask) for s in samples if s.role == role)
        assert len(lengths) == 200 and lengths[-1] <= 1984
        assert abs(lengths[100] / median - 1) < 0.2
        assert abs(trained / sum(lengths) / share - 1) < 0.05


def test_our_grpo_step_trains_what_it_sampled():
    model = bench.random_model(bench.TINY)
    before = model.lm_head.weight.clone()
    row = train_step.our_step(model, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]], group=3, new=2)
    assert row["tokens trained"] == 2 * 3 * 2 and not torch.equal(before, model.lm_head.weight)
