"""Follows all engines of a fleet in one process: those that come are found and followed, those that go are marked.

One thread keeps the time; two pools of threads do the turns (a scrape, or an attempt to connect), one turn of an engine at a
time; one thread asks where the engines are; one funnel writes. Invariant: an engine that is slow, down or strange costs its own turns and nobody else's; a
source of targets that cannot be read takes nobody away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from engine_probe.attach.fleet_facts import FleetFacts
from engine_probe.attach.follower import AttachOptions, Follower, Say
from engine_probe.attach.funnel import FLUSH_S, Funnel
from engine_probe.attach.session import Trouble
from engine_probe.attach.target_watch import TargetWatch, Told
from engine_probe.attach.targets import Target, Targets
from engine_probe.errors import KvscopeError, ProbeError

if TYPE_CHECKING:
    from engine_probe.sending.sink import Sink

log = logging.getLogger(__name__)

REFRESH_S: Final = 5.0
THREADS: Final = 32
LOOK_S: Final = 0.05
MAX_PAUSE_S: Final = 30.0


@dataclass(slots=True)
class FleetSummary:
    """What an attach to a fleet saw: rows by kind, and by worker how often it was scraped, restarted, not answering."""

    seconds: float
    rows: Mapping[str, int]
    lost_rows: Mapping[str, int]
    workers: Mapping[str, Mapping[str, Any]]
    never_found: Mapping[str, str] = field(default_factory=dict)
    sink_error: str | None = None


@dataclass(slots=True)
class _Member:
    """One target and what follows it. `due` (monotonic s) is its next turn; `is_busy` while a thread has it."""

    target: Target
    follower: Follower
    due: float
    is_busy: bool = False
    turn: Future[None] | None = None
    is_open: bool = False
    is_leaving: bool = False
    failures: int = 0
    error: str | None = None

    @property
    def name(self) -> str:
        return self.target.worker or self.target.url.partition("://")[2]


class Fleet:
    """`run` once. `options` holds what is the same for all: engine (or auto), interval, key, salt; its url is unused."""

    def __init__(
        self,
        targets: Targets,
        options: AttachOptions,
        sink: Sink,
        say: Say,
        *,
        clock: Callable[[], int] = time.time_ns,
        refresh_s: float = REFRESH_S,
        flush_s: float = FLUSH_S,
        sink_trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._targets = targets
        self._options = options
        self._say = say
        self._clock = clock
        self._refresh_s = refresh_s
        self._funnel = Funnel(sink, clock=clock, flush_s=flush_s)
        self._trouble = Trouble(self._funnel, sink_trouble, say)
        self._facts = FleetFacts()
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._gone: dict[str, Mapping[str, Any]] = {}
        self._told_engines: set[str] = set()
        self._refused: dict[str, Target] = {}
        self._targets_error: str | None = None

    def run(self, stop: threading.Event) -> FleetSummary:
        """Follow until `stop` or the duration's end, drain.

        Raises UnknownFormat, EngineUnreachable where the targets cannot be told at the beginning; nothing afterwards.
        """
        try:
            found = self._targets.read()
        except BaseException:
            self._funnel.close()
            raise
        begun = time.monotonic()
        end = None if self._options.duration_s is None else begun + self._options.duration_s
        self._funnel.start()
        watch = TargetWatch(self._targets, self._refresh_s)
        with _pool("fleet") as steady, _pool("fleet-doubtful") as doubtful:
            try:
                self._take(found)
                watch.start()
                while not stop.is_set() and (end is None or time.monotonic() < end):
                    self._refresh(watch.news())
                    self._dispatch(steady, doubtful)
                    self._trouble.tell()
                    stop.wait(LOOK_S)
            finally:
                watch.stop()
                self._drain(steady)
        return self._summary(time.monotonic() - begun)

    # --- who belongs to the fleet

    def _refresh(self, told: Told | None) -> None:
        if told is None:
            return
        if isinstance(told, ProbeError):
            if told.message != self._targets_error:
                self._targets_error = told.message
                self._say(f"The targets cannot be told, so they stay as they are: {told.message}")
            return
        if self._targets_error is not None:
            self._targets_error = None
            self._say("The targets can be told again.")
        self._take(told)

    def _take(self, found: Sequence[Target]) -> None:
        now = {target.url: target for target in found}
        at_ns = self._clock()
        for url, member in list(self._members.items()):
            if url not in now or now[url].worker != member.target.worker:
                member.is_leaving = True
                self._members[f"{url} (left)"] = self._members.pop(url)
        for url, target in now.items():
            if url not in self._members and self._refused.get(url) != target:
                self._add(target)
        self._funnel.put_rows("mark", self._facts.counted(len(now), at_ns))

    def _add(self, target: Target) -> None:
        name = target.worker or target.url.partition("://")[2]
        options = replace(
            self._options, url=target.url, worker=target.worker, engine=target.engine or self._options.engine
        )
        try:
            follower = Follower(options, self._funnel, lambda text: self._told(name, text), clock=self._clock)
        except KvscopeError as error:
            self._refused[target.url] = target
            self._told(name, f"cannot be followed: {error.message}")
            return
        self._members[target.url] = _Member(target, follower, time.monotonic())

    # --- turns

    def _dispatch(self, steady: ThreadPoolExecutor, doubtful: ThreadPoolExecutor) -> None:
        """Turns that are due. Who did not answer last time, or never did, waits with his like: a rack that is gone, all of it
        hanging, would take every thread from those that answer."""
        now = time.monotonic()
        for key, member in list(self._members.items()):
            if member.is_busy or (member.due > now and not member.is_leaving):
                continue
            if member.is_leaving:
                del self._members[key]
            member.is_busy = True
            answers = member.is_open and member.follower.scraper.last_error is None
            member.turn = (steady if answers else doubtful).submit(self._turn, member)

    def _turn(self, member: _Member) -> None:
        try:
            if member.is_leaving:
                self._leave(member)
            elif member.is_open:
                self._tick(member)
            else:
                self._join(member)
        except Exception as error:  # a mistake of ours must not end the fleet, nor be silent
            log.exception("a turn of the fleet failed", extra={"worker": member.name})
            member.error, member.due = f"{type(error).__name__}: {error}", time.monotonic() + MAX_PAUSE_S
        finally:
            member.is_busy = False

    def _join(self, member: _Member) -> None:
        try:
            member.follower.connect()
        except KvscopeError as error:
            member.failures += 1
            member.due = time.monotonic() + min(2.0 ** min(member.failures - 1, 8), MAX_PAUSE_S)
            if error.message != member.error:
                member.error = error.message
                self._told(member.name, f"not found: {error.message}")
            return
        member.error = None
        scraper = member.follower.scraper
        with self._lock:  # what is seen of an engine is said once for all workers of its kind
            member.follower.tells_lines = scraper.adapter.engine not in self._told_engines
            self._told_engines.add(scraper.adapter.engine)
        member.follower.open()
        member.is_open = True
        self._told(member.name, f"joined: {scraper.adapter.title} {scraper.discovery.version or 'of unknown version'}")
        text = f"{scraper.worker} joined the targets that kvscope follows."
        self._mark("worker_up", scraper.worker, text, {"url": member.target.url, **member.target.labels})
        self._compare(member)
        member.due = member.follower.due

    def _tick(self, member: _Member) -> None:
        scraper = member.follower.scraper
        restarts, facts = scraper.lives.restarts, scraper.facts
        member.follower.tick()
        member.due = member.follower.due
        if scraper.lives.restarts != restarts or scraper.facts is not facts:
            self._compare(member)

    def _compare(self, member: _Member) -> None:
        scraper = member.follower.scraper
        facts = scraper.facts
        group = member.target.labels.get("job") or str(facts.get("model") or scraper.adapter.engine)
        with self._lock:
            marks = self._facts.joined(group, scraper.worker, facts, self._clock())
        self._funnel.put_rows("mark", marks)
        for mark in marks:
            self._say(mark["text"])

    def _leave(self, member: _Member) -> None:
        if member.is_open:
            scraper = member.follower.scraper
            member.follower.drain()
            self._mark("worker_down", scraper.worker, f"{scraper.worker} left the targets.", {"url": member.target.url})
            with self._lock:
                self._gone[scraper.worker] = _seen(member)
            self._told(member.name, "left the targets")
        member.follower.close()

    def _mark(self, mark: str, worker: str, text: str, attrs: Mapping[str, str]) -> None:
        row = {"at_ns": self._clock(), "mark": mark, "worker": worker, "subject": worker, "text": text}
        self._funnel.put_rows("mark", [row | {"attrs": {"seen_by": "attach", **attrs}}])

    def _told(self, name: str, text: str) -> None:
        self._say(f"{name}: {text}")

    # --- the end

    def _drain(self, pool: ThreadPoolExecutor) -> None:
        for member in self._members.values():
            if member.turn is not None and member.turn.cancel():  # it waited behind those that hang
                member.is_busy = False
        deadline = time.monotonic() + MAX_PAUSE_S
        while any(member.is_busy for member in self._members.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        list(pool.map(self._end, [m for m in self._members.values() if not m.is_busy]))
        self._funnel.close()

    def _end(self, member: _Member) -> None:
        if member.is_open:
            member.follower.drain()
        member.follower.close()

    def _summary(self, seconds: float) -> FleetSummary:
        opened = [member for member in self._members.values() if member.is_open]
        return FleetSummary(
            seconds=round(seconds, 3),
            rows=dict(self._funnel.written),
            lost_rows=dict(self._funnel.lost),
            workers={**self._gone, **{member.follower.scraper.worker: _seen(member) for member in opened}},
            never_found={m.target.url: m.error or "not asked yet" for m in self._members.values() if not m.is_open},
            sink_error=self._funnel.error,
        )


def _pool(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix=f"kvscope-{name}")


def _seen(member: _Member) -> dict[str, Any]:
    scraper = member.follower.scraper
    return {
        "url": member.target.url,
        "engine": scraper.adapter.engine,
        "engine_version": scraper.discovery.version,
        "scrapes": scraper.scrapes,
        "failed_scrapes": scraper.failures,
        "restarts": scraper.lives.restarts,
        "counter_gains": scraper.lives.gains,
        "kv_events": member.follower.kv_counts(),
    }
