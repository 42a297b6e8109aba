"""`diagnose`: two windows of a store in, a verdict out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

from diagnosis import windows
from diagnosis.facts import Facts
from diagnosis.judge import judge
from diagnosis.loading.load import load
from diagnosis.parallel import both
from diagnosis.statistics.quantiles import parse_quantile
from diagnosis.telling.verdict import Verdict
from engine_probe.errors import BadWindow, KvscopeError, UsageError
from store.interface import Store, Window

METRICS = ("ttft", "tpot", "e2e")
LOWEST, HIGHEST, MOST_DIGITS = "0.0001", "0.9999", 16


def diagnose(
    store: Store,
    baseline: Window | None,
    suspect: Window | None,
    *,
    metric: str = "ttft",
    quantile: str = "0.99",
    vantage: str | None = None,
    now_ns: int,
    seed: int = 0,
    why: str | None = None,
    load: Callable[[Store, Window, str, str], Facts] = load,
) -> Verdict:
    """Why does `metric` (ttft, tpot, e2e) differ between the windows? Windows that are None are chosen (see `windows.choose`).

    quantile   decimal text between 0 and 1, such as "0.99"
    why        why these windows, where they were chosen before (an incident bundle)
    load       reads a window's facts; who asks several questions about one window reads it once
    vantage    client or engine; None takes the client's where both windows have it, else the engine's
    Raises BadWindow for unknown, empty, overlapping or future windows, UsageError for an unknown metric, vantage or quantile.
    """
    if metric not in METRICS:
        raise UsageError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}", metric=metric)
    check_quantile(quantile)
    if vantage is not None and vantage not in windows.VANTAGES:
        raise UsageError(f"unknown vantage {vantage!r}; known: {', '.join(windows.VANTAGES)}", vantage=vantage)
    chosen = windows.choose(store, baseline, suspect, now_ns)
    if why is not None:
        chosen = replace(chosen, why=why)
    vantage = _vantage(store, chosen) if vantage is None else vantage
    with store.sharing():
        base, found = both(
            partial(load, store, chosen.base, chosen.base_name, vantage),
            partial(load, store, chosen.suspect, chosen.suspect_name, vantage),
        )
    return judge(base, found, chosen, metric, quantile, seed=seed)


def _vantage(store: Store, chosen: windows.Chosen) -> str:
    """The vantage that both windows were seen from. Raises BadWindow where there is none: instants of two are never compared."""
    seen = [windows.vantages(store, window) for window in (chosen.base, chosen.suspect)]
    names = (chosen.base_name, chosen.suspect_name)
    for name, window, found in zip(names, (chosen.base, chosen.suspect), seen, strict=True):
        if not found:
            raise BadWindow(
                windows.holds_nothing(store, window, f"window {name} ({windows.shown(window)}) holds no requests"),
                window=str(window),
            )
    vantage = windows.judged_vantage(seen[0] & seen[1])
    if vantage is None:
        told = " and ".join(f"{name} by {', '.join(sorted(found))}" for name, found in zip(names, seen, strict=True))
        raise BadWindow(
            f"the windows were not seen from one vantage ({told}), and latencies of two vantages are not compared",
            window=str(chosen.suspect),
        )
    return vantage


def check_quantile(quantile: str) -> None:
    """Raises UsageError where the text is no decimal from LOWEST to HIGHEST: beyond, no window holds enough requests to judge."""
    try:
        inside = Fraction(LOWEST) <= parse_quantile(quantile) <= Fraction(HIGHEST) and len(quantile) <= MOST_DIGITS
    except (ValueError, ArithmeticError, KvscopeError):
        inside = False
    if not inside:
        raise UsageError(
            f"{quantile!r} is no quantile that can be judged; give a decimal from {LOWEST} to {HIGHEST}, such as 0.99",
            quantile=quantile,
        )
