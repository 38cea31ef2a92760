"""The embedded default: an invented world, its little language, and a base model that speaks it."""
