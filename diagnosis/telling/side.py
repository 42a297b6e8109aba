"""Which side of the service it is: the rule of thumb that whoever is called at night goes by, worked out and not guessed.

    TTFT moved, TPOT as before   the prefill side: waiting for prefill, prefill itself, or what lies before or behind the engine
    TPOT moved, TTFT as before   the decode side: waiting for decode, fuller batches, slower steps
    both moved                   the batch: prefill and decode share steps, seats and blocks; a trade where they moved against each other
    neither                      nothing to be on a side of

Moved means beyond noise and material; of a metric that moved much, and not beyond noise, it is not known. Where TTFT moved the ledger says which part of it: before the engine, behind it, on either of the
two ways, in the prefill queue (what requests waited before their first step) or in prefill. The queue for prefill and the queue for
decode are always two numbers. Invariant: the parts of TTFT sum to its change of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from diagnosis.cause import Case
from diagnosis.facts import Facts
from diagnosis.statistics.judged import Judged
from diagnosis.telling.movement import outweighed, suspicious
from diagnosis.telling.wording import listing, number, signed

MATERIAL: Final = 0.05
"""Share of the baseline's mean from which on a change that is beyond noise is one to be on a side of."""
MOSTLY: Final = 0.5
"""Share of the change of TTFT that must lie outside the engine, before the engine is let off."""
OUTSIDE: Final[Mapping[str, tuple[str, ...]]] = {
    "before the engine": ("front_end", "client_retries"),
    "behind the engine": ("behind_engine",),
    "on one of the ways between caller and engine": ("either_way",),
}
"""Rows of the ledger that lie outside the engine, by where."""
PLACES: Final = (*OUTSIDE, "in the prefill queue", "in prefill")
"""The parts of TTFT, in the order of the fields of `Side`."""
SIDES: Final[Mapping[tuple[bool, bool], str]] = {
    (True, False): "prefill",
    (False, True): "decode",
    (True, True): "batch",
    (False, False): "neither",
}
WORDS: Final = {
    "before_engine": "Before the engine",
    "behind_engine": "Behind the engine",
    "outside_engine": "Between caller and engine",
    "prefill": "Prefill side",
    "decode": "Decode side",
    "batch": "Batch, both sides",
    "trade": "A trade between the sides",
    "neither": "Neither side",
    "unknown": "Side unknown",
}


@dataclass(frozen=True, slots=True)
class Side:
    """side: before_engine | behind_engine | outside_engine | prefill | decode | batch | trade | neither | unknown.

    ttft_s, tpot_s          change of the mean, None unknown
    before_engine_s, behind_engine_s, either_way_s, prefill_queue_s, prefill_s   parts of the change of mean TTFT; None where that is not what is judged
    prefill_queue, decode_queue   mean requests waiting for each, by the steps: (baseline, suspect), None unknown
    """

    side: str
    statement: str
    ttft_s: float | None
    tpot_s: float | None
    before_engine_s: float | None
    behind_engine_s: float | None
    either_way_s: float | None
    prefill_queue_s: float | None
    prefill_s: float | None
    prefill_queue: tuple[float | None, float | None]
    decode_queue: tuple[float | None, float | None]


def side_of(case: Case, judged: Judged, effects: Sequence[Mapping[str, Any]]) -> Side:
    """The side of the change between the windows; the sides of `case` may be exchanged, what is told is suspect - baseline."""
    moved = {name: _moved(name, case, judged, effects) for name in ("ttft", "tpot")}
    ttft, tpot = moved["ttft"], moved["tpot"]
    told = _parts(case) if case.metric in ("ttft", "e2e") else ()
    parts: Sequence[float | None] = told if case.metric == "ttft" else (None,) * len(PLACES)
    windows = (case.suspect, case.base) if case.ended else (case.base, case.suspect)
    queues = [_queues(facts) for facts in windows]
    waiting = [(queues[0][k], queues[1][k]) for k in (0, 1)]
    if ttft is None or tpot is None:
        side = "unknown"
        missing = listing([name.upper() for name, found in moved.items() if found is None])
        said = f"{missing} cannot be judged here, so prefill and decode cannot be told apart"
    else:
        side = SIDES[ttft[1], tpot[1]]
        if side == "batch" and ttft[0] * tpot[0] < 0:
            side = "trade"
        said = listing([_said(name.upper(), *found) for name, found in (("ttft", ttft), ("tpot", tpot))])
    if ttft is not None and ttft[1] and side in ("prefill", "trade"):
        # whose first token is held back gets the later ones the sooner
        side = _outside(told[: len(OUTSIDE)], ttft[0]) or side
    if ttft is not None and ttft[1] and parts[0] is not None:
        said += f"; of TTFT {_where(parts, ttft[0])}"
    said += _waiting(waiting)
    return Side(
        side,
        f"{WORDS[side]}: {said}.",
        None if ttft is None else ttft[0],
        None if tpot is None else tpot[0],
        parts[0],
        parts[1],
        parts[2],
        parts[3],
        parts[4],
        waiting[0],
        waiting[1],
    )


def opening(side: Side, status: str, *, established: bool) -> str:
    """How a verdict's sentence begins where something moved: with the side; nothing where nothing did, or nobody can tell.

    established   the change of the judged metric is beyond noise; else the side is that of another metric
    """
    if not established or status not in ("explained", "not_observable") or side.side in ("neither", "unknown"):
        return ""
    return f"{WORDS[side.side]}: "


def _moved(name: str, case: Case, judged: Judged, effects: Sequence[Mapping[str, Any]]) -> tuple[float, bool] | None:
    """(change of the mean, s; whether it is beyond noise and material) of TTFT or TPOT; None where nothing tells."""
    if name == case.metric:
        base = case.suspect_ledger if case.ended else case.base_ledger
        change = case.attribution.delta_mean_s
        if not judged.changed and suspicious(case):
            return None
        if case.traffic is not None and outweighed(case, judged):
            change = case.traffic.raw_mean_s
        return change, judged.changed and abs(change) >= MATERIAL * float(base.values.mean())
    row = next((row for row in effects if row["metric"] == f"{name}_mean_s"), None)
    if row is None or row.get("changed") is None:
        return None
    tail = next((each for each in effects if each["metric"] == f"{name}_p95_s"), {})
    change = row["suspect"] - row["baseline"]
    moved = bool(row["changed"]) or bool(tail.get("changed"))
    return change, moved and abs(change) >= MATERIAL * row["baseline"]


def _outside(parts: Sequence[float], change_s: float) -> str | None:
    """The side where most of a rise lies outside the engine: where of that, as far as one place alone has most of it; None elsewhere."""
    shares = [part / change_s if change_s > 0 else 0.0 for part in parts]
    for share, side in zip(shares, ("before_engine", "behind_engine"), strict=False):
        if share >= MOSTLY:
            return side
    return "outside_engine" if sum(shares) >= MOSTLY else None


def _parts(case: Case) -> tuple[float, ...]:
    """Change of mean TTFT in each of PLACES, s, in the windows as they are."""
    ledgers = (case.suspect_ledger, case.base_ledger) if case.ended else (case.base_ledger, case.suspect_ledger)
    means = []
    for ledger in ledgers:
        outside = [sum(float(ledger.column(name).mean()) for name in names) for names in OUTSIDE.values()]
        queue = float(ledger.first_order.mean())
        means.append((*outside, queue, float(ledger.values.mean()) - sum(outside) - queue))
    return tuple(now - then for then, now in zip(*means, strict=True))


def _where(parts: Sequence[float | None], change: float) -> str:
    """The parts that go with the change, largest first."""
    told = [
        (part, name)
        for part, name in zip(parts, PLACES, strict=True)
        if part is not None and part * change > 0.01 * change**2
    ]
    told.sort(key=lambda each: -abs(each[0]))
    return listing([f"{signed(part)} {name}" for part, name in told]) or "no part alone"


def _said(name: str, change_s: float, moved: bool) -> str:
    return f"{name} {'rose' if change_s > 0 else 'fell'} ({signed(change_s)})" if moved else f"{name} is as before"


def _queues(facts: Facts) -> tuple[float | None, float | None]:
    """Mean requests that waited for prefill, and for decode, over steps weighted by their time.

    Of a fleet in which some workers decode what others prefilled: who waits at one that decodes waits for decode.
    """
    steps = facts.steps
    if steps is None:
        return None, None
    for_prefill, for_decode = steps.get("num_waiting_prefill"), steps.get("num_waiting_decode")
    if facts.handover is not None:
        decoding = [code for code, name in enumerate(steps.worker_names) if name in facts.handover.worker_names]
        there = np.isin(steps.worker, decoding)
        for_decode = np.where(there, for_prefill + np.nan_to_num(for_decode), np.nan)
        for_prefill = np.where(there, np.nan, for_prefill)
    found = []
    for waiting in (for_prefill, for_decode):
        took = steps.duration_s
        known = np.isfinite(waiting) & np.isfinite(took) & (took > 0)
        found.append(float(np.average(waiting[known], weights=took[known])) if known.any() else None)
    return found[0], found[1]


def _waiting(queues: Sequence[tuple[float | None, float | None]]) -> str:
    """Both queues, each with what it was before; nothing where steps do not tell."""
    told = [
        f"{number(round(now, 2))} for {what} ({number(round(then, 2))} in the baseline)"
        for (then, now), what in zip(queues, ("prefill", "decode"), strict=True)
        if then is not None and now is not None
    ]
    return f"; waiting a worker: {listing(told)}" if told else ""
