"""What an engine's bookkeeping costs in virtual time: look-ups, evictions, a lock that others hold, the recorder.

Defaults are those of a good engine (ground truth section 5: 0.7 to 3.6 ms for the hashes of 50,000 tokens, 0.013 ms for an
eviction by heap, 7.1 ms for one by a scan of 12,000 blocks). What is drawn is drawn by seed. The recorder's cost is charged
through the hardware's `host_overhead_s` (`charged_hardware`), because steps that are known ahead are not taken
one by one; here it is only told.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.errors import UsageError


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Seconds of one engine's bookkeeping.

    lookup_s, lookup_block_s   of a look-up, and of each block looked for
    evict_s, scan_block_s      of an evicted block, and of each cached block that a scan looks at to find it (0: no scan)
    lock_busy_ratio            share of the time that others hold the cache's lock; lock_hold_s: how long, on average
    probe_s                    of the recorder, each step
    """

    lookup_s: float = 0.0
    lookup_block_s: float = 0.5e-6
    evict_s: float = 1e-6
    scan_block_s: float = 0.0
    lock_busy_ratio: float = 0.0
    lock_hold_s: float = 0.0
    probe_s: float = 20e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < float("inf"):
                raise UsageError(f"{field.name} is {value}; expected 0 or more", field=field.name)
        if self.lock_busy_ratio >= 1.0:
            raise UsageError(f"lock_busy_ratio is {self.lock_busy_ratio}; a lock that is never free lets nobody in")


class VirtualCosts:
    """Charges one engine's clock (HostCosts)."""

    def __init__(self, clock: VirtualClock, settings: CostSettings, seed: int = 0) -> None:
        self._clock = clock
        self._settings = settings
        self._random = random.Random(f"costs/{seed}")

    def lookup(self, num_blocks: int) -> None:
        chosen = self._settings
        self._clock.advance(self._wait_for_lock() + chosen.lookup_s + num_blocks * chosen.lookup_block_s)

    def foresee_lookup(self, num_blocks: int) -> int | None:
        chosen = self._settings
        if chosen.lock_busy_ratio:
            return None
        return round((chosen.lookup_s + num_blocks * chosen.lookup_block_s) * 1e9)

    def evict(self, num_evicted: int, num_cached: int) -> None:
        chosen = self._settings
        self._clock.advance(num_evicted * (chosen.evict_s + num_cached * chosen.scan_block_s))

    def foresee_evict(self, num_cached: int) -> int:
        chosen = self._settings
        return round((chosen.evict_s + num_cached * chosen.scan_block_s) * 1e9)

    def probe(self) -> float | None:
        return self._settings.probe_s

    def _wait_for_lock(self) -> float:
        """Whoever comes at random finds it held with that probability, and waits for what is left: exponential."""
        chosen = self._settings
        if not chosen.lock_busy_ratio or self._random.random() >= chosen.lock_busy_ratio:
            return 0.0
        return self._random.expovariate(1 / chosen.lock_hold_s) if chosen.lock_hold_s else 0.0


def charged_hardware(hardware: Hardware, settings: CostSettings) -> Hardware:
    """The hardware whose every step takes the recorder's time too."""
    return replace(hardware, host_overhead_s=hardware.host_overhead_s + settings.probe_s)
