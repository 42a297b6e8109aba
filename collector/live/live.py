"""What is going on right now, as far as the rows that came tell: workers by their newest step, and requests still open.

A request is known to be open from its routing decision until a row tells its end; an engine without a router in front
tells only how many run and wait, in its steps. So the table says where each line comes from, and an empty table means
that nothing was told, not that nothing runs. Held in memory, bounded, forgotten with the process; history is in the
store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from collector.counts.columns import live_rows

_STEP_COLUMNS: Final = (
    "at_ns",
    "step",
    "num_running",
    "num_waiting_prefill",
    "num_waiting_decode",
    "oldest_wait_s",
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "blocks_reserved",
    "wasted_slots",
    "gpu_util",
    "memory_util",
    "waiting_on",
)
_FACTS: Final = ("block_size", "num_blocks")
SCRAPED: Final = ("requests_running", "requests_waiting", "kv_usage_ratio")
"""Samples that stand in for what a worker's steps would tell."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that was routed and has not ended: `since_ns` is the instant of the decision."""

    request_id: str
    since_ns: int
    router: str | None
    worker: str | None


class Live:
    """The live picture; safe from several threads.

    max_open      open requests (and as many ended ones) that are followed; the oldest are dropped and counted
    max_workers   workers that are followed; a later one takes the place of the one that told nothing for longest
    """

    def __init__(self, max_open: int, expiry_s: float, max_workers: int = 1000) -> None:
        self._max_open = max_open
        self._expiry_ns = int(expiry_s * 1e9)
        self._max_workers = max_workers
        self._open: dict[str, OpenRequest] = {}
        self._ended: dict[str, None] = {}
        self._workers: dict[str, dict[str, Any]] = {}
        self._told_ns: dict[str, int] = {}  # when each worker told something for the last time
        self.block_sizes: dict[str, int] = {}
        """Worker -> tokens in a KV block, where told; read by others, changes here alone."""
        self._num_blocks: dict[str, int] = {}
        self._scraped: dict[str, dict[str, tuple[int, float]]] = {}
        self._lock = threading.Lock()
        self.num_dropped = 0
        self.sees_routes = False

    def observe(self, tables: Mapping[str, pa.Table], now_ns: int) -> None:
        """Take in committed rows; those of imported runs are history and are left out."""
        if "route" in tables:
            self._add_routes(live_rows(tables["route"]), now_ns)
        if "request" in tables and self.sees_routes:
            self._end(live_rows(tables["request"]))
        if "step" in tables:
            self._add_steps(live_rows(tables["step"]))
        if "worker" in tables:
            self._add_facts(live_rows(tables["worker"]))
        if "sample" in tables:
            self._add_samples(live_rows(tables["sample"]))

    def open_requests(self, now_ns: int, limit: int) -> list[OpenRequest]:
        """The longest open first."""
        self._expire(now_ns)
        with self._lock:
            found = sorted(self._open.values(), key=lambda request: request.since_ns)
        return found[:limit]

    @property
    def num_open(self) -> int:
        """How many requests are known to be open."""
        return len(self._open)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Worker -> its newest step: at_ns, step, num_running, waiting and block counts (None where not told)."""
        with self._lock:
            return {name: dict(state) for name, state in sorted(self._workers.items())}

    def scraped(self) -> dict[str, dict[str, tuple[int, float]]]:
        """Worker whose steps nobody tells -> name of SCRAPED -> (instant, value) of its newest sample, summed over its labels."""
        with self._lock:
            return {name: dict(found) for name, found in sorted(self._scraped.items()) if name not in self._workers}

    def num_blocks(self, worker: str) -> int | None:
        """Usable KV blocks of a worker, as its facts tell them."""
        return self._num_blocks.get(worker)

    def oldest_open_ns(self, now_ns: int) -> int | None:
        """When the oldest open request was routed; None where none is open."""
        self._expire(now_ns)
        with self._lock:
            return min((request.since_ns for request in self._open.values()), default=None)

    def _add_routes(self, routes: pa.Table, now_ns: int) -> None:
        columns = [routes.column(name).to_pylist() for name in ("request_id", "at_ns", "router", "chosen")]
        with self._lock:
            self.sees_routes = self.sees_routes or routes.num_rows > 0
            for request_id, since_ns, router, chosen in zip(*columns, strict=True):
                if request_id not in self._ended:
                    self._open[request_id] = OpenRequest(request_id, since_ns, router, chosen)
            while len(self._open) > self._max_open:
                del self._open[next(iter(self._open))]
                self.num_dropped += 1
        self._expire(now_ns)

    def _end(self, requests: pa.Table) -> None:
        """A client's or router's row ends a request, and that of the engine it was sent to, not a prefill helper's."""
        columns = [requests.column(name).to_pylist() for name in ("request_id", "vantage", "worker")]
        with self._lock:
            for request_id, vantage, worker in zip(*columns, strict=True):
                known = self._open.get(request_id)
                if vantage == "engine" and known is not None and known.worker not in (None, worker):
                    continue
                self._open.pop(request_id, None)
                self._ended[request_id] = None
            while len(self._ended) > self._max_open:
                del self._ended[next(iter(self._ended))]

    def _add_steps(self, steps: pa.Table) -> None:
        if steps.num_rows == 0:
            return
        names = pc.dictionary_encode(pc.fill_null(steps.column("worker"), "").combine_chunks())
        codes, at_ns = names.indices.to_numpy(), steps.column("at_ns").to_numpy()
        order = np.lexsort((at_ns, codes))
        newest = order[np.flatnonzero(np.diff(codes[order], append=-1))]
        newest = newest[np.argsort(-at_ns[newest])][: self._max_workers]
        for row, state in zip(newest, steps.select(_STEP_COLUMNS).take(pa.array(newest)).to_pylist(), strict=True):
            worker = names[int(row)].as_py()
            with self._lock:
                if not self._admit(worker, state["at_ns"]):
                    continue
                known = self._workers.get(worker)
                if known is None or known["at_ns"] <= state["at_ns"]:
                    self._workers[worker] = state

    def _admit(self, worker: str, at_ns: int) -> bool:
        """Room for a worker that tells something now. Workers come and go under ever new names: the one silent for longest goes."""
        if worker not in self._told_ns and len(self._told_ns) >= self._max_workers:
            oldest = min(self._told_ns, key=self._told_ns.__getitem__)
            if self._told_ns[oldest] >= at_ns:
                return False
            for of in (self._told_ns, self._workers, self._scraped, self.block_sizes, self._num_blocks):
                of.pop(oldest, None)
        self._told_ns[worker] = max(at_ns, self._told_ns.get(worker, at_ns))
        return True

    def _add_facts(self, workers: pa.Table) -> None:
        for row in workers.select(["worker", "at_ns", *_FACTS]).to_pylist():
            name = row["worker"] or ""
            with self._lock:
                if self._admit(name, row["at_ns"]):
                    for of, column in ((self.block_sizes, "block_size"), (self._num_blocks, "num_blocks")):
                        if row[column]:
                            of[name] = row[column]

    def _add_samples(self, samples: pa.Table) -> None:
        mine = samples.filter(pc.is_in(samples["name"], value_set=pa.array(SCRAPED)))
        if mine.num_rows == 0:
            return
        # a worker with several series of a name (one a model or a rank) runs the sum of them
        totals = mine.group_by(["worker", "name", "at_ns"]).aggregate([("value", "sum")]).to_pylist()
        with self._lock:
            for row in totals:
                worker = row["worker"] or ""
                if not self._admit(worker, row["at_ns"]):
                    continue
                of_worker = self._scraped.setdefault(worker, {})
                known = of_worker.get(row["name"])
                if known is None or known[0] <= row["at_ns"]:
                    of_worker[row["name"]] = (row["at_ns"], row["value_sum"])

    def _expire(self, now_ns: int) -> None:
        oldest = now_ns - self._expiry_ns
        with self._lock:
            while self._open and next(iter(self._open.values())).since_ns < oldest:
                del self._open[next(iter(self._open))]
                self.num_dropped += 1
