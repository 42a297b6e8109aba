"""Runs of `kvscope lab matrix` and `calibrate`: which seeds, whether results can be written, playing them, and their page."""
