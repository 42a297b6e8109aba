"""Do counters, events, client and engine agree? A contradiction is a finding, and lowers confidence in all that rests on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnosis.facts import Facts
from diagnosis.sampled import half_interval, margin, num_requests, rate_of, total
from diagnosis.wording import number, percent, seconds
from engine_probe.events import KINDS

TOLERANCE = 0.05
"""Relative difference of two counts of the same thing that scraping once a second explains."""
LOST_SHARE = 0.05
"""Share of the requests that may be lost: what overload loses are the busiest moments, which is no fair sample."""
BEFORE_FIRST_TOKEN = ("frontend_s", "tokenize_s", "queue_s", "cache_lookup_s", "kv_load_s", "alloc_s", "prefill_s")
"""Phases of one worker that lie before the first token wherever they are told."""
PENALTY = {"ok": 1.0, "warning": 0.95, "contradiction": 0.7}
"""What a check's outcome does to the confidence of all causes."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the telemetry: `status` ok | warning | contradiction."""

    check: str
    status: str
    statement: str


def check(facts: Facts) -> list[Check]:
    """All checks of one window that can be made with what was seen."""
    made = [
        _gaps(facts),
        _clocks(facts),
        _invalid(facts),
        _duplicates(facts),
        _arrivals(facts),
        _instants(facts),
        _phases(facts),
        _joined(facts),
        _ttft_order(facts),
        _cached_tokens(facts),
        _usage_range(facts),
        _preemptions(facts),
        _evictions(facts),
        _finished(facts),
        _unfinished(facts),
        _chunks(facts),
        _estimated(facts),
        _probe(facts),
    ]
    return [c for c in made if c is not None]


def penalty(checks: Sequence[Check]) -> float:
    """Factor on confidence: the worst check counts once, so ten warnings are not ten times as bad."""
    return min((PENALTY[c.status] for c in checks), default=1.0)


def caching_is_off(facts: Facts) -> tuple[bool, str]:
    """Whether prefix caching was off in the window, and how we know."""
    told = [w.prefix_caching for w in facts.workers if w.prefix_caching is not None]
    says = f"{number(len(told))} worker says" if len(told) == 1 else f"{number(len(told))} workers say"
    if told and not any(told):
        return True, f"{says} that prefix caching is off"
    cached = facts.requests.get("cached_tokens")
    hits = float(np.nansum(cached)) if np.isfinite(cached).any() else None
    if hits is not None and hits > 0:
        return False, f"{number(hits)} prompt tokens were served from the cache"
    queries = facts.samples.get("prefix_queries_tokens_total")
    if queries == 0 and hits == 0:
        return True, "0 lookups in the prefix cache were counted, and no request had a cached token"
    if told and all(told):
        return False, f"{says} that prefix caching is on"
    return False, f"{number(told.count(False))} of {number(len(facts.workers))} known workers say that it was off"


def _gaps(facts: Facts) -> Check | None:
    gaps = [m for m in facts.marks if m.mark == "gap"]
    if not gaps:
        return Check("gaps", "ok", f"{facts.name}: no gap in the telemetry is known")
    dropped = sum(m.number("dropped_rows") or 0.0 for m in gaps)
    by_kind = {kind: sum(m.number(f"dropped_{kind}") or 0.0 for m in gaps) for kind in KINDS}
    told = ", ".join(f"{number(count)} {kind}" for kind, count in by_kind.items() if count)
    statement = f"{facts.name}: {len(gaps)} gaps in the telemetry, {number(dropped)} rows known to be lost"
    if told:
        statement += f" ({told})"
    if by_kind["block"]:
        statement += "; evictions and lost tokens are more than is told here"
    if by_kind["request"] > LOST_SHARE * len(facts.requests):
        statement += "; so many requests are missing that those that are left may not be like the others"
        return Check("gaps", "contradiction", statement)
    return Check("gaps", "warning", statement)


def _clocks(facts: Facts) -> Check | None:
    ahead_s = facts.requests.engine_ahead_ns / 1e9
    if ahead_s:
        return Check(
            "clocks",
            "warning",
            f"{facts.name}: by the requests that both saw, the engine's clock is {seconds(abs(ahead_s))} "
            f"{'ahead of' if ahead_s > 0 else 'behind'} the {facts.requests.vantage}'s; times are told by the engine's",
        )
    if facts.clock_error_s is None:
        return Check(
            "clocks", "ok", f"{facts.name}: clocks were not compared; only durations are joined across vantages"
        )
    status = "warning" if facts.clock_error_s > 0.01 else "ok"
    return Check("clocks", status, f"{facts.name}: clocks agree within {seconds(facts.clock_error_s)}")


def _invalid(facts: Facts) -> Check | None:
    found = facts.requests.num_invalid
    if found == 0:
        return None
    return Check(
        "values",
        "warning",
        f"{facts.name}: {number(found)} durations or counts of requests are negative or infinite; they are taken as unknown",
    )


def _duplicates(facts: Facts) -> Check | None:
    found = facts.requests.num_duplicates
    if found == 0:
        return None
    return Check(
        "duplicates",
        "ok",
        f"{facts.name}: {number(found)} rows told of a request that another row tells too; merged, each counts once",
    )


def _arrivals(facts: Facts) -> Check | None:
    """Durations of a source without instants are as good as any; what rests on who was there at the same time is not."""
    assumed = facts.requests.num_assumed
    if not assumed:
        return None
    return Check(
        "arrivals",
        "warning",
        f"{facts.name}: the source does not tell when {number(assumed)} requests arrived; they are laid evenly over it, so rates "
        "hold for the whole of it, and nothing is said of concurrency or of moments within it",
    )


def _instants(facts: Facts) -> Check | None:
    """No clock runs backwards within one vantage."""
    r = facts.requests
    early = (r.first_token_s < r.arrival_s) | (r.last_token_s < r.first_token_s) | (r.end_s < r.last_token_s)
    if not early.any():
        return None
    return Check(
        "instants",
        "contradiction" if float(early.mean()) > 0.01 else "warning",
        f"{facts.name}: in {number(int(early.sum()))} requests ({percent(float(early.mean()))}) arrival, first token, last token "
        "and end do not follow each other; a latency below zero is left out",
    )


def _phases(facts: Facts) -> Check | None:
    """Phases up to the first token are disjoint, so they cannot sum to more than the TTFT at the same vantage."""
    r = facts.requests
    ttft = r.engine_first_s - r.engine_arrival_s
    told = np.nansum([r.get(name) for name in BEFORE_FIRST_TOKEN], axis=0)
    known = np.isfinite(ttft) & (ttft >= 0) & (told > 0)
    if not known.any():
        return None
    more = float(np.mean(told[known] > ttft[known] * (1 + TOLERANCE) + 0.002))
    if more <= 0.01:
        return Check("phases", "ok", f"{facts.name}: the phases of requests fit into their TTFT")
    return Check(
        "phases",
        "contradiction",
        f"{facts.name}: in {percent(more)} of requests the phases before the first token sum to more than the TTFT itself",
    )


def _joined(facts: Facts) -> Check | None:
    """Of the client's (or router's) requests, how many have an engine row."""
    r = facts.requests
    alone = ~np.isfinite(r.engine_arrival_s)
    if r.vantage == "engine" or alone.all():
        return None
    share = float(alone.mean())
    left_out = 1.0 - min((r.engine_rate or 1.0) / rate_of(r), 1.0)  # by sampling: by intention, and evenly
    return Check(
        "engine_rows",
        "warning" if share > left_out + 0.01 + 3 * (left_out * (1.0 - left_out) / len(r)) ** 0.5 else "ok",
        f"{facts.name}: {percent(share)} of the {r.vantage}'s requests have no engine row; their phases are unknown",
    )


def _ttft_order(facts: Facts) -> Check | None:
    r = facts.requests
    engine = r.get("engine_ttft_s")
    client = r.first_token_s - r.arrival_s
    both = np.isfinite(engine) & np.isfinite(client)
    if not both.any():
        return None
    early = float(np.mean(client[both] < engine[both] - 0.002))
    if early > 0.01:
        return Check(
            "client_ttft",
            "contradiction",
            f"{facts.name}: in {percent(early)} of requests the client saw the first token before the engine says it made it",
        )
    gap = float(np.median(client[both] - engine[both]))
    return Check(
        "client_ttft", "ok", f"{facts.name}: the client's TTFT is the engine's plus {seconds(gap)} in the median"
    )


def _cached_tokens(facts: Facts) -> Check | None:
    cached = facts.requests.get("cached_tokens")
    counted = facts.samples.get("prefix_hits_tokens_total")
    if counted is None or not np.isfinite(cached).any():
        return None
    told, error = total(facts.requests, "cached_tokens") or 0.0, margin(facts.requests, "cached_tokens")
    own, own_error = total(facts.requests, "self_hit_tokens") or 0.0, margin(facts.requests, "self_hit_tokens")
    if own and abs(told + own - counted) < abs(told - counted):
        return _self_hits(facts, told, own, counted, error + own_error)
    if max(told, counted) < 1000:
        return Check("cached_tokens", "ok", f"{facts.name}: requests and counter agree: almost nothing was cached")
    off = abs(told - counted) / max(told, counted)
    statement = f"{facts.name}: cached tokens by request {number(told)}, by the engine's hit counter {number(counted)} ({percent(off)} apart)"
    if counted == 0 or (told == 0 and rate_of(facts.requests, "cached_tokens") == 1.0):
        return Check("cached_tokens", "contradiction", statement + ": one of the two is not telling the truth")
    agree = abs(told - counted) <= 2 * TOLERANCE * max(told, counted) + error
    return Check("cached_tokens", "ok" if agree else "warning", statement)


def _self_hits(facts: Facts, told: float, own: float, counted: float, error: float) -> Check:
    """Some engines count what a preempted request finds of its own as hits: no reuse across requests, whatever their rate says."""
    lookups, prompt = facts.samples.get("prefix_queries_tokens_total"), total(facts.requests, "prompt_tokens")
    rate = f" ({percent(counted / lookups)} of its lookups)" if lookups else ""
    reuse = f" ({percent(told / prompt)} of the prompts)" if prompt else ""
    statement = (
        f"{facts.name}: of the {number(counted)} tokens that the engine counts as hits{rate} {number(own)} are self hits: preempted "
        f"requests found their own blocks again; reuse across requests is {number(told)} tokens{reuse}"
    )
    if abs(told + own - counted) > 2 * TOLERANCE * max(told + own, counted) + error:
        statement += "; the two do not add up to what the engine counts"
    return Check("cached_tokens", "warning", statement)


def _usage_range(facts: Facts) -> Check | None:
    low, high = facts.samples.get("kv_usage_ratio:min"), facts.samples.get("kv_usage_ratio:max")
    if low is None or high is None:
        return None
    if low < 0 or high > 1.0001:
        return Check(
            "kv_usage",
            "contradiction",
            f"{facts.name}: KV usage runs from {low:.3g} to {high:.3g}; it must lie within 0 and 1",
        )
    return Check("kv_usage", "ok", f"{facts.name}: KV usage runs from {percent(low)} to {percent(high)}")


def _preemptions(facts: Facts) -> Check | None:
    counted = facts.samples.get("preemptions_total")
    told = facts.requests.get("num_preemptions")
    if counted is None or not np.isfinite(told).any():
        return None
    of_all, error = total(facts.requests, "num_preemptions") or 0.0, margin(facts.requests, "num_preemptions")
    if abs(of_all - counted) > max(3.0, 2 * TOLERANCE * max(of_all, counted)) + error:
        return Check(
            "preemptions",
            "warning",
            f"{facts.name}: {number(round(of_all))} preemptions by request, {number(counted)} by counter",
        )
    return Check("preemptions", "ok", f"{facts.name}: preemptions by request and by counter agree ({number(counted)})")


def _evictions(facts: Facts) -> Check | None:
    counted = facts.samples.get("blocks_evicted_total")
    if counted is None or facts.blocks is None:
        return None
    rate, evicted = facts.blocks.sample_rate or 1.0, facts.blocks.evicted
    error = half_interval(np.ones(round(evicted * rate)), rate)
    if abs(counted - evicted) > max(10.0, 2 * TOLERANCE * max(counted, evicted)) + error:
        return Check(
            "evictions",
            "warning",
            f"{facts.name}: {number(counted)} evictions by counter, {number(facts.blocks.evicted)} by events",
        )
    return Check("evictions", "ok", f"{facts.name}: evictions by counter and by events agree")


def _finished(facts: Facts) -> Check | None:
    counted = facts.samples.get("requests_finished_total")
    if counted is None:
        return None
    rate = rate_of(facts.requests)
    rows = round(num_requests(facts.requests) + facts.num_warmup / rate)
    if counted > rows * (1 + 2 * TOLERANCE) + 5 + half_interval(np.ones(round(rows * rate)), rate):
        return Check(
            "requests",
            "warning",
            f"{facts.name}: the engine finished {number(counted)} requests, {number(rows)} are recorded",
        )
    return Check(
        "requests",
        "ok",
        f"{facts.name}: {number(rows)} requests recorded, the engine counts {number(counted)} finished",
    )


def _unfinished(facts: Facts) -> Check | None:
    if facts.num_unfinished == 0:
        return None
    share = facts.num_unfinished / max(len(facts.requests), 1)
    status = "warning" if share > 0.01 else "ok"
    return Check(
        "unfinished",
        status,
        f"{facts.name}: {facts.num_unfinished} requests ({percent(share)}) failed, were aborted or rejected",
    )


def _chunks(facts: Facts) -> Check | None:
    gaps, output = facts.requests.gaps, facts.requests.get("output_tokens")
    if gaps is None or not np.isfinite(output).any():
        return None
    chunks = np.bincount(gaps.request, minlength=len(facts.requests)) + 1
    several = float(np.mean(chunks < np.nan_to_num(output)))
    if several <= 0.02:
        return None
    return Check(
        "chunks",
        "ok",
        f"{facts.name}: {percent(several)} of requests got several tokens in one chunk; single gaps are an average there",
    )


def _estimated(facts: Facts) -> Check | None:
    r = facts.requests
    if r.has("cached_tokens", 0.01) or not r.has("computed_tokens", 0.01):
        return None
    return Check(
        "computed_tokens",
        "ok",
        f"{facts.name}: no request says what was cached; computed tokens are prompt tokens times the engine's miss rate",
    )


def _probe(facts: Facts) -> Check | None:
    if facts.steps is None:
        return None
    probe, duration = facts.steps.get("probe_s"), facts.steps.duration_s
    known = np.isfinite(probe) & np.isfinite(duration)
    if not known.any():
        return None
    share = float(probe[known].sum() / max(duration[known].sum(), 1e-9))
    return Check(
        "probe", "warning" if share > 0.01 else "ok", f"{facts.name}: the probe took {percent(share)} of step time"
    )
