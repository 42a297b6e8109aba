"""The one event contract: nine kinds of rows, and what every column means.

Everything else is derived from the tables below: Arrow schemas, the JSON decoder, validation, the store's columns, the
docs page, the fixtures. Time is UTC in int64 nanoseconds (`*_ns`); durations are seconds (`*_s`), sizes bytes, lengths
tokens or blocks, hashes uint64. **Unknown is null, never zero.** A changed meaning is a new column or a new contract
version with an upcaster beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CONTRACT_VERSION: Final = 1

Field = tuple[str, str]  # (name, scalar type) inside a struct


@dataclass(frozen=True, slots=True)
class Column:
    """One column of one kind.

    type      string | int64 | uint64 | float64 | bool, or list<scalar>, map<string,string>, struct, list<struct>
    fields    of a struct or list<struct>
    choices   the allowed words of a closed vocabulary (a null is always allowed unless `required`)
    signed    a number that may lie below zero; all others are counts, sizes, durations or ratios and may not
    """

    name: str
    type: str
    doc: str
    required: bool = False
    choices: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    signed: bool = False

    @property
    def unit(self) -> str | None:
        """Unit told by the name: a quantity carries its unit as suffix."""
        for suffix, unit in UNITS.items():
            if self.name.endswith(suffix):
                return unit
        return None


UNITS: Final = {
    "_per_token": "bytes/token",
    "_bytes": "bytes",
    "_bytes_total": "bytes",
    "_ns": "ns since 1970-01-01 UTC",
    "_s": "s",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_ratio": "ratio 0..1",
    "_util": "ratio 0..1",
    "sample_rate": "ratio 0..1",
}


def _c(
    name: str,
    type_: str,
    doc: str,
    *,
    required: bool = False,
    choices: str = "",
    fields: str = "",
    signed: bool = False,
) -> Column:
    pairs = tuple((part.split(":")[0], part.split(":")[1]) for part in fields.split())
    return Column(name, type_, doc, required, tuple(choices.split()), pairs, signed)


S, I, U, F, B = "string", "int64", "uint64", "float64", "bool"  # noqa: E741  # as short as a column of a table needs them
SPANS, MAP = "list<struct>", "map<string,string>"

COMMON: Final = (
    _c(
        "worker",
        S,
        "engine instance (one scheduler, one KV cache) the row speaks of; null where the vantage cannot tell",
    ),
    _c("at_ns", I, "instant of the row: end of the request or step, moment of the event", required=True),
    _c(
        "run_id", S, "name of the imported run or experiment arm; null for live data. Retention leaves named runs alone"
    ),
    _c("sample_rate", F, "share of such rows that the probe kept (0 < rate <= 1); null means all were kept"),
)

PHASES: Final = (
    "frontend",
    "tokenize",
    "queue",
    "cache_lookup",
    "kv_load",
    "kv_transfer",
    "handover",
    "alloc",
    "prefill",
    "first_sample",
    "decode",
    "stalled",
    "postprocess",
    "tail",
    "unexplained",
)
"""Phases of a request in order. Those up to `first_sample` (and stalls before the first token) are disjoint and sum to
t1 - t0 at the engine's vantage; overlap goes to the earlier phase; the residue is `unexplained`, never spread."""

_PHASE_DOC: Final = {
    "frontend": "HTTP, parsing and hand-over to the engine core",
    "tokenize": "tokenisation of the prompt",
    "queue": "waiting for the first schedule",
    "cache_lookup": "prefix-cache lookup",
    "kv_load": "loading KV from a slower tier",
    "kv_transfer": "bytes of KV on the wire between workers",
    "handover": "orchestration of a hand-over, without the wire",
    "alloc": "allocating and evicting KV blocks",
    "prefill": "computing the prompt",
    "first_sample": "sampling the first token",
    "decode": "first token to last token, stalls excluded",
    "stalled": "admitted but gaining nothing: preempted, swapped out, starved; after the first token also computed again",
    "postprocess": "detokenisation and formatting",
    "tail": "protocol tail: last content token to end of stream",
    "unexplained": "the residue that no phase owns",
}

REQUEST: Final = (
    _c("request_id", S, "id as the client sent it, route prefixes and engine suffixes removed", required=True),
    _c("attempt", I, "0 for the first try; a retry of the same request counts up"),
    _c("vantage", S, "who measured", required=True, choices="engine client router"),
    _c("state", S, "how it ended", required=True, choices="finished failed aborted rejected"),
    _c("engine", S, "engine name: vllm, sglang, llamacpp, kvscope, ..."),
    _c("model", S, "served model name"),
    _c("tenant", S, "who pays or owns"),
    _c("workload", S, "class of traffic: interactive, batch, code, ..."),
    _c("priority_class", S, "scheduling priority"),
    _c("route_id", S, "id of the routing decision"),
    _c("trace_id", S, "W3C trace id, 32 hex digits"),
    _c("generation_id", S, "id of this generation (n > 1 or retries give several)"),
    _c("session_id", S, "conversation"),
    _c("turn", I, "position in the conversation, from 0"),
    _c("labels", MAP, "product, feature, prompt template, phase=warmup, engine_request_id, ..."),
    _c("arrival_ns", I, "t0: arrival at this vantage", required=True),
    _c("first_scheduled_ns", I, "first step that worked on it began"),
    _c("first_token_ns", I, "t1: first token visible at this vantage"),
    _c("last_token_ns", I, "tN: last content token"),
    _c("end_ns", I, "tend: stream closed, or failure seen"),
    _c("token_ns", "list<int64>", "one instant a streamed chunk, ascending"),
    _c("token_counts", "list<int64>", "tokens in each chunk, parallel to token_ns; null where the vantage cannot tell"),
    *(_c(f"{phase}_s", F, _PHASE_DOC[phase]) for phase in PHASES),
    _c(
        "spans",
        SPANS,
        "every chunk, stall and resume in order; a phase may occur many times, its column is the sum",
        fields="phase:string start_ns:int64 end_ns:int64 tokens:int64",
    ),
    _c("prompt_tokens", I, "tokens of the prompt"),
    _c("cached_tokens", I, "prompt tokens served from any cache tier at first admission"),
    _c("cached_tokens_device", I, "of these, from device memory"),
    _c("cached_tokens_host", I, "of these, from host memory"),
    _c("cached_tokens_remote", I, "of these, from disk or another machine"),
    _c("self_hit_tokens", I, "tokens of its own that it found again after a preemption (never a prefix hit)"),
    _c("computed_tokens", I, "prompt tokens computed at first admission"),
    _c("recomputed_tokens", I, "tokens computed again after preemption"),
    _c("output_tokens", I, "tokens generated"),
    _c("draft_tokens", I, "tokens proposed by speculation"),
    _c("accepted_tokens", I, "of these, accepted"),
    _c("truncated_tokens", I, "prompt tokens cut off"),
    _c("truncation_side", S, "side that was cut", choices="left right"),
    _c("prompt_parts", SPANS, "where the prompt comes from", fields="origin:string tokens:int64"),
    _c("num_preemptions", I, "times it gave its blocks back while running"),
    _c("prefill_chunks", I, "steps that computed its prompt"),
    _c("prefix_hash", U, "chain hash of the prompt's shared prefix"),
    _c("finish_reason", S, "stop, length, abort, error, ..."),
    _c("http_status", I, "status the client got"),
    _c("error", S, "what went wrong, in the engine's or client's words, without content"),
    _c("retry_count", I, "retries the client or router made"),
    _c("fallback_reason", S, "why another model, route or tier served it"),
    _c("billable_units", F, "units billed", signed=True),
    _c("cost_center", S, "who is billed"),
    _c("prompt_blocks", "list<uint64>", "salted chain hash of every full prompt block, first block first"),
)

STEP: Final = (
    _c("step", I, "iteration number of this worker", required=True),
    _c("batch_id", S, "id of the batch"),
    _c("duration_s", F, "start to end of the iteration (start = at_ns - duration_s)"),
    _c("schedule_s", F, "scheduling"),
    _c("forward_s", F, "model forward"),
    _c("sample_s", F, "sampling"),
    _c("alloc_s", F, "allocating and evicting blocks"),
    _c("probe_s", F, "time the probe itself took"),
    _c("num_running", I, "requests in the batch"),
    _c("num_waiting_prefill", I, "requests waiting for their first schedule"),
    _c("num_waiting_decode", I, "admitted requests waiting to go on (preempted, handed over)"),
    _c(
        "waiting_on",
        "struct",
        "how many wait for what",
        fields="blocks:int64 budget:int64 seats:int64 dependency:int64 unknown:int64",
    ),
    _c("oldest_wait_s", F, "longest wait in the queue"),
    _c("prefill_tokens", I, "prompt tokens computed in this step"),
    _c("decode_tokens", I, "tokens generated in this step"),
    _c("recomputed_tokens", I, "of prefill_tokens, those computed again after preemption"),
    _c("num_preempted", I, "requests preempted in this step"),
    _c("blocks_total", I, "usable KV blocks"),
    _c("blocks_used", I, "blocks referenced by live requests"),
    _c("blocks_reserved", I, "blocks held back (watermark, in flight)"),
    _c("blocks_cached", I, "unreferenced blocks that still hold a reusable prefix"),
    _c("blocks_evicted", I, "cached blocks reclaimed in this step"),
    _c("kv_load_s", F, "loading KV from a slower tier in this step"),
    _c("wasted_slots", I, "token slots allocated but unused (last blocks, padding)"),
    _c("kv_cache_bytes", I, "bytes of KV held"),
    _c("batch_size", I, "sequences in the batch"),
    _c("max_seq_len", I, "longest sequence in the batch, tokens"),
    _c("padding_side", S, "padded side", choices="left right none"),
    _c("padding_ratio", F, "padded slots over all slots"),
    _c("attention_backend", S, "attention kernel"),
    _c("policy", S, "scheduling policy"),
    _c("gpu_util", F, "GPU busy share"),
    _c("memory_util", F, "GPU memory share in use"),
)

TIERS: Final = "device host disk remote"

BLOCK: Final = (
    _c(
        "change",
        S,
        "what happened",
        required=True,
        choices="stored hit evicted removed cleared loaded offloaded",
    ),
    _c("block_hash", U, "salted chain hash of the block (null for cleared)"),
    _c("parent_hash", U, "chain hash of the block before it; null for a first block"),
    _c("num_tokens", I, "tokens in the block"),
    _c("tier", S, "where it lives", choices=TIERS),
    _c("request_id", S, "request that caused it"),
    _c("reason", S, "why: capacity, ttl, reset, abort, self (a hit of a preempted request on its own blocks), ..."),
    _c("idle_s", F, "last use to this event"),
    _c("age_s", F, "stored to this event"),
    _c("reuse_count", I, "times it was hit"),
)

ROUTE: Final = (
    _c("request_id", S, "request routed", required=True),
    _c("router", S, "router instance"),
    _c("policy", S, "routing policy"),
    _c("chosen", S, "worker chosen"),
    _c("prefix_hash", U, "chain hash of the prefix it was matched on"),
    _c("decision_s", F, "time the decision took"),
    _c(
        "candidates",
        SPANS,
        "what the router believed of each worker when it chose",
        fields="worker:string matched_tokens:int64 load:float64 queue:float64 score:float64",
    ),
)

TRANSFER: Final = (
    _c("request_id", S, "request it was for"),
    _c("source_worker", S, "worker or tier that sent"),
    _c("target_worker", S, "worker that received"),
    _c("num_bytes", I, "bytes moved"),
    _c("attempts", I, "tries it took"),
    _c("outcome", S, "how it ended", choices="ok retried fell_back failed refused"),
    _c("reason", S, "why it was not plainly ok"),
    _c("wait_s", F, "orchestration before and around the wire"),
    _c("wire_s", F, "bytes on the wire"),
)

WORKER: Final = (
    _c("host", S, "machine"),
    _c("gpu_id", S, "accelerator"),
    _c("pool", S, "pool or deployment"),
    _c("role", S, "what it serves", choices="mixed prefill decode router"),
    _c("engine", S, "engine name"),
    _c("engine_version", S, "engine release"),
    _c("model", S, "served model"),
    _c("dtype", S, "weight type"),
    _c("kv_dtype", S, "KV cache type"),
    _c("block_size", I, "tokens in a KV block"),
    _c("num_blocks", I, "usable KV blocks"),
    _c("kv_bytes_per_block", I, "bytes of one block over all layers"),
    _c("weights_bytes", I, "bytes of weights"),
    _c("activation_peak_bytes", I, "highest activation memory"),
    _c("max_context", I, "longest sequence, tokens"),
    _c("tp", I, "tensor-parallel size"),
    _c("pp", I, "pipeline-parallel size"),
    _c("dp", I, "data-parallel size"),
    _c("flags", MAP, "settings by the engine's own names: max_num_seqs, max_num_batched_tokens, ..."),
    _c("chat_template_version", S, "version or hash of the chat template"),
    _c("prefix_caching", B, "prefix caching is on"),
)

CHECK: Final = (
    _c("batch_id", S, "batch checked"),
    _c("check", S, "what was checked", required=True, choices="sample_boundary mask position leakage"),
    _c("outcome", S, "result", required=True, choices="passed failed unknown"),
    _c("sample_ids", "list<string>", "samples in the batch"),
    _c("segment_ids", "list<int64>", "segment of each sample", signed=True),
    _c("document_boundary", S, "how documents are kept apart"),
    _c("eos_policy", S, "where end-of-sequence tokens are put"),
    _c("packing_version", S, "version of the packing code"),
    _c("attention_mask_hash", U, "hash of the attention mask"),
    _c("causal_mask_mode", S, "kind of causal mask"),
    _c("loss_mask_hash", U, "hash of the loss mask"),
    _c("ignore_index", I, "label that the loss ignores", signed=True),
    _c("position_ids_strategy", S, "how positions restart"),
    _c("truncation_side", S, "side that is cut", choices="left right"),
    _c("chat_template_version", S, "version or hash of the chat template"),
    _c("leakage_test_result", S, "whether one sample could see another"),
)

SAMPLE: Final = (
    _c("name", S, "canonical name (see CANONICAL_SAMPLES), or the wire name", required=True),
    _c("labels", MAP, "labels; `wire` keeps the name on the wire"),
    _c("value", F, "the number", required=True, signed=True),
)

MARK: Final = (
    _c(
        "mark",
        S,
        "what people should see on a time axis",
        required=True,
        choices="config_changed deployed canary experiment fault cache_reset worker_up worker_down clock gap",
    ),
    _c("subject", S, "worker, source, setting or tenant it is about"),
    _c("text", S, "one sentence"),
    _c("attrs", MAP, "facts: old, new, dropped_rows, first_seq, last_seq, offset_s, ..."),
)

KINDS: Final[dict[str, tuple[Column, ...]]] = {
    "request": COMMON + REQUEST,
    "step": COMMON + STEP,
    "block": COMMON + BLOCK,
    "route": COMMON + ROUTE,
    "transfer": COMMON + TRANSFER,
    "worker": COMMON + WORKER,
    "check": COMMON + CHECK,
    "sample": COMMON + SAMPLE,
    "mark": COMMON + MARK,
}

KIND_DOC: Final = {
    "request": "one finished, failed, aborted or rejected request at one vantage",
    "step": "one scheduler iteration",
    "block": "something happened to KV blocks",
    "route": "one routing decision",
    "transfer": "one KV hand-over or tier load",
    "worker": "a slow fact of a worker changed",
    "check": "an integrity check of one batch",
    "sample": "one scraped or measured number",
    "mark": "something people should see on a time axis",
}

DROP_ORDER: Final = ("block", "sample", "route", "step", "check", "transfer", "worker", "mark", "request")
"""What overload drops first; requests last."""

HOST_SAMPLES: Final[dict[str, str]] = {
    "gpu_util": "share of the time in which the GPU was busy, 0 to 1",
    "gpu_power_watts": "power drawn",
    "gpu_power_limit_watts": "power it may draw",
    "gpu_throttled": "1 while its clocks are held down for `labels.reason`, else 0",
    "gpu_throttled_seconds_total": "time in which its clocks were held down for `labels.reason`",
    "gpu_clock_hertz": "clock of its multiprocessors",
    "gpu_temperature_celsius": "temperature of the GPU",
    "gpu_memory_temperature_celsius": "temperature of its memory",
    "gpu_memory_used_bytes": "memory in use",
    "gpu_xid": "code of the last XID error since the driver was loaded; 0: none",
    "gpu_xid_errors_total": "XID errors with the code `labels.xid`",
    "cpu_util": "share of the CPU time it may use that was used, 0 to 1 (a host: all CPUs; a container: its quota)",
    "cpu_throttled_seconds_total": "time for which threads were held back by the CPU quota, summed over threads",
    "cpu_throttled_periods_total": "quota periods in which it was held back",
    "cpu_periods_total": "quota periods in which it wanted to run",
    "cpu_thermal_throttles_total": "times a CPU package lowered its clock for heat",
    "cpu_pressure_seconds_total": "time in which at least one task waited for a CPU (PSI some)",
    "memory_pressure_seconds_total": "time in which at least one task waited for memory (PSI some)",
    "memory_stalled_seconds_total": "time in which every task waited for memory (PSI full)",
    "memory_available_ratio": "memory that can be had without swapping, of all (a container: of its limit)",
    "oom_kills_total": "processes killed for want of memory",
    "io_pressure_seconds_total": "time in which at least one task waited for a disk (PSI some)",
    "network_received_bytes_total": "bytes received by `labels.device`",
    "network_sent_bytes_total": "bytes sent by `labels.device`",
    "network_errors_total": "frames lost to errors on `labels.device`, by `labels.direction`",
    "network_drops_total": "frames dropped on `labels.device`, by `labels.direction`",
    "network_speed_bytes": "bytes a second that `labels.device` can carry each way",
    "tcp_sent_segments_total": "TCP segments sent, those sent again among them",
    "tcp_resent_segments_total": "TCP segments sent again",
}
"""Names of what a host or a GPU tells, and their meaning. `labels.host` and `labels.gpu` say which, where it is told."""

CANONICAL_SAMPLES: Final = (
    *"""requests_running requests_waiting kv_usage_ratio prefix_queries_tokens_total prefix_hits_tokens_total
    external_queries_tokens_total external_hits_tokens_total preemptions_total prompt_tokens_total
    prompt_tokens_computed_total prompt_tokens_cached_total output_tokens_total requests_finished_total
    requests_failed_total blocks_evicted_total tier_read_bytes_total tier_written_bytes_total router_load
    draft_tokens_total accepted_tokens_total""".split(),  # noqa: SIM905  # a list of words reads better so
    *HOST_SAMPLES,
)
"""Names that mean the same whatever the engine. Histograms are `name_bucket`, `name_sum`, `name_count`."""


def column(kind: str, name: str) -> Column:
    """The column `name` of `kind`; KeyError where either is unknown."""
    for candidate in KINDS[kind]:
        if candidate.name == name:
            return candidate
    raise KeyError(f"{kind} has no column {name}")


def column_names(kind: str) -> tuple[str, ...]:
    """Names of the columns of `kind`, in their order."""
    return tuple(c.name for c in KINDS[kind])
