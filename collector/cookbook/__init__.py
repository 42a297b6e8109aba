"""Saved queries: one file each, whose first line says what it answers. `kvscope sql --saved NAME`, the SQL page and the docs read them.

Run as a module it prints docs/sql-cookbook.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from engine_probe.errors import UsageError

FOLDER: Final = Path(__file__).parent
HEAD: Final = """# SQL cookbook

Generated from `collector/cookbook/` (`python -m collector.cookbook`); do not edit. Each runs as it stands:

    kvscope sql --saved slowest_requests
    kvscope sql --saved slowest_requests --format csv -o slow.csv

and is offered on the SQL page. Every query keeps runs apart by `run_id` (live rows have none); add a condition on it or on time for one
of them. How to ask, and what the tables mean: [sql.md](sql.md), [events.md](events.md).
"""


@dataclass(frozen=True, slots=True)
class Saved:
    """A query: its name, what it answers, and its text."""

    name: str
    title: str
    sql: str


@cache
def saved() -> dict[str, Saved]:
    """Every saved query by its name, in alphabetical order."""
    found = {}
    for file in sorted(FOLDER.glob("*.sql")):
        first, _, sql = file.read_text(encoding="utf-8").partition("\n")
        found[file.stem] = Saved(file.stem, first.removeprefix("-- ").strip(), sql.strip())
    return found


def named(name: str) -> Saved:
    """The query of this name. Raises UsageError with the names there are."""
    found = saved().get(name)
    if found is None:
        raise UsageError(f"there is no saved query {name!r}; there are {', '.join(saved())}", name=name)
    return found


def page() -> str:
    """The docs page."""
    parts = [
        f"## {one.title}\n\n`kvscope sql --saved {one.name}`\n\n```sql\n{one.sql}\n```" for one in saved().values()
    ]
    return HEAD + "\n" + "\n\n".join(parts) + "\n"
