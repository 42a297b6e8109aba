"""The executor with real tensors: a Llama-style decoder over paged KV blocks. Torch and triton are imported here alone.

`executor.py` is the door; `model_config.py`, `weights.py` and `decoder.py` are the model, `batch.py` packs a step,
`attention.py` and `kernels/` attend, `checks.py` proves that packed sequences do not see each other.
"""
