"""What a fleet's workers have in common, and what changes with those that come: versions, settings, templates, replicas.

A rolling deployment replaces workers by others with new names, so no worker changes and still everything does. So a new
worker is compared with the newest one of its group. Invariant: a setting is told once each time it changes in a group,
and what differs from machine to machine (blocks that fit, addresses) is no setting. Pure: facts in, mark rows out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine_probe.adapters.facts import changes

OWN: Final = frozenset(
    """host gpu_id num_blocks num_gpu_blocks kv_cache_size_tokens kv_cache_max_concurrency weights_bytes
    activation_peak_bytes available_kv_cache_memory_bytes max_total_num_tokens host_name hostname port pid
    kv_bytes_per_block random_seed seed""".split()  # noqa: SIM905
)
"""Facts and flags that differ between workers of one deployment."""

Rows = list[dict[str, Any]]


class FleetFacts:
    """Compares workers of a group as they come; `group` is the model or the target's job."""

    def __init__(self) -> None:
        self._groups: dict[str, Mapping[str, Any]] = {}
        self._replicas: int | None = None

    def joined(self, group: str, worker: str, facts: Mapping[str, Any], at_ns: int) -> Rows:
        """A worker was found, or changed. Marks where it differs from the newest one of its group before it."""
        before = self._groups.get(group)
        told = {key: value for key, value in facts.items() if value is not None}
        self._groups[group] = {
            **(before or {}),
            **told,
            "flags": {**(before or {}).get("flags", {}), **told.get("flags", {})},
        }
        if before is None:
            return []
        return [
            {
                "at_ns": at_ns,
                "mark": "deployed",
                "subject": group,
                "worker": worker,
                "text": f"{setting} of {group} changed from {old} to {new}; {worker} is the first with it.",
                "attrs": {"setting": setting, "old": old, "new": new, "worker": worker, "seen_by": "attach"},
            }
            for setting, old, new in changes(before, told)
            if setting not in OWN
        ]

    def counted(self, replicas: int, at_ns: int) -> Rows:
        """The number of targets now. A mark where it is another one than before."""
        before, self._replicas = self._replicas, replicas
        if before is None or before == replicas:
            return []
        return [
            {
                "at_ns": at_ns,
                "mark": "config_changed",
                "subject": "fleet",
                "text": f"The fleet has {replicas} {'worker' if replicas == 1 else 'workers'} now, {before} before.",
                "attrs": {"setting": "replicas", "old": str(before), "new": str(replicas), "seen_by": "attach"},
            }
        ]
