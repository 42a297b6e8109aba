"""The postmortem's own sections in Markdown: impact, timeline, slowest requests, queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.postmortem.incident import SIDES
from diagnosis.postmortem.words import impact_sentence
from diagnosis.telling.wording import seconds


def impact(incident: Mapping[str, Any]) -> str:
    """Who was hurt: one sentence, both windows, the tenants with most requests over their SLO, and what they were held to."""
    told = incident["impact"]
    header = ["window", "requests", "over SLO", "unfinished", "tenants over", "sessions over", "goodput, requests/s"]
    rows = [
        [
            side,
            f"{told[side]['requests']:,}",
            f"{told[side]['over']:,}",
            f"{told[side]['unfinished']:,}",
            *(_of(told[side][f"{who}_over"], told[side][who]) for who in ("tenants", "sessions")),
            "unknown" if told[side]["goodput_rps"] is None else f"{told[side]['goodput_rps']:.4g}",
        ]
        for side in SIDES
    ]
    parts = [impact_sentence(told), table(header, rows)]
    if told["tenants"]:
        tenants = [
            [
                row["tenant"],
                f"{row['suspect']['over']:,}",
                f"{row['suspect']['requests']:,}",
                "not seen"
                if row["baseline"] is None
                else f"{row['baseline']['over']:,} of {row['baseline']['requests']:,}",
            ]
            for row in told["tenants"]
        ]
        parts.append(table(["tenant", "over SLO", "of", "before"], tenants))
    parts.append("Held to: " + "; ".join(_limits(rule) for rule in told["slo"]) + ". The first that fits decides.")
    return "\n\n".join(parts)


def timeline(incident: Mapping[str, Any], utc: Any) -> str:
    """Marks, alerts, and when causes held, in order."""
    return "\n".join(
        f"{number}. {utc(moment['at_ns'])} UTC: {plain(moment['text'])} ({moment['what']})"
        for number, moment in enumerate(incident["moments"], start=1)
    )


def slowest(incident: Mapping[str, Any], metric: str, utc: Any) -> str:
    """The slowest requests of the suspect window, with what their time was spent on."""
    rows = [
        [
            f"`{plain(row['request_id']).replace('`', '')}`",
            utc(row["arrival_ns"]),
            seconds(row["value_s"]),
            row["worker"] or "-",
            row["tenant"] or "-",
            ", ".join(f"{phase} {seconds(value)}" for phase, value in row["phases"].items()) or "not told",
        ]
        for row in incident["slowest"]
    ]
    if not rows:
        return "No request of the suspect window tells it."
    return table(["request", "arrival (UTC)", metric, "worker", "tenant", "spent on"], rows)


def queries(incident: Mapping[str, Any]) -> str:
    """Every query behind a number, under its hash, with the parts that rest on it."""
    return "\n\n".join(
        f"{query['hash']} ({', '.join(query['of'])})\n\n~~~sql\n{query['sql']}\n~~~" for query in incident["queries"]
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; what stands in a cell cannot end it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    cells = [[plain(str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def plain(words: str) -> str:
    """Words on one line, in which names from outside cannot be markup."""
    return " ".join(words.split()).replace("<", "&lt;")


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" if whole else "not told"


def _limits(rule: Mapping[str, Any]) -> str:
    limits = [
        f"{name} {seconds(rule[key])}"
        for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_token_s"))
        if rule[key] is not None
    ]
    return f"{rule['name']} ({', '.join(limits)})"
