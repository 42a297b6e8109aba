"""The verdict for a terminal at three in the morning: one sentence, the table, the evidence, what it is not, what to do.

Invariant: no line is wider than the terminal (80 columns where nobody says), but for SQL and commands, which stay on one line so that they
can be copied, and names from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnosis.telling.wording import (
    BEYOND_NOISE,
    interval,
    metric_name,
    quantile_name,
    seconds,
    share_words,
    signed,
    tentative,
    wrapped,
)

WIDTH = 80
"""Columns of the text."""
STATUS = {
    "explained": "EXPLAINED",
    "no_change": "NO CHANGE",
    "not_distinguishable": "NOT DISTINGUISHABLE",
    "not_observable": "NOT OBSERVABLE HERE",
}


def render(verdict: Mapping[str, Any], *, sql: bool = True, width: int = WIDTH) -> str:
    """Text of a verdict document (`Verdict.to_dict()`), `width` columns wide. `sql` False leaves the queries out."""
    page = _Page(width)
    parts = [
        page.wrap(f"{STATUS[verdict['status']]}: {verdict['verdict']}"),
        _about(page, verdict),
        _attribution(page, verdict),
        _composition(verdict),
        _causes(page, verdict, sql),
        _excluded(page, verdict),
        _side_effects(verdict),
        _quality(page, verdict),
        _next(page, verdict),
    ]
    return "\n\n".join(part for part in parts if part)


def summary(verdict: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """The short form: the sentence, and where the change comes from."""
    page = _Page(width)
    return page.wrap(f"{STATUS[verdict['status']]}: {verdict['verdict']}") + "\n\n" + _attribution(page, verdict)


@dataclass(frozen=True, slots=True)
class _Page:
    """How wide the terminal is, in columns."""

    width: int

    def wrap(self, text: str, indent: int = 0, first: int = 0) -> str:
        return wrapped(text, self.width, " " * first, " " * indent)

    def command(self, words: str) -> str:
        """A command over several lines that can be copied as they are: a shell reads on after a backslash."""
        return wrapped(words, self.width - 2, " " * 4, " " * 6).replace("\n", " \\\n")


def _about(page: _Page, verdict: Mapping[str, Any]) -> str:
    lines = []
    for side in ("baseline", "suspect"):
        window = verdict["windows"][side]
        effective = verdict["n_effective"][side]
        length = (window["end_ns"] - window["start_ns"]) / 1e9
        told = (
            f"{side:9} {window['run'] or 'live'}: {verdict['n'][side]:,} requests over {seconds(length)}, worth {effective:,.0f} "
            f"independent ones at {quantile_name(verdict['quantile'])}"
        )
        lines.append(page.wrap(told, indent=10))
    lines.append(f"vantage   {verdict['vantage']}")
    if verdict.get("side") is not None:
        lines.append(page.wrap(f"side      {verdict['side']['statement']}", indent=10))
    return "\n".join(lines + [page.wrap(f"note      {note}", indent=10) for note in verdict["notes"]])


def _attribution(page: _Page, verdict: Mapping[str, Any]) -> str:
    name = quantile_name(verdict["quantile"])
    asked = quantile_name(verdict["requested_quantile"])
    title = f"Where the change of {metric_name(verdict['metric'])} comes from (rows sum to the change)"
    by_mean = verdict["delta"]["judged_s"]["interval_95"] is None
    which = "mean_interval_95" if by_mean else "interval_95"
    heading = "95 % of the mean" if by_mean else f"95 % of {name}"
    columns = ["mean", name, heading] if name == asked else ["mean", name, asked, heading]
    rows = []
    for row in verdict["attribution"]:
        cells = [signed(row["mean_s"]), signed(row["judged_s"])]
        if name != asked:
            cells.append(signed(row["p99_s"]))
        rows.append([row["cause"], *cells, _bounds(row[which]), row["text"]])
    delta = verdict["delta"]
    total = ["change", signed(delta["mean_s"]["value"]), signed(delta["judged_s"]["value"])]
    if name != asked:
        total.append(signed(delta["p99_s"]["value"]))
    rows.append([*total, _bounds(delta["mean_s" if by_mean else "judged_s"]["interval_95"]), ""])
    beside = table(["", *columns, ""], rows, total=True)
    if max(map(len, beside.splitlines())) <= page.width:
        return title + "\n" + beside
    below = [page.wrap(f"{row['cause']}: {row['text']}", indent=4, first=2) for row in verdict["attribution"]]
    return title + "\n" + table(["", *columns], [row[:-1] for row in rows], total=True) + "\n\n" + "\n".join(below)


def _bounds(bounds: Sequence[float | None] | None) -> str:
    """An interval for a column: '+16.5 to +21.3 ms' where both ends have the same unit."""
    low, to, high = interval(bounds).partition(" to ")
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if to and high.endswith(f" {unit}") else interval(bounds)


def _composition(verdict: Mapping[str, Any]) -> str:
    name = quantile_name(verdict["quantile"])
    rows = [
        [row["cause"], seconds(row["baseline_s"]), seconds(row["suspect_s"])]
        for row in verdict["composition"]
        if max(abs(row["baseline_s"] or 0.0), abs(row["suspect_s"] or 0.0)) > 1e-6
    ]
    return f"What a request around {name} is made of (describes, does not blame)\n" + table(
        ["", "baseline", "suspect"], rows
    )


def _causes(page: _Page, verdict: Mapping[str, Any], sql: bool) -> str:
    blocks = []
    for position, cause in enumerate(verdict["causes"], 1):
        subject = cause["subject"]
        where = f" on {subject['kind']} {subject['id']}" if subject["id"] else ""
        heading = (
            f"{position}. {cause['cause']}{where}: {share_words(cause, verdict['requested_quantile'])}, "
            f"confidence {cause['confidence_word']} ({cause['confidence']:.2f})"
        )
        lines = [page.wrap(heading, indent=3), page.wrap(cause["summary"], indent=3, first=3)]
        for evidence in cause["evidence"]:
            lines.append(page.wrap(f"- {evidence['statement']}", indent=5, first=3))
            if evidence["request_ids"]:
                lines.append(page.wrap("requests: " + ", ".join(evidence["request_ids"][:3]), indent=7, first=5))
            if sql and evidence["sql"]:
                lines.append("     sql: " + evidence["sql"])  # one line, so that it can be copied
            elif sql and evidence.get("computed_by"):
                lines.append(page.wrap(f"computed by {evidence['computed_by']}", indent=7, first=5))
        lines.append(page.wrap(f"would be refuted by: {cause['refuted_by']}", indent=5, first=3))
        lines.append("   what to do:")
        lines += [page.wrap(f"- {remedy}", indent=7, first=5) for remedy in cause["remedy"]]
        blocks.append("\n".join(lines))
    return "Causes\n" + tentative(verdict) + "\n\n".join(blocks) if blocks else ""


def _excluded(page: _Page, verdict: Mapping[str, Any]) -> str:
    lines = [page.wrap(f"- {row['cause']}: {row['because']}", indent=4, first=2) for row in verdict["excluded"]]
    lines += [page.wrap(f"? {row['cause']}: {row['because']}", indent=4, first=2) for row in verdict["not_observable"]]
    return "What it is not (and ? what cannot be seen here)\n" + "\n".join(lines) if lines else ""


def _side_effects(verdict: Mapping[str, Any]) -> str:
    rows = []
    for row in verdict["side_effects"]:
        show = seconds if row["metric"].endswith("_s") and "per_s" not in row["metric"] else _plain
        bounds = row["interval_95"]
        known = bounds and bounds[0] is not None and bounds[1] is not None
        rows.append(
            [
                row["metric"],
                show(row["baseline"]),
                show(row["suspect"]),
                f"{show(bounds[0])} to {show(bounds[1])}" if known else "-",
                "*" if row.get("changed") else "",
            ]
        )
    title = f"Meanwhile (* {BEYOND_NOISE}, among all of these)"
    return title + "\n" + table(["", "baseline", "suspect", "difference, 95 %", ""], rows) if rows else ""


def _quality(page: _Page, verdict: Mapping[str, Any]) -> str:
    bad = [row for row in verdict["quality"] if row["status"] != "ok"]
    if not bad:
        return f"Data quality: {len(verdict['quality'])} checks, no contradiction."
    return "Data quality\n" + "\n".join(
        page.wrap(f"{row['status'].upper()}: {row['statement']}", indent=4, first=2) for row in bad
    )


def _next(page: _Page, verdict: Mapping[str, Any]) -> str:
    experiment = verdict["next_experiment"]
    if experiment is None:
        return ""
    goal = " from ".join(experiment["separates"]) if len(experiment["separates"]) > 1 else experiment["separates"][0]
    verb = "separates" if len(experiment["separates"]) > 1 else "would confirm"
    need = experiment["requests_per_window"]
    size = f" ({need:,} requests an arm show it at power 0.9)" if need else ""
    lines = [page.wrap(f"Next experiment, which {verb} {goal}: {experiment['statement']}{size}")]
    if experiment.get("command"):
        lines.append(page.command(experiment["command"]))
    if experiment.get("engine_command"):
        lines += ["  or on the engine itself:", page.command(experiment["engine_command"])]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, total: bool = False) -> str:
    """Plain columns: first and last left-aligned, numbers right-aligned; a rule above the last row where it is a total."""
    widths = [max(len(str(line[i])) for line in [header, *rows]) for i in range(len(header))]
    text_last = len(header) > 3 and header[-1] == ""

    def line(cells: Sequence[str]) -> str:
        out = [str(cells[0]).ljust(widths[0])]
        for i in range(1, len(cells)):
            left = text_last and i == len(cells) - 1
            out.append(str(cells[i]) if left else str(cells[i]).rjust(widths[i]))
        return ("  " + "  ".join(out)).rstrip()

    lines = [line(header)] if any(header) else []
    for i, row in enumerate(rows):
        if total and i == len(rows) - 1:
            lines.append("  " + "-" * (sum(widths[: len(widths) - text_last]) + 2 * (len(widths) - text_last - 1)))
        lines.append(line(row))
    return "\n".join(lines)


def _plain(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
