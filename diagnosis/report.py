"""The postmortem report in Markdown: what happened, which cause owns how much, the evidence, and how to check it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from diagnosis.postmortem import markdown
from diagnosis.postmortem.markdown import plain, table
from diagnosis.postmortem.words import summary
from diagnosis.telling.wording import (
    BEYOND_NOISE,
    interval,
    metric_name,
    quantile_name,
    seconds,
    share_words,
    signed,
    tentative,
)


def render_markdown(verdict: Mapping[str, Any], incident: Mapping[str, Any] | None = None, *, version: str) -> str:
    """Markdown of a verdict document (`Verdict.to_dict()`), with its incident where that is given; deterministic."""
    metric, name, asked = (
        metric_name(verdict["metric"]),
        quantile_name(verdict["quantile"]),
        quantile_name(verdict["requested_quantile"]),
    )
    carrier = "The mean" if verdict["carried_by"] == "mean" else name
    sections = [
        f"# {asked} {metric}: {verdict['status'].replace('_', ' ')}",
        *([plain(verdict["side"]["statement"])] if verdict.get("side") else []),
        plain(verdict["verdict"]) if incident is None else plain(" ".join(summary(verdict, incident))),
        *_opening(incident),
        "## Windows\n\n" + _windows(verdict),
        f"## Attribution of the change\n\nRows sum to the change. {carrier} carries the verdict"
        + ("" if name == asked else f"; {asked} is shown, but too few independent requests carry an interval for it")
        + ".\n\n"
        + _attribution(verdict),
        f"## Composition around {name}\n\nDescribes what slow requests are made of; it does not blame.\n\n"
        + _composition(verdict),
        "## Causes\n\n"
        + tentative(verdict)
        + (
            "\n\n".join(_cause(cause, verdict["requested_quantile"]) for cause in verdict["causes"])
            or "No cause is named."
        ),
        "## Excluded\n\n" + _excluded(verdict),
        "## Side effects\n\n" + _side_effects(verdict),
        *([] if incident is None else [f"## Slowest requests\n\n{markdown.slowest(incident, metric, _utc)}"]),
        "## Data quality\n\n" + _list(f"{q['status']}: {q['statement']}" for q in verdict["quality"]),
        "## Next experiment\n\n" + _next(verdict),
        "## How this was made\n\n"
        + _list([*verdict["notes"], f"kvscope {version}, vantage {verdict['vantage']}", *_calibration(verdict)]),
    ]
    if incident is not None and incident["queries"]:
        sections.append("## Queries\n\n" + markdown.queries(incident))
    return "\n\n".join(sections) + "\n"


def _opening(incident: Mapping[str, Any] | None) -> list[str]:
    if incident is None:
        return []
    return [f"## Impact\n\n{markdown.impact(incident)}", f"## Timeline\n\n{markdown.timeline(incident, _utc)}"]


def _windows(verdict: Mapping[str, Any]) -> str:
    rows = []
    for side in ("baseline", "suspect"):
        w = verdict["windows"][side]
        rows.append(
            [
                side,
                w["run"] or "live",
                _utc(w["start_ns"]),
                _utc(w["end_ns"]),
                f"{verdict['n'][side]:,}",
                f"{verdict['n_effective'][side]:,.0f}",
                seconds(verdict["delta"][side]["mean_s"]),
                _ranged(verdict["delta"][side]),
            ]
        )
    asked = quantile_name(verdict["requested_quantile"])
    header = ["window", "run", "from (UTC)", "to (UTC)", "requests", "worth independent", "mean", asked]
    return table(header, rows)


def _ranged(side: Mapping[str, Any]) -> str:
    """The quantile asked for, as a range where first tokens never came."""
    bounds = side["p99_range_s"]
    if bounds is None or bounds[0] == bounds[1]:
        return seconds(side["p99_s"])
    return f"{seconds(bounds[0])} or more" if bounds[1] is None else f"{seconds(bounds[0])} to {seconds(bounds[1])}"


def _attribution(verdict: Mapping[str, Any]) -> str:
    name, asked = quantile_name(verdict["quantile"]), quantile_name(verdict["requested_quantile"])
    by_mean = verdict["delta"]["judged_s"]["interval_95"] is None
    which = "mean_interval_95" if by_mean else "interval_95"
    other = (
        [] if name == asked else [asked]
    )  # the quantile asked for has a column of its own where another one is judged

    def cells(mean: float | None, at_judged: float | None, bounds: Any, p99: float | None) -> list[str]:
        return [signed(mean), signed(at_judged), interval(bounds), *(signed(p99) for _ in other)]

    rows = [
        [
            f"`{r['cause']}`",
            r["text"],
            *cells(r["mean_s"], r["judged_s"], r[which], r["p99_s"]),
            signed(r["es_s"]),
        ]
        for r in verdict["attribution"]
    ]
    d = verdict["delta"]
    bounds = d["mean_s" if by_mean else "judged_s"]["interval_95"]
    total = cells(d["mean_s"]["value"], d["judged_s"]["value"], bounds, d["p99_s"]["value"])
    rows.append(["**change**", "", *total, ""])
    header = ["row", "what it is", "mean", name, f"95 % of {'the mean' if by_mean else name}", *other]
    return table([*header, f"shortfall beyond {asked}"], rows)


def _composition(verdict: Mapping[str, Any]) -> str:
    rows = [
        [f"`{r['cause']}`", r["text"], seconds(r["baseline_s"]), seconds(r["suspect_s"])]
        for r in verdict["composition"]
    ]
    return table(["part", "what it is", "baseline", "suspect"], rows)


def _cause(cause: Mapping[str, Any], asked: str) -> str:
    subject = cause["subject"]
    lines = [
        f"### {cause['cause']} ({share_words(cause, asked)}, confidence {cause['confidence_word']}, {cause['confidence']:.2f})",
        plain(cause["summary"] + (f" Subject: {subject['kind']} {subject['id']}." if subject["id"] else "")),
    ]
    if cause["interval"]:
        lines.append(
            f"Mostly between {_utc(cause['interval']['start_ns'])} and {_utc(cause['interval']['end_ns'])} UTC."
        )
    for evidence in cause["evidence"]:
        ids = f" Requests: {', '.join(map(_code, evidence['request_ids']))}." if evidence["request_ids"] else ""
        lines.append(plain(f"- {evidence['statement']}.") + ids)
        if evidence["sql"]:
            lines.append(f"  ~~~sql\n  {evidence['sql']}\n  ~~~")
        elif evidence.get("computed_by"):
            lines.append(f"  Computed by {evidence['computed_by']}.")
    lines.append(f"Would be refuted by: {cause['refuted_by']}")
    lines.append("What to do:\n\n" + _list(cause["remedy"]))
    return "\n\n".join(lines)


def _excluded(verdict: Mapping[str, Any]) -> str:
    rows = [[f"`{r['cause']}`", r["because"]] for r in [*verdict["excluded"], *verdict["not_observable"]]]
    return table(["cause", "because"], rows) if rows else "Nothing was excluded."


def _side_effects(verdict: Mapping[str, Any]) -> str:
    rows = []
    for r in verdict["side_effects"]:
        bounds = r["interval_95"]
        shown = f"{bounds[0]:.4g} to {bounds[1]:.4g}" if bounds and None not in bounds else "-"
        values = ["unknown" if r[key] is None else f"{r[key]:.4g}" for key in ("baseline", "suspect")]
        rows.append([r["metric"], *values, shown, BEYOND_NOISE if r.get("changed") else ""])
    said = f"{BEYOND_NOISE}: among all of these, at most 5 % of what is so called is chance.\n\n"
    return said + table(["metric", "baseline", "suspect", "difference, 95 %", ""], rows)


def _next(verdict: Mapping[str, Any]) -> str:
    experiment = verdict["next_experiment"]
    if experiment is None:
        return "None is needed."
    need = experiment["requests_per_window"]
    statement = str(experiment["statement"])
    said = (
        statement[:1].upper()
        + statement[1:]
        + "."
        + (f" {need:,} requests an arm show it at power 0.9." if need else "")
    )
    commands = [experiment.get(name) for name in ("command", "engine_command")]
    return "\n\n".join([said, *(f"~~~sh\n{command}\n~~~" for command in commands if command)])


def _calibration(verdict: Mapping[str, Any]) -> list[str]:
    c = verdict["calibration"]
    lines = []
    if c.get("prefill_s_per_token"):
        lines.append(f"a computed prompt token costs {c['prefill_s_per_token'] * 1e6:.1f} us")
    if c.get("slow_factor"):
        lines.append(
            f"step time at equal work: {c['slow_factor']:.3f} times the baseline's, from {c['compared']:,} {c['source']}"
        )
    return lines


def _list(items: Any) -> str:
    return "\n".join(f"- {plain(item)}" for item in items)


def _code(name: str) -> str:
    """A name as a code span."""
    return "`" + " ".join(name.split()).replace("`", "'") + "`"


def _utc(ns: int) -> str:
    return datetime.fromtimestamp(ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
