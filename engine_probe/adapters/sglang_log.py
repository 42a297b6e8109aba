"""SGLang's output, line by line: settings and KV geometry at its start, and one `request` row a finished request.

Requests are told with `--log-requests`, in either format, or by the file of `--export-metrics-to-file`. Only the
`meta_info` of a line is read: numbers and ids, never text or token ids. Its instants (`--enable-metrics`) are Unix
seconds of the engine's own clock; a line without them is left out, since the log's own time has no zone. A duration
laid on one axis:

    request_received_ts ... frontend_s, queue_s ... forward_entry_time ... prefill_s = first token ... decode_s = end

Invariant: a line that is not understood says nothing; no line raises. Source: SGLang 0.5.18, 0.5.23
`utils/request_logger.py`, `observability/req_time_stats.py`, `observability/request_metrics_exporter.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine_probe.adapters.adapter import Rows
from engine_probe.adapters.vllm import worker_name

ENGINE: Final = "sglang"
MAX_LINE_CHARS: Final = 262_144
HEALTH_CHECK: Final = "HEALTH_CHECK"

_ARGS = re.compile(r"server_args=(?P<args>\{.*\}|ServerArgs\(.*\))\s*$")
_POOL = re.compile(r"KV Cache is allocated\.(?: dtype: (?P<dtype>[\w.]+),)? #tokens: (?P<tokens>\d{1,15})")
_LIMITS = re.compile(
    r"\b(?P<key>max_total_num_tokens|max_running_requests|chunked_prefill_size|context_len)=(?P<value>\d{1,15})"
)
_WEIGHTS_GB = re.compile(r"\bmem usage=(\d{1,9}(?:\.\d+)?) GB")
_WEIGHTS_TYPE = re.compile(r"\bdtype=(?:torch\.)?(\w{1,20})")
_META_TEXT: Final = "'meta_info': {"
_STREAM = re.compile(r"\bstream=(True|False)\b")
_JSON_START = re.compile(r'\{"(?:timestamp|request_parameters)"')


class SglangLog:
    """What one start of SGLang writes. `worker` is the instance; data-parallel ranks are told in the lines."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._facts: dict[str, Any] = {}
        self._flags: dict[str, str] = {}
        self._tokens: int | None = None
        self._model: str | None = None

    def feed(self, line: str) -> Rows:
        """Take in one line; a `request` row where it tells of a finished request."""
        line = line[:MAX_LINE_CHARS]
        begun, start = line.find("Finish: obj="), _JSON_START.search(line)
        if begun >= 0 and (start is None or begun < start.start()):  # else it stands in somebody's text
            return self._from_text(line)
        if start is not None:
            return self._from_json(line[start.start() :])
        if len(line) < 65_536:
            self._startup(line)
        return {}

    def worker_facts(self) -> dict[str, Any]:
        """Columns of a `worker` row told so far."""
        facts = dict(self._facts)
        size = facts.get("block_size")
        if self._tokens and size:
            facts["num_blocks"] = self._tokens // size
        return {"engine": ENGINE, **facts, "flags": dict(self._flags)}

    def _startup(self, line: str) -> None:
        if (match := _ARGS.search(line)) is not None:
            self._settings(match["args"])
        elif (match := _POOL.search(line)) is not None:
            self._tokens = int(match["tokens"])
            if match["dtype"]:
                self._facts["kv_dtype"] = match["dtype"].removeprefix("torch.")
        elif "Load weight end." in line:
            if (match := _WEIGHTS_GB.search(line)) is not None and float(match[1]) > 0:
                self._facts["weights_bytes"] = round(float(match[1]) * (1 << 30))
            if (match := _WEIGHTS_TYPE.search(line)) is not None:
                self._facts["dtype"] = match[1]
        elif "max_total_num_tokens=" in line:
            for found in _LIMITS.finditer(line):
                value = int(found["value"])
                if found["key"] == "max_total_num_tokens":
                    self._tokens = value
                elif found["key"] == "context_len":
                    self._facts["max_context"] = value
                else:
                    self._flags[found["key"]] = found["value"]

    def _settings(self, text: str) -> None:
        from engine_probe.adapters.geometry import literal_pairs
        from engine_probe.adapters.sglang import info_facts

        pairs = dict(literal_pairs(text))
        facts = info_facts(pairs)
        self._flags |= facts.pop("flags")
        self._facts |= facts
        if isinstance(pairs.get("disable_radix_cache"), bool):
            self._facts["prefix_caching"] = not pairs["disable_radix_cache"]
        model = pairs.get("served_model_name")
        if isinstance(model, str):
            self._facts["model"] = self._model = model

    def _from_json(self, text: str) -> Rows:
        try:
            told = msgspec.json.decode(text.rstrip())
        except (msgspec.MsgspecError, RecursionError):
            return {}
        if not isinstance(told, dict):
            return {}
        if "request_parameters" in told:  # --export-metrics-to-file: the keys of meta_info at the top
            return self._row(told, _asked_stream(told["request_parameters"]))
        out, asked = told.get("out"), told.get("obj")
        meta = out.get("meta_info") if told.get("event") == "request.finished" and isinstance(out, dict) else None
        stream = asked.get("stream") if isinstance(asked, dict) else None
        return self._row(meta, stream if isinstance(stream, bool) else None) if isinstance(meta, dict) else {}

    def _from_text(self, line: str) -> Rows:
        # meta_info is the last key of `out`: whatever stands in a prompt, the last one is the engine's.
        head, _, tail = line.rpartition(_META_TEXT)
        if not head:
            return {}
        try:
            meta = ast.literal_eval("{" + tail.rstrip().removesuffix("}"))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return {}
        asked = _STREAM.findall(head)
        stream = asked[0] == "True" if len(set(asked)) == 1 else None
        return self._row(meta, stream) if isinstance(meta, dict) else {}

    def _row(self, meta: Mapping[str, Any], stream: bool | None) -> Rows:
        row = request_columns(meta, stream)
        if not row:
            return {}
        rank = meta.get("dp_rank")
        row["worker"] = worker_name(self._worker, rank if isinstance(rank, int) else None)
        row["model"] = self._model
        return {"request": [row]}


def request_columns(meta: Mapping[str, Any], stream: bool | None = None) -> dict[str, Any]:
    """`request` columns of one `meta_info` with its instants; {} where it has none or is a health check.

    stream   whether the client asked for a stream: else the first output that SGLang's front end saw is the last one
    """
    rid = meta.get("id")
    arrival, end = _ns(meta.get("request_received_ts")), _ns(meta.get("request_finished_ts"))
    if not isinstance(rid, str) or rid.startswith(HEALTH_CHECK) or arrival is None or end is None or end < arrival:
        return {}
    latency, queue = _seconds(meta.get("first_token_latency")), _seconds(meta.get("queue_time"))
    scheduled, prefilled = _ns(meta.get("forward_entry_time")), _ns(meta.get("prefill_finished_time"))
    first = None if latency is None else arrival + round(latency * 1e9)
    if stream is False or first is None:
        first = prefilled
    prefill = None if first is None or scheduled is None or first < scheduled else (first - scheduled) / 1e9
    frontend = None
    if first is not None and queue is not None and prefill is not None:
        # Two clocks of one host, anchored to each other: a residue below zero is their rounding.
        frontend = max((first - arrival) / 1e9 - queue - prefill, 0.0)
    prompt, cached = _count(meta.get("prompt_tokens")), _count(meta.get("cached_tokens"))
    details = meta.get("cached_tokens_details")
    details = details if isinstance(details, dict) else {}
    row = {
        "at_ns": end,
        "request_id": rid,
        "vantage": "engine",
        "engine": ENGINE,
        "labels": {"engine_request_id": rid},
        "arrival_ns": arrival,
        "first_scheduled_ns": scheduled,
        "first_token_ns": first,
        "last_token_ns": end,
        "end_ns": end,
        "frontend_s": frontend,
        "queue_s": queue,
        "prefill_s": prefill,
        "decode_s": None if first is None or end < first else (end - first) / 1e9,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_tokens_device": _count(details.get("device")),
        "cached_tokens_host": _count(details.get("host")),
        "cached_tokens_remote": _count(details.get("storage")),
        "computed_tokens": prompt - cached if prompt is not None and cached is not None and cached <= prompt else None,
        "output_tokens": _count(meta.get("completion_tokens")),
        "num_preemptions": _count(meta.get("num_retractions")),
        "draft_tokens": _count(meta.get("spec_num_proposed_drafts")),
        "accepted_tokens": _count(meta.get("spec_num_correct_drafts")),
        **_ending(meta.get("finish_reason")),
    }
    return {key: value for key, value in row.items() if value is not None}


def _ending(reason: Any) -> dict[str, Any]:
    """state, finish_reason, error. The message of an abort may quote the request and is left out."""
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind != "abort":
        return {"state": "finished", "finish_reason": kind if isinstance(kind, str) else None}
    status = reason.get("status_code") if isinstance(reason, dict) else None
    if status is None:
        return {"state": "aborted", "finish_reason": "abort"}
    found = re.search(r"\d{3}", str(status))
    error = reason.get("err_type")
    return {
        "state": "failed",
        "finish_reason": "abort",
        "http_status": int(found[0]) if found else None,
        "error": error if isinstance(error, str) else "abort",
    }


def _asked_stream(parameters: Any) -> bool | None:
    try:
        found = msgspec.json.decode(parameters) if isinstance(parameters, str) else None
    except (msgspec.MsgspecError, RecursionError):
        return None
    stream = found.get("stream") if isinstance(found, dict) else None
    return stream if isinstance(stream, bool) else None


def _ns(value: Any) -> int | None:
    """Unix seconds of our age -> ns."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e9 < value < 9e9:
        return None
    whole = int(value)
    return whole * 1_000_000_000 + round((value - whole) * 1e9)


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 2_678_400 else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None
