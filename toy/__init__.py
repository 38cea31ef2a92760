"""The default task: an invented world, its small language, and a base model that speaks it."""
