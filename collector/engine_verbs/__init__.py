"""The verbs of `kvscope engine`, one file each with a function `register(group)`, and what `run` is made of (fleets, run_report)."""
