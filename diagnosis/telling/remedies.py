"""Which lines of a runbook are for the engine that served the windows: those of another engine are no help at night.

A line begins with whom it is for (`vLLM: --max-num-seqs ...`, `fleet: add workers`). Invariant: where no worker tells an engine that
runbooks know, every line stays, and lines for fleet, router, host and application always do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from diagnosis.facts import Facts

ENGINES: Final[Mapping[str, str]] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "trtllm": "TensorRT-LLM",
    "tgi": "TGI",
}
"""Who a line is for, by the engine's name in `worker` rows."""
DYNAMO: Final = "dynamo"
LAYERS: Final[Mapping[str, frozenset[str]]] = {
    "Dynamo": frozenset(("vLLM", "SGLang", "TensorRT-LLM")),
    "SGLang router": frozenset(("vLLM", "SGLang")),
}
"""What stands before engines, and the engines that it can stand before."""


def engines_of(*windows: Facts) -> frozenset[str]:
    """Engines that the windows' workers tell, and Dynamo where it serves them."""
    workers = [worker for facts in windows for worker in facts.workers]
    told = {worker.engine for worker in workers} | {worker.flags.get("served_by") for worker in workers}
    return frozenset(name for name in told if name)


def of_engines(lines: Sequence[str], engines: frozenset[str]) -> list[str]:
    """The lines without those for engines that did not serve, and for routers that cannot have stood before those that did."""
    served = {words for name, words in ENGINES.items() if name in engines}
    if not served:
        return list(lines)
    before = {"Dynamo"} if DYNAMO in engines else {layer for layer, known in LAYERS.items() if known & served}
    others = (set(ENGINES.values()) | set(LAYERS)) - served - before
    return [line for line in lines if line.partition(":")[0] not in others]
