"""llama.cpp's server: `/metrics`, `/slots`, `/props`, and the `timings` of its answers.

Its page has no labels and few names. `prompt_tokens_total` counts what was computed, and only newer builds count what
came from the cache beside it: lookups and hits are known where both are there. The two throughput gauges are averages
since the last reader's visit, so they are left out. `/slots` shows the tokens that each slot holds now; it is asked
only while somebody is served, since asking an idle server keeps it from sleeping. Invariant: a request is never made up
from what slots showed in passing; its own numbers are in the `timings` of its answer. Source: reference section 6;
`tools/server/server-context.cpp`; xllamacpp 2026.10.11549.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, LogReader, Poll, Rows, Surroundings, cards
from engine_probe.adapters.llamacpp_provides import PROVIDES
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.errors import UnknownFormat
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    import pyarrow as pa

ENGINE: Final = "llamacpp"
SLOTS: Final = "/slots"

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "requests_running": ("requests_processing",),
    "requests_waiting": ("requests_deferred",),
    "kv_usage_ratio": ("kv_cache_usage_ratio",),
    "prompt_tokens_computed_total": ("prompt_tokens_total",),
    "prompt_tokens_cached_total": ("prompt_tokens_cached_total",),
    "output_tokens_total": ("tokens_predicted_total",),
    "draft_tokens_total": ("spec_decode_num_draft_tokens_total",),
    "accepted_tokens_total": ("spec_decode_num_accepted_tokens_total",),
}
ALSO: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "prompt_tokens_total": (("prompt_tokens_total", "prompt_tokens_cached_total"),),
    "prefix_queries_tokens_total": (("prompt_tokens_total", "prompt_tokens_cached_total"),),
    "prefix_hits_tokens_total": (("prompt_tokens_cached_total",),),
}
DRAINING: Final = frozenset(("prompt_tokens_seconds", "predicted_tokens_seconds"))

NAMES: Final = MetricNames(ENGINE, ("llamacpp:", "llamacpp_"), CANONICAL, also=ALSO, drops=DRAINING)

_SLOT_SAMPLES: Final = {
    "slot_kv_tokens": "n_prompt_tokens",
    "slot_prompt_tokens_processed": "n_prompt_tokens_processed",
    "slot_prompt_tokens_cached": "n_prompt_tokens_cache",
}


def timings_columns(timings: Mapping[str, Any]) -> dict[str, Any]:
    """`request` columns told by the `timings` object of an answer; unknown ones are absent.

    prompt_ms runs from the slot's start to the first token, predicted_ms from there to the last one: the wait for a slot
    is in neither, so `queue_s` is not known. prompt_n tokens were computed, cache_n came from the slot's cache (absent
    in builds before late 2025, where the prompt's length is not known from here either).
    """
    computed, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    found = {
        "prefill_s": _seconds(timings.get("prompt_ms")),
        "decode_s": _seconds(timings.get("predicted_ms")),
        "prompt_tokens": None if computed is None or cached is None else computed + cached,
        "cached_tokens": cached,
        "computed_tokens": computed,
        "output_tokens": _count(timings.get("predicted_n")),
        "draft_tokens": _count(timings.get("draft_n")),
        "accepted_tokens": _count(timings.get("draft_n_accepted")),
    }
    return {key: value for key, value in found.items() if value is not None}


class LlamaCppAdapter(Adapter):
    """llama-server, one model."""

    engine = ENGINE
    title = "llama-server"
    tables = (NAMES,)
    provides = PROVIDES
    metrics_flag = "--metrics"
    guide = "docs/engines/llamacpp.md"

    def discover(self, client: Client, page: Page) -> Discovery:
        props = client.json("/props")
        props = props if isinstance(props, dict) else {}
        models = [model_name(card["id"]) for card in cards(client.json("/v1/models"))]
        build = props.get("build_info")
        return Discovery(
            version=build if isinstance(build, str) and build else None,
            models=models or [model_name(name) for name in (props.get("model_alias"),) if isinstance(name, str)],
            max_context=_count(_dict(props.get("default_generation_settings")).get("n_ctx")),
            kv_sources={},
            series=frozenset(page.names()),
            ranks=["0"],
            details=props,
        )

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        props = seen.details
        told = {"total_slots": props.get("total_slots"), "n_ctx_slot": seen.max_context}
        kind = props.get("model_ftype")
        facts = {**self.common_facts(seen), "role": "mixed", "dtype": kind if isinstance(kind, str) else None}
        return {"0": facts | {"flags": {key: str(value) for key, value in told.items() if value is not None}}}

    def polls(self, seen: Discovery, worker: str, salt: bytes, sampling: Sampling) -> Sequence[Poll]:
        return (SlotPoll(worker),)

    def open_sources(self, seen: Discovery) -> tuple[str, ...]:
        found = ["metrics"] if seen.series else []
        if seen.details:
            found.append("props")
            if seen.details.get("endpoint_slots") is not False:
                found.append("slots")
        return tuple(found)

    def log_reader(self, worker: str) -> LogReader:
        return LlamaCppLog()

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        return [self.metrics_line(seen, around), *_describe(seen, around)]


class SlotPoll:
    """`/slots` -> samples: what each slot holds now, and the tokens held by all that are serving."""

    path = SLOTS
    method: Any = "GET"
    timeout_s = 5.0
    hint = "Start llama-server without --no-slots."

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._was_busy = False

    def is_due(self, page: Page | None) -> bool:
        """While somebody is served or waits, and once after."""
        names = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
        busy = page is not None and any(s.value > 0 for s in page.samples if s.series.name in names)
        return busy or self._was_busy

    def tables(self, body: bytes, at_ns: int) -> dict[str, pa.Table]:
        from engine_probe.schema import table_from_rows

        rows = slot_samples(slots(body), self._worker, at_ns)
        self._was_busy = any(row["name"] == "llamacpp:slots_busy" and row["value"] > 0 for row in rows)
        return {"sample": table_from_rows("sample", rows)} if rows else {}


def slots(body: bytes) -> list[dict[str, Any]]:
    """The slots of one answer. Raises UnknownFormat."""
    try:
        return msgspec.json.decode(body, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnknownFormat(f"{SLOTS} did not answer a list of slots ({error}); is this llama-server?") from error


def slot_samples(found: Sequence[Mapping[str, Any]], worker: str | None, at_ns: int) -> list[dict[str, Any]]:
    """`sample` rows of one look. Tokens are those in the KV cache, prompt and output; params and text are not read."""
    values: list[tuple[str, dict[str, str], float]] = []
    busy = [slot for slot in found if slot.get("is_processing") is True]
    held = {id(slot): _count(slot.get("n_prompt_tokens")) or 0 for slot in found}
    for slot in found:
        labels = {"slot": str(slot.get("id"))}
        values.append(("slot_processing", labels, float(slot.get("is_processing") is True)))
        values += [
            (name, labels, float(number))
            for name, key in _SLOT_SAMPLES.items()
            if (number := _count(slot.get(key))) is not None
        ]
        decoded = _decoded(slot.get("next_token"))
        if decoded is not None:
            values.append(("slot_tokens_decoded", labels, float(decoded)))
    values.append(("slots_busy", {}, float(len(busy))))
    values.append(("slots_total", {}, float(len(found))))
    values.append(("slots_kv_tokens_serving", {}, float(sum(held[id(slot)] for slot in busy))))
    values.append(("slots_kv_tokens_idle", {}, float(sum(held.values()) - sum(held[id(slot)] for slot in busy))))
    return [
        {
            "worker": worker,
            "at_ns": at_ns,
            "name": f"llamacpp:{name}",
            "labels": {**labels, "wire": SLOTS},
            "value": value,
        }
        for name, labels, value in values
    ]


_SLOT_LINE = re.compile(
    r"n_slots = (?P<slots>\d{1,6})(?:, n_ctx_slot = (?P<context>\d{1,12}))?(?:, kv_unified = '(?P<unified>true|false)')?"
)
_CACHE_LINE = re.compile(
    r"llama_kv_cache\w*: +size = +(?P<mib>\d{1,9}\.\d+) MiB \( *(?P<cells>\d{1,12}) cells, .{0,60}K \((?P<type>\w{1,12})\)"
)
_BUILD_LINE = re.compile(r"\bbuild: (?P<number>\d{1,7}) \((?P<commit>\w{6,40})\)")


class LlamaCppLog:
    """Start-up lines of llama-server: slots, KV cells, type and bytes of the cache, as far as its verbosity tells them.

    Its lines about requests do not say when one arrived, so no row is made of them.
    """

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._flags: dict[str, str] = {}

    def feed(self, line: str) -> Rows:
        """Take in one line; never a row."""
        line = line[:4096]
        if "n_slots = " in line and (match := _SLOT_LINE.search(line)) is not None:
            self._flags["total_slots"] = match["slots"]
            if match["context"] is not None:
                self._flags["n_ctx_slot"] = match["context"]
                self._facts["max_context"] = int(match["context"])
            if match["unified"] is not None:
                self._flags["kv_unified"] = match["unified"]
                shares = 1 if match["unified"] == "true" else int(match["slots"])
                self._facts |= {"block_size": 1, "num_blocks": int(match["context"] or 0) * shares or None}
        elif "llama_kv_cache" in line and (match := _CACHE_LINE.search(line)) is not None:
            self._facts["kv_dtype"] = match["type"]
        elif "build: " in line and (match := _BUILD_LINE.search(line)) is not None:
            self._facts["engine_version"] = f"b{match['number']}-{match['commit']}"
        return {}

    def worker_facts(self) -> dict[str, Any]:
        """Columns of a `worker` row told so far. A KV cell holds one token, so a block is one token."""
        facts = {key: value for key, value in self._facts.items() if value is not None}
        return {"engine": ENGINE, **facts, "flags": dict(self._flags)}


def model_name(text: str) -> str:
    """The model's name without the folders of a path."""
    return text.replace("\\", "/").rpartition("/")[2] if text.endswith(".gguf") else text


def _describe(seen: Discovery, around: Surroundings) -> list[Line]:
    told = around.polls.get(SLOTS, "")
    looks = "what each slot holds, from /slots, while somebody is served"
    return [
        Line(
            "requests",
            False,
            "the engine tells them in its answers only (`timings`): kvscope proxy --upstream records them",
        ),
        Line("slots", False, told) if told else Line("slots", True if told is None else None, looks),
        Line("blocks", False, "llama-server tells of no single block: what a slot's cache lost is not observable"),
        Line("log", around.log_error is None and around.log_path is not None, around.log_error or _log_text(around)),
    ]


def _log_text(around: Surroundings) -> str:
    if around.log_path is None:
        return "start-up lines (KV cells, unified or one share a slot) are not read: give --log FILE"
    return f"start-up lines of {around.log_path}"


def _decoded(told: Any) -> int | None:
    """`next_token` is an object in older builds, and a list of one since."""
    first = told[0] if isinstance(told, list) and told else told
    return _count(first.get("n_decoded")) if isinstance(first, dict) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _seconds(milliseconds: Any) -> float | None:
    is_number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
    return milliseconds / 1e3 if is_number and 0 <= milliseconds < 1e10 else None
