"""Judges: pure functions from stored facts to findings. No input or output, no clock, no randomness without a seed."""
