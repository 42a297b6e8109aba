"""What two arms' difference means, derived from evidence, with the numbers. Nothing is read that no number carries.

A reading needs its symptom (something got worse, beyond noise and by something that matters) and its own fingerprint:

    capacity   the same calls are faster where they hit and slower where they do not, and blocks are evicted (or requests
               preempted) only when the cache is on
    locality   one worker has the hot prefix and most of the queueing, the others do not wait
    lookup     every request pays about the same more, whether it hits or not, and the look-up is where it goes, or switching the
               cache on is what was changed (else it is a `fixed_extra`)

Several may hold; they stand in the order of the share of the tail's extra seconds that lies where each points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from diagnosis.experiments.contrast import MATERIAL, Contrast, HotWorker
from diagnosis.telling.wording import interval, listing, percent, quantile_name, seconds, signed

READ = ("mean", "p50", "p95", "p99")
HOT_RATIO = 3.0
"""A request waits so many times longer at the hot worker than elsewhere."""
MOST = 0.5
"""Share from which on something is most of it: what is said then is true of more than the rest together."""
ONLY_WHEN_ON = 3.0
"""Evictions or preemptions are the suspect's own where it has so many times the baseline's."""
EVEN = 2.0
"""An extra that is the same for all: its 90th percentile is at most so many times its 10th."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that carries a reading. value: in `unit`."""

    statement: str
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class Reading:
    """kind: capacity, locality, lookup, fixed_extra, better, worse, mixed, no_difference, not_distinguishable or too_few.

    tail_share   of the tail's extra seconds that lie where it points; None where that means nothing
    """

    kind: str
    sentence: str
    evidence: Sequence[Evidence] = field(default_factory=list)
    tail_share: float | None = None


def read(found: Contrast) -> list[Reading]:
    """What it means: one reading or several, most of the tail first; never none."""
    told = {name: found.latency["ttft"][name] for name in READ}
    if all(estimate.interval_95 is None for estimate in told.values()):
        why = next((e.reason for e in told.values() if e.reason), "no request tells a first token")
        return [Reading("too_few", f"Too few requests to say anything about TTFT: {why}.")]
    moved = {name: found.moved("ttft", name) for name in READ}
    causes = []
    if any(sign > 0 for sign in moved.values()) or _no_gain(moved):
        judged = [each for each in (_capacity(found), _locality(found, moved)) if each is not None]
        lookup = _lookup(found, by_shape=not judged)
        causes = sorted([*judged, *([lookup] if lookup else [])], key=lambda each: -(each.tail_share or 0.0))
    headline = _headline(found, moved, has_cause=bool(causes))
    return [*causes, *headline] if causes else headline


def _no_gain(moved: dict[str, int]) -> bool:
    """Nothing got better either: an extra may eat the gain."""
    return all(sign >= 0 for sign in moved.values())


def _headline(found: Contrast, moved: dict[str, int], *, has_cause: bool) -> list[Reading]:
    """How the whole distribution moved; [] where a cause already says what got worse."""
    told = [name for name in READ if found.latency["ttft"][name].interval_95 is not None]
    missing = [name for name in READ if name not in told]
    better, worse = [n for n in told if moved[n] < 0], [n for n in told if moved[n] > 0]
    evidence = [_of(found, name) for name in told]
    if has_cause:
        return []
    if worse and better:
        text = (
            f"{_names(better)} fell and {_names(worse)} rose, and neither evictions, nor one worker, nor a fixed extra shows why. "
            "`kvscope diagnose` over the two runs looks at every cause."
        )
        return [Reading("mixed", text, evidence)]
    if worse:
        return [Reading("worse", f"Worse: {_names(worse)} rose, nothing fell.", evidence)]
    loose = [name for name in told if moved[name] == 0 and _is_material(found, name)]
    doubt = f"; {_doubtful(found, loose)}" if loose else ""
    open_ = f"; {_names(missing)} cannot be told ({found.latency['ttft'][missing[0]].reason})" if missing else ""
    if better and not missing and len(better) == len(told):
        return [Reading("better", f"Better everywhere: {_names(better)} fell.", evidence)]
    if better:
        rest = [n for n in told if n not in better and n not in loose]
        still = f", {_names(rest)} changed by less than {percent(MATERIAL)}" if rest else ""
        return [Reading("better", f"Better: {_names(better)} fell{still}{doubt}{open_}.", evidence)]
    if loose:
        text = f"Not to be told apart: {_doubtful(found, loose)}. More repeats say more than more requests{open_}."
        return [Reading("not_distinguishable", text, evidence)]
    if missing:
        return [Reading("too_few", f"No difference where there is enough to tell{open_}.", evidence)]
    return [Reading("no_difference", f"No difference of {percent(MATERIAL)} or more in {_names(told)}.", evidence)]


def _is_material(found: Contrast, name: str) -> bool:
    """As it stands the number differs by something that would matter."""
    change, base = found.latency["ttft"][name].value, found.baseline.latency["ttft"][name].value
    return change is not None and base is not None and abs(change) >= MATERIAL * abs(base)


def _doubtful(found: Contrast, names: Sequence[str]) -> str:
    """'P99 rose by 64.3 ms, but repeats scatter as widely'."""
    told = [f"{_names([n])} by {signed(found.latency['ttft'][n].value)}" for n in names]
    return f"{listing(told)}, which repeats of one arm scatter by too"


def _capacity(found: Contrast) -> Reading | None:
    hits, others = found.paired_by_class.get("hit"), found.paired_by_class.get("not_hit")
    if hits is None or others is None or not (hits.is_below_0 and others.is_above_0):
        return None
    pressure = []
    for name, before, after in (
        ("blocks evicted", found.baseline.evicted_blocks, found.suspect.evicted_blocks),
        ("preemptions", found.baseline.preemptions, found.suspect.preemptions),
    ):
        if after and after >= ONLY_WHEN_ON * (before or 0):
            statement = f"{name}: {after:,} in {found.suspect.arm.name}, {'unknown' if before is None else f'{before:,}'} in {found.baseline.arm.name}"
            pressure.append(Evidence(statement, float(after), "count"))
    if not pressure:
        return None
    name = found.suspect.arm.name
    share = _share(found.tail_extra_not_hit_s, found.tail_extra_s)
    evidence = [
        _paired("hits are faster", hits.value, hits.interval_95),
        _paired("what is no hit is slower", others.value, others.interval_95),
        *pressure,
    ]
    if share is not None:
        evidence.append(
            Evidence(f"{percent(share)} of the tail's extra seconds are of requests that are no hits", share, "ratio")
        )
    return Reading(
        "capacity",
        f"Capacity: in {name} hits are fast but misses slow through eviction; the cache does not hold what is asked for again. "
        "More KV blocks, KV quantisation, a host tier, or fewer prefixes a worker would show it.",
        evidence,
        share,
    )


def _locality(found: Contrast, moved: dict[str, int]) -> Reading | None:
    hot, before = found.hot, found.baseline_hot
    if hot is None or not (moved["p95"] > 0 or moved["p99"] > 0 or moved["mean"] > 0):
        return None
    waits = hot.mean_s >= HOT_RATIO * hot.elsewhere_mean_s and hot.queue_share >= MOST
    has_prefix = hot.prefix_share is None or hot.prefix_share >= MOST
    new = before is None or hot.mean_s > 2 * before.mean_s
    if not (waits and has_prefix and new and hot.tail_share >= MOST):
        return None
    share = _share(found.tail_extra_hot_s, found.tail_extra_s)
    return Reading(
        "locality",
        f"Locality: in {found.suspect.arm.name} only the worker with the hot prefix queues ({listing(sorted(set(hot.names)))}). "
        "A load term in the routing, or a second copy of the prefix, would show it.",
        _hot_evidence(hot, before, found, share),
        share,
    )


def _hot_evidence(hot: HotWorker, before: HotWorker | None, found: Contrast, share: float | None) -> list[Evidence]:
    rows = [
        Evidence(
            f"a request waits {seconds(hot.mean_s)} there and {seconds(hot.elsewhere_mean_s)} elsewhere",
            hot.mean_s,
            "s",
        ),
        Evidence(
            f"it has {percent(hot.queue_share)} of all queueing, {percent(hot.request_share)} of the requests and "
            f"{percent(hot.tail_share)} of the slowest 5 %",
            hot.queue_share,
            "ratio",
        ),
    ]
    if hot.prefix_share is not None:
        rows.append(
            Evidence(
                f"{percent(hot.prefix_share)} of the most common prefix's requests go there", hot.prefix_share, "ratio"
            )
        )
    if before is not None:
        rows.append(
            Evidence(
                f"in {found.baseline.arm.name} the worker that queues most has {percent(before.queue_share)} of the queueing, "
                f"{seconds(before.mean_s)} a request",
                before.mean_s,
                "s",
            )
        )
    if share is not None:
        rows.append(Evidence(f"{percent(share)} of the tail's extra seconds are spent there", share, "ratio"))
    return rows


def _lookup(found: Contrast, *, by_shape: bool) -> Reading | None:
    """By the phase where it is told, else by the shape of the difference: all calls pay about the same more.

    by_shape   nothing else was found that would explain it
    """
    base_mean = found.baseline.latency["ttft"]["mean"].value or 0.0
    paid, extra = found.lookup_paid_share, found.lookup_s
    name = found.suspect.arm.name
    if extra.value is not None:
        if not extra.is_above_0 or extra.value < MATERIAL * base_mean or (paid or 0.0) < 0.95:
            return None
        evidence = [
            _paired("looking up takes", extra.value, extra.interval_95),
            Evidence(f"{percent(paid)} of the requests pay it", paid, "ratio"),
        ]
        share = _share(found.tail_extra_lookup_s, found.tail_extra_s)
        if share is not None:
            evidence.append(Evidence(f"it is {percent(share)} of the tail's extra seconds", share, "ratio"))
    else:
        if not by_shape or found.paired.size < 20 or found.moved("ttft", "p50") <= 0:
            return None
        low, middle, high = (float(np.quantile(found.paired, at)) for at in (0.1, 0.5, 0.9))
        if low <= 0 or high > EVEN * low or middle < MATERIAL * base_mean or _is_queueing(found, middle):
            return None
        share = None
        evidence = [
            Evidence(
                f"of the same calls nine of ten take at least {signed(low)}, half {signed(middle)}, one of ten {signed(high)} or more",
                middle,
                "s",
            )
        ]
    if extra.value is None and not _switched_on(found):
        text = f"Every request of {name} pays about the same more, whatever it asks: look before the engine and at each step's overhead."
        return Reading("fixed_extra", text, evidence, share)
    return Reading(
        "lookup",
        f"Lookup: every request of {name} pays a fixed extra, hit or not. Cheaper hashing or a lookup off the critical path would show it.",
        evidence,
        share,
    )


def _is_queueing(found: Contrast, extra_s: float) -> bool:
    """Waiting grew by most of it."""
    waits = [arm.phases.get("queue") for arm in (found.baseline, found.suspect)]
    return waits[0] is not None and waits[1] is not None and waits[1] - waits[0] >= MOST * extra_s


def _switched_on(found: Contrast) -> bool:
    """The arms differ in the cache, and the suspect has it."""
    words = [arm.arm.settings.get("cache") for arm in (found.baseline, found.suspect)]
    return words[0] != words[1] and words[1] == "on"


def _paired(what: str, value: float | None, bounds: tuple[float, float] | None) -> Evidence:
    return Evidence(f"{what}: {signed(value)} a request against the same calls ({interval(bounds)})", value, "s")


def _share(part: float, whole: float) -> float | None:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else None


def _of(found: Contrast, name: str) -> Evidence:
    change = found.latency["ttft"][name]
    before, after = (arm.latency["ttft"][name].value for arm in (found.baseline, found.suspect))
    statement = f"{_names([name])}: {seconds(before)} to {seconds(after)} ({signed(change.value)}, {interval(change.interval_95)})"
    return Evidence(statement, change.value, "s")


def _names(names: Sequence[str]) -> str:
    quantiles = {"p50": "0.5", "p95": "0.95", "p99": "0.99", "p99_9": "0.999"}
    return listing([quantile_name(quantiles[n]) if n in quantiles else "mean" for n in names])
