"""Every name on the collector's `/metrics`, once: type, labels, meaning. `/metrics`, dashboards, alerts and docs read it here.

Idea: a `Family` is a name that carries its unit; who exposes it and who asks for it take the same object, so a renamed
metric is one edit and a misspelt one does not import. Invariants: names start with `kvscope_`, durations are seconds,
counters end in `_total`, ratios lie in 0 to 1, every label is bounded (`BOUNDED`). What no row told has no series, and a
label whose value is not known is empty, which Prometheus holds to be the same as absent: unknown is never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Type = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `name` is what a query says (a counter's with `_total`, a histogram's without a suffix)."""

    name: str
    type: Type
    labels: tuple[str, ...]
    doc: str

    @property
    def bucket(self) -> str:
        """Name of a histogram's buckets."""
        return self._part("bucket")

    @property
    def sum(self) -> str:
        """Name of a histogram's sum."""
        return self._part("sum")

    @property
    def count(self) -> str:
        """Name of a histogram's count."""
        return self._part("count")

    def _part(self, suffix: str) -> str:
        if self.type != "histogram":
            raise ValueError(f"{self.name} is a {self.type} and has no _{suffix}")
        return f"{self.name}_{suffix}"


BOUNDED: Final = {
    "vantage": "engine, client",
    "worker": "KVSCOPE_METRICS__MAX_SERIES workers and models, later ones are `other`; gauges: of the first 1,000",
    "model": "as worker",
    "hit": "hit, partial, miss; empty: not known (no block size, or no cached tokens told)",
    "reused": "some, none",
    "state": "of a request: finished, failed, aborted, rejected; of a KV block: used, cached, free",
    "status": "HTTP status codes; empty: not told",
    "reason": "a closed list; of refused batches the names of the errors",
    "slo": "names of SLOs of the settings",
    "outcome": "of an SLO: met, missed; of a transfer: ok, retried, fell_back, failed, refused",
    "tenant": "the KVSCOPE_METRICS__TOP_TENANTS largest; the rest is `other`; empty: not told",
    "prefix": "the KVSCOPE_METRICS__TOP_PREFIXES most asked for, as 16 hex digits; the rest is `other`",
    "tier": "device, host, disk, remote; of hits device, host, remote",
    "queue": "prefill (waiting for the first schedule), decode (admitted, waiting to go on); empty: a scraped engine, which does not say",
    "on": "what a request in the queue waits for: blocks, budget, seats, dependency, unknown",
    "part": "schedule, alloc, forward, sample, kv_load, probe",
    "phase": "prefill, decode, recompute",
    "change": "stored, hit, evicted, removed, cleared, loaded, offloaded",
    "kind": "kinds of rows of the event contract; of hotspots their kinds",
    "policy": "routing policies, at most 20",
    "cause": "rows of the ledger (docs/method.md)",
    "metric": "ttft, e2e",
    "check": "checks of data quality (docs/diagnosis.md); of looks the evaluator's checks",
    "mark": "kinds of marks of the event contract",
    "source": "KVSCOPE_METRICS__MAX_SOURCES senders; later ones are `other`",
    "result": "a closed list",
    "column": "at most 100 columns that the contract does not know",
    "route": "routes of the API, `sql`, `judging`, `/metrics` and pages",
    "version": "one",
    "receiver": "names of receivers of the settings' file",
}
"""Label -> what bounds its values."""

REQUEST_LABELS: Final = ("vantage", "worker", "model")

LATENCY_BOUNDS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds (s) of the latency histograms: from one token of a small model to a long batch answer."""
BLOCK_BOUNDS_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0)
"""Of the life of KV blocks, which may lie unused for hours."""
COUNT_BOUNDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Of requests in a batch."""
TOKEN_BOUNDS: Final = (1.0, 4.0, 16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)
"""Of tokens in a batch."""


def le(bound: float, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> str:
    """The label `le` of a bucket; ValueError for a bound that the histograms do not have."""
    if bound not in bounds:
        raise ValueError(f"there is no bucket up to {bound}; there are {', '.join(map(str, bounds))}")
    return repr(float(bound))


def _counter(name: str, doc: str, *labels: str) -> Family:
    return Family(f"kvscope_{name}_total", "counter", labels, doc)


def _gauge(name: str, doc: str, *labels: str) -> Family:
    return Family(f"kvscope_{name}", "gauge", labels, doc)


def _histogram(name: str, doc: str, *labels: str) -> Family:
    return Family(f"kvscope_{name}", "histogram", labels, doc)


# Requests, from their rows: the engine's view where a model has one, else the client's

_BY = REQUEST_LABELS
TTFT: Final = _histogram("time_to_first_token_seconds", "arrival to first token (TTFT)", *_BY, "hit")
ITL: Final = _histogram(
    "inter_token_latency_seconds", "gap between neighbouring tokens of a request (ITL)", *_BY, "hit"
)
TPOT: Final = _histogram(
    "time_per_output_token_seconds",
    "(last - first token) / (output tokens - 1), one a request (TPOT)",
    *_BY,
    "hit",
)
E2E: Final = _histogram("request_latency_seconds", "arrival to last token (E2E)", *_BY, "hit")
QUEUE: Final = _histogram("queue_seconds", "waiting for the first schedule", *_BY, "hit")
PREFILL: Final = _histogram("prefill_seconds", "computing the prompt", *_BY, "hit")
CACHE_LOOKUP: Final = _histogram("cache_lookup_seconds", "looking the prompt up in the prefix cache", *_BY, "hit")

REQUESTS: Final = _counter("requests", "requests by how they ended", *_BY, "state")
REQUEST_ERRORS: Final = _counter(
    "request_errors",
    "requests that did not finish, by HTTP status and reason: timeout, too_many_requests, aborted, server_error, "
    "client_error, rejected, failed",
    *_BY,
    "status",
    "reason",
)
SLO_REQUESTS: Final = _counter(
    "slo_requests",
    "requests by whether they finished within every limit of their SLO; the rate of `met` is goodput",
    *_BY,
    "slo",
    "outcome",
)
PROMPT_TOKENS: Final = _counter("prompt_tokens", "prompt tokens of ended requests", *_BY)
OUTPUT_TOKENS: Final = _counter("output_tokens", "tokens generated", *_BY)
COMPUTED_TOKENS: Final = _counter("computed_tokens", "prompt tokens computed at first admission", *_BY)
RECOMPUTED_TOKENS: Final = _counter("recomputed_tokens", "tokens computed again after a preemption", *_BY)
PREEMPTIONS: Final = _counter("preemptions", "times a running request gave its blocks back", *_BY)
SELF_HIT_TOKENS: Final = _counter(
    "self_hit_tokens", "tokens of its own that a preempted request found again; never a prefix hit", *_BY
)
DRAFT_TOKENS: Final = _counter("draft_tokens", "tokens proposed by speculation", *_BY)
ACCEPTED_TOKENS: Final = _counter("accepted_tokens", "of these, accepted", *_BY)

CACHE_REQUESTS: Final = _counter(
    "cache_requests",
    "requests whose cached tokens are known, by `reused` (some, none): the request hit rate is some / all",
    *_BY,
    "reused",
)
CACHE_PROMPT_TOKENS: Final = _counter(
    "cache_prompt_tokens", "their prompt tokens: the denominator of the token hit rate", *_BY
)
PREFIX_HIT_TOKENS: Final = _counter(
    "prefix_hit_tokens", "prompt tokens served from cached blocks (reused tokens)", *_BY
)
TIER_HIT_TOKENS: Final = _counter(
    "tier_hit_tokens", "of these, by the tier they came from, where the engine splits them", *_BY, "tier"
)

TENANT_TTFT: Final = _histogram(
    "tenant_time_to_first_token_seconds", "TTFT of the largest tenants", "vantage", "model", "tenant"
)
TENANT_REQUESTS: Final = _counter("tenant_requests", "their requests", "vantage", "model", "tenant", "state")
TENANT_SLO_REQUESTS: Final = _counter(
    "tenant_slo_requests", "their requests by SLO", "vantage", "model", "tenant", "outcome"
)
TENANT_PROMPT_TOKENS: Final = _counter("tenant_prompt_tokens", "their prompt tokens", "vantage", "model", "tenant")
TENANT_HIT_TOKENS: Final = _counter(
    "tenant_prefix_hit_tokens", "their prompt tokens that were served from cached blocks", "vantage", "model", "tenant"
)
TENANT_OUTPUT_TOKENS: Final = _counter("tenant_output_tokens", "their output tokens", "vantage", "model", "tenant")

HOT_PREFIX_REQUESTS: Final = _counter(
    "hot_prefix_requests", "requests of the prefixes most asked for, by the worker that served them", "worker", "prefix"
)
HOT_PREFIX_PROMPT_TOKENS: Final = _counter("hot_prefix_prompt_tokens", "their prompt tokens", "worker", "prefix")
HOT_PREFIX_HIT_TOKENS: Final = _counter(
    "hot_prefix_hit_tokens", "of these, served from cached blocks", "worker", "prefix"
)

# The engine's scheduler, from its steps

REQUESTS_RUNNING: Final = _gauge("requests_running", "requests in the batch of the newest step", "worker")
REQUESTS_WAITING: Final = _gauge(
    "requests_waiting",
    "newest step: requests that wait for their first schedule (prefill), and admitted ones that wait to go on (decode)",
    "worker",
    "queue",
)
WAITING_ON: Final = _gauge("requests_waiting_on", "newest step: waiting requests by what they wait for", "worker", "on")
OLDEST_WAIT: Final = _gauge("oldest_wait_seconds", "longest wait in the queue, newest step", "worker")
NEWEST_STEP: Final = _gauge(
    "newest_step_timestamp_seconds",
    "instant of the newest step (of an engine that is only scraped: sample), as Unix time; the gauges of a worker are as old",
    "worker",
)
STEP: Final = _histogram("step_seconds", "length of scheduler steps", "worker")
STEP_PART: Final = _counter(
    "step_part_seconds", "time of steps by what it went into; alloc: finding room, probe: recording", "worker", "part"
)
STEP_TOKENS: Final = _counter(
    "step_tokens", "tokens of steps: prefill (without those computed again), decode, recompute", "worker", "phase"
)
BATCH_REQUESTS: Final = _histogram("batch_requests", "requests in the batch of a step", "worker")
BATCH_TOKENS: Final = _histogram("batch_tokens", "tokens in the batch of a step, prefill and decode", "worker")
CHUNK_TOKENS: Final = _histogram("chunk_tokens", "prompt tokens computed in a step that computed any", "worker")
STEP_PREEMPTIONS: Final = _counter("step_preemptions", "requests preempted, as steps tell it", "worker")
GPU_UTILIZATION: Final = _gauge("gpu_utilization_ratio", "newest step: share of the time the GPU was busy", "worker")
GPU_MEMORY: Final = _gauge("gpu_memory_utilization_ratio", "newest step: share of GPU memory in use", "worker")

# KV blocks, from steps and block events

KV_BLOCKS: Final = _gauge(
    "kv_blocks",
    "newest step: blocks used by live requests, cached (unreferenced, reusable), free; they sum to the capacity",
    "worker",
    "state",
)
KV_CAPACITY: Final = _gauge("kv_capacity_blocks", "usable KV blocks", "worker")
KV_RESERVED: Final = _gauge(
    "kv_reserved_blocks", "newest step: blocks held back (watermark, in flight); not a state of its own", "worker"
)
KV_USAGE: Final = _gauge("kv_usage_ratio", "blocks of live requests over all usable ones, newest step", "worker")
KV_WASTED_SLOTS: Final = _gauge("kv_wasted_slots", "newest step: token slots allocated and unused", "worker")
KV_FRAGMENTATION: Final = _gauge(
    "kv_fragmentation_ratio", "wasted slots over the slots of used blocks (needs the block size)", "worker"
)
BLOCK_EVICTIONS: Final = _counter(
    "block_evictions",
    "cached KV blocks reclaimed, as told by rows of this kind: one of them, never their sum",
    "worker",
    "kind",
)
BLOCK_CHANGES: Final = _counter("block_changes", "what happened to KV blocks", "worker", "change", "tier")
BLOCK_CHANGE_TOKENS: Final = _counter(
    "block_change_tokens", "tokens in these blocks, where told", "worker", "change", "tier"
)
PREMATURE_EVICTIONS: Final = _counter(
    "premature_evictions", "evicted blocks that the same worker had to compute and store again", "worker"
)
PREMATURE_EVICTION_TOKENS: Final = _counter("premature_eviction_tokens", "tokens in these blocks, where told", "worker")
BLOCK_SELF_HITS: Final = _counter(
    "block_self_hits", "hits of preempted requests on blocks of their own; never prefix hits", "worker"
)
BLOCK_RESIDENCE: Final = _histogram(
    "block_residence_seconds", "age of blocks when they were evicted: how long the cache keeps", "worker"
)
BLOCK_REUSE_GAP: Final = _histogram(
    "block_reuse_gap_seconds",
    "time from one use of a block to the next, evicted in between or not: how long it has to be kept; of one block in eight",
    "worker",
)

# Routing, transfers, tiers

ROUTES: Final = _counter("routes", "routing decisions by the worker that was chosen", "worker", "policy")
ROUTE_DECISION: Final = _histogram("route_decision_seconds", "time that a decision took", "policy")
ROUTING_REGRET: Final = _counter(
    "routing_regret_seconds", "seconds lost against the best worker there was when the request was routed", "worker"
)
HOTSPOTS: Final = _gauge(
    "hotspots",
    "hotspots that reach into the newest judged minutes: affinity, straggler, dead_signal, tie_breaking, stale_index, "
    "unreachable_threshold",
    "worker",
    "kind",
)
ROUTES_JUDGED: Final = _counter("routes_judged", "decisions whose regret is known", "worker")
REQUESTS_OPEN: Final = _gauge("requests_open", "routed requests without an end")
OLDEST_OPEN: Final = _gauge("oldest_open_seconds", "time since the oldest of them was routed")
TRANSFERS: Final = _counter("transfers", "KV hand-overs and tier loads by how they ended", "worker", "outcome")
TRANSFER_BYTES: Final = _counter("transfer_bytes", "bytes that they moved", "worker")
TRANSFER_WIRE: Final = _histogram("transfer_wire_seconds", "bytes on the wire, by the worker that received", "worker")
TRANSFER_WAIT: Final = _histogram(
    "transfer_wait_seconds", "orchestration before and around the wire, by the worker that received", "worker"
)
KV_LOAD: Final = _histogram("kv_load_seconds", "a request waited for KV of a slower tier", *_BY)
KV_TRANSFER: Final = _histogram("kv_transfer_seconds", "a request waited for KV of another worker", *_BY)

# The ledger, judged in the background

CAUSE_SECONDS: Final = _counter(
    "cause_seconds",
    "seconds of TTFT (or E2E) of ended requests by the cause that owns them: the ledger as a counter",
    "metric",
    "cause",
    "worker",
)
CAUSE_REQUESTS: Final = _counter("cause_requests", "requests whose seconds were split", "metric", "worker")
LEDGER_NEWEST: Final = _gauge(
    "ledger_judged_timestamp_seconds", "requests that ended before this instant have been split, as Unix time"
)
LEDGER_SKIPPED: Final = _counter(
    "ledger_skipped_requests",
    "ended requests that were not split (too_long, too_many), and passes that failed (failed_passes)",
    "reason",
)
CONTRADICTIONS: Final = _gauge(
    "data_contradiction",
    "1 while counters, events, client and engine contradict each other by this check, else 0",
    "check",
)
MARKS: Final = _counter("marks", "marks: configuration changes, deployments, faults, gaps, ...", "mark")
FINDINGS: Final = _counter("findings", "diagnoses made, by their status (`result`)", "result")

# Alerting

ALERTS: Final = _gauge("alerts", "alerts of the evaluator and of Alertmanager that are open: pending, firing", "state")
ALERT_DELIVERIES: Final = _counter(
    "alert_deliveries", "messages to receivers that left the queue: delivered, dead", "receiver", "result"
)
ALERT_OUTBOX: Final = _gauge(
    "alert_outbox_messages", "messages that wait for their receiver, and dead letters", "receiver", "state"
)
ALERT_LOOK: Final = _histogram("alert_look_seconds", "time that one look of the evaluator took", "check")
ALERT_FAILED_LOOKS: Final = _counter("alert_failed_looks", "looks that ended with an error", "check")

# The collector itself

SLO_GOAL: Final = _gauge(
    "slo_goal_ratio", "share of the requests that should meet their SLO: a setting of the collector"
)
BUILD: Final = _gauge("build_info", "1; the version is a label", "version")
INGEST_BATCHES: Final = _counter("ingest_batches", "batches by how they ended: accepted, duplicate, rejected", "result")
INGEST_ROWS: Final = _counter("ingest_rows", "rows committed", "kind")
INGEST_BYTES: Final = _counter("ingest_bytes", "bytes of bodies received, as sent")
INGEST_REJECTED: Final = _counter("ingest_rejected_batches", "batches refused, by the error's name", "reason")
INGEST_REJECTED_ROWS: Final = _counter(
    "ingest_rejected_rows", "rows of refused batches that could be decoded", "kind", "reason"
)
INGEST_IGNORED: Final = _counter("ingest_ignored_columns", "rows that carried a column not in the contract", "column")
INGEST_SPANS: Final = _counter("ingest_spans", "OTLP spans by what became of them", "result")
INGEST_POINTS: Final = _counter("ingest_points", "OTLP metric points by what became of them", "result")
INGEST_COMMIT: Final = _histogram("ingest_commit_seconds", "time from handing a batch to the store to its commit")
INGEST_COUNTING: Final = _counter(
    "ingest_counting_seconds", "time that committed batches took to be counted for this page"
)
INGEST_QUEUE: Final = _gauge("ingest_queue_batches", "batches on their way to disk")
INGEST_QUEUE_LIMIT: Final = _gauge("ingest_queue_limit_batches", "as many fit; more are answered with 429")
INGEST_MEMORY: Final = _gauge("ingest_memory_bytes", "bodies in flight")
INGEST_MEMORY_LIMIT: Final = _gauge("ingest_memory_limit_bytes", "as many fit; more are answered with 429")
GAP_MARKS: Final = _counter("gap_marks", "gap marks: a sender said that it lost rows", "source")
GAP_ROWS: Final = _counter("gap_dropped_rows", "rows that these marks say were lost", "source")
SOURCE_NEWEST: Final = _gauge(
    "source_newest_row_timestamp_seconds", "newest instant a sender's rows carry, as Unix time", "source"
)
SOURCE_LAG: Final = _gauge("source_lag_seconds", "receipt of a sender's latest batch minus its newest row", "source")
SOURCE_RECEIVED: Final = _gauge(
    "source_last_received_timestamp_seconds", "latest batch of a sender, as Unix time", "source"
)
SOURCE_OFFSET: Final = _gauge("source_clock_offset_seconds", "a sender's clock minus the collector's", "source")
SOURCE_ERROR: Final = _gauge("source_clock_error_seconds", "how far off the clock offset may be", "source")
SOURCE_MISSING: Final = _gauge("source_missing_batches", "numbers skipped by a sender's newest epoch so far", "source")
STORE_BYTES: Final = _gauge("store_bytes", "bytes of the store on disk")
STORE_ROWS: Final = _gauge("store_rows", "rows in the store", "kind")
STORE_FREE: Final = _gauge("store_free_bytes", "free bytes of the disk of the store")
STORE_BUDGET: Final = _gauge(
    "store_budget_bytes", "disk budget of the settings; above, batches get 507; absent where there is none"
)
QUERY: Final = _histogram("query_seconds", "time of read queries", "route")


def families() -> tuple[Family, ...]:
    """Every family, in the order of this file."""
    return tuple(value for value in globals().values() if isinstance(value, Family))


def family_of(name: str) -> Family:
    """The family that a name of a query belongs to (`..._bucket` its histogram's); KeyError where there is none."""
    for family in families():
        suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
        if name in {family.name + suffix for suffix in suffixes}:
            return family
    raise KeyError(f"the catalogue has no metric {name}; its names are in store/metric_catalogue.py")
