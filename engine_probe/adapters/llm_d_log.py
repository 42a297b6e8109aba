"""Decisions in the log of an endpoint picker (llm-d's inference scheduler, the Gateway API Inference Extension): `route` rows.

The log is zap's JSON lines (`--zap-encoder=json`), maybe behind the prefix of `kubectl logs --prefix`. At `-v=4` each
profile that runs for a request tells its candidates with their weighted scores and the endpoint it picked: one row each,
so a request whose prefill and decode are apart has two. At `-v=3` only `Request handled` is there: who was chosen.
Scores are weighted sums of ratios, so how many tokens were expected in a cache is not known. A candidate's load and queue
are what the picker had last scraped of it.
Source: llm-d-inference-scheduler 2026-05 `scheduling/scheduler_profile.go`, `requestcontrol/director.go`; older pickers
write `pods-weighted-score` and `TargetPods`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from engine_probe.adapters.adapter import Rows

MAX_OPEN: Final = 10_000
"""Requests remembered at a time; beyond it the oldest is forgotten."""
MAX_CANDIDATES: Final = 1_000

_KUBECTL: Final = re.compile(r"^\[pod/[^\]]{1,512}\]\s*")
_WHEN: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)")
_SCORED: Final = (("endpoints-weighted-score", "Endpoint"), ("pods-weighted-score", "Pod"))
_PICKED: Final = (("TargetEndpoints", "Endpoint"), ("TargetPods", "Pod"))


@dataclass(slots=True)
class _Request:
    """What is known of a request that is not handled yet."""

    candidates: list[dict[str, Any]] = field(default_factory=list)
    has_picked: bool = False


class PickerLog:
    """One start of the picker. `router` is the name that its rows carry."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._open: OrderedDict[str, _Request] = OrderedDict()
        self.unnamed = 0

    def feed(self, line: str) -> Rows:
        """One line; a `route` row where it tells a decision. Strange lines tell nothing."""
        text = _KUBECTL.sub("", line.strip())
        if not text.startswith("{"):
            return {}
        try:
            told = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return {}
        message = told.get("msg") if isinstance(told, dict) else None
        if message not in (
            "Candidate pods for picking",
            "Completed running picker plugin successfully",
            "Request handled",
        ):
            return {}
        at_ns, request_id = instant(told.get("ts")), told.get("x-request-id")
        if not isinstance(request_id, str) or not 0 < len(request_id) <= 256:
            self.unnamed += message == "Request handled"
            return {}
        if at_ns is None:
            return {}
        if message == "Candidate pods for picking":
            self._request(request_id).candidates = _candidates(told)
            return {}
        if message == "Request handled":
            return self._handled(request_id, at_ns, told)
        return self._picked(request_id, at_ns, told)

    def worker_facts(self) -> dict[str, Any]:
        """A picker tells no geometry."""
        return {}

    def _request(self, request_id: str) -> _Request:
        known = self._open.setdefault(request_id, _Request())
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return known

    def _picked(self, request_id: str, at_ns: int, told: Mapping[str, Any]) -> Rows:
        """A profile chose; what it chose among came with the line before."""
        chosen = _chosen(told.get("result"))
        if chosen is None:
            return {}
        known = self._request(request_id)
        known.has_picked = True
        candidates, known.candidates = known.candidates, []
        return self._row(request_id, at_ns, chosen, candidates, _plugin(told.get("plugin")))

    def _handled(self, request_id: str, at_ns: int, told: Mapping[str, Any]) -> Rows:
        """The request's end in the picker; it is a decision where no profile told its own."""
        known = self._open.pop(request_id, _Request())
        endpoint = told.get("endpoint")
        if known.has_picked or not isinstance(endpoint, str) or not 0 < len(endpoint) <= 1_024:
            return {}
        return self._row(request_id, at_ns, endpoint.split(",")[0], known.candidates, None)

    def _row(
        self, request_id: str, at_ns: int, chosen: str, candidates: list[dict[str, Any]], policy: str | None
    ) -> Rows:
        row = {"at_ns": at_ns, "request_id": request_id, "router": self._router, "policy": policy, "chosen": chosen}
        return {"route": [row | {"candidates": candidates or None}]}


def instant(stamp: object) -> int | None:
    """zap's `ts`, RFC 3339 or seconds since 1970, as UTC ns; None where it is neither."""
    if isinstance(stamp, int | float) and not isinstance(stamp, bool):
        return round(stamp * 1e9) if 0 < stamp < 1e10 else None
    match = _WHEN.fullmatch(stamp) if isinstance(stamp, str) else None
    if match is None:
        return None
    try:
        base = datetime.fromisoformat(match[1] + ("+00:00" if match[3] == "Z" else match[3])).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return int(base.timestamp()) * 1_000_000_000 + (round(float("0" + match[2]) * 1e9) if match[2] else 0)


def _candidates(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key, part in _SCORED:
        scored = told.get(key)
        if isinstance(scored, list):
            found = (_candidate(one, part) for one in scored[:MAX_CANDIDATES] if isinstance(one, dict))
            return [one for one in found if one is not None]
    return []


def _candidate(scored: Mapping[str, Any], part: str) -> dict[str, Any] | None:
    endpoint = scored.get(part)
    worker = _address(endpoint)
    if worker is None or not isinstance(endpoint, dict):
        return None
    running = endpoint.get("RunningRequestsSize", endpoint.get("RunningQueueSize"))
    return {
        "worker": worker,
        "matched_tokens": None,
        "load": _number(running),
        "queue": _number(endpoint.get("WaitingQueueSize")),
        "score": _number(scored.get("Score")),
    }


def _chosen(result: object) -> str | None:
    """Address of the first endpoint that a picker answered; the others are for retries."""
    if not isinstance(result, dict):
        return None
    for key, part in _PICKED:
        targets = result.get(key)
        if isinstance(targets, list) and targets and isinstance(targets[0], dict):
            return _address(targets[0].get(part)) or _address(targets[0])
    return None


def _address(endpoint: object) -> str | None:
    """`address:port`, the name that `attach` gives to the engine behind it; the pod's name where no address is told."""
    if not isinstance(endpoint, dict):
        return None
    address, port = endpoint.get("Address"), endpoint.get("Port")
    if isinstance(address, str) and 0 < len(address) <= 256:
        host = f"[{address}]" if ":" in address and not address.startswith("[") else address
        return f"{host}:{port}" if isinstance(port, str | int) and str(port).isdecimal() else host
    named = endpoint.get("NamespacedName")
    name = named.get("Name", named.get("name")) if isinstance(named, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= 256 else None


def _plugin(name: object) -> str | None:
    """`type/name` of a plugin; the type alone where the name repeats it."""
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        return None
    kind, _, own = name.partition("/")
    return kind if own in ("", kind) else name


def _number(value: object) -> float | None:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None
    )
