"""Hotspots of the lab's routing faults: played, stored, judged - each kind by its name, its worker, and none without the fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from collector.api.hotspots import HotspotsDocument
from diagnosis.hotspots.judge import hotspots
from diagnosis.hotspots.question import answer
from diagnosis.lab.fault import Fault
from diagnosis.lab.faults.routing import FAULTS, STRAGGLER
from diagnosis.lab.play import play
from diagnosis.lab.scene import base_scene
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.traffic.trace import trace_calls
from engine_probe.errors import BadWindow, UsageError
from engine_probe.sending.sink import MemorySink
from store.interface import Batch, Store, Window
from store.open import open_store
from tests.conftest import Ended
from tests.integration.collector_harness import running
from tests.store_rows import batch

NAMES = [fault.name for fault in FAULTS]
BY_NAME = {fault.name: fault for fault in FAULTS}
TRACE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"
NOW_NS = 1_790_000_000_000_000_000


def _played(fault: Fault, run: str, *, with_fault: bool) -> dict[str, pa.Table]:
    severity = fault.severity.typical
    scene = fault.setting(base_scene(1000), severity)
    played = play(fault.change(scene, severity) if with_fault else scene, run)
    return {kind: rows for kind, rows in played.tables.items() if kind != "block"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for each fault (its name) and one without it (`NAME-without`); nobody holds the store open."""
    made = tmp_path_factory.mktemp("hotspots") / "kvscope.duckdb"
    with open_store(str(made)) as store:
        for fault in FAULTS:
            store.append(Batch(_played(fault, fault.name, with_fault=True)))
            store.append(Batch(_played(fault, f"{fault.name}-without", with_fault=False)))
        outcome = _played(BY_NAME["hotspot_affinity"], "outcome", with_fault=True)
        store.append(Batch({kind: rows for kind, rows in outcome.items() if kind != "route"}))
        slow = _played(BY_NAME["hotspot_straggler"], "slow-outcome", with_fault=True)
        store.append(Batch({kind: rows for kind, rows in slow.items() if kind != "route"}))
    return made


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with open_store(str(path), read_only=True) as opened:
        yield opened


def _busiest(store: Store, run: str) -> str:
    chosen = store.rows("route", Window(run_id=run), ["chosen"])["chosen"].to_pylist()
    return str(Counter(chosen).most_common(1)[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_fault_is_named(store: Store, name: str) -> None:
    """The dearest hotspot is of the injected kind, at the worker that has it, with seconds and something to do."""
    spot = hotspots(store, Window(run_id=name)).hotspots[0]
    assert spot.cause == name
    if name in ("hotspot_stale_index", "hotspot_unreachable_threshold"):
        assert spot.subject == {"kind": "fleet", "id": None}
    else:
        worker = STRAGGLER if name == "hotspot_straggler" else _busiest(store, name)
        assert spot.subject == {"kind": "worker", "id": worker}
    assert spot.regret_s is not None
    assert spot.regret_s > 0.0
    assert spot.advice.text


def test_pure_affinity_on_a_real_trace_is_found_in_ten_seconds(tmp_path: Path) -> None:
    """Ten H100s of 5,859 blocks, the first minute of a public trace, longest prefix with ties to the lowest index.

    The block that all requests share pins them to w0, where dozens queue while nine workers idle.
    """
    sink = MemorySink()
    fleet = build_fleet(
        FleetSettings(
            find_shape("llama-3-8b"),
            find_hardware("h100"),
            num_workers=10,
            num_blocks=5859,
            engine=EngineConfig(block_size=512, scheduler=SchedulerConfig(max_num_seqs=128)),
            router=RouterSettings(policy="prefix_affinity", ties="lowest"),
        ),
        sink,
        run_id="trace",
    )
    fleet.run(trace_calls(TRACE, 512, limit=170))
    with open_store(str(tmp_path / "kvscope.duckdb")) as store:
        store.append(Batch({kind: sink.table(kind) for kind in ("request", "route", "step")}))
        found = hotspots(store, Window(run_id="trace"))
    spot = found.hotspots[0]
    assert (spot.kind, spot.subject["id"]) == ("affinity", "w0")
    assert spot.detected_ns - spot.interval["start_ns"] == 10_000_000_000
    assert spot.advice.replicas == 10
    assert spot.advice.spill_above == 0


@pytest.mark.parametrize("name", NAMES)
def test_without_the_fault_there_is_no_hotspot(store: Store, name: str) -> None:
    """The same calls in the same setting: quiet."""
    assert hotspots(store, Window(run_id=f"{name}-without")).status == "none"


@pytest.mark.parametrize("name", NAMES)
def test_evidence_is_what_its_sql_gives(store: Store, name: str) -> None:
    """Each statement that has SQL states the first column of its one row."""
    for spot in hotspots(store, Window(run_id=name)).hotspots:
        for fact in spot.evidence:
            if fact.sql is not None:
                [value] = store.query(fact.sql).column(0).to_pylist()
                assert value == pytest.approx(fact.value)


def test_outcome_alone_names_the_worker_and_not_the_reason(store: Store) -> None:
    """Without route rows: who gets too much, kind null, and what would be needed to say why."""
    found = hotspots(store, Window(run_id="outcome"))
    assert not found.has_routes
    spot = found.hotspots[0]
    assert (spot.kind, spot.cause) == (None, None)
    assert spot.subject["id"] == _busiest(store, "hotspot_affinity")
    assert spot.because is not None
    assert "route rows" in spot.because
    assert "no route rows" in found.cannot_tell[0]


def test_straggler_is_named_by_outcome_alone(store: Store) -> None:
    """Slow steps are slow whoever routed."""
    spot = hotspots(store, Window(run_id="slow-outcome")).hotspots[0]
    assert (spot.kind, spot.subject["id"]) == ("straggler", STRAGGLER)


def test_baseline_tells_what_is_new(store: Store) -> None:
    """A hotspot that the baseline has too is marked, one that it has not as well."""
    name = "hotspot_tie_breaking"
    new = answer(store, None, f"{name}-without", name, NOW_NS)
    assert [spot.in_baseline for spot in new.hotspots] == [False] * len(new.hotspots)
    start, end = new.window["start_ns"], new.window["end_ns"]
    middle = (start + end) // 2
    again = answer(store, f"{name}@{middle}/{end}", f"{name}@{start}/{middle}", None, NOW_NS)
    assert again.hotspots[0].in_baseline is True
    assert again.hotspots[0].interval["start_ns"] >= middle


@pytest.mark.parametrize(
    ("window", "baseline", "suspect", "error", "words"),
    [
        ("nothing", None, None, BadWindow, "neither a run nor"),
        ("hotspot_affinity@1/2", None, None, BadWindow, "1970|instant"),
        ("hotspot_affinity@2020-01-01/2020-01-02", None, None, BadWindow, "no routing decisions"),
        ("2099-01-01/2099-01-02", None, None, BadWindow, "future"),
        ("2026-01-02/2026-01-01", None, None, BadWindow, "ends before"),
        (None, None, None, BadWindow, "no live requests"),
        ("hotspot_affinity", None, "outcome", UsageError, "one of them"),
        ("hotspot_affinity", "hotspot_affinity", None, BadWindow, "overlap"),
    ],
)
def test_bad_windows_are_answered(
    store: Store, window: str | None, baseline: str | None, suspect: str | None, error: type[Exception], words: str
) -> None:
    """Unknown, empty, future, reversed, missing and overlapping windows: what is wrong, and no hotspot."""
    with pytest.raises(error, match=words):
        answer(store, window, baseline, suspect, NOW_NS)


def test_window_that_begins_long_before_costs_nothing(store: Store) -> None:
    """Intervals are counted from the first decision on, and bound how long a window may be."""
    whole = hotspots(store, Window(run_id="hotspot_affinity"))
    assert hotspots(store, Window(1, NOW_NS, "hotspot_affinity")).num_intervals == whole.num_intervals


def test_too_much_at_once_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it would take in memory and by its length in hours, each with what to do."""
    monkeypatch.setattr("diagnosis.hotspots.reading.MAX_CELLS", 2000)
    with pytest.raises(BadWindow, match=r"between 4 workers.* give one of about"):
        hotspots(store, Window(run_id="hotspot_affinity"))
    monkeypatch.undo()
    monkeypatch.setattr("diagnosis.hotspots.reading.MAX_SPAN_S", 20.0)
    with pytest.raises(BadWindow, match="give a shorter one"):
        hotspots(store, Window(run_id="hotspot_affinity"))


def test_verb_answers_text_and_json(kvscope: Callable[..., Ended], path: Path) -> None:
    """Exit 1 with a hotspot, 0 without; text within 80 columns but for SQL; JSON is the document."""
    ended = kvscope("hotspots", "--store", path, "--window", "hotspot_affinity")
    assert ended.code == 1, ended.err
    assert ended.out.startswith("HOTSPOT: ")
    assert all(len(line) <= 80 or "sql: " in line for line in ended.out.splitlines())
    as_json = kvscope("hotspots", "--store", path, "--window", "hotspot_affinity", "--json")
    document = json.loads(as_json.out)
    assert as_json.code == 1
    assert document["hotspots"][0]["kind"] == "affinity"
    assert set(document) == set(HotspotsDocument.model_fields)
    quiet = kvscope("hotspots", "--store", path, "--window", "hotspot_affinity-without", "--no-sql")
    assert quiet.code == 0, quiet.err
    assert quiet.out.startswith("NO HOTSPOT: ")
    wrong = kvscope("hotspots", "--store", path, "--window", "nothing")
    assert wrong.code == 2
    assert "nothing" in wrong.err


def test_endpoint_answers_what_the_verb_answers(path: Path, tmp_path: Path) -> None:
    """Key for key, documented as it is; mistakes are problem documents."""
    import shutil

    copy = tmp_path / "kvscope.duckdb"
    shutil.copy(path, copy)
    with running(copy) as collector:
        got = collector.client.get("/api/v1/hotspots", params={"window": "hotspot_tie_breaking"})
        assert got.status_code == 200, got.text
        TypeAdapter(HotspotsDocument).validate_json(got.content)
        expected: dict[str, Any] = hotspots(collector.store, Window(run_id="hotspot_tie_breaking")).to_dict()
        assert got.json() == json.loads(json.dumps(expected))
        for params, status in (({"window": "nothing"}, 400), ({"window": "outcome", "suspect": "outcome"}, 400)):
            failed = collector.client.get("/api/v1/hotspots", params=params)
            assert failed.status_code == status, failed.text
            assert failed.headers["content-type"].startswith("application/problem+json")


def test_rows_that_tell_almost_nothing_are_answered(tmp_path: Path) -> None:
    """All aborted, no lengths, no candidates, a decision without its request: no hotspot, and what was missing."""
    common = {"run_id": "bare", "at_ns": NOW_NS}
    rows: dict[str, list[dict[str, Any]]] = {
        "request": [
            {
                **common,
                "request_id": f"r{number}",
                "worker": f"w{number % 2}",
                "vantage": "engine",
                "state": "aborted",
                "arrival_ns": NOW_NS + number,
            }
            for number in range(6)
        ],
        "route": [
            {**common, "at_ns": NOW_NS + number, "request_id": f"r{number}", "chosen": f"w{number % 2}"}
            for number in range(8)
        ],
    }
    with open_store(str(tmp_path / "kvscope.duckdb")) as store:
        store.append(batch(rows))
        found = hotspots(store, Window(run_id="bare"))
    assert (found.status, found.num_decisions) == ("none", 8)
    assert found.regret["total_s"] is None
    assert any("unknown" in what for what in found.cannot_tell)
    assert any("25 %" in what for what in found.cannot_tell)
