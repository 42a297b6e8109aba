"""One file a cause. Discovery walks this folder; the docstring of a cause is its runbook text."""
