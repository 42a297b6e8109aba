"""Prints docs/sql-cookbook.md."""

from collector.cookbook import page

print(page(), end="")
