"""`/metrics`: the engine's own names, and those of vLLM that dashboards and tools look for.

Invariant: a `vllm:` name stands for what it means in vLLM, measured here; what this engine cannot measure is absent. Two
things are said in vLLM's way so that its readers come to the right number: usage counts cached blocks that nobody uses as
free, and `num_gpu_blocks` is one more than there are (vLLM keeps a null block). Source of names, labels and bounds:
vLLM 0.33 `v1/metrics/loggers.py`. Children of labelled series are made once: a step adds a few numbers to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from engine_probe.adapters.vllm import OWN_INFO, PLUGIN_INFO
from engine_probe.engine.block_pool import Evicted, Seconds
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.executor import Executor
from engine_probe.engine.name_book import Names
from engine_probe.engine.sequence import Sequence
from engine_probe.recording.recorder import Recorder

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_S: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
RESIDENCY_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ENDS: Final = ("stop", "length", "abort", "error")


class MetricsPage:
    """The numbers of one engine; told by the engine's thread, rendered by any.

    facts         labels of the info series
    is_recorded   rows of this engine go to a sink: who follows it from outside leaves requests and steps to them
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        executor: Executor,
        facts: Mapping[str, object],
        recorder: Recorder,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model, "engine": "0"}
        self._last: dict[str, float] = {}
        self._recorder = recorder
        self._own(facts)
        if is_recorded:
            plugin = Gauge(PLUGIN_INFO, "Its rows are recorded already.", ["worker", "engine"], registry=self.registry)
            plugin.labels(worker=config.worker, engine="0").set(1)
        max_context = min(executor.max_context, executor.num_blocks * config.block_size)
        self._vllm(max_context)
        self._cache_config(config, executor, max_context)

    def render(self) -> bytes:
        """The page."""
        for kind, lost in self._recorder.lost.items():
            self._lost.labels(**self._labels, kind=kind).set(lost)
        return bytes(generate_latest(self.registry))

    # What happens, from the engine's thread

    def step(self, engine: Engine, num_output: int, duration_s: float | None = None) -> None:
        """A step ended (duration_s: None where none was taken): gauges, and what counters moved."""
        now = engine.flight.counters(engine)
        moved = {name: value - self._last.get(name, 0.0) for name, value in now.items()}
        self._last = now
        pool = engine.kv.pool
        self._running.set(engine.num_running)
        self._waiting.set(engine.num_waiting)
        self._capacity.set(engine.num_waiting)
        self._usage.set(now["kv_usage_ratio"])
        self._blocks_used.set(pool.num_referenced)
        self._blocks_cached.set(pool.num_cached)
        self._blocks_free.set(pool.num_blocks - pool.num_referenced - pool.num_cached)
        self._evictions.inc(moved["blocks_evicted_total"])
        self._preemptions.inc(moved["preemptions_total"])
        self._queries.inc(moved["prefix_queries_tokens_total"])
        self._hits.inc(moved["prefix_hits_tokens_total"])
        computed = moved["prompt_tokens_computed_total"]
        self._computed.inc(computed)
        self._output_tokens.inc(num_output)
        if duration_s is not None:
            self._step_tokens.observe(computed + num_output)
            self._step_seconds.observe(duration_s)

    def first_token(self, sequence: Sequence, at_ns: int) -> None:
        """Its prompt is computed."""
        self._ttft.observe(max(0, at_ns - sequence.arrival_ns) / 1e9)
        self._prompt_tokens.inc(sequence.num_prompt)
        self._cached_tokens.inc(sequence.num_cached)
        self._by_source["local_compute"].inc(sequence.num_prompt - sequence.num_cached)
        self._by_source["local_cache_hit"].inc(sequence.num_cached)

    def next_tokens(self, gap_s: float) -> None:
        """A running request got more, so long after what it got before."""
        self._itl.observe(gap_s)

    def ended(self, sequence: Sequence, reason: str, first_ns: int | None, last_ns: int | None, end_ns: int) -> None:
        """It ended: by a word of ENDS. Instants of its tokens: None where it got none."""
        self._ends[reason].inc()
        histograms = self._by_request
        histograms["request_prompt_tokens"].observe(sequence.num_prompt)
        histograms["request_generation_tokens"].observe(sequence.num_output)
        histograms["request_params_max_tokens"].observe(sequence.params.max_tokens)
        histograms["request_num_preemptions"].observe(sequence.num_preemptions)
        histograms["e2e_request_latency_seconds"].observe(max(0, end_ns - sequence.arrival_ns) / 1e9)
        if sequence.scheduled_ns is None:
            return
        histograms["request_queue_time_seconds"].observe(max(0, sequence.scheduled_ns - sequence.waits_since_ns) / 1e9)
        if first_ns is None or last_ns is None:
            return
        histograms["request_prefill_kv_computed_tokens"].observe(sequence.num_prompt - sequence.num_cached)
        histograms["request_prefill_time_seconds"].observe((first_ns - sequence.scheduled_ns) / 1e9)
        histograms["request_decode_time_seconds"].observe((last_ns - first_ns) / 1e9)
        histograms["request_inference_time_seconds"].observe((last_ns - sequence.scheduled_ns) / 1e9)
        if sequence.num_output > 1:
            tpot_s = (last_ns - first_ns) / 1e9 / (sequence.num_output - 1)
            histograms["request_time_per_output_token_seconds"].observe(tpot_s)

    def called(self, num_choices: int) -> None:
        """A call asked for so many choices of each prompt. From any thread."""
        self._choices.observe(num_choices)

    def refused(self) -> None:
        """A request that can never run. From any thread."""
        self._refusals.inc()

    def step_failed(self) -> None:
        """A step raised."""
        self._failures.inc()

    # KvListener

    def stored(self, sequence: Sequence, hashes: Names, parents: Names, first: int, at_ns: int) -> None:
        self._stored.inc(len(hashes))

    def hit(self, sequence: Sequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        """Counted in tokens, at admission."""

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        for age_s, idle_s in zip(blocks.age_s.tolist(), blocks.idle_s.tolist(), strict=True):
            self._lifetime.observe(age_s)
            self._idle.observe(idle_s)

    def cleared(self, at_ns: int) -> None:
        self._resets.inc()

    # Series

    def _own(self, facts: Mapping[str, object]) -> None:
        told = {name: str(value) for name, value in facts.items() if value is not None}
        info = Gauge(OWN_INFO, "What runs here.", sorted(told), registry=self.registry)
        info.labels(**told).set(1)
        blocks = self._gauge("kvscope_engine_kv_blocks", "KV blocks by what they hold: used, cached, free.", "state")
        self._blocks_used, self._blocks_cached, self._blocks_free = (
            blocks.labels(**self._labels, state=state) for state in ("used", "cached", "free")
        )
        self._evictions = self._counter("kvscope_engine_kv_block_evictions", "Cached blocks that were given up.")
        self._stored = self._counter("kvscope_engine_kv_blocks_stored", "Blocks that others could find from then on.")
        self._resets = self._counter("kvscope_engine_cache_resets", "Times that the prefix cache was reset.")
        self._computed = self._counter(
            "kvscope_engine_prompt_tokens_computed", "Prompt tokens computed, those after a preemption too."
        )
        self._refusals = self._counter("kvscope_engine_requests_refused", "Requests that can never run here.")
        self._failures = self._counter("kvscope_engine_steps_failed", "Steps that raised; their requests failed.")
        self._lost = self._gauge("kvscope_engine_recorder_lost_rows", "Rows that could not be recorded.", "kind")
        self._step_seconds = self._histogram("kvscope_engine_step_duration_seconds", "Length of a step.", STEP_S)

    def _vllm(self, max_context: int) -> None:
        self._running = self._one("vllm:num_requests_running", "Requests in the running set.")
        self._waiting = self._one("vllm:num_requests_waiting", "Requests that wait to be scheduled.")
        by_reason = self._gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", "reason")
        self._capacity = by_reason.labels(**self._labels, reason="capacity")
        self._usage = self._one("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is full.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests past their prefill.")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Of them, those found in the cache.")
        by_source = self._counters(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self._by_source = {
            source: by_source.labels(**self._labels, source=source) for source in ("local_compute", "local_cache_hit")
        }
        self._output_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("vllm:num_preemptions", "Times that a running request gave way.")
        ends = self._counters("vllm:request_success", "Requests that ended, by reason.", "finished_reason")
        self._ends = {reason: ends.labels(**self._labels, finished_reason=reason) for reason in ENDS}
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between outputs of a request.", ITL_S)
        self._choices = self._histogram("vllm:request_params_n", "Choices asked for.", (1, 2, 5, 10, 20))
        self._lifetime = self._histogram("vllm:kv_block_lifetime_seconds", "Stored to evicted.", RESIDENCY_S)
        self._idle = self._histogram("vllm:kv_block_idle_before_evict_seconds", "Last use to evicted.", RESIDENCY_S)
        tokens = one_two_five(max_context)
        bounds: dict[str, Items[float]] = {
            "request_prompt_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_params_max_tokens": tokens,
            "request_prefill_kv_computed_tokens": tokens,
            "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
            "request_time_per_output_token_seconds": ITL_S,
            "e2e_request_latency_seconds": LATENCY_S,
            "request_queue_time_seconds": LATENCY_S,
            "request_prefill_time_seconds": LATENCY_S,
            "request_decode_time_seconds": LATENCY_S,
            "request_inference_time_seconds": LATENCY_S,
        }
        self._by_request = {
            name: self._histogram(f"vllm:{name}", "Of each request that ended.", limits)
            for name, limits in bounds.items()
        }

    def _cache_config(self, config: EngineConfig, executor: Executor, max_context: int) -> None:
        num_blocks = executor.num_blocks
        size_tokens = num_blocks * config.block_size
        labels = {
            "engine": "0",
            "block_size": config.block_size,
            "cache_dtype": executor.worker_facts.get("kv_dtype"),
            "enable_prefix_caching": config.prefix_caching,
            "hash_block_size": config.block_size,
            "is_attention_free": False,
            "kv_cache_max_concurrency": size_tokens / max_context,
            "kv_cache_size_tokens": size_tokens,
            "num_gpu_blocks": num_blocks + 1,
            "prefix_caching_hash_algo": "blake2b",
            "sliding_window": None,
        }
        info = Gauge("vllm:cache_config_info", "Facts of the KV cache.", list(labels), registry=self.registry)
        info.labels(**{name: str(value) for name, value in labels.items()}).set(1)

    def _gauge(self, name: str, about: str, *more: str) -> Gauge:
        return Gauge(name, about, [*self._labels, *more], registry=self.registry)

    def _one(self, name: str, about: str) -> Any:
        return self._gauge(name, about).labels(**self._labels)

    def _counters(self, name: str, about: str, *more: str) -> Counter:
        return Counter(name, about, [*self._labels, *more], registry=self.registry)

    def _counter(self, name: str, about: str) -> Any:
        return self._counters(name, about).labels(**self._labels)

    def _histogram(self, name: str, about: str, bounds: Items[float]) -> Any:
        made = Histogram(name, about, list(self._labels), buckets=bounds, registry=self.registry)
        return made.labels(**self._labels)


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [step * power for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return bounds
