"""Watches a running engine from outside: scrapes, subscribes, receives and tails, and writes what it saw to a sink."""
