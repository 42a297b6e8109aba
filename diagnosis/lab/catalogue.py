"""All faults by name: what the modules of `faults/` hold, and pairs of them, written `one+other`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from diagnosis.lab import faults
from diagnosis.lab.fault import Fault, pair
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
    """The fault, or the pair `one+other`; UsageError names the known ones."""
    known = all_faults()
    parts = name.split("+")
    for part in parts:
        if part not in known:
            raise UsageError(f"no fault '{part}' here; known: {', '.join(known)}, and pairs one+other", fault=part)
    if len(parts) == 1:
        return known[name]
    if len(parts) != 2:
        raise UsageError(f"'{name}' names {len(parts)} faults; at most two can be injected at once")
    return pair(known[parts[0]], known[parts[1]])
