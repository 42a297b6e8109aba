"""TensorRT-LLM's draining endpoints -> rows: iterations, finished requests, KV-cache events.

Each answer holds what happened since the last one, and is gone for everybody else; so a hole in the numbers of
iterations or events means that another reader was there, and is marked as a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard

import msgspec

from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.kv_wire import MAX_RANKS, Event, tier_of
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.trtllm import ENGINE, EVENTS, ITERATIONS, REQUESTS
from engine_probe.errors import UnknownFormat
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    import pyarrow as pa

Tables = dict[str, "pa.Table"]

_QUARTER_NS: Final = 900_000_000_000
_HOUR_NS: Final = 3_600_000_000_000
_NEAR_NS: Final = 5_000_000_000
_MEDIA: Final = {0: "GPU", 1: "CPU", 2: "DISK"}
"""Cache level -> medium, as `kv_wire.tier_of` knows it."""
_I64: Final = 1 << 63


class _Draining:
    """What the three have in common. An answer may wait for news for some seconds."""

    path: str
    method: Literal["GET", "POST"] = "GET"
    timeout_s = 15.0
    hint = ""

    def is_due(self, page: Page | None) -> bool:
        """Always: what is not fetched in time falls out of the server's queue."""
        return True


class IterationPoll(_Draining):
    """`/metrics` (JSON): one `step` row an iteration, and samples of the newest."""

    path = ITERATIONS
    hint = "Start trtllm-serve with enable_iter_perf_stats: true in its --config file."

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._last: int | None = None
        self._finished = 0
        self._drafted: tuple[int, int] | None = None

    def tables(self, body: bytes, at_ns: int) -> Tables:
        records = [record for record in _list(body, self.path) if isinstance(record, dict)]
        if not records:
            return {}
        instants = step_instants(records, at_ns)
        steps, marks = [], []
        for record, instant in zip(records, instants, strict=True):
            number = _count(record.get("iter"))
            if number is not None:
                marks += self._order(number, instant)
                steps.append(step_row(record, self._worker, number, instant))
            self._finished += _count(record.get("numCompletedRequests")) or 0
            self._count_drafts(_dict(record.get("specDecodingStats")))
        samples = iteration_samples(records[-1], self._worker, instants[-1], self._finished, self._drafted)
        return _tables(step=steps, sample=samples, mark=marks)

    def _count_drafts(self, speculation: Mapping[str, Any]) -> None:
        """Counted from the first iteration on that tells both."""
        drafted, accepted = _count(speculation.get("numDraftTokens")), _count(speculation.get("numAcceptedTokens"))
        if drafted is not None and accepted is not None:
            before = self._drafted or (0, 0)
            self._drafted = (before[0] + drafted, before[1] + accepted)

    def _order(self, number: int, at_ns: int) -> list[dict[str, Any]]:
        """A number that falls is a restart; one that jumps was taken by somebody else, or fell out of the queue."""
        last, self._last = self._last, number
        if last is None or number == last + 1 or number == last:
            return []
        if number < last:
            text = "The engine restarted: its iterations count from 0 again."
            return [_mark("worker_up", self._worker, at_ns, text, {"last_iter": str(last), "iter": str(number)})]
        attrs = {"source": "iterations", "first_seq": str(last + 1), "last_seq": str(number - 1)}
        attrs["messages"] = str(number - last - 1)
        text = f"Iterations {last + 1} to {number - 1} were not seen: another reader took them, or the queue was full."
        return [_mark("gap", self._worker, at_ns, text, attrs)]


class RequestPoll(_Draining):
    """`/perf_metrics`: one `request` row a finished request, and a `transfer` row where its KV came from elsewhere.

    offset_s   wall clock minus the server's steady clock, on which all its instants are; None: no row can be placed
    """

    path = REQUESTS
    hint = "Start trtllm-serve with return_perf_metrics: true and perf_metrics_max_requests: 10000."

    def __init__(self, worker: str, offset_s: float | None) -> None:
        self._worker = worker
        self._offset_s = offset_s

    def tables(self, body: bytes, at_ns: int) -> Tables:
        items = [item for item in _list(body, self.path) if isinstance(item, dict)]
        if items and self._offset_s is None:
            raise UnknownFormat(
                f"{self.path} tells instants of the server's own clock, and /steady_clock_offset does not say how it "
                "differs from ours: its requests cannot be placed in time."
            )
        requests, transfers = [], []
        for item in items:
            row, transfer = request_rows(item, self._worker, self._offset_s or 0.0, at_ns)
            requests += [row] if row else []
            transfers += [transfer] if transfer else []
        if items and not requests:
            raise UnknownFormat(
                f"{self.path} told {len(items)} requests at instants that are not ours: the server's clock was set "
                "anew (another machine?). Attach again."
            )
        return _tables(request=requests, transfer=transfers)


class EventPoll(_Draining):
    """`/kv_cache_events`: block rows under our own chain hash. Events of the largest attention window alone are read."""

    path = EVENTS
    method: Literal["GET", "POST"] = "POST"
    hint = "Start trtllm-serve with kv_cache_config.event_buffer_max_size: 16384 and enable_block_reuse: true."

    def __init__(self, worker: str, salt: bytes, sampling: Sampling) -> None:
        self._worker = worker
        self._decoder = KvEventDecoder(salt, sampling=sampling)
        self._window = 0

    def tables(self, body: bytes, at_ns: int) -> Tables:
        events = [_event(item) for item in _list(body, self.path)]
        windows = [window for *_, window, _ in events]
        self._window = max([self._window, *windows])
        for rank, number, window, found in events:
            mine = found if window in (0, self._window) else []
            self._decoder.apply(self._worker, rank, number, mine, at_ns)
        return self._decoder.drain()


def step_row(record: Mapping[str, Any], worker: str, number: int, at_ns: int) -> dict[str, Any]:
    """`step` columns of one iteration record. A paused request is one that was admitted and waits to go on."""
    batch, cache = _dict(record.get("inflightBatchingStats")), _dict(record.get("kvCacheStats"))
    latency = record.get("iterLatencyMS")
    speculates = bool(record.get("specDecodingStats"))
    row = {
        "worker": worker,
        "at_ns": at_ns,
        "step": number,
        "duration_s": latency / 1e3 if _is_number(latency) and 0 <= latency < 1e9 else None,
        "num_running": _count(batch.get("numScheduledRequests")),
        "num_waiting_prefill": _count(record.get("numQueuedRequests")),
        "num_waiting_decode": _count(batch.get("numPausedRequests")),
        "prefill_tokens": _count(batch.get("numCtxTokens")),
        # Each request generates one token, unless some are guessed ahead: then their number is not told.
        "decode_tokens": None if speculates else _count(batch.get("numGenRequests")),
        "blocks_total": _count(cache.get("maxNumBlocks")),
        "blocks_used": _count(cache.get("usedNumBlocks")),
        "batch_size": _count(batch.get("numScheduledRequests")),
    }
    return {key: value for key, value in row.items() if value is not None}


def iteration_samples(
    record: Mapping[str, Any], worker: str, at_ns: int, finished: int, drafted: tuple[int, int] | None
) -> list[dict[str, Any]]:
    """Samples of one iteration, under the names that the server's Prometheus page gives them.

    finished   requests so far;  drafted: tokens so far, and how many of them were accepted; None: it told neither
    """
    cache = _dict(record.get("kvCacheStats"))
    used, most = _count(cache.get("usedNumBlocks")), _count(cache.get("maxNumBlocks"))
    values: list[tuple[str, str, float | int | None]] = [
        ("requests_running", "numActiveRequests", _count(record.get("numActiveRequests"))),
        ("requests_waiting", "numQueuedRequests", _count(record.get("numQueuedRequests"))),
        ("kv_usage_ratio", "kvCacheStats", used / most if used is not None and most else None),
        ("requests_finished_total", "numCompletedRequests", finished),
        ("draft_tokens_total", "numDraftTokens", None if drafted is None else drafted[0]),
        ("accepted_tokens_total", "numAcceptedTokens", None if drafted is None else drafted[1]),
        ("trtllm_kv_cache_reused_blocks_total", "reusedBlocks", _count(cache.get("reusedBlocks"))),
        ("trtllm_kv_cache_missed_blocks_total", "missedBlocks", _count(cache.get("missedBlocks"))),
        ("trtllm_kv_cache_alloc_blocks_total", "allocTotalBlocks", _count(cache.get("allocTotalBlocks"))),
        ("trtllm_gpu_memory_usage_bytes", "gpuMemUsage", _count(record.get("gpuMemUsage"))),
    ]
    return [
        {"worker": worker, "at_ns": at_ns, "name": name, "labels": {"wire": wire}, "value": float(value)}
        for name, wire, value in values
        if value is not None
    ]


def step_instants(records: Sequence[Mapping[str, Any]], received_ns: int) -> list[int]:
    """End of each iteration (UTC ns): its `timestamp`, a local time without zone, at the zone nearest to when it came.

    Zones differ from UTC by quarters of an hour. Without time stamps the last ended when it came, and the others
    before it by what the later ones took.
    """
    stamped = [_stamp(record.get("timestamp"), received_ns) for record in records]
    if all(stamp is not None for stamp in stamped):
        return [stamp for stamp in stamped if stamp is not None]
    instants, at_ns = [], received_ns
    for record in reversed(records):
        instants.append(at_ns)
        latency = record.get("iterLatencyMS")
        at_ns -= round(latency * 1e6) if _is_number(latency) and 0 <= latency < 1e9 else 0
    return instants[::-1]


def request_rows(
    item: Mapping[str, Any], worker: str, offset_s: float, received_ns: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`request` row, `transfer` row) of one item, {} for none; no row where its end is not of the hour before it came.

    server arrival ... frontend_s ... arrival ... queue_s ... first scheduled ... prefill_s ... first token ... decode_s
    """
    metrics = _dict(item.get("perf_metrics"))
    timing = _dict(metrics.get("timing_metrics"))
    cache, speculation = _dict(metrics.get("kv_cache_metrics")), _dict(metrics.get("speculative_decoding"))

    def instant(name: str) -> int | None:
        value = timing.get(name)
        return round((value + offset_s) * 1e9) if _is_number(value) and value > 0 else None

    server, arrival, scheduled, first, last = map(
        instant, ("server_arrival_time", "arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    )
    begun = server if server is not None else arrival
    if begun is None or last is None or not received_ns - _HOUR_NS < last < received_ns + _NEAR_NS:
        return {}, {}
    told = {
        "engine_request_id": item.get("request_id"),
        "ctx_request_id": item.get("ctx_request_id"),
        "num_reused_blocks": cache.get("num_reused_blocks"),
        "num_missed_blocks": cache.get("num_missed_blocks"),
    }
    name = f"{worker}:{item.get('request_id')}"
    row = {
        "worker": worker,
        "at_ns": last,
        "request_id": name,
        "vantage": "engine",
        "state": "finished",
        "engine": ENGINE,
        "labels": {key: str(value) for key, value in told.items() if value is not None},
        "arrival_ns": begun,
        "first_scheduled_ns": scheduled,
        "first_token_ns": first,
        "last_token_ns": last,
        "end_ns": last,
        "frontend_s": _between(server, arrival),
        "queue_s": _between(arrival, scheduled),
        "prefill_s": _between(scheduled, first),
        "decode_s": _between(first, last),
        "draft_tokens": _count(speculation.get("total_draft_tokens")),
        "accepted_tokens": _count(speculation.get("total_accepted_draft_tokens")),
    }
    start, end, size = instant("kv_cache_transfer_start"), instant("kv_cache_transfer_end"), timing.get("kv_cache_size")
    transfer: dict[str, Any] = {}
    if start is not None and end is not None and end >= start and _count(size):
        transfer = {"worker": worker, "at_ns": end, "request_id": name, "num_bytes": size, "outcome": "ok"}
        transfer["wire_s"] = (end - start) / 1e9
    return {key: value for key, value in row.items() if value is not None}, transfer


def _event(item: Any) -> tuple[int, int, int, list[Event]]:
    """(rank, number, window, decoder events) of one item. Raises UnknownFormat."""
    data = item.get("data") if isinstance(item, dict) else None
    number = item.get("event_id") if isinstance(item, dict) else None
    if not isinstance(data, dict) or type(number) is not int or not 0 <= number < _I64:
        raise UnknownFormat(f"{EVENTS} told an event without event_id or data; is this trtllm-serve?")
    rank, window = item.get("attention_dp_rank") or 0, item.get("window_size") or 0
    if type(rank) is not int or not 0 <= rank < MAX_RANKS or type(window) is not int:
        raise UnknownFormat(f"{EVENTS} told an event whose rank or window is no number.")
    kind = data.get("type")
    if kind == "stored":
        return rank, number, window, _stored(data)
    if kind == "removed":
        hashes = _hashes(data.get("block_hashes"))
        return rank, number, window, [("BlockRemoved", {"block_hashes": hashes, "any_tier": True})]
    if kind == "updated":
        return rank, number, window, _updated(data)
    return rank, number, window, []  # created: the pools' sizes; whatever a newer release adds


def _stored(data: Mapping[str, Any]) -> list[Event]:
    """One event a block: each is the parent of the next. A block that is not full has fewer tokens."""
    events: list[Event] = []
    parent = data.get("parent_hash")
    blocks = data.get("blocks")
    if not isinstance(blocks, list) or (parent is not None and type(parent) is not int):
        raise UnknownFormat(f"{EVENTS} told a stored event without blocks.")
    for block in blocks:
        tokens = block.get("tokens") if isinstance(block, dict) else None
        if not isinstance(tokens, list):
            raise UnknownFormat(f"{EVENTS} told a stored block without tokens.")
        (own,) = _hashes([block.get("block_hash")])
        ids = [token.get("token_id") if isinstance(token, dict) else None for token in tokens]
        extras = [
            token["token_extra_id"] for token in tokens if isinstance(token, dict) and token.get("token_extra_id")
        ]
        fields: dict[str, Any] = {
            "block_hashes": [own],
            "parent_block_hash": parent,
            "token_ids": ids,
            "block_size": max(len(ids), 1),
        }
        fields["medium"] = _medium(block.get("cache_level", 0))
        keys = extras + ([block["mm_keys"]] if block.get("mm_keys") else [])
        events.append(("BlockStored", {**fields, "extra_keys": [keys] if keys else None}))
        parent = own
    return events


def _updated(data: Mapping[str, Any]) -> list[Event]:
    level = data.get("cache_level")
    if not isinstance(level, dict):
        return []  # only its priority changed
    tiers = tuple(tier_of(_medium(level.get(key)), None) for key in ("old_value", "new_value"))
    return [("BlockMoved", {"block_hashes": _hashes([data.get("block_hash")]), "tiers": tiers})]


def _medium(level: Any) -> str:
    return _MEDIA.get(level, "unknown") if type(level) is int else "unknown"


def _hashes(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UnknownFormat(f"{EVENTS} told block hashes that are no numbers.")
    return values


def _list(body: bytes, path: str) -> list[Any]:
    """The answer's items; one that is JSON text is read too. Raises UnknownFormat."""
    try:
        found = msgspec.json.decode(body, type=list[Any])
        return [msgspec.json.decode(item) if isinstance(item, str) else item for item in found]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnknownFormat(f"{path} did not answer a JSON list ({error}); is this trtllm-serve?") from error


def _stamp(text: Any, received_ns: int) -> int | None:
    """`MM-DD-YYYY hh:mm:ss.ffffff` of an unknown zone -> UTC ns nearest to `received_ns`."""
    if not isinstance(text, str):
        return None
    try:
        at = datetime.strptime(text, "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return None
    whole = int(at.timestamp()) * 1_000_000_000 + at.microsecond * 1_000
    quarters = round((received_ns - whole) / _QUARTER_NS)
    return whole + quarters * _QUARTER_NS if abs(quarters) <= 60 else None


def _mark(mark: str, worker: str, at_ns: int, text: str, attrs: dict[str, str]) -> dict[str, Any]:
    row = {"mark": mark, "worker": worker, "subject": worker, "at_ns": at_ns, "text": text}
    return row | {"attrs": {"seen_by": "attach"} | attrs}


def _tables(**rows: Sequence[Mapping[str, Any]]) -> Tables:
    from engine_probe.schema import table_from_rows

    return {kind: table_from_rows(kind, found) for kind, found in rows.items() if found}


def _between(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None or end < start else (end - start) / 1e9


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None
