"""`kvscope top` over a running collector: what it shows, in 80 columns, and what it says where it cannot look."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from collector.terminal.client import announced
from collector.terminal.top_screen import screen
from collector.terminal.width import width_of
from tests.conftest import Ended
from tests.integration.collector_harness import Collector, request_row, running, step_row


def feed(collector: Collector, worker: str = "w0") -> None:
    """One step with 3 running and 2 waiting, and two requests: 100 ms, of which one found its 16 reusable tokens."""
    now = time.time_ns()
    rows = [
        request_row(f"{worker}-{n}", vantage="engine", worker=worker, model="m", arrival_ns=now, at_ns=now)
        | {
            "first_token_ns": now + 100_000_000,
            "last_token_ns": now + 300_000_000,
            "prompt_tokens": 17,
            "cached_tokens": n * 16,
        }
        for n in (0, 1)
    ]
    step = step_row(1, worker=worker, at_ns=now, num_running=3, num_waiting_prefill=2, oldest_wait_s=1.5)
    step |= {"blocks_used": 30, "blocks_cached": 50, "blocks_total": 100}
    facts = {"worker": worker, "at_ns": now, "block_size": 16}
    assert collector.post({"worker": [facts]}, source="facts").status_code == 200
    assert collector.post({"request": rows, "step": [step]}, source="test").status_code == 200


def test_screen_shows_workers_queues_blocks_and_hits(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """3 running, 2 waiting, 30 % used, 50 % cached, half of the requests with hits; TTFT 100 ms within 1.6 %."""
    with running(tmp_path / "s.duckdb") as collector:
        feed(collector)
        shown = kvscope("top", "--url", collector.url, "--once")
        document = json.loads(kvscope("top", "--url", collector.url, "--json").out)
    assert shown.code == 0
    lines = shown.out.splitlines()
    (of_worker,) = [line.split() for line in lines if line.startswith("w0") and "%" in line]
    assert of_worker[-7:] == ["s", "30", "%", "50", "%", "50", "%"] or of_worker[-6:] == [
        "30",
        "%",
        "50",
        "%",
        "50",
        "%",
    ]
    assert "running 3  waiting: prefill 2, decode -  oldest wait 1.50 s" in lines[1]
    (worker,) = document["workers"]
    assert (worker["worker"], worker["hit_ratio"], worker["blocks_used"]) == ("w0", 0.5, 30)
    (latency,) = document["latencies"]
    assert latency["metrics"]["ttft"]["p99_s"] == pytest.approx(0.1, rel=0.016)
    assert document["totals"]["num_waiting_decode"] is None


def test_every_line_fits_a_narrow_terminal(tmp_path: Path) -> None:
    """With 64 workers of long names, too; the rest is counted."""
    with running(tmp_path / "s.duckdb") as collector:
        for number in range(64):
            feed(collector, f"worker-with-a-long-name-{number:02}.example.internal")
        told = screen(collector.client.get("/api/v1/now").json(), 80)
    assert max(map(len, told.splitlines())) <= 80
    assert "... and 24 more workers" in told


def test_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    """A worker's name with an escape sequence is shown as its letters."""
    with running(tmp_path / "s.duckdb") as collector:
        feed(collector, "w\x1b[2J")
        told = screen(collector.client.get("/api/v1/now").json(), 80)
    assert "\x1b" not in told
    assert "w\\x1b[2J" in told


def test_nothing_told_is_said(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """No row of zeros."""
    with running(tmp_path / "s.duckdb") as collector:
        told = kvscope("top", "--url", collector.url, "--once").out
    assert "No worker sends its steps" in told
    assert "No live request ended" in told


def test_without_a_collector_it_says_how_to_start_one(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """Exit 3: the other side is not there."""
    ended = kvscope("top", "--store", tmp_path / "s.duckdb", "--once")
    assert ended.code == 3
    assert "kvscope serve --store" in ended.err


def test_names_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    """24 columns are not enough for them; what all begin or end with is left out, and numbers keep their columns."""
    with running(tmp_path / "s.duckdb") as collector:
        for number in (1, 2):
            feed(collector, f"decode-workers-of-the-large-fleet-{number}.example.internal")
        told = screen(collector.client.get("/api/v1/now").json(), 80).splitlines()
    assert sum(line.startswith("…1…") for line in told) == 2
    assert [line.split()[-2:] for line in told if line.startswith("…2…") and "30 %" in line] == [["50", "%"]]


def test_wide_letters_take_the_columns_that_they_take(tmp_path: Path) -> None:
    """漢字 is four columns wide: the numbers behind it stand where those behind a plain name do."""
    with running(tmp_path / "s.duckdb") as collector:
        for name in ("漢字漢字", "w0"):
            feed(collector, name)
        told = screen(collector.client.get("/api/v1/now").json(), 80).splitlines()
    ends = {width_of(line) for line in told if line.endswith("50 %")}
    assert len(ends) == 1
    assert max(map(width_of, told)) <= 80


def test_long_verdict_is_told_in_several_lines() -> None:
    """A verdict has more than 80 columns; at most three lines are shown."""
    words = " ".join(["premature_eviction"] * 30)
    nothing = dict.fromkeys(("num_running", "num_waiting_prefill", "num_waiting_decode", "oldest_wait_s", "open"))
    seen = {"totals": nothing, "now_ns": 0, "is_draining": False, "workers": [], "latencies": [], "recent_minutes": 5}
    told = screen({**seen, "alerts": [{"alert": "A", "summary": words}], "findings": []}, 80).splitlines()
    firing = [line for line in told if "premature" in line]
    assert [line.endswith("…") for line in firing] == [False, False, True]
    assert max(map(len, told)) <= 80


def test_dumb_terminal_follows_a_collector_that_goes_and_comes_back_elsewhere(tmp_path: Path) -> None:
    """No escape codes; while it is away that stands above the older picture; it is found again at its new port."""
    store = str(tmp_path / "s.duckdb")
    outer, inner = pty.openpty()
    words = ["top", "--store", store, "--interval", "0.2"]
    command = [sys.executable, "-c", "from collector.cli import main; main()", *words]
    env = os.environ | {"TERM": "dumb", "COLUMNS": "80", "LINES": "24"}
    with running(store) as collector, announced(store, collector.url):
        feed(collector)
        watching = subprocess.Popen(command, stdout=inner, stderr=inner, stdin=inner, env=env)
        os.close(inner)
        seen = _read_until(outer, b"w0")
    try:
        seen += _read_until(outer, b"trying again")
        with running(store) as collector, announced(store, collector.url):
            feed(collector, "w-again")
            seen += _read_until(outer, b"w-again")
    finally:
        watching.send_signal(signal.SIGINT)
        watching.wait(30)
        os.close(outer)
    assert b"\x1b" not in seen
    assert b"start one with" in seen
    assert watching.returncode == 130


def _read_until(terminal: int, wanted: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 60
    while wanted not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536)
    return seen
