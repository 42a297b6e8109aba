"""The tables of an experiment's document, as cells: header first. What is unknown says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diagnosis.telling.wording import interval, number, percent, seconds, signed

STATISTICS = {"mean": "mean", "p50": "P50", "p95": "P95", "p99": "P99", "p99_9": "P99.9"}


def difference_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """TTFT of a pair: each statistic's difference, then that of the same calls by what the cache gave them."""
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


def ttft_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """TTFT of every arm. P99.9 stands only where some arm has requests for it."""
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


def class_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """TTFT by hit, partial, miss and new, of every arm that tells."""
    rows = [["", "class", "n", "share", "mean", "P50", "P99"]]
    for arm in document["arms"]:
        for name, row in arm["by_class"].items():
            told = [seconds(row["ttft"][s]["value"]) for s in ("mean", "p50", "p99")]
            rows.append([arm["arm"], name, f"{row['num_requests']:,}", percent(row["share"]), *told])
    return rows


def phase_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Mean seconds of every phase that matters anywhere, by arm; [] where none is told."""
    names = [n for n in dict.fromkeys(n for arm in document["arms"] for n in arm["phases_mean_s"]) if any((arm["phases_mean_s"].get(n) or 0) > 5e-6 for arm in document["arms"])]  # fmt: skip
    if not names:
        return []
    return [
        ["", *names],
        *([arm["arm"], *(seconds(arm["phases_mean_s"].get(n)) for n in names)] for arm in document["arms"]),
    ]


def queue_rows(document: Mapping[str, Any]) -> list[list[str]]:
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


def worker_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Every worker of every arm."""
    rows = [["", "worker", "requests", "wait, mean", "in its queue, mean", "most"]]
    for arm in document["arms"]:
        for row in arm["workers"]:
            waiting = "unknown" if row["waiting_mean"] is None else f"{row['waiting_mean']:.2f}"
            most = "unknown" if row["waiting_max"] is None else f"{row['waiting_max']}"
            rows.append(
                [arm["arm"], row["worker"], f"{row['num_requests']:,}", seconds(row["queue_mean_s"]), waiting, most]
            )
    return rows


def load_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """What each arm was really given, and what it did with its blocks."""
    rows = [
        [
            "",
            "arrivals/s",
            "under way",
            "most",
            "good/s",
            "tokens/s",
            "reused",
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
                percent(arm["reused_ratio"]),
                *(_count(arm[key]) for key in ("evicted_blocks", "preemptions", "num_unfinished")),
                str(arm["num_warmup_left_out"]),
            ]
        )
    return rows


def effect_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What else moved between the two arms of a pair."""
    rows = [["", found["baseline"], found["suspect"], "difference, 95 %", "*"]]
    for row in found["side_effects"]:
        show = seconds if row["metric"].endswith("_s") and "per_s" not in row["metric"] else _number
        ends = row["interval_95"]
        between = "-" if ends is None else f"{show(ends[0])} to {'any' if ends[1] is None else show(ends[1])}"
        rows.append(
            [row["metric"], show(row["baseline"]), show(row["suspect"]), between, "*" if row["changed"] else ""]
        )
    return rows


def pressure_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Evictions, preemptions and recomputation of a pair: what is there only when the cache is on."""
    rows = [["", found["baseline"], found["suspect"]]]
    return rows + [
        [name.replace("_", " "), _count(row["baseline"]), _count(row["suspect"])]
        for name, row in found["only_when_on"].items()
    ]


def level_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """A sweep's levels, the knee marked."""
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
