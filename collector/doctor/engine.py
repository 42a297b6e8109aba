"""The engine: who answers, what is visible now, which verdicts that allows, and what one line would show more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from collector.doctor.check import Check
from diagnosis.observability import Judgeable, judgeable, openers
from engine_probe.adapters.adapter import Adapter, Discovery, Surroundings
from engine_probe.adapters.provides import Provides
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.find import find_engine
from engine_probe.attach.kv_link import endpoints_from_sources, is_reachable

AREA: Final = "engine"
_OUTSIDE: Final = frozenset(("client", "log"))
"""Sources that the engine itself cannot tell whether they are open."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What was found of one engine. `next_source`: what to open first, and the causes that it alone would add."""

    url: str
    adapter: Adapter
    seen: Discovery
    sources: tuple[str, ...]
    allows: Judgeable
    around: Surroundings = field(default_factory=Surroundings)
    next_source: Provides | None = None
    would_add: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def look_at_engine(client: EngineClient) -> Sight:
    """Raises what `find_engine` raises."""
    adapter, page = find_engine(client)
    seen = adapter.discover(client, page)
    sources = adapter.open_sources(seen)
    names = frozenset[str]().union(*(one.names for one in adapter.provides if one.source in sources))
    closed = [one for one in adapter.provides if one.source not in sources]
    adds = openers(closed, names)
    best = max(adds, key=lambda source: (source not in _OUTSIDE, len(adds[source])), default=None)
    return Sight(
        url=client.url,
        adapter=adapter,
        seen=seen,
        sources=sources,
        allows=judgeable(names),
        around=_around(seen, client.host),
        next_source=next((one for one in closed if one.source == best), None),
        would_add=adds.get(best, ()) if best is not None else (),
        facts=adapter.facts(page, seen).get("0", {}),
    )


def _around(seen: Discovery, host: str) -> Surroundings:
    """What `attach` would find beside the page: whether the KV events that the engine tells of can be reached from here."""
    endpoints = endpoints_from_sources(seen.kv_sources or {}, host)
    closed = [endpoint.address for endpoint in endpoints if not endpoint.bind and not is_reachable(endpoint.address)]
    if closed:
        text = f"KV events are on, but {', '.join(closed)} cannot be reached from here: a firewall, or an address of theirs"
        return Surroundings(kv_error=text)
    links = [f"{'the engine connects to' if one.bind else 'published at'} {one.address}" for one in endpoints]
    return Surroundings(kv_links=links, has_replay=all(one.replay for one in endpoints))


def checks_of(sight: Sight) -> Iterator[Check]:
    """The doctor's lines on one engine."""
    version = sight.seen.version or "of unknown version"
    facts = {key: value for key, value in sight.facts.items() if value not in (None, {}) and key != "flags"}
    yield Check(AREA, sight.url, "ok", f"{sight.adapter.title} {version}", facts=facts)
    for line in sight.adapter.lines(sight.seen, sight.around):
        yield Check(AREA, line.subject, "ok" if line.seen else "note", line.text)
    yield _verdicts(sight.allows)
    if sight.next_source is not None:
        text = f"{sight.next_source.source} would add {', '.join(sight.would_add)}"
        yield Check(AREA, "next", "note", text, sight.next_source.needs.replace("`", ""))


def _verdicts(allows: Judgeable) -> Check:
    facts = {"metrics": list(allows.metrics), "causes": list(allows.causes), "lacking": allows.lacking}
    if not allows.metrics:
        text = "no request is seen one by one, so no latency can be judged from this alone"
        return Check(AREA, "verdicts", "warn", text, facts=facts)
    text = f"changes of {', '.join(m.upper() for m in allows.metrics)}; causes: {', '.join(allows.causes) or 'none'}"
    return Check(AREA, "verdicts", "ok", text, facts=facts)
