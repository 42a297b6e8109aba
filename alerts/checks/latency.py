"""Latency got worse, and why: a diagnosis of the window against a baseline. One symptom a metric, one alert a named cause.

The symptom has the worker in its labels where most of the slow requests were served by one, so that a hotspot there can silence it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from alerts.condition import SEVERAL, Condition, Look, text_of, window_of
from alerts.finding import short
from alerts.seen_once import SeenOnce
from diagnosis.cause import all_causes
from diagnosis.diagnose import diagnose
from diagnosis.telling.wording import metric_name, percent, quantile_name, seconds
from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.interface import Store, Window

CAUSE, SYMPTOM = "KvscopeCause", "KvscopeLatencyRegression"
LEAST_CONFIDENCE: Final = 0.5
"""A cause that is named with less is in the verdict, and nobody is told."""
LEAST_SHARE: Final = 0.25
"""A cause that owns less of the rise is a part of the verdict, and no page of its own."""
MOST: Final = 0.5
CRITICAL_RATIO: Final = 1.0
"""Grown by its own size and more: critical."""


@dataclass(frozen=True, slots=True)
class LatencyCheck:
    """metric: ttft, tpot or e2e; min_change_ratio: a smaller rise is nobody's page, however certain it is; seen: shared by a tick's checks."""

    store: Store
    metric: str
    quantile: str = "0.99"
    min_change_ratio: float = 0.2
    seen: SeenOnce | None = None

    @property
    def name(self) -> str:
        """As it is called on /metrics."""
        return f"latency_{self.metric}"

    def owns(self, labels: Mapping[str, str]) -> bool:
        """Regressions of this metric and their causes."""
        return labels.get("alertname") in (CAUSE, SYMPTOM) and labels.get("metric") == self.metric

    def look(self, window: Window, baseline: str | None) -> Look:
        """Diagnose the window."""
        before = None if baseline is None else window_of(baseline)
        assert window.end_ns is not None
        seen = SeenOnce() if self.seen is None else self.seen
        try:
            chosen = seen.choose(self.store, before, window, window.end_ns)
            verdict = diagnose(
                self.store,
                chosen.base,
                window,
                metric=self.metric,
                quantile=self.quantile,
                now_ns=window.end_ns,
                why=chosen.why,
                load=seen.load,
            ).to_dict()
        except BadWindow as error:
            return Look(can_tell=False, because=error.message, baseline=baseline)
        compared = text_of(chosen.base)
        finding = short(verdict, compared, text_of(window))
        if not got_worse(verdict, self.min_change_ratio):
            tells = verdict["status"] in ("no_change", "explained")
            return Look((), tells, None if tells else verdict["verdict"], compared, finding)
        found = [self._symptom(verdict, window)]
        found += [
            self._cause(verdict, cause, window)
            for cause in verdict["causes"]
            if verdict["status"] == "explained" and is_told(verdict, cause)
        ]
        return Look(tuple(found), baseline=compared, finding=finding)

    def report(self, window: str, baseline: str | None) -> str:
        """The postmortem report of the window."""
        asked = {"baseline": baseline, "suspect": window, "metric": self.metric, "format": "html"}
        return "/api/v1/reports?" + urlencode(
            {name: value for name, value in asked.items() if value is not None}, safe="/"
        )

    def _symptom(self, verdict: Mapping[str, Any], window: Window) -> Condition:
        delta = verdict["delta"]
        by_mean = verdict["carried_by"] == "mean"
        carrier = "mean_s" if by_mean else "judged_s"
        which = f"{'mean' if by_mean else quantile_name(verdict['quantile'])} {metric_name(self.metric)}"
        before, after = delta["baseline"][carrier], delta["suspect"][carrier]
        labels = {
            "alertname": SYMPTOM,
            "role": "symptom",
            "metric": self.metric,
            "severity": "critical" if after >= before * (1 + CRITICAL_RATIO) else "warning",
            "worker": self._where(verdict["vantage"], before, window),
        }
        annotations = {
            "summary": f"{which} rose from {seconds(before)} to {seconds(after)}",
            "description": verdict["verdict"],
            "runbook_url": SYMPTOM,
        }
        assert window.start_ns is not None
        return Condition(labels, annotations, window.start_ns, moving=("severity", "worker"))

    def _cause(self, verdict: Mapping[str, Any], cause: Mapping[str, Any], window: Window) -> Condition:
        subject, share = cause["subject"], share_of_rise(verdict, cause)
        labels = {
            "alertname": CAUSE,
            "role": "cause",
            "metric": self.metric,
            "cause": cause["cause"],
            "severity": "warning",
        }
        if subject["id"] is not None:
            labels[subject["kind"]] = subject["id"]
        owned = f"owns {percent(share)} of the rise" if share is not None else "has evidence"
        annotations = {
            "summary": f"{cause['cause']} {owned} of {metric_name(self.metric)}",
            "description": verdict["verdict"],
            "what": cause["summary"],
            "confidence": f"{cause['confidence']:.2f} ({cause['confidence_word']})",
            "evidence": "; ".join(item["statement"] for item in cause["evidence"][:3]),
            "remedy": "; ".join(cause["remedy"]),
            "explains": "most" if share is not None and share >= MOST else "part",
            "runbook_url": cause["cause"] if cause["cause"] in all_causes() else CAUSE,
        }
        interval = cause["interval"]
        assert window.start_ns is not None
        return Condition(labels, annotations, interval["start_ns"] if interval else window.start_ns)

    def _where(self, vantage: str, before_s: float, window: Window) -> str:
        """The worker that served most of the window's requests above the baseline's value, `several` where none did."""
        condition, params = window_sql(window, "arrival_ns")
        value = _SECONDS[self.metric]
        table = self.store.query(
            f"""
WITH slow AS (SELECT request_id FROM request WHERE {condition} AND vantage = ? AND {value} > ?),
placed AS (
    SELECT request_id, max(worker) AS worker FROM request
    WHERE {condition} AND worker IS NOT NULL AND request_id IN (SELECT request_id FROM slow) GROUP BY request_id)
SELECT worker, count(*) AS n, sum(count(*)) OVER () AS placed FROM placed GROUP BY worker ORDER BY n DESC, worker LIMIT 1""",
            [*params, vantage, before_s, *params],
        ).to_pylist()
        top = table[0] if table else None
        several_workers = self._num_workers(condition, params) > 1
        return str(top["worker"]) if top and several_workers and top["n"] > MOST * float(top["placed"]) else SEVERAL

    def _num_workers(self, condition: str, params: list[Any]) -> int:
        sql = f"SELECT count(DISTINCT worker) FROM request WHERE {condition}"
        return int(self.store.query(sql, params).column(0)[0].as_py())


_SECONDS: Final = {
    "ttft": "(first_token_ns - arrival_ns) / 1e9",
    "tpot": "(last_token_ns - first_token_ns) / 1e9 / nullif(output_tokens - 1, 0)",
    "e2e": "(last_token_ns - arrival_ns) / 1e9",
}


def got_worse(verdict: Mapping[str, Any], min_ratio: float) -> bool:
    """The rise is beyond noise, and large enough to matter."""
    delta = verdict["delta"]
    mean = verdict["carried_by"] == "mean"
    carrier, bounds = ("mean_s", delta["mean_s"]) if mean else ("judged_s", delta["judged_s"])
    before, after = delta["baseline"][carrier], delta["suspect"][carrier]
    if before is None or after is None or after < before * (1 + min_ratio):
        return False
    if verdict["status"] == "explained":
        return True
    interval = bounds["interval_95"]
    return verdict["status"] != "no_change" and interval is not None and interval[0] is not None and interval[0] > 0


def share_of_rise(verdict: Mapping[str, Any], cause: Mapping[str, Any]) -> float | None:
    """Share of the change that carries the verdict, so that an alert and its verdict say the same; None where it has none."""
    if verdict["carried_by"] != "mean":
        share_p99: float | None = cause["share_p99"]
        return share_p99
    moved = verdict["delta"]["mean_s"]["value"]
    share = cause["mean_s"] / moved if moved else 0.0
    return share if share > 0 else None


def is_told(verdict: Mapping[str, Any], cause: Mapping[str, Any]) -> bool:
    """A cause that somebody is told of: likely, not over, and no small part."""
    share = share_of_rise(verdict, cause)
    return not cause["ended"] and cause["confidence"] >= LEAST_CONFIDENCE and (share is None or share >= LEAST_SHARE)
