"""Readers: files that people have (recordings, traces, pages, events) -> tables of the event contract, chunk by chunk."""
