"""The trainer's room: see policy.py."""
