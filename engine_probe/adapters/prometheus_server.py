"""A Prometheus server as a source: what it scraped, followed live or imported from its past.

Its targets' pages are read by the tables of who made them, so that this adapter has no words of its own; what it adds is
who a target is and when it could not be scraped. `attach` asks it for raw samples (`attach.server_scraper`), `import` for
its past (`readers.prometheus_server`).
"""

from __future__ import annotations

from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "prometheus"

PROVIDES: Final = (
    Provides(
        engine=ENGINE,
        source="server",
        needs="a server that scrapes the engines: Prometheus, Thanos, Mimir, VictoriaMetrics",
        names=names(
            """sample: worker at_ns name labels value
            worker: worker at_ns engine flags
            mark: worker at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.name": "the canonical names of each target's own `metrics` source, as far as the server keeps them",
            "sample.at_ns": "the instant of the server's scrape; between two of its scrapes nothing is known",
            "sample.worker": "`--map`, else `--worker-label`, else the pod, else the instance",
            "worker.engine": "what the page alone tells; versions and models stand on endpoints that it does not keep",
        },
    ),
)


class PrometheusServerAdapter(Adapter):
    """Prometheus 2 or 3, or what speaks its API."""

    engine = ENGINE
    title = "Prometheus"
    tables = (MetricNames(ENGINE, ("prometheus_",), {}),)
    provides = PROVIDES
    guide = "docs/engines/prometheus.md"
    serves = False

    def recognises(self, page: Page) -> bool:
        return any(s.series.name in ("prometheus_build_info", "prometheus_tsdb_head_series") for s in page.samples)

    def discover(self, client: Client, page: Page) -> Discovery:
        """What the server's own page tells; which of its targets are meant is said by `--match` alone."""
        infos = [s.series.labels for s in page.samples if s.series.name == "prometheus_build_info"]
        pools = (s.series for s in page.samples if s.series.name == "prometheus_target_scrape_pool_targets")
        jobs = sorted({series.labels["scrape_job"] for series in pools if series.labels.get("scrape_job")})
        version = infos[0].get("version") if infos else None
        return Discovery(version=version, series=frozenset(page.names()), details={"jobs": tuple(jobs)})

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        return {}

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        if (jobs := seen.details.get("jobs")) is not None:
            text = f"Prometheus {seen.version or 'of unknown version'}; scrape jobs: {', '.join(jobs) or 'not told'}; say which "
            return [Line("metrics", None, text + "with --match '{job=\"...\"}'"), _requests()]
        kinds = seen.details.get("kinds", {})
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none yet"
        text = f"Prometheus {seen.version or 'of unknown version'}; targets: {told}"
        lines = [Line("metrics", bool(kinds), text)]
        if "other" in kinds:
            text = "targets that no adapter knows keep their own names; narrow --match where they are not wanted"
            lines.append(Line("others", True, text))
        lines.append(_requests())
        lines += [Line("warning", False, text) for text in seen.details.get("warnings", ())]
        return lines


def _requests() -> Line:
    return Line(
        "requests", False, "a metrics server tells of no request: attach to each engine, or put a proxy before it"
    )
