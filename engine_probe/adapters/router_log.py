"""Routing decisions in the logs of routers: lines -> `route` rows, one reader a router.

What a line tells is what the row says: the instant (the SGLang and vLLM routers write whole seconds), the worker
chosen, the request where it is named. A decision whose request is not named is counted and left out: it can be joined
to nothing. Sources, read in logs of the real programs: sglang-router 0.3.2 (`--log-level debug`), vllm-router 0.1.17;
production-stack `services/request_service/request.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from engine_probe.adapters.adapter import Rows
from engine_probe.adapters.vllm import normalise_request_id

COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_STAMP: Final = re.compile(r"^\s*(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?Z?")
_SGLANG: Final = re.compile(r'request_id="(?P<id>[^"]{1,256})"[^}]*\}: .*?Sending request url=(?P<url>\S{1,512})')
_SGLANG_POLICY: Final = re.compile(
    r"Starting router on [^|]{1,256}\|.{0,8192}\| policy: (?P<policy>[A-Z][A-Za-z]{1,63})"
)
_SGLANG_ASSIGNED: Final = re.compile(r"Assigning policy (?P<policy>[a-z][a-z_]{1,63}) to new model ")
_WORD_EDGE: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_HASHED: Final = re.compile(
    r"Consistent hash routing: key='header:x-request-id:(?P<id>[^']{1,256})' -> worker='(?P<url>[^']{1,512})'"
)
_UNNAMED: Final = re.compile(
    r"Power-of-two selection: |Consistent hash routing: |SLL: (?:new|existing|sticky) session "
)
_STACK: Final = re.compile(
    r"Routing request (?P<id>\S{1,256}) (?:with session id (?P<session>.{1,256}?) )?to (?P<url>\S{1,512}) "
    r"at (?P<at>\d{9,11}(?:\.\d+)?), process time = (?P<took>\d+(?:\.\d+)?)"
)


def worker_of_url(url: str) -> str:
    """`http://10.0.0.7:8000/` -> `10.0.0.7:8000`: the name that `attach` gives to the engine behind the address."""
    return url.partition("://")[2].rstrip("/") or url


class RouterLog(ABC):
    """Shared frame: colours off, instants read, decisions without a request counted (`unnamed`)."""

    policy: str | None = None

    def __init__(self, router: str) -> None:
        self._router = router
        self.unnamed = 0
        self._tries: Counter[str] = Counter()

    def feed(self, line: str) -> Rows:
        """One line; a `route` row where it tells a decision."""
        row = self.decision(COLOUR.sub("", line))
        return {} if row is None else {"route": [{"router": self._router, "policy": self.policy, **row}]}

    def worker_facts(self) -> dict[str, Any]:
        """Routers tell no geometry."""
        return {}

    @abstractmethod
    def decision(self, line: str) -> dict[str, Any] | None:
        """Columns of the `route` row that the line tells."""


class SglangRouterLog(RouterLog):
    """sglang-router at `--log-level debug`: the span of each line names the request, retries are further decisions.

    Its start-up line names the policy; models may have others (`Assigning policy`), and then it is not told.
    """

    def __init__(self, router: str) -> None:
        super().__init__(router)
        self._policies: set[str] = set()

    def decision(self, line: str) -> dict[str, Any] | None:
        if "policy" in line:
            self._learn_policy(line)
        match = _SGLANG.search(line)
        at_ns = instant(line)
        if match is None or at_ns is None:
            return None
        return {"at_ns": at_ns, "request_id": normalise_request_id(match["id"]), "chosen": worker_of_url(match["url"])}

    def _learn_policy(self, line: str) -> None:
        if (named := _SGLANG_POLICY.search(line)) is not None:
            self._policies = {_WORD_EDGE.sub("_", named["policy"]).lower()}
        elif (assigned := _SGLANG_ASSIGNED.search(line)) is not None:
            self._policies.add(assigned["policy"])
        self.policy = next(iter(self._policies)) if len(self._policies) == 1 else None


class VllmRouterLog(RouterLog):
    """vllm-router: of its policies only consistent_hash names the request, where it hashes its id."""

    def decision(self, line: str) -> dict[str, Any] | None:
        match = _HASHED.search(line)
        at_ns = instant(line)
        if match is None or at_ns is None:
            self.unnamed += _UNNAMED.search(line) is not None
            return None
        return {
            "at_ns": at_ns,
            "request_id": normalise_request_id(match["id"]),
            "chosen": worker_of_url(match["url"]),
            "policy": "consistent_hash",
        }


class StackRouterLog(RouterLog):
    """production-stack's router: request, server, exact instant, and how long the decision took."""

    def decision(self, line: str) -> dict[str, Any] | None:
        match = _STACK.search(line)
        if match is None:
            return None
        return {
            "at_ns": int(Decimal(match["at"]) * 10**9),
            "request_id": normalise_request_id(match["id"]),
            "chosen": worker_of_url(match["url"]),
            "decision_s": float(match["took"]),
        }


def instant(line: str) -> int | None:
    """The instant at the start of a line, UTC ns; None where it does not start with one.

    Both Rust routers write UTC without a zone.
    """
    match = _STAMP.match(line)
    if match is None:
        return None
    try:
        base = datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(base.timestamp()) * 1_000_000_000 + (round(float("0" + match[3]) * 1e9) if match[3] else 0)
