"""Runs of `kvscope lab matrix` and `calibrate`: which seeds, playing them, and the page that they are published on."""
