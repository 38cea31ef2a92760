"""Layers under torch.compile, as on CUDA: few graphs, and the numbers of the plain model.

The back end is PyTorch's "eager" or "aot_eager", which run the captured graphs uncompiled.
"""

import copy

import pytest
import torch
from helpers.tiny import CPU, make_samples, model, pack, step
from test_frozen import FROZEN
from test_mars import SMALL, half, metrics, run
from test_policy import alone  # noqa: F401
from torch._dynamo.utils import counters

import trainer
from kernels import products


@pytest.fixture(autouse=True)
def compilation(monkeypatch):
    """The compiler's counters, and what it has compiled, are this test's alone."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)  # CUDA never asks
    yield
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_stance("default")


def kin(samples):
    """The samples, and each once more with another end: they share prefixes."""
    others = copy.deepcopy(samples)
    for other in others:
        other.tokens[-2] ^= 1
    return samples + others


def assert_close(one, other, tolerance=1e-6):
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=tolerance)


def with_reference(batches):
    for batch in batches:
        batch.ref_logprob = batch.old_logprob.clone()
    return batches


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "kind, backend, fsdp", [("qwen2", "aot_eager", False), ("llama", "eager", True)]
)
def test_all_layers_and_batch_shapes_share_four_graphs(kind, backend, fsdp):
    """Six numbers of samples, shared prefixes, no sample: all run what the first one compiled.

    A group of one has all of FSDP's code; what ranks sum is tested in test_policy.py.
    """
    options = {"bf16": False, "recompute_activations": True}
    plain, compiled = (trainer.Policy(model(kind), **options, compiler=c) for c in (None, backend))
    if fsdp:
        plain, compiled = (trainer.parallel(x, fsdp=True, device=CPU) for x in (plain, compiled))
    for samples in [*(make_samples(n) for n in (2, 3, 4, 1, 5, 6)), kin(make_samples(4)), []]:
        batches = pack(samples) or [trainer.make_micro_batch([], [], [], CPU)]
        with_reference(batches)
        assert_close(*(step(policy, batches, kl_beta=0.1) for policy in (compiled, plain)))
        assert counters["stats"]["unique_graphs"] == 4
    assert len(counters["graph_break"]) == 1  # only attention, which is not compiled


@pytest.mark.usefixtures("alone")
def test_adapters_on_and_off_under_ddp(capsys):
    """Both share the compiler's cache. Off, all is frozen, as in the reference of a dense model.

    The reference comes first, as in a run, so the compiler is tried while no gradient is asked for.
    """

    def make_policy(compiler):
        adapted = model("llama")
        trainer.add_adapters(adapted, 3, seed=0)
        policy = trainer.Policy(adapted, bf16=False, compiler=compiler)
        return trainer.parallel(policy, fsdp=False, device=CPU)

    plain, compiled = make_policy(None), make_policy("eager")
    for samples in (make_samples(3), kin(make_samples(5))):
        batches = with_reference(pack(samples))
        references = map(trainer.reference, (plain, compiled))
        torch.testing.assert_close(*(trainer.logprob(r, batches[0], 1.0) for r in references))
        assert_close(*(step(policy, batches, kl_beta=0.1) for policy in (compiled, plain)))
        graphs = counters["stats"].pop("unique_graphs", 0)
    assert graphs == 0, "the second shape needs no new graph"
    assert "failed" not in capsys.readouterr().out


def no_forward(graph, inputs):
    raise RuntimeError("no compiler is here")


def no_backward(graph, inputs):
    """The graph, whose backward part fails when it is asked for, as a compiler's would."""

    def fail(gradient):
        raise RuntimeError("no assembler is here")

    def run(*arguments):
        out = graph(*arguments)
        for value in out:
            if getattr(value, "requires_grad", False):
                value.register_hook(fail)
        return out

    return run


@pytest.mark.parametrize(
    "backend, missing, recompute",
    [(no_forward, "compiler", False), (no_backward, "assembler", True)],
)
def test_a_compiler_that_fails_costs_one_sentence(backend, missing, recompute, capsys):
    """In its forward part or in its backward part. Then the step is the plain one."""
    options = {"recompute_activations": recompute, "compiler": backend}
    batches = with_reference(pack(kin(make_samples(3)), 90))
    found = step(trainer.Policy(model("llama"), bf16=False, **options), batches, kl_beta=0.1)
    said = capsys.readouterr().out
    assert said == f"torch.compile failed, so training is slower: no {missing} is here\n"
    plain = trainer.Policy(model("llama"), bf16=False)
    assert_close(found, step(plain, batches, kl_beta=0.1), 0)


def test_the_run_says_that_its_first_step_compiles(base, tmp_path, monkeypatch, capsys):
    """And what is trained is what was sampled, with a frozen role and the KL term."""
    monkeypatch.setattr(trainer, "compiler_of", lambda device: "eager")
    arguments = ["--model", base, "--runs", tmp_path, "--name", "x", "--steps", 1, *SMALL]
    assert run(*arguments, *FROZEN, "--eval_questions", 2, grade=half) == 0
    before, after = capsys.readouterr().out.split("the first step compiles the layers: ")
    assert "memory per process" in before and "step 1/1" not in before
    assert after.startswith("about a minute more, an estimate\n")
    assert counters["stats"]["unique_graphs"] >= 4
    (line,) = metrics(tmp_path / "x")
    assert line["grad_norm"] > 0 and line["kl"] < 1e-9 and line["mismatch_kl"] < 1e-8
