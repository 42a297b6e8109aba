"""Typed questions to a store that several surfaces ask: series, request lists, one request, workers, marks, samples.

Each takes a `Store` and a `Window` and answers with an Arrow table or a dataclass; each is one or a few SQL statements,
so its cost follows the window. What only diagnosis asks stays with `store/lineage.py`.
"""
