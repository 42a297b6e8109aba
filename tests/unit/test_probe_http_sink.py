"""The HTTP sink against a collector that answers, refuses, hangs or is away."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_probe.errors import ProbeError, UsageError
from engine_probe.schema import table_from_rows
from engine_probe.sending.backoff import Backoff
from engine_probe.sending.http_link import Address
from engine_probe.sending.http_sink import HttpSink
from engine_probe.wire.codec import decode_arrow
from tests.scripted_collector import Arrival, Reply, ScriptedCollector, serve

NOW = 1_764_000_000 * 10**9


def samples(*values: float) -> dict[str, object]:
    """A batch of samples."""
    rows = [{"at_ns": NOW + int(value), "name": "x", "value": float(value)} for value in values]
    return {"sample": table_from_rows("sample", rows)}


def sink_to(url: str, **options: object) -> HttpSink:
    """A sink whose waits are milliseconds."""
    options.setdefault("backoff", Backoff(0.001, 0.01))
    options.setdefault("timeout_s", 2.0)
    return HttpSink(url, "test", **options)  # type: ignore[arg-type]


def values_of(collector: ScriptedCollector) -> list[float]:
    """The samples that the collector has, in no order."""
    return sorted(float(str(row["value"])) for row in collector.rows("sample"))


def gaps_of(collector: ScriptedCollector) -> list[dict[str, str]]:
    """The attributes of the `gap` marks that the collector has."""
    return [dict(row["attrs"]) for row in collector.rows("mark") if row["mark"] == "gap"]  # type: ignore[call-overload]


def free_port() -> int:
    """A port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_batch_arrives_with_its_identity() -> None:
    """Source, epoch, number, send time, content type and token travel in headers; numbers count up from 0."""
    collector = ScriptedCollector()
    with serve(collector) as url:
        sink = HttpSink(url, "engine-0", token="secret", now_ns=lambda: NOW)
        for value in (1, 2, 3):
            sink.write(samples(value))
            assert sink.drain(10)
        sink.close()
    assert [a.headers["kvscope-seq"] for a in collector.arrivals] == ["0", "1", "2"]
    assert len({a.headers["kvscope-epoch"] for a in collector.arrivals}) == 1
    first = collector.arrivals[0].headers
    assert first["kvscope-source"] == "engine-0"
    assert first["kvscope-sent-ns"] == str(NOW)
    assert first["content-type"] == "application/vnd.apache.arrow.stream"
    assert first["authorization"] == "Bearer secret"
    assert values_of(collector) == [1.0, 2.0, 3.0]
    assert (sink.stats.sent_batches, sink.stats.sent_rows, sink.stats.held_bytes) == (3, 3, 0)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(429),
        Reply(503),
        Reply(500),
        Reply(507),
        Reply(408),
        Reply(401),
        Reply(404),
        Reply(302, {"Location": "/elsewhere"}),
        Reply(200, body=b"hello", apply=False),
        Reply(hang_up=True),
        Reply(hang_up=True, apply=False),
    ],
)
def test_what_may_pass_is_tried_again_under_the_same_identity(reply: Reply) -> None:
    """Three bad answers, then good ones: the batch is applied once, and its number never changed."""
    collector = ScriptedCollector(lambda arrival, n: reply if n < 3 else None)
    with serve(collector) as url:
        sink = sink_to(url)
        sink.write(samples(1))
        assert sink.drain(10)
        sink.close()
    assert len(collector.arrivals) >= 4
    assert len({arrival.key for arrival in collector.arrivals}) == 1
    assert values_of(collector) == [1.0]
    assert dict(sink.stats.dropped_rows) == {}


def test_an_answer_that_got_lost_is_a_repeat_and_no_second_row() -> None:
    """The collector applied the batch but hung up: the resend is recognised, and the sink says so."""
    collector = ScriptedCollector(lambda arrival, n: Reply(hang_up=True) if n == 0 else None)
    with serve(collector) as url:
        sink = sink_to(url)
        sink.write(samples(7))
        assert sink.drain(10)
        sink.close()
    assert values_of(collector) == [7.0]
    assert sink.stats.duplicate_batches == 1


@pytest.mark.parametrize("status", [400, 415, 422])
def test_what_will_never_be_taken_is_set_aside_once_and_told(
    status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused batch is sent once, kept aside with the answer, logged once, and told by a `gap` mark."""
    refused = Reply(status, body=b'{"detail": "row 0 is odd"}')
    collector = ScriptedCollector(lambda arrival, n: refused if n == 0 else None)
    with serve(collector) as url, caplog.at_level(logging.WARNING):
        sink = sink_to(url, spool_dir=tmp_path)
        sink.write(samples(1, 2))
        assert sink.drain(10)
        sink.write(samples(3))
        assert sink.drain(10)
        sink.close()
    assert [arrival.key[1] for arrival in collector.arrivals].count(0) == 1
    assert values_of(collector) == [3.0]
    assert dict(sink.stats.dropped_rows) == {"sample": 2}
    (gap,) = gaps_of(collector)
    expected = {"reason": "refused", "dropped_rows": "2", "dropped_sample": "2", "first_seq": "0", "last_seq": "0"}
    assert expected.items() <= gap.items()
    assert (gap["from_ns"], gap["to_ns"]) == (str(NOW + 1), str(NOW + 2))
    (aside,) = (tmp_path / "aside").glob("*.txt")
    assert "row 0 is odd" in aside.read_text()
    assert [record.message for record in caplog.records].count("batch refused for good, set aside") == 1


def test_a_wrong_token_is_not_tried_for_ever() -> None:
    """401 is tried `patience` times, in case somebody is mending it, then the batch is given up."""
    collector = ScriptedCollector(lambda arrival, n: Reply(401))
    with serve(collector) as url:
        sink = sink_to(url, patience=3)
        sink.write(samples(1))
        assert sink.drain(10)
        sink.close(0.1)
    assert [arrival.key[1] for arrival in collector.arrivals].count(0) == 3
    assert sink.stats.dropped_rows["sample"] == 1


def test_a_batch_that_is_too_large_is_halved_until_it_fits() -> None:
    """A collector that takes at most two rows gets five rows in several batches, each row once."""

    def script(arrival: Arrival, n: int) -> Reply | None:
        return Reply(413) if decode_arrow(arrival.body).num_rows > 2 else None

    collector = ScriptedCollector(script)
    with serve(collector) as url:
        sink = sink_to(url)
        sink.write(samples(1, 2, 3, 4, 5))
        assert sink.drain(10)
        sink.close()
    assert values_of(collector) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert dict(sink.stats.dropped_rows) == {}


def test_a_single_row_that_is_too_large_is_given_up_and_told() -> None:
    """One row cannot be halved: it is counted as lost, the others arrive."""

    def script(arrival: Arrival, n: int) -> Reply | None:
        table = decode_arrow(arrival.body).tables.get("sample")
        return Reply(413) if table is not None and 3.0 in table.column("value").to_pylist() else None

    collector = ScriptedCollector(script)
    with serve(collector) as url:
        sink = sink_to(url)
        sink.write(samples(1, 2, 3, 4))
        assert sink.drain(10)
        sink.close()
    assert values_of(collector) == [1.0, 2.0, 4.0]
    assert [gap["reason"] for gap in gaps_of(collector)] == ["too_large"]


def test_one_bad_kind_does_not_take_the_others_with_it() -> None:
    """A batch of two kinds that is refused with 422 is sent kind by kind; only the bad one is lost."""

    def script(arrival: Arrival, n: int) -> Reply | None:
        return Reply(422) if "route" in decode_arrow(arrival.body).tables else None

    tables = {**samples(1), "route": table_from_rows("route", [{"at_ns": NOW, "request_id": "r"}])}
    collector = ScriptedCollector(script)
    with serve(collector) as url:
        sink = sink_to(url)
        sink.write(tables)
        assert sink.drain(10)
        sink.close()
    assert values_of(collector) == [1.0]
    assert dict(sink.stats.dropped_rows) == {"route": 1}


def test_eight_batches_are_under_way_at_most() -> None:
    """While eight batches are unanswered, no ninth is sent; all arrive in the end."""
    eight = threading.Barrier(8)

    def script(arrival: Arrival, n: int) -> Reply | None:
        if n < 8:
            eight.wait(10)
        return None

    collector = ScriptedCollector(script)
    with serve(collector) as url:
        sink = sink_to(url, timeout_s=15.0)
        for value in range(20):
            sink.write(samples(value))
        assert sink.drain(15)
        sink.close()
    assert collector.most_in_flight == 8
    assert values_of(collector) == [float(value) for value in range(20)]


def test_while_nothing_works_one_worker_tries_for_all() -> None:
    """Eight batches fail together; from then on there is one request at a time, until one is answered well."""
    eight, now, most = threading.Barrier(8), [0], [0]
    lock = threading.Lock()

    def script(arrival: Arrival, n: int) -> Reply | None:
        if n < 8:
            eight.wait(10)
            return Reply(503)
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.02)
        with lock:
            now[0] -= 1
        return Reply(503) if n < 14 else None

    collector = ScriptedCollector(script)
    with serve(collector) as url:
        sink = sink_to(url, timeout_s=15.0)
        for value in range(8):
            sink.write(samples(value))
        _wait(lambda: len(collector.arrivals) >= 14)
        assert most[0] == 1
        assert sink.drain(15)
        sink.close()
    assert values_of(collector) == [float(value) for value in range(8)]


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    """Servers close idle connections: the next batch opens a new one at once, and nobody waits or is told."""
    collector = ScriptedCollector(lambda arrival, n: Reply(close_after=True))
    with serve(collector) as url:
        sink = sink_to(url)
        for value in (1, 2, 3):
            sink.write(samples(value))
            assert sink.drain(10)
        sink.close()
    assert values_of(collector) == [1.0, 2.0, 3.0]
    assert sink.stats.failures == 0


def test_retry_after_is_kept() -> None:
    """A collector that asks for a pause is not asked again before it is over, whatever the own wait would be."""
    backoff = Backoff(0.001, 0.01)
    collector = ScriptedCollector(lambda arrival, n: Reply(429, {"Retry-After": "7"}) if n == 0 else None)
    with serve(collector) as url:
        sink = sink_to(url, backoff=backoff)
        sink.write(samples(1))
        _wait(lambda: backoff.failures == 1)
        failed_at, before = time.monotonic(), backoff.resume_at_s
        assert not sink.drain(0.3)
        assert len(collector.arrivals) == 1, "a third of a second is not seven seconds"
        sink.close(0.2)
    assert before - failed_at > 6
    assert len(collector.arrivals) == 2, "closing tries once more at once"


def test_a_collector_that_hangs_does_not_block_the_caller() -> None:
    """Every write returns while all eight workers wait for answers that never come."""
    collector = ScriptedCollector(lambda arrival, n: Reply(hang=True, apply=False))
    with serve(collector) as url:
        sink = sink_to(url, timeout_s=30.0)
        for value in range(30):
            sink.write(samples(value))
        _wait(lambda: len(collector.arrivals) == 8)
        assert sink.stats.in_flight_batches == 8
        assert sink.stats.pending_batches == 22
        sink.close(0.05)


def test_rows_written_while_nobody_listens_arrive_later() -> None:
    """The collector starts after the rows were written."""
    port = free_port()
    sink = sink_to(f"http://127.0.0.1:{port}")
    for value in range(5):
        sink.write(samples(value))
    _wait(lambda: sink.stats.failures > 0)
    collector = ScriptedCollector()
    with serve(collector, port):
        assert sink.drain(10)
        sink.close()
    assert values_of(collector) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_memory_is_bounded_and_the_loss_is_told() -> None:
    """With nobody listening the oldest rows go, and the `gap` mark names how many and which batches."""
    port = free_port()
    sink = sink_to(f"http://127.0.0.1:{port}", max_bytes=20_000)
    for value in range(200):
        sink.write(samples(value))
        assert sink.stats.held_bytes <= 20_000
    dropped = sink.stats.dropped_rows["sample"]
    collector = ScriptedCollector()
    with serve(collector, port):
        assert sink.drain(10)
        sink.close()
    kept = values_of(collector)
    assert 0 < len(kept) < 200
    assert len(kept) + dropped == 200
    (gap,) = gaps_of(collector)
    assert (gap["reason"], gap["dropped_rows"]) == ("spool_overflow", str(dropped))
    assert kept[-1] == 199.0


def test_what_is_spooled_is_sent_by_the_next_process_under_its_old_identity(tmp_path: Path) -> None:
    """The first sink never reaches anybody; the second one, on the same folder, delivers everything once."""
    first = sink_to(f"http://127.0.0.1:{free_port()}", spool_dir=tmp_path)
    for value in (1, 2):
        first.write(samples(value))
    first.close(0.2)
    collector = ScriptedCollector()
    with serve(collector) as url:
        second = sink_to(url, spool_dir=tmp_path)
        second.write(samples(3))
        assert second.drain(10)
        second.close()
    assert values_of(collector) == [1.0, 2.0, 3.0]
    assert sorted(key[1] for key in collector.applied) == [0, 1, 2]
    assert len({key[0] for key in collector.applied}) == 1
    assert list(tmp_path.glob("*.batch")) == []


def test_one_folder_serves_one_sender_at_a_time(tmp_path: Path) -> None:
    """A second sender on the same spool would send the first one's batches: it is refused in words."""
    first = sink_to(f"http://127.0.0.1:{free_port()}", spool_dir=tmp_path)
    with pytest.raises(ProbeError, match="used by another process"):
        sink_to(f"http://127.0.0.1:{free_port()}", spool_dir=tmp_path)
    first.close(0.01)
    sink_to(f"http://127.0.0.1:{free_port()}", spool_dir=tmp_path).close(0.01)


def test_a_closed_sink_takes_no_rows() -> None:
    """Rows that nobody would send are not taken."""
    sink = sink_to(f"http://127.0.0.1:{free_port()}")
    sink.close(0.01)
    sink.close(0.01)
    with pytest.raises(ProbeError, match="closed"):
        sink.write(samples(1))


def test_a_forked_child_neither_writes_nor_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has the object but no threads: it is told to make its own, and leaves the parent's spool alone."""
    sink = sink_to(f"http://127.0.0.1:{free_port()}")
    with monkeypatch.context() as child:
        child.setattr("engine_probe.sending.http_sink.os.getpid", lambda: -1)
        with pytest.raises(ProbeError, match="before a fork"):
            sink.write(samples(1))
        sink.close()
    sink.write(samples(1))
    sink.close(0.01)


@pytest.mark.parametrize("url", ["", "collector:8321", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """A mistyped address is told when the sink is made, not by silence."""
    with pytest.raises(UsageError, match="no address of a collector"):
        HttpSink(url, "test")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": ""}, "source is"),
        ({"source": "x\n"}, "source is"),
        ({"source": "  "}, "source is"),
        ({"source": "x "}, "source is"),
        ({"max_in_flight": 9}, "expected 1 to 8"),
        ({"token": "a\r\nb"}, "the token"),
        ({"token": ""}, "the token"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    """Bounds and names are checked when the sink is made."""
    with pytest.raises(UsageError, match=words):
        HttpSink("http://127.0.0.1:1", **{"source": "x", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h", "/v1/events"),
        ("http://h:1/", "/v1/events"),
        ("https://h/kv/", "/kv/v1/events"),
        ("http://h/v1/events", "/v1/events"),
    ],
)
def test_the_path_is_added_where_it_is_missing(url: str, path: str) -> None:
    """People give the collector's address with and without the path."""
    assert Address.parse(url).path == path


def _wait(condition: Callable[[], bool]) -> None:
    """Poll for at most ten seconds."""
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not come true")
