"""What every arm of an experiment is asked: one list of calls a repeat, the first of them warm-up.

Repeats ask different calls (other seeds, or the next part of a trace), arms of one repeat the same ones. Each call is labelled
with how much of its prompt had been sent before, which is what a cache without an end could have reused.
Invariant: the counted calls come after the last warm-up call, at the instants of their arrival process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diagnosis.experiments.observed import REUSABLE
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.traffic.synthetic import Traffic
from engine_probe.engine.traffic.trace import trace_calls
from engine_probe.errors import UsageError

NS = 1_000_000_000
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """num_requests are counted in each run, after `num_warmup` that are not.

    traffic       made up by seed; or `trace`, a file, played `speed` times as fast and cut into one part a repeat
    warmup_gap_s  between two warm-up calls: slow enough that each is served before the next comes
    in_flight     None: calls come when they come; a number: so many clients that wait for their answers
    """

    traffic: Traffic = field(default_factory=Traffic)
    num_requests: int = 400
    num_warmup: int = 40
    warmup_gap_s: float = 1.0
    in_flight: int | None = None
    trace: Path | None = None
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise UsageError(f"--requests is {self.num_requests}; expected 1 or more")
        if self.num_warmup < 0:
            raise UsageError(f"--warmup is {self.num_warmup}; expected 0 or more")
        if not 0 < self.warmup_gap_s < float("inf"):
            raise UsageError(f"warm-up calls come {self.warmup_gap_s} s apart; expected above 0")
        if self.in_flight is not None and self.in_flight < 1:
            raise UsageError(f"--concurrency is {self.in_flight}; expected 1 or more")

    def facts(self) -> dict[str, Any]:
        """What is held fixed, by name, for the report."""
        shared: dict[str, Any] = {
            "requests_per_run": self.num_requests,
            "warmup_per_run": self.num_warmup,
            "loop": "open" if self.in_flight is None else f"closed, {self.in_flight} in flight",
            "seed": self.seed,
        }
        if self.trace is not None:
            return {**shared, "trace": self.trace.name, "speed": self.speed}
        told = asdict(self.traffic)
        names = ("rate", "arrivals", "groups", "skew", "shared_tokens", "shared_ratio", "own_tokens", "output_tokens")
        return {**shared, **{name: told[name] for name in names}}


@dataclass(frozen=True, slots=True)
class Asked:
    """The calls of one run, in order; the first `num_warmup` are warm-up. counted_ns: instant of the first that counts."""

    calls: Sequence[Call]
    num_warmup: int
    counted_ns: int


def asked(workload: Workload, repeat: int, *, is_warm: bool) -> Asked:
    """What every arm is asked in this repeat (from 1). is_warm False: what the warm-up sent is forgotten when counting begins.

    Raises UsageError where the trace is too short.
    """
    drawn = _drawn(workload, repeat)
    if not drawn:
        raise UsageError("there is no call to make")
    gap_ns = round(workload.warmup_gap_s * NS)
    counted_ns = workload.num_warmup * gap_ns
    first = drawn[workload.num_warmup]
    seen: set[int] = set()
    calls = []
    for number, call in enumerate(drawn):
        is_warmup = number < workload.num_warmup
        if number == workload.num_warmup and not is_warm:
            seen.clear()
        reusable = sum(1 for _ in itertools.takewhile(seen.__contains__, call.blocks))
        seen.update(call.blocks)
        labels = {**call.labels, REUSABLE: str(reusable * BLOCK_SIZE), "repeat": str(repeat)}
        if is_warmup:
            labels["phase"] = "warmup"
        at_ns = number * gap_ns if is_warmup else counted_ns + call.at_ns - first.at_ns
        calls.append(replace(call, request_id=f"r{repeat}-{number:06d}", at_ns=at_ns, labels=labels))
    return Asked(calls, workload.num_warmup, counted_ns)


def expected_s(workload: Workload, repeats: int) -> float:
    """Longest time that an open loop's calls of one run take to come, s."""
    ends = [asked(workload, repeat, is_warm=True).calls[-1].at_ns for repeat in range(1, repeats + 1)]
    return max(ends) / NS


def counted_s(workload: Workload, repeat: int) -> float:
    """Time within which an open loop's counted calls of that run come, s."""
    work = asked(workload, repeat, is_warm=True)
    return (work.calls[-1].at_ns - work.counted_ns) / NS


def _drawn(workload: Workload, repeat: int) -> list[Call]:
    count = workload.num_warmup + workload.num_requests
    if workload.trace is None:
        traffic = replace(
            workload.traffic, num_requests=count, seed=workload.seed * 1000 + repeat, block_size=BLOCK_SIZE
        )
        return list(traffic.calls())
    part = list(itertools.islice(_trace(workload), (repeat - 1) * count, repeat * count))
    if len(part) < count:
        raise UsageError(
            f"the trace {workload.trace} ends within repeat {repeat}: each repeat takes {count:,} calls of its own. Give fewer "
            "--requests, --warmup or --repeats"
        )
    return part


def _trace(workload: Workload) -> Iterator[Call]:
    assert workload.trace is not None
    return trace_calls(workload.trace, BLOCK_SIZE, speed=workload.speed)
