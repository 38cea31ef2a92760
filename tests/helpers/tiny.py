"""Tiny random models of three architectures, and samples as rollouts would leave them."""

from pathlib import Path

import torch
import transformers

import grpo
import trainer
from family import gather_full
from rollout import Sample

CPU = torch.device("cpu")
OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "temperature": 1.0}
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LIVELY = SHAPE | {
    "head_dim": 8,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
OWN = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
}
KINDS = tuple(OWN)


def model(kind: str):
    """A random model, the same at every call."""
    torch.manual_seed(0)
    name = kind.capitalize()
    config = getattr(transformers, f"{name}Config")(**SHAPE | OWN[kind])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def config_of(kind: str, **options):
    """The config of an architecture by the beginning of its class's name."""
    return getattr(transformers, f"{kind}Config")(**LIVELY | options)


def lively(kind: str, seed: int = 0, **options):
    """A random model whose answers vary, with biases and norms that matter."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_of(kind, **options)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def saved(kind: str, folder: Path) -> Path:
    """Saves such a model and returns its folder."""
    model(kind).save_pretrained(folder)
    return folder


def make_samples(count: int = 13, vocabulary: int = 61, seed: int = 0) -> list[Sample]:
    """Samples of both roles: given and sampled stretches of random length."""
    generator = torch.Generator().manual_seed(seed)
    samples = []

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def tokens(length: int) -> list[int]:
        return torch.randint(0, vocabulary, (length,), generator=generator).tolist()

    for i in range(count):
        turns = 3 if i % 3 == 0 else 1
        sample = Sample("sys2" if turns == 3 else "sys1", question_index=i % 4, attempt=i)
        for _ in range(turns):
            given = draw(2, 20)
            sampled = draw(1, 9)
            sample.append_given(tokens(given))
            sample.tokens += tokens(sampled)
            sample.mask += [True] * sampled
            sample.logprobs += (-4 + 0.2 * torch.randn(sampled, generator=generator)).tolist()
        if i % 2:
            sample.append_given([3, 4])  # an observation that no step follows
        sample.advantage = float(torch.randn((), generator=generator))
        sample.loss_weight = 1
        samples.append(sample)
    return samples


def counts(samples: list[Sample]) -> dict[str, int]:
    """How many samples each role has."""
    return {role: sum(s.role == role for s in samples) for role in ("sys1", "sys2")}


def weigh(samples: list[Sample], total: dict[str, int] | None = None) -> list[torch.Tensor]:
    """grpo.token_weights; `total` counts the samples of each role, over all ranks."""
    total = total or counts(samples)
    return [grpo.token_weights([torch.tensor(s.mask)], total[s.role])[0] for s in samples]


def pack(samples: list[Sample], capacity: int = 10_000, device=CPU, **options):
    """Their micro-batches."""
    return trainer.micro_batches(samples, weigh(samples), capacity, device, **options)


def step(policy, batches, **objective) -> tuple[float, dict, list[dict]]:
    """(loss, gradients by name, statistics of each micro-batch) of one step."""
    policy.zero_grad()
    stats = trainer.backward(policy, batches, **OBJECTIVE | objective)
    trained = {n: gather_full(p.grad) for n, p in policy.named_parameters() if p.requires_grad}
    return sum(float(numbers["loss"]) for numbers in stats), trained, stats


class Tokenizer:
    """The part of a tokenizer that a saved state needs."""

    def save_pretrained(self, folder):
        pass
