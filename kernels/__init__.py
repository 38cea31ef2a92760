"""Custom kernels. Those in Triton have a plain PyTorch reference and the derivation too.

    linear_loss      LM head, log-prob, GRPO loss and its gradients without the logits in memory
    paged            decode attention over a paged KV cache
    varlen           attention within packed sequences on CUDA: flash-attn, or PyTorch's own
    products         fp32 products of a CPU, by the faster of two libraries; no Triton form
    decode           norm, rotary embedding with cache write, SiLU product of a decode step

Read `decode.silu_mul` first: it is short, and has all the parts of the other kernels. Training
calls linear_loss, varlen and products. backend.py chooses the form that runs.

The package imports only torch, triton, flash-attn, grpo and config.UserError. Hugging Face's
package `kernels` must not be installed, because transformers would then look for its functions in
this folder.
"""

from kernels.backend import triton, use_triton
from kernels.decode import add_rms_norm, qk_norm_rope_store, silu_mul
from kernels.linear_loss import linear_grpo_loss, linear_logprob, logits_grpo_loss, logits_logprob
from kernels.paged import paged_attention
from kernels.products import linear
from kernels.varlen import varlen_attention
