"""Imported by a vLLM 0.32 server on a CPU (docs/engines.md), so that its LM head is reloaded too.

vLLM 0.32 multiplies by packed copies of the weights on a CPU. When it reloads, it packs all of them
anew but one: an LM head that is tied to the embedding keeps its first copy. With plain products
there are no copies.
"""

from vllm import _custom_ops

_custom_ops._supports_onednn = False


class PlainProducts:
    """Adds nothing to vLLM's worker; what counts is that it imports this file before the model."""
