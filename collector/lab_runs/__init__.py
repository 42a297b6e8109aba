"""Runs of `kvscope lab matrix` and `calibrate`: which seeds, whether they can be written, playing them, and the page that they are published on."""
