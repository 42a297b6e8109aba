"""An experiment's document for people: in a terminal, and as a Markdown report."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.text import table
from diagnosis.wording import interval, number, percent, seconds, signed

STATISTICS = {"mean": "mean", "p50": "P50", "p95": "P95", "p99": "P99", "p99_9": "P99.9"}
WIDTH = 80


def render(document: Mapping[str, Any], width: int = WIDTH) -> str:
    """Text of an experiment's document."""
    first = document["contrasts"][0]
    parts = [
        _wrap(f"{document['name']}: {first['baseline']} against {first['suspect']}", width),
        _wrap(_headline(document, first), width) + "\n" + _readings(first, width),
        "TTFT by arm\n" + _plain(_ttft_rows(document)),
        *(_difference_text(found, width) for found in document["contrasts"]),
        "By what the cache gave\n" + _plain(_class_rows(document)) if len(_class_rows(document)) > 1 else "",
        "Where a request's time went, mean\n" + _plain(_phase_rows(document)) if len(_phase_rows(document)) > 1 else "",
        "Queues\n" + _plain(_queue_rows(document)) if len(_queue_rows(document)) > 1 else "",
        "Load that was really there\n" + _plain(_load_rows(document)),
        f"Meanwhile, {first['baseline']} to {first['suspect']} (* beyond noise and 10 %)\n"
        + _plain(_effect_rows(first)),
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
            _plain(_ttft_rows(document)),
            "Queues\n" + _plain(_queue_rows(document)),
        ]
    )


def render_markdown(document: Mapping[str, Any], version: str) -> str:
    """The report: deterministic, so that two can be compared."""
    sections = [f"# Experiment: {document['name']}"]
    for found in document["contrasts"]:
        readings = "\n".join(_reading_markdown(reading) for reading in found["reading"])
        sections.append(
            f"## {found['baseline']} to {found['suspect']}\n\n{readings}\n\n" + _markdown(_difference_rows(found))
        )
        sections.append(
            f"### Meanwhile, {found['baseline']} to {found['suspect']}\n\n" + _markdown(_effect_rows(found))
        )
        sections.append("### Only when on\n\n" + _markdown(_pressure_rows(found)))
    for title, rows in (
        ("TTFT by arm", _ttft_rows(document)),
        ("By what the cache gave", _class_rows(document)),
        ("Where a request's time went, mean", _phase_rows(document)),
        ("Workers", _worker_rows(document)),
        ("Load that was really there", _load_rows(document)),
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
        _plain(_level_rows(document)),
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
                _markdown(_level_rows(document)),
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
    return _wrap(title, width) + "\n" + _plain(_difference_rows(found))


def _difference_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "difference", "95 %"]]
    for name, label in STATISTICS.items():
        row = found["difference"]["ttft"][name]
        if row["value"] is not None and (name != "p99_9" or row["interval_95"] is not None):
            rows.append([label, signed(row["value"]), _interval(row)])
    classes = found["same_calls_by_class"]
    for name, row in classes.items():
        if name == "not_hit" and len(classes) - ("hit" in classes) <= 2:
            continue  # it is the one other class
        label = "not a hit" if name == "not_hit" else name
        rows.append([f"same calls, {label}", signed(row["value"]), interval(row["interval_95"])])
    return rows


def _ttft_rows(document: Mapping[str, Any]) -> list[list[str]]:
    names = [
        n
        for n in STATISTICS
        if n != "p99_9" or any(arm["latency"]["ttft"][n]["interval_95"] for arm in document["arms"])
    ]
    rows = [["", "n", *(STATISTICS[name] for name in names), "95 % of the mean", "95 % of P99"]]
    for arm in document["arms"]:
        told = arm["latency"]["ttft"]
        ends = [_plain_interval(told[name]) for name in ("mean", "p99")]
        rows.append([_name(arm), f"{arm['num_requests']:,}", *(seconds(told[name]["value"]) for name in names), *ends])
    return rows


def _class_rows(document: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "class", "n", "share", "mean", "P50", "P99"]]
    for arm in document["arms"]:
        for name, row in arm["by_class"].items():
            told = [seconds(row["ttft"][s]["value"]) for s in ("mean", "p50", "p99")]
            rows.append([arm["arm"], name, f"{row['num_requests']:,}", percent(row["share"]), *told])
    return rows


def _phase_rows(document: Mapping[str, Any]) -> list[list[str]]:
    names = [n for n in dict.fromkeys(n for arm in document["arms"] for n in arm["phases_mean_s"]) if any((arm["phases_mean_s"].get(n) or 0) > 5e-6 for arm in document["arms"])]  # fmt: skip
    if not names:
        return []
    return [
        ["", *names],
        *([arm["arm"], *(seconds(arm["phases_mean_s"].get(n)) for n in names)] for arm in document["arms"]),
    ]


def _queue_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """One row an arm: the worker that queues most, and the others together."""
    rows = [["", "queues most", "requests", "wait, mean", "others' wait", "its queue, mean", "most"]]
    for arm in document["arms"]:
        told = [row for row in arm["workers"] if row["queue_mean_s"] is not None]
        if not told:
            continue
        first = max(told, key=lambda row: row["queue_mean_s"] * row["num_requests"])
        others = [row for row in told if row is not first]
        count = sum(row["num_requests"] for row in others)
        waited = sum(row["queue_mean_s"] * row["num_requests"] for row in others)
        elsewhere = seconds(waited / count) if count else "-"
        queue = [_number(first["waiting_mean"]), _count(first["waiting_max"])]
        rows.append(
            [
                arm["arm"],
                first["worker"],
                f"{first['num_requests']:,}",
                seconds(first["queue_mean_s"]),
                elsewhere,
                *queue,
            ]
        )
    return rows


def _worker_rows(document: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "worker", "requests", "wait, mean", "in its queue, mean", "most"]]
    for arm in document["arms"]:
        for row in arm["workers"]:
            waiting = "unknown" if row["waiting_mean"] is None else f"{row['waiting_mean']:.2f}"
            most = "unknown" if row["waiting_max"] is None else f"{row['waiting_max']}"
            rows.append(
                [arm["arm"], row["worker"], f"{row['num_requests']:,}", seconds(row["queue_mean_s"]), waiting, most]
            )
    return rows


def _load_rows(document: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [
            "",
            "arrivals/s",
            "under way",
            "most",
            "good/s",
            "tokens/s",
            "evicted blocks",
            "preempted",
            "unfinished",
            "warm-up",
        ]
    ]
    for arm in document["arms"]:
        told = [arm[key]["value"] for key in ("arrival_rate", "concurrency", "goodput_rps", "output_tokens_per_s")]
        rate, under_way, good, tokens = (_number(value) for value in told)
        rows.append(
            [
                arm["arm"],
                rate,
                under_way,
                str(arm["concurrency_max"]),
                good,
                tokens,
                *(_count(arm[key]) for key in ("evicted_blocks", "preemptions", "num_unfinished")),
                str(arm["num_warmup_left_out"]),
            ]
        )
    return rows


def _effect_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", found["baseline"], found["suspect"], "difference, 95 %", "*"]]
    for row in found["side_effects"]:
        show = seconds if row["metric"].endswith("_s") and "per_s" not in row["metric"] else _number
        ends = row["interval_95"]
        between = "-" if ends is None else f"{show(ends[0])} to {'any' if ends[1] is None else show(ends[1])}"
        rows.append(
            [row["metric"], show(row["baseline"]), show(row["suspect"]), between, "*" if row["changed"] else ""]
        )
    return rows


def _pressure_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", found["baseline"], found["suspect"]]]
    return rows + [
        [name.replace("_", " "), _count(row["baseline"]), _count(row["suspect"])]
        for name, row in found["only_when_on"].items()
    ]


def _level_rows(document: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [
            document["unit"],
            "n",
            "mean",
            "P50",
            "P95",
            "P99",
            "95 % of P99",
            "arrivals/s",
            "under way",
            "good/s",
            "tokens/s",
        ]
    ]
    for level in document["levels"]:
        told = level["latency"]["ttft"]
        mark = "  <- knee" if level["load"] == document["knee"]["load"] else ""
        rows.append(
            [
                f"{level['load']:g}",
                f"{level['num_requests']:,}",
                *(seconds(told[name]["value"]) for name in ("mean", "p50", "p95", "p99")),
                _plain_interval(told["p99"]),
                *(_number(level[key]["value"]) for key in ("arrival_rate", "concurrency", "goodput_rps")),
                _number(level["output_tokens_per_s"]["value"]) + mark,
            ]
        )
    return rows


def _name(arm: Mapping[str, Any]) -> str:
    return f"{arm['arm']} ({arm['start']})"


def _interval(row: Mapping[str, Any]) -> str:
    return interval(row["interval_95"]) if row["interval_95"] else f"none: {(row['reason'] or '').rpartition('; ')[2]}"


def _plain_interval(row: Mapping[str, Any]) -> str:
    ends = row["interval_95"]
    if not ends:
        return "-"
    low = seconds(max(ends[0], 0.0))
    return f"{low} or more" if ends[1] is None else f"{low} to {seconds(ends[1])}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else number(value) if abs(value) >= 100 else f"{value:.3g}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


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
    return textwrap.fill(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(rows: Sequence[Sequence[str]]) -> str:
    return table(rows[0], rows[1:])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.strip().replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
