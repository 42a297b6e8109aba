"""kvscope against a real llama-server: what it reports equals what the server counted and what the clients were told.

One server with two slots answers requests that share prefixes, more at once than it has slots, while a real
`kvscope attach llamacpp` writes into a store.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters.llamacpp import timings_columns
from engine_probe.adapters.llamacpp_provides import METRICS, PROPS, SLOTS
from engine_probe.adapters.prometheus import parse_page
from engine_probe.attach.session import AttachOptions, AttachSession
from engine_probe.errors import UnknownFormat
from store.open import open_store
from tests.attach_engine import ListSink
from tests.contract.test_adapters_contract import filled
from tests.servers import require, running_llama_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

PREFIX = "You are a careful clerk. Keep the ledger of the harbour and answer in one short line. " * 3
SLOT_CONTEXT = 512
DROPPED = ("llamacpp:prompt_tokens_seconds", "llamacpp:predicted_tokens_seconds")


@dataclass
class Story:
    """What happened: answers of the server to its clients, its own counters before and after, and the attach."""

    url: str
    store: str
    before: dict[str, float]
    after: dict[str, float] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    code: int | None = None

    def gain(self, name: str) -> float:
        return self.after[f"llamacpp:{name}"] - self.before[f"llamacpp:{name}"]


def counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        return {series.name: value for series, value, _ in parse_page(answer.read()).samples}


def complete(url: str, tail: str, max_tokens: int) -> dict[str, Any]:
    body = {"prompt": PREFIX + tail, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        told: dict[str, Any] = json.loads(answer.read())
        return told


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


@contextmanager
def attached(url: str, store: Path) -> Iterator[subprocess.Popen[str]]:
    """`kvscope attach llamacpp URL` as its page says, ended as Ctrl-C ends it."""
    command = [Path(sys.executable).with_name("kvscope"), "attach", "llamacpp", url, "--store", store, "--json"]
    command += ["--interval", "200ms", "--worker", "llama", "--salt-file", store.with_suffix(".salt")]
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    require("llama-server")
    folder = tmp_path_factory.mktemp("llama")
    with running_llama_server(ctx_size=2 * SLOT_CONTEXT, num_slots=2) as url:
        told = Story(url, str(folder / "llama.duckdb"), counters(url))
        with attached(url, folder / "llama.duckdb") as process:
            until(lambda: (folder / "llama.duckdb").exists())
            time.sleep(1.0)
            with ThreadPoolExecutor(4) as clients:
                found = clients.map(lambda k: complete(url, f"Ship number {k}:", 6 + k), range(6))
                told.answers = list(found)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            out, told.said = process.communicate(timeout=60)
        told.code, told.summary = process.returncode, json.loads(out)
        told.after = counters(url)
        yield told


@pytest.fixture(scope="module")
def rows(story: Story) -> Callable[[str], list[dict[str, Any]]]:
    store = open_store(story.store, read_only=True)

    def read(sql: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = store.query(sql).to_pylist(maps_as_pydicts="strict")
        return found

    return read


def test_the_load_did_what_the_other_tests_need(story: Story) -> None:
    """Prefixes were found again, and every request ended at its length: nothing below is vacuous."""
    assert len(story.answers) == 6
    assert story.gain("prompt_tokens_cached_total") > 0
    assert story.gain("prompt_tokens_total") > 0
    assert [one["choices"][0]["finish_reason"] for one in story.answers] == ["length"] * 6


def test_counters_are_the_servers_own(story: Story, rows: Callable[[str], list[dict[str, Any]]]) -> None:
    """The last scrape of each canonical counter is the number on the server's own page at rest."""
    last = {
        row["name"]: row["value"]
        for row in rows(
            "SELECT name, sum(value) AS value FROM (SELECT name, labels, arg_max(value, at_ns) AS value FROM sample "
            "GROUP BY ALL) GROUP BY name"
        )
    }
    computed, cached = story.after["llamacpp:prompt_tokens_total"], story.after["llamacpp:prompt_tokens_cached_total"]
    assert last["prompt_tokens_computed_total"] == computed
    assert last["prompt_tokens_cached_total"] == last["prefix_hits_tokens_total"] == cached
    assert last["prompt_tokens_total"] == last["prefix_queries_tokens_total"] == computed + cached
    assert last["output_tokens_total"] == story.after["llamacpp:tokens_predicted_total"]
    for name, value in story.after.items():
        if name in last and name not in DROPPED:
            assert last[name] == pytest.approx(value), name
    assert not set(DROPPED) & last.keys()


def test_the_summary_counts_what_the_server_counted(story: Story) -> None:
    """Gains since the attach, no restart, nothing lost, exit code 0."""
    assert story.code == 0
    gains = story.summary["counter_gains"]
    assert gains["output_tokens_total"] == story.gain("tokens_predicted_total")
    assert gains["prompt_tokens_total"] == story.gain("prompt_tokens_total") + story.gain("prompt_tokens_cached_total")
    assert (story.summary["restarts"], story.summary["lost_rows"], story.summary["unseen"]) == (0, {}, [])


def test_timings_of_the_answers_sum_to_the_servers_counters(story: Story) -> None:
    """What each client was told, as columns: tokens add up to what the server counted, seconds to no less.

    On a crowded machine the server tells a client of waits between two batches that its counter leaves out.
    """
    told = [timings_columns(one["timings"]) for one in story.answers]
    assert sum(one["computed_tokens"] for one in told) == story.gain("prompt_tokens_total")
    assert sum(one["cached_tokens"] for one in told) == story.gain("prompt_tokens_cached_total")
    assert sum(one["output_tokens"] for one in told) == story.gain("tokens_predicted_total")
    counted_s = story.gain("prompt_seconds_total")
    assert counted_s > 0
    assert sum(one["prefill_s"] for one in told) >= 0.99 * counted_s - 0.01
    for one, answer in zip(told, story.answers, strict=True):
        assert one["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert one["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert one["output_tokens"] == answer["usage"]["completion_tokens"]


def test_load_was_seen(rows: Callable[[str], list[dict[str, Any]]]) -> None:
    """Four clients at two slots: both were busy, and somebody waited."""
    most = {row["name"]: row["value"] for row in rows("SELECT name, max(value) AS value FROM sample GROUP BY name")}
    assert most["requests_running"] == 2.0
    assert most["requests_waiting"] >= 1.0


def test_slots_were_looked_at_while_somebody_was_served(rows: Callable[[str], list[dict[str, Any]]]) -> None:
    """KV tokens of a slot stay within its context, and include what it found again."""
    found = rows("SELECT * FROM sample WHERE name LIKE 'llamacpp:slot%'")
    names = {row["name"] for row in found}
    assert {"llamacpp:slot_kv_tokens", "llamacpp:slots_kv_tokens_serving", "llamacpp:slots_busy"} <= names
    assert {row["labels"]["wire"] for row in found} == {"/slots"}
    held = [row["value"] for row in found if row["name"] == "llamacpp:slot_kv_tokens"]
    assert 0 < max(held) <= SLOT_CONTEXT
    assert max(row["value"] for row in found if row["name"] == "llamacpp:slots_total") == 2.0


def test_the_worker_is_described(rows: Callable[[str], list[dict[str, Any]]]) -> None:
    """Engine, model without its path, context of a slot, slots."""
    (worker,) = rows("SELECT * FROM worker")
    assert (worker["worker"], worker["engine"], worker["role"]) == ("llama", "llamacpp", "mixed")
    assert worker["model"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert worker["max_context"] == SLOT_CONTEXT
    assert worker["flags"] == {"total_slots": "2", "n_ctx_slot": str(SLOT_CONTEXT)}
    assert worker["dtype"] == "Q4_1"


def test_what_is_declared_is_filled_and_nothing_else(rows: Callable[[str], list[dict[str, Any]]]) -> None:
    """Metrics, props and slots against a server that is real, column by column; an old build's gauge is not there."""
    seen = filled([(kind, row) for kind in ("sample", "worker") for row in rows(f"SELECT * FROM {kind}")])
    seen -= {f"{kind}.{name}" for kind in ("sample", "worker") for name in ("source", "received_ns", "run_id")}
    declared = {
        name for one in (METRICS, PROPS, SLOTS) for name in one.names if name.startswith(("sample.", "worker."))
    }
    assert seen == declared - {"sample.kv_usage_ratio"}


def test_it_was_said_what_is_seen_and_what_is_not(story: Story) -> None:
    """One line a source; requests are pointed to the proxy."""
    assert "metrics    seen      llama-server" in story.said
    assert "slots      seen" in story.said
    assert "requests   not seen" in story.said
    assert "kvscope proxy" in story.said


def test_another_engines_name_is_refused_with_the_right_one(story: Story) -> None:
    """`kvscope attach vllm` at a llama-server."""
    import threading

    session = AttachSession(AttachOptions(url=story.url, engine="vllm", salt=b"s"), ListSink(), lambda line: None)
    with pytest.raises(UnknownFormat, match="kvscope attach llamacpp"):
        session.run(threading.Event())
