"""Sampling with a paged KV cache.

Read engine.py first, then scheduler.py, pages.py, plan.py, model.py, attention.py and draws.py.
vllm.py has the same face before vLLM servers.
"""

from sampler.draws import hashed
from sampler.engine import Sampler
from sampler.pages import Pages
from sampler.request import Completion, Conversation, Lost, Request

__all__ = ["Completion", "Conversation", "Lost", "Pages", "Request", "Sampler", "hashed"]
