"""A whole attach against a server that looks like vLLM: what it writes, says, survives, and refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_probe.errors import EngineUnreachable, UnknownFormat
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate
from tests.attach_engine import FakeEngine, page
from tests.attach_running import Attached


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


def test_metrics_become_samples_and_facts(engine: FakeEngine) -> None:
    """Canonical names, the worker's name, one worker row with version, model, context and geometry; all valid rows."""
    engine.set_metrics(page(num_preemptions_total=3.0, prompt_tokens_total=100.0))
    with Attached(engine) as attached:
        attached.until(lambda: len(attached.values("preemptions_total")) >= 2)
    assert set(attached.values("preemptions_total")) == {3.0}
    assert attached.values("prompt_tokens_total")[0] == 100.0
    name = engine.url.removeprefix("http://")
    (facts,) = attached.sink.rows("worker")
    assert (facts["worker"], facts["engine"], facts["engine_version"], facts["model"]) == (
        name,
        "vllm",
        "0.32.0",
        "tiny",
    )
    assert (facts["block_size"], facts["num_blocks"], facts["max_context"]) == (32, 40, 1024)
    assert facts["prefix_caching"] is True
    for kind in ("sample", "worker", "mark"):
        validate(kind, table_from_rows(kind, attached.sink.rows(kind)), time.time_ns())
    assert attached.sink.closed


def test_stopping_takes_a_last_look(engine: FakeEngine) -> None:
    """What was counted after the last regular scrape is in the total."""
    with Attached(engine, interval_s=30.0) as attached:
        attached.until(lambda: len(attached.said) >= 6)
        engine.set_metrics(page(num_preemptions_total=7.0))
    assert attached.values("preemptions_total") == [0.0, 7.0]
    assert attached.summary is not None
    assert attached.summary.counter_gains["preemptions_total"] == 7.0


def test_the_duration_ends_it(engine: FakeEngine) -> None:
    """Without anybody stopping it."""
    attached = Attached(engine, duration_s=0.2)
    attached.run()
    assert attached.error is None
    assert attached.summary is not None
    assert attached.summary.scrapes >= 2


def test_the_plugins_name_is_taken(engine: FakeEngine) -> None:
    """So that the rows of both join without any setting; a name of one's own goes before."""
    engine.set_metrics(page(plugin="gpu7:8000"))
    with Attached(engine) as attached:
        attached.until(lambda: bool(attached.sink.rows("worker")))
    assert attached.sink.rows("worker")[0]["worker"] == "gpu7:8000"
    with Attached(engine, worker="mine") as attached:
        attached.until(lambda: bool(attached.sink.rows("worker")))
    assert {row["worker"] for row in attached.sink.rows("sample")} == {"mine"}


def test_death_and_rebirth_are_marked_and_counted(engine: FakeEngine) -> None:
    """kill -9, down, a new process whose counters begin at 0: totals over both lives, and the unseen stretch said."""
    engine.set_metrics(page(num_preemptions_total=10.0))
    with Attached(engine) as attached:
        attached.until(lambda: 10.0 in attached.values("preemptions_total"))
        engine.set_metrics(page(num_preemptions_total=15.0))
        attached.until(lambda: 15.0 in attached.values("preemptions_total"))
        engine.stop()
        attached.until(lambda: "worker_down" in attached.marks())
        engine.set_metrics(page(start_s=1_700_000_500.0, num_preemptions_total=2.0))
        engine.start()
        attached.until(lambda: 2.0 in attached.values("preemptions_total"))
    assert attached.marks() == ["worker_up", "worker_down", "gap", "worker_up"]
    gap = attached.sink.rows("mark")[2]
    assert gap["attrs"]["last_preemptions_total"] == "15"
    summary = attached.summary
    assert summary is not None
    assert (summary.restarts, len(summary.unseen)) == (1, 1)
    assert (summary.counters["preemptions_total"], summary.counter_gains["preemptions_total"]) == (17.0, 7.0)
    assert any("The engine is down: Nothing answers" in text for text in attached.said)
    assert "The engine restarted; its counters count from 0 again." in attached.said


def test_a_changed_setting_is_a_mark_with_old_and_new(engine: FakeEngine) -> None:
    """A restart with fewer blocks."""
    with Attached(engine) as attached:
        attached.until(lambda: bool(attached.sink.rows("worker")))
        engine.set_metrics(page(start_s=1_700_000_500.0, blocks=21))
        attached.until(lambda: "config_changed" in attached.marks())
    changed = [row["attrs"] for row in attached.sink.rows("mark") if row["mark"] == "config_changed"]
    assert {"setting": "num_blocks", "old": "40", "new": "20"} in changed
    assert [row["num_blocks"] for row in attached.sink.rows("worker")] == [40, 20]


def test_a_page_that_turns_bad_is_an_outage_not_a_crash(engine: FakeEngine) -> None:
    """A proxy's error page, a key that is asked for all at once: marked, and over when it is over."""
    with Attached(engine) as attached:
        attached.until(lambda: bool(attached.values("preemptions_total")))
        engine.set_metrics("<html>502</html>")
        attached.until(lambda: "worker_down" in attached.marks())
        engine.set_metrics("key", status=401)
        attached.until(lambda: attached.session._follower.scraper.failures >= 3)
        engine.set_metrics(page(num_preemptions_total=1.0))
        attached.until(lambda: 1.0 in attached.values("preemptions_total"))
    assert attached.error is None
    assert attached.marks() == ["worker_up", "worker_down", "worker_up"]


def test_nobody_there_is_an_error_unless_asked_to_wait(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3; with wait, it begins when the engine comes."""
    monkeypatch.setattr("engine_probe.attach.session.WAIT_PAUSE_S", 0.02)
    engine.stop()
    attached = Attached(engine)
    attached.run()
    assert isinstance(attached.error, EngineUnreachable)
    assert attached.error.exit_code == 3
    assert attached.sink.closed
    with Attached(engine, wait=True) as attached:
        attached.until(lambda: bool(attached.said))
        assert attached.said[0].endswith("Waiting for it.")
        engine.start()
        attached.until(lambda: bool(attached.values("preemptions_total")))
    assert attached.error is None


def test_waiting_can_be_stopped(engine: FakeEngine) -> None:
    """Ctrl-C before the engine came."""
    engine.stop()
    with Attached(engine, wait=True) as attached:
        attached.until(lambda: bool(attached.said))
    assert isinstance(attached.error, EngineUnreachable)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html><body>hello</body></html>", "HTML"),
        ("sglang:num_running_reqs 1\n", "is SGLang, not vLLM"),
        ("llamacpp:requests_processing 1\n", "is llama-server, not vLLM"),
        ("node_load1 1\n", "but not vLLM's"),
        ('python_info{version="3"} 1\n', "--disable-log-stats"),
        ('vllm:num_requests_running{server="http://a"} 1\n', "is vLLM production-stack router, not vLLM"),
        ('{"error": 1}', "JSON"),
        ("what is this", "Line 1"),
    ],
)
def test_who_is_not_vllm_is_told_by_name(engine: FakeEngine, text: str, message: str) -> None:
    """Misuse, with what it is."""
    engine.set_metrics(text)
    attached = Attached(engine)
    attached.run()
    assert isinstance(attached.error, UnknownFormat)
    assert message in attached.error.message
    assert attached.error.exit_code == 2


def test_an_engine_without_any_other_endpoint_is_followed(engine: FakeEngine) -> None:
    """0.8 has neither /kv_event_sources nor, behind a key, /v1/models."""
    for path in ("/version", "/v1/models", "/kv_event_sources"):
        del engine.pages[path]
    with Attached(engine) as attached:
        attached.until(lambda: len(attached.said) >= 6)
    assert attached.error is None
    assert "of unknown version" in attached.said[0]
    assert attached.sink.rows("worker")[0]["engine_version"] is None


def test_the_logs_facts_complete_the_pages(engine: FakeEngine, tmp_path: Path) -> None:
    """The page goes first, the log fills in, and a fact that becomes known is no change."""
    log = tmp_path / "engine.log"
    log.write_text("Initializing a V1 LLM engine (v0.31.0) with config: dtype=torch.bfloat16, tensor_parallel_size=2\n")
    with Attached(engine, log=log) as attached:
        attached.until(lambda: bool(attached.sink.rows("worker")))
        with log.open("a") as file:
            file.write("Available KV cache memory: 2.00 GiB\n")
        attached.until(lambda: len(attached.sink.rows("worker")) == 2)
    first, second = attached.sink.rows("worker")
    assert (first["engine_version"], first["dtype"], first["tp"]) == ("0.32.0", "bfloat16", 2)
    assert second["flags"]["available_kv_cache_memory_bytes"] == str(2 << 30)
    assert "config_changed" not in attached.marks()


def test_ranks_are_workers_of_their_own(engine: FakeEngine) -> None:
    """Data parallel: one row of facts and one series a rank."""
    two = page() + page().replace('engine="0"', 'engine="1"').partition("\n")[2]
    engine.set_metrics(two)
    with Attached(engine, worker="w") as attached:
        attached.until(lambda: len(attached.sink.rows("worker")) == 2)
    assert [(row["worker"], row["dp"]) for row in attached.sink.rows("worker")] == [("w", 2), ("w/dp1", 2)]
    assert {row["worker"] for row in attached.sink.rows("sample") if row["name"] == "preemptions_total"} == {
        "w",
        "w/dp1",
    }


def test_spans_are_left_out_where_the_plugin_reports_the_same_requests(engine: FakeEngine) -> None:
    """The same request at the same vantage must not count twice."""
    row = {"request_id": "r", "vantage": "engine", "state": "finished", "at_ns": 1, "arrival_ns": 1}
    with Attached(engine) as attached:
        attached.until(lambda: len(attached.said) >= 6)
        attached.session._spans([row])
        engine.set_metrics(page(plugin="p", start_s=1_700_000_500.0))
        attached.until(lambda: attached.session._follower.scraper.discovery.plugin_worker == "p")
        attached.session._spans([row])
    assert [(r["request_id"], r["model"]) for r in attached.sink.rows("request")] == [("r", "tiny")]


def test_a_kv_endpoint_that_cannot_be_subscribed_to_does_not_end_the_attach(engine: FakeEngine) -> None:
    """The line says so; the metrics go on."""
    with Attached(engine, kv_events="bind:tcp://no.such.host.invalid:5557") as attached:
        attached.until(lambda: len(attached.values("preemptions_total")) >= 2)
    assert attached.error is None
    assert any(text.startswith("blocks     not seen") and "no.such.host.invalid" in text for text in attached.said)


def test_a_sink_in_trouble_is_said_once_and_so_is_its_end(engine: FakeEngine) -> None:
    """The user must not learn at the end only that nothing was taken."""
    with Attached(engine) as attached:
        attached.until(lambda: len(attached.said) >= 6)
        attached.trouble = "the collector wants a token"
        attached.until(lambda: "Rows are kept back: the collector wants a token" in attached.said)
        scrapes = attached.session._follower.scraper.scrapes
        attached.until(lambda: attached.session._follower.scraper.scrapes > scrapes + 2)
        attached.trouble = None
        attached.until(lambda: attached.said[-1] == "Rows are taken again.")
    assert len(attached.said) == 8
