"""What the burn-rate rules and those of requests are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from alerts.rules.scenario import Firing, Scenario, series
from alerts.rules.scenarios.common import MODEL, OF_SLO, OF_WORKER, SLO, STEPS, WORKER
from store.metric_catalogue import (
    NEWEST_STEP,
    OLDEST_WAIT,
    REQUEST_ERRORS,
    REQUESTS,
    SLO_REQUESTS,
)


def budgets(goal: float) -> tuple[Scenario, ...]:
    """Of error budgets: what is missed is worked out as times of what the goal allows."""
    allowed = 1 - goal
    missed = round(100 * 20 * allowed, 9)  # of 100 requests a minute
    met = 100 - missed
    within = 200 * allowed / 2
    return (
        Scenario(
            "KvscopeErrorBudgetBurn",
            "20 times as many as the goal allows miss the SLO from minute 60 to 120",
            (
                series(
                    SLO_REQUESTS,
                    f"0+100x60 {6000 + met:.8g}+{met:.8g}x59 {6100 + 60 * met:.8g}+100x400",
                    outcome="met",
                    **OF_SLO,
                ),
                series(
                    SLO_REQUESTS, f"0x60 {missed:.8g}+{missed:.8g}x59 {60 * missed:.8g}x400", outcome="missed", **OF_SLO
                ),
            ),
            {
                "60m": (),
                # 59 minutes of the last hour's 60; 59 of all 119 so far.
                "119m": (
                    Firing({**SLO, "window": "1h", "severity": "critical"}, _percent(20 * allowed * 59 / 60)),
                    Firing({**SLO, "window": "6h", "severity": "critical"}, _percent(20 * allowed * 59 / 119)),
                ),
                # Ended for 20 minutes: the windows of 5 minutes are clean, those of half an hour are not.
                "140m": (
                    Firing({**SLO, "window": "6h", "severity": "critical"}, _percent(20 * allowed * 60 / 140)),
                    Firing({**SLO, "window": "1d", "severity": "warning"}, _percent(20 * allowed * 60 / 140)),
                ),
                "500m": (),
            },
        ),
        Scenario(
            "KvscopeErrorBudgetBurn",
            "a dozen requests an hour, all of them too slow: chance",
            (series(SLO_REQUESTS, "0+0.2x200", outcome="missed", **OF_SLO),),
            {"200m": ()},
        ),
        Scenario(
            "KvscopeErrorBudgetBurn",
            "half as many miss as the goal allows: within the budget",
            (
                series(SLO_REQUESTS, f"0+{200 - within:.8g}x600", outcome="met", **OF_SLO),
                series(SLO_REQUESTS, f"0+{within:.8g}x600", outcome="missed", **OF_SLO),
            ),
            {"600m": ()},
        ),
        Scenario(
            "KvscopeErrorBudgetBurn",
            "no request ever missed: there is no series of misses",
            (series(SLO_REQUESTS, "0+100x100", outcome="met", **OF_SLO),),
            {"100m": ()},
        ),
        *(_steady(times, allowed, windows) for times, windows in _STEADY),
    )


_STEADY: Final = (
    (2, {"3d": "warning"}),
    (4, {"1d": "warning", "3d": "warning"}),
    (10, {"6h": "critical", "1d": "warning", "3d": "warning"}),
)
"""Times of what the goal allows -> windows that fire: between 1 and 3, 3 and 6, 6 and 14.4."""


def _steady(times: int, allowed: float, windows: Mapping[str, str]) -> Scenario:
    """Of the four rules fire those for which that is too fast, after their wait, until their short window is clean."""
    missed = round(100 * times * allowed, 9)
    return Scenario(
        "KvscopeErrorBudgetBurn",
        f"{times} times as many as the goal allows miss the SLO for four hours and a half",
        (
            series(
                SLO_REQUESTS,
                f"0+{100 - missed:.8g}x270 {(100 - missed) * 270 + 100:.8g}+100x370",
                outcome="met",
                **OF_SLO,
            ),
            series(SLO_REQUESTS, f"0+{missed:.8g}x270 {missed * 270:.8g}x370", outcome="missed", **OF_SLO),
        ),
        {
            "10m": (),
            "250m": tuple(
                Firing({**SLO, "window": window, "severity": severity}, _percent(times * allowed))
                for window, severity in windows.items()
            ),
            "635m": (),
        },
    )


def _percent(share: float) -> str:
    """As Prometheus' humanizePercentage."""
    return f"{100 * share:.4g}%"


REQUESTS_SEEN: Final = (
    Scenario(
        "KvscopeRequestErrors",
        "one in ten fails from minute 10 to 20",
        (
            series(REQUESTS, "0+90x60", state="finished", **OF_WORKER),
            series(REQUESTS, "0x10 10+10x9 100x40", state="failed", **OF_WORKER),
            series(REQUEST_ERRORS, "0x10 10+10x9 100x40", status="500", reason="server_error", **OF_WORKER),
        ),
        {"10m": (), "18m": (Firing(MODEL, "10%"),), "40m": ()},
    ),
    Scenario(
        "KvscopeRequestErrors",
        "callers give up: that is theirs",
        (
            series(REQUESTS, "0+90x60", state="finished", **OF_WORKER),
            series(REQUESTS, "0+30x60", state="aborted", **OF_WORKER),
            series(REQUEST_ERRORS, "0+30x60", status="499", reason="aborted", **OF_WORKER),
        ),
        {"30m": ()},
    ),
    Scenario(
        "KvscopeQueueStuck",
        "the oldest has waited for 45 s for three minutes",
        (series(OLDEST_WAIT, "2x10 45x3 1x30", **WORKER), STEPS),
        {"10m": (), "13m": (Firing(WORKER, "45s"),), "30m": ()},
    ),
    Scenario(
        "KvscopeQueueStuck", "20 s are long, and no page", (series(OLDEST_WAIT, "20x30", **WORKER), STEPS), {"30m": ()}
    ),
    Scenario(
        "KvscopeQueueStuck",
        "a worker that was taken down with a queue at minute 10: an hour later it is nobody's any more",
        (series(OLDEST_WAIT, "45x90", **WORKER), series(NEWEST_STEP, "0+60x10 600x80", **WORKER)),
        {"0m": (), "60m": (Firing(WORKER, "45s"),), "76m": ()},
    ),
)
