"""All dashboards as JSON: built from `boards/`, committed in `generated/`, compared by a test.

Run: kvscope dashboards build. The same sources give the same bytes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from store.metrics import SLO_GOAL

FOLDER: Final = Path(__file__).parent / "generated"
SUBJECTS: Final = (
    "overview",
    "latency",
    "kv_capacity",
    "prefix_cache",
    "scheduler",
    "routing",
    "transfer",
    "experiments",
    "health",
)


def build(slo_goal: float = SLO_GOAL) -> dict[str, str]:
    """Name of the file -> its JSON, in the order in which people should read them. slo_goal: share of requests that should meet their SLO."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    made = {}
    for subject in SUBJECTS:
        module = importlib.import_module(f"dashboards.boards.{subject}")
        board = module.for_goal(slo_goal) if hasattr(module, "for_goal") else module.BOARD
        encoder = JSONEncoder(sort_keys=True, indent=2)
        document = json.loads(encoder.encode(board.build()))
        made[f"{board.uid}.json"] = json.dumps(_numbered(document), sort_keys=True, indent=2) + "\n"
    return made


def write(folder: Path = FOLDER, slo_goal: float = SLO_GOAL) -> list[Path]:
    """Write every file; what is there and is none of them is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    made = build(slo_goal)
    for path in folder.glob("*.json"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in made]


def stored(folder: Path = FOLDER) -> dict[str, str]:
    """Name -> text of the committed files."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel: PromQL (`expr`), or a path of the collector's API with its parameters (`query`)."""

    dashboard: str
    panel: str
    ref_id: str
    expr: str | None
    query: dict[str, Any] | None


def targets(documents: dict[str, str]) -> Iterator[Target]:
    """Every query of every panel."""
    for text in documents.values():
        document = json.loads(text)
        for panel in panels(document):
            for target in panel.get("targets", ()):
                expr = target.get("expr")
                yield Target(
                    document["uid"], panel["title"], target.get("refId", ""), expr, None if expr is not None else target
                )


def panels(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel of a dashboard but its rows, those inside folded rows too."""
    for panel in document.get("panels", ()):
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def _numbered(document: dict[str, Any]) -> dict[str, Any]:
    """Panels have numbers of their own (Grafana would give new ones each time), constants are not shown as a choice."""
    for number, panel in enumerate(document["panels"], 1):
        panel["id"] = number
    for variable in document["templating"]["list"]:
        if variable["type"] == "constant":
            variable["hide"] = 2
    return document
