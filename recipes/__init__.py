"""MARS on a real model, and files to copy: a tool, a task, a protocol of your own."""
