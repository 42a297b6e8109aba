"""Which engines kvscope knows, and who made a page. Adapters are loaded when they are asked for.

Invariant: exactly one adapter recognises a page that an engine makes; routers, which repeat their engines' words, are
asked before the engines.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final

from engine_probe.adapters import genai_names
from engine_probe.adapters.adapter import Adapter
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.errors import UsageError

ENGINES: Final[dict[str, str]] = {
    "dynamo": "engine_probe.adapters.dynamo:DynamoAdapter",
    "llm-d": "engine_probe.adapters.llm_d:LlmdAdapter",
    "vllm-stack": "engine_probe.adapters.vllm_stack:VllmStackAdapter",
    "vllm-router": "engine_probe.adapters.routers:VllmRouterAdapter",
    "sglang-router": "engine_probe.adapters.routers:SglangRouterAdapter",
    "vllm": "engine_probe.adapters.vllm:VllmAdapter",
    "sglang": "engine_probe.adapters.sglang:SglangAdapter",
    "llamacpp": "engine_probe.adapters.llamacpp:LlamaCppAdapter",
    "trtllm": "engine_probe.adapters.trtllm:TrtllmAdapter",
    "triton-trtllm": "engine_probe.adapters.triton:TritonAdapter",
    "tgi": "engine_probe.adapters.tgi:TgiAdapter",
    "lmcache": "engine_probe.adapters.lmcache:LmcacheAdapter",
    "mooncake": "engine_probe.adapters.mooncake:MooncakeAdapter",
    "dcgm": "engine_probe.adapters.dcgm:DcgmAdapter",
    "nvidia-smi": "engine_probe.adapters.nvidia_smi:NvidiaSmiAdapter",
    "node": "engine_probe.adapters.node_exporter:NodeAdapter",
    "cadvisor": "engine_probe.adapters.cadvisor:CadvisorAdapter",
    "prometheus": "engine_probe.adapters.prometheus_server:PrometheusServerAdapter",
}
"""Name -> module:class, in the order in which a page is shown to them."""


@cache
def adapter(engine: str) -> Adapter:
    """The adapter of this name. Raises UsageError naming those there are."""
    if engine not in ENGINES:
        raise UsageError(f"{engine!r} is not an engine that kvscope knows; it knows: {', '.join(sorted(ENGINES))}.")
    module, _, name = ENGINES[engine].partition(":")
    found: Adapter = getattr(importlib.import_module(module), name)()
    return found


def adapters() -> list[Adapter]:
    """All of them, in the order of `ENGINES`."""
    return [adapter(engine) for engine in ENGINES]


def recognise(page: Page) -> Adapter | None:
    """Who made this page; None where it is nobody's that kvscope knows."""
    return next((one for one in adapters() if one.recognises(page)), None)


def tables_for(page: Page) -> tuple[MetricNames, ...]:
    """How to read a page of unknown origin: the tables of who made it, beside them those of all others."""
    maker = recognise(page)
    first = () if maker is None else maker.tables
    taken = {prefix for table in first for prefix in table.prefixes}
    known = (*genai_names.TABLES, *(table for one in adapters() for table in one.tables))
    rest = [table for table in known if not taken & set(table.prefixes)]
    distinct: dict[tuple[str, ...], MetricNames] = {}
    for table in rest:
        distinct.setdefault(table.prefixes, table)
    return (*first, *distinct.values())
