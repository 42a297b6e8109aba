"""`--arm NAME:KEY=VALUE,...` and `--set KEY=VALUE`: words of the command line -> settings of a virtual fleet, one name a setting.

Invariant: a key is known or refused with the nearest ones; a value has its setting's type or is refused naming the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.fleet.build import FleetSettings, RouterSettings
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.virtual_costs import CostSettings
from engine_probe.errors import UsageError

YES, NO = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
OTHER_NAMES = {
    "cache": "prefix_caching",
    "enable_prefix_caching": "prefix_caching",
    "routing": "router.policy",
    "blocks": "num_blocks",
    "num_gpu_blocks": "num_blocks",
    "workers": "num_workers",
    "tensor_parallel_size": "tp",
    "enable_chunked_prefill": "chunked_prefill",
    "max_long_prefill_tokens": "max_chunk_tokens",
    "scheduling_policy": "policy",
}
"""What people and engines call them -> ours."""
FREE = ("version", "note")
"""Told in the report, changes nothing."""
ENDPOINT_KEYS = ("endpoint", "model", "no_reuse", "temperature", "max_tokens", *FREE)
START = ("start", "state")
"""`start=cold` empties the cache when counting begins."""


@dataclass(frozen=True, slots=True)
class ArmWords:
    """One `--arm`: its name, its settings as they were written, and whether it begins warm."""

    name: str
    settings: Mapping[str, str]
    is_warm: bool


@dataclass(frozen=True, slots=True)
class VirtualArm:
    """A fleet in virtual time with its bookkeeping's costs."""

    fleet: FleetSettings
    costs: CostSettings = field(default_factory=CostSettings)


def parse_arm(text: str) -> ArmWords:
    """`canary:version=0.9,routing=sticky` -> an arm. Raises UsageError."""
    name, colon, rest = text.partition(":")
    if not name.strip() or not colon:
        raise UsageError(f"--arm is {text!r}; expected NAME:KEY=VALUE,KEY=VALUE, such as canary:max_num_seqs=64")
    settings = parse_settings(rest.split(",") if rest.strip() else [], f"--arm {name.strip()}")
    start = next((settings.pop(key) for key in START if key in settings), "warm")
    if start not in ("cold", "warm"):
        raise UsageError(f"--arm {name}: start is {start!r}; expected cold or warm")
    return ArmWords(name.strip(), settings, start == "warm")


def parse_settings(words: Sequence[str], where: str) -> dict[str, str]:
    """`KEY=VALUE` words -> settings. Raises UsageError for one without `=`, or a key that is there twice."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not value.strip():
            raise UsageError(f"{where} has {word!r}; expected KEY=VALUE")
        if key in found:
            raise UsageError(f"{where} says {key} twice")
        found[key] = value.strip()
    return found


def virtual_arm(settings: Mapping[str, str], where: str) -> VirtualArm:
    """The fleet of these settings. Raises UsageError naming the key that is unknown or whose value makes no sense."""
    engine: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    router: dict[str, Any] = {}
    fleet: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    into = {"engine": engine, "scheduler": scheduler, "router": router, "fleet": fleet, "costs": costs}
    model, hardware = settings.get("model", "llama-3-8b"), settings.get("hardware", "H100")
    for key, text in settings.items():
        if key in (*FREE, "model", "hardware"):
            continue
        place = _PLACES.get(OTHER_NAMES.get(key, key))
        if place is None:
            near = difflib.get_close_matches(key, known_keys(), 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known_keys())}"
            raise UsageError(f"{where}: there is no setting {key!r} here{hint}", key=key)
        group, name, read = place
        into[group][name] = _read(text, read, where, key)
    try:
        config = EngineConfig(**engine, scheduler=SchedulerConfig(**scheduler))
        chosen = FleetSettings(
            find_shape(model), find_hardware(hardware), engine=config, router=RouterSettings(**router), **fleet
        )
        return VirtualArm(chosen, CostSettings(**costs))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", **error.facts) from error


def with_load(arm: VirtualArm, *, in_flight: int | None, seed: int) -> VirtualArm:
    """The same arm under that load, with that seed."""
    return replace(arm, fleet=replace(arm.fleet, in_flight=in_flight, seed=seed))


def known_keys() -> list[str]:
    """Every key that an arm of a virtual fleet takes."""
    return sorted({*_PLACES, *OTHER_NAMES, *FREE, "model", "hardware", *START})


def _read(text: str, read: Callable[[str], Any], where: str, key: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{where}: {key} is {text!r}; expected {error}", key=key) from error


def _flag(text: str) -> bool:
    word = text.lower()
    if word not in YES + NO:
        raise ValueError("on or off")
    return word in YES


def _whole(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ValueError("a whole number") from None


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if found != found or abs(found) == float("inf"):
        raise ValueError("a number")
    return found


def _places() -> dict[str, tuple[str, str, Callable[[str], Any]]]:
    """Key -> (which settings, field, how its value is read), from the settings themselves. The first group with a name has it
    plain; a later one's stands behind its group's name and a dot, such as router.policy."""
    found: dict[str, tuple[str, str, Callable[[str], Any]]] = {}
    groups = {
        "engine": EngineConfig,
        "scheduler": SchedulerConfig,
        "router": RouterSettings,
        "fleet": FleetSettings,
        "costs": CostSettings,
    }
    left_out = {"worker", "salt", "scheduler", "identity", "shape", "hardware", "engine", "router", "patience", "in_flight", "seed", "block_size"}  # fmt: skip
    for group, kind in groups.items():
        hints = get_type_hints(kind)
        for place in fields(kind):
            if place.name in left_out:
                continue
            words = str(hints[place.name])
            read: Callable[[str], Any] = str
            for type_, reader in (("bool", _flag), ("float", _number), ("int", _whole)):
                if type_ in words:
                    read = reader
            name = place.name if place.name not in found else f"{group}.{place.name}"
            found[name] = (group, place.name, read)
    return found


_PLACES = _places()
