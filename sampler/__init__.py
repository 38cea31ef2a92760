"""Sampling with a paged KV cache.

Read engine.py first, then request.py, scheduler.py, pages.py, plan.py, model.py, attention.py and
draws.py; graphs.py is for CUDA alone. vllm.py samples on servers, with the methods that the driver
calls.
"""

from sampler.draws import hash64
from sampler.engine import Sampler
from sampler.pages import Pages
from sampler.request import Completion, Conversation, Lost, Request
