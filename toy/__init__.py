"""The embedded default: see world.py."""
