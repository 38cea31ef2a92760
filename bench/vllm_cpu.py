"""A worker extension for vLLM on a CPU: new weights reach a head that is tied to the embedding.

There vLLM 0.32 multiplies by packed copies of the weights. It packs them anew when it reloads, all
but the copy of a tied LM head, which stays the one of the start. With plain products there are no
copies. vLLM imports this file in each of its processes before it loads the model:

    PYTHONPATH=. python -m vllm.entrypoints.openai.api_server … \\
        --worker-extension-cls bench.vllm_cpu.PlainProducts
"""

from vllm import _custom_ops

_custom_ops._supports_onednn = False


class PlainProducts:
    """Adds nothing to a worker; what counts is the import."""
