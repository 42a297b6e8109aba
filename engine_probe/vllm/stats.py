"""vLLM's in-process statistics objects -> rows of the contract, for the stat-logger plugin.

vLLM declares `SchedulerStats` and `IterationStats` unstable, so every attribute is read defensively: what this release
does not have is null, never zero. Nothing here imports vLLM or torch; everything is a function of the objects given.

Invariant: at the front end's clock, arrival + frontend_s + queue_s + prefill_s = first token, exactly. vLLM stamps
arrival and end on the front end's wall clock and the three phases on the engine core's monotonic clock; only
differences of the latter are used, so both hops between the two processes lie in `frontend_s`. Stalls after preemption
lie inside vLLM's prefill or decode time: it does not tell them apart. Source: vLLM 0.32.0 `v1/metrics/stats.py`,
`v1/core/sched/scheduler.py`; reference 4.6 for the other releases.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from engine_probe.adapters.vllm import normalise_request_id
from engine_probe.digits import whole_number
from engine_probe.vllm.facts import ENGINE, Geometry, attribute, seconds, whole, word

STATES: Final = {
    "stop": "finished",
    "length": "finished",
    "repetition": "finished",
    "abort": "aborted",
    "error": "failed",
}
MAX_OPEN: Final = 65_536
_REASONS_BY_NUMBER: Final = ("stop", "length", "abort", "error", "repetition")


class StepRows:
    """Builds `step` rows of one engine: numbers them and knows the step before."""

    def __init__(self, worker: str, geometry: Geometry) -> None:
        self._worker = worker
        self._geometry = geometry
        self._step = 0
        self._previous_ns: int | None = None
        self._previous_busy = False

    def row(self, scheduler_stats: Any, iteration_stats: Any, at_ns: int) -> dict[str, Any]:
        """One scheduler iteration that ended at `at_ns`.

        `duration_s` is the engine's own figure with `--enable-logging-iteration-details`; else the time since the step
        before, where that one left requests running or waiting (the engine loop does not pause then); else null.
        Preemptions are counted in the step in which the request produced a token again: vLLM reports them there.
        """
        geometry = self._geometry
        details = attribute(scheduler_stats, "iteration_details")
        running = whole(attribute(scheduler_stats, "num_running_reqs"))
        waiting = whole(attribute(scheduler_stats, "num_waiting_reqs"))
        deferred = whole(attribute(scheduler_stats, "num_skipped_waiting_reqs"))
        usage = attribute(scheduler_stats, "kv_cache_usage")
        if usage is None:
            usage = attribute(scheduler_stats, "gpu_cache_usage")  # up to 0.8
        used = used_bytes = None
        if geometry.num_blocks is not None and isinstance(usage, (int, float)) and 0 <= usage <= 1:
            used = round(usage * geometry.num_blocks)
            used_bytes = None if geometry.kv_bytes_per_block is None else used * geometry.kv_bytes_per_block
        duration = None if details is None else seconds(attribute(details, "elapsed_ms"))
        if duration is not None:
            duration /= 1000.0
        elif self._previous_busy and self._previous_ns is not None and at_ns >= self._previous_ns:
            duration = (at_ns - self._previous_ns) / 1e9
        recomputed = self._recomputed(scheduler_stats)
        row: dict[str, Any] = {
            "worker": self._worker,
            "at_ns": at_ns,
            "step": self._step,
            "duration_s": duration,
            "num_running": running,
            # vLLM keeps preempted requests in the same queue, so those waiting to go on are counted here too.
            "num_waiting_prefill": None if waiting is None else waiting + (deferred or 0),
            "waiting_on": None if waiting is None else {"unknown": waiting, "dependency": deferred},
            "prefill_tokens": self._prefill_tokens(iteration_stats, details, recomputed),
            "decode_tokens": self._iteration_count(iteration_stats, "num_generation_tokens"),
            "recomputed_tokens": recomputed,
            "num_preempted": self._iteration_count(iteration_stats, "num_preempted_reqs"),
            "blocks_total": geometry.num_blocks,
            "blocks_used": used,
            "kv_cache_bytes": used_bytes,
            "policy": geometry.policy,
        }
        if details is not None:
            prefills = whole(attribute(details, "num_ctx_requests"))
            decodes = whole(attribute(details, "num_generation_requests"))
            row["batch_size"] = None if prefills is None or decodes is None else prefills + decodes
        self._step += 1
        self._previous_ns = at_ns
        self._previous_busy = bool(running) or bool(waiting)
        return row

    def _iteration_count(self, iteration_stats: Any, name: str) -> int | None:
        # A step without outputs has no iteration_stats: nothing was generated or preempted that this front end sees.
        if self._geometry.num_frontends > 1:
            return None
        return 0 if iteration_stats is None else whole(attribute(iteration_stats, name))

    def _prefill_tokens(self, iteration_stats: Any, details: Any, recomputed: int | None) -> int | None:
        """Prompt tokens computed: exact with iteration details, else booked whole when the prompt is finished."""
        exact = None if details is None else whole(attribute(details, "num_ctx_tokens"))
        if exact is not None:
            return exact
        if self._geometry.num_frontends > 1:
            return None
        computed: int | None = 0
        if iteration_stats is not None:
            computed = whole(attribute(attribute(iteration_stats, "prompt_token_stats"), "computed"))
            if computed is None and self._geometry.prefix_caching is False:
                # The old count holds cached tokens too: there are none here.
                computed = whole(attribute(iteration_stats, "num_prompt_tokens"))
        return None if computed is None else computed + (recomputed or 0)

    def _recomputed(self, scheduler_stats: Any) -> int | None:
        """Tokens that preempted requests must compute again, booked when they are admitted again.

        Known only with prefix caching on: vLLM counts the look-ups of preempted requests, and what they did not find.
        """
        if self._geometry.prefix_caching is not True:
            return None
        local = attribute(scheduler_stats, "prefix_cache_stats")
        queries, hits = whole(attribute(local, "preempted_queries")), whole(attribute(local, "preempted_hits"))
        if queries is None or hits is None or hits > queries:
            return None
        connector = attribute(scheduler_stats, "connector_prefix_cache_stats")
        external = 0 if connector is None else whole(attribute(connector, "preempted_hits")) or 0
        return max(queries - hits - external, 0)


class FirstTokens:
    """When each open request's first token reached the front end.

    vLLM lists the times to first token of an iteration without names, but the iteration's stamp minus such a time is
    the request's arrival, and so is its end minus its latency: doubles of one binade, so both are exact and the same
    number is the key. Requests that share an arrival (n > 1) and not the first token's iteration are not told apart.
    """

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._stamps: OrderedDict[float, float | None] = OrderedDict()

    def note(self, iteration_stats: Any) -> None:
        """Take in the first tokens of one iteration; to be called before its finished requests are looked at."""
        stamp = attribute(iteration_stats, "iteration_timestamp")
        if not isinstance(stamp, float):
            return
        for ttft in attribute(iteration_stats, "time_to_first_tokens_iter") or ():
            arrival = stamp - ttft
            known = self._stamps.get(arrival, stamp)
            self._stamps[arrival] = stamp if known == stamp else None
        while len(self._stamps) > self._max_open:
            self._stamps.popitem(last=False)

    def of(self, arrival_s: float) -> float | None:
        """Wall-clock second of the first token of the request that arrived at `arrival_s`; None where unknown."""
        return self._stamps.get(arrival_s)


def request_rows(
    iteration_stats: Any, worker: str, geometry: Geometry, at_ns: int, first_tokens: FirstTokens | None = None
) -> list[dict[str, Any]]:
    """One `request` row for each request that finished in this iteration (see the module's invariant).

    A client that goes away is not among them: vLLM drops such a request without statistics. Without `first_tokens` the
    first token is the end minus the decode time: right to within the difference of two hops from core to front end.
    """
    stamp = attribute(iteration_stats, "iteration_timestamp")
    end_s = float(stamp) if isinstance(stamp, (int, float)) and stamp > 0 else None
    rows = []
    for one in attribute(iteration_stats, "finished_requests") or ():
        e2e, first_ns = seconds(attribute(one, "e2e_latency")), None
        if first_tokens is not None and end_s is not None and e2e is not None:
            first_s = first_tokens.of(end_s - e2e)
            first_ns = None if first_s is None else round(first_s * 1e9)
        row = _request_row(one, worker, geometry, at_ns if end_s is None else round(end_s * 1e9), first_ns)
        if row is not None:
            rows.append(row)
    return rows


def _request_row(
    finished: Any, worker: str, geometry: Geometry, end_ns: int, first_ns: int | None
) -> dict[str, Any] | None:
    reason = _reason(attribute(finished, "finish_reason"))
    prompt, cached = whole(attribute(finished, "num_prompt_tokens")), whole(attribute(finished, "num_cached_tokens"))
    output = whole(attribute(finished, "num_generation_tokens"))
    queue, prefill = seconds(attribute(finished, "queued_time")), seconds(attribute(finished, "prefill_time"))
    decode = seconds(attribute(finished, "decode_time"))
    e2e = seconds(attribute(finished, "e2e_latency"))
    if e2e is None:  # the wall clock was set back meanwhile: the engine core's own clock still tells all but the hops
        if queue is None or prefill is None or decode is None:
            return None
        e2e = queue + prefill + decode
    arrival_ns = end_ns - round(e2e * 1e9)
    engine_id = word(attribute(finished, "request_id"))
    row: dict[str, Any] = {
        "worker": worker,
        "at_ns": end_ns,
        # Up to 0.14 vLLM does not name the request: the row still counts, and joins nothing.
        "request_id": normalise_request_id(engine_id)
        if isinstance(engine_id, str) and engine_id
        else f"unnamed-{end_ns}",
        "vantage": "engine",
        "state": STATES.get(reason or "", "finished"),
        "engine": ENGINE,
        "model": geometry.model,
        "arrival_ns": arrival_ns,
        "end_ns": end_ns,
        "queue_s": queue,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_tokens_device": None if geometry.has_connector else cached,
        "computed_tokens": None if prompt is None or cached is None or cached > prompt else prompt - cached,
        "output_tokens": output,
        "num_preemptions": whole(attribute(finished, "num_preemptions")),
        "finish_reason": reason,
    }
    if engine_id is not None:
        row["labels"] = {"engine_request_id": engine_id}
    if output and decode is not None:
        if first_ns is None:
            first_ns = end_ns - round(decode * 1e9)
        row |= {"decode_s": decode, "first_token_ns": first_ns, "last_token_ns": end_ns}
        if prefill is not None:
            row |= {"prefill_s": prefill, "first_scheduled_ns": first_ns - round(prefill * 1e9)}
            if queue is not None:
                front = (first_ns - arrival_ns) / 1e9 - queue - prefill
                # Below zero only by the difference of two clocks: then it is noise, not a phase.
                row["frontend_s"] = front if front >= 0 else None
    return row


def _reason(value: Any) -> str | None:
    """vLLM's FinishReason (an int enum that prints its word), or a plain word."""
    if value is None:
        return None
    text = str(value).lower()
    number = whole_number(text, len(_REASONS_BY_NUMBER) - 1)
    if text.isdigit():
        return text if number is None else _REASONS_BY_NUMBER[number]
    return text.rpartition(".")[2]


def cache_was_reset(scheduler_stats: Any) -> bool:
    """True in the first step after somebody reset the prefix cache."""
    return attribute(attribute(scheduler_stats, "prefix_cache_stats"), "reset") is True
