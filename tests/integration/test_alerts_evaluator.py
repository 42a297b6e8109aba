"""The evaluator over stored rows of the lab: a fault is claimed, confirmed by a second window, told once, and ends; quiet stays quiet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from alerts import seen_once
from alerts.checks.contradiction import ContradictionCheck
from alerts.checks.hotspot import HotspotCheck
from alerts.checks.latency import LatencyCheck, got_worse, is_told
from alerts.condition import Check, Look
from alerts.evaluator import Evaluator, Rhythm
from alerts.lifecycle import Pace
from alerts.muting import muting
from alerts.notifier import Notifier
from alerts.seen_once import SeenOnce
from diagnosis.loading.load import load
from engine_probe.errors import StoreBusy
from store.alert_book import AlertBook
from store.duckdb_store import DuckDBStore
from store.interface import Batch, Window
from store.open import open_store
from tests.alert_receiver import receiver
from tests.live_rows import Windows, as_live, lab_windows

START_NS = 1_790_000_000_000_000_000
KINDS = ("request", "step", "route", "worker")


@pytest.fixture(scope="module")
def story() -> Windows:
    """Two quiet minutes or so, then as long with a tenant that is pinned to one worker."""
    return lab_windows("hotspot_affinity", START_NS, requests=3000, kinds=KINDS)


@dataclass
class Watch:
    """An evaluator over a store, its clock in the test's hand. A window is half of the fault's time."""

    store: DuckDBStore
    half_ns: int
    checks: list[Check]
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def book(self) -> AlertBook:
        return AlertBook(self.store)

    def tick(self, at_ns: int) -> dict[str, str]:
        """Alerts that changed: name -> state."""

        def keep(finding: dict[str, Any]) -> int:
            self.findings.append(finding)
            return len(self.findings)

        half = self.half_ns
        rhythm = Rhythm(half, 0, Pace(hold=half, cool_down=half, lost=20 * half))
        made = Evaluator(self.book, self.checks, rhythm, keep_finding=keep, base_url="http://kvscope")
        return {_name(alert.labels): alert.state for alert in made.tick(at_ns)}


def _name(labels: Any) -> str:
    return "/".join(labels[n] for n in ("alertname", "metric", "cause") if n in labels)


HOTSPOT = "KvscopeHotspotFound/hotspot_affinity"
SYMPTOM = "KvscopeLatencyRegression/ttft"


@pytest.fixture
def watch(story: Windows, tmp_path: Path) -> Iterator[Watch]:
    with open_store(str(tmp_path / "k.duckdb")) as store:
        store.append(Batch(story.baseline))
        store.append(Batch(story.suspect))
        yield Watch(store, story.length_ns // 2, [HotspotCheck(store, 0.01), LatencyCheck(store, "ttft")])


def test_a_fault_is_claimed_then_confirmed_by_later_data(watch: Watch, story: Windows) -> None:
    """Pending after the first half, firing after the second; told with worker, evidence, remedy, report and finding."""
    half = watch.half_ns
    first = watch.tick(story.fault_ns + half)
    assert first[HOTSPOT] == first[SYMPTOM] == "pending"
    assert watch.findings == []
    assert HOTSPOT not in watch.tick(story.fault_ns + half + half // 2)
    second = watch.tick(story.fault_ns + 2 * half)
    assert second[HOTSPOT] == second[SYMPTOM] == "firing"
    alerts = {_name(alert.labels): alert for alert in watch.book.alerts(["firing"])}
    spot, symptom = alerts[HOTSPOT], alerts[SYMPTOM]
    assert spot.labels["worker"] == symptom.labels["worker"]
    assert spot.annotations["remedy"]
    window = f"{story.fault_ns}/{story.fault_ns + 2 * half}"
    assert spot.annotations["report"] == f"http://kvscope/workers?suspect={window}"
    assert symptom.annotations["report"] == (
        f"http://kvscope/api/v1/reports?baseline={symptom.baseline}&suspect={window}&metric=ttft&format=html"
    )
    assert symptom.baseline is not None
    assert int(symptom.baseline.partition("/")[2]) <= story.fault_ns
    (finding,) = watch.findings
    assert finding["status"] == "explained"
    assert symptom.annotations["finding"] == "1"
    muted = muting(list(alerts.values()), [], story.end_ns)
    assert spot.alert_id in muted[symptom.alert_id].inhibited_by
    assert not muted[spot.alert_id].is_muted


def test_state_survives_a_restart_and_one_episode_is_told_once(story: Windows, tmp_path: Path) -> None:
    """Each tick and each plan in a process of its own, so to say: the store is closed and opened in between."""
    half, path = story.length_ns // 2, str(tmp_path / "k.duckdb")
    with open_store(path) as store:
        store.append(Batch(story.baseline))
        store.append(Batch(story.suspect))
    to = receiver("http://127.0.0.1:9/", group_by=())
    told = []
    for number in range(2, 10):
        with open_store(path) as store:
            at_ns = story.fault_ns + number * half // 2
            Watch(store, half, [HotspotCheck(store, 0.01)]).tick(at_ns)
            told.append(Notifier(AlertBook(store), [to], "http://kvscope").tell(at_ns))
    with open_store(path) as store:
        assert len(AlertBook(store).alerts(["firing", "resolved"])) == 1
        bodies = [delivery.body for delivery in AlertBook(store).deliveries()]
    assert sum(told) == 1
    assert '"status":"firing"' in bodies[0]
    assert HOTSPOT.partition("/")[0] in bodies[0]


def test_the_end_of_the_fault_is_the_end_of_the_alert(watch: Watch, story: Windows) -> None:
    """Quiet traffic again: after the window has passed and the cool-down, it is resolved."""
    half = watch.half_ns
    for step in range(2, 5):
        watch.tick(story.fault_ns + step * half // 2)
    again = as_live(story.baseline, story.end_ns - story.base_ns, "after-")
    watch.store.append(Batch(again))
    states = [watch.tick(story.end_ns + step * half // 2) for step in range(1, 5)]
    ended = next(number for number, changed in enumerate(states, 1) if changed.get(HOTSPOT) == "resolved")
    assert ended >= 2
    (over,) = [alert for alert in watch.book.alerts(["resolved"]) if _name(alert.labels) == HOTSPOT]
    assert over.ends_ns == story.end_ns + ended * half // 2
    assert watch.tick(story.end_ns + 5 * half // 2).get(HOTSPOT) is None


def test_quiet_traffic_raises_nothing(story: Windows, tmp_path: Path) -> None:
    """The baseline against itself, window after window, with all checks: nobody is told."""
    with open_store(str(tmp_path / "k.duckdb")) as store:
        for number in range(3):
            store.append(Batch(as_live(story.baseline, number * story.length_ns, f"{number}-")))
        checks: list[Check] = [HotspotCheck(store), ContradictionCheck(store), LatencyCheck(store, "ttft")]
        watch = Watch(store, story.length_ns // 2, checks)
        for step in range(2, 7):
            watch.tick(story.base_ns + step * watch.half_ns)
        assert [alert.labels for alert in watch.book.alerts(["firing", "resolved"])] == []


@dataclass
class Scripted:
    """A check that says what the test wants; or fails."""

    says: Look | Exception
    name: str = "scripted"

    def look(self, window: Window, baseline: str | None) -> Look:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def owns(self, labels: Any) -> bool:
        return bool(labels.get("alertname") == "Scripted")

    def report(self, window: str, baseline: str | None) -> str:
        return "/"


@pytest.mark.parametrize("failure", [StoreBusy("busy"), ZeroDivisionError("a defect of ours")])
def test_a_check_that_fails_holds_up_no_other(watch: Watch, story: Windows, failure: Exception) -> None:
    """The store is busy for one of them, or it has a defect: the hotspot is claimed all the same."""
    watch.checks = [Scripted(failure), *watch.checks[:1]]
    assert watch.tick(story.fault_ns + watch.half_ns) == {HOTSPOT: "pending"}


def test_a_tick_reads_each_window_once(watch: Watch, story: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three checks load the window and the baseline, two loads in all, and say what each says by itself; then all is let go of."""
    window = Window(story.fault_ns, story.fault_ns + watch.half_ns)

    def checks(seen: SeenOnce | None) -> list[Check]:
        latencies = [LatencyCheck(watch.store, metric, seen=seen) for metric in ("ttft", "tpot")]
        return [ContradictionCheck(watch.store, seen=seen), *latencies]

    apart = [check.look(window, None) for check in checks(None)]
    loaded: list[Window] = []

    def counted(store: Any, window: Window, *rest: str) -> Any:
        loaded.append(window)
        return load(store, window, *rest)

    monkeypatch.setattr(seen_once, "load", counted)
    seen = SeenOnce()
    made = Evaluator(
        watch.book,
        checks(seen),
        Rhythm(watch.half_ns, 0, Pace(hold=1, cool_down=1, lost=1)),
        keep_finding=lambda _: 1,
        base_url="",
        on_end=seen.forget,
    )
    assert [check.look(window, None) for check in checks(seen)] == apart
    assert apart[1].conditions
    assert len(loaded) == len(set(loaded)) == 2
    loaded.clear()
    seen.forget()
    made.tick(window.end_ns or 0)
    assert len(loaded) == 2
    assert not seen._facts


def test_a_window_of_too_many_requests_is_not_looked_at(
    watch: Watch, story: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check answers that it cannot tell, and says what to shorten; nothing is loaded."""
    monkeypatch.setattr(seen_once, "MOST_REQUESTS", 10)
    monkeypatch.setattr(seen_once, "load", lambda *_: pytest.fail("loaded"))
    window = Window(story.fault_ns, story.fault_ns + watch.half_ns)
    checks: list[Check] = [ContradictionCheck(watch.store), LatencyCheck(watch.store, "ttft")]
    for look in (check.look(window, None) for check in checks):
        assert not look.can_tell
        assert not look.conditions
        assert "takes at most 10: shorten the windows (KVSCOPE_ALERTS__WINDOW_S" in (look.because or "")


def test_what_every_check_saw_is_not_looked_at_again(watch: Watch) -> None:
    """No alert is held, and nothing came: the tick ends there. After a check that failed the window is looked at again."""
    looks: list[str] = []
    old: list[Window] = []

    def is_old(window: Window) -> bool:
        old.append(window)
        return True

    scripted = Scripted(Look())
    made = Evaluator(
        watch.book,
        [scripted],
        Rhythm(100, 0, Pace(hold=1, cool_down=1, lost=1)),
        keep_finding=lambda _: 1,
        base_url="",
        is_old=is_old,
        on_look=lambda name, *_: looks.append(name),
    )
    scripted.says = StoreBusy("busy")
    made.tick(1000)
    scripted.says = Look()
    made.tick(1060)
    assert (len(looks), old) == (2, [])
    made.tick(1120)
    assert (len(looks), old) == (2, [Window(1060, 1120)])


def test_an_empty_store_and_an_empty_window_raise_nothing(tmp_path: Path) -> None:
    """No rows, no alerts, no errors; no check says that it could tell."""
    with open_store(str(tmp_path / "k.duckdb")) as store:
        checks: list[Check] = [HotspotCheck(store), ContradictionCheck(store), LatencyCheck(store, "ttft")]
        window = Window(START_NS, START_NS + 1)
        assert [check.look(window, None).can_tell for check in checks] == [False, False, False]
        assert Watch(store, 60_000_000_000, checks).tick(START_NS) == {}


def _verdict(
    before: float, after: float, status: str, interval: Any = None, carried_by: str = "quantile"
) -> dict[str, Any]:
    sides = {name: {"mean_s": value, "judged_s": value} for name, value in (("baseline", before), ("suspect", after))}
    bounds = {"value": after - before, "interval_95": interval}
    return {"status": status, "carried_by": carried_by, "delta": {"mean_s": bounds, "judged_s": bounds, **sides}}


@pytest.mark.parametrize(
    ("verdict", "worse"),
    [
        (_verdict(1.0, 1.3, "explained"), True),
        (_verdict(1.0, 1.1, "explained"), False),  # certain, and too small to page for
        (_verdict(1.3, 1.0, "explained"), False),  # better
        (_verdict(1.0, 1.3, "no_change"), False),
        (_verdict(1.0, 1.3, "not_observable", (0.1, 0.5)), True),
        (_verdict(1.0, 1.3, "not_distinguishable", (0.1, 0.5), "mean"), True),
        (_verdict(1.0, 1.3, "not_distinguishable", (-0.1, 0.5)), False),
        (_verdict(1.0, 1.3, "not_distinguishable"), False),  # nothing carries an interval
    ],
)
def test_what_is_worse_enough_to_tell(verdict: dict[str, Any], worse: bool) -> None:
    """At least 20 % up, and beyond noise; that no cause is found is no reason for silence."""
    assert got_worse(verdict, 0.2) is worse


@pytest.mark.parametrize(
    ("share", "confidence", "ended", "told"),
    [
        (0.25, 0.5, False, True),
        (0.24, 0.9, False, False),
        (0.9, 0.49, False, False),
        (0.9, 0.9, True, False),
        (None, 0.5, False, True),
    ],
)
def test_which_causes_are_told(share: float | None, confidence: float, ended: bool, told: bool) -> None:
    """A quarter of the rise at least, more likely than not, and not over."""
    verdict = {"carried_by": "quantile"}
    assert is_told(verdict, {"share_p99": share, "confidence": confidence, "ended": ended}) is told
