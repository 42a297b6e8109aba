"""What the exporters of hosts and GPUs have in common: they serve nothing, and tell why a worker may be slow.

Their numbers go under the contract's own names (`events.HOST_SAMPLES`), so that `host_reasons` reads all of them alike.
Invariant: such a source never speaks of an engine's life: no `worker` row and no start or end comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_probe.adapters.adapter import Adapter, Discovery, Line, Surroundings
from engine_probe.adapters.prometheus import Page


class HostAdapter(Adapter):
    """One kind of exporter. `sights`: subject -> (canonical names that show it, what opens it)."""

    serves = False
    is_nameless = True
    what: ClassVar[str]
    """What its numbers are about, for the first line."""
    sights: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]]

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        return {}

    def metrics_line(self, seen: Discovery, around: Surroundings) -> Line:
        version = f" {seen.version}" if seen.version else ""
        told = seen.details.get("told", "")
        text = f"{self.title}{version}: {self.what}{f' ({told})' if told else ''}; {len(seen.series)} series "
        return Line("metrics", bool(seen.series), text + f"every {around.interval_s:g} s")

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        names = seen.details.get("names", frozenset())
        lines = [self.metrics_line(seen, around)]
        for subject, (wanted, hint) in self.sights.items():
            there = [name for name in wanted if name in names]
            lines.append(Line(subject, bool(there), ", ".join(there) if there else hint))
        if worker := seen.details.get("nobody"):
            lines.append(Line("workers", False, str(worker)))
        return lines

    def discover(self, client: Any, page: Page) -> Discovery:
        return Discovery(
            version=self.version_of(page),
            series=frozenset(page.names()),
            details={"names": self.names_of(page), "told": self.told(page)},
        )

    def version_of(self, page: Page) -> str | None:
        """The exporter's release, where its page says it."""
        return None

    def told(self, page: Page) -> str:
        """How many of what the page is about."""
        return ""

    def names_of(self, page: Page) -> frozenset[str]:
        """Canonical names that pages of this kind hold (two of them: shares need a former page)."""
        from engine_probe.adapters.metric_names import SampleMapper

        mapper = SampleMapper(None, self.tables)
        rows = mapper.rows(page, 1) + mapper.rows(advanced(page), 2)
        return frozenset(row[2] for row in rows)


def advanced(page: Page) -> Page:
    """The same page a little later: what counts has counted on. Only to find out which numbers such pages hold."""
    samples = []
    for sample in page.samples:
        value = sample.value + ("_total" in sample.series.name)
        at_ns = None if sample.at_ns is None else sample.at_ns + 1_000_000_000
        samples.append(sample._replace(value=value, at_ns=at_ns))
    return Page(samples, page.types, page.helps, page.is_openmetrics)
