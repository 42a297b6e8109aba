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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from engine_probe.adapters.vllm import normalise_request_id

ENGINE: Final = "vllm"
STATES: Final = {
    "stop": "finished",
    "length": "finished",
    "repetition": "finished",
    "abort": "aborted",
    "error": "failed",
}
MAX_OPEN: Final = 65_536
_REASONS_BY_NUMBER: Final = ("stop", "length", "abort", "error", "repetition")
SHOWN_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "scheduler_config": (
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "max_num_partial_prefills"),
        *("long_prefill_token_threshold", "policy", "async_scheduling", "stream_interval", "watermark"),
    ),
    "cache_config": (
        *("gpu_memory_utilization", "num_gpu_blocks_override", "enable_prefix_caching", "prefix_caching_hash_algo"),
        *("cache_dtype", "kv_cache_memory_bytes", "kv_offloading_size", "kv_offloading_backend", "num_gpu_blocks"),
        *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
    ),
    "model_config": ("enforce_eager", "quantization", "max_model_len"),
    "kv_transfer_config": ("kv_connector", "kv_role"),
    "speculative_config": ("method", "num_speculative_tokens"),
    "observability_config": ("kv_cache_metrics", "kv_cache_metrics_sample", "enable_logging_iteration_details"),
    "parallel_config": ("distributed_executor_backend", "data_parallel_size", "_api_process_count"),
}
"""Settings kept in `worker.flags`, by vLLM's own names; paths, tokens and host names are not among them."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a step row needs to know of the KV cache. None is unknown.

    num_blocks            usable blocks of this engine (vLLM keeps one of its blocks as the null block)
    kv_bytes_per_block    bytes of one block over all layers and ranks
    prefix_caching        on or off
    has_connector         a KV connector (offload, transfer) may serve cached tokens from elsewhere than the device
    num_frontends         API-server processes: above 1 each sees only its own requests' tokens
    """

    num_blocks: int | None = None
    kv_bytes_per_block: int | None = None
    prefix_caching: bool | None = None
    has_connector: bool = False
    num_frontends: int = 1
    policy: str | None = None
    model: str | None = None


def read(source: Any, path: str) -> Any:
    """`source.a.b` for path "a.b"; None where anything on the way is absent or raises."""
    for name in path.split("."):
        try:
            source = getattr(source, name)
        except Exception:  # properties of foreign objects may raise anything
            return None
        if source is None:
            return None
    return source


def whole(value: Any) -> int | None:
    """A count as int: 3 and 3.0 are 3; bools, negatives (vLLM's "unknown"), NaN and other types are None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value >= 0 and value == value and value != float("inf") else None


def seconds(value: Any) -> float | None:
    """A duration; None where negative: vLLM subtracts from stamps that were never set (a request that never ran)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0.0 <= value < 1e9 else None


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
        details = read(scheduler_stats, "iteration_details")
        running, waiting = (
            whole(read(scheduler_stats, "num_running_reqs")),
            whole(read(scheduler_stats, "num_waiting_reqs")),
        )
        deferred = whole(read(scheduler_stats, "num_skipped_waiting_reqs"))
        usage = read(scheduler_stats, "kv_cache_usage")
        if usage is None:
            usage = read(scheduler_stats, "gpu_cache_usage")  # up to 0.8
        used = None
        if geometry.num_blocks is not None and isinstance(usage, (int, float)) and 0 <= usage <= 1:
            used = round(usage * geometry.num_blocks)
        duration = seconds(read(details, "elapsed_ms"))
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
            "decode_tokens": self._decode_tokens(iteration_stats),
            "recomputed_tokens": recomputed,
            "num_preempted": self._iteration_count(iteration_stats, "num_preempted_reqs"),
            "blocks_total": geometry.num_blocks,
            "blocks_used": used,
            "kv_cache_bytes": None
            if used is None or geometry.kv_bytes_per_block is None
            else used * geometry.kv_bytes_per_block,
            "policy": geometry.policy,
        }
        if details is not None:
            parts = (whole(read(details, "num_ctx_requests")), whole(read(details, "num_generation_requests")))
            row["batch_size"] = None if None in parts else sum(p for p in parts if p is not None)
        self._step += 1
        self._previous_ns = at_ns
        self._previous_busy = bool(running) or bool(waiting)
        return row

    def _iteration_count(self, iteration_stats: Any, name: str) -> int | None:
        # A step without outputs has no iteration_stats: nothing was generated or preempted that this front end sees.
        if self._geometry.num_frontends > 1:
            return None
        return 0 if iteration_stats is None else whole(read(iteration_stats, name))

    def _decode_tokens(self, iteration_stats: Any) -> int | None:
        return self._iteration_count(iteration_stats, "num_generation_tokens")

    def _prefill_tokens(self, iteration_stats: Any, details: Any, recomputed: int | None) -> int | None:
        """Prompt tokens computed: exact with iteration details, else booked whole when the prompt is finished."""
        exact = whole(read(details, "num_ctx_tokens"))
        if exact is not None:
            return exact
        if self._geometry.num_frontends > 1:
            return None
        computed: int | None = 0
        if iteration_stats is not None:
            computed = whole(read(iteration_stats, "prompt_token_stats.computed"))
            if computed is None and self._geometry.prefix_caching is False:
                computed = whole(read(iteration_stats, "num_prompt_tokens"))  # counts cached tokens too: none here
        return None if computed is None else computed + (recomputed or 0)

    def _recomputed(self, scheduler_stats: Any) -> int | None:
        """Tokens that preempted requests must compute again, booked when they are admitted again.

        Known only with prefix caching on: vLLM counts the look-ups of preempted requests, and what they did not find.
        """
        queries = whole(read(scheduler_stats, "prefix_cache_stats.preempted_queries"))
        hits = whole(read(scheduler_stats, "prefix_cache_stats.preempted_hits"))
        if queries is None or hits is None or self._geometry.prefix_caching is not True or hits > queries:
            return None
        external = whole(read(scheduler_stats, "connector_prefix_cache_stats.preempted_hits")) or 0
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
        stamp = read(iteration_stats, "iteration_timestamp")
        if not isinstance(stamp, float):
            return
        for ttft in read(iteration_stats, "time_to_first_tokens_iter") or ():
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
    stamp = read(iteration_stats, "iteration_timestamp")
    end_s = float(stamp) if isinstance(stamp, (int, float)) and stamp > 0 else None
    rows = []
    for one in read(iteration_stats, "finished_requests") or ():
        e2e, first_ns = seconds(read(one, "e2e_latency")), None
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
    reason = _reason(read(finished, "finish_reason"))
    prompt, cached = whole(read(finished, "num_prompt_tokens")), whole(read(finished, "num_cached_tokens"))
    output = whole(read(finished, "num_generation_tokens"))
    queue, prefill = seconds(read(finished, "queued_time")), seconds(read(finished, "prefill_time"))
    decode = seconds(read(finished, "decode_time"))
    e2e = seconds(read(finished, "e2e_latency"))
    if e2e is None:  # the wall clock was set back meanwhile: the engine core's own clock still tells all but the hops
        if queue is None or prefill is None or decode is None:
            return None
        e2e = queue + prefill + decode
    arrival_ns = end_ns - round(e2e * 1e9)
    engine_id = _word(read(finished, "request_id"))
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
        "num_preemptions": whole(read(finished, "num_preemptions")),
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
    if text.isdigit():
        return _REASONS_BY_NUMBER[int(text)] if int(text) < len(_REASONS_BY_NUMBER) else text
    return text.rpartition(".")[2]


def cache_was_reset(scheduler_stats: Any) -> bool:
    """True in the first step after somebody reset the prefix cache."""
    return read(scheduler_stats, "prefix_cache_stats.reset") is True


def geometry_of(config: Any) -> Geometry:
    """Geometry from vLLM's config object, after the KV cache was sized."""
    return Geometry(
        num_blocks=_usable_blocks(config),
        kv_bytes_per_block=_bytes_per_block(config),
        prefix_caching=_flag(read(config, "cache_config.enable_prefix_caching")),
        has_connector=read(config, "kv_transfer_config.kv_connector") is not None
        or read(config, "cache_config.kv_offloading_size") is not None,
        num_frontends=whole(read(config, "parallel_config._api_process_count")) or 1,
        policy=_word(read(config, "scheduler_config.policy")),
        model=_served_name(config),
    )


def worker_row(
    config: Any, worker: str, geometry: Geometry, *, version: str | None, host: str, at_ns: int
) -> dict[str, Any]:
    """The `worker` row: version, geometry, parallelism and the settings that matter, in vLLM's own names."""
    flags = {}
    for part, names in SHOWN_FLAGS.items():
        for name in names:
            value = read(config, f"{part}.{name}")
            if isinstance(value, (str, int, float, bool)):
                flags[name.lstrip("_")] = str(value)
    kv_role = str(read(config, "kv_transfer_config.kv_role"))
    return {
        "worker": worker,
        "at_ns": at_ns,
        "host": host,
        "role": {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role, "mixed"),
        "engine": ENGINE,
        "engine_version": version,
        "model": geometry.model,
        "dtype": _dtype(read(config, "model_config.dtype")),
        "kv_dtype": _kv_dtype(config),
        "block_size": whole(read(config, "cache_config.block_size")),
        "num_blocks": geometry.num_blocks,
        "kv_bytes_per_block": geometry.kv_bytes_per_block,
        "max_context": whole(read(config, "model_config.max_model_len")),
        "tp": whole(read(config, "parallel_config.tensor_parallel_size")),
        "pp": whole(read(config, "parallel_config.pipeline_parallel_size")),
        "dp": whole(read(config, "parallel_config.data_parallel_size")),
        "flags": flags,
        "prefix_caching": geometry.prefix_caching,
    }


def _usable_blocks(config: Any) -> int | None:
    """Usable blocks of one engine. vLLM sums the blocks of all data-parallel engines that a front end manages."""
    total = whole(read(config, "cache_config.num_gpu_blocks"))
    engines = whole(read(config, "parallel_config.data_parallel_size")) or 1
    if read(config, "parallel_config.data_parallel_external_lb") is True:
        engines = 1
    elif read(config, "parallel_config.data_parallel_hybrid_lb") is True:
        engines = whole(read(config, "parallel_config.data_parallel_size_local")) or engines
    if not total or total % engines:
        return None
    return total // engines - 1


def _bytes_per_block(config: Any) -> int | None:
    """2 * layers * KV heads * head size * bytes * block size, for plain attention in every layer; else null."""
    model, parallel = read(config, "model_config"), read(config, "parallel_config")
    if any(read(model, name) is not False for name in ("use_mla", "is_hybrid", "is_attention_free")):
        return None
    layer_types = read(model, "hf_text_config.layer_types")
    if (layer_types and set(layer_types) != {"full_attention"}) or _call(model, "get_sliding_window") is not None:
        return None
    element = _element_bytes(config)
    layers, block_size = _call(model, "get_total_num_hidden_layers"), whole(read(config, "cache_config.block_size"))
    if layers is None:
        layers = read(model, "hf_text_config.num_hidden_layers")
    heads, head_size = _call(model, "get_num_kv_heads", parallel), _call(model, "get_head_size")
    ranks = whole(read(parallel, "tensor_parallel_size")) or 1
    numbers = [whole(n) for n in (layers, heads, head_size, element, block_size)]
    if any(not n for n in numbers):
        return None
    product = 2 * ranks
    for number in numbers:
        assert number is not None
        product *= number
    return product


def _element_bytes(config: Any) -> int | None:
    cache = str(read(config, "cache_config.cache_dtype") or "auto")
    if cache == "auto":
        return whole(read(config, "model_config.dtype.itemsize"))
    if cache.startswith("fp8") or cache == "int8":
        return 1
    return {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4}.get(cache)


def _kv_dtype(config: Any) -> str | None:
    cache = _word(read(config, "cache_config.cache_dtype"))
    return _dtype(read(config, "model_config.dtype")) if cache in (None, "auto") else cache


def _dtype(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _served_name(config: Any) -> str | None:
    name = read(config, "model_config.served_model_name")
    if isinstance(name, (list, tuple)):
        name = name[0] if name else None
    return _word(name)


def _call(target: Any, method: str, *arguments: Any) -> Any:
    function: Callable[..., Any] | None = read(target, method)
    try:
        return None if function is None else function(*arguments)
    except Exception:  # a foreign method that changed its arguments
        return None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
