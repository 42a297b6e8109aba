"""What NVIDIA Dynamo's frontend writes down: routing decisions in its log, and its request trace.

The log, as JSON lines (`DYN_LOGGING_JSONL=true`) or as text: at level info `Selected worker` tells who was chosen and at
which cost (the lower, the better), at level debug of `dynamo_llm::kv_router` and `dynamo_kv_router` also
`[ROUTING] Best` (blocks expected in the chosen worker's cache) and the block size. The lines of one decision are put
together by Dynamo's request id; the client's own id (`x-request-id`) is taken from whichever line has it. The request
trace (`DYN_REQUEST_TRACE=1`, sink `jsonl`) has one line a request: a `request` row as the router saw it, and its decision.
What the trace calls `cached_tokens` is the router's estimate at selection, so it is `matched_tokens` of the route and
never `cached_tokens` of the request: what the engine really reused is told by the engine.
Source: real logs and traces of ai-dynamo 1.6.1; dynamo `request_trace/types.rs`, `scheduling/selector`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from engine_probe.adapters.adapter import Rows
from engine_probe.adapters.router_log import COLOUR, instant

TRACE_SCHEMA: Final = "dynamo.request.trace.v1"
MAX_OPEN: Final = 10_000
"""Decisions and ids remembered at a time; beyond it the oldest is written as far as it is known."""

_FIELD: Final = re.compile(r'(?P<key>[A-Za-z_]\w*)=(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s,}]+))')
_WORDS: Final = re.compile(
    r"Selected (?:pinned )?worker: (?:worker_type=(?P<type>\w+), )?worker_id=(?P<worker>\d+) dp_rank=\D*(?P<rank>\d+)\D*, "
    r"logit: (?P<logit>-?[\d.]+)(?:, (?:effective )?cached blocks: (?P<blocks>[\d.]+))?"
)
_OVERLAP: Final = re.compile(r"with (?P<overlap>\d+(?:\.\d+)?)/\d+ blocks overlap")
_T = TypeVar("_T")
_ENDS: Final = ("request completed", "route request completed")


def worker_name(instance: object, rank: object = 0) -> str | None:
    """Name of a Dynamo worker: its instance id as Dynamo's own log writes it (decimal); rank r > 0 is `ID/dpr`."""
    text = str(instance)
    if not text.isdecimal():
        return None
    tail = str(rank if rank is not None else 0)
    digits = re.sub(r"\D", "", tail) or "0"
    return text if digits == "0" else f"{text}/dp{digits}"


class DynamoLog:
    """One start of the frontend: its log, or its request trace; the lines say which."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._open: OrderedDict[str, dict[str, Any]] = OrderedDict()  # Dynamo's id -> decision so far
        self._client_ids: OrderedDict[str, str] = OrderedDict()
        self._block_size: int | None = None
        self.unnamed = 0

    def feed(self, line: str) -> Rows:
        """One line; rows where it tells of a request or completes a decision. Strange lines tell nothing."""
        text = COLOUR.sub("", line).strip()
        if text.startswith("{"):
            try:
                document = msgspec.json.decode(text)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                return {}
            if not isinstance(document, dict):
                return {}
            event = document.get("event", document)
            if isinstance(event, dict) and event.get("schema") == TRACE_SCHEMA:
                return trace_rows(event, self._router)
            return self._line(document, str(document.get("message", "")), instant(str(document.get("time", ""))))
        fields: dict[str, Any] = {}
        for match in _FIELD.finditer(text):
            fields.setdefault(match["key"], match["bare"] if match["quoted"] is None else match["quoted"])
        return self._line(fields, text, instant(text))

    def worker_facts(self) -> dict[str, Any]:
        """The frontend's log tells no geometry of a worker."""
        return {}

    def _line(self, fields: Mapping[str, Any], text: str, at_ns: int | None) -> Rows:
        request = fields.get("request_id")
        if not isinstance(request, str) or not 0 < len(request) <= 256 or at_ns is None:
            self.unnamed += "Selected worker" in text and at_ns is not None
            return {}
        client = fields.get("x_request_id")
        if isinstance(client, str) and 0 < len(client) <= 256:
            _remember(self._client_ids, request, client)
        if "[ROUTING_INPUT]" in text:
            self._block_size = _whole(fields.get("block_size")) or self._block_size
        elif "Selected worker" in text or "Selected pinned worker" in text:
            return self._selected(request, fields, text, at_ns)
        elif "[ROUTING] Best" in text:
            return self._matched(request, fields, text)
        elif any(word in text for word in _ENDS) and request in self._open:
            return self._done(request)
        return {}

    def _selected(self, request: str, fields: Mapping[str, Any], text: str, at_ns: int) -> Rows:
        """A worker was chosen; how much it is expected to have may come with a later line."""
        told, words = dict(fields), _WORDS.search(text)
        if words is not None:  # releases that put everything into the sentence
            told |= {"worker_id": words["worker"], "dp_rank": words["rank"], "logit": words["logit"]}
            told |= {"effective_cached_blocks": words["blocks"], "worker_type": words["type"]}
        worker = worker_name(told.get("worker_id"), told.get("dp_rank"))
        if worker is None:
            return {}
        rows = self._done(request) if request in self._open else {}
        score = _number(told.get("logit"))
        blocks = _number(told.get("effective_cached_blocks"))
        mode = told.get("router_mode")
        policy = mode if isinstance(mode, str) else None
        decided = {"at_ns": at_ns, "policy": policy, "chosen": worker, "blocks": blocks, "score": score}
        for decision in _remember(self._open, request, decided):
            rows.setdefault("route", []).append(self._row(*decision))
        return rows

    def _matched(self, request: str, fields: Mapping[str, Any], text: str) -> Rows:
        overlap, decision = _OVERLAP.search(text), self._open.get(request)
        if decision is None:
            return {}
        blocks = _number(fields.get("overlap_blocks"))
        decision["blocks"] = blocks if blocks is not None or overlap is None else float(overlap["overlap"])
        return self._done(request)

    def _done(self, request: str) -> Rows:
        return {"route": [self._row(request, self._open.pop(request))]}

    def _row(self, request: str, decision: Mapping[str, Any]) -> dict[str, Any]:
        blocks, size = decision["blocks"], self._block_size
        matched = None if blocks is None or size is None else round(blocks * size)
        believed = {"worker": decision["chosen"], "matched_tokens": matched, "score": decision["score"]}
        return {
            "at_ns": decision["at_ns"],
            "request_id": self._client_ids.get(request, request),
            "router": self._router,
            "policy": decision["policy"],
            "chosen": decision["chosen"],
            "candidates": [believed | {"load": None, "queue": None}],
        }


def trace_rows(event: Mapping[str, Any], router: str) -> Rows:
    """Rows of one record of the request trace; {} for records of tools and payloads."""
    request = event.get("request")
    if event.get("event_type") != "request_end" or not isinstance(request, dict):
        return {}
    received_ms, own_id = _whole(request.get("request_received_ms")), request.get("request_id")
    if received_ms is None or not isinstance(own_id, str) or not own_id:
        return {}
    at_ns = received_ms * 1_000_000
    told, replay = _mapping(request.get("worker")), _mapping(request.get("replay"))
    prefill = worker_name(told.get("prefill_worker_id"), told.get("prefill_dp_rank"))
    decode = worker_name(told.get("decode_worker_id"), told.get("decode_dp_rank"))
    client_id = request.get("x_request_id")
    name = client_id if isinstance(client_id, str) and client_id else own_id
    rows: Rows = {"request": [_request_row(event, request, name, at_ns, decode or prefill, prefill, replay)]}
    for worker in dict.fromkeys((prefill, decode)):
        if worker is None:
            continue
        matched = _whole(request.get("cached_tokens")) if worker == (prefill or decode) else None
        believed = {"worker": worker, "matched_tokens": matched, "load": None, "queue": None, "score": None}
        row = {"at_ns": at_ns, "request_id": name, "router": router, "chosen": worker, "candidates": [believed]}
        rows.setdefault("route", []).append(row)
    return rows


def _request_row(
    event: Mapping[str, Any],
    request: Mapping[str, Any],
    name: str,
    at_ns: int,
    worker: str | None,
    prefill: str | None,
    replay: Mapping[str, Any],
) -> dict[str, Any]:
    ttft_s, total_s, wait_s = (
        _seconds(request.get(key)) for key in ("ttft_ms", "total_time_ms", "prefill_wait_time_ms")
    )
    end_ns = None if total_s is None else at_ns + round(total_s * 1e9)
    finish = request.get("finish_reason_metadata")
    reason = finish.get("finish_reason") if isinstance(finish, dict) else None
    context = event.get("agent_context")
    session = context.get("session_id") if isinstance(context, dict) else None
    labels = {"engine_request_id": str(request["request_id"])}
    if prefill is not None and prefill != worker:
        labels["prefill_worker"] = prefill
    prompt = _whole(request.get("input_tokens"))
    return {
        "worker": worker,
        "at_ns": at_ns if end_ns is None else end_ns,
        "request_id": name,
        "vantage": "router",
        "state": "finished",
        "model": request.get("model") if isinstance(request.get("model"), str) else None,
        "session_id": session if isinstance(session, str) else None,
        "labels": labels,
        "arrival_ns": at_ns,
        "first_token_ns": None if ttft_s is None else at_ns + round(ttft_s * 1e9),
        "end_ns": end_ns,
        "frontend_s": wait_s,
        "prompt_tokens": _whole(replay.get("input_length")) if prompt is None else prompt,
        "output_tokens": _whole(request.get("output_tokens")),
        "finish_reason": reason if isinstance(reason, str) else None,
    }


def _remember(known: OrderedDict[str, _T], key: str, value: _T) -> list[tuple[str, _T]]:
    """Keep `value`; answers what had to go for it."""
    known[key] = value
    known.move_to_end(key)
    dropped = []
    while len(known) > MAX_OPEN:
        dropped.append(known.popitem(last=False))
    return dropped


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    try:
        number = None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if number is not None and abs(number) < 1e300 else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < 1 << 62 and number == int(number) else None


def _seconds(value: Any) -> float | None:
    number = _number(value)
    return number / 1e3 if number is not None and 0 <= number < 1e12 else None
