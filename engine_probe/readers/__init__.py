"""Readers: files that people have (recordings, traces, pages, events) -> tables of the contract, chunk by chunk."""
