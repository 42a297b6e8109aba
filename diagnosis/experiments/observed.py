"""One run of an arm as numbers: what its counted requests and steps tell. Warm-up is left out and counted.

Invariant: unknown is NaN (numbers), None (whole facts) or "" (classes), never zero; requests are in arrival order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.experiments.gains import Gains, WorkerLoad
from diagnosis.facts import F64, Obj
from diagnosis.loading.requests import floats, is_warmup, seconds_since
from engine_probe.errors import BadWindow
from engine_probe.events import PHASES
from store.metrics import hit_class

CLASSES = ("hit", "partial", "miss", "new")
"""hit: all that could be reused was; miss: none of it; partial: between; new: there was nothing to reuse."""
REUSABLE = "reusable_tokens"
"""Label of a request whose sender knows how much of its prompt had been sent before."""
CALL = "call"
"""Label: the call that a request is, where its id says the arm too."""
FULL_SHARE = 0.9
"""Of what could be reused: from here on it is a hit. The last block is always computed, and one may still be under way."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A run. Arrays [n] over counted requests; counts are of the counted stretch, None where nobody tells.

    key          request id without its run: the same call has the same key in every arm
    outcome      one of CLASSES, "" where unknown
    prefix       prefix that a request shares with others, None where it shares none
    arrival_rate requests/s that came; concurrency_*: requests under way
    reused_tokens  of `prompt_tokens_known`: what the cache gave, as requests tell, else the engine's counters; 0 of 0: unknown
    """

    run_id: str
    vantage: str
    key: Obj
    arrival_s: F64
    end_s: F64
    ttft_s: F64
    tpot_s: F64
    e2e_s: F64
    output_tokens: F64
    finished: np.ndarray
    worker: Obj
    outcome: Obj
    prefix: Obj
    phases: Mapping[str, F64]
    workers: Sequence[WorkerLoad]
    num_warmup: int
    arrival_rate: float
    concurrency_mean: float
    concurrency_max: int
    span_s: float
    evicted_blocks: int | None
    preemptions: int | None
    recomputed_tokens: int | None
    prompt_tokens_known: int = 0
    reused_tokens: int = 0
    sent_late_max_s: float | None = None

    def __len__(self) -> int:
        return len(self.key)

    def phase(self, name: str) -> F64:
        """Seconds of a phase, [n]; NaN where it is not told."""
        found = self.phases.get(name)
        return np.full(len(self), np.nan) if found is None else found


def observe(
    run_id: str,
    requests: pa.Table,
    steps: pa.Table | None = None,
    workers: pa.Table | None = None,
    samples: pa.Table | None = None,
) -> Observed:
    """Read one run's rows; where client and engine tell of it, the client's. Raises BadWindow where nothing is counted.

    samples: what the engine counted before and after the calls that count; used for what neither requests nor steps tell.
    """
    vantages = requests.column("vantage").to_pylist()
    vantage = next((v for v in ("client", "engine", "router") if v in vantages), "engine")
    table = requests.filter(pc.equal(requests["vantage"], vantage)).sort_by(
        [("arrival_ns", "ascending"), ("request_id", "ascending")]
    )
    warm = is_warmup(table)
    table = table.filter(pa.array(~warm))
    if not table.num_rows:
        raise BadWindow(f"run {run_id} has no request that counts ({int(warm.sum())} were warm-up)", window=run_id)
    origin = int(table["arrival_ns"][0].as_py())
    instants = ("arrival_ns", "first_token_ns", "last_token_ns", "end_ns", "first_scheduled_ns")
    arrival, first, last, ended, scheduled = (seconds_since(table[name], origin) for name in instants)
    end = np.where(np.isfinite(ended), ended, last)
    output = floats(table["output_tokens"])
    finished = np.array(pc.equal(table["state"], "finished").to_pylist(), dtype=bool)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(output > 1, (last - first) / (output - 1), np.nan)
    labels = [dict(pairs or ()) for pairs in table["labels"].to_pylist()]
    worker = np.array(table["worker"].to_pylist(), dtype=object)
    queue = floats(table["queue_s"])
    span = float(np.nanmax(np.append(end, arrival[-1])))
    counted_steps = None if steps is None or not steps.num_rows else _within(steps, origin, origin + round(span * 1e9))
    gains = Gains.of(samples)
    reused, asked = _reused(table, gains)
    loads = _loads(_names(worker, workers), worker, queue, scheduled, span)
    return Observed(
        run_id=run_id,
        vantage=vantage,
        key=np.array(
            [row.get(CALL, name) for row, name in zip(labels, table["request_id"].to_pylist(), strict=True)],
            dtype=object,
        ),
        arrival_s=arrival,
        end_s=end,
        ttft_s=_known(np.where(finished, first - arrival, np.nan)),
        tpot_s=_known(np.where(finished, tpot, np.nan)),
        e2e_s=_known(np.where(finished, last - arrival, np.nan)),
        output_tokens=output,
        finished=finished,
        worker=worker,
        outcome=_outcomes(table, labels, _block_size(workers)),
        prefix=np.array(table["prefix_hash"].to_pylist(), dtype=object),
        phases={p: floats(table[f"{p}_s"]) for p in PHASES if table[f"{p}_s"].null_count < table.num_rows},
        workers=loads
        if any(load.queue_s is not None for load in loads if load.num_requests)
        else gains.loads(span) or loads,
        num_warmup=int(warm.sum()),
        arrival_rate=_rate(arrival),
        concurrency_mean=float(np.nansum(np.maximum(end - arrival, 0.0)) / span) if span > 0 else float(table.num_rows),
        concurrency_max=_most_at_once(arrival, end),
        span_s=span,
        evicted_blocks=_first(_total(counted_steps, "blocks_evicted"), gains.total("blocks_evicted_total")),
        preemptions=_first(_total(counted_steps, "num_preempted"), gains.total("preemptions_total")),
        recomputed_tokens=_total(counted_steps, "recomputed_tokens"),
        prompt_tokens_known=asked,
        reused_tokens=reused,
        sent_late_max_s=_latest(labels),
    )


def _reused(table: pa.Table, gains: Gains) -> tuple[int, int]:
    """(prompt tokens that the cache gave, of how many)."""
    told = table.filter(pc.and_(pc.is_valid(table["cached_tokens"]), pc.is_valid(table["prompt_tokens"])))
    if told.num_rows:
        return int(pc.sum(told["cached_tokens"]).as_py()), int(pc.sum(told["prompt_tokens"]).as_py())
    hits, asked = gains.total("prefix_hits_tokens_total"), gains.total("prefix_queries_tokens_total")
    return (0, 0) if hits is None or not asked else (hits, asked)


def _first(*told: int | None) -> int | None:
    return next((one for one in told if one is not None), None)


def _within(steps: pa.Table, start_ns: int, end_ns: int) -> pa.Table:
    at = steps["at_ns"]
    return steps.filter(pc.and_(pc.greater_equal(at, start_ns), pc.less_equal(at, end_ns)))


def _known(seconds: F64) -> F64:
    return np.where(seconds >= 0, seconds, np.nan)


def _outcomes(table: pa.Table, labels: Sequence[Mapping[str, str]], block_size: int | None) -> Obj:
    """Class of each request: against what could be reused where its sender knows, else against its whole prompt."""
    found = []
    for row, cached, prompt in zip(
        labels, table["cached_tokens"].to_pylist(), table["prompt_tokens"].to_pylist(), strict=True
    ):
        if cached is None:
            found.append("")
        elif REUSABLE not in row:
            found.append(hit_class(cached, prompt, block_size) or "")
        else:
            reusable = int(row[REUSABLE])
            if reusable <= 0:
                found.append("new")
            elif cached <= 0:
                found.append("miss")
            else:
                found.append("hit" if cached >= FULL_SHARE * min(reusable, prompt or reusable) else "partial")
    return np.array(found, dtype=object)


def _block_size(workers: pa.Table | None) -> int | None:
    sizes = set() if workers is None else {size for size in workers["block_size"].to_pylist() if size}
    return sizes.pop() if len(sizes) == 1 else None


def _names(worker: Obj, workers: pa.Table | None) -> list[str]:
    """Every worker, also one that was sent nothing: that is what a hotspot looks like at its worst."""
    told = set() if workers is None else set(workers["worker"].to_pylist())
    return sorted(name for name in {*worker, *told} if name is not None)


def _loads(names: Sequence[str], worker: Obj, queue: F64, scheduled: F64, span: float) -> list[WorkerLoad]:
    """From the requests themselves: steps tell a queue as they leave it, and what comes in mid-step is gone by then."""
    found = []
    for name in names:
        mine = worker == name
        if not mine.any():
            found.append(WorkerLoad(name, 0, 0.0, 0.0, 0))
            continue
        waited, until = queue[mine], scheduled[mine]
        known = np.isfinite(waited) & np.isfinite(until)
        if not known.any():
            found.append(WorkerLoad(name, int(mine.sum()), None, None, None))
            continue
        waited, until = waited[known], until[known]
        there = waited > 0
        found.append(
            WorkerLoad(
                worker=name,
                num_requests=int(mine.sum()),
                queue_s=float(waited.sum()),
                waiting_mean=float(waited.sum()) / span if span > 0 else None,
                waiting_max=_most_at_once(until[there] - waited[there], until[there]),
            )
        )
    return found


def _rate(arrival: F64) -> float:
    """n arrivals have n - 1 gaps."""
    span = float(arrival[-1] - arrival[0])
    return (len(arrival) - 1) / span if span > 0 else float(len(arrival))


def _most_at_once(arrival: F64, end: F64) -> int:
    """Most requests under way at one instant; who ends as another comes is gone."""
    known = np.isfinite(end)
    at = np.concatenate([arrival[known], end[known]])
    change = np.concatenate([np.ones(known.sum()), -np.ones(known.sum())])
    order = np.lexsort((change, at))
    return int(np.cumsum(change[order]).max(initial=0))


def _total(steps: pa.Table | None, column: str) -> int | None:
    if steps is None:
        return None
    total = pc.sum(steps[column]).as_py()
    return None if total is None else int(total)


def _latest(labels: Sequence[Mapping[str, str]]) -> float | None:
    told = [float(row["sent_late_s"]) for row in labels if "sent_late_s" in row]
    return max(told) if told else None
