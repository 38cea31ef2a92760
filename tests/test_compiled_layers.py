"""Layers under torch.compile, as on CUDA: few graphs, and the numbers of the plain model.

The back end is PyTorch's "eager" or "aot_eager", which run the captured graphs uncompiled.
"""

import copy

import pytest
import torch
from helpers.tiny import CPU, OBJECTIVE, make_samples, model, pack
from test_mars import SMALL, half, metrics, run
from test_policy import alone  # noqa: F401
from torch._dynamo.utils import counters

import trainer
from family import gather_full
from kernels import products


@pytest.fixture(autouse=True)
def compilation(monkeypatch):
    """The compiler's counters of this test alone."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)  # CUDA never asks
    reset()
    yield counters
    reset()


def reset():
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_stance("default")


def kin(samples):
    """The samples, and each once more with another end: they share prefixes."""
    others = copy.deepcopy(samples)
    for other in others:
        other.tokens[-2] ^= 1
    return samples + others


def step(policy, batches):
    """(loss, gradients by name)"""
    policy.zero_grad()
    stats = trainer.backward(policy, batches, **OBJECTIVE | {"kl_beta": 0.1})
    trained = {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}
    return sum(float(s["loss"]) for s in stats), trained


def assert_close(one, other, tolerance=1e-6):
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=tolerance)


def with_reference(batches):
    for batch in batches:
        batch.ref_logprob = batch.old_logprob.clone()
    return batches


def test_all_layers_and_batch_shapes_share_four_graphs(compilation):
    """Six numbers of samples, shared prefixes, no sample: all run what the first one compiled."""
    plain = trainer.Policy(model("qwen3"), bf16=False)
    options = {"recompute_activations": True, "compiler": "aot_eager"}
    compiled = trainer.Policy(model("qwen3"), bf16=False, **options)
    for samples in [*(make_samples(n) for n in (2, 3, 4, 1, 5, 6)), kin(make_samples(4)), []]:
        batches = pack(samples) or [trainer.make_micro_batch([], [], [], CPU)]
        with_reference(batches)
        assert_close(step(compiled, batches), step(plain, batches))
        assert compilation["stats"]["unique_graphs"] == 4
    assert len(compilation["graph_break"]) == 1  # only attention, which is not compiled


def test_adapters_on_and_off(compilation):
    """Both share the compiler's cache. Its first call scores a model that is frozen."""
    adapted = model("llama"), model("llama")
    for one in adapted:
        trainer.add_adapters(one, 3, seed=0)
    plain = trainer.Policy(adapted[0], bf16=False)
    compiled = trainer.Policy(adapted[1], bf16=False, compiler="eager")
    references = trainer.reference(plain), trainer.reference(compiled)
    graphs = []
    for samples in (make_samples(3), kin(make_samples(5))):
        batches = pack(samples)
        logprobs = [trainer.logprob(policy, batches[0], 1.0) for policy in references]
        torch.testing.assert_close(*logprobs)
        batches[0].ref_logprob = logprobs[0]
        assert_close(step(compiled, batches), step(plain, batches))
        graphs.append(counters["stats"].pop("unique_graphs", 0))
    assert graphs[0] > 0 == graphs[1], "the second shape needs no new graph"


def no_forward(graph, inputs):
    raise RuntimeError("no compiler is here")


def no_backward(graph, inputs):
    """Runs the graph; its backward pass is compiled when it is needed, and this fails."""

    def fail(gradient):
        raise RuntimeError("no assembler is here")

    def run(*given):
        outputs = graph(*given)
        outputs[0].register_hook(fail)
        return outputs

    return run


@pytest.mark.parametrize(
    "backend, missing, recompute",
    [(no_forward, "compiler", False), (no_backward, "assembler", True)],
)
def test_a_compiler_that_fails_costs_one_sentence(backend, missing, recompute, capsys):
    """In its forward part or in its backward part. Then the step is the plain one."""
    options = {"recompute_activations": recompute, "compiler": backend}
    batches = with_reference(pack(kin(make_samples(3)), 90))
    found = step(trainer.Policy(model("llama"), bf16=False, **options), batches)
    said = capsys.readouterr().out
    assert said == f"torch.compile failed, so training is slower: no {missing} is here\n"
    assert_close(found, step(trainer.Policy(model("llama"), bf16=False), batches), 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind, fsdp", [("qwen2", False), ("llama", True)])
def test_ddp_and_fsdp_give_the_same_with_compiled_layers(kind, fsdp, compilation):
    """A group of one has all of the wrappers' code; what ranks sum is tested in test_policy.py."""
    plain, compiled = (
        trainer.parallel(
            trainer.Policy(model(kind), bf16=False, recompute_activations=fsdp, compiler=c),
            fsdp=fsdp,
            device=CPU,
        )
        for c in (None, "eager")
    )
    for count in (3, 5):
        batches = with_reference(pack(make_samples(count)))
        results = [step(policy, batches) for policy in (plain, compiled)]
        gradients = [{k: gather_full(v) for k, v in p[1].items()} for p in results]
        assert_close(*((p[0], g) for p, g in zip(results, gradients)))
        assert compilation["stats"]["unique_graphs"] == 4


def test_the_run_says_that_its_first_step_compiles(base, tmp_path, monkeypatch, capsys):
    """And what is trained is what was sampled."""
    monkeypatch.setattr(trainer, "compiler_of", lambda device: "eager")
    arguments = ["--model", base, "--runs", tmp_path, "--name", "x", "--steps", 1, *SMALL]
    arguments += ["--inner_steps", 1, "--eval_questions", 2]
    assert run(*arguments, grade=half) == 0
    before, after = capsys.readouterr().out.split("the first step compiles the layers: ")
    assert "memory per process" in before and "step 1/1" not in before
    assert after.startswith("about a minute more, an estimate\n")
    assert counters["stats"]["unique_graphs"] == 4
    (line,) = metrics(tmp_path / "x")
    assert line["grad_norm"] > 0 and line["mismatch_kl"] < 1e-8
