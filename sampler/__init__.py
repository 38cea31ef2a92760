"""The sampler's room: see engine.py."""
from sampler.engine import Completion, Conversation, Pages, Request, Sampler, draw, greedy, hashed, uniform

__all__ = ["Completion", "Conversation", "Pages", "Request", "Sampler", "draw", "greedy", "hashed", "uniform"]
