"""A finding: a verdict in short, as `/api/v1/findings` tells it and alerts keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def short(
    verdict: Mapping[str, Any], baseline: str | None, suspect: str | None, alert_id: str | None = None
) -> dict[str, Any]:
    """The verdict's document in short; the windows as they were asked for (None: chosen by rule), and as they were judged.

    alert_id   the alert that it stands behind; None: somebody asked
    """
    return {
        "alert_id": alert_id,
        "baseline": baseline,
        "suspect": suspect,
        "judged": {
            "baseline": _judged(verdict["windows"]["baseline"], baseline),
            "suspect": _judged(verdict["windows"]["suspect"], suspect),
        },
        **{name: verdict[name] for name in ("metric", "quantile", "status", "verdict")},
        "causes": [
            {name: cause[name] for name in ("cause", "subject", "share_p99", "confidence_word")}
            for cause in verdict["causes"]
        ],
    }


def _judged(window: Mapping[str, Any], asked: str | None) -> str:
    """The window as it can be asked for again at any later time: `-15m/now` would be another one then."""
    if asked is not None and asked.strip() == window["run"]:
        return asked.strip()
    span = f"{window['start_ns']}/{window['end_ns']}"
    return span if window["run"] is None else f"{window['run']}@{span}"
