"""What else moved: diagnosis/telling/side_effects.py, and which of many differences are called real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts
from diagnosis.telling.side_effects import Difference, marked, side_effects
from tests.factories import facts, request_facts

SECONDS = 400.0
LATENCIES = np.random.default_rng(0).permutation(np.arange(600) % 20)


def window(n: int, *, decode: float = 1.0, unfinished: int = 0) -> Facts:
    """n requests in 400 s with the same spread of latencies, whatever n is; each answers with 11 tokens."""
    latency = 0.1 + 0.001 * LATENCIES[np.arange(n) % 600]
    requests = request_facts(
        np.linspace(0.0, SECONDS - 1.0, n),
        queue=[0.0] * n,
        prefill=list(latency),
        decode=list(decode * (1.0 + 0.01 * LATENCIES[np.arange(n) % 600])),
        output_tokens=[11.0] * n,
    )
    finished = np.arange(n) >= unfinished
    made = facts(replace(requests, finished=finished), num_unfinished=unfinished)
    return replace(made, start_s=0.0, end_s=SECONDS)


def told(base: Facts, suspect: Facts, metric: str = "ttft") -> dict[str, dict[str, Any]]:
    return {row["metric"]: row for row in side_effects(base, suspect, metric, seed=0)}


def test_one_interval_without_zero_among_many_is_no_change() -> None:
    """1,000 requests against 1,100 in 400 s: 0.25/s more, with an error of sqrt(2100)/400 = 0.1146: z = 2.18, p = 0.029, and the
    interval, 0.025 to 0.475, leaves 0 out. Of seven differences looked at, the smallest p-value stands up to 0.05 / 7 = 0.0071.
    """
    rows = told(window(1000), window(1100))
    row = rows["requests_per_s"]
    assert row["p_value"] == pytest.approx(0.029, abs=0.0005)
    assert row["interval_95"] == pytest.approx((0.0254, 0.4746), abs=0.0005)
    assert sum(other["p_value"] is not None for other in rows.values()) == 7
    assert row["changed"] is False
    assert not any(other["changed"] for other in rows.values())


def test_a_difference_far_outside_noise_stands_among_many() -> None:
    """Twice as many requests: z = 2.5 / (sqrt(3000) / 400) = 18."""
    rows = told(window(1000), window(2000))
    assert rows["requests_per_s"]["changed"] is True
    assert rows["unfinished_ratio"]["changed"] is False


def test_latencies_that_moved_are_called_changed_and_the_others_are_not() -> None:
    """Decoding took 1.5 times as long: TPOT and E2E moved, mean and P95; arrivals did not."""
    rows = told(window(1000, decode=0.4), window(1000, decode=0.6))
    moved = {"tpot_mean_s", "tpot_p95_s", "e2e_mean_s", "e2e_p95_s"}
    assert {name for name, row in rows.items() if row["changed"]} == moved
    assert rows["tpot_mean_s"]["suspect"] == pytest.approx(1.5 * rows["tpot_mean_s"]["baseline"])


def test_failures_are_compared_as_shares() -> None:
    """50 of 1,000 against none: pooled share 0.025, error sqrt(0.025 * 0.975 * 2 / 1000) = 0.00698, z = 7.2."""
    row = told(window(1000), window(1000, unfinished=50))["unfinished_ratio"]
    assert (row["baseline"], row["suspect"], row["changed"]) == (0.0, 0.05, True)
    assert row["p_value"] < 1e-11
    assert told(window(1000), window(1000))["unfinished_ratio"]["p_value"] == 1.0


def test_what_has_no_interval_is_neither_changed_nor_unchanged() -> None:
    """Tokens a second are sums of lengths: shown, not judged. And 19 requests have no interval of a latency."""
    rows = told(window(19), window(19))
    for name in ("output_tokens_per_s", "tpot_mean_s", "e2e_p95_s"):
        assert (rows[name]["interval_95"], rows[name]["p_value"], rows[name]["changed"]) == (None, None, None)


def test_the_metric_itself_is_no_side_effect() -> None:
    """TPOT is judged, so TTFT and E2E are what else there is."""
    rows = told(window(100), window(100), metric="tpot")
    assert {name.partition("_")[0] for name in rows if name.endswith(("_mean_s", "_p95_s"))} == {"ttft", "e2e"}


def test_what_stands_depends_on_what_else_was_looked_at() -> None:
    """0.02 alone stands (up to 0.05). Beside three of 0.5 it has to be below 0.0125; beside 0.001 and 0.01, of four, up to 0.0375."""

    def stands(*p_values: float | None) -> list[bool | None]:
        return [
            row["changed"] for row in marked([Difference(f"m{i}", 0.0, 1.0, None, p) for i, p in enumerate(p_values)])
        ]

    assert stands(0.02) == [True]
    assert stands(0.02, 0.5, 0.5, 0.5) == [False, False, False, False]
    assert stands(0.02, 0.001, 0.01, 0.5) == [True, True, True, False]
    assert stands(None, 0.02, None) == [None, True, None]
    assert stands() == []
