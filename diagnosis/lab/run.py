"""One lab run: two windows and the truth about them, in a folder.

    FOLDER/baseline/kind=request/part-0.parquet ...    rows of the run without the fault (run id `baseline`)
    FOLDER/suspect/kind=.../part-0.parquet             rows of the run with it (run id `suspect`)
    FOLDER/truth.json                                  what was done, and what it cost

Each of the two folders is what `kvscope import` reads; the truth lies outside both. Invariant: the same fault, severity, seed
and number of requests give the same bytes in every file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnosis.lab import play
from diagnosis.lab.catalogue import find_fault
from diagnosis.lab.fault import Fault, severity_of
from diagnosis.lab.lately import Lately
from diagnosis.lab.observed import check_mode, observe
from diagnosis.lab.play import KEPT, Played, play_once
from diagnosis.lab.scene import NUM_REQUESTS, Scene, base_scene, reseeded
from diagnosis.lab.truth import effect, latencies
from engine_probe.errors import UsageError
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

BASELINE, SUSPECT = "baseline", "suspect"
OTHER_DRAW = 1_000_003
MOST_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run.

    severity     mild | typical | strong | a number in the fault's unit
    independent  the baseline window is another draw of the traffic; the truth still comes from the paired run
    observe      full | otlp | client | lossy: what of the rows an observer has (`observed.py`); the truth knows all
    marked       a deployment that changed nothing is marked at the instant at which the fault begins
    """

    fault: str
    severity: str = "typical"
    seed: int = 1
    requests: int = NUM_REQUESTS
    independent: bool = False
    observe: str = "full"
    marked: bool = False

    def key(self) -> str:
        """Distinct for distinct orders; fit for a file's name."""
        draw = "-independent" if self.independent else ""
        seen = "" if self.observe == "full" else f"-{self.observe}"
        mark = "-marked" if self.marked else ""
        return f"{self.fault}-{self.severity}-{self.requests}-{self.seed}{draw}{seen}{mark}"


@dataclass(frozen=True, slots=True)
class LabRun:
    """Both windows' rows, and the truth as the document that `truth.json` holds. Runs that share a baseline share its tables."""

    fault: Fault
    baseline: Mapping[str, pa.Table]
    suspect: Mapping[str, pa.Table]
    truth: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The scenes of a fault and what they came to, before anybody observes them."""

    without: Scene
    with_fault: Scene
    baseline: Played
    suspect: Played
    attribution: dict[str, Any]


_pairs: Lately[tuple[Any, ...], _Pair] = Lately(1)
_seen: Lately[tuple[Played, str, int], dict[str, pa.Table]] = Lately(KEPT, lambda a, b: a[0] is b[0] and a[1:] == b[1:])


def run_lab(order: Order, tell: Callable[[str], None] = lambda text: None) -> LabRun:
    """Play both windows, and what else the truth needs. Raises UsageError for what is not known or makes no sense.

    What the run before played is not played again where only the way of observing, the mark or the draw of the baseline differs.
    """
    fault = find_fault(order.fault)
    severity = fault.severity.at(order.severity)
    check_mode(order.observe)
    if not 1 <= order.requests <= MOST_REQUESTS:
        raise UsageError(f"a lab run of {order.requests} requests makes no sense; give 1 to {MOST_REQUESTS:,}")
    played = _pairs.of(
        (order.fault, severity, order.seed, order.requests), lambda: _played(fault, severity, order, tell)
    )
    baseline, suspect = played.baseline, played.suspect
    if order.independent and fault.is_paired:
        tell("playing another draw of the baseline")
        baseline = play_once(reseeded(played.without, order.seed + OTHER_DRAW), BASELINE)
    return LabRun(
        fault,
        _seen.of(
            (baseline, order.observe, order.seed), lambda: observe(baseline.tables, order.observe, 2 * order.seed)
        ),
        observe(_marked(fault, suspect) if order.marked else suspect.tables, order.observe, 2 * order.seed + 1),
        _truth(fault, severity, order, played),
    )


def forget() -> None:
    """Every run is played again."""
    _pairs.clear()
    _seen.clear()
    play.forget()


def check_new(folder: Path) -> None:
    """Raises UsageError where this is no folder that is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and not empty; give a folder that is new", path=str(folder))


def write_lab(run: LabRun, folder: Path) -> list[Path]:
    """The files, in a folder that is new or empty. Raises UsageError where it is not."""
    import pyarrow.parquet as pq

    check_new(folder)
    files = []
    for name, tables in ((BASELINE, run.baseline), (SUSPECT, run.suspect)):
        for kind, table in tables.items():
            path = folder / name / f"kind={kind}" / "part-0.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path, compression="zstd")
            files.append(path)
    truth = folder / "truth.json"
    truth.write_text(json.dumps(run.truth, indent=2) + "\n", encoding="utf-8")
    return [*files, truth]


def _played(fault: Fault, severity: float, order: Order, tell: Callable[[str], None]) -> _Pair:
    """Both windows, and what each fault in them owns."""
    without = fault.setting(base_scene(fault.requests or order.requests, order.seed), severity)
    with_fault = fault.change(without, severity)
    if not fault.is_paired:
        with_fault = reseeded(with_fault, order.seed + OTHER_DRAW)
    tell("playing the baseline")
    baseline = play_once(without, BASELINE)
    tell("playing the suspect")
    suspect = play.play(with_fault, SUSPECT)
    told = latencies(suspect.tables["request"])
    # What is drawn anew has no paired run but itself: nothing was done to it.
    attribution = {fault.name: effect(told, latencies(baseline.tables["request"]) if fault.is_paired else told)}
    if fault.parts:
        attribution = _of_parts(fault, severity, order, told, tell)
    return _Pair(without, with_fault, baseline, suspect, attribution)


def _of_parts(
    fault: Fault, severity: float, order: Order, everything: Any, tell: Callable[[str], None]
) -> dict[str, Any]:
    """v(all) - v(without this one) of each part of a pair: the other goes on."""
    one, other = (find_fault(name) for name in fault.parts)
    found = {}
    for left_out, kept in ((one, other), (other, one)):
        tell(f"playing without {left_out.name}")
        scene = fault.setting(base_scene(order.requests, order.seed), severity)
        scene = kept.change(scene, severity_of(kept, severity))
        if not fault.is_paired:
            scene = reseeded(scene, order.seed + OTHER_DRAW)
        found[left_out.name] = effect(everything, latencies(play_once(scene, "without").tables["request"]))
    return found


def _marked(fault: Fault, suspect: Played) -> dict[str, pa.Table]:
    """The rows with one more: somebody deployed something when the fault began, and had nothing to do with it."""
    import pyarrow as pa

    row = {
        "worker": "fleet",
        "at_ns": _begins_ns(fault, suspect),
        "run_id": SUSPECT,
        "mark": "deployed",
        "subject": "fleet",
        "text": "release 2026.11 went out",
    }
    mark = table_from_rows("mark", [row])
    known = suspect.tables.get("mark")
    tables = [mark] if known is None else [known, mark.select(known.column_names).cast(known.schema)]
    return {**suspect.tables, "mark": pa.concat_tables(tables)}


def _begins_ns(fault: Fault, suspect: Played) -> int:
    """When the fault begins."""
    return suspect.start_ns + round(fault.begins_at * (suspect.end_ns - suspect.start_ns))


def _truth(fault: Fault, severity: float, order: Order, played: _Pair) -> dict[str, Any]:
    suspect = played.suspect
    kind, name = fault.subject(suspect.tables) if callable(fault.subject) else fault.subject
    before, after = settings(played.without), settings(played.with_fault)
    begins_ns = _begins_ns(fault, suspect)
    return {
        "lab": 1,
        "fault": fault.name,
        "family": fault.family,
        "what": fault.what,
        "severity": {"value": severity, "unit": fault.severity.unit, "asked": order.severity},
        "seed": order.seed,
        "requests": fault.requests or order.requests,
        "independent_baseline": order.independent or not fault.is_paired,
        "observed": order.observe,
        "metric": fault.metric,
        "subject": {"kind": kind, "id": name},
        "interval": None if fault.expected.is_silent else {"start_ns": begins_ns, "end_ns": suspect.end_ns},
        "expected": asdict(fault.expected),
        "attribution": played.attribution,
        "tally": asdict(suspect.tally),
        "settings": before,
        "changed": {key: value for key, value in after.items() if before.get(key) != value},
    }


def settings(scene: Scene) -> dict[str, Any]:
    """The scene as flat names and plain values; functions by how many there are."""
    fleet = scene.fleet
    parts: dict[str, Any] = {
        "model": fleet.shape.name,
        "hardware": fleet.hardware.name,
        "num_workers": fleet.num_workers,
        "num_blocks": fleet.num_blocks,
        "patience": None if fleet.patience is None else asdict(fleet.patience),
        "tier": None if fleet.tier is None else asdict(fleet.tier),
        "extras": None if fleet.extras is None else asdict(fleet.extras),
        "handover": None if fleet.handover is None else asdict(fleet.handover),
        "engine": {"class": scene.engine_class.__name__, "block_size": fleet.engine.block_size, **fleet.engine.flags()},
        "router": asdict(fleet.router),
        "traffic": asdict(scene.traffic),
        "extra_traffic": [asdict(more) for more in scene.extra],
        "costs": asdict(scene.costs),
        "front_end": asdict(scene.front_end),
        "clients": None if scene.clients is None else asdict(scene.clients),
        "cancels": {"every": scene.cancels, "after_s": scene.cancel_s} if scene.cancels else None,
        "hooks_at_s": [after_s for after_s, _ in scene.hooks],
        "edits": len(scene.edits),
        "warmup_s": scene.warmup_s,
    }
    flat: dict[str, Any] = {}
    for name, value in parts.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat
