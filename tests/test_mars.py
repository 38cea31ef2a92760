"""The program as its users run it: a run, resume, kill, ranks, arms, bad input, eval and ask.

A small, briefly trained base model.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from plumbing.statistics import average_interval, wilson_interval
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO = Path(__file__).parent.parent
SMALL = [
    "--questions",
    "4",
    "--group",
    "4",
    "--eval_questions",
    "6",
    "--eval_every",
    "2",
    "--threads",
    "1",
    "--kv_tokens",
    "16384",
]
TIMES = {"seconds_rollout", "seconds_sync", "seconds_train", "seconds_eval", "tokens_per_second"}


def command(*arguments, ranks: int = 1) -> list[str]:
    start = (
        [sys.executable]
        if ranks == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
        ]
    )
    return [*start, str(REPO / "mars.py"), *map(str, arguments)]


def mars(*arguments, ranks: int = 1, cwd, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, ranks=ranks),
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )


def metrics(run: Path) -> list[dict]:
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMES}
        for line in open(run / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A whole run of 4 steps; the reference for resume and kill."""
    folder = tmp_path_factory.mktemp("runs")
    done = mars(
        "--model", base, "--steps", 4, "--save_every", 2, "--name", "whole", *SMALL, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_leaves_what_it_promises(trained):
    folder, done = trained
    run = folder / "runs" / "whole"
    lines = [json.loads(line) for line in open(run / "metrics.jsonl")]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    needed = {
        "step",
        "reward",
        "calls_per_question",
        "sys1_samples",
        "sys1_tokens",
        "sys2_tokens",
        "sys1_entropy",
        "sys2_entropy",
        "malformed_share",
        "tool_error_share",
        "zero_variance_share",
        "clip_share",
        "mismatch_kl",
        "grad_norm",
        "seconds_rollout",
        "seconds_train",
        "tokens_per_second",
    }
    assert all(needed <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "eval_accuracy" in line] == [0, 2, 3] and lines[3][
        "eval_step"
    ] == 4
    assert all(line["mismatch_kl"] < 1e-8 for line in lines), (
        "the trainer's distribution is the sampler's"
    )
    for name in (
        "config.json",
        "curves.png",
        "trajectories.html",
        "checkpoint/model.safetensors",
        "rollouts/step_3.jsonl",
    ):
        assert (run / name).stat().st_size > 0, name
    for name in ("curves.png", "trajectories.html", "checkpoint"):
        assert str(Path("runs/whole") / name) in done.stdout
    assert "held-out accuracy" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    tokens = AutoTokenizer.from_pretrained(run / "checkpoint")(
        "<s2> when was ada baker born ? <eot>", return_tensors="pt"
    )
    assert model.generate(tokens["input_ids"], max_new_tokens=3).shape[1] > 8


def test_resume_gives_the_numbers_of_an_uninterrupted_run(trained, base):
    folder, _ = trained
    options = ["--model", base, "--save_every", 2, "--name", "halves", *SMALL]
    assert mars(*options, "--steps", 2, cwd=folder).returncode == 0
    again = mars(*options, "--steps", 4, "--resume", cwd=folder)
    assert again.returncode == 0, again.stderr
    whole, halves = metrics(folder / "runs/whole"), metrics(folder / "runs/halves")
    for a, b in zip(
        whole, halves, strict=True
    ):  # step 1 was the first half's last: it carries an end result
        assert all(
            a.get(key) == b.get(key) for key in a.keys() | b.keys() if not key.startswith("eval_")
        )
    assert whole[2:] == halves[2:]
    weights = [
        AutoModelForCausalLM.from_pretrained(folder / "runs" / name / "checkpoint").state_dict()
        for name in ("whole", "halves")
    ]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def test_kill_at_any_moment_loses_at_most_the_steps_since_the_last_state(trained, base):
    """Kills a run whenever it has just written something; the end is the uninterrupted one."""
    folder, _ = trained
    run, options = (
        folder / "runs" / "killed",
        ["--model", base, "--save_every", 1, "--name", "killed", "--steps", 4, *SMALL],
    )
    for attempt in range(3):
        resume = ["--resume"] if run.exists() else []
        child = subprocess.Popen(
            command(*options, *resume),
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        before = (run / "metrics.jsonl").stat().st_size if resume else 0
        deadline = time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline:
            wrote = (run / "metrics.jsonl").exists() and (
                run / "metrics.jsonl"
            ).stat().st_size != before
            saving = any((run / "state").glob(".*.writing"))
            if saving if attempt == 1 else wrote:  # once in the middle of writing a state
                break
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        states = (
            [path for path in (run / "state").glob("step_*")] if (run / "state").exists() else []
        )
        for state in states:
            assert torch.load(state / "optimizer.pt") and AutoModelForCausalLM.from_pretrained(
                state / "model"
            )
        if (run / "checkpoint").exists():
            assert AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    last = mars(*options, "--resume", cwd=folder)
    assert last.returncode == 0, last.stderr
    assert metrics(run) == metrics(folder / "runs/whole")


# A stand-in for trackio that writes down what it receives and fails at step 3.
FAKE_TRACKER = """
import json, os

class Run:
    def log(self, numbers, step):
        if step == 3:
            raise ConnectionError("the network is away")
        put([step, numbers])

    def finish(self):
        put("finish")

def put(what):
    with open(os.environ["TRACKED"], "a") as file:
        file.write(json.dumps(what) + "\\n")

def init(**options):
    put(options)
    return Run()
"""


def tracking(folder: Path) -> dict[str, str]:
    """An environment in which trackio is the stand-in, which writes into folder/tracked."""
    (folder / "fake").mkdir()
    (folder / "fake/trackio.py").write_text(FAKE_TRACKER)
    return {"PYTHONPATH": str(folder / "fake"), "TRACKED": str(folder / "tracked")}


def received(folder: Path) -> list:
    return [json.loads(line) for line in open(folder / "tracked")]


def test_two_ranks_walk_the_same_path(trained, base, tmp_path):
    """torchrun with 2 processes: the same rollouts; loss and gradient equal to rounding."""
    folder, _ = trained
    done = mars(
        "--model",
        base,
        "--steps",
        1,
        "--save_every",
        2,
        "--name",
        "ranks",
        "--track",
        "trackio",
        *SMALL,
        ranks=2,
        cwd=folder,
        **tracking(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    one, two = metrics(folder / "runs/whole")[0], metrics(folder / "runs/ranks")[0]
    for key in (
        "reward",
        "calls_per_question",
        "sys1_samples",
        "sys1_tokens",
        "sys2_tokens",
        "trained_tokens",
        "zero_variance_share",
    ):
        assert one[key] == two[key], key
    for key in ("loss", "grad_norm", "sys1_entropy", "sys2_entropy"):
        assert one[key] == pytest.approx(two[key], abs=1e-5), key
    records = [json.loads(line) for line in open(folder / "runs/ranks/rollouts/step_0.jsonl")]
    assert sum(r["split"] == "train" for r in records) == 16, (
        "rank 0 writes the trajectories of all ranks"
    )
    _, (step, numbers), end = received(tmp_path)  # from rank 0 alone
    assert step == 0 and end == "finish" and numbers["reward"] == two["reward"]


def test_refills_are_the_same_on_two_ranks_and_after_a_resume(base, tmp_path):
    options = ["--model", base, "--refill", 2, "--save_every", 1, *SMALL]
    for name, ranks, steps in (("one", 1, [2]), ("two", 2, [2]), ("halves", 1, [1, 2])):
        for count in steps:
            more = ["--resume"] if count == 2 and len(steps) == 2 else []
            done = mars(
                *options, "--name", name, "--steps", count, *more, ranks=ranks, cwd=tmp_path
            )
            assert done.returncode == 0, done.stderr
    one, two, halves = [metrics(tmp_path / "runs" / name) for name in ("one", "two", "halves")]
    assert sum(line["replaced_questions"] for line in one) > 0
    for whole, ranks, resumed in zip(one, two, halves, strict=True):
        for key in ("replaced_questions", "sys2_samples", "reward", "trained_tokens"):
            assert whole[key] == ranks[key], key
        assert whole["sys2_samples"] == 16 + 4 * whole["replaced_questions"]
        for key in whole:
            if not key.startswith("eval_"):
                assert whole[key] == resumed[key], key
    lines = (tmp_path / "runs/one/rollouts/step_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if json.loads(line)["split"] == "train"]
    assert len(records) == one[0]["sys2_samples"]
    again = {r["question_id"] for r in records if "refill" in r["question_id"]}
    assert len(again) == one[0]["replaced_questions"]


@pytest.mark.parametrize(
    "arm",
    [
        ["--system1", "frozen"],
        ["--system1", "none"],
        ["--balance", "none"],
        ["--balance", "advantage"],
        ["--advantage", "mean"],
        ["--loss_mean", "token"],
        ["--refill", "1"],
        ["--no-packing"],
        ["--no-purpose"],
        ["--tools", "search,scholar"],
        ["--shared_group"],
        ["--inner_steps", "2"],
        ["--kl_beta", "0.01"],
        ["--is", "token", "--importance_cap", "2"],
    ],
    ids=" ".join,
)
def test_arms(base, tmp_path, monkeypatch, arm):
    import mars as program

    monkeypatch.chdir(tmp_path)
    assert (
        program.main(
            [
                "--model",
                str(base),
                "--name",
                "arm",
                "--steps",
                "1",
                *SMALL[:4],
                "--eval_questions",
                "2",
                "--threads",
                "1",
                "--kv_tokens",
                "16384",
                *arm,
            ]
        )
        == 0
    )
    (line,) = metrics(tmp_path / "runs/arm")
    records = [json.loads(text) for text in open(tmp_path / "runs/arm/rollouts/step_0.jsonl")]
    chunks = [
        chunk
        for r in records
        if r["split"] == "train"
        for turn in r["turns"]
        for chunk in turn["chunks"]
    ]
    if arm == ["--system1", "none"]:
        assert line["sys1_samples"] == 0
    if arm == ["--system1", "frozen"]:
        assert not any(chunk["drawn"] for chunk in chunks)
    if arm == ["--balance", "none"]:
        assert all(chunk["drawn"] == 1 for chunk in chunks)
    if arm[0] == "--no-packing":
        assert all(len(chunk["documents"]) == 1 for chunk in chunks)
    if arm[0] == "--shared_group":
        assert all(
            chunk["advantage"] == r["advantage"]
            for r in records
            if r["split"] == "train"
            for turn in r["turns"]
            for chunk in turn["chunks"]
        )
    if arm[0] == "--tools":
        assert "python" not in {
            turn["call"]["tool"] for r in records for turn in r["turns"] if turn["call"]
        }


BAD = {
    "unknown option": (["--learning_rate", "1"], "unrecognized"),
    "ill-typed": (["--lr", "fast"], "--lr"),
    "not a choice": (["--system1", "maybe"], "--system1"),
    "contradiction": (["--inner_steps", "9", "--questions", "4"], "--inner_steps"),
    "no group": (["--group", "1"], "--group"),
    "a nucleus of nothing": (["--top_p", "0"], "--top_p"),
    "an old spelling": (["--rows", "8"], "--max_sequences"),
    "an old boolean": (["--packing", "off"], "--no-packing"),
    "what was a boolean": (["--no-balance"], "uniform, advantage or none"),
    "weights that KL lacks": (["--balance", "advantage", "--kl_beta", "0.1"], "--kl_beta"),
    "less than no refill": (["--refill", "-1"], "--refill"),
    "infinitely hot": (["--temperature", "inf"], "--temperature"),
    "no temperature": (["--temperature", "nan"], "--temperature"),
    "hardly warm": (["--temperature", "1e-40"], "--temperature"),
    "hosts blocked where nothing is asked": (["--block", "hf.co"], "--block"),
    "held-out questions without own ones": (["--eval_data", "some.jsonl"], "--eval_data"),
    "pages of no search": (["--pages", "jina"], "--pages"),
    "no tool at all": (["--tools", ","], "--tools"),
    "a name that is a path": (["--name", "../x"], "--name"),
    "a name with NUL": (["--name", "a\0b"], "--name"),
    "a name of 300 letters": (["--name", "x" * 300], "--name"),
    "pages that hold no context": (
        ["--kv_tokens", "95", "--sys2_context", "95", "--max_turns", "40"],
        "--kv_tokens",
    ),
    "a seed beyond all numbers": (["--seed", "9" * 23], "--seed"),
    "a negative seed": (["--seed", "-1"], "--seed"),
    "a rate beyond all numbers": (["--lr", "1e300"], "--lr"),
    "too many sequences": (["--max_sequences", "2000000000"], "--max_sequences"),
    "ask with a training option": (["ask", "runs/x", "who ?", "--lr", "1"], "--lr"),
    "ask several times": (["ask", "runs/x", "who ?", "--eval_samples", "2"], "--eval_samples"),
    "no attempt": (["--eval_samples", "0"], "--eval_samples"),
    "a tracker of no kind": (["--track", "paper"], "--track"),
    "a tracker that is not installed": (["--track", "wandb"], "pip install wandb"),
    "eval with a tracker": (["eval", "runs/x", "--track", "wandb"], "--track"),
    "several attempts of a run": (["--eval_samples", "2"], "--eval_samples is for"),
    "eval with another model": (["eval", "runs/x", "--model", "y"], "--model"),
    "negative": (["--lr", "-1"], "--lr"),
    "not a number": (["--lr", "nan"], "--lr"),
    "unknown tool": (["--tools", "search,fax"], "fax"),
    "pool too small": (["--kv_tokens", "100"], "--kv_tokens"),
    "no turn for a tool": (["--max_turns", "1"], "--max_turns"),
    "no room for documents": (["--sys1_prompt", "17"], "--sys1_prompt"),
    "nothing held out": (["--eval_questions", "0"], "--eval_questions"),
    "missing questions": (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    "empty questions": (["--data", "empty.jsonl"], "empty.jsonl"),
    "missing model": (["--model", "no/such/model"], "no/such/model"),
    "not a model": (["--model", "empty_folder"], "empty_folder"),
    "missing documents": (["--docs", "nowhere"], "nowhere"),
    "unwritable": (["--runs", "file/below"], "file"),
    "nothing to resume": (["--resume", "--name", "never"], "never"),
    "resume without a name": (["--resume"], "--name"),
    "no such checkpoint": (["eval", "runs/never"], "runs/never"),
    "ask without a question": (["ask", "runs/never"], "question"),
    "no GPU": (["--device", "cuda"], "CUDA"),
    "shards of one process": (["--fsdp"], "torchrun"),
    "no key": (["--data", "some.jsonl", "--search", "serper"], "SERPER_API_KEY"),
    "no judge": (["--data", "some.jsonl", "--grader", "judge"], "MARS_JUDGE_URL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_exit_2_and_nothing_written(
    base, tmp_path, monkeypatch, capsys, name
):
    import mars as program

    monkeypatch.setitem(sys.modules, "wandb", None)
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments, word = BAD[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty_folder").mkdir()
    lines = [
        json.dumps({"question": f"when was ada baker {i} born ?", "answer": str(i)})
        for i in range(40)
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    before = sorted(p for p in tmp_path.rglob("*") if ".cache" not in p.parts)
    if "--model" not in arguments and arguments[0] not in ("eval", "ask"):
        arguments = [*arguments, "--model", str(base)]
    if "--steps" not in arguments and arguments[0] not in ("eval", "ask"):
        arguments = ["--steps", "1", "--eval_questions", "2", *arguments]
    try:
        code = program.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err.strip()
    assert code == 2 and len(error.splitlines()) == 1 and word in error, error
    assert sorted(p for p in tmp_path.rglob("*") if ".cache" not in p.parts) == before


def test_the_papers_preset_lists_everything_that_is_missing_before_any_work(
    base, tmp_path, monkeypatch, capsys
):
    """Key, reader's key, judge, questions, GPUs: one list, nothing written.

    Its values are the paper's, as far as they are known.
    """
    import mars as program
    from mars import PAPER

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: one entry fewer")
    for name in ("SERPER_API_KEY", "MARS_JUDGE_URL", "MARS_JUDGE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert (
        program.main(["--preset", "paper", "--model", str(base), "--tools", "search,scholar"]) == 2
    )
    said = capsys.readouterr().err
    for missing in ("SERPER_API_KEY", "MARS_JUDGE_URL", "--data", "GPU"):
        assert missing in said, missing
    assert (
        "(1)" in said
        and len(said.strip().splitlines()) == 1
        and not [p for p in tmp_path.iterdir() if p.name != ".cache"]
    )
    assert (PAPER["questions"], PAPER["group"], PAPER["max_turns"], PAPER["lr"]) == (
        32,
        16,
        10,
        1e-6,
    )
    assert (PAPER["sys1_prompt"], PAPER["sys1_response"], PAPER["sys2_context"]) == (
        23552,
        8192,
        3072 + 28672,
    )


def test_a_checkpoint_of_another_model_is_refused(base, tmp_path, monkeypatch, capsys):
    """No chat template and not the toy's language; a tokenizer that is larger than its model."""
    from test_chat import QWEN3, tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import mars as program

    monkeypatch.chdir(tmp_path)
    words = tokenizer(QWEN3)
    shape = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    for folder, vocabulary in (("plain", len(words)), ("small", 50)):
        Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **shape)).save_pretrained(folder)
        words.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained("small")
    words.chat_template = None
    words.save_pretrained("plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    for folder, word in (("plain", "chat template"), ("small", "belong together")):
        assert (
            program.main(
                ["eval", folder, "--data", "toy", "--eval_questions", "2", "--runs", "out"]
            )
            == 2
        )
        assert word in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_resume_with_changed_settings_or_over_an_existing_run_is_refused(trained, base):
    folder, _ = trained
    changed = mars(
        "--model",
        base,
        "--name",
        "whole",
        "--resume",
        "--steps",
        5,
        *SMALL,
        "--lr",
        0.5,
        cwd=folder,
    )
    assert changed.returncode == 2 and "lr (0.0005 -> 0.5)" in changed.stderr
    again = mars("--model", base, "--name", "whole", "--steps", 5, *SMALL, cwd=folder)
    assert again.returncode == 2 and "--resume" in again.stderr
    assert len(metrics(folder / "runs/whole")) == 4


def test_resume_may_change_what_a_run_that_broke_off_needs(trained, base):
    """A finished run is left as it is: nothing of it is deleted or written again."""
    folder, _ = trained
    run = folder / "runs" / "finished"
    shutil.copytree(folder / "runs/whole", run, symlinks=True)
    before = {path: path.read_bytes() for path in run.rglob("*.json*") if path.is_file()}
    options = ["--model", base, "--name", "finished", "--save_every", 2, *SMALL, "--resume"]
    fewer = mars(*options, "--steps", 3, cwd=folder)
    assert fewer.returncode == 2 and "has done 4 steps already" in fewer.stderr
    smaller = ["--micro_tokens", 64, "--kv_tokens", 8192, "--max_sequences", 8]
    again = mars(*options, "--steps", 4, *smaller, "--max_tool_error_share", 1, cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "after 4 steps" in again.stdout
    assert before == {path: path.read_bytes() for path in run.rglob("*.json*") if path.is_file()}
    (run / "metrics.jsonl").write_text("")
    assert mars(*options, "--steps", 4, cwd=folder).returncode == 0, "no metrics: nothing is said"


def test_damaged_files_of_a_run_are_one_sentence(trained, base, monkeypatch, capsys):
    import mars as program

    folder, _ = trained
    run = folder / "runs" / "damaged"
    shutil.copytree(folder / "runs/whole", run, symlinks=True)
    (run / "rollouts" / "step_backup.jsonl").write_text("stray")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"no": "step"}\n{"step": 3, "cut')
    options = ["--model", base, "--name", "damaged", "--save_every", 1, *SMALL, "--resume"]
    done = mars(*options, "--steps", 5, cwd=folder)
    assert done.returncode == 2 and "save_every" not in done.stderr or done.returncode == 0
    for content in ("", "[1]", '{"seed": ', "\xff"):
        (run / "config.json").write_bytes(content.encode("latin-1"))
        for command_line in (options, ["eval", "runs/damaged"]):
            monkeypatch.chdir(folder)
            capsys.readouterr()
            code = program.main([*map(str, command_line)])
            said = capsys.readouterr().err
            assert code == 2 and len(said.strip().splitlines()) == 1, said


def test_two_starts_at_once_never_share_a_folder(base, tmp_path):
    """Each either gets a folder of its own or is told that the name is taken."""
    options = ["--model", base, "--steps", 1, "--save_every", 1, *SMALL]
    both = [
        subprocess.Popen(
            command(*options, *name),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for name in (["--name", "same"], ["--name", "same"], [], [])
    ]
    ends = [(child.communicate(timeout=200)[1], child.returncode) for child in both]
    named = sorted(code for _, code in ends[:2])
    assert named == [0, 2] and any("exists" in said for said, _ in ends[:2]), ends
    assert [code for _, code in ends[2:]] == [0, 0], ends
    assert len(metrics(tmp_path / "runs/same")) == 1
    others = [run for run in (tmp_path / "runs").iterdir() if run.name != "same"]
    assert len(others) == 2 and all(len(metrics(run)) == 1 for run in others)


def test_eval_and_ask(trained):
    folder, _ = trained
    for checkpoint in ("runs/whole", "runs/whole/checkpoint"):
        done = mars("eval", checkpoint, "--eval_questions", 6, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "accuracy (95 %)" in done.stdout and "toy" in done.stdout
    out = folder / "runs" / "eval-whole"
    predictions = json.loads((out / "predictions.json").read_text())
    assert len(predictions) == 6 and all(
        {"model", "response"} <= p.keys() for p in predictions.values()
    )
    assert (out / "trajectories.html").exists() and json.loads((out / "table.json").read_text())[
        -1
    ]["questions"] == 6
    done = mars("ask", "runs/whole", "when was ada baker born ?", cwd=folder)
    assert done.returncode == 0 and "system 2 |" in done.stdout and "answer |" in done.stdout
    assert (folder / "runs/whole/ask.html").exists()
    done = mars("ask", "runs/whole", "where is ada ? " * 60, cwd=folder)
    assert done.returncode == 2 and "leaves no room in --sys2_context" in done.stderr
    done = mars("eval", "runs/whole", ranks=2, cwd=folder)
    assert done.returncode and "without torchrun" in done.stderr


def test_a_tracked_run_goes_on_without_its_tracker(trained, base, tmp_path):
    """Resumed in the same tracker run, and the tracker changes no number of the run."""
    options = ["--model", base, "--save_every", 2, "--name", "whole", *SMALL, "--track", "trackio"]
    environment = tracking(tmp_path)
    for more in (["--steps", 2], ["--steps", 4, "--resume"]):
        done = mars(*options, *more, cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("--track trackio failed (the network is away)") == 1
    first, *firsts, end, again, third = received(tmp_path)
    assert end == "finish" and first["name"] == again["name"]
    lines = [json.loads(line) for line in open(tmp_path / "runs/whole/metrics.jsonl")]
    for (step, numbers), line in zip([*firsts, third], lines[:3], strict=True):
        line = {key: value for key, value in line.items() if value is not None}
        assert numbers | {"step": step} == line
    for a, b in zip(metrics(trained[0] / "runs/whole"), metrics(tmp_path / "runs/whole")):
        assert all(a.get(k) == b.get(k) for k in a.keys() | b.keys() if not k.startswith("eval_"))


def test_several_attempts_at_each_question(trained):
    """The first is the one that a single evaluation makes; the table's numbers are those of all."""
    folder, _ = trained
    asked = ["--eval_questions", 12]
    for name, more in (("once", []), ("thrice", ["--eval_samples", 3])):
        done = mars("eval", "runs/whole", "--name", name, *asked, *more, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert "avg@3 (95 %)" in done.stdout and "pass@3 (95 %)" in done.stdout
    assert "accuracy" not in done.stdout
    once = json.loads((folder / "runs/once/predictions.json").read_text())
    thrice = json.loads((folder / "runs/thrice/predictions.json").read_text())
    further = {name: prediction.pop("further") for name, prediction in thrice.items()}
    assert thrice == once
    assert all(len(predictions) == 2 for predictions in further.values())

    rewards = {}
    for line in open(folder / "runs/thrice/rollouts/step_0.jsonl"):
        record = json.loads(line)
        rewards.setdefault(record["question_id"], {})[record["trajectory"]] = record["reward"]
        answers = [prediction["answer"] for prediction in further[record["question_id"]]]
        answers.insert(0, once[record["question_id"]]["answer"])
        assert record["answer"] == answers[record["trajectory"]]
    rewards = [list(attempts.values()) for attempts in rewards.values()]
    assert len(rewards) == 12 and {len(attempts) for attempts in rewards} == {3}
    *parts, row = json.loads((folder / "runs/thrice/table.json").read_text())
    assert sum(part["questions"] for part in parts) == row["questions"] == 12
    assert row["attempts"] == 3
    assert row["accuracy"] == pytest.approx(row["pass_at"]["1"])
    assert row["accuracy"] == sum(map(sum, rewards)) / 36
    assert row["pass_at"]["3"] == sum(map(max, rewards)) / 12
    right = [int(sum(attempts)) for attempts in rewards]
    assert len(set(right)) > 1, "the questions differ, so that the intervals are worth a look"
    assert (row["low"], row["high"]) == average_interval(right, 3)
    assert (row["pass_low"], row["pass_high"]) == wilson_interval(sum(map(bool, right)), 12)

    row = json.loads((folder / "runs/once/table.json").read_text())[-1]
    assert not {"attempts", "pass_at"} & row.keys()
    first = sum(attempts[0] for attempts in rewards)
    assert (row["low"], row["high"]) == wilson_interval(int(first), 12)
    greedy = mars("eval", "runs/whole", "--temperature", 0, "--eval_samples", 2, cwd=folder)
    assert greedy.returncode == 2 and "at --temperature 0 all attempts" in greedy.stderr


def test_ones_own_questions_and_documents(trained, base):
    """--data and --docs: another corpus, other questions, the same program."""
    folder, _ = trained
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("ada baker born 1968 . ada baker enjoys chess .")
    (folder / "own.jsonl").write_text(
        "\n".join(
            json.dumps({"question": f"when was {'ada ' * i}baker born ?", "answer": "1968"})
            for i in range(1, 13)
        )
    )
    done = mars(
        "--model",
        base,
        "--data",
        "own.jsonl",
        "--docs",
        "notes",
        "--name",
        "own",
        "--steps",
        1,
        *SMALL,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in open(folder / "runs/own/rollouts/step_0.jsonl")]
    found = {
        d["id"]
        for r in records
        for turn in r["turns"]
        for d in turn["documents"]
        if turn["call"]["tool"] != "python"
    }
    assert all(name.startswith("a.txt") for name in found) and found
    trained_on, held_out = (
        {r["question_id"] for r in records if r["split"] == split} for split in ("train", "eval")
    )
    done = mars(
        "eval", "runs/own", cwd=folder
    )  # on the run's own held-out questions, not on what it was trained on
    assert done.returncode == 0, done.stderr
    predicted = set(json.loads((folder / "runs/eval-own/predictions.json").read_text()))
    assert len(predicted) == 6 and held_out <= predicted and not trained_on & predicted
    assert mars("ask", "runs/own", "when was ada baker born ?", cwd=folder).returncode == 0
    for more in (["--eval_questions", 7], ["--eval_questions", 3], ["--seed", 1]):
        refused = mars("eval", "runs/own", *more, cwd=folder)
        assert refused.returncode == 2 and "trained on" in refused.stderr, more
    refused = mars("eval", "runs/own", "--data", "own.jsonl", cwd=folder)
    assert refused.returncode == 2 and "was trained on 6 of these 12" in refused.stderr
    lines = (folder / "own.jsonl").read_text().split("\n")
    (folder / "own.jsonl").write_text("\n".join(reversed(lines)))  # another draw from the same
    refused = mars("eval", "runs/own", cwd=folder)
    assert refused.returncode == 2 and "was trained on" in refused.stderr
    (folder / "runs/own/questions.json").write_text('{"trained": null}')
    refused = mars("eval", "runs/own", cwd=folder)
    assert refused.returncode == 2 and "questions.json is damaged" in refused.stderr
    assert not (folder / "runs" / "eval-own-2").exists()


def test_a_chat_model_trains_answers_and_is_evaluated(tmp_path, monkeypatch, capsys):
    """Any chat model, one's own questions and documents.

    Random weights: every step is malformed, and nothing breaks.
    """
    from test_chat import QWEN3, tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import mars as program

    monkeypatch.chdir(tmp_path)
    words = tokenizer(QWEN3)
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
        )
    ).save_pretrained("chat")
    words.save_pretrained("chat")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("Ada Baker was born in 1968.")
    (tmp_path / "own.jsonl").write_text(
        "\n".join(
            json.dumps({"question": f"Who is number {i}?", "answer": "Ada"}) for i in range(12)
        )
    )
    limits = [
        "--sys2_context",
        "3000",
        "--step_tokens",
        "24",
        "--answer_tokens",
        "16",
        "--sys1_prompt",
        "1500",
        "--sys1_response",
        "16",
        "--max_turns",
        "3",
        "--data",
        "own.jsonl",
        "--docs",
        "notes",
        "--kv_tokens",
        "60000",
    ]
    assert (
        program.main(["--model", "chat", "--name", "chat", "--steps", "1", *SMALL[:-2], *limits])
        == 0
    )
    (line,) = metrics(tmp_path / "runs/chat")
    assert line["malformed_share"] > 0.5 and line["mismatch_kl"] < 1e-8
    assert program.main(["eval", "chat", *limits[:-2], "--kv_tokens", "60000"]) == 0
    assert (
        program.main(
            [
                "ask",
                "chat",
                "Who is Ada Baker?",
                "--step_tokens",
                "24",
                "--answer_tokens",
                "16",
                "--docs",
                "notes",
            ]
        )
        == 0
    )
    assert (
        "page |" in capsys.readouterr().out
        and len(json.loads((tmp_path / "runs/eval-chat/predictions.json").read_text())) == 12
    )


def test_too_many_failing_tools_stop_the_run_with_its_state_whole(
    base, tmp_path, monkeypatch, capsys
):
    import mars as program
    import trainer
    from plumbing import surroundings
    from tools import ToolError

    monkeypatch.chdir(tmp_path)
    arguments = [
        "--model",
        str(base),
        "--name",
        "broken",
        "--save_every",
        "1",
        *SMALL,
        "--eval_questions",
        "2",
    ]
    assert program.main([*arguments, "--steps", "1"]) == 0

    def broken(query):
        raise ToolError("no route to the service")

    monkeypatch.setattr(surroundings.search, "local", lambda *a: broken)
    assert program.main([*arguments, "--steps", "3", "--resume"]) == 2
    assert "of the tool calls of step 1 failed" in capsys.readouterr().err
    line = metrics(tmp_path / "runs/broken")[1]
    assert line["tool_error_share"] > 0.5 and line["empty_share"] == 0
    assert trainer.newest(tmp_path / "runs/broken")[0] == 1


def test_tools_that_fail_in_the_evaluation_stop_the_run_too(base, tmp_path, monkeypatch, capsys):
    """Else an expired key would look like a low held-out accuracy."""
    import mars as program
    from plumbing import surroundings
    from tools import ToolError

    monkeypatch.chdir(tmp_path)

    def broken(query):
        raise ToolError("no route to the service")

    real = surroundings.make_call

    def make_call(config, split, name):
        return real(config, split, name) if split == "train" else broken

    monkeypatch.setattr(surroundings, "make_call", make_call)
    assert program.main(["--model", str(base), "--name", "eval", "--steps", "2", *SMALL]) == 2
    assert "of the tool calls of step 0 failed" in capsys.readouterr().err
    (line,) = metrics(tmp_path / "runs/eval")
    assert line["eval_tool_error_share"] > 0.5 > line["tool_error_share"]


def test_steps_without_a_finite_gradient_are_skipped_and_three_stop_the_run(
    base, tmp_path, monkeypatch, capsys
):
    import mars as program

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "plumbing.build.grading.grader",
        lambda name: lambda question, answer: float(len(answer) % 2),
    )  # mixed rewards
    import trainer

    real = trainer.gradient_norm
    monkeypatch.setattr(
        trainer, "gradient_norm", lambda policy, limit: real(policy, limit) * float("nan")
    )
    assert (
        program.main(
            ["--model", str(base), "--name", "nan", "--steps", "5", "--save_every", "1", *SMALL]
        )
        == 2
    )
    said = capsys.readouterr()
    assert [line["skipped_steps"] for line in metrics(tmp_path / "runs/nan")] == [1, 1]
    assert (
        said.out.count("step skipped") == 3
        and "sys2 " in said.out
        and "three steps in a row" in said.err
    )
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/nan/checkpoint").state_dict()
    start = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert all(torch.equal(state[k], start[k]) for k in start), "a skipped step moves no weight"


def test_a_judge_that_is_away_stops_the_run(base, tmp_path, monkeypatch, capsys):
    """Else it would train on nothing, and its failures would look like wrong answers."""
    import mars as program

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARS_JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("MARS_JUDGE_MODEL", "x")
    monkeypatch.setattr("tools.web.time.sleep", lambda seconds: None)
    arguments = ["--model", str(base), "--name", "away", "--steps", "2", *SMALL]
    assert program.main([*arguments, "--grader", "judge"]) == 2
    said = capsys.readouterr()
    assert "of the judgements of step 0 failed" in said.err and "could not be judged" in said.out
    (line,) = metrics(tmp_path / "runs/away")
    assert line["judge_failures"] > 0 and line["eval_judge_failures"] > 0


def test_a_tool_that_hangs_is_given_up(base, tmp_path, monkeypatch, capsys):
    import mars as program
    from plumbing import surroundings

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(surroundings.search, "local", lambda *a: lambda query: time.sleep(1000))
    arguments = ["--model", str(base), "--name", "hangs", "--steps", "1", *SMALL]
    start = time.monotonic()
    assert program.main([*arguments, "--eval_questions", "2", "--tool_seconds", "1"]) == 2
    assert "of the tool calls of step 0 failed" in capsys.readouterr().err
    assert time.monotonic() - start < 60


def test_help_shows_every_options_reason():
    done = mars("--help", cwd=REPO)
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    for text in ("--balance", "how G of System 1's M are drawn", "seed of three slipped late"):
        assert text in said, text


def test_importing_the_program_draws_nothing():
    """Matplotlib and bm25s are loaded by who needs them."""
    check = "import sys, mars; print(sorted({'matplotlib', 'bm25s'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_option_has_its_reason_behind_it():
    """The help is read from the source: a reason that the formatter moved would be lost."""
    import dataclasses

    import config
    import mars as program

    names = {field.name for field in dataclasses.fields(program.MarsConfig)}
    assert config.comments(program.MarsConfig).keys() == names


def test_a_run_whose_states_are_gone_is_not_begun_anew(trained, base):
    """Its results would be wiped; another method's run and an evaluation are not resumed either."""
    folder, _ = trained
    run = folder / "runs" / "stateless"
    shutil.copytree(folder / "runs/whole", run, symlinks=True)
    options = ["--model", base, "--name", "stateless", "--save_every", 2, *SMALL, "--steps", 6]
    before = (run / "metrics.jsonl").read_bytes()
    (run / "method.json").write_text(json.dumps({"name": "another", "roles": {}}))
    done = mars(*options, "--resume", cwd=folder)
    assert done.returncode == 2 and "method another" in done.stderr
    done = mars("eval", "runs/stateless", cwd=folder)
    assert done.returncode == 2 and "method another" in done.stderr
    (run / "method.json").unlink()
    shutil.rmtree(run / "state")
    done = mars(*options, "--resume", cwd=folder)
    assert done.returncode == 2 and "no whole state" in done.stderr
    (run / "table.json").write_text("[]")
    done = mars(*options, "--resume", cwd=folder)
    assert done.returncode == 2 and "is an evaluation" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before and (run / "rollouts").is_dir()


def test_claims_of_one_folder_never_overlap(tmp_path):
    """Processes claim and release the same folder as fast as they can: one holder at a time."""
    program = """
import os, sys, time
from pathlib import Path
from plumbing import claims
folder, log = Path(sys.argv[1]), open(sys.argv[2], "a")
end = time.monotonic() + 3
while time.monotonic() < end:
    claim = claims.claim_new(folder)
    if claim is None:
        continue
    os.write(log.fileno(), b"in\\n")
    os.write(log.fileno(), b"out\\n")
    claim.release()
"""
    command_line = [sys.executable, "-c", program, tmp_path / "runs" / "x", tmp_path / "log"]
    children = [subprocess.Popen(command_line, cwd=REPO) for _ in range(3)]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    log = (tmp_path / "log").read_text().split()
    assert log[::2] == ["in"] * (len(log) // 2) and log[1::2] == ["out"] * (len(log) // 2)
    assert len(log) > 20


def test_a_judge_that_is_away_is_measured_by_what_it_was_asked():
    """Attempts without an answer need no judge: they would hide that it is gone."""
    import dataclasses

    import mars
    from plumbing.metrics import rollout_metrics
    from rollout import Trajectory
    from tasks.questions import Question

    method = dataclasses.replace(mars.METHOD, roles={})
    question = Question("q", "who ?", ("x",), "test")

    def attempt(answer, reward):
        return Trajectory(question, 0, 0, answer=answer, reward=reward, ended="answer")

    attempts = [attempt("x", None), attempt(None, 0.0), attempt(None, 0.0), attempt(None, 0.0)]
    assert rollout_metrics(attempts, [], method, 1.0)["judge_failure_share"] == 1.0
    assert rollout_metrics([attempt("x", None)], [], method, 1.0)["reward"] is None
