"""Prefix caches replayed at other sizes and under other routing, and bytes of KV."""
