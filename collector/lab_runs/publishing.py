"""The page of a matrix, with its data and its diagram beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from collector.terminal.output import say

if TYPE_CHECKING:
    from diagnosis.lab.results import Result


def beside(page: Path) -> tuple[Path, Path]:
    """The data and the diagram of a page."""
    return page.with_suffix(".csv"), page.with_suffix(".svg")


def publish(page: Path, document: dict[str, Any], results: list[Result], data: Path | None) -> None:
    """The page with its data and its diagram beside it."""
    from diagnosis.lab.page import page as written
    from diagnosis.lab.reliability import chart
    from diagnosis.lab.results import write

    table, diagram = beside(page)
    if data is None or data.resolve() != table.resolve():
        write(results, table)
    diagram.write_text(chart(document["reliability"]), encoding="utf-8")
    page.write_text(written(document, results, table.name, diagram.name), encoding="utf-8")
    say(f"page: {page}, data: {table}, diagram: {diagram}")
