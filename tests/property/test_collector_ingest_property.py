"""Whatever senders do, and however often the collector restarts: each accepted batch is stored once, a refused one never."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_probe.schema import table_from_rows
from engine_probe.wire.codec import encode_arrow, encode_ndjson
from tests.integration.collector_harness import ARROW, JSON, running, step_row

NDJSON = {"content-type": "application/x-ndjson"}
SOURCES = st.sampled_from(["a", "b"])
EPOCHS = st.sampled_from(["e", "f"])
SEQS = st.integers(0, 6)
FORMS = st.sampled_from(["arrow", "json", "ndjson"])
PACKINGS = st.sampled_from(["identity", "gzip", "zstd"])


class Senders(RuleBasedStateMachine):
    """The collector on one side, what must be in its store on the other.

    Every row has its own `step` number, so the stored rows can be compared one by one.
    """

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvscope-ingest-"))
        self.applied: dict[tuple[str, str, int], list[int]] = {}
        self.keyed: dict[tuple[str, str], list[int]] = {}
        self.anonymous: list[int] = []
        self.next_step = 0
        self._open()

    def _open(self) -> None:
        self._running = running(self.folder / "kvscope.duckdb")
        self.collector = self._running.__enter__()

    @rule()
    def restart(self) -> None:
        self._running.__exit__(None, None, None)
        self._open()

    @rule(source=SOURCES, epoch=EPOCHS, seq=SEQS, count=st.integers(0, 4), form=FORMS, packing=PACKINGS)
    def send(self, source: str, epoch: str, seq: int, count: int, form: str, packing: str) -> None:
        identity = (source, epoch, seq)
        steps = self._fresh(count)
        answer = self._post(form, packing, [step_row(step) for step in steps], source, epoch, seq)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        assert document["duplicate"] == (identity in self.applied)
        if not document["duplicate"]:
            self.applied[identity] = steps
            assert document["accepted"] == ({"step": count} if count else {})

    @rule(source=SOURCES, epoch=EPOCHS, seq=SEQS, form=FORMS, position=st.integers(0, 2))
    def send_a_bad_row(self, source: str, epoch: str, seq: int, form: str, position: int) -> None:
        rows = [step_row(step) for step in self._fresh(3)]
        rows[position]["duration_s"] = -1.0
        answer = self._post(form, "identity", rows, source, epoch, seq)
        assert answer.status_code == 422
        assert answer.json()["row"] == position

    @rule(source=SOURCES, cut=st.integers(1, 60))
    def send_half(self, source: str, cut: int) -> None:
        body = encode_arrow({"step": table_from_rows("step", [step_row(step) for step in self._fresh(2)])})
        headers = ARROW | {"kvscope-source": source, "kvscope-epoch": "e", "kvscope-seq": "0"}
        answer = self.collector.client.post("/v1/events", content=body[:-cut], headers=headers)
        assert answer.status_code in (415, 422)

    @rule(source=SOURCES, key=st.sampled_from(["k", "l"]))
    def send_with_key(self, source: str, key: str) -> None:
        steps = self._fresh(1)
        body = msgspec.json.encode({"source": source, "events": {"step": [step_row(step) for step in steps]}})
        answer = self.collector.client.post("/v1/events", content=body, headers=JSON | {"idempotency-key": key}).json()
        assert answer["duplicate"] == ((source, key) in self.keyed)
        self.keyed.setdefault((source, key), steps)

    @rule()
    def send_without_identity(self) -> None:
        steps = self._fresh(1)
        body = msgspec.json.encode({"events": {"step": [step_row(step) for step in steps]}})
        assert self.collector.client.post("/v1/events", content=body, headers=JSON).status_code == 200
        self.anonymous += steps

    @invariant()
    def store_holds_each_accepted_row_once(self) -> None:
        expected = [step for steps in (*self.applied.values(), *self.keyed.values()) for step in steps] + self.anonymous
        stored = self.collector.store.query("SELECT step FROM step ORDER BY step").column("step").to_pylist()
        assert stored == sorted(expected)

    @precondition(lambda self: bool(self.applied))
    @invariant()
    def missing_numbers_are_those_below_the_last_that_never_came(self) -> None:
        for info in self.collector.store.sources():
            came = {seq for source, epoch, seq in self.applied if (source, epoch) == (info.source, info.epoch)}
            if came:
                missing = {seq for first, last in info.missing for seq in range(first, last + 1)}
                assert missing == set(range(max(came))) - came

    def teardown(self) -> None:
        if hasattr(self, "collector"):
            assert list(self.collector.store.verify()) == []
            self._running.__exit__(None, None, None)
            shutil.rmtree(self.folder)

    def _fresh(self, count: int) -> list[int]:
        self.next_step += count
        return list(range(self.next_step - count, self.next_step))

    def _post(self, form: str, packing: str, rows: list[dict[str, Any]], source: str, epoch: str, seq: int) -> Any:
        header = {"source": source, "epoch": epoch, "seq": seq}
        if form == "arrow":
            body, headers = encode_arrow({"step": table_from_rows("step", rows)}), dict(ARROW)
            headers |= {f"kvscope-{name}": str(value) for name, value in header.items()}
        elif form == "json":
            body, headers = msgspec.json.encode(header | {"events": {"step": rows}}), dict(JSON)
        else:
            body, headers = encode_ndjson({"step": table_from_rows("step", rows)}, header), dict(NDJSON)
        if packing == "gzip":
            body = gzip.compress(body)
        elif packing == "zstd":
            body = pa.compress(body, "zstd", asbytes=True)
        return self.collector.client.post("/v1/events", content=body, headers=headers | {"content-encoding": packing})


TestSenders = Senders.TestCase
TestSenders.settings = settings(
    max_examples=8, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
