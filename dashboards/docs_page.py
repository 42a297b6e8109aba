"""The generated parts of docs/dashboards.md: every dashboard with its panels, every metric with its labels.

Run: python -m dashboards.docs_page docs/dashboards.md. A test builds them again and compares.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from dashboards.build import SUBJECTS, panels, stored
from store import metric_catalogue as names


def dashboards() -> str:
    """A table of the dashboards: title, what it is for, its panels."""
    import json

    documents = {document["uid"]: document for document in map(json.loads, stored().values())}
    rows = ["| dashboard | what it is for | panels |", "| --- | --- | --- |"]
    for subject in SUBJECTS:
        board = importlib.import_module(f"dashboards.boards.{subject}").BOARD
        titles = "; ".join(panel["title"] for panel in panels(documents[board.uid]))
        rows.append(f"| `{board.uid}` | {board.doc} | {titles} |")
    return "\n".join(rows)


def metrics() -> str:
    """A table of the metrics: name, type, labels, meaning."""
    rows = ["| metric | type | labels | what it is |", "| --- | --- | --- | --- |"]
    for family in names.families():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.type} | {labels} | {_cell(family.doc)} |")
    return "\n".join(rows)


def labels() -> str:
    """A table of the labels: what bounds each."""
    rows = ["| label | values |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| `{name}` | {_cell(bound)} |" for name, bound in names.BOUNDED.items())])


PARTS = {"dashboards": dashboards, "metrics": metrics, "labels": labels}


def with_parts(text: str) -> str:
    """The page with its generated parts written anew. Raises ValueError where it lacks the place of one."""
    for name, render in PARTS.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no place for {name}: {begin.strip()} ... {end}")
        text = f"{head}{begin}{render()}\n{end}{tail}"
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page that is named."""
    path = Path(sys.argv[1])
    path.write_text(with_parts(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
