"""The facts of one window, as aligned arrays: what the judgement reads, and nothing else.

Invariant: unknown is NaN (floats), -1 (codes) or None (whole columns and objects), never zero. Requests are in arrival
order. Instants are seconds since `origin_ns`; each array of instants belongs to one vantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.hotspots.finding import Hotspot
from engine_probe.digits import whole_number

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Obj = NDArray[np.object_]
MAX_SEATS: Final = 1 << 30
"""More is no setting."""


def rows_by_code(codes: I64, num_codes: int) -> list[I64]:
    """Rows of each code from 0 to num_codes - 1, rising; one pass however many codes there are."""
    small = codes.astype(np.int16) if num_codes < np.iinfo(np.int16).max else codes  # numpy sorts these by radix
    order = np.argsort(small, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(num_codes + 1))
    return [order[start:end] for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Every gap between streamed chunks of the window's requests, flat.

    request  [m] row of the request      at_s  [m] end of the gap      gap_s  [m] length      tokens  [m] tokens it brought
    """

    request: I64
    at_s: F64
    gap_s: F64
    tokens: F64
    num_backward: int = 0
    """Requests of which a token is told to have come before the one in front of it; such gaps are left out."""
    is_even: bool = False
    """Several tokens came in one chunk, and nobody tells how many in which: `tokens` is the request's mean."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Requests of a window, [n] each. `numbers` holds durations (s), lengths (tokens) and counts by contract name.

    worker                                          code into `worker_names`
    arrival_s, first_token_s, last_token_s, end_s   at the judged vantage
    engine_arrival_s, scheduled_s, engine_first_s, engine_last_s   at the engine's vantage (NaN where it did not speak)
    """

    vantage: str
    origin_ns: int
    worker_names: Sequence[str | None]
    request_id: Obj
    worker: I64
    arrival_s: F64
    first_token_s: F64
    last_token_s: F64
    end_s: F64
    engine_arrival_s: F64
    scheduled_s: F64
    engine_first_s: F64
    engine_last_s: F64
    numbers: Mapping[str, F64]
    tenant: Obj
    workload: Obj
    session: Obj
    prefix: Obj
    finished: Bool
    gaps: Gaps | None
    model: Obj | None = None
    """What each asked for (a LoRA adapter's name where there are such), [n]; None where all asked for the same."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where a number does not stand in the rows of the judged vantage: `engine` (in part), `estimated` from counters, `implied` by others of its row."""
    num_invalid: int = 0
    """Durations, lengths and counts that could not be (negative, infinite) and are taken as unknown."""
    num_duplicates: int = 0
    """Rows that told of a request which another row tells too (sent twice, plugin and spans); merged, each counts once."""
    num_assumed: int = 0
    """Requests whose arrival their source does not tell (`labels.arrival = assumed`): only their durations are its own."""
    engine_merged: bool = False
    """The engine's rows that were joined in were merged too."""
    num_shared_ids: int = 0
    """Ids that several requests have; their engine's rows are told apart by worker, lengths and arrival (`loading/pairing.py`)."""
    engine_ahead_ns: int = 0
    """How far the engine's clock was ahead of the judged vantage's, whose instants were moved to it; 0 within a second."""
    sample_rate: float | None = None
    """Share of the window's requests that was kept; None: all. What it means: `sampled.py`."""
    engine_rate: float | None = None
    """The same of the engine's rows that were joined in."""
    num_thinned: int = 0
    """Rows left out because they had been kept at a higher rate than others."""
    repeat: I64 | None = None
    """[n] which repeat of an experiment's arm the request is of; None: the window is no such arm, or has one repeat alone."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def get(self, name: str) -> F64:
        """A column of `numbers`; all NaN where the window has none."""
        found = self.numbers.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def by_worker(self) -> list[I64]:
        """Rows of each worker of `worker_names`, in arrival order."""
        return rows_by_code(self.worker, len(self.worker_names))

    def has(self, name: str, share: float = 0.5) -> bool:
        """Whether at least `share` of the requests know this number."""
        found = self.numbers.get(name)
        return found is not None and len(found) > 0 and bool(np.mean(np.isfinite(found)) >= share)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Scheduler steps of a window, [m] each, by worker and time. `at_s` is the end of the step.

    overlaps  of workers with several steps in flight: what their durations, as told, sum to over the time that they cover
    """

    worker: I64
    worker_names: Sequence[str | None]
    at_s: F64
    duration_s: F64
    numbers: Mapping[str, F64]
    overlaps: Mapping[str | None, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.at_s)

    def get(self, name: str) -> F64:
        found = self.numbers.get(name)
        return np.full(len(self), np.nan) if found is None else found


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What is known of one worker: the newest non-null value of each slow fact."""

    worker: str | None
    engine: str | None = None
    engine_version: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    prefix_caching: bool | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None

    @property
    def seats(self) -> int | None:
        """Requests it may run at once (vLLM: max_num_seqs)."""
        value = self.flags.get("max_num_seqs")
        return (whole_number(value, MAX_SEATS) or None) if value is not None else None


BY_BLOCKS: Final[Mapping[str, str | None]] = {"told_by": "block"}
"""Attributes of a reset that no mark tells, but the blocks' own events."""


@dataclass(frozen=True, slots=True)
class MarkFact:
    """One mark inside (or just before) the window."""

    mark: str
    at_s: float
    subject: str | None
    text: str | None
    attrs: Mapping[str, str | None]

    def number(self, name: str) -> float | None:
        """An attribute as a number that is not negative; None where it is absent or no such number."""
        try:
            value = float(self.attrs.get(name) or "")
        except ValueError:
            return None
        return value if 0.0 <= value < float("inf") else None


@dataclass(frozen=True, slots=True)
class LineageFacts:
    """What became of the prompt blocks that the window's requests missed, joined to the life of those blocks.

    evicted_tokens, new_tokens, cleared_tokens   [n] of the missed full blocks: stored before and lost to eviction (or behind an
    evicted parent), never stored, and lost to a reset of the cache. `back_after_s`: median time from eviction to miss of the
    blocks missed most often, which `worst` lists.
    """

    evicted_tokens: F64
    new_tokens: F64
    cleared_tokens: F64
    evicted_blocks: int
    back_after_s: float | None
    worst: Sequence[Mapping[str, Any]]
    by_worker: bool = False
    """A block counted only on the worker that served the request."""
    estimated_tokens: float | None = None
    """Tokens lost to eviction by all requests that the window had, where rows are a sample; None where all were kept."""
    margin_tokens: float | None = None
    """Half the 95 % interval of that estimate."""
    block_rate: float | None = None
    """Share of the blocks whose life was recorded; None: all."""
    expired_tokens: F64 | None = None
    """[n] lost because blocks were given up by age (`ttl`), not for room; not in `evicted_tokens`. None where that was not looked at."""
    unused_tokens: F64 | None = None
    """[n] missed although the block at which the chain broke was in the cache; not in `evicted_tokens`. None as above."""
    untold_tokens: F64 | None = None
    """[n] missed although no event tells that their blocks had gone, and others were given as few; not in `unused_tokens`. None as above."""
    evicted_by: Obj | None = None
    """[n] tenant of the request for which the block was evicted at which each chain broke; None in it: not told, None: nobody tells."""
    by_evictions: bool = False
    """No store is told: a missed block that had been evicted before was lost."""
    evicted_ago_s: float | None = None
    """Median time from that eviction to the miss; None where no eviction was seen."""

    @property
    def apart_tokens(self) -> float:
        """Tokens missed although their blocks had been stored, which were not lost to an eviction for room."""
        apart = (self.expired_tokens, self.unused_tokens, self.untold_tokens)
        return sum(float(told.sum()) for told in apart if told is not None)

    @property
    def lost_tokens(self) -> float:
        """Tokens that all requests of the window lost to eviction."""
        return float(self.evicted_tokens.sum()) if self.estimated_tokens is None else self.estimated_tokens


@dataclass(frozen=True, slots=True)
class BlockTotals:
    """Block life in the window from events. `restored`: stored after an eviction in the same window; None where lineage tells more, or
    no store is told.

    `sample_rate`: share of the blocks that was kept, and the numbers are estimates; None: all.
    """

    stored: int
    evicted: int
    restored: int | None
    cleared: int
    sample_rate: float | None = None
    tier_taken: int = 0
    """Blocks that a slower tier took in, gave up, and that were loaded from one."""
    tier_given_up: int = 0
    tier_loaded: int = 0


@dataclass(frozen=True, slots=True)
class SharingFacts:
    """How far prompts begin like another prompt of the window, by their block chains.

    rows     [k] requests that were looked at: neighbours in time, so that two windows are looked at alike
    tokens   [k] leading tokens that each of them has in common with another one
    owner, since   [m] each block of those leading tokens, by request and then from the front: place of its request in `rows`, and of the
             second request that names it; None where only all of them are compared
    """

    rows: I64
    tokens: F64
    owner: I64 | None = None
    since: I64 | None = None
    block_size: int = 0

    def among(self, num: int) -> F64:
        """[num] leading tokens that each of the first `num` has in common with another one of them: more requests share more."""
        if self.owner is None or self.since is None or num >= len(self.rows):
            return self.tokens[:num]
        seen = self.owner[(self.since < num) & (self.owner < num)]
        return np.bincount(seen, minlength=num).astype(np.float64) * self.block_size


@dataclass(frozen=True, slots=True)
class HostMeasure:
    """A canonical sample of a straggler's GPU or host while it was slow, beside the median of the other workers. reason: its label."""

    worker: str
    name: str
    reason: str | None
    value: float
    others: float
    sql: str


@dataclass(frozen=True, slots=True)
class Unattached:
    """Of the blocks stored while the index was stale, those that one which began then could not attach: their parent came before."""

    num_orphans: int
    num_stored: int


@dataclass(frozen=True, slots=True)
class RoutingFacts:
    """Hotspots of the window, as `kvscope hotspots` finds them, and what each request lost to them.

    lost_s     by cause, [n] seconds that a request waited or computed more than at the best worker of its instant
    lost_tokens   by cause, [n] tokens that it computed and another worker held, where waiting for that one was worth it
    amiss      by cause, [n] requests that were routed while the index was stale, or not gone by
    slow       [n] share of a request's engine time that a straggler's slowness added
    num_decisions, num_workers, num_intervals   of what was judged; `has_routes`: by what the router believed
    hosts      what was measured of stragglers beside the others; unattached: of a stale index
    """

    spots: Sequence[Hotspot]
    lost_s: Mapping[str, F64]
    lost_tokens: Mapping[str, F64]
    amiss: Mapping[str, Bool]
    slow: F64
    num_decisions: int
    num_workers: int
    num_intervals: int
    has_routes: bool
    visible: frozenset[str]
    hosts: Sequence[HostMeasure] = ()
    unattached: Unattached | None = None


@dataclass(frozen=True, slots=True)
class HandoverFacts:
    """KV that moved from the worker that prefilled a request to the one that decodes it.

    parts          by ledger row, [n] seconds of each request's hand-overs; 0 where it had none
    moved          [n] whether it was handed over; worker: [n] code of who decodes it, into `worker_names`, -1 unknown
    first_s, last_s   [n] first and last token of that worker, engine's clock; output_tokens: [n] that it gave
    again          by ledger row, prompt tokens that decode workers computed though KV of them had been sent
    before_first   [n] whether the caller's first token came after the hand-over
    told_s         [n] of the time from its prefill to the first token of who decodes it, seconds that this worker's own queue and prefill
                   hold; 0 where they are not told. None: nobody looked
    num_bytes, wire_s, wait_s, link_s, broke, of   [m] of each transfer; link_s: of the wait, behind others; of: row of its request
    sees_room      whether steps, or scraped usage, tell the decode workers' free blocks
    tells          which of transfer.wait_s, transfer.wire_s and transfer.outcome are known; the last one of recorded transfers alone
    sees_seats     whether most of what waited while nothing was in the way had a free seat there; seats: by worker, of those that tell
    """

    parts: Mapping[str, F64]
    moved: Bool
    worker_names: Sequence[str]
    worker: I64
    first_s: F64
    last_s: F64
    output_tokens: F64
    again: Mapping[str, float]
    before_first: Bool
    num_bytes: F64
    wire_s: F64
    wait_s: F64
    link_s: F64
    broke: Bool
    of: I64
    sees_room: bool
    tells: frozenset[str] = frozenset(("transfer.wait_s", "transfer.wire_s", "transfer.outcome"))
    sees_seats: bool = False
    seats: Mapping[str, int] = field(default_factory=dict)
    told_s: F64 | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of one window."""

    name: str
    start_s: float
    end_s: float
    requests: RequestFacts
    steps: StepFacts | None
    workers: Sequence[WorkerFacts]
    samples: Mapping[str, float]
    """Increase of each canonical counter over the window, reset-aware, summed over series; gauges as `name:mean`, `name:max`."""
    marks: Sequence[MarkFact]
    lineage: LineageFacts | None
    blocks: BlockTotals | None
    visible: frozenset[str]
    """What was seen at all: `request.queue_s`, `step`, `block.evicted`, `sample.preemptions_total`, ..."""
    num_warmup: int
    num_unfinished: int
    clock_error_s: float | None
    arrivals_s: float | None = None
    """Seconds in which requests could arrive, where that is less than the whole: a run that is read whole goes on until the
    last answer, longer where answers are slower, and nobody sends meanwhile."""

    integrity: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Checks of tokens by kind: (made, failed)."""
    routed_s: Mapping[str, float] = field(default_factory=dict)
    """By worker the least seconds, but for one in a hundred, from routing a request to its arrival by the worker's clock; looked at where
    no caller tells, and a worker has enough of them."""
    routing: RoutingFacts | None = None
    """None where one worker served, or what was recorded tells nothing of routing."""
    handover: HandoverFacts | None = None
    """None where no KV moved between workers, or no transfer was recorded."""
    sharing: SharingFacts | None = None
    """None where prompts do not tell their blocks."""
    loaded_bytes: F64 | None = None
    """[n] bytes that each request loaded from a slower tier, NaN where it is not told; None where nothing was loaded."""
    asked_models: frozenset[str] = frozenset()
    """Models that requests name, adapters by their own names; empty where none tells."""
    scraped_workers: frozenset[str] = frozenset()
    """Workers whose queues were scraped in the window: they were there, whatever they were given."""
    hit_tokens: float = 0.0
    """Tokens of blocks that requests found, by the blocks' own events; not every engine tells all of them."""
    step_extras: Mapping[str, F64] = field(default_factory=dict)
    """By row of the ledger, [m] seconds of each step beyond its work; found by comparing windows (`step_reasons.py`)."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def offered_s(self) -> float:
        """Seconds that the offered load is counted over."""
        return self.duration_s if self.arrivals_s is None else self.arrivals_s

    def num_blocks(self) -> int | None:
        """Usable KV blocks over the workers, where all say so."""
        known = [w.num_blocks for w in self.workers]
        return sum(k for k in known if k is not None) if known and all(k is not None for k in known) else None

    def block_size(self) -> int | None:
        sizes = {w.block_size for w in self.workers if w.block_size is not None}
        return sizes.pop() if len(sizes) == 1 else None

    def worker(self, name: str | None) -> WorkerFacts | None:
        """What is known of this worker; of the only one, where there is one."""
        for fact in self.workers:
            if fact.worker == name:
                return fact
        return self.workers[0] if len(self.workers) == 1 else None

    def seats(self, worker: str | None) -> int | None:
        """Requests this worker may run at once."""
        found = self.worker(worker)
        return None if found is None else found.seats
