"""Do clocks agree: engine and callers, worker and worker, and each with itself?

How far a worker's clock is ahead of its callers' is bounded by causality: no request reaches the engine before it was sent, and no
token reaches the caller before it was made. Both ends are looked at where one request in twenty lies beyond, so that single wrong
instants, and rows of which the other half was lost, decide nothing. A skew is only said where that is impossible without one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.checks.check import NOTHING, TOLERANCE, Check, is_rare
from diagnosis.checks.delivery import lost_share
from diagnosis.facts import F64, Facts
from diagnosis.telling.wording import listing, number, percent, seconds

APART = threshold(
    "clocks.apart",
    least=0.01,
    unit="s",
    says="how far two clocks are apart, by what they say of the same requests",
    why="machines that ask one time server agree within milliseconds",
)
SPOILS_S = 0.05
"""From this far on what joins instants of two machines is wrong: a block is stored after it was asked for."""
OUTSIDE = 0.05
"""Share of the requests that may lie beyond a bound on a clock."""
FEWEST = 20
"""Requests that both sides saw, from which on a worker's clock is judged."""
OUTSIDE_S = 0.002
"""Two durations of one request, at two vantages, may lie so far from each other."""
REST_ON_CLOCKS = frozenset({"block.evicted", "request.prompt_blocks"})
"""What joins instants of two machines."""
MOST = 0.5
"""Share of the requests whose durations part, from which on one of the two is not true, whatever the differences look like."""
TOGETHER, WIDTH = 0.8, 0.5
"""Of a clock that was set: share of these requests that decoded at one moment, and the width of the differences over their median."""
BEFORE_FIRST_TOKEN = ("frontend_s", "tokenize_s", "queue_s", "cache_lookup_s", "kv_load_s", "alloc_s", "prefill_s")
"""Phases of one worker that lie before the first token wherever they are told."""


@dataclass(frozen=True, slots=True)
class Skew:
    """A worker's clock is between `low_s` and `high_s` ahead (negative: behind) of its callers'. `by` [s]: the proof, never
    negative: how much earlier than it can have been one request in twenty came, or its first token."""

    worker: str
    low_s: float
    high_s: float
    by_s: float

    @property
    def ahead_s(self) -> float:
        return (self.low_s + self.high_s) / 2


def clocks(facts: Facts) -> Check:
    """The engines' clocks beside the callers', worker by worker; else what marks and routes tell."""
    found = skews(facts)
    ahead_s = facts.requests.engine_ahead_ns / 1e9
    if found:
        return _skewed(facts, found)
    if ahead_s:
        return Check(
            "clocks",
            "warning",
            f"{facts.name}: by the requests that both saw, the engine's clock is {seconds(abs(ahead_s))} "
            f"{'ahead of' if ahead_s > 0 else 'behind'} the {facts.requests.vantage}'s; times are told by the engine's",
            "clock",
            NOTHING,
        )
    apart = _routed_apart(facts)
    if apart is not None:
        return apart
    if facts.clock_error_s is None:
        return Check(
            "clocks", "ok", f"{facts.name}: clocks were not compared; only durations are joined across vantages"
        )
    status = "warning" if facts.clock_error_s > APART.value else "ok"
    return Check("clocks", status, f"{facts.name}: clocks agree within {seconds(facts.clock_error_s)}", "clock")


def skews(facts: Facts) -> list[Skew]:
    """Workers whose clock cannot agree with their callers', farthest first. Instants of callers are as they were moved."""
    r = facts.requests
    if r.vantage == "engine":
        return []
    # where a request passes through two workers, the second is known by halves alone of which the other was lost
    fewest = FEWEST + lost_share(facts) * len(r)
    sent_to_seen, made_to_got = r.engine_arrival_s - r.arrival_s, r.first_token_s - r.engine_first_s
    found = []
    for code, name in enumerate(r.worker_names):
        mine = r.worker == code
        way_in, way_out = (values[mine & np.isfinite(values)] for values in (sent_to_seen, made_to_got))
        if name is None or min(len(way_in), len(way_out)) < fewest:
            continue
        high, low = nearest_low(way_in), -nearest_low(way_out)
        by = max(low, -high)
        APART.note(max(by, 0.0))
        if by > APART.value:
            found.append(Skew(name, min(low, high), max(low, high), by))
    return sorted(found, key=lambda skew: (-skew.by_s, skew.worker))


def nearest_low(values: F64) -> float:
    """The value beyond which one request in twenty lies, by nearest rank: the smallest of up to twenty."""
    rank = max(int(np.ceil(OUTSIDE * len(values))), 1)
    return float(np.partition(values, rank - 1)[rank - 1])


def instants(facts: Facts) -> Check | None:
    """No clock runs backwards within one vantage."""
    r = facts.requests
    early = (r.first_token_s < r.arrival_s) | (r.last_token_s < r.first_token_s) | (r.end_s < r.last_token_s)
    if not early.any():
        return None
    share = float(early.mean())
    return Check(
        "instants",
        "warning" if is_rare(share) else "contradiction",
        f"{facts.name}: in {number(int(early.sum()))} requests ({percent(share)}) arrival, first token, last token "
        "and end do not follow each other; a latency below zero is left out",
        "clock",
        value=float(early.sum()),
        unit="requests",
    )


def token_times(facts: Facts) -> Check | None:
    """Tokens of one stream come in their order."""
    gaps = facts.requests.gaps
    if gaps is None or not gaps.num_backward:
        return None
    share = gaps.num_backward / len(facts.requests)
    return Check(
        "token_times",
        "warning" if is_rare(share) else "contradiction",
        f"{facts.name}: in {number(gaps.num_backward)} requests ({percent(share)}) a token is told to have come before the one in "
        "front of it; such gaps are left out",
        "service",  # which of the stream is wrong, its order or its stamps, nobody can say
        frozenset({"request.token_ns"}),
        float(gaps.num_backward),
        "requests",
    )


def durations(facts: Facts) -> Check | None:
    """Decoding by the engine's instants and by its own stop watch: they part where the clock was set meanwhile."""
    r = facts.requests
    told = r.get("decode_s")
    by_instants = r.engine_last_s - r.engine_first_s
    known = np.isfinite(told) & np.isfinite(by_instants) & np.isfinite(r.engine_first_s)
    if known.sum() < FEWEST:
        return None
    told, by_instants = told[known], by_instants[known]
    stalled = r.get("stalled_s")[known]
    paused = np.nan_to_num(stalled) + np.nan_to_num(r.get("tail_s")[known])
    slack = np.maximum(SPOILS_S, 2 * TOLERANCE.value * told)
    # who does not tell its stalls may leave them out of its decoding
    off = (by_instants < told - slack - paused) | (np.isfinite(stalled) & (by_instants > told + paused + slack))
    share = float(off.mean())
    if is_rare(share):
        return None
    apart = (by_instants - told)[off]
    worst = float(np.median(np.abs(apart)))
    said = (
        f"{facts.name}: in {percent(share)} of requests decoding took another time by the engine's instants than by its own "
        f"duration ({seconds(worst)} apart in the median of these)"
    )
    if share < MOST and not _is_one_move(apart, r.engine_first_s[known][off], r.engine_last_s[known][off]):
        return Check(
            "durations",
            "warning",
            said + ", not all at one moment by one amount: the two are taken at different places, and no clock was set",
            "clock",
            frozenset({"request.decode_s"}),
            share,
            "ratio",
        )
    return Check(
        "durations",
        "contradiction",
        said + "; its clock was set, or one of the two is not true",
        "clock",
        frozenset({"request.decode_s", "request.token_ns"}),
        share,
        "ratio",
    )


def _is_one_move(apart: F64, first_s: F64, last_s: F64) -> bool:
    """Whether these differences are those of a clock that was set: alike, and of requests that all decoded at one moment."""
    low, high = np.quantile(apart, [0.1, 0.9])
    if high - low > max(SPOILS_S, WIDTH * abs(float(np.median(apart)))):
        return False
    begun, ended = np.sort(np.minimum(first_s, last_s)), np.sort(np.maximum(first_s, last_s))
    at_once = np.searchsorted(begun, begun, "right") - np.searchsorted(ended, begun, "left")
    return bool(at_once.max() >= TOGETHER * len(apart))


def phases(facts: Facts) -> Check | None:
    """Phases up to the first token are disjoint, so they cannot sum to more than the TTFT at the same vantage."""
    r = facts.requests
    ttft = r.engine_first_s - r.engine_arrival_s
    told = np.nansum([r.get(name) for name in BEFORE_FIRST_TOKEN], axis=0)
    known = np.isfinite(ttft) & (ttft >= 0) & (told > 0)
    if not known.any():
        return None
    more = float(np.mean(told[known] > ttft[known] * (1 + TOLERANCE.value) + OUTSIDE_S))
    if is_rare(more):
        return Check("phases", "ok", f"{facts.name}: the phases of requests fit into their TTFT")
    return Check(
        "phases",
        "contradiction",
        f"{facts.name}: in {percent(more)} of requests the phases before the first token sum to more than the TTFT itself",
        "telemetry",
        frozenset(f"request.{name}" for name in BEFORE_FIRST_TOKEN),
        more,
        "ratio",
    )


def client_ttft(facts: Facts) -> Check | None:
    """No caller sees a first token sooner after its request than the engine needed to make it."""
    return _inside(facts, "client_ttft", "engine_ttft_s", facts.requests.first_token_s, "first", "TTFT")


def client_e2e(facts: Facts) -> Check | None:
    """Nor a last one."""
    made = _inside(facts, "client_e2e", "engine_e2e_s", facts.requests.last_token_s, "last", "E2E latency")
    return made if made is not None and made.contradicts else None


def _inside(facts: Facts, check: str, column: str, end_s: F64, which: str, word: str) -> Check | None:
    r = facts.requests
    engine, client = r.get(column), end_s - r.arrival_s
    both = np.isfinite(engine) & np.isfinite(client)
    if not both.any():
        return None
    early = float(np.mean(client[both] < engine[both] - OUTSIDE_S))
    if not is_rare(early, lost_share(facts)):
        return Check(
            check,
            "contradiction",
            f"{facts.name}: in {percent(early)} of requests the client saw the {which} token before the engine says it made it",
            "telemetry",
            value=early,
            unit="ratio",
        )
    gap = float(np.median(client[both] - engine[both]))
    return Check(check, "ok", f"{facts.name}: the client's {word} is the engine's plus {seconds(gap)} in the median")


def _skewed(facts: Facts, found: list[Skew]) -> Check:
    told = listing([f"{skew.worker}'s is {_words(skew)} its callers'" for skew in found[:3]])
    others = f", and those of {number(len(found) - 3)} more workers are off" if len(found) > 3 else ""
    worst = found[0]
    spoils = worst.by_s > SPOILS_S
    return Check(
        "clocks",
        "contradiction" if spoils else "warning",
        f"{facts.name}: clocks differ: {told}{others}; otherwise requests would have come before they were sent, or "
        "tokens before they were made",
        "clock",
        REST_ON_CLOCKS,
        worst.by_s,
        "s",
        worst.worker if len(found) == 1 else None,
    )


def _words(skew: Skew) -> str:
    size, half = abs(skew.ahead_s), (skew.high_s - skew.low_s) / 2
    return f"{seconds(size)} (+- {seconds(half)}) {'ahead of' if skew.ahead_s > 0 else 'behind'}"


def _routed_apart(facts: Facts) -> Check | None:
    """Without callers: requests reach one worker sooner after they were routed, or later, than they reach the others.

    A way that is longer looks the same, so this is never more than a warning.
    """
    lags = facts.routed_s
    if len(lags) < 2:
        return None
    usual = float(np.median(list(lags.values())))
    worker, lag = max(lags.items(), key=lambda item: (abs(item[1] - usual), item[0]))
    APART.note(abs(lag - usual))
    if abs(lag - usual) <= APART.value:
        return None
    return Check(
        "clocks",
        "warning",
        f"{facts.name}: requests reach {worker} {seconds(abs(lag - usual))} {'later' if lag > usual else 'sooner'} after they were routed "
        "than they reach the other workers: its clock, or its way, differs",
        "clock",
        REST_ON_CLOCKS,
        abs(lag - usual),
        "s",
        worker,
    )
