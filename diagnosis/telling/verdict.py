"""The verdict as data: the keys of design section 7, and nothing that cannot be written as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """Changes in seconds with their 95 % intervals (None where the data give none).

    `p99_*` is the quantile that was asked for (P99 unless said otherwise), `judged_*` the one that carries the verdict.
    `*_range` says where the quantile lies where first tokens never came: (at least, at most; None: nothing bounds it).
    """

    mean_s: float
    p99_s: float
    judged_s: float
    mean_interval_95: tuple[float, float] | None
    interval_95: tuple[float, float] | None
    p99_interval_95: tuple[float, float] | None
    base_p99_s: float
    suspect_p99_s: float
    base_mean_s: float
    suspect_mean_s: float
    base_judged_s: float
    suspect_judged_s: float
    base_p99_range: tuple[float, float | None] | None = None
    suspect_p99_range: tuple[float, float | None] | None = None
    base_judged_range: tuple[float, float | None] | None = None
    suspect_judged_range: tuple[float, float | None] | None = None


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One row of a table: seconds of the mean, of P99, of expected shortfall; `judged_s` at the judged quantile.

    interval_95 is that of judged_s, mean_interval_95 that of mean_s; None where the windows carry none.
    """

    cause: str
    text: str
    mean_s: float
    p99_s: float
    es_s: float
    judged_s: float
    interval_95: tuple[float, float] | None = None
    mean_interval_95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class CompositionRow:
    """What requests around the quantile were made of, s, in each window."""

    cause: str
    text: str
    baseline_s: float
    suspect_s: float


@dataclass(frozen=True, slots=True)
class NamedCause:
    """A ranked cause of the verdict."""

    cause: str
    rows: Sequence[str]
    summary: str
    subject: dict[str, str | None]
    interval: dict[str, int] | None
    share_p99: float | None
    mean_s: float
    p99_s: float
    confidence: float
    confidence_word: str
    evidence: Sequence[dict[str, Any]]
    refuted_by: str
    remedy: Sequence[str]
    ended: bool = False
    """Latency fell because this cause, which the baseline had, is over."""
    certainty: float | None = None
    """What confidence was read off by calibration: support of the bootstrap times what is missing."""
    began: bool = False
    """It owns most of the change, and the baseline shows nothing of it (of what is over: the suspect window)."""
    tentative: bool = False
    """The data point at it and accuse it of nothing: the change is not established, or not by enough for what both windows have."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Status and sentence of a verdict; `named`: its causes are shown (tentatively, where the status is not `explained`)."""

    status: str
    sentence: str
    named: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer. `status`: explained | no_change | not_distinguishable | not_observable.

    quantile is the judged one, requested_quantile the one that was asked for; carried_by (quantile | mean) says which of the
    judged quantile and the mean carries the verdict.
    """

    status: str
    verdict: str
    metric: str
    quantile: str
    requested_quantile: str
    carried_by: str
    vantage: str
    windows: dict[str, Any]
    n: dict[str, int]
    n_effective: dict[str, float]
    delta: Change
    composition: Sequence[CompositionRow]
    attribution: Sequence[LedgerRow]
    causes: Sequence[NamedCause]
    side_effects: Sequence[dict[str, Any]]
    unexplained: dict[str, float]
    excluded: Sequence[dict[str, str]]
    not_observable: Sequence[dict[str, Any]]
    quality: Sequence[dict[str, str]]
    notes: Sequence[str]
    next_experiment: dict[str, Any] | None
    side: dict[str, Any] | None = None
    """Prefill side, decode side, or the batch (`side.py`)."""
    calibration: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A plain document; floats that are not finite become null."""
        document: dict[str, Any] = _clean(asdict(self))
        delta = document["delta"]
        document["delta"] = {
            "mean_s": {"value": delta["mean_s"], "interval_95": delta["mean_interval_95"]},
            "p99_s": {"value": delta["p99_s"], "interval_95": delta["p99_interval_95"]},
            "judged_s": {"value": delta["judged_s"], "interval_95": delta["interval_95"]},
            "baseline": _side(delta, "base"),
            "suspect": _side(delta, "suspect"),
        }
        return document


def _side(delta: dict[str, Any], side: str) -> dict[str, Any]:
    """Values of one window, and the ranges of its quantiles (null where every first token came, or is merely unknown)."""
    values = {name: delta[f"{side}_{name}"] for name in ("mean_s", "p99_s", "judged_s")}
    return values | {f"{name}_range_s": delta[f"{side}_{name}_range"] for name in ("p99", "judged")}


def confidence_word(value: float) -> str:
    """high from 0.8, medium from 0.5, else low."""
    return "high" if value >= 0.8 else "medium" if value >= 0.5 else "low"


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # numpy's own is a float too, and no JSON encoder's
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    if hasattr(value, "item"):
        return _clean(value.item())
    return value
