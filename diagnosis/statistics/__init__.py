"""Samples, quantiles, intervals, and whether two windows can be told apart."""
