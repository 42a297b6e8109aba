"""The embedded engine: small, readable, fully instrumented; the place where every cause can be produced on purpose.

One scheduler and one block pool, two executors: `torch_executor/` computes real tokens, `roofline/` takes virtual time.
"""
