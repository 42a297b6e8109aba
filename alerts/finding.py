"""A finding: a verdict in short, as `/api/v1/findings` tells it and alerts keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def short(
    verdict: Mapping[str, Any], baseline: str | None, suspect: str | None, alert_id: str | None = None
) -> dict[str, Any]:
    """The verdict's document in short; the windows as they were asked for (None: chosen by rule).

    alert_id   the alert that it stands behind; None: somebody asked
    """
    return {
        "alert_id": alert_id,
        "baseline": baseline,
        "suspect": suspect,
        **{name: verdict[name] for name in ("metric", "quantile", "status", "verdict")},
        "causes": [
            {name: cause[name] for name in ("cause", "subject", "share_p99", "confidence_word")}
            for cause in verdict["causes"]
        ],
    }
