"""Views over the kinds' tables, one SQL file each: the ten evidence views of design section 3, and two that unnest.

Invariant: a view's comment names every field it has, in order (a test compares). Views hold no data: they are created
again when their text changes, and the same text serves any DuckDB that has tables or views of the kinds' names.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import duckdb

_FOLDER = Path(__file__).parent
_FIELD = re.compile(r"-- (?P<name>[a-z_]+): (?P<doc>.+)")


@dataclass(frozen=True, slots=True)
class View:
    """One view.

    select   its text, a SELECT over the kinds' tables
    doc      what a row is
    fields   name and meaning of each field, in order
    """

    name: str
    select: str
    doc: str
    fields: tuple[tuple[str, str], ...]


@cache
def views() -> tuple[View, ...]:
    """All views in alphabetical order; none of them reads another."""
    return tuple(_parse(path.stem, path.read_text(encoding="utf-8")) for path in sorted(_FOLDER.glob("*.sql")))


def install_views(connection: duckdb.DuckDBPyConnection) -> bool:
    """Create the views where the database has other ones; True where it had."""
    digest = hashlib.sha256("".join(view.select for view in views()).encode()).hexdigest()
    if connection.execute("SELECT value FROM setting WHERE name = 'views'").fetchone() == (digest,):
        return False
    connection.execute("BEGIN")
    for view in views():
        connection.execute(f"CREATE OR REPLACE VIEW {view.name} AS {view.select}")
    connection.execute("DELETE FROM setting WHERE name = 'views'")
    connection.execute("INSERT INTO setting VALUES ('views', ?)", [digest])
    connection.execute("COMMIT")
    return True


def markdown() -> str:
    """The page `docs/evidence-views.md`, which is committed as this returns it."""
    lines = [
        "# Views",
        "",
        "Written from the comments in `store/views/*.sql` by `python -m store.views`. Rows of a run and live rows",
        "never mix in a join. A fact of a worker holds from its row on until the next one; the first one is taken",
        "to have held before. Unknown is null.",
    ]
    for view in sorted(views(), key=lambda v: (not v.name.startswith("evidence_"), v.name)):
        lines += ["", f"## {view.name}", "", view.doc, "", "| field | from |", "| --- | --- |"]
        lines += [f"| `{name}` | {doc} |" for name, doc in view.fields]
    return "\n".join(lines) + "\n"


def _parse(name: str, sql: str) -> View:
    comments = [line for line in sql.splitlines() if line.startswith("-- ")]
    select = "\n".join(line for line in sql.splitlines() if not line.startswith("-- "))
    fields = tuple((found["name"], found["doc"]) for line in comments[1:] if (found := _FIELD.fullmatch(line)))
    return View(name, select, comments[0].removeprefix("-- "), fields)
