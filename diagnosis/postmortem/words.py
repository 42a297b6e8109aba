"""The summary of a postmortem in three sentences: what changed and why, whom it hurt, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NEAR: Final = 0.02
"""A goodput that differs by less is called the same: windows are never of one length."""


def summary(verdict: Mapping[str, Any], incident: Mapping[str, Any]) -> list[str]:
    """Three sentences."""
    return [
        _sentence(verdict["verdict"].split("\n")[0]),
        impact_sentence(incident["impact"]),
        _remedy_sentence(verdict),
    ]


def impact_sentence(impact: Mapping[str, Any]) -> str:
    """Requests, tenants and sessions over their SLO, before and then, and the goodput."""
    before, then = impact["baseline"], impact["suspect"]
    if not then["requests"]:
        return "No request of the suspect window is stored."
    parts = [
        f"{then['over']:,} of {then['requests']:,} requests ({_share(then['over'], then['requests'])}) were over their SLO, "
        f"before it {_share(before['over'], before['requests'])}"
    ]
    if not then["over"] and not before["over"]:
        parts = [f"none of {then['requests']:,} requests was over its SLO, and none before"]
    hurt = [f"{then[f'{who}_over']:,} of {then[who]:,} {who}" for who in ("tenants", "sessions") if then[who]]
    if hurt and then["over"]:
        parts.append(f"that hurt {' and '.join(hurt)}")
    if before["goodput_rps"] is not None and then["goodput_rps"] is not None:
        was, became = before["goodput_rps"], then["goodput_rps"]
        if abs(became - was) < NEAR * was:
            parts.append(f"goodput stayed near {became:.3g} requests/s")
        else:
            parts.append(f"goodput {'fell' if became < was else 'rose'} from {was:.3g} to {became:.3g} requests/s")
    return _sentence("; ".join(parts))


def _remedy_sentence(verdict: Mapping[str, Any]) -> str:
    if not verdict["causes"]:
        experiment = verdict["next_experiment"]
        if experiment:
            return _sentence(f"Next: {experiment['statement']}")
        if verdict["status"] == "no_change":
            return "Nothing has to be changed for it."
        return "What to change cannot be said: no cause is named, and what was sent does not separate them."
    first = verdict["causes"][0]
    remedy = first["remedy"][0] if first["remedy"] else "see the runbook of the cause"
    return _sentence(f"What to do first (confidence {first['confidence_word']}): {remedy}")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "unknown"


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
