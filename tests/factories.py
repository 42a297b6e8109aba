"""Small facts by hand: the arrays that judgement reads, with everything unknown unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diagnosis.facts import BlockTotals, Facts, Gaps, LineageFacts, MarkFact, RequestFacts, StepFacts, WorkerFacts
from diagnosis.ledger.work_model import WorkModel


def request_facts(
    arrival: Sequence[float],
    *,
    queue: Sequence[float] | None = None,
    prefill: Sequence[float] | None = None,
    decode: Sequence[float] | None = None,
    worker: Sequence[int] | None = None,
    worker_names: Sequence[str | None] = ("w0",),
    vantage: str = "engine",
    gaps: Gaps | None = None,
    **numbers: Sequence[float],
) -> RequestFacts:
    """Requests whose phases follow each other without a gap: arrival, queue, prefill, decode (s each)."""
    n = len(arrival)
    start = np.asarray(arrival, dtype=float)
    known = queue is not None and prefill is not None
    wait = np.asarray(queue if queue is not None else np.zeros(n), dtype=float)
    work = np.asarray(prefill if prefill is not None else np.full(n, 0.1), dtype=float)
    rest = np.asarray(decode if decode is not None else np.zeros(n), dtype=float)
    first = start + wait + work
    last = first + rest
    columns = {name: np.asarray(values, dtype=float) for name, values in numbers.items()}
    if known:
        columns |= {"queue_s": wait, "prefill_s": work}
    if decode is not None:
        columns["decode_s"] = rest
    nothing = np.full(n, np.nan)
    nobody = np.array([None] * n, dtype=object)
    return RequestFacts(
        vantage=vantage,
        origin_ns=1_780_000_000_000_000_000,
        worker_names=tuple(worker_names),
        request_id=np.array([f"r{i}" for i in range(n)], dtype=object),
        worker=np.asarray(worker if worker is not None else np.zeros(n), dtype=np.int64),
        arrival_s=start,
        first_token_s=first,
        last_token_s=last,
        end_s=last,
        engine_arrival_s=start if known else nothing,
        scheduled_s=start + wait if known else nothing,
        engine_first_s=first if known else nothing,
        engine_last_s=last if known else nothing,
        numbers=columns,
        tenant=nobody,
        workload=nobody,
        session=nobody,
        prefix=nobody,
        finished=np.ones(n, dtype=bool),
        gaps=gaps,
    )


def facts(
    requests: RequestFacts,
    *,
    name: str = "window",
    samples: Mapping[str, float] | None = None,
    workers: Sequence[WorkerFacts] = (),
    marks: Sequence[MarkFact] = (),
    steps: StepFacts | None = None,
    lineage: LineageFacts | None = None,
    blocks: BlockTotals | None = None,
    **more: Any,
) -> Facts:
    """Facts of a window around these requests."""
    seen = {f"request.{key}" for key, values in requests.numbers.items() if np.isfinite(values).any()}
    seen |= {"request.token_ns"} if requests.gaps is not None else set()
    seen |= {"worker.prefix_caching"} if any(w.prefix_caching is not None for w in workers) else set()
    seen |= {"step"} if steps is not None else set()
    seen |= {"block.evicted"} if blocks is not None else set()
    seen |= {f"request.{key}" for key in ("tenant", "workload") if any(word for word in getattr(requests, key))}
    seen |= {f"sample.{key.split(':')[0]}" for key in samples or {}}
    return Facts(
        name=name,
        start_s=0.0,
        end_s=float(np.max(requests.end_s)) if len(requests) else 1.0,
        requests=requests,
        steps=steps,
        workers=workers,
        samples=samples or {},
        marks=marks,
        lineage=lineage,
        blocks=blocks,
        visible=frozenset(seen),
        num_warmup=more.get("num_warmup", 0),
        num_unfinished=more.get("num_unfinished", 0),
        clock_error_s=more.get("clock_error_s"),
    )


def work_model(**known: Any) -> WorkModel:
    """A calibration that knows nothing unless told."""
    unknown: dict[str, Any] = {
        "prefill_s_per_token": None,
        "decode_s_per_seq": None,
        "step_s": None,
        "slow_factor": None,
        "slow_raw": None,
        "slow_noise": None,
        "num_compared": 0,
        "source": None,
    }
    return WorkModel(**(unknown | known))
