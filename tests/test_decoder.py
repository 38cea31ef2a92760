"""The sampler's transformer: which models it takes, its weights, its small operations, its graphs.

That it says what transformers says, by packed weights and plain ones: tests/test_sampler.py.
"""

import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from helpers.tiny import CPU, SHAPE, config_of, lively

from sampler import Sampler, graphs
from sampler.graphs import Graphs
from sampler.model import Model, refusal
from sampler.plan import Batch

DYNAMIC = dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
WINDOWS = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)
REFUSED = [
    ("Gemma", {}, "architecture gemma"),
    ("Qwen3Moe", {}, "architecture qwen3_moe"),
    ("Mistral", dict(sliding_window=6), "a sliding window"),
    ("Qwen2", WINDOWS, "a sliding window"),
    ("Llama", DYNAMIC, "rope type dynamic"),
    ("Qwen3", dict(head_dim=12), "head size 12, no power of two"),
]


@pytest.mark.parametrize("kind, options, reason", REFUSED)
def test_a_model_that_is_not_supported_is_refused_with_the_reason(kind, options, reason):
    assert refusal(config_of(kind, **options)) == reason
    if kind == "Gemma":
        with pytest.raises(ValueError, match="GemmaForCausalLM .architecture gemma.*--server"):
            Sampler(lively(kind), max_tokens=256)


def test_a_multimodal_model_is_refused_with_the_reason():
    config = transformers.Gemma3Config(text_config=SHAPE | {"pad_token_id": 0})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="architecture gemma3_text.*--server"):
        Model(model, torch.float32, CPU)


def test_a_head_size_that_the_kernel_does_not_take_is_refused_on_cuda():
    with pytest.raises(ValueError, match="head size 8.*--server"):
        Model(lively("Qwen3"), torch.float32, torch.device("cuda"))


def test_graphs_are_captured_at_the_start(monkeypatch):
    """All of them before any request; a decode step replays one and captures none."""
    states = torch.randn(40, SHAPE["hidden_size"])
    captures = []
    replayed = []

    def new_graph():
        number = len(captures)
        return SimpleNamespace(pool=lambda: "memory", replay=lambda: replayed.append(number))

    def capture(graph, **options):
        captures.append(options)
        return contextlib.nullcontext()

    model = Model(lively("Qwen3"), torch.float32, CPU)
    monkeypatch.setattr(model, "hidden", lambda static, pool: states[: len(static.ids)])
    cuda = {"CUDAGraph": new_graph, "graph": capture, "Stream": Mock(), "current_stream": Mock()}
    for name, fake in {**cuda, "stream": contextlib.nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "can_capture", lambda pool: True)
    graphs_of_model = Graphs(model, torch.zeros(2, 2, 6, 4, 2, 8), 40)
    assert [options["pool"] for options in captures] == [None] + ["memory"] * 12
    # NCCL's thread may ask for its events meanwhile.
    assert {options["capture_error_mode"] for options in captures} == {"thread_local"}
    ids = torch.zeros(3, dtype=torch.int64)
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    lengths = torch.ones(3, dtype=torch.int32)
    for shared in (0, 1):  # rows that share pages, which the second graph reads once
        ranges = torch.ones(shared + 3, 5, dtype=torch.int32)
        batch = Batch(ids, ids, 4 * ids, table, lengths, kv_ranges=ranges)
        assert torch.equal(graphs_of_model.decode(batch), model.logits(states[:3]))
    # The sizes are 40, 32, 16, 8, 4, 2 and 1. Each but 1 has first the graph for shared pages.
    assert replayed == [9, 8] and len(captures) == 13
