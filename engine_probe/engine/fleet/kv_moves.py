"""KV that comes from elsewhere: settings of a host tier and of a hand-over, the link it comes by, how it lands in a pool.

Modelled, not measured: a link carries one load after the other at a constant rate; what is evicted reaches the tier at once
(copying out is beside the steps); of a prompt's last, partial block nothing is moved, so its few tokens are computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine_probe.engine.block_pool import Evicted, Seconds
from engine_probe.engine.engine import Engine
from engine_probe.engine.name_book import Names, Numbers
from engine_probe.engine.sequence import Sequence
from engine_probe.errors import UsageError


@dataclass(frozen=True, slots=True)
class TierSettings:
    """A worker's second tier for evicted blocks.

    num_blocks   it holds; latency_s, bytes_per_s: of a load; min_blocks: fewer are computed again, not loaded
    """

    num_blocks: int = 50_000
    latency_s: float = 0.0005
    bytes_per_s: float = 20e9
    min_blocks: int = 4

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.min_blocks < 1:
            raise UsageError("a tier holds and loads 1 block or more")
        _check_link(self.latency_s, self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class HandoverSettings:
    """Prefill and decode on workers of their own.

    prefill_workers   the first so many of the fleet; the others decode
    decode_blocks     KV blocks of each that decodes (None: as the others)
    orchestration_s   from the end of a prefill until its KV may go; bytes_per_s: of the link into a decode worker
    failure_ratio     of the transfers that break; after timeout_s the decode worker computes the prompt itself
    retry_s           time after which room in the decode worker is asked for again
    """

    prefill_workers: int = 2
    decode_blocks: int | None = None
    orchestration_s: float = 0.002
    bytes_per_s: float = 25e9
    failure_ratio: float = 0.0
    timeout_s: float = 0.5
    retry_s: float = 0.01

    def __post_init__(self) -> None:
        if self.prefill_workers < 1:
            raise UsageError("somebody must prefill: prefill_workers is 1 or more")
        if not 0.0 <= self.failure_ratio <= 1.0 or not self.timeout_s >= 0.0 or not self.retry_s > 0.0:
            raise UsageError("failure_ratio is 0 to 1, timeout_s 0 or more, retry_s above 0")
        _check_link(self.orchestration_s, self.bytes_per_s)


class Link:
    """Carries one load after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_ns = 0

    def carry(self, num_bytes: int, ready_ns: int) -> tuple[int, int]:
        """(begin, end) of a load that may go from `ready_ns` on."""
        begin_ns = max(ready_ns, self._free_ns)
        self._free_ns = begin_ns + round(num_bytes / self._bytes_per_s * 1e9)
        return begin_ns, self._free_ns


class Tier:
    """Blocks that one worker's pool gave up, the longest unused forgotten first (KvListener).

    What it takes in and gives up are `block` rows (`offloaded`, `evicted`, tier host), bytes in and out the counters of a tier.
    """

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self.link = Link(settings.bytes_per_s)
        self._held: OrderedDict[int, None] = OrderedDict()
        self._engine: Engine | None = None
        self._written = self._read = 0
        self._next_sample_ns = 0

    def belongs_to(self, engine: Engine) -> None:
        """Its recorder is told."""
        self._engine = engine

    def __len__(self) -> int:
        return len(self._held)

    def match(self, hashes: Items[int], first: int) -> int:
        """How many blocks from logical index `first` on it holds, one after the other."""
        count = 0
        for block_hash in hashes[first:]:
            if block_hash not in self._held:
                break
            self._held.move_to_end(block_hash)
            count += 1
        return count

    def stored(self, sequence: Sequence, hashes: Names, parents: Names, first: int, at_ns: int) -> None:
        """Not its business: it takes what is given up."""

    def hit(self, sequence: Sequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        """Nor this."""

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        names = hashes.tolist()
        new = [block_hash for block_hash in names if block_hash not in self._held]
        for block_hash in names:
            self._held[block_hash] = None
            self._held.move_to_end(block_hash)
        given_up = []
        while len(self._held) > self.settings.num_blocks:
            given_up.append(self._held.popitem(last=False)[0])
        self._tell("offloaded", new, at_ns, cause)
        self._tell("evicted", given_up, at_ns, cause)

    def loaded(self, count: int, at_ns: int) -> None:
        """So many of its blocks went to the device."""
        self._read += count
        self._sample(at_ns)

    def cleared(self, at_ns: int) -> None:
        self._held.clear()

    def _tell(self, change: str, hashes: Items[int], at_ns: int, cause: str | None) -> None:
        if self._engine is None or not hashes:
            return
        self._engine.flight.recorder.block_events(
            change, hashes, at_ns=at_ns, num_tokens=self._engine.kv.block_size, tier="host", request_id=cause
        )
        self._written += len(hashes) if change == "offloaded" else 0
        self._sample(at_ns)

    def _sample(self, at_ns: int) -> None:
        """Once a second."""
        if self._engine is None or at_ns < self._next_sample_ns:
            return
        self._next_sample_ns = at_ns + 10**9
        size = block_bytes(self._engine)
        for name, count in (("tier_written_bytes_total", self._written), ("tier_read_bytes_total", self._read)):
            self._engine.flight.recorder.row("sample", at_ns, name=name, value=float(count * size))


@dataclass(frozen=True, slots=True)
class Move:
    """KV under way: blocks reserved for these names (and their hashes), which begin at logical index `first`."""

    blocks: Items[int]
    names: Numbers
    hashes: Items[int]
    first: int
    num_bytes: int
    begin_ns: int
    end_ns: int


def block_bytes(engine: Engine) -> int:
    """Of one KV block on all ranks of a worker."""
    facts = engine.executor.worker_facts
    each, ranks = facts.get("kv_bytes_per_block"), facts.get("tp")
    assert isinstance(each, int)
    assert isinstance(ranks, int)
    return each * ranks


def land(engine: Engine, move: Move, request_id: str, tier: str, now_ns: int) -> None:
    """The KV is there, can be found, and is told of as `loaded`."""
    engine.kv.restore(move.blocks, move.names, move.first, now_ns)
    engine.flight.recorder.block_events(
        "loaded", move.hashes, at_ns=now_ns, num_tokens=engine.kv.block_size, tier=tier, request_id=request_id
    )


def _check_link(latency_s: float, bytes_per_s: float) -> None:
    if not 0.0 <= latency_s < float("inf") or not 0.0 < bytes_per_s < float("inf"):
        raise UsageError(f"a link of {bytes_per_s} bytes/s after {latency_s} s carries nothing; give numbers above 0")
