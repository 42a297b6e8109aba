"""Every probe at 10 % keeps the same requests; under overload blocks go first, are counted and told, and a diagnosis says so."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from diagnosis import quality
from diagnosis.facts import MarkFact
from engine_probe.attach.funnel import Funnel
from engine_probe.proxy.recording import Recording
from engine_probe.recording.recorder import Recorder
from engine_probe.sampling import Sampling
from engine_probe.schema import table_from_rows
from engine_probe.sending.outbox import Outbox
from engine_probe.sending.parcels import pack
from engine_probe.sending.spool import Spool
from engine_probe.sending.spool_files import MemoryFiles
from engine_probe.vllm.plugin import EngineTap
from tests.factories import facts, request_facts

NOW = 1_780_000_000_000_000_000
IDS = [f"req-{number}" for number in range(400)]
KEPT = {name for name in IDS if Sampling(0.1).keeps_request(name)}


class ListSink:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.taken: list[Mapping[str, pa.Table]] = []

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        self.taken.append(tables)

    def close(self) -> None:
        pass

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for tables in self.taken if kind in tables for row in tables[kind].to_pylist()]

    def ids(self, kind: str) -> set[str]:
        rows = self.rows(kind)
        assert {row["sample_rate"] for row in rows} == {0.1}
        return {row["request_id"] for row in rows}


def test_engine_route_and_transfer_rows_are_of_the_same_requests() -> None:
    """A recorder in the engine, and one in a router that knows nothing of it, decide alike for every kind."""
    engine, router = ListSink(), ListSink()
    inside, beside = (Recorder(sink, sampling=Sampling(0.1), flush_s=0) for sink in (engine, router))
    for name in IDS:
        slot = inside.arrive(name)
        inside.row("transfer", slot=slot, outcome="ok")
        inside.finish(slot, "failed")
        beside.row("route", request_id=name, chosen="w0")
        beside.row("transfer", request_id=name, outcome="ok")
    inside.close()
    beside.close()
    assert 20 < len(KEPT) < 60
    assert engine.ids("request") == engine.ids("transfer") == router.ids("route") == router.ids("transfer") == KEPT


def test_the_proxy_watches_the_same_requests() -> None:
    """What the client's vantage keeps is what the engine keeps; the others are counted as left out."""
    sink = ListSink()
    recorder = Recorder(sink, sampling=Sampling(0.1), flush_s=0)
    recording = Recording(recorder, router="proxy", policy="round_robin")
    head = SimpleNamespace(method=b"POST", path=b"/v1/completions")
    left_out = []
    for name in (name for name in IDS if name not in KEPT):
        assert recording.observe(head, name, NOW) is None  # type: ignore[arg-type]
        left_out.append(name)
    assert recording.num_left_out == len(left_out) == len(IDS) - len(KEPT)
    recorder.close()


def test_the_vllm_plugin_keeps_by_the_id_that_the_client_knows() -> None:
    """vLLM makes `cmpl-X-0` of X; the plugin decides by X, or its rows would join with nothing."""
    sink = ListSink()
    box = Outbox(sink, max_rows=10_000, flush_s=3600)
    tap = EngineTap(SimpleNamespace(), "w", box, clock=lambda: NOW, sampling=Sampling(0.1))
    for name in IDS:
        finished = SimpleNamespace(request_id=f"cmpl-{name}-0", finish_reason="stop", e2e_latency=1.0)
        tap.record(None, SimpleNamespace(iteration_timestamp=NOW / 1e9, finished_requests=[finished]))
    box.close()
    assert sink.ids("request") == KEPT


def test_a_block_is_kept_for_its_whole_life_by_every_recorder() -> None:
    """stored, hit and evicted of one block are all there or none is, in each of two engines."""
    lives = []
    for _ in range(2):
        sink = ListSink()
        recorder = Recorder(sink, sampling=Sampling(0.1), flush_s=0)
        for change in ("stored", "hit", "evicted"):
            recorder.block_events(change, list(range(1, 1001)))
        recorder.close()
        by_change = [
            {row["block_hash"] for row in sink.rows("block") if row["change"] == change}
            for change in ("stored", "hit", "evicted")
        ]
        assert by_change[0] == by_change[1] == by_change[2]
        lives.append(by_change[0])
    assert lives[0] == lives[1]
    assert 60 < len(lives[0]) < 140


def rows(kind: str, count: int) -> list[dict[str, Any]]:
    what: dict[str, dict[str, Any]] = {
        "block": {"change": "stored", "block_hash": 1},
        "step": {"step": 1},
        "request": {"request_id": "r", "vantage": "engine", "state": "finished", "arrival_ns": NOW},
    }
    return [{"at_ns": NOW, **what[kind]} for _ in range(count)]


def told(sink: ListSink) -> dict[str, str]:
    """Attributes of the one gap mark."""
    (mark,) = sink.rows("mark")
    assert mark["mark"] == "gap"
    return {key: value for key, value in dict(mark["attrs"]).items() if value is not None}


def test_the_outbox_drops_blocks_first_then_steps_and_requests_last() -> None:
    """Room for 4: two requests push out both blocks, two more the steps, and a fifth goes itself."""
    sink = ListSink()
    box = Outbox(sink, max_rows=4, flush_s=3600)
    for kind, count in (("block", 2), ("step", 2), ("request", 2)):
        for row in rows(kind, count):
            box.put(kind, row)
    assert dict(box.dropped) == {"block": 2}
    for row in rows("request", 3):
        box.put("request", row)
    box.put("block", rows("block", 1)[0])
    box.close()
    assert len(sink.rows("request")) == 4
    assert (told(sink)["dropped_block"], told(sink)["dropped_step"], told(sink)["dropped_request"]) == ("3", "2", "1")


def test_the_funnel_drops_blocks_first_and_names_the_kinds_it_lost() -> None:
    """Room for 4 rows: the three blocks go, requests and steps stay, and the mark says 3 block rows."""
    sink = ListSink()
    funnel = Funnel(sink, max_rows=4)
    funnel.put(
        {kind: table_from_rows(kind, rows(kind, count)) for kind, count in (("block", 3), ("step", 2), ("request", 2))}
    )
    assert funnel.flush()
    assert (len(sink.rows("block")), len(sink.rows("step")), len(sink.rows("request"))) == (0, 2, 2)
    assert (told(sink)["dropped_rows"], told(sink)["dropped_block"]) == ("3", "3")


def test_the_spool_drops_blocks_first_and_tells_when_somebody_listens() -> None:
    """A spool with room for the requests alone keeps them; the lost blocks are counted and told after the first answer."""
    tables = {kind: table_from_rows(kind, rows(kind, 500)) for kind in ("block", "request")}
    (alone,) = pack({"request": tables["request"]}, 1 << 20, None)
    room = round(sum(len(segment.body) for segment in alone) * 1.3)
    spool = Spool(MemoryFiles(), max_bytes=room, source="w", now_ns=lambda: NOW)
    spool.append(pack(tables, 1 << 20, None))
    assert dict(spool.dropped) == {"block": 500}
    parcel = spool.take()
    assert parcel is not None
    assert [segment.info.kind for segment in parcel.segments] == ["request"]
    spool.ack(parcel)
    tale = spool.take()
    assert tale is not None
    assert [segment.info.kind for segment in tale.segments] == ["mark"]


def gap(**lost: int) -> MarkFact:
    attrs = {f"dropped_{kind}": str(count) for kind, count in lost.items()}
    return MarkFact("gap", 1.0, "w", "lost", attrs | {"dropped_rows": str(sum(lost.values()))})


@pytest.mark.parametrize(
    ("lost", "status", "words"),
    [
        ({"block": 900}, "warning", "evictions and lost tokens are more than is told here"),
        ({"step": 5}, "warning", "5 step"),
        ({"request": 4}, "warning", "4 request"),
        ({"request": 6}, "contradiction", "may not be like the others"),
    ],
)
def test_a_diagnosis_says_what_was_lost_and_trusts_less(lost: dict[str, int], status: str, words: str) -> None:
    """100 requests: a lost kind is named and lowers confidence; above 5 % of the requests it lowers it as a contradiction does."""
    window = facts(request_facts([float(at) for at in range(100)]), marks=[gap(**lost)])
    found = next(check for check in quality.check(window) if check.check == "gaps")
    assert (found.status, words in found.statement) == (status, True)
    assert quality.penalty([found]) == {"warning": 0.95, "contradiction": 0.7}[status]
