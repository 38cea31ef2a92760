"""A study of how a mixture of experts routes two languages, and of steering its router.

arXiv 2510.04694. There is no agent, reward or sampler: a model with experts reads parallel texts in
two languages. q_l is the mean of the router's probabilities over a text's tokens in layer l.

    D_l = JSD(q_l^en, q_l^other) / (log E − ½ (H(q_l^en) + H(q_l^other)))          E experts
    Δ_k = share of expert k on tokens of the task − on other tokens, of the strong language
    steering: in some layers, for every token, z_k + λ std(z) before the softmax if Δ_k > τ

The paper: D over depth has the shape of a U, as the middle layers route the languages alike.
Steering the middle layers towards the strong language's task experts improves the weak language by
1 or 2 points; steering towards random experts or in other layers does not.

    python -m siblings.moe_routing            a minute or two of one core; next --seed 1, --seed 2

Here a Qwen3-MoE of four layers, with 2 of 8 experts active, learns to read marsrl_toy.py's pages.
The second language, a tenth of the data, renames each word of the first, so that texts are exactly
parallel. The task's tokens are the request and the answer; the other tokens are the page.

    <doc> ada joined labs . ada born 1968 . … <purpose> birth of ada <eot> 1968 <eot>

Sources: notes on the paper with its equations, and code that cites them; there is no public code.
τ and λ are ours (the paper tunes them for each model). A language renamed word by word is easier
than a real one, and four layers hardly have a middle. Tests: pytest tests/test_moe_routing.py
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from config import UserError, fail, option, parse, parser
from plumbing import folders
from siblings import marsrl_toy
from toy import base_model, language

EXPERTS = 8
LAYERS = 4
MIDDLE, OUTER = (1, 2), (0, 3)
WEAK_SHARE = 0.1  # of the training data is in the second language


@dataclass
class RoutingConfig:
    """The options."""

    name: str = option("moe_routing", "name of the folder below --runs")
    runs: str = option("runs", "folder of the results")
    seed: int = option(0, "seed of the model and its data")
    steps: int = option(600, "training steps")
    pages: int = option(500, "held-out pages")
    tau: float = option(0.05, "steering is towards experts with a larger Δ; hardly any exceeds 0.1")
    strength: float = option(0.5, "λ above")


# ----------------------------------------------------------------------------------- two languages


class Text(NamedTuple):
    """One page with a request, in one language."""

    tokens: list[int]  # the page, the request, the answer, <eot>
    task: int  # index of the request's first token


def vocabulary() -> dict[str, int]:
    """word -> token id in the first language; the second language's ids follow these."""
    return language.make_tokenizer().get_vocab()


def draw_text(rng: random.Random, ids: dict[str, int], weak: bool) -> Text:
    """A random page, and a request for one of its facts. Both languages share control words."""
    page = marsrl_toy.draw_page(rng)
    _, attribute, value = rng.choice(page.paths).split()
    name = page.question.split()[-1]
    request = f"<purpose> {attribute} of {name} <eot> {value} <eot>"
    text = f"<doc> {page.text}"
    tokens = [ids[word] for word in f"{text} {request}".split()]
    if weak:
        tokens = [x + len(ids) if x >= len(language.CONTROL) else x for x in tokens]
    return Text(tokens, len(text.split()))


def held_out(seed: int, count: int, weak: bool) -> list[Text]:
    """The held-out texts: both languages have the same pages."""
    rng = random.Random(f"routing eval {seed}")
    ids = vocabulary()
    return [draw_text(rng, ids, weak) for _ in range(count)]


def make_model(words: int) -> Qwen3MoeForCausalLM:
    """A model with random weights, for the tokens of both languages."""
    config = Qwen3MoeConfig(
        vocab_size=2 * words,
        hidden_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    return Qwen3MoeForCausalLM(config)


def train(model: Qwen3MoeForCausalLM, config: RoutingConfig) -> None:
    """Trains --steps steps, on the answers only."""
    ids = vocabulary()
    rng = random.Random(f"routing {config.seed}")

    def batch() -> list[base_model.Encoded]:
        texts = [draw_text(rng, ids, rng.random() < WEAK_SHARE).tokens for _ in range(48)]
        return [(tokens, [False] * (len(tokens) - 2) + [True] * 2) for tokens in texts]

    base_model.train(model, "mixture of experts", (batch,), config.steps, lr=3e-3, warmup=30)


# --------------------------------------------------------------------------------------- routing


@torch.no_grad()
def read(model, texts: list[Text]) -> tuple[float, Tensor, Tensor]:
    """(share of right answers, router logits [LAYERS, T, E], whether a token is the task's [T]).

    T counts the tokens of all texts, without padding.
    """
    tokens = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)  # [B, L]
    router_logits = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [
        g.register_forward_hook(lambda _, args, out: router_logits.append(out[0])) for g in gates
    ]
    logits = model(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    lengths, starts = torch.tensor([(len(text.tokens), text.task) for text in texts]).T
    place = torch.arange(tokens.shape[1])
    live = place < lengths[:, None]
    task = (place >= starts[:, None])[live]
    rows = torch.arange(len(texts))
    right = logits[rows, lengths - 3].argmax(-1) == tokens[rows, lengths - 2]
    return (
        float(right.float().mean()),
        torch.stack([z.view(*tokens.shape, -1)[live] for z in router_logits]),
        task,
    )


def entropy(q: Tensor) -> Tensor:
    """H of distributions [..., E], in nats."""
    return -(q * q.clamp_min(1e-30).log()).sum(-1)


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """D of two routings [..., E]."""
    mean = (entropy(one) + entropy(other)) / 2
    jsd = entropy((one + other) / 2) - mean
    return jsd / (torch.tensor(one.shape[-1]).log() - mean)


def routing(logits: Tensor, texts: list[Text]) -> Tensor:
    """q of each text: [LAYERS, T, E] -> [LAYERS, texts, E]."""
    parts = logits.softmax(-1).split([len(text.tokens) for text in texts], dim=1)
    return torch.stack([part.mean(1) for part in parts], dim=1)


def task_experts(logits: Tensor, task: Tensor, tau: float) -> list[list[int]]:
    """The experts with Δ_k > τ in each layer. Δ is a difference of activation shares."""
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2, -1).indices, 0.5)
    difference = chosen[:, task].mean(1) - chosen[:, ~task].mean(1)  # [LAYERS, E]
    return [row.gt(tau).nonzero()[:, 0].tolist() for row in difference]


@contextmanager
def steered(model, experts: dict[int, list[int]], strength: float) -> Iterator[None]:
    """A context in which the routers of these layers are steered towards these experts."""

    def steer(experts_of_layer, gate, args, output):
        logits = output[0].clone()
        logits[:, experts_of_layer] += strength * output[0].std(-1, keepdim=True)
        top, indices = logits.softmax(-1, dtype=torch.float).topk(gate.top_k, dim=-1)
        return logits, (top / top.sum(-1, keepdim=True)).to(logits.dtype), indices

    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gates[i].register_forward_hook(partial(steer, k)) for i, k in experts.items()]
    yield
    for hook in hooks:
        hook.remove()


def study(model, config: RoutingConfig) -> dict:
    """Divergence by layer, and the weak language's accuracy under each steering."""
    strong, weak = (held_out(config.seed, config.pages, weak) for weak in (False, True))
    right, logits, task = read(model, strong)
    right_weak, logits_weak, _ = read(model, weak)
    distance = divergence(routing(logits, strong), routing(logits_weak, weak)).mean(1)
    experts = task_experts(logits, task, config.tau)
    results = {"D": distance.tolist(), "strong": right, "weak": right_weak, "experts": experts}
    rng = random.Random(f"routing random {config.seed}")

    def accuracy(layers: tuple[int, ...], at_random: bool = False) -> float:
        chosen = {layer: experts[layer] for layer in layers}
        if at_random:
            chosen = {i: rng.sample(range(EXPERTS), len(own)) for i, own in chosen.items()}
        with steered(model, chosen, config.strength):
            return read(model, weak)[0]

    results["middle, task experts"] = accuracy(MIDDLE)
    results["outer, task experts"] = accuracy(OUTER)
    accuracies = [accuracy(MIDDLE, at_random=True) for _ in range(5)]
    results["middle, random experts"] = sum(accuracies) / len(accuracies)
    return results


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    config = RoutingConfig(**parse(parser(RoutingConfig, __doc__), arguments))
    folder = Path(config.runs) / config.name
    try:
        fits = all(0 <= number < 1e6 for number in (config.tau, config.strength))
        if min(config.pages, config.steps) < 1 or not fits or not 0 <= config.seed < 1 << 31:
            raise UserError(
                "--pages and --steps must be at least 1, --tau and --strength from 0 to 1e6, "
                f"--seed from 0 to {(1 << 31) - 1}"
            )
        folders.make(folder)
        torch.set_num_threads(1)
        torch.manual_seed(config.seed)
        model = make_model(len(vocabulary()))
        results = {"untrained": study(model, config)}
        train(model, config)
        results["trained"] = study(model, config)
        for when, numbers in results.items():
            print(when, *(f"{name:<24}{value}" for name, value in numbers.items()), sep="\n  ")
        print("written to", folders.write_json(folder / f"seed-{config.seed}.json", results))
    except UserError as error:
        return fail(error)
    except KeyboardInterrupt:
        fail("interrupted; nothing is written, so start again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
