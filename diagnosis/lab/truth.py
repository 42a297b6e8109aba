"""The truth of a lab run: what each latency would have been without the fault, from the run without it on the same calls.

A request is as `store/metrics.py` has it: TTFT = first token - arrival, TPOT over the tokens after the first, E2E up to the last;
the percentile is nearest rank on raw requests; who never got a token counts with what it waited. Warm-up is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from diagnosis.loading.requests import is_warmup
from diagnosis.statistics.quantiles import F64, nearest_rank

if TYPE_CHECKING:
    import pyarrow as pa

METRICS = ("ttft", "tpot", "e2e")
QUANTILE = "0.99"
MATERIAL = 0.10
"""Share of the value without the fault from which on a change is one that should be found."""


@dataclass(frozen=True, slots=True)
class Latency:
    """n requests; mean and P99, s."""

    n: int
    mean_s: float
    p99_s: float


def latencies(requests: pa.Table) -> dict[str, Latency]:
    """By metric, at the client's vantage where the table has it, else the engine's. Metrics that nobody has are left out."""
    vantages = pc.unique(requests["vantage"]).to_pylist()
    seen = requests.filter(pc.equal(requests["vantage"], "client" if "client" in vantages else "engine"))
    seen = seen.filter(pc.invert(np_mask(is_warmup(seen))))
    arrival, end = _seconds(seen, "arrival_ns"), _seconds(seen, "end_ns")
    first, last = _seconds(seen, "first_token_ns"), _seconds(seen, "last_token_ns")
    tokens = np.asarray(pc.cast(seen["output_tokens"], "float64").to_numpy())
    values = {
        "ttft": np.where(np.isfinite(first), first, end) - arrival,
        "tpot": (last - first) / np.where(tokens > 1, tokens - 1, np.nan),
        "e2e": last - arrival,
    }
    known = {name: found[np.isfinite(found)] for name, found in values.items()}
    return {
        name: Latency(len(found), float(found.mean()), nearest_rank(found, QUANTILE))
        for name, found in known.items()
        if len(found)
    }


def effect(everything: dict[str, Latency], without: dict[str, Latency]) -> dict[str, dict[str, Any]]:
    """v(all) - v(without the fault) by metric, with both values."""
    return {
        name: {
            "mean_s": everything[name].mean_s - without[name].mean_s,
            "p99_s": everything[name].p99_s - without[name].p99_s,
            "all": _plain(everything[name]),
            "without": _plain(without[name]),
        }
        for name in METRICS
        if name in everything and name in without
    }


def is_material(told: dict[str, Any]) -> bool:
    """Whether the fault moved P99 or the mean by a tenth or more of what it was without."""
    without = told["without"]
    return bool(
        abs(told["p99_s"]) >= MATERIAL * without["p99_s"] or abs(told["mean_s"]) >= MATERIAL * without["mean_s"]
    )


def np_mask(mask: Any) -> pa.Array:
    """A numpy mask as Arrow's."""
    import pyarrow as pa

    return pa.array(np.asarray(mask, dtype=bool))


def _plain(latency: Latency) -> dict[str, Any]:
    return {"n": latency.n, "mean_s": latency.mean_s, "p99_s": latency.p99_s}


def _seconds(table: pa.Table, column: str) -> F64:
    """Instants in s since the first arrival; NaN where unknown."""
    origin = pc.min(table["arrival_ns"])
    moved = pc.cast(pc.subtract(table[column], origin), "float64")
    return np.asarray(moved.to_numpy() / 1e9)
