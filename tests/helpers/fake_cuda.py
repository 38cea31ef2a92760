"""The sampler's loop and the packed forward on fake CUDA tensors: the host never waits unplanned.

A fake tensor has a device, a type and a shape, but no values and no memory. So the code takes its
CUDA branches on a machine without a GPU, and `Watch` sees each operation. It refuses what makes
the host wait for the device (`.item()`, nonzero, masks as indices, copies from memory that is not
pinned) and what mixes tensors of both. Kernels and graphs run nothing here:
tests/test_kernels_compile.py compiles the kernels. Autograd's engine wants a driver, so there is no
backward pass.

tests/test_fake_cuda.py runs this file in a process of its own, because real models that ran after
fake ones in one process gave wrong numbers. Alone: pytest tests/helpers/fake_cuda.py
"""

import copy
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny import CPU, OBJECTIVE, SHAPE, make_samples, weigh
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

import trainer
from kernels import linear_loss, paged
from sampler import Sampler
from sampler.graphs import Graphs

CUDA = torch.device("cuda:0")
V = SHAPE["vocab_size"]


# ---------------------------------------------------------------- the watch

WAITS = "_local_scalar_dense _unique2 argwhere bincount equal is_nonzero item masked_select".split()
WAITS += "nonzero nonzero_numpy unique_consecutive unique_dim".split()


class Watch(TorchDispatchMode):
    """Raises where the host would wait for the device; counts reads.

    planned: operations that may wait. Their answers are as if all values were true.
    """

    def __init__(self, planned=()):
        super().__init__()
        self.planned = planned
        self.waited = []  # the planned operations that came
        self.reads = 0  # to pinned memory, without waiting

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        if op.namespace == "prim":  # It asks a tensor for its device.
            return op(*args, **kwargs)
        if name in ("resolve_conj", "resolve_neg"):  # tolist() begins with them.
            return args[0]
        named = {a.name: x for a, x in zip(op._schema.arguments, args, strict=False)} | kwargs
        if name in ("to", "_to_copy", "copy_"):
            return self.check_copy(named, op(*args, **kwargs))
        tensors = [x for x in tree_leaves(named) if isinstance(x, Tensor)]
        if any(x.is_cuda for x in tensors):
            if name in self.planned:
                return self.answer(name, args[0])
            check(op, name, named, tensors)
        return op(*args, **kwargs)

    def check_copy(self, named, copied):
        """A copy between host and device must not wait, and its host side must be pinned."""
        source = named.get("src", named["self"])
        if source.is_cuda == copied.is_cuda:
            return copied
        assert named.get("non_blocking"), f"the host waits for a copy to {copied.device}"
        if source.is_cuda:
            self.reads += 1
            return self.result(source.shape)
        assert getattr(source, "pinned", False), "the host waits: the memory is not pinned"
        return copied

    def result(self, shape) -> Tensor:
        """What a decode step gives, tokens and log-probs, as a real tensor on the host."""
        with unset_fake_temporarily():
            result = torch.full(shape, -1.0, dtype=torch.float64)
            result[0] = (torch.arange(shape[1]) + self.reads) % V
        return result

    def answer(self, name, x):
        self.waited.append(name)
        if name == "nonzero":
            return torch.zeros(len(x), x.dim(), dtype=torch.int64, device=CUDA)
        return True


def check(op, name, named, tensors):
    """AssertionError if the host waits in an operation with tensors of the device."""
    assert name not in WAITS, f"the host waits in {op}"
    # PyTorch takes a tensor of one number from the host too, but an assignment copies it first.
    arrays = [x for x in tensors if x.dim() or name == "index_put_"]
    assert all(x.is_cuda for x in arrays), f"{op} mixes tensors of the host and of the device"
    if name in ("index", "index_put_"):
        masks = [x for x in named["indices"] if x is not None and x.dtype == torch.bool]
        assert not masks, f"the host waits in {op}: a mask does not tell its size"
    if name == "repeat_interleave" and "repeats" in named:
        known = isinstance(named["repeats"], int) or named.get("output_size") is not None
        assert known, f"the host waits in {op}: the repeats do not tell their sum"


# ---------------------------------------------------------------- in the place of a driver


def pin(tensor):
    """Tensor.pin_memory."""
    tensor.pinned = True
    tensor.constant = None  # A fake tensor of one number knows it, and would really be copied.
    return tensor


def launch(kernel, *args, grid, warmup, **options):
    """A kernel's launch: all tensors must be on the device."""
    assert all(x.is_cuda for x in args if isinstance(x, Tensor)), "a kernel got a host's tensor"


def capture(graphs, static, memory):
    """A graph's capture: what the graph would hold runs once, and may not wait for anything."""
    with torch.no_grad(), Watch():
        hidden = graphs.model.hidden(static, graphs.pool)
    return SimpleNamespace(replay=lambda: None, pool=lambda: None), hidden


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """All tensors are fake, and what asks the driver is replaced."""
    monkeypatch.delenv("MARS_KERNELS", raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "Event", Mock())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(Graphs, "capture", capture)
    monkeypatch.setattr(paged, "programs_at_once", lambda device: 132)
    monkeypatch.setattr(type(paged.split_kernel), "run", launch)
    # A fake parameter cannot be moved: models are made where they are needed.
    monkeypatch.setattr(nn.Module, "to", lambda module, *target: module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def model(dtype=torch.float32):
    config = Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPE)
    with CUDA:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


# ---------------------------------------------------------------- the watch itself


HIDDEN_WAITS = {
    "item": lambda x: x[0].item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.__setitem__(x > 0, x[:1]),
    "list as an index": lambda x: x[[0, 1]],
    "assignment of a number by an index": lambda x: x.__setitem__(x.long(), 0),
    "tensors of both": lambda x: x + torch.arange(8),
    "read": lambda x: x.cpu(),
    "upload from memory that is not pinned": lambda x: torch.arange(8).to(CUDA, non_blocking=True),
    "upload that waits": lambda x: torch.arange(8).pin_memory().to(CUDA),
    "unknown sum of repeats": lambda x: torch.repeat_interleave(x, x.long()),
}


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference mode"])
@pytest.mark.parametrize("kind", HIDDEN_WAITS)
def test_the_watch_sees(kind, inference):
    """Inference mode does not take operations apart, so they have other names there."""
    with torch.inference_mode(inference), Watch():
        x = torch.zeros(8, device=CUDA)
        with pytest.raises(AssertionError, match="wait|mix"):
            HIDDEN_WAITS[kind](x)


# ---------------------------------------------------------------- the sampler


@pytest.mark.parametrize("buckets", [None, False], ids=["graphs", "no graphs"])
def test_the_sampler_waits_for_nothing_but_a_step_s_result(buckets):
    """Forks, chunks, all kinds of draws, later turns, preemption, closing, new weights."""
    sampler = Sampler(
        model(), max_tokens=192, page_size=16, max_sequences=8, prefill_chunk=32, buckets=buckets
    )
    trained = model()
    draws = [(1.0, 1.0), (0.0, 1.0), (0.7, 1.0), (0.7, 0.9), (1.0, 0.5)]
    talks = [sampler.open() for _ in draws]
    steps = []
    with Watch() as watch:
        for turn in range(3):
            for talk, (temperature, top_p) in zip(talks, draws, strict=True):
                options = {"temperature": temperature, "top_p": top_p, "stop_ids": [V - 1]}
                sampler.submit(talk, [turn] * 22, max_new_tokens=8, **options)
            steps.append(sampler.step())
            steps.append(sampler.step())
            if turn == 1:
                sampler.lend_pool()
                sampler.load_weights(trained)
            if turn == 2:
                sampler.close(talks[0])
            while sampler.busy:
                steps.append(sampler.step())
    assert len(sum(steps, [])) == 3 * len(draws) - 1
    assert sampler.stats["shared_tokens"] and sampler.stats["preemptions"]
    assert 0 < watch.reads <= len(steps)


# ---------------------------------------------------------------- the trainer


def micro_batch(share_prefixes: bool = False):
    """A micro-batch on the device."""
    with unset_fake_temporarily():
        samples = make_samples()
        if share_prefixes:
            other = copy.deepcopy(samples[0])
            other.tokens[-2] = 1 - other.tokens[-2]
            samples.append(other)
        (batch,) = trainer.micro_batches(samples, weigh(samples), 10_000, CPU)
        assert (batch.keys is not None) == share_prefixes
    for part in [batch, batch.keys] if share_prefixes else [batch]:
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, torch.empty_like(value, device=CUDA))
    return batch


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_the_packed_forward_never_waits(share_prefixes):
    policy = trainer.Policy(model(), bf16=True, recompute_activations=True)
    batch = micro_batch(share_prefixes)
    with Watch():
        hidden, _ = policy.hidden(batch)
    assert hidden.is_cuda and hidden.dtype == torch.bfloat16


def test_the_loss_waits_for_its_live_tokens_and_for_one_check(monkeypatch):
    def gradient(loss_of, logprob, part):
        return torch.ones_like(loss_of(logprob, part)[0].expand_as(logprob))

    monkeypatch.setattr(linear_loss, "gradient_per_token", gradient)
    policy = trainer.Policy(model(), bf16=True)
    for planned, call in (
        (["_local_scalar_dense"], lambda: trainer.logprob(policy, micro_batch(), 1.0)),
        (["nonzero", "_local_scalar_dense"], lambda: policy(micro_batch(), **OBJECTIVE)),
    ):
        with Watch(planned) as watch:
            call()
        assert watch.waited == planned


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
