"""kvscope inside vLLM: the stat-logger plugin."""
