"""bf16 against fp32 on a CPU: the sampler's and the packed trainer's speed, and the mismatch.

    python -m bench.bf16            a random model of SmolLM2-135M's shape, one thread
    python -m bench.bf16 --model F  the model in folder F, whose mismatch says more
    python -m bench.bf16 --quick    a tiny model, to see that it works; no file

prefill   2 prompts of 192 tokens, one new token each: tokens of the prompts a second.
decode    16 prompts of 8 tokens, 12 new ones each, at temperature 1: new tokens a second.
step      One micro-batch of 3 samples of 128 tokens of which the last quarter carries loss,
          forward and backward, no optimizer step: tokens a second.
mismatch  Of what was decoded, sampler's against trainer's log-probs, for each pair of types: the
          mean k3 estimate of the KL (the metric `mismatch_kl`) and the largest difference.

Forms take turns; the clock counts CPU seconds. What the processor does in hardware decides: AVX-512
BF16, AMX or neither; the file says what PyTorch found. Results: bench/results/bf16_cpu.json
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import grpo
import trainer
from bench.common import interleaved, save, spread, table
from rollout import Sample
from sampler import Sampler

SMOLLM2 = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
TINY = SMOLLM2 | dict(vocab_size=512, num_hidden_layers=2, intermediate_size=64)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
CPU = torch.device("cpu")


def make_model(shape: dict):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def random_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (count, length), generator=generator).tolist()


def packed(sequences: list[tuple[list[int], list[int], list[float]]]) -> trainer.MicroBatch:
    """One micro-batch of (given tokens, sampled tokens, their log-probs)."""
    samples = []
    for given, sampled, logprobs in sequences:
        sample = Sample("sys2", question_index=0, attempt=len(samples), advantage=1.0)
        sample.append_given(given)
        sample.tokens += sampled
        sample.mask += [True] * len(sampled)
        sample.logprobs += logprobs
        samples.append(sample)
    masks = [torch.tensor(sample.mask) for sample in samples]
    weights = grpo.token_weights(masks, len(samples))
    (batch,) = trainer.micro_batches(samples, weights, 1 << 30, CPU)
    return batch


def measure(model, rounds: int, scale: int) -> tuple[list[dict], list[dict]]:
    """Rows of speeds and rows of mismatches; `scale` divides the work."""
    vocabulary = model.config.vocab_size
    long_prompts = random_prompts(2, 192 // scale, vocabulary)
    short_prompts = random_prompts(16, 8, vocabulary)
    new = 12 // scale
    given = random_prompts(3, 96 // scale, vocabulary)
    sampled = random_prompts(3, 32 // scale, vocabulary)
    batch = packed([(g, s, [-10.0] * len(s)) for g, s in zip(given, sampled, strict=True)])
    samplers = {name: Sampler(model, max_tokens=4096, dtype=dtype) for name, dtype in TYPES.items()}
    policies = {name: trainer.Policy(model, bf16=name == "bf16") for name in TYPES}

    def step(policy):
        policy.zero_grad(set_to_none=True)
        trainer.backward(policy, [batch], [None], **OBJECTIVE)

    work = {}
    for name in TYPES:
        fill = samplers[name].generate
        work["prefill", name] = lambda fill=fill: fill(long_prompts, max_new_tokens=1)
        work["decode", name] = lambda fill=fill: fill(short_prompts, max_new_tokens=new)
        work["step", name] = lambda name=name: step(policies[name])
    tokens = {
        "prefill": sum(map(len, long_prompts)),
        "decode": len(short_prompts) * new,
        "step": batch.tokens.numel(),
    }
    seconds = interleaved(work, rounds)
    rows = []
    for part, count in tokens.items():
        pairs = zip(seconds[part, "fp32"], seconds[part, "bf16"], strict=True)
        ratio = spread([fp32 / bf16 for fp32, bf16 in pairs])
        row = {"part": part, "tokens": count}
        row |= {f"{name} tokens/s": count / spread(seconds[part, name])["median"] for name in TYPES}
        rows.append(row | {f"bf16 as fast, {key}": value for key, value in ratio.items()})
    return rows, mismatches(samplers, policies, short_prompts, new)


def mismatches(samplers: dict, policies: dict, prompts: list, new: int) -> list[dict]:
    """A row for each pair of types."""
    rows = []
    for sampling, sampler in samplers.items():
        done = sampler.generate(prompts, max_new_tokens=new)
        sequences = [(p, c.tokens, c.logprobs) for p, c in zip(prompts, done, strict=True)]
        batch = packed(sequences)
        for training, policy in policies.items():
            gap = trainer.logprob(policy, batch, 1.0) - batch.behaviour_logprob
            rows.append(
                {
                    "sampler": sampling,
                    "trainer": training,
                    "tokens": len(gap),
                    "mismatch_kl": (torch.expm1(gap) - gap).mean().item(),
                    "largest difference": gap.abs().max().item(),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    else:
        model = make_model(TINY if arguments.quick else SMOLLM2)
    rounds = 1 if arguments.quick else arguments.rounds
    speeds, gaps = measure(model, rounds, 4 if arguments.quick else 1)
    print(table(speeds), table(gaps), sep="\n\n")
    if arguments.quick:
        return
    capability = torch.backends.cpu.get_cpu_capability()
    amx = torch.cpu._is_amx_tile_supported()
    name = "bf16_cpu_model" if arguments.model else "bf16_cpu"
    command = "python -m bench.bf16" + (" --model FOLDER" if arguments.model else "")
    save(name, command, speeds, mismatch=gaps, capability=capability, amx=amx)


if __name__ == "__main__":
    main()
