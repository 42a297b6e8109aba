"""Series that many scenarios have in common."""

from __future__ import annotations

from alerts.rules.scenario import series
from store.metric_catalogue import (
    NEWEST_STEP,
    SOURCE_RECEIVED,
)

MODEL = {"model": "m"}
WORKER = {"worker": "w1"}
OF_WORKER = {"vantage": "engine", "worker": "w1", "model": "m"}
OF_SLO = {**OF_WORKER, "slo": "interactive"}
SLO = {"model": "m", "slo": "interactive"}
SENDER = {"source": "probe"}
STEPS = series(NEWEST_STEP, "0+60x100", **WORKER)
COMES = series(SOURCE_RECEIVED, "0+60x100", **SENDER)
