"""Windows that make no sense, or hold nothing that could be judged: one clear answer each, from the command line and over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended
from tests.diagnosed import as_run, runs, shifted, stored
from tests.integration.collector_harness import Collector, running
from tests.simulate import T0_NS, Rows, Setup

Run = Callable[..., Ended]
NS = 1_000_000_000
FIRST = T0_NS // NS
"""Second of the first live request."""


def iso(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def span(start: int, end: int) -> str:
    return f"{iso(start)}/{iso(end)}"


EARLY, LATE = span(FIRST, FIRST + 60), span(FIRST + 3600, FIRST + 3660)


def never_served(rows: Rows) -> Rows:
    """The same requests, all given up before their first token."""
    lost = {"state": "aborted", "first_token_ns": None, "last_token_ns": None, "token_ns": None}
    return {"request": [{**row, **lost, "prefill_s": None, "decode_s": None} for row in rows["request"]]}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Live: one minute, an hour later one with caching off. Runs: a whole one, one request, nobody served, warm-up alone."""
    made = runs({"base": {}, "off": {"caching": False}}, Setup(num_requests=120, output_tokens=(8, 16)))
    off = made["off"]
    parts = [
        made["base"],
        as_run({"request": off["request"][5:6]}, "one"),
        as_run(never_served(off), "aborted"),
        as_run({"request": [{**row, "labels": {"phase": "warmup"}} for row in off["request"]]}, "warm"),
        as_run(made["base"], None),
        as_run(shifted(off, 3600.0), None),
    ]
    file = tmp_path_factory.mktemp("bad") / "store.duckdb"
    stored(file, parts).close()
    return file


@pytest.fixture(scope="module")
def collector(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """A service over a copy: a store admits one process."""
    copy = shutil.copy(path, tmp_path_factory.mktemp("served") / "store.duckdb")
    with running(Path(copy)) as made:
        yield made


NO_SENSE: dict[str, tuple[str | None, str | None, str]] = {
    "empty": (
        EARLY,
        "2020-01-01/2020-01-02",
        "holds no requests; the live requests that are stored came from 2026-05-28 20:26:",
    ),
    "empty run": ("base@2020-01-01/2020-01-02", "one", "the requests of base that are stored came from"),
    "warm-up alone": ("base", "warm", "(120 warm-up requests are left out)"),
    "overlapping": (
        EARLY,
        span(FIRST + 30, FIRST + 90),
        "(2026-05-28 20:27:10 UTC to 2026-05-28 20:28:10 UTC) overlap",
    ),
    "the same": ("base", "base", "the same window"),
    "future": (EARLY, "2100-01-01/2100-01-02", "lies in the future: it is "),
    "no baseline": (
        None,
        EARLY,
        "no baseline was found: fewer than 30 requests are stored before 2026-05-28 20:26:40 UTC",
    ),
    "no baseline of a run": (None, "base", "give --baseline NAME; known runs: aborted, base, one, warm"),
    "ends first": (EARLY, span(FIRST + 3660, FIRST + 3600), "ends before it starts (2026-05-28 21:27:40 UTC is after"),
    "no length": (EARLY, span(FIRST + 30, FIRST + 30), "is empty"),
    "seconds": (EARLY, f"{FIRST}/{FIRST + 60}", "looks like seconds since 1970; give nanoseconds"),
    "milliseconds": (EARLY, f"{FIRST * 10**3}/{(FIRST + 60) * 10**3}", "looks like milliseconds since 1970"),
    "microseconds": (EARLY, f"{FIRST * 10**6}/{(FIRST + 60) * 10**6}", "looks like microseconds since 1970"),
    "a digit too many": (EARLY, f"{FIRST * 10**10}/{(FIRST + 60) * 10**10}", "is no instant"),
    "one end in microseconds": (EARLY, f"{FIRST * NS}/{(FIRST + 60) * 10**6}", "looks like microseconds"),
    "no window": (EARLY, "yesterday", "neither a run nor START/END"),
    "nothing": ("", EARLY, "neither a run nor START/END"),
}


@pytest.mark.parametrize("name", NO_SENSE)
def test_what_makes_no_sense_is_misuse(kvscope: Run, path: Path, name: str) -> None:
    """Exit 2, nothing on stdout but the problem document under --json, one sentence that says what would do."""
    baseline, suspect, says = NO_SENSE[name]
    words = [*(("--baseline", baseline) if baseline is not None else ()), *(("--suspect", suspect) if suspect else ())]
    ended = kvscope("diagnose", "--store", path, *words, "--json")
    assert ended.code == 2, ended.err
    assert says in json.loads(ended.out)["detail"]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", NO_SENSE)
def test_the_same_over_http_is_a_problem_document(collector: Collector, name: str) -> None:
    """4xx with the same sentence."""
    baseline, suspect, says = NO_SENSE[name]
    asked = {key: text for key, text in (("baseline", baseline), ("suspect", suspect)) if text is not None}
    answer = collector.client.get("/api/v1/diagnosis", params=asked)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert says in answer.json()["detail"]


def document(kvscope: Run, path: Path, baseline: str, suspect: str) -> dict[str, Any]:
    ended = kvscope("diagnose", "--store", path, "--baseline", baseline, "--suspect", suspect, "--json")
    assert ended.code in (0, 1), ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


@pytest.mark.parametrize(("baseline", "suspect"), [("base", "one"), ("one", "base")])
def test_one_request_is_too_few(kvscope: Run, path: Path, baseline: str, suspect: str) -> None:
    """Nobody is named, and it is said how many it takes."""
    found = document(kvscope, path, baseline, suspect)
    assert (found["status"], found["causes"]) == ("not_distinguishable", [])
    assert found["verdict"].startswith("Too few requests to say anything: ")
    assert "at least 20 each are needed" in found["verdict"]


@pytest.mark.parametrize(
    ("baseline", "suspect", "side"), [("base", "aborted", "suspect window"), ("aborted", "base", "baseline")]
)
def test_a_window_in_which_nobody_was_served(kvscope: Run, path: Path, baseline: str, suspect: str, side: str) -> None:
    """No latency is made of it: that nobody got a token is the answer."""
    found = document(kvscope, path, baseline, suspect)
    assert (found["status"], found["causes"]) == ("not_distinguishable", [])
    assert f"none of the 120 requests of the {side} got a first token" in found["verdict"]
    assert " rose" not in found["verdict"]


def test_exchanged_windows_are_judged_and_said(kvscope: Run, path: Path) -> None:
    """The later window as the baseline: what rose has fallen, its cause is over, and a note says that the two may be exchanged."""
    right, exchanged = document(kvscope, path, EARLY, LATE), document(kvscope, path, LATE, EARLY)
    assert right["delta"]["mean_s"]["value"] == pytest.approx(-exchanged["delta"]["mean_s"]["value"])
    assert [cause["cause"] for cause in right["causes"]] == [cause["cause"] for cause in exchanged["causes"]]
    assert all(cause["ended"] for cause in exchanged["causes"])
    assert "exchange them to ask what got worse" in exchanged["notes"][0]
    assert "exchange them" not in right["notes"][0]


def test_what_has_not_been_yet_is_no_part_of_a_window(kvscope: Run, path: Path) -> None:
    """An end in the year 2100 is now: the window is no longer than time."""
    found = document(kvscope, path, EARLY, f"{iso(FIRST + 3600)}/2100-01-01")
    assert found["windows"]["suspect"]["end_ns"] < 4_000_000_000 * NS
    assert any("requests arrived in" in row["statement"] for row in found["quality"] if row["check"] == "coverage")


def test_a_window_that_requests_fill_in_part_is_said(kvscope: Run, path: Path) -> None:
    """An hour around one minute of requests: a warning, and rates are those of the hour."""
    found = document(kvscope, path, span(FIRST - 3000, FIRST + 600), LATE)
    told = [row["statement"] for row in found["quality"] if row["check"] == "coverage"]
    assert any(said.startswith("baseline: requests arrived in ") and "of its 3,600 s only" in said for said in told)
