"""The program as its users run it: a run, resume, kill, ranks, arms, bad input, eval and ask.

A small, briefly trained base model. Runs are in this process, where it need not be killed.
"""

import dataclasses
import errno
import gc
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import launch, tiny
from helpers.chat import QWEN3, random_model, tokenizer
from loopback import GOOD
from torch.distributed import run as torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer

import driver
import mars
import train
import trainer
import warm_start
from plumbing import curves, evaluation, folders, logbook, outside
from tools import ToolError
from toy import world

# Of four questions the first and the third share an optimizer step, whatever rank they are on.
SMALL = "--questions 4 --inner_steps 2 --group 4 --eval_questions 6 --eval_every 2".split()
SMALL += ["--kv_tokens", "16384"]


def half(question, answer) -> float:
    """A grader of half of the answers: so weak a model learns from nothing else."""
    return float(zlib.crc32(answer.encode()) % 2)


def run(*arguments, method=mars.METHOD, **additions) -> int:
    """The exit code of a command."""
    try:
        return train.main(method, [str(argument) for argument in arguments], "", **additions)
    except SystemExit as stop:
        return stop.code


def metrics(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return [{key: line[key] for key in line if "second" not in key} for line in lines]


def records_of(folder: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in open(folder / "rollouts" / f"step_{step}.jsonl")]


def weights(folder: Path) -> dict:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def trained(base, draw, tmp_path_factory):
    """The folder of runs with a whole run of 4 steps; the reference for resume and kill."""
    runs = tmp_path_factory.mktemp("whole") / "runs"
    line = ["--model", base, "--runs", runs, "--steps", 4, "--name", "whole", *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", draw)
        assert run(*line, grade=half) == 0
    return runs


@pytest.fixture
def copied(trained, tmp_path):
    """A folder of runs with a copy of it that a test may change."""
    shutil.copytree(trained, tmp_path / "runs", symlinks=True)
    return tmp_path / "runs"


@pytest.fixture
def refused(capsys):
    """Checks that a command ends with exit code 2 and with a message, which holds these words."""

    def check(words: str, *arguments, **additions) -> str:
        assert run(*arguments, **additions) == 2
        message = capsys.readouterr().err
        assert words in message
        return message

    return check


def test_a_run_leaves_what_it_promises(trained):
    folder = trained / "whole"
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "eval_accuracy" in line] == [0, 2, 3]
    assert lines[3]["eval_step"] == 4
    assert all(line["mismatch_kl"] < 1e-8 for line in lines)
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "method.json", "metrics.jsonl", "report.md", "rollouts", "state"),
        *("curves.png", "diagnostics.png", "trajectories.html", "checkpoint", "best", ".lock"),
    }
    tokens = AutoTokenizer.from_pretrained(folder / "checkpoint")("<s2> who ?", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    assert model.generate(tokens["input_ids"], max_new_tokens=3).shape[1] > 3
    report = (folder / "report.md").read_text()
    for line, key in itertools.product((lines[0], lines[-1]), ("eval_accuracy", "eval_greedy")):
        assert f" {line[key]:.1%} (" in report
    assert sum(asked for _, asked in lines[-1]["eval_greedy_by_kind"].values()) == 6
    turns = [t for r in records_of(folder, 0) if r["split"] == "eval" for t in r["turns"]]
    read = {page["text"] for t in turns for page in t["documents"] if t["call"]["tool"] != "python"}
    told = sum(world.world("eval", 0).documents.values(), [])
    assert read and read <= {page.text for page in told}
    _, best = max((line["eval_accuracy"], line["eval_step"]) for line in lines[2:])
    assert (folder / "best").resolve().parent.name == f"step_{best:06d}"


def test_kill_at_any_moment_loses_at_most_the_steps_since_the_last_state(trained, base, tmp_path):
    """Kills a run whenever it has just written something; the end is the uninterrupted one."""
    folder = tmp_path / "killed"
    options = ["--model", base, "--runs", tmp_path, "--name", "killed", "--steps", 4, *SMALL]
    for attempt in range(2):
        (child,) = launch.start(__file__, *options, "--resume", log=tmp_path / "log")
        log = folder / "metrics.jsonl"
        before = log.stat().st_size if attempt else 0
        deadline = time.monotonic() + 200
        while child.is_alive() and time.monotonic() < deadline:
            wrote = log.exists() and log.stat().st_size != before
            saving = any((folder / "state").glob(".*.writing"))
            if saving if attempt else wrote:
                break
            time.sleep(0.002)
        child.kill()
        child.join()
        for state in (folder / "state").glob("step_*"):
            assert torch.load(state / "optimizer.pt") and weights(state / "model")
    assert run("--runs", tmp_path, "--name", "killed", "--resume", grade=half) == 0
    assert metrics(folder) == metrics(trained / "whole")
    assert same_weights(folder / "checkpoint", trained / "whole" / "checkpoint")
    assert not same_weights(folder / "checkpoint", base), "something was learned"


def test_ranks_wait_on_the_cpu_longer_than_on_gpus(tmp_path):
    script = Path(__file__).parent / "helpers" / "patience.py"
    assert launch.launch(script, log=tmp_path / "log") == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_asks_to_be_started_again(trained, base, tmp_path, ranks):
    """On one of several ranks too. One command starts and goes on; later signals are harmless."""
    folder = tmp_path / "x"
    more = ["--runs", tmp_path, "--name", "x", "--resume"]
    line = ["--model", base, "--steps", 4, *SMALL, *more]
    children = launch.start(__file__, *line, log=tmp_path / "log", world=ranks)
    log = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    # Its first line shows that all ranks have begun to train.
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    while children[-1].is_alive() and time.monotonic() < deadline:
        children[-1].terminate()
        time.sleep(0.01)
    for child in children:
        child.join(300)
    assert [child.exitcode for child in children] == [os.EX_TEMPFAIL] * ranks
    done, _ = trainer.newest(folder)
    assert done == len(metrics(folder)) < 4
    if ranks == 1:
        assert run(*more, grade=half) == 0
        assert metrics(folder) == metrics(trained / "whole")
        assert same_weights(folder / "checkpoint", trained / "whole" / "checkpoint")


def test_torchrun_names_ranks_as_these_tests_do(tmp_path):
    """It starts two processes, which are shells here: an interpreter would take seconds."""
    told = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    shell = f"echo {' '.join('$' + name for name in told.split())} > {tmp_path}/$RANK"
    line = ["--standalone", "--nproc_per_node=2", "--no-python", "sh", "-c", shell]
    with ThreadPoolExecutor(1) as thread:  # in the main one it would take over the signals
        thread.submit(torchrun.main, line).result()
    one, other = ((tmp_path / rank).read_text().split() for rank in "01")
    assert (one[:3], other[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert one[3:] == other[3:] and len(one) == 5


def test_two_ranks_walk_the_same_path(trained, base, tmp_path):
    """The same rollouts; loss and gradient equal to rounding."""
    options = ["--model", base, "--runs", tmp_path, "--name", "ranks", "--steps", 1, *SMALL]
    assert launch.launch(__file__, *options, log=tmp_path / "log") == 0
    one, two = metrics(trained / "whole")[0], metrics(tmp_path / "ranks")[0]
    for key in ("reward", "sys1_samples", "sys1_tokens", "sys2_tokens", "trained_tokens"):
        assert one[key] == two[key], key
    for key in ("loss", "grad_norm", "sys1_entropy", "sys2_entropy"):
        assert one[key] == pytest.approx(two[key], abs=1e-5), key
    assert one["eval_greedy_by_kind"] == two["eval_greedy_by_kind_before"]
    records = records_of(tmp_path / "ranks", 0)
    asked, alone = (
        [(r["question_id"], r["trajectory"]) for r in found if r["split"] == "train"]
        for found in (records, records_of(trained / "whole", 0))
    )
    assert asked == alone and len(asked) == 16, "ranks write in turn"


def test_a_resumed_run_asks_on_where_its_stream_was(base, tmp_path):
    """With --resample steps take different numbers of questions from it."""
    options = ["--model", base, "--runs", tmp_path, "--name", "more", "--steps", 3, *SMALL]
    options += ["--eval_every", 1, "--eval_questions", 2, "--resample", 2]
    assert run(*options, grade=half) == 0
    folder = tmp_path / "more"
    shutil.copytree(folder, tmp_path / "whole")
    lines = metrics(folder)
    assert lines[0]["resampled"] or lines[1]["resampled"], "the stream has moved on"
    for line in lines:
        records = [r for r in records_of(folder, line["step"]) if r["split"] == "train"]
        assert len(records) == 4 * (4 + line["resampled"]), "all are counted, trained on or not"
        assert sum(r["trained"] for r in records) in (4, 8, 12, 16)
    shutil.rmtree(folder / "state/step_000003")
    assert run(*options, "--resume", grade=half) == 0
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert same_weights(folder / "checkpoint", tmp_path / "whole/checkpoint")
    folders.append_lines(folder / "metrics.jsonl", [{"step": 3}])  # of a step whose tools failed
    gc.collect()
    assert run(*options, "--resume", grade=half) == 2, "no traceback"
    (folder / "metrics.jsonl").write_text("")
    gc.collect()
    assert run(*options, "--steps", 4, "--resume", grade=half) == 2, "asks nothing again"


def too_large():
    """What PyTorch raises on a CPU, from PyTorch itself."""
    torch.empty(2**60, dtype=torch.uint8)


FAULTS = [
    (too_large, 2, ["out of memory", "--kv_tokens", "--micro_tokens", "--resume"]),
    (Mock(side_effect=KeyboardInterrupt), 130, ["interrupted", "--resume"]),
]


@pytest.mark.parametrize("fault, code, words", FAULTS)
def test_what_ends_a_run_is_one_sentence_with_advice(monkeypatch, capsys, fault, code, words):
    """SIGTERM kills while a run is built. That may take minutes, and there is nothing to save."""
    handlers = []

    def build(*given, **options):
        handlers.append(signal.getsignal(signal.SIGTERM))
        fault()

    monkeypatch.setattr(train, "build", build)
    assert run() == code and handlers == [signal.SIG_DFL]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and sorted(words, key=said.index) == words


# A command line, and words of the sentence that refuses it.
BAD = [
    ("--kv_tokens 95 --sys2_context 95", "--kv_tokens"),  # no whole page
    ("--sys1_prompt 17", "--sys1_prompt"),  # no room for documents
    ("ask runs/x who --lr 1", "--lr"),
    ("eval runs/x --model y", "--model"),
    ("--fsdp", "torchrun"),  # shards of one process
    # All that is missing, at once.
    ("--preset paper --tools search", "SERPER_API_KEY MARS_JUDGE_URL --data (1)"),
]


@pytest.mark.parametrize("line, words", BAD)
def test_bad_input_is_one_sentence_and_exit_2(base, tmp_path, monkeypatch, capsys, line, words):
    monkeypatch.chdir(tmp_path)
    for variable in ("SERPER_API_KEY", "JINA_API_KEY", "MARS_JUDGE_URL", "MARS_JUDGE_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    before = sorted(p for p in tmp_path.rglob("*") if ".cache" not in p.parts)
    arguments = line.split()
    if arguments[0].startswith("--"):
        arguments = ["--model", str(base), "--steps", "1", "--eval_questions", "2", *arguments]
    assert run(*arguments) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and len(said) < 1000
    assert all(word in said for word in words.split())
    assert sorted(p for p in tmp_path.rglob("*") if ".cache" not in p.parts) == before


def test_resume_refuses_what_is_not_the_same_run(copied, base, refused):
    options = ["--model", base, "--runs", copied, "--name", "whole", *SMALL]
    folder = copied / "whole"
    before = (folder / "metrics.jsonl").read_bytes()

    refused("add --resume", *options, "--steps", 5)
    refused("needs the --name", *options, "--name", "", "--resume")
    refused("lr (0.0005 -> 0.5)", *options, "--steps", 5, "--resume", "--lr", 0.5)
    refused("seed (0 -> 1), model (", *options, "--resume", "--seed", 1, "--model", "other")
    refused("has done 4 steps", *options, "--steps", 3, "--resume")
    held = folders.lock(folder)
    refused("another process", *options, "--steps", 5, "--resume")
    held.close()
    method = json.loads((folder / "method.json").read_text())
    folders.write_json(folder / "method.json", method | {"name": "another"})
    refused("method another", *options, "--steps", 5, "--resume")
    folders.write_json(folder / "method.json", method)
    shutil.rmtree(folder / "state")
    refused("no whole state", *options, "--steps", 5, "--resume")
    torn = (folder / "config.json").read_text()
    (folder / "config.json").write_text(torn[:99])
    refused("missing or damaged", *options, "--resume")
    (folder / "config.json").write_text(torn)
    saved = folders.read_json(folder / "config.json")  # as of an older version
    folders.write_json(folder / "config.json", {k: v for k, v in saved.items() if k != "kl_beta"})
    refused("kl_beta (0.0 -> 0.1)", *options, "--steps", 5, "--resume", "--kl_beta", 0.1)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_left_as_it_is(copied, base, capsys):
    """Also with other settings that change no number; a link that a kill left behind is renewed."""
    folder = copied / "whole"
    (folder / "checkpoint").unlink()
    (folder / "checkpoint").symlink_to("state/step_000002/model")
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    before = {path: path.read_bytes() for path in files}
    options = ["--model", base, "--runs", copied, "--name", "whole", "--steps", 4, *SMALL]
    assert run(*options, "--resume", "--micro_tokens", 64, "--kv_tokens", 8192) == 0
    assert "after 4 steps" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in files}
    assert (folder / "checkpoint").resolve() == (folder / "state/step_000004/model").resolve()


def test_eval_and_ask(copied, capsys):
    last = json.loads((copied / "whole/metrics.jsonl").read_text().splitlines()[-1])
    options = ["--runs", copied, "--eval_questions", 6]
    # A kill before the link was renewed leaves it at an older model.
    (copied / "whole/checkpoint").unlink()
    (copied / "whole/checkpoint").symlink_to("state/step_000002/model")
    (copied / "eval-whole" / "notes").mkdir(parents=True)  # a name that is taken
    assert run("eval", copied / "whole", *options, grade=half) == 0
    *kinds, row = json.loads((copied / "eval-whole-2/table.json").read_text())
    assert sum(kind["questions"] for kind in kinds) == 6
    assert row["questions"] == 6 and row["accuracy"] == last["eval_accuracy"]
    assert (copied / "eval-whole-2/trajectories.html").exists()
    state = copied / "whole/state/step_000002/model"  # the weights that were evaluated at step 2
    assert run("eval", state, *options, "--name", "two", grade=half) == 0
    *kinds, row = json.loads((copied / "two/table.json").read_text())
    assert row["accuracy"] == metrics(copied / "whole")[2]["eval_accuracy"]
    saved = folders.read_json(copied / "whole/config.json")
    (copied / "whole/config.json").unlink()
    for model in (copied / "whole", state):
        assert run("eval", model, *options, "--data", "toy") == 2, "its options are lost"
    folders.write_json(copied / "whole/config.json", saved | {"top_p": 1e-3})
    assert run("eval", copied / "whole", *options, "--name", "likeliest", grade=half) == 0
    *kinds, row = json.loads((copied / "likeliest/table.json").read_text())
    right = {kind["set"]: round(kind["accuracy"] * kind["questions"]) for kind in kinds}
    assert right == {kind: right for kind, (right, _) in last["eval_greedy_by_kind"].items()}


def test_a_conversation_asks_line_after_line(trained, monkeypatch, capsys):
    """Each is answered as if asked alone; a line that is no text is refused, and not the rest."""
    question = "when was ada baker born ?"
    answer, advance = evaluation.answer, driver.Driver._advance
    now, presses = [], []  # how often Ctrl-C is pressed at the next token, and in each answer

    def answered(*given):
        now[:] = presses[:1]
        presses[:] = presses[1:]
        answer(*given)

    def interrupted(*given):
        for _ in range(sum(now)):
            now.clear()
            signal.raise_signal(signal.SIGINT)
        advance(*given)

    repeated = []

    def ask(typed: str, *pressed: int) -> tuple[int, list[str]]:
        presses[:] = pressed
        raw = io.BytesIO(typed.encode("utf-8", "surrogateescape"))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
        code = run("ask", trained / "whole")
        lines = [line for line in capsys.readouterr().out.splitlines() if " | " in line]
        repeated[:] = [line for line in lines if line.startswith(" question | ")]
        return code, [line for line in lines if line not in repeated]

    assert run("ask", trained / "whole", "--top_k", 3, question) == 0
    alone = [line for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert alone[0].startswith(" system 2 |") and alone[-1].startswith("   answer |")
    monkeypatch.setattr(evaluation, "answer", answered)
    monkeypatch.setattr(driver.Driver, "_advance", interrupted)
    typed = f"{question}\n\n  \n" * 3
    assert ask(typed) == (0, 3 * alone) and len(repeated) == 3
    assert ask(f"\ufeff{typed}") == (0, 3 * alone), "a byte order mark"
    assert ask(f"\udcff\n{typed}") == (2, 3 * alone)
    assert ask(typed, 1) == (2, 2 * alone)
    assert ask(typed, 1, 0, 1) == (2, alone)
    assert ask(typed, 0, 1, 1) == (130, alone)
    assert ask(typed, 0, 2) == (130, alone), "twice within an answer"
    monkeypatch.setattr(sys, "stdin", None)
    assert run("ask", trained / "whole") == 2, "it is closed"


def test_an_evaluation_goes_on_where_it_was_ended(copied, monkeypatch, tmp_path, refused):
    """Here on a full disk, in the middle of a line; then it has the table of an unbroken one."""
    monkeypatch.setattr(evaluation, "BATCH", 3)
    line = ["eval", copied / "whole", "--runs", copied, "--group", 3, "--resume"]
    assert run(*line, "--name", "unbroken", grade=half) == 0
    table = json.loads((copied / "unbroken/table.json").read_text())
    assert table[-1]["questions"] == 6 and table[-1]["attempts"] == 3
    file = copied / "eval-whole/rollouts/step_0.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (copied / "unbroken/rollouts/step_0.jsonl").stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    refused("make room", *line, grade=half)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4 and file.stat().st_size == size, "the last line is torn"
    file.write_bytes(b"".join(lines[:4]) + lines[-1])  # a question, and an attempt at another

    refused("group (3 -> 2)", *line, "--group", 2, grade=half)
    refused("seed (0 -> 1)", *line, "--seed", 1, grade=half)
    refused("exists", *line, "--name", "whole", grade=half)
    held = folders.lock(copied / "eval-whole")
    refused("another process", *line, grade=half)
    held.close()
    model = copied / "whole/checkpoint/config.json"
    before = model.stat().st_mtime_ns
    os.utime(model)
    refused("other weights", *line, grade=half)
    refused("add --resume", *line[:-1], "--name", "eval-whole", grade=half)
    state = copied / "whole/state/step_000004"
    state.rename(state.with_name("step_000005"))  # as if the run had trained on meanwhile
    refused("choose another --name", *line, grade=half)
    state.with_name("step_000005").rename(state)
    os.utime(model, ns=(before, before))
    assert run("--runs", copied, "--name", "eval-whole", "--resume") == 2, "it is no run"

    played = []
    play = evaluation.play_batch

    def count(run, part, *given, **options):
        played.extend(part)
        return play(run, part, *given, **options)

    monkeypatch.setattr(evaluation, "play_batch", count)
    assert run(*line, grade=half) == 0
    assert len(played) == 5
    assert json.loads((copied / "eval-whole/table.json").read_text()) == table
    assert launch.launch(__file__, *line, "--name", "ranks", log=tmp_path / "log") == 0
    assert json.loads((copied / "ranks/table.json").read_text()) == table
    assert (tmp_path / "log").read_text().count("avg@3") == 1
    files = [(copied / f"ranks/rollouts/step_{rank}.jsonl").read_text() for rank in (0, 1)]
    assert [text.count("\n") for text in files] == [9, 9]


def test_questions_without_an_answer_are_answered(base, own, monkeypatch, capsys, refused):
    asked = ["when was ada baker born ?", "what does ada baker enjoy ?", "who is ada baker ?"]
    lines = [{"id": f"q{i}", "question": text} for i, text in enumerate(asked)]
    answered = [lines[0], lines[1] | {"answer": "chess"}, lines[2]]
    Path("open.jsonl").write_text("\n".join(map(json.dumps, answered)))
    line = ["eval", base, *own, "--data", "open.jsonl"]
    assert run("ask", *line[1:], "--name", "some") == 0, "ask with a file is eval"
    (row,) = json.loads(Path("runs/some/table.json").read_text())
    assert row["questions"] == 1 and row["judge_failures"] == 0
    answers = folders.read_lines(Path("runs/some/answers.jsonl"))
    assert [one["question_id"] for one in answers] == ["q0", "q2"]
    assert {"question", "answer"} < answers[0].keys()
    Path("open.jsonl").write_text("\n".join(map(json.dumps, lines)))
    capsys.readouterr()
    assert run(*line, "--name", "none") == 0
    assert "accuracy" not in capsys.readouterr().out
    assert len(Path("runs/none/answers.jsonl").read_text().splitlines()) == 3
    with monkeypatch.context() as patch:
        closed = Mock(side_effect=OSError(errno.EPIPE, "Broken pipe"))
        patch.setattr(evaluation, "print", closed, raising=False)
        patch.setattr(train, "discard_output", Mock())
        refused("goes on with --resume", *line, "--name", "unread")
    assert (
        Path("runs/unread/answers.jsonl").exists()
        and Path("runs/unread/trajectories.html").exists()
    )
    assert run(*line, "--name", "half", grade=half) == 0, "a grader of one's own may need no answer"
    assert json.loads(Path("runs/half/table.json").read_text())[0]["questions"] == 3
    Path("notes/b.txt").write_text("ada baker lives in rome .")
    refused("documents", *line, "--name", "none", "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(folders, "append_lines", lambda path, lines: None)
        refused("lacks attempts", *line, "--name", "elsewhere")
    refused("no golden answer", "--model", base, *SMALL, *own, "--data", "open.jsonl")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Options that name a document and twelve questions, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("ada baker born 1968 . ada baker enjoys chess .")
    questions = [f"when was {'ada ' * i}baker born ?" for i in range(1, 13)]
    lines = [json.dumps({"question": question, "answer": "1968"}) for question in questions]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    return ["--data", "own.jsonl", "--docs", "notes"]


def test_ones_own_questions_and_documents(base, own, tmp_path, refused):
    """Another corpus, other questions; eval asks what was not trained on."""
    more = ["--group", 8]  # so that some attempts search
    assert run("--model", base, "--name", "own", "--steps", 1, *own, *SMALL, *more) == 0
    records = records_of(tmp_path / "runs/own", 0)
    turns = [turn for r in records for turn in r["turns"] if turn["documents"]]
    found = {d["id"] for t in turns if t["call"]["tool"] != "python" for d in t["documents"]}
    assert found and all(name.startswith("a.txt") for name in found)
    trained_on = {r["question_id"] for r in records if r["split"] == "train"}
    assert run("eval", "runs/own") == 0
    asked = {r["question_id"] for r in records_of(tmp_path / "runs/eval-own", 0)}
    assert len(asked) == 6 and not trained_on & asked
    refused("those held out", "eval", "runs/own", "--eval_questions", 7)
    with open("own.jsonl", "a") as file:
        file.write('\n{"question": "one more ?", "answer": "1968"}')
    line = ["--model", base, "--name", "own", "--steps", 2, *own, *SMALL, *more]
    refused("started with other questions", *line, "--resume")
    saved = folders.read_json(Path("runs/own/config.json"))
    elsewhere = {"eval_data": "away.jsonl", "eval_docs": "away"}
    folders.write_json(Path("runs/own/config.json"), saved | elsewhere)
    assert run("eval", "runs/own", "--name", "all", *own) == 0, "what is given is for all"
    assert len(records_of(tmp_path / "runs/all", 0)) == 13


def test_a_chat_model_trains_answers_and_is_evaluated(own, tmp_path):
    """Random weights: every step is malformed, and nothing breaks."""
    words = tokenizer(QWEN3)
    words.save_pretrained("chat")
    sizes = {"vocab_size": len(words), "max_position_embeddings": 8192}
    tiny.lively("Qwen3", **sizes).save_pretrained("chat")
    limits = {"sys2_context": 3000, "step_tokens": 24, "answer_tokens": 16, "sys1_prompt": 1500}
    limits |= {"sys1_response": 16, "max_turns": 3, "kv_tokens": 60_000}
    method = dataclasses.replace(mars.METHOD, presets={"chat": limits})
    own += ["--preset", "chat"]
    assert run("--model", "chat", "--steps", 1, *SMALL[:-2], *own, method=method) == 0
    (line,) = metrics(tmp_path / "runs/chat")
    assert line["malformed_share"] > 0.5 and line["mismatch_kl"] < 1e-8
    assert run("eval", "chat", *own, method=method) == 0
    assert len(records_of(tmp_path / "runs/eval-chat", 0)) == 12
    asked = ["ask", "chat", "Who is Ada Baker?", "--preset", "chat", "--docs", "notes"]
    assert run(*asked, method=method) == 0
    assert run(*asked[:-2], method=method) == 2, "there is nothing to search"


def test_right_attempts_become_demonstrations_that_are_learned(trained, base, tmp_path, capsys):
    """Rejection sampling. The texts give away a model with another tokenizer."""
    demos, whole = tmp_path / "demos.jsonl", trained / "whole"
    assert warm_start.main([f"--from_run={whole}", f"--out={demos}"]) == 0
    records = [r for step in range(4) for r in records_of(whole, step) if r["split"] == "train"]
    right = [r for r in records if r["reward"]]
    expected = {("sys2", *r["ids"]) for r in right}
    expected |= {("sys1", *c["ids"]) for r in right for t in r["turns"] for c in t["chunks"]}
    assert 0 < len(right) < len(records)
    lines = folders.read_lines(demos)
    assert {(line["role"], *line["ids"]) for line in lines} == expected
    assert len(lines) == len(expected) and {line["role"] for line in lines} == {"sys1", "sys2"}
    options = ["--steps=6", f"--demonstrations={len(lines)}", f"--data={demos}"]
    capsys.readouterr()
    assert warm_start.main([*options, f"--model={base}", f"--out={tmp_path / 'warm'}"]) == 0
    losses = capsys.readouterr().out
    for role in ("sys1", "sys2"):
        first, *_, last = map(float, re.findall(rf"{role} (\d\S\d+)", losses))
        assert last < first - 0.1
    random_model(tmp_path / "other")
    assert warm_start.main([*options, f"--model={tmp_path / 'other'}", f"--out={demos}2"]) == 2
    assert "take the run's --model" in capsys.readouterr().err


broken = Mock(side_effect=ToolError("no route to the service"))


def test_a_judge_that_is_away_stops_the_run(trained, copied, base, monkeypatch, refused):
    """Else it would train on nothing, and failures would look like wrong answers."""
    monkeypatch.setattr(outside.grading, "grader", lambda name: broken)
    line = ["--model", base, "--runs", copied, "--name", "whole", "--steps", 6, *SMALL]
    refused("of the judgements of the evaluation after 4 steps failed", *line, "--resume")
    assert metrics(copied / "whole") == metrics(trained / "whole")
    assert trainer.newest(copied / "whole")[0] == 4
    records = [r for r in records_of(copied / "whole", 4) if r["answer"]]
    assert {r["reward"] for r in records} == {None}
    assert {r["turns"][-1]["error"] for r in records} == {"judge failed: no route to the service"}
    options = ["--runs", copied, "--name", "blind", "--eval_questions", 6]
    said = refused("of the judgements of set ", "eval", copied / "whole", *options)
    assert said.endswith("mend that, then evaluate under another --name\n")
    assert (copied / "blind/table.json").exists()


def test_a_capped_run_goes_on_with_the_same_command(base, server, tmp_path, refused):
    server.replies = [GOOD]
    options = ["--model", base, "--runs", tmp_path, "--steps", 2, *SMALL, "--eval_questions", 2]
    options += ["--search", "serper", "--tools", "search"]
    assert run(*options, "--name", "whole", "--cache", tmp_path / "one", grade=half) == 0
    first, second = (line["service_calls"][server.url] for line in metrics(tmp_path / "whole"))
    assert first + second == len(server.requests) and second > 2
    said = (tmp_path / "whole/report.md").read_text()
    assert f"- calls: {first + second} to {server.url}\n" in said
    options += ["--name", "capped", "--cache", tmp_path / "other", "--max_calls", first + 2]
    refused("--max_calls is reached", *options, grade=half)
    assert len(server.requests) == 2 * first + second + 2
    assert trainer.newest(tmp_path / "capped")[0] == 1
    gc.collect()  # the error's frames hold the run and its lock
    assert run(*options, "--resume", grade=half) == 0
    assert len(server.requests) == 2 * (first + second), "what was paid for is in the cache"
    assert same_weights(tmp_path / "capped/checkpoint", tmp_path / "whole/checkpoint")


def test_a_cap_on_calls_keeps_what_an_evaluation_has_answered(base, server, tmp_path, capsys):
    """It says which one goes on; of two ranks each may send half of the calls."""
    server.replies = [GOOD]
    line = ["eval", base, "--data", "toy", "--runs", tmp_path, "--eval_questions", 6]
    line += ["--search", "serper", "--tools", "search", "--group", 2]
    assert run(*line, "--name", "whole", "--cache", tmp_path / "one", grade=half) == 0
    calls = len(server.requests)
    line += ["--name", "capped", "--cache", tmp_path / "other", "--resume"]
    assert run(*line, "--max_calls", calls // 2, grade=half) == 2
    assert re.search(r"--max_calls is reached.*--name capped", capsys.readouterr().err)
    assert len(server.requests) == calls + calls // 2
    assert 0 < len(records_of(tmp_path / "capped", 0)) < 12
    gc.collect()  # the error's frames hold the lock
    log = tmp_path / "log"
    assert launch.launch(__file__, *line, "--max_calls", 2, log=log) == 2
    assert "Traceback" not in log.read_text()
    assert run(*line, grade=half) == 0
    assert len(server.requests) == 2 * calls, "what was paid for is in the cache"
    tables = [(tmp_path / name / "table.json").read_text() for name in ("whole", "capped")]
    assert tables[0] == tables[1]


def test_a_service_that_is_away_is_named(base, server, waits, tmp_path, monkeypatch, capsys):
    away = "http://127.0.0.1:9"
    monkeypatch.setenv("MARS_SERPER_URL", away)
    options = ["--search", "serper", "--tools", "search", "--runs", tmp_path]
    assert run("--model", base, *SMALL, *options, "--cache", tmp_path) == 2
    said = capsys.readouterr().err
    assert "tool calls of the evaluation after 0 steps failed" in said
    assert f"a service's last failure was: {away}: ConnectError" in said
    assert said.endswith("mend that, then --resume\n")


def lose_a_rank() -> None:
    """What each of two ranks does: the second one ends while the first waits for it."""

    def build(*given, **options):
        if dist.get_rank():
            os._exit(3)
        dist.barrier()

    train.build = build
    run()


def test_a_rank_that_ends_is_one_sentence_of_the_others(tmp_path):
    ranks = launch.start(lose_a_rank, log=tmp_path / "log", world=2)
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [2, 3]
    said = (tmp_path / "log").read_text()
    assert "another process of this run has ended" in said and "Traceback" not in said


def test_a_step_without_tools_is_not_trained_on(trained, base, tmp_path, monkeypatch, refused):
    line = ["--model", base, "--runs", tmp_path, "--name", "blind", "--steps", 4, *SMALL]
    search, report = outside.search.local, logbook.report
    reported = []

    def failing(*given):
        """A search that fails once step 0 is reported."""
        found = search(*given)
        return lambda query: broken() if reported else found(query)

    monkeypatch.setattr(logbook, "report", lambda *given: reported.append(report(*given)))
    monkeypatch.setattr(outside.search, "local", failing)
    refused("of the tool calls of step 1 failed", *line, grade=half)
    assert trainer.newest(tmp_path / "blind")[0] == 1
    told = metrics(tmp_path / "blind")[-1]
    assert told["step"] == 1 and told["tool_error_share"] > 0.5 and told["empty_share"] < 0.5
    assert "loss" not in told
    assert records_of(tmp_path / "blind", 1)
    monkeypatch.setattr(outside.search, "local", search)
    gc.collect()  # the error's frames hold the run and its lock
    assert run(*line, "--resume", grade=half) == 0
    assert metrics(tmp_path / "blind") == metrics(trained / "whole")
    assert same_weights(tmp_path / "blind/checkpoint", trained / "whole/checkpoint")


@pytest.mark.parametrize(
    "pause, eval_every, keep_every, steps, saved",
    [
        (0.6, 9, 0, 5, [2, 4, 5]),
        (0, 99, 0, 13, [10, 12, 13]),
        (0, 16, 7, 29, [7, 14, 16, 21, 28, 29]),
    ],
)
def test_no_hour_passes_without_a_state(monkeypatch, pause, eval_every, keep_every, steps, saved):
    """Nor an evaluation. `pause` hours pass between any two looks at the clock."""
    hours = itertools.count(0, pause)
    monkeypatch.setattr(train, "time", Mock(monotonic=lambda: 3600 * next(hours)))
    monkeypatch.setattr(train, "train_step", lambda run, step: ({}, []))
    monkeypatch.setattr(train, "evaluate", lambda run, updates: {})
    monkeypatch.setattr(train, "logbook", Mock(open_folder=lambda run: 0))
    found = []
    monkeypatch.setattr(trainer, "save", lambda folder, step, *rest: found.append(step))
    config = mars.MarsConfig(steps=steps, eval_every=eval_every, keep_every=keep_every)
    assert train.train(Mock(config=config, rank=1), []) == 0
    assert found == saved


def test_a_folder_with_a_trackers_name_is_not_its_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert mars.main(["--track", "trackio", "--runs", str(tmp_path / "runs")]) == 2
    assert "pip install trackio" in capsys.readouterr().err


def test_a_tracked_run_goes_on_without_its_tracker(trained, base, copied, monkeypatch, capsys):
    """The tracker changes no number of the run."""
    tracker = Mock(__spec__=Mock(origin="trackio.py"))
    log = tracker.init.return_value.log
    log.side_effect = [None, ConnectionError("the network is away")]
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    shutil.rmtree(copied / "whole/state/step_000004")
    options = ["--model", base, "--runs", copied, "--name", "whole", *SMALL, "--track", "trackio"]
    assert run(*options, "--steps", 4, "--resume", grade=half) == 0
    assert capsys.readouterr().out.count("--track trackio failed (the network is away)") == 1
    line = [json.loads(line) for line in open(copied / "whole/metrics.jsonl")][2]
    sent = {key: value for key, value in line.items() if isinstance(value, (int, float))}
    (numbers,), step = log.call_args_list[0]
    assert numbers | step == sent
    assert metrics(copied / "whole") == metrics(trained / "whole")


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:], grade=half))
