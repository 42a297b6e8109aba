"""The verdict for a terminal at three in the morning: one sentence, the table, the evidence, what it is not, what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.wording import interval, metric_name, quantile_name, seconds, share_words, signed, tentative

WIDTH = 100
STATUS = {
    "explained": "EXPLAINED",
    "no_change": "NO CHANGE",
    "not_distinguishable": "NOT DISTINGUISHABLE",
    "not_observable": "NOT OBSERVABLE HERE",
}


def render(verdict: Mapping[str, Any], *, sql: bool = True) -> str:
    """Text of a verdict document (`Verdict.to_dict()`). `sql` False leaves the queries out."""
    parts = [
        _wrap(f"{STATUS[verdict['status']]}: {verdict['verdict']}"),
        _about(verdict),
        _attribution(verdict),
        _composition(verdict),
        _causes(verdict, sql),
        _excluded(verdict),
        _side_effects(verdict),
        _quality(verdict),
        _next(verdict),
    ]
    return "\n\n".join(part for part in parts if part)


def summary(verdict: Mapping[str, Any]) -> str:
    """The short form: the sentence, and where the change comes from."""
    return _wrap(f"{STATUS[verdict['status']]}: {verdict['verdict']}") + "\n\n" + _attribution(verdict)


def _about(verdict: Mapping[str, Any]) -> str:
    lines = []
    for side in ("baseline", "suspect"):
        window = verdict["windows"][side]
        effective = verdict["n_effective"][side]
        length = (window["end_ns"] - window["start_ns"]) / 1e9
        lines.append(
            f"{side:9} {window['run'] or 'live':20} {verdict['n'][side]:>7,} requests over {seconds(length)}, worth {effective:,.0f} "
            f"independent ones at {quantile_name(verdict['quantile'])}"
        )
    lines.append(f"vantage   {verdict['vantage']}")
    return "\n".join(lines + [_wrap(f"note      {note}", indent=10) for note in verdict["notes"]])


def _attribution(verdict: Mapping[str, Any]) -> str:
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
        rows.append([row["cause"], *cells, interval(row[which]), row["text"]])
    delta = verdict["delta"]
    total = ["change", signed(delta["mean_s"]["value"]), signed(delta["judged_s"]["value"])]
    if name != asked:
        total.append(signed(delta["p99_s"]["value"]))
    rows.append([*total, interval(delta["mean_s" if by_mean else "judged_s"]["interval_95"]), ""])
    return title + "\n" + table(["", *columns, ""], rows, total=True)


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


def _causes(verdict: Mapping[str, Any], sql: bool) -> str:
    blocks = []
    for position, cause in enumerate(verdict["causes"], 1):
        subject = cause["subject"]
        where = f" on {subject['kind']} {subject['id']}" if subject["id"] else ""
        lines = [
            f"{position}. {cause['cause']}{where}: {share_words(cause, verdict['requested_quantile'])}, "
            f"confidence {cause['confidence_word']} ({cause['confidence']:.2f})",
            _wrap(cause["summary"], indent=3, first=3),
        ]
        for evidence in cause["evidence"]:
            lines.append(_wrap(f"- {evidence['statement']}", indent=5, first=3))
            if evidence["request_ids"]:
                lines.append(_wrap("requests: " + ", ".join(evidence["request_ids"][:3]), indent=7, first=5))
            if sql and evidence["sql"]:
                lines.append("     sql: " + evidence["sql"])  # one line, so that it can be copied
        lines.append(_wrap(f"would be refuted by: {cause['refuted_by']}", indent=5, first=3))
        lines.append("   what to do:")
        lines += [_wrap(f"- {remedy}", indent=7, first=5) for remedy in cause["remedy"]]
        blocks.append("\n".join(lines))
    return "Causes\n" + tentative(verdict) + "\n\n".join(blocks) if blocks else ""


def _excluded(verdict: Mapping[str, Any]) -> str:
    lines = [_wrap(f"- {row['cause']}: {row['because']}", indent=4, first=2) for row in verdict["excluded"]]
    lines += [_wrap(f"? {row['cause']}: {row['because']}", indent=4, first=2) for row in verdict["not_observable"]]
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
            ]
        )
    return "Meanwhile\n" + table(["", "baseline", "suspect", "difference, 95 %"], rows) if rows else ""


def _quality(verdict: Mapping[str, Any]) -> str:
    bad = [row for row in verdict["quality"] if row["status"] != "ok"]
    if not bad:
        return f"Data quality: {len(verdict['quality'])} checks, no contradiction."
    return "Data quality\n" + "\n".join(
        _wrap(f"{row['status'].upper()}: {row['statement']}", indent=4, first=2) for row in bad
    )


def _next(verdict: Mapping[str, Any]) -> str:
    experiment = verdict["next_experiment"]
    if experiment is None:
        return ""
    goal = " from ".join(experiment["separates"]) if len(experiment["separates"]) > 1 else experiment["separates"][0]
    verb = "separates" if len(experiment["separates"]) > 1 else "would confirm"
    need = experiment["requests_per_window"]
    size = f" ({need:,} requests a window show a change of 20 % at power 0.9)" if need else ""
    return _wrap(f"Next experiment, which {verb} {goal}: {experiment['statement']}{size}")


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


def _wrap(text: str, indent: int = 0, first: int = 0) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
