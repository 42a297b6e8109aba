"""Traffic made up by seed: arrivals, lengths and prefixes come from streams of their own.

So a run with another rate has the same prompts in the same order, and a run with other lengths the same arrivals: what a
paired experiment holds fixed stays fixed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine_probe.engine.traffic.call import Call, made_up_names, mixed
from engine_probe.errors import UsageError

ARRIVALS = ("poisson", "even", "bursty")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, log-uniform between two bounds (equal bounds: fixed)."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise UsageError(
                f"lengths from {self.low} to {self.high}; expected 1 or more, the second not below the first"
            )

    def draw(self, rng: random.Random) -> int:
        if self.low == self.high:
            return self.low
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes in.

    num_requests, rate   calls, and calls a second; burst_ratio: how many times the rate is in a burst (bursty: half of the
                         calls come in bursts of burst_s)
    groups, skew         shared prefixes, and how uneven their popularity is (Zipf exponent; 0: even)
    shared_tokens        of each shared prefix
    shared_ratio         share of the calls that begin with one of them
    own_tokens           of the rest of the prompt; output_tokens: generated
    tenants              names, and how often each calls
    adapters             LoRA adapters that calls ask for: each shared prefix belongs to one (0: none)
    uncacheable          something that is new every time stands before the shared prefix
    """

    num_requests: int = 1000
    rate: float = 10.0
    arrivals: str = "poisson"
    burst_ratio: float = 4.0
    burst_s: float = 2.0
    groups: int = 8
    skew: float = 1.0
    shared_tokens: int = 2048
    shared_ratio: float = 0.7
    own_tokens: Lengths = Lengths(64, 512)
    output_tokens: Lengths = Lengths(32, 128)
    tenants: tuple[tuple[str, float], ...] = ()
    workload: str | None = None
    adapters: int = 0
    uncacheable: bool = False
    block_size: int = 16
    seed: int = 1
    prefix: str = "r"
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise UsageError(f"num_requests is {self.num_requests}; expected 1 or more")
        if not 0 < self.rate < float("inf"):
            raise UsageError(f"rate is {self.rate}; expected above 0")
        if self.arrivals not in ARRIVALS:
            raise UsageError(f"no arrival process '{self.arrivals}' here; known: {', '.join(ARRIVALS)}")
        if not 0 <= self.shared_ratio <= 1:
            raise UsageError(f"shared_ratio is {self.shared_ratio}; expected 0 to 1")
        if self.groups < 1 or self.shared_tokens < 0 or self.block_size < 1 or self.adapters < 0:
            raise UsageError("groups and block_size are 1 or more, shared_tokens and adapters 0 or more")

    def calls(self) -> Iterator[Call]:
        """In order of arrival."""
        streams = [random.Random(f"{self.seed}/{name}") for name in ("lengths", "prefixes", "tenants")]
        lengths, prefixes, tenants = streams
        popularity = list(itertools.accumulate(1 / (rank + 1) ** self.skew for rank in range(self.groups)))
        full = self.shared_tokens // self.block_size
        shared = [made_up_names(self._name(1, group), full) for group in range(self.groups)]
        names = [name for name, _ in self.tenants]
        weights = [weight for _, weight in self.tenants]
        for number, at_ns in enumerate(self._arrivals_ns()):
            is_shared = prefixes.random() < self.shared_ratio
            group = prefixes.choices(range(self.groups), cum_weights=popularity)[0]
            own, output = self.own_tokens.draw(lengths), self.output_tokens.draw(lengths)
            prompt = self.shared_tokens + own
            begin = shared[group] if is_shared and not self.uncacheable else shared[group][:0]
            rest = prompt // self.block_size - len(begin)
            blocks = np.concatenate((begin, made_up_names(self._name(2, number), rest)))
            yield Call(
                f"{self.prefix}{number:06d}",
                at_ns,
                prompt,
                output,
                blocks.tolist(),
                names=blocks,
                prefix_hash=mixed(self._name(3, group)) >> 1 if is_shared else None,
                tenant=tenants.choices(names, weights)[0] if names else None,
                workload=self.workload,
                model=f"adapter-{group % self.adapters}" if self.adapters else None,
            )

    def _arrivals_ns(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed}/arrivals")
        at_s = self.start_s
        burst_left = 0.0
        for _ in range(self.num_requests):
            if self.arrivals == "even":
                at_s += 1 / self.rate
            elif self.arrivals == "poisson":
                at_s += rng.expovariate(self.rate)
            else:
                # Half of the calls come at burst_ratio times the rate, the others so slowly that the mean is the rate.
                quiet = self.rate / (2 - 1 / self.burst_ratio)
                gap = rng.expovariate(self.rate * self.burst_ratio if burst_left > 0 else quiet)
                at_s += gap
                burst_left -= gap
                mean_calls = self.rate * self.burst_ratio * self.burst_s
                if burst_left <= 0 and rng.random() < 1 / max(mean_calls, 1.0):
                    burst_left = self.burst_s
            yield round(at_s * 1e9)

    def _name(self, kind: int, number: int) -> int:
        return mixed(mixed(self.seed * 4 + kind) + number)
