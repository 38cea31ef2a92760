"""Options: their help, and what is refused."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import config
import mars
import warm_start
from config import UserError, parse, parser, resolve
from plumbing import evaluation, models, outside
from recipes import almanac
from siblings import bvpo, hanabi, marsrl, matpo, mifo, moe_routing, slm_mux

METHODS = (mars, almanac, bvpo, hanabi, marsrl, matpo, mifo)
CONFIGS = [warm_start.WarmStart, moe_routing.RoutingConfig, slm_mux.MuxConfig]
CONFIGS += [module.METHOD.config for module in METHODS]


def given(*arguments: str) -> dict:
    return parse(parser(mars.MarsConfig, ""), list(arguments))


@pytest.mark.parametrize("options", CONFIGS, ids=lambda options: options.__name__)
def test_every_option_is_in_the_help_once(options):
    lines = parser(options, "").format_help().splitlines()
    told = [line.split()[0].removesuffix(",") for line in lines if line.startswith("  --")]
    fields = [field for field in dataclasses.fields(options) if field.metadata.get("option", True)]
    assert sorted(told) == sorted(f"--{field.name}" for field in fields)


def settings(monkeypatch, run, *, asking: bool, method=mars.METHOD, **options):
    """The settings of `eval` or `ask` with options, on a checkpoint of this run."""
    found = Path("model"), dataclasses.asdict(run)
    monkeypatch.setattr(models, "find_checkpoint", lambda *_: found)
    options["checkpoint"] = "checkpoint"
    return evaluation.settings(method, options, asking)


def test_a_run_that_asked_a_service_needs_documents_for_a_local_search(monkeypatch):
    run = mars.MarsConfig(data="nq", search="serper")
    with pytest.raises(UserError, match="there is nothing to search"):
        settings(monkeypatch, run, asking=True, search="local")
    assert settings(monkeypatch, run, asking=True, search="local", docs="d").docs == "d"
    assert not settings(monkeypatch, mars.MarsConfig(), asking=True).docs, "the toy has its world"


@pytest.mark.parametrize(
    "module, trained, asked",
    [
        (mars, {"balance": "none"}, {"system1": "none"}),
        (almanac, {"balance": "none", "credit": "candid"}, {"system1": "frozen"}),
        (matpo, {"own_groups": True}, {"workers": "frozen"}),
    ],
)
def test_an_evaluation_may_change_what_a_runs_credit_forbids(monkeypatch, module, trained, asked):
    run = module.METHOD.config(**trained)
    config = settings(monkeypatch, run, asking=False, method=module.METHOD, **asked)
    assert vars(config).items() >= asked.items()


def test_hidden_files_do_not_count_as_changed_documents(tmp_path):
    config = mars.MarsConfig(docs=str(tmp_path / "docs"), model=str(tmp_path / "model"))
    run = SimpleNamespace(config=config, fingerprint="questions")
    (tmp_path / "docs" / ".git").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "docs" / "a.md").write_text("a")
    before = evaluation.fingerprint(run, None)
    (tmp_path / "docs" / ".git" / "index").write_text("new")
    assert evaluation.fingerprint(run, None) == before
    for changed in (tmp_path / "docs" / "b.md", tmp_path / "model" / "config.json"):
        changed.write_text("new")
        assert evaluation.fingerprint(run, None) != before
        before = evaluation.fingerprint(run, None)


def test_help_shows_reasons_and_defaults_by_group():
    shown = parser(matpo.MatpoConfig, matpo.__doc__).format_help()
    assert matpo.__doc__.strip() in shown
    learning = shown.partition("\nreinforcement learning:\n")[2].partition("\n\n")[0]
    assert re.search(r"--questions int +per step \[8\]$", learning, re.MULTILINE)


def test_the_command_line_wins_over_what_was_saved_and_that_over_a_preset():
    chosen = resolve(
        mars.MarsConfig,
        {"preset": "own", "lr": 3.0},
        presets={"own": {"lr": 1.0, "warmup": 7, "group": 3}},
        saved={"lr": 2.0, "group": 5, "an option of another version": 1},
    )
    assert (chosen.lr, chosen.group, chosen.warmup) == (3.0, 5, 7)


# A command line, and a word of the sentence that refuses it.
REFUSED = [
    ("--learning_rate 1", "unrecognized"),
    ("--lr nan", "--lr must"),
    ("--group 1", "--group"),
    ("--temperature 0", "--temperature"),
    ("--questions 3", "--questions"),
    ("--balance none --system1 frozen", "--balance"),
    ("--block hf.co", "--block"),
    ("--eval_data some.jsonl", "--eval_data"),
    ("--docs x --search retriever --data y", "--docs"),
    ("--name ../x", "--name is"),
]


@pytest.mark.parametrize("line, word", REFUSED)
def test_what_makes_no_sense_is_one_sentence(line, word, capsys):
    with pytest.raises((UserError, SystemExit)) as refusal:
        resolve(mars.MarsConfig, given(*line.split(" ")), presets=mars.METHOD.presets)
    said = str(refusal.value)
    if refusal.type is SystemExit:
        said = capsys.readouterr().err
        assert refusal.value.code == 2 and len(said.splitlines()) == 1
    assert word in said


@pytest.mark.parametrize("value", ["x" * 5000, "\x1b[2J\x07\u202e", "a\nb"])
def test_a_sentence_neither_fills_the_terminal_nor_speaks_to_it(value, capsys):
    assert config.fail(f"--docs {value}: not there") == 2
    said = capsys.readouterr().err
    assert len(said) < 2100 and said.count("\n") == 1 and said.removesuffix("\n").isprintable()


def test_every_process_may_send_a_call():
    two = outside.Machine(torch.device("cpu"), 0, 2, False)
    with pytest.raises(UserError, match="--max_calls must be at least 1 for each of 2"):
        outside.check_machine(mars.MarsConfig(max_calls=1), two)
    outside.check_machine(mars.MarsConfig(max_calls=2), two)


def test_an_option_of_a_preset_that_has_no_use_is_refused_with_its_cure():
    with pytest.raises(UserError, match="--pages has no use with .*: give --pages none"):
        resolve(mars.MarsConfig, {"preset": "web"}, presets={"web": {"pages": "jina"}})


@pytest.mark.parametrize("wrong", [{"RANK": "1"}, {"RANK": "-1"}, {"WORLD_SIZE": ""}])
def test_ranks_that_torchrun_never_sets_are_refused(wrong, monkeypatch):
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="not what torchrun sets"):
        outside.place(mars.MarsConfig())


def test_threads_are_those_of_the_environment_or_one(monkeypatch):
    torch.set_num_threads(2)  # as PyTorch does where the variable says so
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    outside.join(mars.MarsConfig())
    assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    outside.join(mars.MarsConfig())
    assert torch.get_num_threads() == 1
