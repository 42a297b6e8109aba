"""All faults by name: what the modules of `faults/` hold, pairs of them (`one+other`), and quiet runs in a fault's setting (`aa@one`)."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from diagnosis.lab import faults
from diagnosis.lab.fault import Fault, pair, quiet_in
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

PAIRS = (
    "admission_blocked_on_blocks+hotspot_straggler",
    "premature_eviction+load_step",
    "slow_steps+cold_start",
    "load_step+length_shift",
    "prefix_caching_off+slow_steps",
    "hotspot_straggler+innocent_mark",
)
"""Those that a matrix holds unless others are named."""


AA_IN = "aa@"
"""Before a fault's name: two draws of the traffic in the setting in which that fault would be injected, and nothing injected."""


@cache
def all_faults() -> Mapping[str, Fault]:
    """Single faults by name, family by family."""
    found: dict[str, Fault] = {}
    for module in sorted(pkgutil.iter_modules(faults.__path__), key=lambda module: module.name):
        for fault in importlib.import_module(f"{faults.__name__}.{module.name}").FAULTS:
            assert fault.name not in found, f"two faults are called {fault.name}"
            found[fault.name] = fault
    return MappingProxyType(found)


def find_fault(name: str) -> Fault:
    """The fault, the pair `one+other`, or nothing wrong in a fault's setting (`aa@one`); UsageError names the known ones."""
    known = all_faults()
    quiet = name.startswith(AA_IN)
    parts = name.removeprefix(AA_IN).split("+")
    for part in parts:
        if part not in known:
            raise UsageError(f"no fault '{part}' here; known: {', '.join(known)}, and pairs one+other", fault=part)
    if len(parts) == 1:
        return quiet_in(known[parts[0]], AA_IN) if quiet else known[name]
    if len(parts) != 2:
        raise UsageError(f"'{name}' names {len(parts)} faults; at most two can be injected at once")
    return pair(known[parts[0]], known[parts[1]])
