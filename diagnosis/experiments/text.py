"""An experiment's document for people: in a terminal, and as a Markdown report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.experiments.tables import (
    STATISTICS,
    class_rows,
    difference_rows,
    effect_rows,
    level_rows,
    load_rows,
    phase_rows,
    pressure_rows,
    queue_rows,
    ttft_rows,
    worker_rows,
)
from diagnosis.telling.text import table
from diagnosis.telling.wording import seconds, signed, wrapped

WIDTH = 80
"""Columns of the text."""


def render(document: Mapping[str, Any], width: int = WIDTH) -> str:
    """Text of an experiment's document."""
    first = document["contrasts"][0]
    parts = [
        _wrap(f"{document['name']}: {first['baseline']} against {first['suspect']}", width),
        _wrap(_headline(document, first), width) + "\n" + _readings(first, width),
        "TTFT by arm\n" + _plain(ttft_rows(document)),
        *(_difference_text(found, width) for found in document["contrasts"]),
        "By what the cache gave\n" + _plain(class_rows(document)) if len(class_rows(document)) > 1 else "",
        "Where a request's time went, mean\n" + _plain(phase_rows(document)) if len(phase_rows(document)) > 1 else "",
        "Queues\n" + _plain(queue_rows(document)) if len(queue_rows(document)) > 1 else "",
        "Load that was really there\n" + _plain(load_rows(document)),
        f"Meanwhile, {first['baseline']} to {first['suspect']} (* beyond noise and 10 %)\n"
        + _plain(effect_rows(first)),
        "Held fixed\n" + _fixed(document, width),
        "\n".join(_wrap(f"note  {note}", width, 6) for note in document["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def render_short(document: Mapping[str, Any], width: int = WIDTH) -> str:
    """The first pair of arms in a few lines: what happened and why, TTFT by arm, who waited where."""
    first = document["contrasts"][0]
    return "\n\n".join(
        [
            _wrap(_headline(document, first), width) + "\n" + _readings(first, width),
            _plain(ttft_rows(document)),
            "Queues\n" + _plain(queue_rows(document)),
        ]
    )


def render_markdown(document: Mapping[str, Any], version: str) -> str:
    """The report: deterministic, so that two can be compared."""
    sections = [f"# Experiment: {document['name']}"]
    for found in document["contrasts"]:
        readings = "\n".join(_reading_markdown(reading) for reading in found["reading"])
        sections.append(
            f"## {found['baseline']} to {found['suspect']}\n\n{readings}\n\n" + _markdown(difference_rows(found))
        )
        sections.append(f"### Meanwhile, {found['baseline']} to {found['suspect']}\n\n" + _markdown(effect_rows(found)))
        sections.append("### Only when on\n\n" + _markdown(pressure_rows(found)))
    for title, rows in (
        ("TTFT by arm", ttft_rows(document)),
        ("By what the cache gave", class_rows(document)),
        ("Where a request's time went, mean", phase_rows(document)),
        ("Workers", worker_rows(document)),
        ("Load that was really there", load_rows(document)),
    ):
        if len(rows) > 1:
            sections.append(f"## {title}\n\n" + _markdown(rows))
    sections.append(
        "## Held fixed\n\n" + _markdown([["what", "value"], *([k, _told(v)] for k, v in document["fixed"].items())])
    )
    sections.append("## Runs, in the order in which they were made\n\n" + ", ".join(document["order"]))
    sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in [*document["notes"], f"kvscope {version}"]))
    return "\n\n".join(sections) + "\n"


def render_sweep(document: Mapping[str, Any], width: int = WIDTH) -> str:
    """Text of a sweep's document."""
    parts = [
        _wrap(document["knee"]["sentence"], width),
        f"Breaks where: {document['knee']['rule']}",
        _plain(level_rows(document)),
        "Held fixed\n" + _fixed(document, width),
        "\n".join(_wrap(f"note  {note}", width, 6) for note in document["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def render_sweep_markdown(document: Mapping[str, Any], version: str) -> str:
    """The sweep's report."""
    knee = document["knee"]
    return (
        "\n\n".join(
            [
                f"# Sweep: {document['name']}",
                f"{knee['sentence']} Breaks where: {knee['rule']}.",
                _markdown(level_rows(document)),
                "## Held fixed\n\n"
                + _markdown([["what", "value"], *([k, _told(v)] for k, v in document["fixed"].items())]),
                "## Notes\n\n" + "\n".join(f"- {note}" for note in [*document["notes"], f"kvscope {version}"]),
            ]
        )
        + "\n"
    )


def _headline(document: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Mean and P99 TTFT of the pair that was asked for."""
    arms = {arm["arm"]: arm["latency"]["ttft"] for arm in document["arms"]}
    told = []
    for name in ("mean", "p99"):
        before, after = (arms[found[side]][name]["value"] for side in ("baseline", "suspect"))
        change = signed(found["difference"]["ttft"][name]["value"])
        told.append(f"{STATISTICS[name]} {seconds(before)} to {seconds(after)} ({change})")
    return "TTFT: " + ", ".join(told) + "."


def _readings(found: Mapping[str, Any], width: int) -> str:
    lines = []
    for reading in found["reading"]:
        lines.append(_wrap(reading["sentence"], width))
        lines += [_wrap(f"- {row['statement']}", width, 4, 2) for row in reading["evidence"]]
    return "\n".join(lines)


def _reading_markdown(reading: Mapping[str, Any]) -> str:
    return "\n".join(
        [f"**{reading['kind']}**: {reading['sentence']}", "", *(f"- {row['statement']}" for row in reading["evidence"])]
    )


def _difference_text(found: Mapping[str, Any], width: int) -> str:
    title = f"TTFT, {found['baseline']} to {found['suspect']}: " + "; ".join(
        r["kind"].replace("_", " ") for r in found["reading"]
    )
    return _wrap(title, width) + "\n" + _plain(difference_rows(found))


def _told(value: Any) -> str:
    if value is None:
        return "not told"
    if isinstance(value, Mapping):
        if set(value) == {"differs"}:
            return "differs: " + _told(value["differs"])
        if set(value) == {"low", "high"}:
            return str(value["low"]) if value["low"] == value["high"] else f"{value['low']} to {value['high']}"
        return ", ".join(f"{key}={_told(item)}" for key, item in value.items()) or "none"
    return "; ".join(map(_told, value)) if isinstance(value, list | tuple) else str(value)


def _fixed(document: Mapping[str, Any], width: int) -> str:
    return "\n".join(_wrap(f"{key:20} {_told(value)}", width, 23, 2) for key, value in document["fixed"].items())


def _wrap(text: str, width: int, indent: int = 0, first: int = 0) -> str:
    return wrapped(text, width, " " * first, " " * indent)


def _plain(rows: Sequence[Sequence[str]]) -> str:
    return table(rows[0], rows[1:])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.strip().replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
