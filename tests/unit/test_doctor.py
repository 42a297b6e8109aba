"""The doctor finds the engine, says what is visible and what to do, and its exit code tells a script how it went."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collector.cli import main
from collector.commands.doctor import text_of
from collector.doctor import machine
from collector.doctor.check import Check, worst
from collector.doctor.engine import look_at_engine
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.find import find_engine
from engine_probe.errors import EngineUnreachable, UnknownFormat, UsageError
from store.open import open_store
from tests.attach_engine import FakeEngine, page


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


Run = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`kvscope doctor --json` with a store and a salt of its own; answers the exit code and the checks by subject."""

    def run(*arguments: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
        given = ["--json", "--store", str(tmp_path / "s.duckdb"), "--salt-file", str(tmp_path / "salt")]
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments, *given])
        assert isinstance(ended.value.code, int)
        document = json.loads(capsys.readouterr().out)
        return ended.value.code, {(check["area"], check["subject"]): check for check in document.get("checks", [])}

    return run


def test_an_engine_is_found_and_what_it_allows_is_said(engine: FakeEngine, run: Run) -> None:
    """Metrics only: no latency can be judged, and the plugin is named as the next thing to open."""
    code, found = run(engine.url)
    assert code == 0
    assert found["engine", engine.url]["text"] == "vLLM 0.32.0"
    assert found["engine", "verdicts"]["state"] == "warn"
    assert found["engine", "next"]["text"].startswith("plugin would add ")
    assert " admission_blocked_on_blocks," in found["engine", "next"]["text"]


def test_with_the_plugin_causes_can_be_judged(engine: FakeEngine) -> None:
    """The plugin tells requests and steps; KV events are what is missing then."""
    engine.set_metrics(page(plugin="w"))
    sight = look_at_engine(EngineClient(engine.url))
    assert sight.sources == ("metrics", "plugin")
    assert sight.allows.metrics == ("ttft", "tpot", "e2e")
    assert "slow_steps" in sight.allows.causes
    assert sight.next_source is not None
    assert (sight.next_source.source, sight.would_add) == ("kv_events", ("premature_eviction",))
    engine.set_json("/kv_event_sources", {"0": {"endpoint": "tcp://*:5557"}})
    assert "premature_eviction" in look_at_engine(EngineClient(engine.url)).allows.causes


@pytest.mark.parametrize("adapter", ["vllm", "sglang"])
def test_kv_events_are_told_as_they_are(engine: FakeEngine, run: Run, adapter: str) -> None:
    """On and within reach; on and out of reach; an endpoint that is none; off. Never `off` where they are on."""

    def told(endpoint: str | None) -> tuple[str, str]:
        sources: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint, "publisher": "zmq"}
        if adapter == "vllm":
            engine.set_json("/kv_event_sources", {"0": sources} if sources else {})
        else:
            page_text = "sglang:num_running_reqs 0\n"
            engine.pose(
                page_text, server_info={"page_size": 1, "version": "0.5.23", "kv_events_config": json.dumps(sources)}
            )
        check = run(engine.url)[1]["engine", "blocks"]
        return check["state"], check["text"]

    with socket.create_server(("127.0.0.1", 0)) as publisher:
        port = publisher.getsockname()[1]
        state, text = told(f"tcp://*:{port}")
    assert (state, text.partition(";")[0]) == ("ok", f"KV events, published at tcp://127.0.0.1:{port}")
    state, text = told(f"tcp://*:{port}")
    assert state == "note"
    assert f"tcp://127.0.0.1:{port} cannot be reached from here" in text
    assert told("tcp://127.0.0.1:5557") == ("ok", told("tcp://127.0.0.1:5557")[1])
    assert "the engine connects to tcp://127.0.0.1:5557" in told("tcp://127.0.0.1:5557")[1]
    state, text = told(None)
    assert state == "note"
    assert "KV events are off" in text


def test_a_prometheus_server_is_told_with_its_jobs(engine: FakeEngine, run: Run) -> None:
    """Release and scrape jobs are on its own page; which of them are meant, --match says."""
    engine.pose(
        'prometheus_build_info{version="2.42.0"} 1\n'
        'prometheus_target_scrape_pool_targets{scrape_job="vllm"} 2\nprometheus_target_scrape_pool_targets{scrape_job="dcgm"} 1\n'
    )
    checks = run(engine.url)[1]
    assert checks["engine", engine.url]["text"] == "Prometheus 2.42.0"
    assert "scrape jobs: dcgm, vllm; say which with --match" in checks["engine", "metrics"]["text"]


def test_a_kv_event_endpoint_that_is_none_is_said(engine: FakeEngine, run: Run) -> None:
    """Not `off`: they are on, and the option is named that says where."""
    engine.set_json("/kv_event_sources", {"\u00b2": {"endpoint": "tcp://*:5557"}, "0": {"endpoint": None}})
    assert "give --kv-events" in run(engine.url)[1]["engine", "blocks"]["text"]


def test_nobody_there_is_exit_3_and_the_rest_is_still_checked(run: Run) -> None:
    """At 3 a.m. the engine may be down: the store and the clock are looked at all the same."""
    code, found = run("http://127.0.0.1:1")
    assert code == 3
    assert found["engine", "http://127.0.0.1:1"]["state"] == "fail"
    assert ("machine", "kvscope") in found


def test_an_address_that_is_none_is_misuse(run: Run) -> None:
    """Exit 2 before anything is checked."""
    assert run("ftp://x") == (2, {})


def test_a_store_that_is_broken_is_exit_1(run: Run, tmp_path: Path) -> None:
    """A file that is no database."""
    (tmp_path / "s.duckdb").write_bytes(b"not a database" * 1000)
    code, found = run()
    assert code == 1
    assert found["store", str(tmp_path / "s.duckdb")]["state"] == "fail"


def test_a_sound_store_is_told(run: Run, tmp_path: Path) -> None:
    """Empty, verified."""
    open_store(str(tmp_path / "s.duckdb")).close()
    _, found = run()
    assert found["store", "verify"]["state"] == "ok"
    assert found["store", str(tmp_path / "s.duckdb")]["text"].endswith("no rows")


def test_a_named_collector_that_is_absent_fails(run: Run) -> None:
    """Asked for, it must be there."""
    code, found = run("--to", "http://127.0.0.1:1")
    assert code == 1
    assert found["collector", "http://127.0.0.1:1"]["state"] == "fail"


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (
            {"/props": {"default_generation_settings": {}}},
            "llama-server, but shows no metrics. Start it with --metrics",
        ),
        (
            {"/server_info": {"mem_fraction_static": 0.8}},
            "SGLang, but shows no metrics. Start it with --enable-metrics",
        ),
        ({"/version": {"version": "1"}, "/v1/models": {"data": []}}, "without --disable-log-stats"),
        ({"/v1/models": {"data": []}}, "kvscope proxy --upstream"),
        ({}, "has no /metrics"),
    ],
)
def test_who_shows_no_metrics_is_told_by_what_it_has(engine: FakeEngine, pages: dict[str, Any], message: str) -> None:
    """The sentence names the flag that opens them, or what works without."""
    engine.pages.clear()
    for path, answer in pages.items():
        engine.set_json(path, answer)
    with pytest.raises(UnknownFormat) as caught:
        find_engine(EngineClient(engine.url))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "status", "error", "message"),
    [
        ("<html>hi</html>", 200, UnknownFormat, "HTML"),
        ("node_load1 1\nfoo 2\n", 200, UnknownFormat, "does not know (it has foo, node_load1"),
        ("gen_ai_client_token_usage_count 1\n", 200, UnknownFormat, "collector's /v1/metrics"),
        ("no", 401, UsageError, "--engine-key"),
        ("broken", 503, EngineUnreachable, "503"),
        ("", 200, UnknownFormat, "is empty: it has no series"),
    ],
)
def test_strange_pages_get_a_sentence(
    engine: FakeEngine, text: str, status: int, error: type[Exception], message: str
) -> None:
    """HTML, another exporter's page, a key, an engine that is down behind its server, an empty body."""
    engine.pages.clear()
    engine.set_metrics(text, status)
    with pytest.raises(error) as caught:
        find_engine(EngineClient(engine.url))
    assert message in str(caught.value)


def test_the_clock_is_judged_by_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsynchronised and far off are warnings; a system that does not tell is a note."""
    for answer, state in (((0, 0.002), "ok"), ((0, 0.5), "warn"), ((5, 16.0), "warn"), (None, "note")):
        monkeypatch.setattr(machine, "_adjtimex", lambda answer=answer: answer)
        assert machine.clock().state == state


def test_a_salt_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    """With it they can test guesses of a prompt against stored hashes."""
    salt = tmp_path / "salt"
    assert machine.secret(salt).state == "note"
    salt.write_text("s")
    salt.chmod(0o644)
    check = machine.secret(salt)
    assert (check.state, check.do) == ("warn", f"chmod 600 {salt}")
    salt.chmod(0o600)
    assert machine.secret(salt).state == "ok"


def test_the_text_fits_its_page_and_ends_with_the_count() -> None:
    """No line is longer than the page unless one word is."""
    found = [
        Check("engine", "http://127.0.0.1:8000", "fail", "word " * 60, "do " * 40),
        Check("store", "x", "warn", "y"),
    ]
    text = text_of(found, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.endswith("1 failed, 1 to look at.")
    assert text_of([Check("a", "b", "ok", "c")]).endswith("Nothing is wrong.")
    assert worst(found) == "fail"
    assert worst([]) == "ok"


def test_an_extra_is_known_by_what_it_brings() -> None:
    """A package of another extra, or of a developer's, would be called missing for ever."""
    import tomllib

    from collector.doctor.machine import EXTRAS

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra, modules in EXTRAS.items():
        brought = {re.split(r"[\[<>=;~ ]", line)[0].lower() for line in project["optional-dependencies"][extra]}
        assert set(modules) <= brought, extra
