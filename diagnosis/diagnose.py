"""`diagnose`: two windows of a store in, a verdict out."""

from __future__ import annotations

from dataclasses import replace

from diagnosis import windows
from diagnosis.judge import judge
from diagnosis.load import load, vantages
from diagnosis.quantiles import parse_quantile
from diagnosis.verdict import Verdict
from engine_probe.errors import BadWindow
from store.interface import Store, Window

METRICS = ("ttft", "tpot", "e2e")


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
) -> Verdict:
    """Why does `metric` (ttft, tpot, e2e) differ between the windows? Windows that are None are chosen (see `windows.choose`).

    quantile   decimal text between 0 and 1, such as "0.99"
    why        why these windows, where they were chosen before (an incident bundle)
    vantage    client or engine; None takes the client's where both windows have it, else the engine's
    Raises BadWindow for unknown, empty, overlapping or future windows.
    """
    if metric not in METRICS:
        raise BadWindow(f"unknown metric {metric!r}; known: {', '.join(METRICS)}", metric=metric)
    check_quantile(quantile)
    chosen = windows.choose(store, baseline, suspect, now_ns)
    if why is not None:
        chosen = replace(chosen, why=why)
    common = vantages(store, chosen.base) & vantages(store, chosen.suspect)
    if vantage is None:
        vantage = next((v for v in ("client", "engine", "router") if v in common), "client")
    elif vantage not in ("client", "engine", "router"):
        raise BadWindow(f"unknown vantage {vantage!r}; known: client, engine, router", vantage=vantage)
    base = load(store, chosen.base, chosen.base_name, vantage)
    found = load(store, chosen.suspect, chosen.suspect_name, vantage)
    return judge(base, found, chosen, metric, quantile, seed=seed)


def check_quantile(quantile: str) -> None:
    """Raises BadWindow where the text is no decimal strictly between 0 and 1."""
    try:
        parse_quantile(quantile)
        inside = 0.0 < float(quantile) < 1.0
    except (ValueError, ArithmeticError):
        inside = False
    if not inside:
        raise BadWindow(f"{quantile!r} is no quantile; give a decimal between 0 and 1, such as 0.99", quantile=quantile)
