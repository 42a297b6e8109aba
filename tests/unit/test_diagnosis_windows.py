"""Which windows are compared: what a text means, and what is chosen where none was given, on a real store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from diagnosis.windows import DAY, MINUTE, NS, choose, latest, parse_instant, parse_window, vantages
from engine_probe.errors import BadWindow
from engine_probe.schema import table_from_rows
from store.interface import Batch, Store, Window
from store.open import open_store

NOW = 1_780_000_000 * NS  # 2026-05-28T20:26:40Z
HOUR = 60 * MINUTE


def requests(start_ns: int, count: int, *, every_s: float = 10.0, ttft_s: float = 0.1, run: str | None = None) -> Batch:
    """`count` engine requests from an instant on."""
    rows = []
    for i in range(count):
        at = start_ns + round(i * every_s * NS)
        rows.append(
            {
                "request_id": f"{start_ns}-{i}",
                "vantage": "engine",
                "state": "finished",
                "at_ns": at + NS,
                "arrival_ns": at,
                "first_token_ns": at + round(ttft_s * NS),
                "run_id": run,
            }
        )
    return Batch({"request": table_from_rows("request", rows)})


def mark(at_ns: int, kind: str = "deployed") -> Batch:
    return Batch({"mark": table_from_rows("mark", [{"at_ns": at_ns, "mark": kind, "subject": "model"}])})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "store.duckdb")) as opened:
        yield opened


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with two runs, one of them with a name that looks like a span."""
    with open_store(str(tmp_path_factory.mktemp("named") / "store.duckdb")) as opened:
        fill(opened, [requests(NOW - DAY, 2, run="before"), requests(NOW - DAY, 2, run="exp/a@b")])
        yield opened


def fill(store: Store, batches: Iterable[Batch]) -> None:
    for batch in batches:
        store.append(batch)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2026-05-28T20:26:40Z", NOW),
        ("2026-05-28T20:26:40", NOW),
        ("2026-05-28 22:26:40+02:00", NOW),
        ("2026-05-28T20:26:40.000001Z", NOW + 1_000),
        ("2026-05-28", NOW - (20 * HOUR + 26 * MINUTE + 40 * NS)),
        ("1780000000000000001", NOW + 1),
        ("now", NOW),
        ("", NOW),
        ("-15m", NOW - 15 * MINUTE),
        (" -90s ", NOW - 90 * NS),
        ("-2h", NOW - 2 * HOUR),
        ("-3d", NOW - 3 * DAY),
    ],
)
def test_instants(text: str, ns: int) -> None:
    """ISO 8601 with and without zone (UTC), nanoseconds, now, and before now; exact to the microsecond."""
    assert parse_instant(text, NOW) == ns


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("yesterday", "no instant"),
        ("-15", "no instant"),
        ("-15w", "no instant"),
        ("15m", "no instant"),
        ("-9999999d", "no instant"),
        ("1780000000", "looks like seconds"),
        ("1780000000000", "looks like milliseconds"),
        ("2026-13-01", "no instant"),
        ("0001-01-01T00:00:00+14:00", "outside 1970 to 2262"),
        ("9999999999999999999", "outside 1970 to 2262"),
        ("-999999d", "outside 1970 to 2262"),
        ("١٧٨٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠", "no instant"),
    ],
)
def test_what_is_no_instant_is_said(text: str, says: str) -> None:
    """The message names what was given and what would do."""
    with pytest.raises(BadWindow, match=says) as caught:
        parse_instant(text, NOW)
    assert caught.value.window == text


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("before", Window(run_id="before")),
        ("exp/a@b", Window(run_id="exp/a@b")),
        ("-30m/-15m", Window(NOW - 30 * MINUTE, NOW - 15 * MINUTE)),
        ("-30m/", Window(NOW - 30 * MINUTE, NOW)),
        ("2026-05-28T20:00:00Z/now", Window(NOW - 1600 * NS, NOW)),
        ("before@-1d/now", Window(NOW - DAY, NOW, "before")),
        ("exp/a@b@-1d/now", Window(NOW - DAY, NOW, "exp/a@b")),
    ],
)
def test_windows(named: Store, text: str, window: Window) -> None:
    """A run, a span, or a span of a run; a run's own name comes first, whatever it looks like."""
    assert parse_window(text, named, NOW) == window


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("after", "neither a run nor START/END; known runs: before, exp/a@b"),
        ("after@-1d/now", "no run named 'after'; known runs: before"),
        ("before@yesterday", "neither a run nor START/END"),
        ("now/-15m", "ends before it starts"),
        ("now/now", "ends before it starts"),
        ("/now", "does not say where it starts"),
        ("2027-01-01/2027-01-02", "future"),
        ("", "neither a run nor START/END"),
        ("a/b/c", "no instant"),
    ],
)
def test_what_is_no_window_is_said(named: Store, text: str, says: str) -> None:
    """Unknown runs (with the known ones), reversed, empty and future spans."""
    with pytest.raises(BadWindow, match=says):
        parse_window(text, named, NOW)


def test_nothing_given_takes_the_last_15_minutes_against_yesterday(store: Store) -> None:
    """30 requests at the same time yesterday suffice; it says so."""
    fill(store, [requests(NOW - 10 * MINUTE, 40), requests(NOW - DAY - 10 * MINUTE, 40)])
    chosen = choose(store, None, None, NOW)
    assert chosen.suspect == Window(NOW - 15 * MINUTE, NOW)
    assert chosen.base == Window(NOW - DAY - 15 * MINUTE, NOW - DAY)
    assert chosen.why == "suspect: the last 15 minutes; baseline: the same time 1 day earlier"
    assert (chosen.base_name, chosen.suspect_name) == ("baseline", "suspect")


def test_a_day_with_too_few_requests_is_passed_over(store: Store) -> None:
    """29 requests yesterday are too few; three days earlier there were 30."""
    fill(
        store,
        [
            requests(NOW - 10 * MINUTE, 40),
            requests(NOW - DAY - 10 * MINUTE, 29),
            requests(NOW - 3 * DAY - 10 * MINUTE, 30),
        ],
    )
    chosen = choose(store, None, None, NOW)
    assert chosen.base == Window(NOW - 3 * DAY - 15 * MINUTE, NOW - 3 * DAY)
    assert "3 days earlier" in chosen.why


def test_requests_seen_twice_count_once(store: Store) -> None:
    """20 requests seen by engine and client are 20, which is too few, not 40."""
    engine = requests(NOW - DAY - 10 * MINUTE, 20)
    rows = [{**row, "vantage": "client"} for row in engine.tables["request"].to_pylist()]
    client = Batch({"request": table_from_rows("request", rows)})
    fill(store, [requests(NOW - 10 * MINUTE, 40), engine, client])
    with pytest.raises(BadWindow, match="no baseline was found"):
        choose(store, None, None, NOW)


def test_before_the_newest_change(store: Store) -> None:
    """No comparable day: the 15 minutes before the newest deployment, older marks and faults aside."""
    fill(
        store,
        [
            requests(NOW - 10 * MINUTE, 40),
            requests(NOW - 3 * HOUR, 900),
            mark(NOW - 5 * HOUR),
            mark(NOW - HOUR),
            mark(NOW - 30 * MINUTE, "fault"),
        ],
    )
    chosen = choose(store, None, None, NOW)
    assert chosen.base == Window(NOW - HOUR - 15 * MINUTE, NOW - HOUR)
    assert "before the newest change mark" in chosen.why


def test_a_change_inside_the_suspect_window_is_not_the_baseline(store: Store) -> None:
    """A deployment five minutes ago: the baseline ends where the suspect window begins."""
    fill(store, [requests(NOW - HOUR, 360), mark(NOW - 5 * MINUTE)])
    chosen = choose(store, None, None, NOW)
    assert chosen.base == Window(NOW - 30 * MINUTE, NOW - 15 * MINUTE)


def test_the_quietest_earlier_window(store: Store) -> None:
    """No day, no mark: of the earlier quarters of an hour the one with the lowest P95, seen from one vantage."""
    slow, fast = requests(NOW - 65 * MINUTE, 40, ttft_s=0.5), requests(NOW - 50 * MINUTE, 40, ttft_s=0.1)
    router = [
        {**row, "vantage": "router", "first_token_ns": row["arrival_ns"] + 1, "request_id": "x" + row["request_id"]}
        for row in slow.tables["request"].to_pylist()
    ]
    fill(store, [slow, fast, requests(NOW - 10 * MINUTE, 40), Batch({"request": table_from_rows("request", router)})])
    chosen = choose(store, None, None, NOW)
    # quarters before the suspect's start, NOW - 15 min: (-60, -45] holds the fast ones, (-75, -60] the slow ones
    assert chosen.base == Window(NOW - 60 * MINUTE, NOW - 45 * MINUTE)
    assert "quietest" in chosen.why


def test_old_data_are_looked_at_where_the_traffic_stopped(store: Store) -> None:
    """The last request came two hours ago: the suspect window is the quarter of an hour that ends with it."""
    fill(store, [requests(NOW - 3 * HOUR, 361)])  # the last one arrives exactly two hours ago
    chosen = choose(store, Window(NOW - 3 * HOUR, NOW - 150 * MINUTE), None, NOW)
    assert chosen.suspect == Window(NOW - 2 * HOUR - 15 * MINUTE + 1, NOW - 2 * HOUR + 1)
    assert "that hold requests" in chosen.why


def test_nothing_stored(store: Store) -> None:
    """An empty store says what to do first."""
    with pytest.raises(BadWindow, match="attach an engine or import a recording first"):
        choose(store, None, None, NOW)


def test_only_runs_stored(named: Store) -> None:
    """Runs have no last 15 minutes: name two of them."""
    with pytest.raises(BadWindow, match=r"name two runs instead \(known: before, exp/a@b"):
        choose(named, None, None, NOW)


def test_one_window_takes_one_run(named: Store) -> None:
    """Who asks for the last 15 minutes alone is told to name one run, not two."""
    with pytest.raises(BadWindow, match=r"name a run instead.*\(known: before, exp/a@b"):
        latest(named, NOW)


def test_a_window_says_where_it_starts(named: Store) -> None:
    """No START is no instant; without an END it ends now."""
    with pytest.raises(BadWindow, match="does not say where it starts"):
        parse_window(f"before@/{NOW}", named, NOW)
    assert parse_window(f"before@{NOW - HOUR}/", named, NOW) == Window(NOW - HOUR, NOW, "before")


def test_a_run_needs_a_baseline(named: Store) -> None:
    """Nothing says which other run is the comparable one."""
    with pytest.raises(BadWindow, match=r"a baseline is needed for the run 'before'.*known runs: before, exp/a@b"):
        choose(named, None, Window(run_id="before"), NOW)


def test_an_open_window_needs_a_baseline(store: Store) -> None:
    """Without both ends there is no length to look for."""
    with pytest.raises(BadWindow, match="open at one end"):
        choose(store, None, Window(NOW - HOUR, None), NOW)


@pytest.mark.parametrize(
    ("base", "suspect", "says"),
    [
        (Window(run_id="a"), Window(run_id="a"), "the same window"),
        (Window(1, 3), Window(2, 4), "overlap"),
        (Window(2, 4), Window(1, 3), "overlap"),
        (Window(1, 9), Window(2, 3), "overlap"),
        (Window(run_id="a"), Window(1, 2, "a"), "overlap"),
        (Window(None, 3), Window(2, None), "overlap"),
    ],
)
def test_windows_that_share_time_are_refused(store: Store, base: Window, suspect: Window, says: str) -> None:
    """The same requests on both sides are no comparison."""
    with pytest.raises(BadWindow, match=says):
        choose(store, base, suspect, NOW)


def test_neighbours_and_other_runs_share_no_time(store: Store) -> None:
    """Half-open spans may touch; the same span of two runs is two windows."""
    assert choose(store, Window(1, 2), Window(2, 3), NOW).why.startswith("both windows were given")
    assert choose(store, Window(1, 2, "a"), Window(1, 2, "b"), NOW).base_name == "a"


def test_two_parts_of_one_run_are_told_apart(store: Store) -> None:
    """Their names in the verdict are not the run's, which both would have."""
    chosen = choose(store, Window(1, 2, "a"), Window(2, 3, "a"), NOW)
    assert (chosen.base_name, chosen.suspect_name) == ("baseline", "suspect")


def test_vantages_of_a_window(named: Store) -> None:
    """Those that have requests in it."""
    assert vantages(named, Window(run_id="before")) == {"engine"}
    assert vantages(named, Window(run_id="nothing")) == frozenset()
