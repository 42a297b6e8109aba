"""`kvscope attach` at each engine: what it finds, says and writes; who poses as somebody else is told by name."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapters, recognise
from engine_probe.errors import EngineUnreachable, KvscopeError, UnknownFormat, UsageError
from tests.attach_engine import FakeEngine
from tests.attach_running import Attached

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
PAGES = {
    "vllm": "vllm_metrics.synthetic.prom",
    "sglang": "sglang_metrics.synthetic.prom",
    "llamacpp": "llamacpp_metrics.synthetic.prom",
    "trtllm": "trtllm_metrics.synthetic.prom",
    "triton-trtllm": "triton_trtllm_metrics.synthetic.prom",
    "tgi": "tgi_metrics.synthetic.prom",
}
MODELS = {"data": [{"id": "tiny", "object": "model"}]}
ANSWERS: dict[str, dict[str, Any]] = {
    "vllm": {"version": {"version": "0.33.0"}, "v1__models": MODELS},
    "sglang": {"server_info": {"version": "0.5.23", "tp_size": 1, "dp_size": 1, "page_size": 1}, "v1__models": MODELS},
    "llamacpp": {
        "props": {"build_info": "b10472", "total_slots": 4, "default_generation_settings": {"n_ctx": 512}},
        "v1__models": {"data": [{"id": "/models/tiny.gguf"}]},
    },
    "trtllm": {
        "version": {"version": "1.2.0"},
        "v1__models": MODELS,
        "steady_clock_offset": {"receive_ts": 1.0, "transmit_ts": 1.2},
    },
    "triton-trtllm": {},
    "tgi": {"info": {"version": "3.3.6", "model_id": "tiny", "model_dtype": "torch.float16", "max_total_tokens": 4096}},
}
PATHS = {"trtllm": "/prometheus/metrics"}
ENGINES = list(PAGES)


def posing(engine: FakeEngine, name: str) -> FakeEngine:
    """The server as that engine."""
    text = (SAMPLES / PAGES[name]).read_text()
    engine.pose(text, path=PATHS.get(name, "/metrics"), **ANSWERS[name])
    return engine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


def refused(engine: FakeEngine, name: str, **options: Any) -> KvscopeError:
    followed = Attached(engine, name, duration_s=0.3, **options)
    followed.run()
    assert isinstance(followed.error, KvscopeError)
    return followed.error


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.prom")), ids=lambda path: path.stem)
def test_every_sample_page_is_recognised_by_exactly_one_adapter(path: Path) -> None:
    """Whoever made a page, no other adapter claims it."""
    page = parse_page(path.read_text())
    assert len([one.engine for one in adapters() if one.recognises(page)]) == 1


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_is_followed(engine: FakeEngine, name: str) -> None:
    """Load, one worker row with its engine's name, and a line on every source; all rows are valid."""
    with Attached(posing(engine, name), name) as followed:
        followed.until(lambda: len(followed.values("requests_running")) >= 2)
    assert followed.error is None
    (facts,) = followed.sink.rows("worker")
    assert facts["engine"] == name
    assert facts["worker"] == engine.url.removeprefix("http://")
    followed.valid()
    subjects = [line.split()[0] for line in followed.said]
    assert subjects[0] == "metrics"
    assert {"requests", "blocks"} <= set(subjects)
    if ANSWERS[name]:
        assert facts["engine_version"] in ("0.33.0", "0.5.23", "b10472", "1.2.0", "3.3.6")
        assert facts["model"] in ("tiny", "tiny.gguf")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("other", ENGINES)
def test_a_wrong_engine_is_told_by_name(engine: FakeEngine, name: str, other: str) -> None:
    """With the command that is right."""
    if name == other:
        return
    posing(engine, other)
    if PATHS.get(name) != PATHS.get(other):
        # trtllm-serve answers JSON at /metrics, the others have no /prometheus/metrics
        engine.pages.setdefault("/metrics", (200, "application/json", "[]"))
    error = refused(engine, name)
    assert isinstance(error, UnknownFormat)
    assert f"kvscope attach {other}" in error.message


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("status", "kind", "body", "error", "words"),
    [
        (200, "text/html", "<html>hello</html>", UnknownFormat, "HTML"),
        (200, "text/plain", "", UnknownFormat, "is empty: it has no series"),
        (200, "text/plain", "up 1\n", UnknownFormat, "Is this the engine's HTTP port?"),
        (401, "text/plain", "no", UsageError, "--engine-key"),
        (404, "text/plain", "no", UnknownFormat, "has no"),
        (302, "text/plain", "", UnknownFormat, "redirects"),
        (503, "text/plain", "loading", EngineUnreachable, "503"),
        (200, "text/plain", "half_a_line{", UnknownFormat, "Line 1"),
        (
            200,
            "text/plain; version=0.0.4",
            'sglang:x{a="b"} 1\nvllm:num_requests_running{engine="0"} ',
            UnknownFormat,
            "Line 2",
        ),
    ],
)
def test_whatever_else_answers_is_a_sentence_that_helps(
    engine: FakeEngine, name: str, status: int, kind: str, body: str, error: type, words: str
) -> None:
    """HTML, an empty body, somebody else's page, a key that is missing, a body cut off in the middle."""
    engine.pages = dict.fromkeys(("/metrics", "/prometheus/metrics"), (status, kind, body))
    found = refused(engine, name)
    assert isinstance(found, error), found
    assert words in found.message


@pytest.mark.parametrize("name", ENGINES)
def test_nobody_there_is_said(name: str) -> None:
    """With the address, and what to check."""
    engine = FakeEngine().start()
    engine.stop()
    error = refused(engine, name)
    assert isinstance(error, EngineUnreachable)
    assert "Nothing answers" in error.message


@pytest.mark.parametrize("name", ENGINES)
def test_plain_http_where_tls_is_asked(engine: FakeEngine, name: str) -> None:
    """The other spelling is named."""
    posing(engine, name)
    error = refused(engine, name, url=engine.url.replace("http://", "https://"), verify=ssl.create_default_context())
    assert isinstance(error, EngineUnreachable)
    assert "does not speak TLS" in error.message


@pytest.mark.parametrize(
    ("name", "flag"),
    [("sglang", "--enable-metrics"), ("llamacpp", "--metrics"), ("trtllm", "return_perf_metrics")],
)
@pytest.mark.parametrize("status", [404, 501])
def test_a_closed_metrics_page_names_the_flag(engine: FakeEngine, name: str, flag: str, status: int) -> None:
    """404 at SGLang, 501 at llama-server."""
    engine.pages = dict.fromkeys(("/metrics", "/prometheus/metrics"), (status, "application/json", "{}"))
    assert flag in refused(engine, name).message


@pytest.mark.parametrize(
    ("name", "counter", "canonical"),
    [
        ("sglang", "sglang:generation_tokens_total", "output_tokens_total"),
        ("llamacpp", "llamacpp:tokens_predicted_total", "output_tokens_total"),
        ("trtllm", "trtllm_generation_tokens_total", "output_tokens_total"),
        ("tgi", "tgi_request_success", "requests_finished_total"),
    ],
)
def test_a_counter_that_falls_is_a_restart(engine: FakeEngine, name: str, counter: str, canonical: str) -> None:
    """Marked, and the total is that of both lives: 50 + 20."""
    posing(engine, name)
    path = PATHS.get(name, "/metrics")

    def show(value: int) -> None:
        engine.pages[path] = (200, "text/plain", f"{counter} {value}\n")

    show(50)
    with Attached(engine, name) as followed:
        followed.until(lambda: 50.0 in followed.values(canonical))
        show(20)
        followed.until(lambda: 20.0 in followed.values(canonical))
    assert followed.summary is not None
    assert followed.summary.restarts == 1
    assert followed.summary.counters[canonical] == 70.0
    assert {"worker_down", "gap", "worker_up"} <= {row["mark"] for row in followed.sink.rows("mark")}


@pytest.mark.parametrize("name", ENGINES)
def test_changed_labels_are_another_series_and_no_restart(engine: FakeEngine, name: str) -> None:
    """A label that comes with a setting (a custom label, another pid) splits nothing and resets nothing."""
    posing(engine, name)
    path = PATHS.get(name, "/metrics")
    first = engine.pages[path][2]
    with Attached(engine, name) as followed:
        followed.until(lambda: bool(followed.values("requests_running")))
        page = parse_page(first)
        lines = [
            series.name
            + "{"
            + ",".join(f'{k}="{v}"' for k, v in {**series.labels, "zone": "a"}.items())
            + f"}} {value}"
            for series, value, _ in page.samples
        ]
        engine.pages[path] = (200, "text/plain", "\n".join(lines) + "\n")
        followed.until(lambda: any(row["labels"].get("zone") == "a" for row in followed.sink.rows("sample")))
    assert followed.summary is not None
    assert followed.summary.restarts == 0


def test_the_worker_of_a_page_of_unknown_origin() -> None:
    """`kvscope import` reads each of these pages without being told whose they are."""
    for name, file in PAGES.items():
        found = recognise(parse_page((SAMPLES / file).read_text()))
        assert found is not None
        assert found.engine == name


ITERATION = {
    "iter": 7,
    "iterLatencyMS": 20.0,
    "numActiveRequests": 4,
    "numQueuedRequests": 2,
    "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 25, "tokensPerBlock": 32},
    "inflightBatchingStats": {"numScheduledRequests": 3, "numGenRequests": 2, "numCtxTokens": 512},
}
STORED = {
    "event_id": 0,
    "window_size": 4096,
    "data": {
        "type": "stored",
        "parent_hash": None,
        "blocks": [{"block_hash": 11, "tokens": [{"token_id": 5, "token_extra_id": 0}], "cache_level": 0}],
    },
}


def test_what_a_server_hands_out_once_is_written_once(engine: FakeEngine) -> None:
    """trtllm-serve without its Prometheus page: iterations are steps, events are blocks; no scrape drains them."""
    posing(engine, "trtllm")
    del engine.pages["/prometheus/metrics"]
    engine.drains = {"/metrics": [ITERATION, {**ITERATION, "iter": 8}], "/kv_cache_events": [STORED]}
    with Attached(engine, "trtllm") as followed:
        followed.until(lambda: len(followed.sink.rows("step")) == 2 and bool(followed.sink.rows("block")))
        followed.until(lambda: {"steps      seen", "blocks     seen"} <= {line[:15] for line in followed.said})
        engine.drains["/metrics"] = [{**ITERATION, "iter": 9}]
    assert followed.error is None
    assert [row["step"] for row in followed.sink.rows("step")] == [7, 8, 9]
    assert [row["change"] for row in followed.sink.rows("block")] == ["stored"]
    assert followed.values("requests_running") == [4.0, 4.0]
    assert "/perf_metrics" not in engine.requests
    followed.valid()
    said = {line.split()[0]: line for line in followed.said}
    assert said["steps"].startswith("steps      seen")
    assert said["blocks"].startswith("blocks     seen")


def test_with_its_prometheus_page_trtllms_iterations_are_left_to_itself(engine: FakeEngine) -> None:
    """The server reads them; kvscope asks for requests instead, and never for /metrics."""
    posing(engine, "trtllm")
    engine.drains = {"/perf_metrics": [], "/kv_cache_events": []}
    with Attached(engine, "trtllm") as followed:
        followed.until(lambda: {"requests   seen", "blocks     seen"} <= {line[:15] for line in followed.said})
    assert {"/perf_metrics", "/kv_cache_events"} <= set(engine.requests)
    assert "/metrics" not in engine.requests


def test_an_endpoint_that_is_closed_names_its_setting(engine: FakeEngine) -> None:
    """404 where event buffers are off."""
    posing(engine, "trtllm")
    with Attached(engine, "trtllm") as followed:
        followed.until(lambda: any("event_buffer_max_size" in line for line in followed.said))
    assert any(line.startswith("blocks     not seen") for line in followed.said)


def test_busy_slots_are_looked_at_and_idle_ones_left_alone(engine: FakeEngine) -> None:
    """llama-server: /slots while a request is served, and once after."""
    posing(engine, "llamacpp")
    slot = {"id": 0, "n_ctx": 512, "is_processing": True, "n_prompt_tokens": 30}
    engine.set_json("/slots", [slot])
    engine.set_metrics("llamacpp:requests_processing 0\n")
    with Attached(engine, "llamacpp") as followed:
        followed.until(lambda: len(followed.values("requests_running")) > 3)
        assert "/slots" not in engine.requests
        engine.set_metrics("llamacpp:requests_processing 1\n")
        followed.until(lambda: 30.0 in followed.values("llamacpp:slot_kv_tokens"))
        engine.set_json("/slots", [{**slot, "is_processing": False}])
        engine.set_metrics("llamacpp:requests_processing 0\n")
        followed.until(lambda: followed.values("llamacpp:slots_busy")[-1:] == [0.0])
        asked = engine.requests.count("/slots")
        seen = len(followed.values("requests_running"))
        followed.until(lambda: len(followed.values("requests_running")) > seen + 3)
        assert engine.requests.count("/slots") <= asked + 1
    followed.valid()


def test_sglangs_request_log_becomes_requests(engine: FakeEngine, tmp_path: Path) -> None:
    """Lines written after the attach; those from before may have been stored by an earlier one."""
    posing(engine, "sglang")
    info = ANSWERS["sglang"]["server_info"] | {"log_requests": True}
    engine.set_json("/server_info", info)
    log = tmp_path / "sglang.log"
    now = time.time()

    def line(rid: str) -> str:
        meta = {"id": rid, "prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 4, "num_retractions": 0}
        meta |= {"request_received_ts": now, "first_token_latency": 0.5, "request_finished_ts": now + 1}
        return "[..] " + json.dumps({"timestamp": "x", "event": "request.finished", "out": {"meta_info": meta}}) + "\n"

    log.write_text(line("before"))
    with Attached(engine, "sglang", log=log) as followed:
        followed.until(lambda: bool(followed.sink.rows("sample")))
        with log.open("a") as file:
            file.write(line("after"))
        followed.until(lambda: bool(followed.sink.rows("request")))
    assert [row["request_id"] for row in followed.sink.rows("request")] == ["after"]
    assert followed.sink.rows("request")[0]["worker"] == engine.url.removeprefix("http://")
    followed.valid()
    assert any(line.startswith("requests   seen") for line in followed.said)
