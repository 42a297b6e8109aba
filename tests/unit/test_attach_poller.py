"""Endpoints that are asked by one thread each: one answer at a time, errors said, one last look at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pyarrow as pa

from engine_probe.adapters.prometheus import Page
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.poller import Poller
from engine_probe.errors import UnknownFormat
from engine_probe.schema import table_from_rows
from tests.attach_engine import FakeEngine


class Drain:
    """Counts what it is given; `bad` answers are refused."""

    method: Literal["GET", "POST"] = "POST"
    timeout_s = 5.0
    hint = "Switch it on."

    def __init__(self, path: str = "/events") -> None:
        self.path = path
        self.bodies: list[bytes] = []
        self.busy = 0
        self.overlaps = 0
        self.due = True

    def is_due(self, page: Page | None) -> bool:
        return self.due

    def tables(self, body: bytes, at_ns: int) -> Mapping[str, pa.Table]:
        self.busy += 1
        self.overlaps += self.busy > 1
        time.sleep(0.005)
        self.busy -= 1
        self.bodies.append(body)
        if b"bad" in body:
            raise UnknownFormat("/events told rubbish")
        return {"mark": table_from_rows("mark", [{"at_ns": at_ns, "mark": "fault"}])} if b"1" in body else {}


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen within 10 s")


def started(engine: FakeEngine, *polls: Any) -> tuple[Poller, list[Mapping[str, pa.Table]]]:
    emitted: list[Mapping[str, pa.Table]] = []
    poller = Poller(polls, lambda timeout_s: EngineClient(engine.url), emitted.append, interval_s=0.02)
    poller.start()
    return poller, emitted


def test_what_waited_is_emitted_once_and_the_last_of_it_at_the_end() -> None:
    """Items come out in order, none twice, also those that came after the last regular look."""
    engine = FakeEngine().start()
    engine.drains["/events"] = [1, 1]
    drain = Drain()
    poller, emitted = started(engine, drain)
    until(lambda: len(emitted) == 1)
    until(lambda: len(drain.bodies) > 2)
    engine.drains["/events"] = [1]
    poller.stop()
    engine.stop()
    assert len(emitted) == 2
    assert [body for body in drain.bodies if body != b"[]"] == [b"[1, 1]", b"[1]"]
    assert drain.overlaps == 0
    assert poller.state() == {"/events": None}


def test_an_error_is_told_until_it_answers() -> None:
    """Not there (with the setting), rubbish, and well again."""
    engine = FakeEngine().start()
    drain = Drain()
    poller, _ = started(engine, drain)
    until(lambda: "Switch it on." in (poller.state().get("/events") or ""))
    engine.drains["/events"] = ["bad"]
    until(lambda: drain.bodies[:1] == [b'["bad"]'])
    until(lambda: poller.state().get("/events") is None)
    poller.stop()
    engine.stop()


def test_a_dead_engine_does_not_end_it() -> None:
    """Refused connections are asked again with growing pauses; stopping is quick all the same."""
    engine = FakeEngine().start()
    engine.stop()
    poller, _ = started(engine, Drain())
    until(lambda: "Nothing answers" in (poller.state().get("/events") or ""))
    begun = threading.active_count()
    poller.stop()
    assert threading.active_count() < begun


def test_an_endpoint_that_is_not_due_is_left_alone() -> None:
    """And asked when it is."""
    engine = FakeEngine().start()
    engine.drains["/events"] = [1]
    drain = Drain()
    drain.due = False
    poller, emitted = started(engine, drain)
    time.sleep(0.1)
    assert "/events" not in engine.requests
    drain.due = True
    until(lambda: bool(emitted))
    poller.stop()
    engine.stop()


def test_a_mistake_of_ours_is_said() -> None:
    """It ends that endpoint's thread, and no other's."""

    class Broken(Drain):
        def tables(self, body: bytes, at_ns: int) -> Mapping[str, pa.Table]:
            raise KeyError("oops")

    engine = FakeEngine().start()
    engine.drains = {"/broken": [1], "/events": [1]}
    poller, emitted = started(engine, Broken("/broken"), Drain())
    until(lambda: "mistake of kvscope" in (poller.state().get("/broken") or ""))
    until(lambda: bool(emitted))
    poller.stop()
    engine.stop()
