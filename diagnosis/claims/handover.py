"""One reading of a window's hand-overs for the causes that lie in them: seconds a request now and before, and how many there were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Evidence, rate_per_s
from diagnosis.causes.load_step import GROWTH, STANDS_OUT
from diagnosis.claims.evidence_sql import event_where, text
from diagnosis.facts import Facts, HandoverFacts
from diagnosis.loading.clocks import moved
from diagnosis.loading.requests import reach
from diagnosis.telling.wording import number, seconds

BY_TRANSFERS = "each transfer beside those of the same link and the steps of the worker that took it"
RISES = {
    row: threshold(
        f"{row}.rise",
        least=0.001,
        unit="s",
        says=f"rise of the mean of a hand-over's {what}",
        why="less is a scheduler's own scatter",
    )
    for row, what in (
        ("transfer_wire", "seconds on the wire and behind others on it"),
        ("transfer_orchestration", "seconds in which nothing moved and nothing was in the way"),
        ("transfer_failures", "seconds that failed attempts cost"),
        ("decode_block_shortage", "wait for blocks at the decode worker"),
        ("decode_queue", "wait for a seat at the decode worker"),
    )
}
"""By how much a part of a hand-over has to grow, by its row."""
ONE_WORKER = 0.8
"""Share of the seconds at one decode worker from which on it is that worker's, and not the fleet's."""
BETWEEN = (
    "source_worker <> target_worker AND NOT starts_with(source_worker, target_worker || '/') "
    "AND NOT starts_with(target_worker, source_worker || '/')"
)
"""SQL: a hand-over between two workers, and no load from a worker's own tier."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one part of a hand-over: mean over the requests that were handed over, now and in the baseline (None: none there)."""

    row: str
    now_s: float
    before_s: float | None
    num: int

    @property
    def grew(self) -> bool:
        return RISES[self.row].is_reached(self.now_s - (self.before_s or 0.0))


def spent(case: Case, row: str) -> Spent | None:
    """None where the suspect window has no hand-over."""
    now, before = case.suspect.handover, case.base.handover
    if now is None:
        return None
    return Spent(row, _mean(now, row), None if before is None else _mean(before, row), int(now.moved.sum()))


def quiet(case: Case, found: Spent, what: str) -> str:
    """The number that speaks against a part of the hand-over."""
    return f"{what} took {seconds(found.now_s)} a hand-over{then(case, found)}"


def then(case: Case, found: Spent) -> str:
    if found.before_s is None:
        return f" ({number(found.num)} hand-overs, none in the {case.base_word})"
    return f" ({seconds(found.before_s)} in the {case.base_word})"


def cost(case: Case, row: str, what: str, found: Spent) -> Evidence:
    """What the part costs."""
    return Evidence(
        f"{what} took {seconds(found.now_s)} a hand-over on average{then(case, found)}, over {number(found.num)} hand-overs",
        found.now_s,
        "s",
        None,
        case.worst_requests(row),
        BY_TRANSFERS,
    )


def transfer_sql(case: Case, facts: Facts, select: str, where: str = "true") -> str | None:
    """`select` over the hand-overs of the window's requests, as they stand in `transfer`; None where requests alone tell of them."""
    if facts.handover is None or "transfer.outcome" not in facts.handover.tells:
        return None
    window = moved(case.window_of(facts), facts.requests.engine_ahead_ns)
    among = case.sql_where(reach(window), "at_ns")
    asked = (
        f"SELECT request_id FROM request WHERE {case.sql_where(case.window_of(facts), 'arrival_ns')} "
        f"AND vantage = '{facts.requests.vantage}' AND coalesce(labels['phase'], '') <> 'warmup'"
    )
    kept = f"{among} AND {BETWEEN} AND request_id IN ({asked})"
    return f"SELECT {select} FROM transfer WHERE {kept}" + ("" if where == "true" else f" AND {where}")


def decode_worker(moves: HandoverFacts, row: str) -> tuple[str, str | None]:
    """The decode worker where ONE_WORKER of a part's seconds were waited, else the fleet."""
    waited = np.bincount(moves.worker[moves.moved], moves.parts[row][moves.moved], minlength=len(moves.worker_names))
    most = int(waited.argmax())
    return ("worker", moves.worker_names[most]) if waited[most] >= ONE_WORKER * waited.sum() else ("fleet", None)


def bytes_per_s(moves: HandoverFacts | None) -> float | None:
    """What the wire carried while it carried anything; None where sizes or times are not told."""
    if moves is None:
        return None
    told = np.isfinite(moves.num_bytes) & (moves.wire_s > 0) & ~moves.broke
    return float(moves.num_bytes[told].sum() / moves.wire_s[told].sum()) if told.any() else None


def bytes_each(moves: HandoverFacts | None) -> float | None:
    """Mean size of a hand-over."""
    if moves is None:
        return None
    known = np.isfinite(moves.num_bytes)
    return float(moves.num_bytes[known].mean()) if known.any() else None


def _mean(moves: HandoverFacts, row: str) -> float:
    return float(moves.parts[row][moves.moved].mean()) if moves.moved.any() else 0.0


def load_grew(case: Case) -> str | None:
    """How many more requests arrived in all, where that is more than chance and than a tenth; else None."""
    before, now = rate_per_s(case.base), rate_per_s(case.suspect)
    z = math.log(now / before) / math.sqrt(1 / len(case.base.requests) + 1 / len(case.suspect.requests))
    if now / before - 1.0 < GROWTH.value or z < STANDS_OUT.value:
        return None
    return f"{number(now)} requests/s ({number(before)} in the {case.base_word})"


def busy_share(facts: Facts, names: Sequence[str]) -> float | None:
    """Share of the window that these workers were in a step; None where no step tells."""
    steps = facts.steps
    if steps is None or not names:
        return None
    codes = [code for code, name in enumerate(steps.worker_names) if name in names]
    inside = np.isin(steps.worker, codes) & (steps.at_s >= facts.start_s) & (steps.at_s < facts.end_s)
    took = steps.duration_s[inside & np.isfinite(steps.duration_s)]
    return min(float(took.sum()) / (facts.duration_s * len(names)), 1.0) if len(took) else None


def busy_sql(case: Case, names: Sequence[str]) -> str:
    """The same as SQL."""
    facts = case.suspect
    return (
        f"SELECT sum(duration_s) / {facts.duration_s * len(names)!r} AS busy FROM step WHERE {event_where(case, facts)} "
        f"AND worker IN ({', '.join(map(text, names))})"
    )
