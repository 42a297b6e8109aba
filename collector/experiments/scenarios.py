"""Experiments that are built in: what is asked, and what the cache is switched on with.

`founding` is the case that kvscope was made for: an 8k system prompt shared by 70 % of the calls, 64-token answers, eight
workers; the cache is switched on together with cache-aware routing. Mean TTFT falls, P99 rises. Here it is locality: routing by
prefix alone sends all who share it to one worker. In `founding-capacity` it is capacity: several such prompts, few blocks, and an
eviction that scans the cached blocks, so a miss first pays for the room it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collector.experiments.workload import Workload
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.errors import UsageError

ANSWER = Lengths(64, 64)


@dataclass(frozen=True, slots=True)
class Scenario:
    """common, off, on: settings of every arm, of those without the cache, of those with it."""

    name: str
    sentence: str
    workload: Workload
    common: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=lambda: {"cache": "off"})
    on: Mapping[str, str] = field(default_factory=lambda: {"cache": "on"})
    repeats: int = 5


PLAIN = Scenario(
    "cache off and on",
    "Prefix cache off and on, cold and warm.",
    Workload(Traffic(rate=8.0, own_tokens=Lengths(64, 512), output_tokens=Lengths(32, 128)), num_requests=300),
    repeats=3,
)
SCENARIOS = {
    "founding": Scenario(
        "founding case: locality",
        "An 8k system prompt shared by 70 % of the calls, 64-token answers, 8 workers; on: routing by prefix.",
        Workload(
            Traffic(
                rate=13.0,
                groups=1,
                shared_tokens=8192,
                shared_ratio=0.7,
                own_tokens=Lengths(1024, 4096),
                output_tokens=ANSWER,
            )
        ),
        {"model": "llama-3-8b", "hardware": "H100", "workers": "8"},
        {"cache": "off", "routing": "round_robin"},
        {"cache": "on", "routing": "prefix_affinity"},
    ),
    "founding-capacity": Scenario(
        "founding case: capacity",
        "Six 8k system prompts shared by 70 % of the calls, 64-token answers, 4 workers of 4,000 blocks; evictions scan.",
        Workload(
            Traffic(
                rate=8.0,
                groups=6,
                skew=1.2,
                shared_tokens=8192,
                shared_ratio=0.7,
                own_tokens=Lengths(256, 1024),
                output_tokens=ANSWER,
            )
        ),
        {
            "model": "llama-3-8b",
            "hardware": "H100",
            "workers": "4",
            "blocks": "4000",
            "routing": "round_robin",
            "scan_block_s": "5e-8",
        },
    ),
}


def find_scenario(name: str | None) -> Scenario:
    """The built-in experiment of that name, or the plain one. Raises UsageError naming those there are."""
    if name is None:
        return PLAIN
    if name not in SCENARIOS:
        raise UsageError(f"there is no built-in experiment {name!r}; there are {', '.join(SCENARIOS)}", name=name)
    return SCENARIOS[name]
