"""What an alert says of a cause."""

from __future__ import annotations

import pytest

from alerts.checks.latency import share_of_rise


def test_an_alert_says_the_share_that_its_verdict_says() -> None:
    """Where the mean carries the verdict, 60 of 80 ms; else the share of the quantile; none of a change that went the other way."""
    cause = {"mean_s": 0.06, "share_p99": 0.98}
    by_mean = {"carried_by": "mean", "delta": {"mean_s": {"value": 0.08}}}
    assert share_of_rise(by_mean, cause) == pytest.approx(0.75)
    assert share_of_rise({**by_mean, "carried_by": "quantile"}, cause) == 0.98
    assert share_of_rise(by_mean, {"mean_s": -0.01, "share_p99": None}) is None
    assert share_of_rise({**by_mean, "delta": {"mean_s": {"value": 0.0}}}, cause) is None
