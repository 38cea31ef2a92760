"""The atlas before and after: untaught, from memory, after the warm start, after RL.

    python -m bench.atlas --bf16 on              seed 0; options that the bench lacks are the run's
    python -m bench.atlas --bf16 on --seeds 0 1 2 --arms frozen     also with System 1 frozen
    python -m bench.atlas --table --seeds 0 1 2                     tabulates what is there
    python -m bench.atlas --bf16 on --preset atlas-long --runs runs/atlas-long --arms frozen

A seed is one run of `python -m recipes.atlas` in RUNS/rl-SEED. Its held-out questions are put to
the trained model, to its warm start and, with the first seed, to the untaught model, which also
answers from memory; each of them samples at the run's temperature, and decodes greedily. An arm
changes something of RL, in RUNS/ARM-SEED. It begins with the same warm start and is evaluated like
the run. Only no-purpose changes the warm start as well: a model that was taught to state purposes
does not speak the form without them, so that RL found nothing to learn. So its start is asked too.

The column "change" compares two models on the same questions: the trained one with its warm
start, an arm with the run (but balance-advantage with sample-mean, from which it differs in the
balancing alone), and an arm's own start with the run's. Such a paired test finds smaller
differences than two intervals do.

The same command goes on where it stopped. A folder of --runs holds runs of one setting: other
options are refused there.

Results: bench/results/PRESET/, or the folder there that --results names, in place of the former
ones; with each run's config, metrics and log, and of the first seed its curves and a page of
held-out trajectories after RL.

Tests: pytest tests/test_atlas_bench.py
"""

import argparse
import dataclasses
import io
import json
import math
import re
import shutil
import signal
import sys
from pathlib import Path

from plumbing.metrics import with_interval
from plumbing.metrics import sign_test, wilson_interval

from bench import common
from bench.ablations import ROOT, Ended, alone_in, pool, remember
from config import Config, OneLineParser, UserError, fail, parse, parser, resolve
from plumbing import smollm2
from plumbing.folders import read_json, read_lines, write_whole
from recipes import atlas, atlas_world

# A row of the table: the command, and whom it asks (a key of `paths` in `evaluate`).
MODELS = {
    "untaught": ("eval", "smollm2"),
    "from memory": ("closed", "smollm2"),
    "warm start": ("eval", "start"),
    "after RL": ("eval", "run"),
}
DECODING = ("sampled", "greedy")
KEPT = ("config.json", "metrics.jsonl")
MADE_BY = ("cpu_seconds", "commit", "cpu")
SHOWN = ("calls", "malformed", "sys2_tokens", "sys1_tokens")  # of an evaluation's table
HELD_OUT = str(atlas_world.QUESTIONS["held_out"])
# What an arm changes, and its name in the table.
ARMS = {
    "frozen": (["--system1", "frozen"], "System 1 frozen"),
    "no-purpose": (["--no-purpose"], "no purpose"),
    "balance-none": (["--balance", "none"], "no balancing"),
    "sample-mean": (["--loss_mean", "sample"], "mean over samples"),
    # Only a mean over samples lets this balancing be unbiased, so it is compared with that one.
    "balance-advantage": (
        ["--loss_mean", "sample", "--balance", "advantage"],
        "mean over samples, balanced by advantage",
    ),
    "inherited": (["--shared_group"], "advantage inherited"),
}
OWN_START = {"no-purpose"}  # arms whose warm start differs from the run's
# Set by the bench or by recipes.atlas, and what would replace the questions or the pages.
RESERVED = set("seed name resume model data eval_data docs eval_docs search".split())
# What runs of one setting may differ in. What a run asks itself stands in no row.
MAY_DIFFER = RESERVED | (Config.may_change - {"steps"}) | {"eval_questions"}
# Options that evaluations do not get: only training reads them, or `put_questions` sets them.
NOT_PASSED_ON = atlas.AtlasConfig.for_training | {"eval_questions", "threads", "temperature"}


def config_of(folder: Path) -> dict:
    """A run's options; UserError if some of those that the bench reads are not there."""
    made = read_json(folder / "config.json")
    read = {"preset", "model", "seed", "steps", "threads", "temperature"}
    if not read <= made.keys():
        raise UserError(f"{folder}/config.json is damaged: it has no {min(read - made.keys())}")
    if type(made["steps"]) is not int:
        raise UserError(f"{folder}/config.json is damaged: steps is {made['steps']!r}")
    return made


def metrics_of(folder: Path) -> list[dict]:
    """A run's metrics, a line a step; none unless it has made all its steps.

    UserError if a line is missing or damaged.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = read_lines(path)
    steps = config_of(folder)["steps"]
    if not lines or lines[-1].get("eval_step") != steps:
        return []
    numbers = ("reward", "seconds_rollout", "seconds_train")
    whole = [line.get("step") for line in lines] == list(range(steps))
    whole = whole and all(is_number(line.get(name)) for line in lines for name in numbers)
    whole = whole and all(is_number(line.get("seconds_eval", 0)) for line in lines)
    if not whole:
        raise UserError(f"{path} is damaged: name another --runs, or delete the folder")
    return lines


def is_number(value) -> bool:
    """Whether a value out of a file is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def is_share(value) -> bool:
    """Whether a value out of a file is a number between 0 and 1."""
    return is_number(value) and 0 <= value <= 1


def typed(arguments: list[str]) -> dict:
    """Options of recipes.atlas by name."""
    return parse(parser(atlas.AtlasConfig, __doc__), arguments)


def refuse_contradictions(options: argparse.Namespace) -> None:
    """UserError for options that the bench sets itself, or an arm."""
    given = typed(options.more)
    if options.results is not None and not re.fullmatch(r"\w[\w-]*", options.results):
        raise UserError(f"--results {options.results}: give a plain name, such as atlas-arms")
    own = RESERVED.intersection(given)
    if own:
        advice = "give --seeds" if "seed" in own else "leave it out"
        raise UserError(f"--{min(own)} is this bench's own: {advice}")
    if options.table and given:
        raise UserError(f"--table runs nothing: leave --{min(given)} out")
    for arm in options.arms:
        both = given.keys() & typed(ARMS[arm][0]).keys()
        if both:
            raise UserError(f"--{min(both)} is what the arm {arm} changes: leave it out")
        try:
            settings(given | typed(ARMS[arm][0]))
        except UserError as error:
            raise UserError(f"the arm {arm} cannot have these options: {error}") from None


def settings(given: dict) -> dict:
    """All options of a run, as given or else as the preset has them; UserError if they clash."""
    given = {"preset": "atlas"} | given
    return dataclasses.asdict(
        resolve(atlas.AtlasConfig, given, presets=atlas.PRESETS, training=True)
    )


def refuse_other_settings(options: argparse.Namespace) -> None:
    """UserError if runs of different settings would come into one table.

    With --table all runs are compared with the first one, else with the options. Each run must
    also have its own seed, and what its arm changes.
    """
    expected = {}
    if not options.table:
        expected = settings(typed(options.more))
    for seed in options.seeds:
        for arm in ("rl", *ARMS):
            folder = options.runs / f"{arm}-{seed}"
            if record_of(folder).exists():
                how_it_ended(folder)  # UserError if it is damaged
            if not (folder / "config.json").exists():
                if not options.table:
                    refuse_orphans(seed, arm, options)
                continue
            # An option that is younger than the run counts as its default.
            made = dataclasses.asdict(atlas.AtlasConfig()) | config_of(folder)
            changed = {"seed": seed} | (typed(ARMS[arm][0]) if arm in ARMS else {})
            if not expected:  # of --table
                expected = {name: made[name] for name in made.keys() - changed.keys() - MAY_DIFFER}
            wanted = expected | changed
            # What may differ elsewhere is compared too where the arm, or the seed, sets it.
            compared = (wanted.keys() - MAY_DIFFER) | changed.keys()
            other = sorted(name for name in compared if made[name] != wanted[name])
            if other:
                name = "preset" if "preset" in other else other[0]
                raise UserError(
                    f"{folder} was made with --{name} {made[name]}, not {wanted[name]}: name "
                    "another --runs"
                )


def refuse_orphans(seed: int, arm: str, options: argparse.Namespace) -> None:
    """UserError if evaluations are there of a training that is not: they asked another model."""
    asked = ["warm-start", "after-RL"] if arm == "rl" else [f"after-{arm}"]
    asked += [f"warm-start-{arm}"] if arm in OWN_START else []
    for name in [f"{model}-{decoding}-{seed}" for model in asked for decoding in DECODING]:
        if record_of(options.runs / name).exists():
            raise UserError(
                f"{options.runs / name} asked a model whose run {arm}-{seed} is gone: delete it "
                "and its .run.json, or name another --runs"
            )


def carry_out(name: str, arguments: list[str], options: argparse.Namespace) -> None:
    """One command of recipes.atlas; its log, and how it ended, lie beside its folder."""

    def on_end(ended: Ended) -> None:
        remember(options.runs / name, ended)
        if ended.code:
            options.failed.append(name)
        outcome = f"failed, exit {ended.code}" if ended.code else "ok"
        print(f"{name}: {outcome}, {ended.cpu_seconds:.0f} CPU s", flush=True)

    folders = ["--runs", str(options.runs), "--cache", str(options.cache)]
    line = ["-m", "recipes.atlas", *arguments, "--name", name, *folders]
    pool([(name, line)], options.runs, 1, on_end)


def train(seed: int, arm: str, options: argparse.Namespace) -> None:
    """The RL run, or the rest of it, with the warm start before."""
    folder = options.runs / f"{arm}-{seed}"
    if is_finished(folder):
        return
    line = ["--seed", str(seed), *options.more]
    if arm in ARMS:
        line += ARMS[arm][0]
    if (folder / "config.json").exists():
        line.append("--resume")
    carry_out(folder.name, line, options)


def evaluate(seed: int, options: argparse.Namespace) -> None:
    """Every model's evaluations that are missing, the trained one's first: time may run out.

    All are asked all held-out questions, though the run may have asked itself fewer.
    """
    run = options.runs / f"rl-{seed}"
    made = config_of(run)
    paths = {"run": str(run), "start": made["model"], "smollm2": smollm2.NAME}
    for model, (command, whom) in reversed(MODELS.items()):
        if whom == "smollm2" and seed != options.seeds[0]:
            continue
        line = [command, paths[whom]]
        if whom != "run":
            line += settings_of_start(made, options)
        put_questions(model.replace(" ", "-"), seed, line, made, options)


def evaluate_arm(seed: int, arm: str, options: argparse.Namespace) -> None:
    """An arm's evaluations that are missing, its own start's included; none before its end."""
    folder = options.runs / f"{arm}-{seed}"
    if not is_finished(folder):
        return
    made = config_of(folder)
    put_questions(f"after-{arm}", seed, ["eval", str(folder)], made, options)
    if arm in OWN_START:
        line = ["eval", made["model"], *settings_of_start(made, options), *ARMS[arm][0]]
        put_questions(f"warm-start-{arm}", seed, line, made, options)


def settings_of_start(made: dict, options: argparse.Namespace) -> list[str]:
    """The options of an evaluation of a model that brings none: a warm start, or the untaught one.

    They are the seed and preset of the run that `made` tells of, and what evaluations have of the
    bench's further options.
    """
    given = typed(options.more)
    passed_on = {name: value for name, value in given.items() if name not in NOT_PASSED_ON}
    if passed_on.get("system1") == "frozen":
        del passed_on["system1"]  # in a model that no RL has trained both roles are the start's
    own = ["--seed", str(made["seed"]), "--preset", made["preset"]]
    return [*own, *atlas.as_options(passed_on)]


def put_questions(
    name: str, seed: int, line: list[str], made: dict, options: argparse.Namespace
) -> None:
    """One model's evaluations that are missing, sampled at its run's temperature and greedily."""
    line = [*line, "--eval_questions", HELD_OUT, "--threads", str(made["threads"])]
    for decoding in DECODING:
        folder = options.runs / f"{name}-{decoding}-{seed}"
        if was_asked(folder):
            continue
        # The beginning of one that was cut short, or what a failed one left.
        shutil.rmtree(folder, ignore_errors=True)
        record_of(folder).unlink(missing_ok=True)
        temperature = made["temperature"] if decoding == "sampled" else 0
        carry_out(folder.name, [*line, "--temperature", str(temperature)], options)


def summarise(seed: int, options: argparse.Namespace) -> list[dict]:
    """A row for each model and decoding that was asked, with the evaluation's own table."""
    rows = []
    right = {}  # (model, decoding) -> question id -> whether its answer is right
    # A row's model -> how its folders begin, and the training that must have ended, if any.
    models = {model: (model.replace(" ", "-"), None) for model in MODELS}
    models["after RL"] = ("after-RL", "rl")
    names = {arm: f"after RL, {name}" for arm, (_, name) in ARMS.items()}
    starts = {f"warm start, {ARMS[arm][1]}": f"warm-start-{arm}" for arm in OWN_START}
    models |= {name: (prefix, None) for name, prefix in starts.items()}
    models |= {names[arm]: (f"after-{arm}", arm) for arm in ARMS}
    # A row's model -> the one that it is compared with, which stands before it in `models`.
    references = {"after RL": "warm start"} | dict.fromkeys(names.values(), "after RL")
    references |= dict.fromkeys(starts, "warm start")
    references[names["balance-advantage"]] = names["sample-mean"]
    for model, (prefix, trained) in models.items():
        if trained and not is_finished(options.runs / f"{trained}-{seed}"):
            continue
        for decoding in DECODING:
            folder = options.runs / f"{prefix}-{decoding}-{seed}"
            if not was_asked(folder):
                continue
            row = {"seed": seed, "model": model, "decoding": decoding}
            row |= {"sets": table_of(folder), **made_by(folder)}
            right[model, decoding] = right_answers(folder)
            reference = references.get(model)
            if (reference, decoding) in right:
                before = right[reference, decoding]
                row["change"] = change(reference, before, right[model, decoding], folder)
            rows.append(row)
    return rows


def right_answers(folder: Path) -> dict[str, bool]:
    """Of an evaluation: question id -> whether its answer is right.

    UserError unless each question of the table is there once, and as many are right.
    """
    path = folder / "rollouts" / "step_0.jsonl"
    records = read_lines(path)
    right = {str(record.get("question_id")): record.get("reward") == 1 for record in records}
    whole = next(part for part in table_of(folder) if part["set"] == "all")
    number = round(whole["accuracy"] * whole["questions"])
    if not len(records) == len(right) == whole["questions"] or sum(right.values()) != number:
        raise UserError(
            f"{path} does not hold what the table tells: delete {folder}, and run the same "
            "command again"
        )
    return right


def change(reference: str, before: dict[str, bool], after: dict[str, bool], folder: Path) -> dict:
    """How many questions a model has right and its reference has not, and the reverse.

    before, after: right answers of the reference and of the model. UserError, which names the
    model's `folder`, if they were not asked the same questions.
    """
    if before.keys() != after.keys():
        raise UserError(
            f"{folder} and the {reference} were asked different questions: delete the evaluation "
            "that is wrong, and run the same command again"
        )
    gained = sum(after[name] > before[name] for name in after)
    lost = sum(after[name] < before[name] for name in after)
    return {"from": reference, "gained": gained, "lost": lost, "p": sign_test(gained, lost)}


def share_of(name: str, right: int, asked: int) -> dict:
    """A set's part of a row: the share of right answers with its 95 % interval."""
    low, high = wilson_interval(right, asked)
    return {"set": name, "questions": asked, "accuracy": right / asked, "low": low, "high": high}


def pooled(rows: list[dict]) -> list[dict]:
    """A row over all seeds for each model and decoding that several seeds have, set by set.

    The interval speaks of these models and questions. It does not say how far seeds lie apart.
    UserError if seeds were asked different sets.
    """
    together = {}
    for row in rows:
        together.setdefault((row["model"], row["decoding"]), []).append(row)
    found = []
    for (model, decoding), members in together.items():
        if len(members) < 2:
            continue
        tables = [row["sets"] for row in members]
        names = [part["set"] for part in tables[0]]
        if any({part["set"] for part in table} != set(names) for table in tables):
            raise UserError(
                f"{model}, {decoding}: the seeds were asked different sets of questions"
            )
        sets = []
        for name in names:
            parts = [part for table in tables for part in table if part["set"] == name]
            asked = sum(part["questions"] for part in parts)
            right = sum(round(part["questions"] * part["accuracy"]) for part in parts)
            sets.append(share_of(name, right, asked))
        row = {"seed": "all", "model": model, "decoding": decoding, "sets": sets}
        changes = [row["change"] for row in members if "change" in row]
        if len(changes) == len(members):
            gained, lost = (sum(one[key] for one in changes) for key in ("gained", "lost"))
            row["change"] = changes[0] | {"gained": gained, "lost": lost}
            row["change"]["p"] = sign_test(gained, lost)
        found.append(row)
    return found


def record_of(folder: Path) -> Path:
    """The file that says how a command ended; it lies beside the command's folder."""
    return folder.with_name(f"{folder.name}.run.json")


def went_well(folder: Path) -> bool:
    """Whether the command that made a folder came to its end, without a failure."""
    return record_of(folder).exists() and how_it_ended(folder)["exit"] == 0


def is_finished(folder: Path) -> bool:
    """Whether a training has come to its end."""
    return bool(metrics_of(folder)) and went_well(folder)


def table_of(folder: Path) -> list[dict]:
    """An evaluation's table; UserError if it is damaged."""
    try:
        table = json.loads((folder / "table.json").read_text())
    except (OSError, ValueError, RecursionError):
        table = None
    whole = isinstance(table, list) and all(map(is_whole, table))
    names = [part["set"] for part in table] if whole else []
    if "all" not in names or len(set(names)) < len(names):
        raise UserError(f"{folder} holds no whole table: delete it, and run the same command again")
    return table


def is_whole(part) -> bool:
    """Whether a part of a table has all that the bench reads, and nothing absurd."""
    return (
        isinstance(part, dict)
        and isinstance(part.get("set"), str)
        and type(part.get("questions")) is int
        and part["questions"] > 0
        and all(is_share(part.get(name)) for name in ("accuracy", "low", "high"))
        and all(is_number(part.get(name, 0)) and part.get(name, 0) >= 0 for name in SHOWN)
        and not any(isinstance(value, float) and not is_number(value) for value in part.values())
    )


def was_asked(folder: Path) -> bool:
    """Whether an evaluation has come to its end."""
    return went_well(folder) and (folder / "table.json").exists()


def how_it_ended(folder: Path) -> dict:
    """A folder's record; UserError if it is damaged."""
    how = read_json(record_of(folder))
    texts = (how.get("commit"), how.get("cpu"))
    if (
        type(how.get("exit")) is not int
        or not is_number(how.get("cpu_seconds"))
        or not all(text is None or isinstance(text, str) for text in texts)
        or not {"exit", *MADE_BY} <= how.keys()
    ):
        raise UserError(
            f"{record_of(folder)} is damaged: delete it, and run the same command again"
        )
    return how


def made_by(folder: Path) -> dict:
    """How a folder was made: its CPU seconds, and commit and CPU of its last part.

    A seed's first run includes the warm start. Parts that were interrupted are not counted.
    """
    how = how_it_ended(folder)
    return {key: how[key] for key in MADE_BY}


def report(rows: list[dict]) -> str:
    """The table: accuracy with its interval, by kind of question and of all; calls, lengths.

    Last the change against another model on the same questions, with its p-value.
    """
    shown = []
    for row in rows:
        line = {key: row[key] for key in ("seed", "model", "decoding")}
        for part in sorted(row["sets"], key=lambda part: part["set"]):
            line[part["set"]] = with_interval(part["accuracy"], part["low"], part["high"])
        whole = next(part for part in row["sets"] if part["set"] == "all")
        line["n"] = whole["questions"]
        for key in SHOWN:
            if key in whole:
                line[key] = f"{whole[key]:.2f}"
        if "change" in row:
            line["change"] = "+{gained} -{lost} from {from}, p {p:.2g}".format(**row["change"])
        shown.append(line)
    return common.table(shown)


def without_paths(text: str, options: argparse.Namespace) -> str:
    """A text without the folders that runs and cache lay in on the machine that made them."""
    for folder in (options.runs, options.cache):
        text = text.replace(str(folder), folder.name)
    return text


def keep(options: argparse.Namespace) -> Path:
    """Writes the table of all seeds, and the runs' small files beside it; prints the table.

    UserError if there is nothing to tabulate.
    """
    rows = [row for seed in options.seeds for row in summarise(seed, options)]
    if not rows:
        raise UserError(f"nothing was evaluated in {options.runs}")
    rows += pooled(rows)
    print(report(rows))
    name = options.results or config_of(options.runs / f"rl-{rows[0]['seed']}")["preset"]
    runs = []
    for folder in [options.runs / f"{arm}-{s}" for s in options.seeds for arm in ("rl", *ARMS)]:
        if not is_finished(folder):
            continue
        lines = metrics_of(folder)
        copy_run(folder, common.RESULTS / name / folder.name, options)
        parts = ("seconds_rollout", "seconds_train", "seconds_eval")
        # Wall time, without the warm start and what else stands around the steps.
        seconds = sum(line.get(part) or 0 for line in lines for part in parts)
        runs.append({"run": folder.name, "seconds_of_steps": seconds, **made_by(folder)})
    plot(rows, options, common.RESULTS / name / "seeds.png")
    seeds = ["--seeds", *map(str, options.seeds)]
    arms = ["--arms", *options.arms] if options.arms else []
    table = ["--table"] if options.table else []
    results = ["--results", options.results] if options.results else []
    command = " ".join(["python -m bench.atlas", *seeds, *arms, *results, *table, *options.more])
    return common.save(f"{name}/table", command, rows, runs=runs)


def plot(rows: list[dict], options: argparse.Namespace, path: Path) -> None:
    """Training reward over the steps, and held-out accuracy before and after, seed by seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), dpi=110, layout="constrained")
    rewards, *held_out = figure.subplots(1, 3, sharey=True)
    rewards.set(title="Training reward", xlabel="RL step", ylabel="share right")
    seeds = list(dict.fromkeys(row["seed"] for row in rows if row["seed"] != "all"))
    for number, seed in enumerate(seeds):
        colour = f"C{number}"
        lines = metrics_of(options.runs / f"rl-{seed}")
        steps = [line["step"] for line in lines]
        rewards.plot(steps, [line["reward"] for line in lines], color=colour, label=f"seed {seed}")
        for ax, decoding in zip(held_out, DECODING):
            plot_pair(ax, rows, seed, decoding, number - (len(seeds) - 1) / 2, colour)
    for ax, decoding in zip(held_out, DECODING):
        ax.set_title(f"Held out, {decoding}, 95 % intervals")
        ax.set_xticks((0, 1), ("warm start", "after RL"))
        ax.set_xlim(-0.4, 1.4)
    for ax in figure.axes:
        ax.set_ylim(0, 1)
        ax.grid(axis="y", alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    rewards.legend(frameon=False, loc="lower right")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, picture.getvalue())


def plot_pair(ax, rows: list[dict], seed: int, decoding: str, offset: float, colour: str) -> None:
    """A seed's accuracy after the warm start and after RL; seeds stand `offset` places apart."""
    parts = {
        row["model"]: next(part for part in row["sets"] if part["set"] == "all")
        for row in rows
        if row["seed"] == seed and row["decoding"] == decoding
    }
    pair = [parts.get(model) for model in ("warm start", "after RL")]
    if None in pair:
        return
    shares = [part["accuracy"] for part in pair]
    errors = [
        [part["accuracy"] - part["low"] for part in pair],
        [part["high"] - part["accuracy"] for part in pair],
    ]
    places = [place + 0.06 * offset for place in (0, 1)]
    ax.errorbar(places, shares, errors, color=colour, marker="o", markersize=4, capsize=3)


def copy_run(folder: Path, target: Path, options: argparse.Namespace) -> None:
    """A run's texts; of the first seed's also what is large, its curves and trajectories."""
    target.mkdir(parents=True, exist_ok=True)
    texts = [folder / name for name in KEPT] + [folder.with_name(f"{folder.name}.log")]
    first = options.seeds[0]
    if folder.name == f"rl-{first}":
        write_whole(target / "curves.png", (folder / "curves.png").read_bytes())
        page = options.runs / f"after-RL-sampled-{first}" / "trajectories.html"
        texts += [page] if page.exists() else []
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="replace")
        write_whole(target / path.name, without_paths(text, options).encode())


def run_all(options: argparse.Namespace) -> None:
    """Every run and evaluation that is missing, seed by seed. UserError if RL itself failed."""
    for seed in options.seeds:
        train(seed, "rl", options)
        folder = options.runs / f"rl-{seed}"
        if not is_finished(folder):
            raise UserError(f"the run rl-{seed} did not end well, see {folder}.log")
        evaluate(seed, options)
        for arm in options.arms:
            train(seed, arm, options)
            evaluate_arm(seed, arm, options)


def main() -> int:
    """The command line; returns the exit code."""
    # Else --seed would be read as --seeds, and could not be refused.
    reader = OneLineParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    reader.add_argument("--seeds", type=int, nargs="+", default=[0])
    reader.add_argument("--arms", nargs="+", default=[], choices=ARMS, help="further runs a seed")
    reader.add_argument("--runs", type=Path, default=ROOT / "runs" / "atlas-bench")
    reader.add_argument("--cache", type=Path, default=ROOT / ".cache", help="of the models")
    reader.add_argument("--results", help="folder of bench/results for them; the preset's name")
    reader.add_argument("--table", action="store_true", help="run nothing")
    options, options.more = reader.parse_known_args()
    options.seeds = list(dict.fromkeys(options.seeds))
    options.failed = []
    options.runs = options.runs.resolve()
    options.cache = options.cache.resolve()
    # SystemExit lets the pool end the run that is going on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        refuse_contradictions(options)
        refuse_other_settings(options)
        if not options.table:
            with alone_in(options.runs):
                run_all(options)
        print(keep(options))
        if options.failed:
            raise UserError(f"failed: {', '.join(options.failed)}; see the logs in {options.runs}")
        return 0
    except UserError as error:
        return fail(error)
    except OSError as error:  # a run's file is missing, or is a folder
        return fail(f"cannot read or write {error.filename or 'the output'}: {error.strerror}")
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
