"""A small engine in virtual time, for tests: faults are switched on one at a time, so that the truth of a verdict is known.

Continuous batching with a token budget, a block pool with prefix cache (LRU, deepest block first), preemption by recompute.
Step time = slow * (fixed + prefill tokens * per_token + sequences * per_seq + context tokens * per_context), slow in `slow_span` (s) alone if there is one. Emits the rows a fully instrumented engine
would; `at_level` takes away what a poorer observer could not have seen.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

T0_NS = 1_780_000_000_000_000_000
Rows = dict[str, list[dict[str, Any]]]


def ns(at_s: float) -> int:
    """The instant `at_s` seconds after T0_NS."""
    return T0_NS + round(at_s * 1e9)


@dataclass(frozen=True)
class Setup:
    """One run. Rates in requests/s, times in seconds, lengths in tokens."""

    seed: int = 1
    num_requests: int = 1200
    rate: float = 5.0
    groups: int = 8
    prefix_tokens: int = 384
    tail_tokens: tuple[int, int] = (32, 128)
    output_tokens: tuple[int, int] = (16, 96)
    block_size: int = 16
    num_blocks: int = 4000
    seats: int = 32
    budget: int = 4096
    caching: bool = True
    fixed_s: float = 0.010
    per_token_s: float = 0.0001
    per_seq_s: float = 0.0008
    per_context_s: float = 0.0
    slow: float = 1.0
    slow_span: tuple[float, float] | None = None
    pauses: tuple[float, float] | None = None  # the process stands still once every so many seconds, and for how long
    warm: bool = True
    long_every: int = 0
    long_tokens: int = 6000
    worker: str = "w0"
    start_s: float = 0.0
    front_s: float = 0.002


@dataclass
class _Request:
    id: str
    arrival: float
    prompt: int
    output: int
    blocks: list[int]
    hit: int = 0
    computed: int = 0
    target: int = 0
    done_prefill: int = 0
    published: bool = False
    generated: int = 0
    held: int = 0
    scheduled: float | None = None
    tokens: list[float] = field(default_factory=list)
    preemptions: int = 0
    recomputed: int = 0
    self_hit: int = 0
    stalled: float = 0.0
    lost_at: float | None = None
    last_token: float | None = None


class Engine:
    """One worker. `run` yields nothing; rows collect in `rows`."""

    def __init__(self, setup: Setup) -> None:
        self.s = setup
        self.rows: Rows = {"request": [], "step": [], "block": [], "worker": [], "sample": [], "mark": []}
        self.cached: OrderedDict[int, None] = OrderedDict()  # resident, unreferenced; first = next to evict
        self.refs: dict[int, int] = {}
        self.free = setup.num_blocks
        self.preempted = 0
        self.evicted_in_step = 0
        self.hits = self.queries = 0

    def run(self) -> Rows:
        s = self.s
        arrivals = deque(self._arrivals())
        waiting: deque[_Request] = deque()
        running: list[_Request] = []
        now, step, paused = s.start_s, 0, s.start_s
        self._worker_row()
        while arrivals or waiting or running:
            if not waiting and not running:
                now = max(now, arrivals[0].arrival)
            while arrivals and arrivals[0].arrival <= now:
                waiting.append(arrivals.popleft())
            before = self.preempted
            self.evicted_in_step = 0
            decoding = self._make_room(running, waiting, now)
            prefilling, reason = self._admit(waiting, running, now)
            tokens = sum(n for _, n in prefilling)
            recomputed = sum(n for r, n in prefilling if r.preemptions)
            if not decoding and not prefilling:
                now = arrivals[0].arrival if arrivals else now + s.fixed_s
                continue
            slow = s.slow if s.slow_span is None or s.slow_span[0] <= now < s.slow_span[1] else 1.0
            read_s = s.per_context_s * sum(r.prompt + r.generated for r in decoding)
            duration = slow * (s.fixed_s + tokens * s.per_token_s + len(decoding) * s.per_seq_s + read_s)
            if s.pauses is not None and now - paused > s.pauses[0]:
                paused, duration = now, duration + s.pauses[1]
            waited = len(waiting)
            now += duration
            for r, n in prefilling:
                r.done_prefill += n
                if r.done_prefill >= r.target:
                    self._store(r, now)
                    if r.lost_at is not None:  # what was computed again gave no token: a stall, as the contract has it
                        r.stalled += now - r.lost_at
                        r.lost_at = None
                    self._token(r, now)
            for r in decoding:
                self._token(r, now)
            for r in [r for r in running if r.generated >= r.output]:
                running.remove(r)
                self._release(r)
                self._finish(r, now)
            self.rows["step"].append(
                {
                    "worker": s.worker,
                    "at_ns": ns(now),
                    "step": step,
                    "duration_s": duration,
                    "alloc_s": 0.0,
                    "probe_s": 0.0,
                    "num_running": len(decoding) + len(prefilling),
                    "num_waiting_prefill": waited,
                    "waiting_on": {
                        k: (waited if k == reason else 0)
                        for k in ("blocks", "budget", "seats", "dependency", "unknown")
                    },
                    "prefill_tokens": tokens,
                    "decode_tokens": len(decoding),
                    "recomputed_tokens": recomputed,
                    "num_preempted": self.preempted - before,
                    "blocks_total": s.num_blocks,
                    "blocks_used": s.num_blocks - self.free - len(self.cached),
                    "blocks_cached": len(self.cached),
                    "blocks_evicted": self.evicted_in_step,
                }
            )
            step += 1
            if step % 16 == 0:
                self.check_integrity(running)
            if step % 50 == 0:
                self._samples(now, len(running), len(waiting))
        self._samples(now, 0, 0)
        return self.rows

    def check_integrity(self, running: list[_Request]) -> None:
        """Free, cached, referenced and private blocks are all blocks."""
        shared = self.s.caching
        private = sum(r.held - (len(r.blocks) if r.published else r.hit // self.s.block_size) * shared for r in running)
        assert self.free + len(self.cached) + len(self.refs) + private == self.s.num_blocks

    def _arrivals(self) -> Iterator[_Request]:
        rng, s = random.Random(self.s.seed), self.s
        at = s.start_s
        if s.warm and s.caching:
            for group in range(s.groups):
                for block in self._prefix(group):
                    if self.free > 0:
                        self.free -= 1
                        self.cached[block] = None
                        self._block(block, "stored", s.start_s - 1.0)
        for i in range(s.num_requests):
            at += rng.expovariate(s.rate)
            group = min(int(rng.paretovariate(0.8)) - 1, s.groups - 1)
            tail = rng.randint(*s.tail_tokens)
            output = rng.randint(*s.output_tokens)
            prompt = s.prefix_tokens + tail
            blocks = list(self._prefix(group))
            if s.long_every and i % s.long_every == s.long_every - 1:
                prompt, blocks = s.long_tokens, []
            full = prompt // s.block_size
            blocks += [_hash(1, i * 4096 + k + s.seed * 10_000_019) for k in range(full - len(blocks))]
            yield _Request(f"{s.worker}-{s.seed}-{i:05d}", at + s.front_s, prompt, output, blocks)

    def _prefix(self, group: int) -> Iterator[int]:
        return (_hash(2, group * 1000 + k) for k in range(self.s.prefix_tokens // self.s.block_size))

    def _make_room(self, running: list[_Request], waiting: deque[_Request], now: float) -> list[_Request]:
        """Running sequences that can decode; the youngest give way where no block is left."""
        decoding = []
        for r in list(running):
            if r not in running or r.done_prefill < r.target:
                continue
            need = -(-(r.prompt + r.generated + 1) // self.s.block_size) - r.held
            while need > 0 and not self._take(need, now):
                victim = running[-1]
                running.remove(victim)
                self._preempt(victim, now)
                waiting.appendleft(victim)
                if victim is r:
                    break
            if r in running:
                r.held += max(need, 0)
                decoding.append(r)
        return [r for r in decoding if r in running]

    def _admit(
        self, waiting: deque[_Request], running: list[_Request], now: float
    ) -> tuple[list[tuple[_Request, int]], str]:
        prefilling: list[tuple[_Request, int]] = []
        budget = self.s.budget
        for r in running:
            left = r.target - r.done_prefill
            if left > 0:
                prefilling.append((r, min(left, budget)))
                budget -= min(left, budget)
        reason = "unknown"
        while waiting:
            if len(running) >= self.s.seats:
                reason = "seats"
                break
            if budget <= 0:
                reason = "budget"
                break
            r = waiting[0]
            hit = 0
            if self.s.caching:
                for block in r.blocks[: (r.prompt - 1) // self.s.block_size]:
                    if block not in self.cached and block not in self.refs:
                        break
                    hit += 1
            total = -(-(r.prompt + r.generated + 1) // self.s.block_size)
            for block in r.blocks[:hit]:
                self._pin(block)
            if not self._take(total - hit, now):
                for block in r.blocks[:hit]:
                    self._unpin(block)
                reason = "blocks"
                break
            waiting.popleft()
            r.held, r.hit, r.done_prefill = total, hit * self.s.block_size, 0
            need = r.target = r.prompt + r.generated - r.hit
            r.published = False
            if r.preemptions:
                r.recomputed += need
                r.self_hit += r.hit
            else:
                r.scheduled, r.computed = now, need
                self.queries += r.prompt
                self.hits += r.hit
            running.append(r)
            prefilling.append((r, min(need, budget)))
            budget -= min(need, budget)
        return prefilling, reason

    def _take(self, count: int, now: float) -> bool:
        if self.free + len(self.cached) < count:
            return False
        while self.free < count:
            block, _ = self.cached.popitem(last=False)
            self.free += 1
            self.evicted_in_step += 1
            self._block(block, "evicted", now)
        self.free -= count
        return True

    def _pin(self, block: int) -> None:
        if block in self.cached:
            del self.cached[block]
        self.refs[block] = self.refs.get(block, 0) + 1

    def _unpin(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            self.cached[block] = None

    def _store(self, r: _Request, now: float) -> None:
        """A finished prefill publishes its blocks; one that another request published first is a duplicate and given back."""
        r.published = True
        if not self.s.caching:
            return
        for block in r.blocks[r.hit // self.s.block_size :]:
            if block in self.refs or block in self.cached:
                self.free += 1
                self._pin(block)
            else:
                self.refs[block] = 1
                self._block(block, "stored", now)

    def _release(self, r: _Request) -> None:
        if not self.s.caching:
            self.free += r.held
            return
        pinned = len(r.blocks) if r.published else r.hit // self.s.block_size
        for block in reversed(r.blocks[:pinned]):
            self._unpin(block)
        self.free += r.held - pinned

    def _preempt(self, r: _Request, now: float) -> None:
        self._release(r)
        r.preemptions += 1
        r.held = 0
        if r.tokens and r.lost_at is None:
            r.lost_at = now
        self.preempted += 1

    def _token(self, r: _Request, now: float) -> None:
        r.generated += 1
        r.tokens.append(now)

    def _finish(self, r: _Request, now: float) -> None:
        scheduled, first = r.scheduled or r.arrival, r.tokens[0]
        self.rows["request"].append(
            {
                "worker": self.s.worker,
                "at_ns": ns(now),
                "request_id": r.id,
                "vantage": "engine",
                "state": "finished",
                "engine": "simulated",
                "arrival_ns": ns(r.arrival - self.s.front_s),
                "first_scheduled_ns": ns(scheduled),
                "first_token_ns": ns(first),
                "last_token_ns": ns(r.tokens[-1]),
                "end_ns": ns(now),
                "token_ns": [ns(t) for t in r.tokens],
                "frontend_s": self.s.front_s,
                "cache_lookup_s": 0.0,
                "retry_count": 0,
                "queue_s": scheduled - r.arrival,
                "prefill_s": first - scheduled,
                "decode_s": r.tokens[-1] - first - r.stalled,
                "stalled_s": r.stalled,
                "prompt_tokens": r.prompt,
                "cached_tokens": r.prompt - r.computed,
                "computed_tokens": r.computed,
                "recomputed_tokens": r.recomputed,
                "self_hit_tokens": r.self_hit,
                "output_tokens": r.generated,
                "num_preemptions": r.preemptions,
                "prompt_blocks": r.blocks,
            }
        )

    def _block(self, block: int, change: str, now: float) -> None:
        self.rows["block"].append(
            {
                "worker": self.s.worker,
                "at_ns": ns(now),
                "change": change,
                "block_hash": block,
                "num_tokens": self.s.block_size,
                "tier": "device",
            }
        )

    def _samples(self, now: float, running: int, waiting: int) -> None:
        values = {
            "preemptions_total": self.preempted,
            "prefix_hits_tokens_total": self.hits if self.s.caching else 0,
            "prefix_queries_tokens_total": self.queries if self.s.caching else 0,
            "requests_running": running,
            "requests_waiting": waiting,
            "kv_usage_ratio": 1 - (self.free + len(self.cached)) / self.s.num_blocks,
        }
        for name, value in values.items():
            self.rows["sample"].append({"worker": self.s.worker, "at_ns": ns(now), "name": name, "value": float(value)})

    def _worker_row(self) -> None:
        self.rows["worker"].append(
            {
                "worker": self.s.worker,
                "at_ns": ns(self.s.start_s - 2.0),
                "engine": "simulated",
                "block_size": self.s.block_size,
                "num_blocks": self.s.num_blocks,
                "prefix_caching": self.s.caching,
                "flags": {"max_num_seqs": str(self.s.seats), "max_num_batched_tokens": str(self.s.budget)},
            }
        )
        if not self.s.warm:
            self.rows["mark"].append(
                {"at_ns": ns(self.s.start_s), "mark": "worker_up", "subject": self.s.worker, "text": "worker started"}
            )


def simulate(setup: Setup, run_id: str, **changes: Any) -> Rows:
    """Rows of one run, tagged with `run_id`."""
    rows = Engine(replace(setup, **changes)).run()
    for kind in rows.values():
        for row in kind:
            row["run_id"] = run_id
    return rows


LEVELS = ("plugin", "otlp", "client")


def at_level(rows: Rows, level: str) -> Rows:
    """What an observer of this level would have: everything, spans and metrics, or the client's clock alone."""
    if level == "plugin":
        return rows
    kept: Rows = {}
    if level == "otlp":
        hidden = {
            "token_ns",
            "cache_lookup_s",
            "retry_count",
            "cached_tokens",
            "computed_tokens",
            "recomputed_tokens",
            "self_hit_tokens",
            "num_preemptions",
            "prompt_blocks",
        }
        kept["request"] = [
            _without(row, hidden | {"stalled_s"}) | {"decode_s": _decode(row)} for row in rows["request"]
        ]
        kept["sample"], kept["worker"] = rows["sample"], rows["worker"]
        return kept
    seen = {
        "at_ns",
        "run_id",
        "request_id",
        "state",
        "arrival_ns",
        "first_token_ns",
        "last_token_ns",
        "end_ns",
        "token_ns",
    }
    seen |= {"prompt_tokens", "output_tokens"}
    kept["request"] = [{k: v for k, v in row.items() if k in seen} | {"vantage": "client"} for row in rows["request"]]
    return kept


def _decode(row: dict[str, Any]) -> float:
    return float(row["last_token_ns"] - row["first_token_ns"]) / 1e9


def _without(row: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in names}


def _hash(kind: int, number: int) -> int:
    """A distinct 64-bit number that looks like a hash (odd multiplier: a bijection)."""
    return (number * 4 + kind) * 0x9E3779B97F4A7C15 % (1 << 64)
