"""The fused kernels."""
from kernels.grpo_loss import grpo_loss
from kernels.linear_loss import linear_grpo_loss, linear_logprob

__all__ = ["grpo_loss", "linear_grpo_loss", "linear_logprob"]
