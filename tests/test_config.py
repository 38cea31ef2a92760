"""Options: their help, their spellings, and what is refused."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

import config
import mars
from config import UserError, parse, parser, resolve

REPO = Path(__file__).parent.parent
FIELDS = dataclasses.fields(mars.MarsConfig)
OPTIONS = [field for field in FIELDS if field.metadata.get("option", True)]


def given(*arguments: str) -> dict:
    return parse(parser(mars.MarsConfig, ""), list(arguments))


def resolved(*arguments: str, training: bool = True):
    presets = mars.METHOD.presets
    return resolve(mars.MarsConfig, given(*arguments), presets=presets, training=training)


def test_help_needs_no_torch_and_tells_every_option_once():
    code = (
        "import runpy, sys; sys.argv = ['mars.py', '--help']\n"
        "try: runpy.run_path('mars.py', run_name='__main__')\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "False\n"
    assert len(OPTIONS) <= 50
    lines = [line for line in done.stdout.splitlines() if line.startswith("  --")]
    told = [line.split()[0].removesuffix(",") for line in lines]
    assert sorted(told) == sorted(f"--{field.name}" for field in OPTIONS)
    assert parser(mars.MarsConfig, mars.__doc__).format_help() == done.stdout
    headings = [line for line in done.stdout.splitlines() if line in ("the run:", "the machine:")]
    assert len(headings) == 2 and "no options" not in done.stdout


def test_an_option_has_two_spellings_and_a_recipes_setting_none():
    assert given("--step-tokens", "9", "--no-packing") == {"step_tokens": 9, "packing": False}
    assert given("--step_tokens=9", "--no-recompute-activations") == {
        "step_tokens": 9,
        "recompute_activations": False,
    }
    assert given("--is", "token") == given("--importance=token") == {"importance": "token"}
    for field in FIELDS:
        if field not in OPTIONS:
            with pytest.raises(SystemExit):
                given(f"--{field.name}", "1")


def test_the_command_line_wins_over_what_was_saved_and_that_over_a_preset():
    chosen = resolve(
        mars.MarsConfig,
        {"preset": "own", "lr": 3.0},
        presets={"own": {"lr": 1.0, "warmup": 7, "group": 3}},
        saved={"lr": 2.0, "group": 5, "an option of another version": 1},
    )
    assert (chosen.lr, chosen.group, chosen.warmup) == (3.0, 5, 7)
    with pytest.raises(UserError, match="saved setting pages"):
        resolve(mars.MarsConfig, {}, presets={}, saved={"pages": "fetch"})


REFUSED = {
    "unrecognized": "--learning_rate 1",
    "--lr": "--lr fast",
    "--system1": "--system1 maybe",
    "--group": "--group 1",
    "--balance": "--balance advantage --kl_beta 0.1",
    "--temperature": "--temperature inf",
    "--temperature 1e-40": "--temperature 1e-40",
    "--temperature 10001.0": "--temperature 10001",
    "--block": "--block hf.co",
    "--eval_data": "--eval_data some.jsonl",
    "--pages": "--pages jina",
    "--name is": "--name ../x",
    "one plain folder": "--name \0",
    "--kv_tokens": "--kv_tokens 94 --sys2_context 95",
    "--seed": "--seed -1",
    "--seed must be below": "--seed 2147483648",
    "--lora_rank must be below": "--lora_rank " + "9" * 30,
    "--lr must": "--lr nan",
    "--max_turns": "--max_turns 1",
    "--eval_questions": "--eval_questions 0",
    "--preset": "--preset papers",
    "--docs": "--docs x --search retriever --data y",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_makes_no_sense_is_one_sentence(word, capsys):
    with pytest.raises((UserError, SystemExit)) as refusal:
        resolved(*REFUSED[word].split(" "))
    said = str(refusal.value)
    if refusal.type is SystemExit:
        said = capsys.readouterr().err
        assert refusal.value.code == 2 and len(said.splitlines()) == 1
    assert word in said


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, -1, 10**400])
def test_a_saved_number_that_is_none_for_a_float_is_refused(value):
    """config.json may hold a whole number in a float's place, and one of any size."""
    with pytest.raises(UserError, match="--temperature"):
        resolve(mars.MarsConfig, {}, presets={}, saved={"temperature": value})


def test_a_nucleus_that_fp32_makes_nothing_of_is_refused():
    with pytest.raises(UserError, match="top_p"):
        mars.MarsConfig(top_p=1e-320).check(training=False)


@pytest.mark.parametrize("value", ["x" * 5000, "x y " * 2000, "\x1b[2J\x07\u202e", "a\nb"])
def test_a_sentence_neither_fills_the_terminal_nor_speaks_to_it(value, capsys):
    assert config.fail(f"--docs {value}: not there") == 2
    said = capsys.readouterr().err
    assert len(said) < 2100 and said.count("\n") == 1 and said.removesuffix("\n").isprintable()
