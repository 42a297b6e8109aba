"""Nothing is wrong: the same run twice, two draws of the same, and a mark beside which nothing happens."""

from __future__ import annotations

from diagnosis.lab.fault import SWITCH, Expected, Fault, Severity
from diagnosis.lab.scene import Scene, with_hook
from engine_probe.engine.fleet.virtual_fleet import VirtualFleet

SILENT = Expected(is_silent=True)


def mark(fleet: VirtualFleet, at_ns: int) -> None:
    """A deployment is told, and nothing changes."""
    fleet.router.recorder.row(
        "mark", at_ns, mark="deployed", subject="fleet", text="release 2026.11 went out", attrs={"version": "2026.11"}
    )


def _marked(scene: Scene, severity: float) -> Scene:
    return with_hook(scene, severity * scene.measured_s, mark)


FAULTS = (
    Fault("none", "quiet", "The same run twice", SWITCH, SILENT),
    Fault("aa", "quiet", "Two draws of the same traffic (A/A)", SWITCH, SILENT, is_paired=False),
    Fault(
        "innocent_mark",
        "quiet",
        "A deployment is marked and nothing changes; the traffic is drawn anew",
        Severity(0.5, 0.5, 0.5, "share of the window after which it is marked"),
        SILENT,
        _marked,
        is_paired=False,
    ),
)
