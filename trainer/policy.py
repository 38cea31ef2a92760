"""The policy as the trainer sees it: packed forward pass, objective, parallelism, memory plan, state on disk.

Samples of any length lie end to end in one row of tokens (no padding); attention stays within each sample by explicit
boundaries, positions restart at 0, and only the hidden states that predict a sampled token enter the LM head. Loss and
gradient of the head come from kernels.linear_grpo_loss. Parameters are always fp32 (master weights); on CUDA the
arithmetic is bf16.

DDP is the default. `--fsdp` shards parameters, gradients and optimiser state with PyTorch's fully_shard: the same loop
and the same files. The gradient is a sum over ranks (the weights already divide by global counts), so the mean that DDP
and FSDP take is multiplied by their number.

Tests: `pytest tests/test_policy.py`. Speed beside padded batches, and on a GPU: `python -m bench.train_step`.
"""
import contextlib
import inspect
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import kernels
from binpack import first_fit_decreasing
from config import UserError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:                                         # optional everywhere: requirements-gpu.txt
    flash_attn_varlen_func = None


# ---------------------------------------------------------------------------------------------- packed attention

def packed_attention(module, q, k, v, attention_mask, scaling, dropout=0.0, lengths: list[int] = (),
                     cu: Tensor | None = None, **kwargs):
    """Causal attention within each of the samples that lie end to end.

    q [1, Hq, T, Dh], k and v [1, Hkv, T, Dh] -> [1, T, Hq, Dh], as transformers' AttentionInterface wants it. `lengths`
    are the samples' tokens (they sum to T), `cu` [samples+1] int32 their boundaries on the device.
    """
    wanted = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if wanted:
        raise UserError(f"the trainer cannot run {type(module).__name__}: its attention uses {wanted[0]}")
    if q.is_cuda:
        longest = max(lengths)
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))             # [T, H, Dh]; RoPE made q and k fp32
        if flash_attn_varlen_func:
            out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, softmax_scale=scaling, causal=True)
        else:
            groups = {"enable_gqa": True}
            if "enable_gqa" not in inspect.signature(varlen_attn).parameters:           # torch 2.11
                k, v, groups = *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), {}
            causal = (-1, 0)                                                            # a window, as it wants it said
            out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=causal, **groups)
        return out[None], None
    parts = zip(*(x.split(list(lengths), dim=2) for x in (q, k, v)))
    out = [scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
           for part in parts]
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register("mars_packed", packed_attention)
transformers.logging.disable_progress_bar()


# ---------------------------------------------------------------------------------------------- micro-batches

@dataclass
class MicroBatch:
    """Samples end to end. T tokens of input, N of them predict a token that carries loss."""
    lengths: list[int]
    tokens: Tensor                          # [1, T]
    positions: Tensor                       # [1, T], restart at every sample
    cu: Tensor                              # [samples+1] int32, cumulative lengths (flash-attn's cu_seqlens)
    at: Tensor                              # [N]: where the predicting hidden states stand
    target: Tensor                          # [N] ... and from here on one entry per loss token
    sampler_logprob: Tensor                 # under the sampler
    old_logprob: Tensor                     # the same, unless --tis replaces it by the trainer's
    advantage: Tensor
    weight: Tensor


def micro_batches(samples: list, weights: list[Tensor], capacity: int, device) -> list[MicroBatch]:
    """Packs samples (rollout.Sample) by FFD into micro-batches of at most `capacity` tokens; a longer one stands alone.

    `weights` are grpo.token_weights of the samples. What follows a sample's last sampled token predicts nothing and is
    dropped.
    """
    inputs = []
    for sample, weight in zip(samples, weights):
        if not len(sample.tokens) == len(sample.mask) == len(sample.logprobs) == len(weight):
            raise ValueError(f"a sample's lists differ in length: {len(sample.tokens)} tokens, {len(sample.mask)} mask,"
                             f" {len(sample.logprobs)} log-probs, {len(weight)} weights")
        inputs.append(max(i for i, trained in enumerate(sample.mask) if trained))       # tokens[:n] predict tokens[1:n + 1]
    bins = first_fit_decreasing([min(n, capacity) for n in inputs], capacity)
    return [make_micro_batch(*([x[i] for i in b] for x in (samples, weights, inputs)), device) for b in bins]


def make_micro_batch(samples: list, weights: list[Tensor], lengths: list[int], device) -> MicroBatch:
    """Lays samples end to end. Without samples: one token that nothing is learned from, to keep ranks in step."""
    lengths = lengths or [1]
    tokens, at, target, old, advantage = [] if samples else [0], [], [], [], []
    for sample, length in zip(samples, lengths):
        trained = [i for i in range(1, length + 1) if sample.mask[i]]
        at += [len(tokens) + i - 1 for i in trained]
        target += [sample.tokens[i] for i in trained]
        old += [sample.logprobs[i] for i in trained]
        advantage += [sample.advantage] * len(trained)
        tokens += sample.tokens[:length]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    weight = [w[1:][torch.tensor(s.mask[1:])] for s, w in zip(samples, weights)] or [torch.zeros(0)]

    def tensor(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=device)
    return MicroBatch(lengths, tensor([tokens], torch.long), positions[None].to(device), cu.int().to(device),
                      tensor(at, torch.long), tensor(target, torch.long), tensor(old), tensor(old), tensor(advantage),
                      torch.cat(weight).to(device))


# ---------------------------------------------------------------------------------------------- the model

class Policy(nn.Module):
    """The language model with the objective as its forward pass, so that DDP and FSDP see one call per micro-batch."""

    def __init__(self, model, *, bf16: bool, checkpointing: bool = False):
        super().__init__()
        self.model, self.bf16 = model.train(), bf16         # checkpointing wants training mode; these have no dropout
        if checkpointing:                                   # transformers 5 renamed it on the way
            name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
            getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})

    def hidden(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The hidden states [N, D] that predict the loss tokens, in the arithmetic's dtype, and the LM head [V, D].

        The head stays as it is, fp32 unless FSDP gathered it in bf16: the loss rounds it for the products and sums its
        gradient in fp32, which a cast here would round to bf16 on the way back.
        """
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.model.base_model(batch.tokens, position_ids=batch.positions, use_cache=False,
                                           lengths=batch.lengths, cu=batch.cu).last_hidden_state[0]
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        return hidden[batch.at].to(dtype), self.model.get_output_embeddings().weight

    def forward(self, batch: MicroBatch, *, score: bool = False, ref_logprob: Tensor | None = None, **objective):
        """(Σ w·ℓ, stats) of the micro-batch; `objective` holds clip_low, clip_high, kl_beta, temperature.

        With `score` the log-probs [N] of its loss tokens instead: a flag of forward, since DDP and FSDP hook only forward.
        """
        hidden, head = self.hidden(batch)
        if score:
            return kernels.linear_logprob(hidden, head, batch.target, **objective)[0]
        return kernels.linear_grpo_loss(hidden, head, batch.target, batch.old_logprob, batch.advantage, batch.weight,
                                        ref_logprob=ref_logprob, **objective)


@torch.no_grad()
def logprob(policy: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Log-probs [N] of a micro-batch's loss tokens under a policy, wrapped or not."""
    return policy(batch, score=True, temperature=temperature)


def unwrap(policy: nn.Module) -> Policy:
    """The Policy inside DDP; FSDP2 changes it in place."""
    return policy.module if isinstance(policy, nn.parallel.DistributedDataParallel) else policy


def load_model(path: str | Path, device, *, dtype=torch.float32):
    """A causal LM with packed attention, its parameters in `dtype`. UserError if unreadable or of an unknown kind."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="mars_packed")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a model from {path}: {str(error).splitlines()[0]}") from None
    changed = [getattr(model.config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")]
    if any(changed) or getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"{path}: the objective needs plain logits, this model's are scaled or biased; use a Qwen2, "
                        "Qwen3 or Llama model")
    return model.to(device)


def parallel(policy: Policy, *, fsdp: bool, device) -> nn.Module:
    """The policy wrapped for the ranks: as it is (one process), DDP, or FSDP2 (fp32 parameters, bf16 on CUDA).

    FSDP2 moves each layer to `device` before it cuts it up: a model loaded to the CPU never stands whole on a GPU.
    """
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        # Inputs keep their type: cast, the micro-batch's weights and old log-probs would be bf16 in the loss
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if policy.bf16 else None,
                                         reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in policy.model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        return fully_shard(policy, mesh=mesh, mp_policy=precision)
    if dist.is_initialized():
        return nn.parallel.DistributedDataParallel(policy, device_ids=[device.index] if device.type == "cuda" else None)
    return policy


def backward(policy: nn.Module, batches: list[MicroBatch], references: list[Tensor | None], **objective) -> list[dict]:
    """Gradients of Σ w·ℓ over all micro-batches of all ranks; the stats of each micro-batch, `loss` included.

    DDP adds them up over the ranks once, with the last micro-batch. FSDP2 does so with every one: to wait would keep
    the whole model's fp32 gradients on each GPU (8B: 33 GB by arithmetic). The sum is the same.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    stats = []
    for index, (batch, reference) in enumerate(zip(batches, references)):
        last = index == len(batches) - 1
        with policy.no_sync() if hasattr(policy, "no_sync") and not last else contextlib.nullcontext():     # DDP
            loss, numbers = policy(batch, ref_logprob=reference, **objective)
            (loss * world).backward()
        stats.append({"loss": loss.detach(), **numbers})
    return stats


# ---------------------------------------------------------------------------------------------- memory plan

def memory_parts(shape, parameters: int, *, config, world: int, cuda: bool, training: bool = True) -> dict[str, float]:
    """Bytes per process by purpose, before activations. `shape`: a transformers config; `parameters`: the model's number.

    copies: the weights that a micro-batch computes with. Autocast keeps a bf16 copy of all; FSDP gathers what lies
    outside the layers (embedding, head) and two layers, the next one under way. loss: the head's fp32 gradient and one
    chunk of logits.
    """
    size, roles = 2 if cuda else 4, 2 if config.system1 == "frozen" else 1      # bytes per number outside the master weights
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    kv = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * size * config.kv_tokens
    sampler = {"sampler": size * parameters * roles, "KV pool": kv * roles}
    if not training:                                        # a GPU gets the sampler's copy only
        return sampler if cuda else {"weights": 4 * parameters} | sampler
    head = shape.vocab_size * shape.hidden_size
    outside = head if shape.tie_word_embeddings else 2 * head
    layer = (parameters - outside) / shape.num_hidden_layers
    chunk = kernels.linear_loss.CHUNK_TOKENS_CUDA if cuda else kernels.linear_loss.CHUNK_TOKENS_CPU
    state = 4 * parameters / (world if config.fsdp else 1)  # fp32
    return {"weights": state,
            "gradients": state if config.fsdp or world == 1 else 2 * state,         # DDP adds buckets of the same size
            "optimiser": 2 * state,
            "copies": size * (outside + 2 * layer) if config.fsdp else size * parameters if cuda else 0,
            "loss": 4 * head + 4 * shape.vocab_size * chunk,
            **sampler, "reference": size * parameters if config.kl_beta else 0}


def memory_plan(model: str, *, config, world: int, device, training: bool = True) -> str:
    """One line: GiB per process for weights, gradients, optimiser, sampler, KV pool, … UserError if it can't fit."""
    try:
        shape = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read a model at {model}: {str(error).splitlines()[0]}") from None
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    cuda = device.type == "cuda"
    plan = memory_parts(shape, parameters, config=config, world=world, cuda=cuda, training=training)
    total = sum(plan.values())
    if cuda:
        have = torch.cuda.get_device_properties(device).total_memory
    else:
        here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here
    line = ", ".join(f"{name} {part / 2**30:.2f}" for name, part in plan.items() if part >= 2**30 / 200)
    if total > have:
        room = have - total + plan["KV pool"]               # for the pool, beside everything else
        if room > 0.1 * plan["KV pool"]:
            advice = f"--kv_tokens {int(config.kv_tokens * room / plan['KV pool'])} would fit"
        elif training and not config.fsdp:
            advice = "use --fsdp over more processes"
        else:
            advice = "use a smaller model" + " or more processes" * training
        raise UserError(f"{total / 2**30:.1f} GiB per process are needed ({line}) and {have / 2**30:.1f} are there: "
                        f"{advice}")
    return f"memory per process, GiB: {line}; {total / 2**30:.2f} before activations, of {have / 2**30:.1f}"


# ---------------------------------------------------------------------------------------------- state on disk

def save(folder: Path, step: int, policy: nn.Module, optimiser, tokenizer, keep: int = 2) -> None:
    """Writes state/step_N (HF model, optimiser, step) under a temporary name, renames it, points checkpoint/ at it.

    Whenever the process dies there is a whole newest state: nothing is ever overwritten, only the `keep` newest stay.
    """
    inner = unwrap(policy)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)    # gathered on rank 0, named as without shards
    weights, moments = get_state_dict(policy, optimiser, options=whole)
    if dist.is_initialized() and dist.get_rank():
        dist.barrier()
        return
    final, temporary = folder / "state" / f"step_{step:06d}", folder / "state" / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    inner.model.save_pretrained(temporary / "model", state_dict=weights)
    tokenizer.save_pretrained(temporary / "model")
    torch.save(moments, temporary / "optimiser.pt")
    (temporary / "state.json").write_text(json.dumps({"step": step}))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    link = folder / ".checkpoint"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("state") / final.name / "model", target_is_directory=True)
    os.replace(link, folder / "checkpoint")
    for old in sorted((folder / "state").glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    if dist.is_initialized():
        dist.barrier()


def newest(folder: Path) -> tuple[int, Path] | None:
    """The newest whole state of a run: (step, its folder)."""
    states = sorted((folder / "state").glob("step_*/state.json"))
    return (json.loads(states[-1].read_text())["step"], states[-1].parent) if states else None


def load_optimiser(state: Path, policy: nn.Module, optimiser) -> None:
    """Puts a saved optimiser state back, sharded or not. The ranks of a machine share the file's pages."""
    moments = torch.load(state / "optimiser.pt", map_location="cpu", weights_only=True, mmap=True)
    set_optimizer_state_dict(policy, optimiser, moments, options=StateDictOptions(full_state_dict=True))


def gradient_norm(policy: nn.Module, limit: float) -> float:
    """Clips the gradient's norm to `limit`; returns the norm before, over all ranks."""
    norm = nn.utils.clip_grad_norm_(policy.parameters(), limit if limit else math.inf)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
