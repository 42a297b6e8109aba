"""`attach prometheus`: the server is followed live; its own absence is a gap; what it warns of is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_probe.adapters.adapter import Surroundings
from engine_probe.adapters.registry import adapter
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.funnel import Funnel
from engine_probe.attach.prometheus_api import PrometheusApi
from engine_probe.attach.server_scraper import ServerScraper
from engine_probe.errors import UnknownFormat
from tests.attach_engine import ListSink
from tests.prometheus_script import ScriptedPrometheus

S = 1_000_000_000
T0 = 1_795_976_000


class Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now_s = float(T0)

    def __call__(self) -> int:
        return round(self.now_s * S)


class Followed:
    """A server and who follows it, with a sink that keeps the rows."""

    def __init__(self, server: ScriptedPrometheus) -> None:
        self.server, self.clock, self.sink = server, Clock(), ListSink()
        self.funnel = Funnel(self.sink)
        self.scraper = ServerScraper(
            adapter("prometheus"),
            EngineClient(server.url),
            self.funnel,
            None,
            api=PrometheusApi(server.url, timeout_s=2.0),
            matches=['{job="vllm"}'],
            clock=self.clock,
        )

    def page(self, running: float) -> None:
        """One scrape of the engine at the clock's instant."""
        self.server.page(self.clock.now_s, {"vllm_num_requests_running": running}, job="vllm", instance="a:1")

    def look(self, after_s: float) -> bool:
        self.clock.now_s += after_s
        return self.scraper.scrape()

    def running(self) -> list[float]:
        self.funnel.flush()
        return [row["value"] for row in self.sink.rows("sample") if row["name"] == "requests_running"]


@pytest.fixture
def followed() -> Iterator[Followed]:
    server = ScriptedPrometheus().start()
    yield Followed(server)
    server.stop()


def test_every_sample_is_taken_once_however_often_it_is_asked(followed: Followed) -> None:
    """Scrapes every 10 s, looks every 6 s: the newest one at the start, then each once."""
    followed.page(1)
    followed.clock.now_s += 1
    followed.scraper.connect()
    for number in range(2, 8):
        followed.clock.now_s += 4
        followed.page(number)
        followed.look(6)
    assert followed.running() == [1, 2, 3, 4, 5, 6, 7]


def test_samples_that_appear_late_are_still_taken(followed: Followed) -> None:
    """A slow scrape is visible only when it is over: the next look goes back half a minute."""
    followed.page(1)
    followed.scraper.connect()
    followed.look(10)
    followed.clock.now_s -= 8  # a scrape that began 8 s ago ends now
    followed.page(2)
    followed.clock.now_s += 8
    followed.look(10)
    assert followed.running() == [1, 2]


def test_a_server_is_not_asked_every_second(followed: Followed) -> None:
    """It scrapes every few seconds: looks in between ask nothing."""
    followed.page(1)
    followed.scraper.connect()
    asked = len(followed.server.queries)
    assert all(followed.look(1) for _ in range(4))
    assert len(followed.server.queries) == asked
    followed.look(1)
    assert len(followed.server.queries) == asked + 1


def test_a_server_that_goes_away_leaves_a_gap_and_no_worker_ends(followed: Followed) -> None:
    """Away for 20 s: what it scraped meanwhile is fetched afterwards, and the absence is said."""
    followed.page(1)
    followed.scraper.connect()
    followed.server.stop()
    assert followed.look(10) is False
    assert "Nothing answers" in (followed.scraper.last_error or "")
    followed.page(2)
    followed.server.start()
    assert followed.look(20) is True
    followed.scraper.finish()
    assert followed.running() == [1, 2]
    marks = [(row["mark"], row["worker"], row["subject"]) for row in followed.sink.rows("mark")]
    assert marks == [("gap", None, f"Prometheus at {followed.server.url}")]


def test_the_lines_name_targets_and_warnings(followed: Followed) -> None:
    """How many of which kind; strangers; what the server warned of; that requests are not told."""
    followed.page(1)
    followed.server.page(T0, {"app_requests_total": 1.0}, job="vllm", instance="b:1")
    followed.server.warnings = ["partial answer"]
    followed.scraper.connect()
    scraper = followed.scraper
    lines = [str(line) for line in scraper.adapter.lines(scraper.discovery, Surroundings())]
    assert lines[0] == "metrics    seen      Prometheus 3.5.0; targets: 1 other, 1 vllm"
    assert lines[1].startswith("others     seen")
    assert lines[2].startswith("requests   not seen")
    assert lines[3] == "warning    not seen  partial answer"


def test_a_selector_that_matches_nothing_is_refused_at_once(followed: Followed) -> None:
    """No attach that silently writes nothing."""
    with pytest.raises(UnknownFormat, match="no samples of"):
        followed.scraper.connect()
