"""Experiments: arms that differ in one thing, repeats in random order, and what their difference says. Pure judgement."""
