"""Files to copy: a tool, a task, a protocol of your own."""
