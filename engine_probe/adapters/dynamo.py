"""NVIDIA Dynamo: its frontend with the KV router, and its workers, which repeat their engine's own page beside theirs.

One word for both, told apart by the page. A frontend is a router: what it believes of a worker is `router_load`, all
else keeps its name, and nothing of it is an engine's number. A worker's page is its engine's (`vllm:`, `sglang:`,
`trtllm_`) plus `dynamo_component_*`: the engine's own words win, and Dynamo's KV gauges speak only where the engine's do
not. Dynamo writes a worker's instance id in hex on the worker's page and in decimal on the router's; the decimal one, which
its log has too, is the worker's name here, so that rows of both join without a setting. Source: pages of a real
ai-dynamo 1.6.1 (frontend and mock workers); reference section 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from engine_probe.adapters import sglang, trtllm, vllm
from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, LogReader, Surroundings, cards
from engine_probe.adapters.derived import Told
from engine_probe.adapters.dynamo_log import DynamoLog, worker_name
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, Sample
from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "dynamo"
PREFIX: Final = "dynamo_"
ENGINE_PREFIXES: Final = ("vllm:", "vllm_", "sglang:", "sglang_", "trtllm_")

USAGE: Final = ("gpu_cache_usage_percent", "kvstats_gpu_cache_usage_percent")
"""Gauge of Dynamo's own KV statistics (0 to 1 despite its name), newest first, after `dynamo_component_`."""
TOTAL_BLOCKS: Final = ("dynamo_component_total_blocks", "dynamo_component_kvstats_total_blocks")
PREDICTED: Final = "dynamo_component_router_kv_selected_cached_prefix_tokens_total"
REPORTED: Final = "dynamo_component_router_kv_worker_reused_tokens_total"
SETTINGS: Final = (
    "model_kv_cache_block_size",
    "model_total_kv_blocks",
    "model_max_num_seqs",
    "model_max_num_batched_tokens",
    "model_context_length",
    "model_migration_limit",
)
"""What a frontend tells of the workers that it serves (of the first one, where they differ)."""


def instance_id(text: str) -> str | None:
    """Decimal instance id from the hex form on a worker's page; None where it is none."""
    try:
        return str(int(text, 16)) if 0 < len(text) <= 16 else None
    except ValueError:
        return None


def worker_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The worker that a router's series speaks of (its id is decimal there); else the instance itself."""
    told = labels.get("router_worker_id") or labels.get("worker_id") or ""
    named = worker_name(told, labels.get("dp_rank")) if len(told) > 16 else None
    return named or worker


class WorkerNumbers:
    """`kv_usage_ratio` from Dynamo's own KV statistics, where the engine's page beside them does not tell it."""

    def told(self, samples: Sequence[Sample], at_ns: int) -> list[Told]:
        """At most one number a data-parallel rank."""
        found: dict[str, list[Told]] = {}
        for series, value, _ in samples:
            name = series.name
            if name.startswith(ENGINE_PREFIXES) and (
                "cache_usage_perc" in name or "token_usage" in name or "kv_cache_util" in name
            ):
                return []
            if name.startswith("dynamo_component_") and name.removeprefix("dynamo_component_") in USAGE:
                told = Told("kv_usage_ratio", {**series.labels, "wire": name}, value)
                found.setdefault(name, []).append(told)
        newest = next((f"dynamo_component_{name}" for name in USAGE if f"dynamo_component_{name}" in found), None)
        return [] if newest is None else found[newest]


NAMES: Final = MetricNames(
    ENGINE,
    (PREFIX,),
    {"router_load": ("frontend_worker_active_decode_blocks",)},
    worker_of=worker_of,
    derives=WorkerNumbers,
)

METRICS: Final = Provides(
    engine=ENGINE,
    source="metrics",
    needs="nothing for a frontend; for a worker `DYN_SYSTEM_PORT`, and its page has the engine's own `metrics` beside these",
    names=names(
        """sample: worker at_ns name labels value router_load kv_usage_ratio
        worker: worker at_ns role engine model flags
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "sample.router_load": "KV blocks that the router believes active on the worker; the truth is in the engines' own",
        "sample.kv_usage_ratio": "a worker's; from Dynamo only where the engine's page does not tell it",
        "worker.model": "of a frontend: the first one it serves",
    },
)
LOG: Final = Provides(
    engine=ENGINE,
    source="log",
    needs="the frontend's output in a file (`--log`); `DYN_LOG=info,dynamo_kv_router=debug,dynamo_llm::kv_router=debug` "
    "for the expected overlap, `DYN_LOGGING_JSONL=true` for safe reading",
    names=names("route: at_ns request_id router policy chosen candidates"),
    caveats={
        "route.candidates": "the chosen worker alone: expected tokens (only at level debug) and cost; Dynamo logs no others",
        "route.request_id": "the client's `x-request-id` where a line has it, else Dynamo's own id",
    },
)
TRACE: Final = Provides(
    engine=ENGINE,
    source="trace",
    needs="`DYN_REQUEST_TRACE=1` and `DYN_REQUEST_TRACE_SINKS=jsonl`; then `--log` or `kvscope import` of its file",
    names=names(
        """request: worker at_ns request_id vantage state model session_id labels arrival_ns first_token_ns end_ns
        frontend_s prompt_tokens output_tokens finish_reason
        route: at_ns request_id router chosen candidates"""
    ),
    caveats={
        "request.state": "the trace tells no failures: every record is `finished`, a cancelled stream too",
        "request.frontend_s": "until the prefill was dispatched: tokenisation, routing and the router's queue",
        "request.model": "only with a session header (Dynamo calls it agent context); session_id, finish_reason likewise",
        "route.candidates": "tokens that the router expected at the chosen worker; the trace calls them cached_tokens",
    },
)


class DynamoAdapter(Adapter):
    """A Dynamo frontend (port 8000) or worker (its system port)."""

    engine = ENGINE
    title = "Dynamo"
    tables = (NAMES, vllm.NAMES, sglang.NAMES, trtllm.NAMES)
    provides = (METRICS, LOG, TRACE)
    guide = "docs/engines/dynamo.md"
    metrics_flag = "DYN_SYSTEM_PORT set (a worker's system port; a frontend needs nothing)"
    inner: ClassVar = ("vllm", "sglang", "trtllm")
    """Engines whose page a worker repeats."""

    def recognises(self, page: Page) -> bool:
        wanted = ("dynamo_frontend_", "dynamo_component_", "dynamo_work_handler_", "dynamo_router_")
        return any(sample.series.name.startswith(wanted) for sample in page.samples)

    def discover(self, client: Client, page: Page) -> Discovery:
        series = frozenset(page.names())
        is_frontend = any(name.startswith("dynamo_frontend_") for name in series)
        models = [card["id"] for card in cards(client.json("/v1/models"))] if is_frontend else []
        inner = self._inner(page)
        details = {
            "is_frontend": is_frontend,
            "inner": None if inner is None else inner.title,
            "predicted": _total(page, PREDICTED),
            "reported": _total(page, REPORTED),
            "num_workers": sum(s.value for s in page.samples if s.series.name.endswith("router_worker_registered")),
        }
        return Discovery(models=models, series=series, worker=None if is_frontend else _own_id(page), details=details)

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        if any(name.startswith("dynamo_frontend_") for name in seen.series):
            model = seen.models[0] if seen.models else None
            return {"0": {"engine": ENGINE, "role": "router", "model": model, "flags": _settings(page)}}
        inner = self._inner(page)
        of_engine: dict[str, dict[str, Any]]
        of_engine = {"0": {"engine": ENGINE}} if inner is None else inner.facts(page, Discovery(series=seen.series))
        totals = [s.value for s in page.samples if s.series.name in TOTAL_BLOCKS and s.value > 0]
        told = {"num_blocks": round(totals[0])} if totals and len(of_engine) == 1 else {}
        return {
            rank: {**told, **_known(facts), "flags": {**facts.get("flags", {}), "served_by": ENGINE}}
            for rank, facts in of_engine.items()
        }

    def log_reader(self, worker: str) -> LogReader:
        return DynamoLog(worker)

    def metrics_line(self, seen: Discovery, around: Surroundings) -> Line:
        if seen.details.get("is_frontend"):
            model = ", ".join(seen.models) or "models unknown"
            text = f"Dynamo frontend serving {model}; {seen.details.get('num_workers', 0):.0f} workers registered"
        else:
            inner = seen.details.get("inner")
            text = f"Dynamo worker {seen.worker or ''} on {inner or 'an engine whose page is not here'}".replace(
                "  ", " "
            )
        return Line("metrics", bool(seen.series), f"{text}; {len(seen.series)} series every {around.interval_s:g} s")

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        lines = [self.metrics_line(seen, around)]
        if not seen.details.get("is_frontend"):
            return [*lines, *self._worker_lines(seen, around)]
        return [*lines, _routes(around), _prediction(seen), _requests(around)]

    def _worker_lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        if around.kv_error is not None:
            blocks = Line("blocks", False, around.kv_error)
        elif around.kv_links:
            blocks = Line("blocks", True, "KV events of the engine, " + "; ".join(around.kv_links))
        else:
            text = "start the worker with --kv-events-config as for vLLM, and give its endpoint with --kv-events"
            blocks = Line("blocks", False, text)
        text = (
            "for one row a request install the plugin in the worker's environment, or give the frontend's request trace"
        )
        return [blocks, Line("requests", False, text)]

    def _inner(self, page: Page) -> Adapter | None:
        from engine_probe.adapters.registry import adapter

        return next((one for one in map(adapter, self.inner) if one.recognises(page)), None)


def _routes(around: Surroundings) -> Line:
    if around.log_error is not None:
        return Line("routes", False, around.log_error)
    if around.log_path is not None:
        return Line("routes", None, f"decisions are read from {around.log_path}, the log or the request trace")
    text = "only sums. For one row a decision: DYN_LOGGING_JSONL=true and "
    text += "DYN_LOG=info,dynamo_kv_router=debug,dynamo_llm::kv_router=debug, and give --log FILE"
    return Line("routes", False, text)


def _prediction(seen: Discovery) -> Line:
    """What the router expected against what the workers say they reused."""
    predicted, reported = seen.details.get("predicted"), seen.details.get("reported")
    if not predicted:
        return Line("overlap", False, "the router expects nothing yet, or does not route by KV (--router-mode kv)")
    if not reported:
        text = (
            f"the router expected {predicted:,.0f} cached tokens so far; its workers report no reuse, so attach to each"
        )
        return Line("overlap", False, text)
    text = f"the router expected {predicted:,.0f} cached tokens so far, its workers report {reported:,.0f}"
    return Line("overlap", True, text)


def _requests(around: Surroundings) -> Line:
    if around.log_path is not None:
        return Line(
            "requests", None, f"where {around.log_path} is the request trace: one row each as the router saw it"
        )
    text = "for one row each: DYN_REQUEST_TRACE=1, DYN_REQUEST_TRACE_SINKS=jsonl, and give its file with --log"
    return Line("requests", False, text)


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}


def _total(page: Page, name: str) -> float:
    return sum(sample.value for sample in page.samples if sample.series.name == name)


def _own_id(page: Page) -> str | None:
    """A worker's instance id, from the label that its component series carry."""
    found = (s.series.labels.get("worker_id") for s in page.samples if s.series.name.startswith("dynamo_component_"))
    return next((told for text in found if text and (told := instance_id(text))), None)


def _settings(page: Page) -> dict[str, str]:
    wanted = {f"dynamo_frontend_{name}": name.removeprefix("model_") for name in SETTINGS}
    return {
        wanted[s.series.name]: f"{s.value:.0f}" for s in page.samples if s.series.name in wanted and 0 < s.value < 1e15
    }
