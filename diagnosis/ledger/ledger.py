"""The ledger: each request's TTFT, decode or E2E split into cause-seconds that sum to it.

The order in which seconds are given away is the table in `rows.py`. Where a phase was not observed its seconds stand in
one `..._unobserved` row. Two ledgers are kept a request: first-order (what it did itself: own phases, all waiting in one
row) and passed-on (waiting split by what the steps spent their time on). A request whose first token never came counts with
what it waited at least (`censored.py`). Invariant: rows sum to the metric within 1e-9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64, Bool, Facts
from diagnosis.ledger import timeline as timelines
from diagnosis.ledger.attempts import attempts_before
from diagnosis.ledger.overheads import lookup_parts
from diagnosis.ledger.rows import HANDOVER, HOTSPOTS, KINDS, ORDINARY, OVERHEADS, ROWS, UNOBSERVED
from diagnosis.ledger.spent import Context, own_work, token_s
from diagnosis.ledger.stalls import stalls
from diagnosis.ledger.step_work import AGAIN, decoding_by_steps, others_by_steps
from diagnosis.ledger.timeline import Spent, Timeline
from diagnosis.sampled import beside_rate
from diagnosis.statistics.censored import METRICS as CENSORED_METRICS
from diagnosis.statistics.censored import at_least_s
from diagnosis.statistics.censored import counted as counts


@dataclass(frozen=True, slots=True)
class Counted:
    """The requests that have a metric: `values` [n] s, `rows` [n] their position in the facts, `censored` [n] as in a ledger."""

    values: F64
    rows: I64
    censored: Bool


@dataclass(frozen=True, slots=True)
class Ledger:
    """`parts` [n, k] cause-seconds of the requests that have the metric; `rows` [n] their position in the facts.

    `censored` [n]: the first token never came, the value is what the request waited at least.
    """

    metric: str
    names: tuple[str, ...]
    parts: F64
    first_order: F64
    values: F64
    rows: I64
    censored: Bool

    def column(self, name: str) -> F64:
        """Seconds of one row, [n]; zeros where the ledger has no such row."""
        return self.parts[:, self.names.index(name)] if name in self.names else np.zeros(len(self.values))

    def unobserved_share(self) -> float:
        """Share of all seconds that stand in rows whose cause cannot be seen."""
        total = float(self.values.sum())
        hidden = sum(float(self.column(name).sum()) for name in UNOBSERVED)
        return hidden / total if total > 0 else 0.0


def metric_values(facts: Facts, metric: str) -> F64:
    """TTFT, TPOT, decode seconds or E2E of each request, s; NaN where it has none. Definitions: design section 4."""
    r = facts.requests
    if metric == "ttft":
        return r.first_token_s - r.arrival_s
    if metric == "e2e":
        return r.last_token_s - r.arrival_s
    decode = r.last_token_s - r.first_token_s
    if metric == "decode":
        return decode
    tokens = r.get("output_tokens")
    return np.where(tokens > 1, decode / np.where(tokens > 1, tokens - 1, 1.0), np.nan)


def judged_values(facts: Facts, metric: str) -> F64:
    """As `metric_values`, and where the first token never came what the request waited at least (see `censored.py`)."""
    values = metric_values(facts, metric)
    if metric not in CENSORED_METRICS:
        return values
    at_least = at_least_s(facts)
    return np.where(counts(values, at_least), at_least, values)


def count(facts: Facts, metric: str) -> Counted:
    """The requests that a ledger for `metric` is written of."""
    values = judged_values(facts, metric)
    keep = np.flatnonzero(np.isfinite(values) & (values >= 0))
    # a finished request without a first token is not censored: only nobody saw when it came
    is_open = np.isfinite(at_least_s(facts)[keep]) if metric in CENSORED_METRICS else np.zeros(len(keep), dtype=bool)
    return Counted(values[keep], keep, is_open)


def write(facts: Facts, metric: str, context: Context) -> Ledger:
    """The ledger of one window for `metric`: ttft, tpot or e2e."""
    counted = count(facts, metric)
    keep = counted.rows
    spent = own_work(facts, context)
    shrank = context.pair.smaller_pool is not None
    lines = timelines.build_all(facts, spent, context.most_running, token_s(context), shrank=shrank)
    sheet = Sheet(len(facts.requests))
    if metric in ("ttft", "e2e"):
        _write_ttft(sheet, facts, spent, lines, context)
    if metric in ("tpot", "e2e"):
        decoded = Sheet(sheet.n)
        _write_decode(decoded, facts, spent, lines, context)
        r = facts.requests
        sheet.join(decoded, context.model.spell_shares((r.first_token_s + r.last_token_s) / 2, suspect=context.suspect))
    if metric == "e2e":
        whole = metric_values(facts, "e2e")
        sheet.add("answer_unobserved", np.where(np.isfinite(facts.requests.first_token_s), 0.0, whole))
    if metric == "tpot":
        tokens = facts.requests.get("output_tokens")
        sheet.scale(1.0 / np.where(tokens > 1, tokens - 1, np.nan))
    names, parts = sheet.table(keep)
    first = sheet.first_order(keep)
    # float dust: the largest part takes the last 1e-12 so that the rows sum to the value
    if len(keep):
        dust = counted.values - parts.sum(axis=1)
        parts[np.arange(len(keep)), np.abs(parts).argmax(axis=1)] += dust
    return Ledger(metric, names, parts, first, counted.values, keep, counted.censored)


class Sheet:
    """Seconds given away so far, a row a cause; the helper that keeps every request's sum."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.columns: dict[str, F64] = {}
        self.waits = np.zeros(n)

    def add(self, name: str, seconds: F64, rows: I64 | slice = slice(None)) -> None:
        """Seconds of one cause, of all requests or of those `rows`; unknown ones count nothing."""
        if name not in ROWS:
            raise KeyError(name)
        column = self.columns.setdefault(name, np.zeros(self.n))
        column[rows] += known_or_0(seconds)

    def carve(self, left: F64, name: str, seconds: F64) -> F64:
        """Give `seconds` (at most what is left) to `name`; returns what remains."""
        taken = np.clip(known_or_0(seconds), 0.0, np.maximum(left, 0.0))
        self.add(name, taken)
        return left - taken

    def join(self, part: Sheet, slow: F64) -> None:
        """Take over what another sheet gave away, ordinary work less the share `slow` [n] of it that slower steps added.

        What somebody answers for already stays with them: those seconds were worked out at the usual speed.
        """
        for name, column in part.columns.items():
            taken = column * slow if name in ORDINARY else np.zeros(self.n)
            self.add(name, column - taken)
            self.add("slow_steps", taken)

    def scale(self, factor: F64) -> None:
        self.columns = {name: column * factor for name, column in self.columns.items()}
        self.waits = self.waits * factor

    def table(self, keep: I64) -> tuple[tuple[str, ...], F64]:
        names = tuple(name for name in ROWS if name in self.columns and np.any(self.columns[name][keep] != 0))
        parts = np.stack([self.columns[name][keep] for name in names], axis=1) if names else np.zeros((len(keep), 1))
        return names or ("unexplained",), parts

    def first_order(self, keep: I64) -> F64:
        return self.waits[keep]


def known_or_0(values: F64) -> F64:
    """The values with 0 for the unknown ones."""
    return np.where(np.isfinite(values), values, 0.0)


def _write_ttft(sheet: Sheet, facts: Facts, spent: Spent, lines: Mapping[int, Timeline], context: Context) -> None:
    r = facts.requests
    at_least = at_least_s(facts)
    ttft = np.maximum(known_or_0(np.where(np.isfinite(at_least), at_least, metric_values(facts, "ttft"))), 0.0)
    slow = context.model.slow_share(suspect=context.suspect)
    queue, prefill, left_queue_s = _queue_and_prefill(facts, at_least)
    seen = np.isfinite(queue) & np.isfinite(prefill)
    retried = attempts_before(facts, ttft)
    unseen = Sheet(sheet.n)
    served = unseen.carve(np.where(seen, 0.0, ttft), "client_retries", retried)
    unseen.add("ttft_unobserved", served * (1.0 - slow))
    unseen.add("slow_steps", served * slow)
    sheet.join(unseen, context.model.spell_shares(r.arrival_s + ttft / 2, suspect=context.suspect))
    queue, prefill = np.where(seen, queue, 0.0), np.where(seen, prefill, 0.0)
    # durations of another vantage may exceed this one's TTFT by clock dust: never give away more than there is
    left = np.where(seen, ttft, 0.0)
    queue = np.minimum(queue, left)
    sheet.waits += queue
    prefill = np.minimum(prefill, left - queue)
    queue, prefill, hot = _carve_hotspots(sheet, facts, queue, prefill)
    stalled = np.clip(
        known_or_0(_stalled_before_first(r.get("stalled_s"), r.get("decode_s"))), 0.0, left - hot - queue - prefill
    )
    waited, prefilled = Sheet(sheet.n), Sheet(sheet.n)
    _write_wait(waited, facts, queue, left_queue_s, lines, slow)
    _write_prefill(prefilled, facts, spent, prefill, lines, slow, context)
    sheet.join(waited, context.model.spell_shares(left_queue_s - queue / 2, suspect=context.suspect))
    sheet.join(prefilled, context.model.spell_shares(left_queue_s + prefill / 2, suspect=context.suspect))
    sheet.add("preemption_recompute", stalled)
    rest = left - hot - queue - prefill - stalled
    rest = _carve_handover(sheet, facts, rest, before_first=True)
    looked, locked = lookup_parts(r)
    rest = sheet.carve(rest, "lookup_overhead", looked)
    rest = sheet.carve(rest, "cache_lock_contention", locked)
    rest = sheet.carve(rest, "eviction_overhead", r.get("alloc_s"))
    rest = sheet.carve(rest, "tier_load", r.get("kv_load_s"))
    rest = sheet.carve(rest, "client_retries", retried)
    if context.pair.offset_s is not None:
        rest = sheet.carve(rest, "fixed_offset", context.pair.offset_s)
    engine_front = known_or_0(r.get("frontend_s")) + known_or_0(r.get("tokenize_s")) + known_or_0(r.get("network_s"))
    between = np.minimum(retried, known_or_0(r.get("network_s")))
    if facts.handover is not None:  # between caller and prefill worker lies the hand-over too
        moved = timelines.sum_of(facts.handover.parts.values(), len(r))
        to_first = known_or_0(facts.handover.first_s - r.engine_first_s)
        between = between + np.where(facts.handover.before_first, np.maximum(moved, to_first), 0.0)
    engine_front = np.maximum(engine_front - between, 0.0)
    rest = sheet.carve(rest, "front_end", engine_front)
    sheet.add("unexplained", rest)


def _carve_hotspots(sheet: Sheet, facts: Facts, queue: F64, prefill: F64) -> tuple[F64, F64, F64]:
    """What is left of queue and prefill without what hotspots cost, and that, [n] each: waiting goes first, then prefill."""
    hot = np.zeros(sheet.n)
    if facts.routing is None:
        return queue, prefill, hot
    for name in HOTSPOTS:
        lost = facts.routing.slow * (queue + prefill) if name == "hotspot_straggler" else facts.routing.lost_s.get(name)
        if lost is None or not lost.any():
            continue
        waited = np.minimum(lost, queue)
        computed = np.minimum(lost - waited, prefill)
        sheet.add(name, waited + computed)
        queue, prefill, hot = queue - waited, prefill - computed, hot + waited + computed
    return queue, prefill, hot


def _carve_handover(sheet: Sheet, facts: Facts, left: F64, *, before_first: bool) -> F64:
    """What is left of the seconds before (or after) the first token without the hand-overs that lie there, [n]."""
    if facts.handover is None:
        return left
    here = facts.handover.before_first == before_first
    for name in HANDOVER:
        left = sheet.carve(left, name, np.where(here, facts.handover.parts[name], 0.0))
    return left


def _queue_and_prefill(facts: Facts, at_least: F64) -> tuple[F64, F64, F64]:
    """Queue and prefill (s, NaN unknown), and the instant at which the queue was left, on the engine's clock, [n] each.

    Without a first token: who was scheduled prefilled until its end, who was given up in the queue waited until its end.
    """
    r = facts.requests
    queue, prefill, left_queue = r.get("queue_s").copy(), r.get("prefill_s").copy(), r.scheduled_s.copy()
    censored = np.isfinite(at_least)
    scheduled = censored & np.isfinite(queue) & np.isfinite(r.scheduled_s)
    prefill[scheduled] = np.clip(at_least[scheduled] - queue[scheduled], 0.0, None)
    given_up = timelines.given_up(facts)
    queue[given_up], prefill[given_up] = at_least[given_up], 0.0
    left_queue[given_up] = r.engine_arrival_s[given_up] + at_least[given_up]
    return queue, prefill, left_queue


def _stalled_before_first(stalled: F64, decode: F64) -> F64:
    """Stalls count before the first token only where the request never decoded (no engine splits them yet)."""
    return np.where(np.isfinite(decode), 0.0, stalled)


def _write_wait(
    sheet: Sheet, facts: Facts, queue: F64, left_queue_s: F64, lines: Mapping[int, Timeline], slow: float
) -> None:
    r = facts.requests
    start_s = left_queue_s - queue
    sheet.add("slow_steps", queue * slow)
    queue = queue * (1.0 - slow)
    done = np.zeros(len(r), dtype=bool)
    waited = np.isfinite(left_queue_s) & np.isfinite(r.engine_arrival_s) & (queue > 0)
    for worker, mine in enumerate(r.by_worker()):
        rows = mine[waited[mine]]
        if worker not in lines or len(rows) == 0:
            continue
        line = lines[worker]
        shares = line.integrate(line.wait_shares(), start_s[rows], left_queue_s[rows])
        total = timelines.sum_of(shares.values(), len(rows))
        good = total > 0
        for name, share in shares.items():
            sheet.add(name, share[good] / total[good] * queue[rows[good]], rows[good])
        done[rows[good]] = True
    sheet.add("queue_unobserved", np.where(done, 0.0, queue))


def _write_prefill(
    sheet: Sheet, facts: Facts, spent: Spent, prefill: F64, lines: Mapping[int, Timeline], slow: float, context: Context
) -> None:
    sheet.add("slow_steps", prefill * slow)
    left = prefill * (1.0 - slow)
    rate = context.model.prefill_s_per_token
    if rate is not None:
        for name, tokens in spent.tokens.items():
            if name not in ("long_prefill_interference", "shared_prefill"):  # those of its own are its own work
                left = sheet.carve(left, name, tokens * rate)
    r = facts.requests
    shared = _shared_with(facts, spent, lines, r.scheduled_s, r.engine_first_s, own=True)
    own = known_or_0(r.get("computed_tokens")) * (rate or 0.0)
    sharable = np.maximum(left - np.minimum(own, left), 0.0)
    before = sharable.copy()
    for name, seconds in shared.items():
        sharable = sheet.carve(sharable, name, seconds * (1.0 - slow))
    per_seq = context.model.decode_s_per_seq
    if per_seq is not None:
        chunks = r.get("prefill_chunks")
        steps = np.where(np.isfinite(chunks), chunks, 1.0)
        sharable = sheet.carve(sharable, "decode_bandwidth", steps * per_seq * _decoding_at(facts, r.scheduled_s))
    sheet.add("own_prefill", left - before + sharable)


def _shared_with(
    facts: Facts, spent: Spent, lines: Mapping[int, Timeline], start_s: F64, end_s: F64, *, own: bool
) -> dict[str, F64]:
    """Seconds of [start, end) that the steps spent on the answered-for prefills of *other* requests, [n] by kind.

    Kinds that occur nowhere are left out; the others come in the order of OVERHEADS and KINDS. `own`: what a request did itself is
    taken off.
    """
    r = facts.requests
    occur = {name for line in lines.values() for name in line.activity}
    out: dict[str, F64] = {name: np.zeros(len(r)) for name in (*OVERHEADS, *KINDS) if name in occur}
    known = np.isfinite(start_s) & np.isfinite(end_s)
    for worker, mine in enumerate(r.by_worker()):
        rows = mine[known[mine]]
        if worker in lines and len(rows):
            for name, seconds in lines[worker].integrate(lines[worker].activity, start_s[rows], end_s[rows]).items():
                out[name][rows] = seconds
    if own and out:
        total = spent.total()
        mine_s = np.where(total > 0, spent.density * known_or_0(r.get("prefill_s")), 0.0)
        for name, seconds in out.items():
            if name in spent.tokens:
                seconds -= mine_s * spent.tokens[name] / np.maximum(total, 1e-12)
        for name, looked in zip(("lookup_overhead", "cache_lock_contention"), lookup_parts(r), strict=True):
            if name in out:  # its own stands beside its prefill
                out[name] -= known_or_0(looked)
        if "eviction_overhead" in out and facts.steps is None:
            out["eviction_overhead"] -= known_or_0(r.get("alloc_s"))
    return {name: np.clip(seconds, 0.0, None) for name, seconds in out.items()}


def _write_decode(sheet: Sheet, facts: Facts, spent: Spent, lines: Mapping[int, Timeline], context: Context) -> None:
    r = facts.requests
    decode = known_or_0(metric_values(facts, "decode"))
    preempted = facts.samples.get("preemptions_total", 0.0) > 0 or bool(np.nansum(r.get("num_preemptions")) > 0)
    stalled = stalls(facts, lines, preempted=preempted)
    left = decode - np.minimum(stalled, decode)
    sheet.add("preemption_recompute" if preempted else "decode_stall", decode - left)
    if r.gaps is None and not r.has("decode_s"):
        sheet.add("decode_unobserved", left)
        return
    slow = context.model.slow_share(suspect=context.suspect)
    left = _carve_handover(sheet, facts, left, before_first=False)
    if facts.routing is not None:
        left = sheet.carve(left, "hotspot_straggler", facts.routing.slow * left)
    sheet.add("slow_steps", left * slow)
    left = left * (1.0 - slow)
    engine_last = np.where(np.isfinite(r.engine_last_s), r.engine_last_s, np.nan)
    shared = _shared_with(facts, spent, lines, r.engine_first_s, engine_last, own=False)
    # what steps did during its own stalls (its own computing again among it) is in the stalls already
    going = np.divide(decode - np.minimum(stalled, decode), decode, out=np.ones(len(r)), where=decode > 0)
    for name, seconds in shared.items():
        mine = known_or_0(r.get("recomputed_tokens")) * (token_s(context) or 0.0) if name == AGAIN else 0.0
        left = sheet.carve(left, name, np.clip(seconds - mine, 0.0, None) * going * (1.0 - slow))
    for name, seconds in _beside_decoding(facts, token_s(context)).items():
        left = sheet.carve(left, name, seconds)
    left = sheet.carve(left, "speculation_collapse", left * context.pair.refused_share)
    tokens = r.get("output_tokens")
    per_seq = context.model.decode_s_per_seq
    if per_seq is not None:
        others = _mean_others(facts)
        left = sheet.carve(left, "decode_bandwidth", known_or_0(tokens - 1) * per_seq * np.maximum(others, 0.0))
    sheet.add("own_decode", left)


def _beside_decoding(facts: Facts, token_s: float | None) -> dict[str, F64]:
    """Seconds that each hand-over's decode worker computed prompts of others between its first and last token there, [n] by row.

    A decode worker computes what it should have been sent; the rest of it, last partial blocks, is ordinary.
    """
    moves, steps = facts.handover, facts.steps
    if moves is None or steps is None or token_s is None:
        return {}
    beside = np.zeros(len(facts.requests))
    computed = 0.0
    for code, name in enumerate(moves.worker_names):
        rows = np.flatnonzero((moves.worker == code) & np.isfinite(moves.first_s) & np.isfinite(moves.last_s))
        if name not in steps.worker_names or len(rows) == 0:
            continue
        mine = steps.worker == list(steps.worker_names).index(name)
        tokens = np.nan_to_num(steps.get("prefill_tokens")[mine])
        computed += float(tokens.sum())
        through = np.concatenate([[0.0], np.cumsum(np.minimum(tokens * token_s, steps.duration_s[mine]))])
        at = steps.at_s[mine]
        first, last = (np.searchsorted(at, instant[rows], "right") for instant in (moves.first_s, moves.last_s))
        beside[rows] = through[last] - through[first]
    shares = {name: tokens / max(computed, 1.0) for name, tokens in moves.again.items() if tokens > 0}
    rest = max(0.0, 1.0 - sum(shares.values()))
    return {name: beside * min(share, 1.0) for name, share in (shares | {"shared_prefill": rest}).items()}


def _mean_others(facts: Facts) -> F64:
    """Mean number of other requests of its worker that decoded while this one did, [n]: by steps where they tell, else by overlap."""
    r = facts.requests
    out = np.zeros(len(r))
    last = np.where(np.isfinite(r.last_token_s), r.last_token_s, r.end_s)
    for worker in range(len(r.worker_names)):
        rows = np.flatnonzero((r.worker == worker) & np.isfinite(r.first_token_s) & np.isfinite(last))
        if len(rows) < 2:
            continue
        first, end = r.first_token_s[rows], last[rows]
        edges = np.unique(np.concatenate([first, end]))
        level = np.searchsorted(np.sort(first), edges[:-1], "right") - np.searchsorted(
            np.sort(end), edges[:-1], "right"
        )
        cumulative = np.concatenate([[0.0], np.cumsum(level * np.diff(edges))])
        seconds = np.interp(end, edges, cumulative) - np.interp(first, edges, cumulative)
        out[rows] = (seconds / np.maximum(end - first, 1e-9) - 1.0) / beside_rate(r)
        counted = others_by_steps(facts.steps, r.worker_names[worker], r.engine_first_s[rows], r.engine_last_s[rows])
        out[rows] = np.where(np.isfinite(counted), counted, out[rows])
    moves = facts.handover
    for code, name in enumerate(() if moves is None else moves.worker_names):
        assert moves is not None  # narrows: without hand-overs there is no name to go through
        rows = np.flatnonzero(moves.worker == code)
        counted = others_by_steps(facts.steps, name, moves.first_s[rows], moves.last_s[rows])
        out[rows] = np.where(np.isfinite(counted), counted, out[rows])
    return out


def _decoding_at(facts: Facts, at_s: F64) -> F64:
    """Sequences of the same worker that decoded at an instant of each request (engine's vantage where known), [n]."""
    r = facts.requests
    out = np.zeros(len(r))
    for worker in range(len(r.worker_names)):
        rows = np.flatnonzero((r.worker == worker) & np.isfinite(at_s) & np.isfinite(r.engine_first_s))
        first = np.sort(r.engine_first_s[rows])
        last = np.sort(np.where(np.isfinite(r.engine_last_s), r.engine_last_s, r.engine_first_s)[rows])
        out[rows] = np.searchsorted(first, at_s[rows], "right") - np.searchsorted(last, at_s[rows], "right")
        if beside_rate(r) < 1.0:
            counted = decoding_by_steps(facts.steps, r.worker_names[worker], at_s[rows])
            out[rows] = np.where(np.isfinite(counted), counted, out[rows] / beside_rate(r))
    return np.maximum(out, 0.0)
