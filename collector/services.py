"""What one running collector consists of, made once and handed to the routes.

`open_services` is the whole composition; `close` ends it in the order that loses nothing: batches first, store last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from collector.ingest import Ingest
from collector.latencies import Latencies
from collector.live import Live
from collector.meters import Meters
from collector.metrics_page import MetricsPage
from collector.reads import Reads
from collector.settings import Settings
from collector.traces import Traces
from engine_probe.errors import NotReady
from store.interface import Store


@dataclass(slots=True)
class Services:
    """The parts. `owns_store`: the store was opened here and is closed here. `pages` never waits behind `reads`."""

    settings: Settings
    store: Store
    owns_store: bool
    ingest: Ingest
    traces: Traces
    meters: Meters
    latencies: Latencies
    live: Live
    metrics_page: MetricsPage
    reads: Reads
    pages: Reads
    started_ns: int

    @property
    def is_draining(self) -> bool:
        """Stopping: what was accepted is finished, nothing new is taken."""
        return self.ingest.is_draining

    def drain(self) -> None:
        """Take no more batches from now on."""
        self.ingest.is_draining = True

    @property
    def is_drained(self) -> bool:
        """Nothing that was accepted is still on its way."""
        return self.ingest.num_requests == 0

    def close(self) -> None:
        """Finish the accepted batches, then let go of the store."""
        self.drain()
        self.ingest.close()
        self.reads.close()
        self.pages.close()
        if self.owns_store:
            self.store.close()


def open_services(settings: Settings, store: Store | None) -> Services:
    """Make every part; opens the store at `settings.store_url` where none is given. Raises StoreError, SchemaTooNew."""
    if store is None:
        from store.open import open_store

        opened: Store = open_store(settings.store_url, num_readers=settings.read.max_concurrent)
    else:
        opened = store
    meters = Meters(settings.metrics.max_sources)
    latencies = Latencies(settings.metrics.max_series)
    live = Live(settings.read.open_requests, settings.read.open_expiry_s)
    ingest = Ingest(opened, settings.ingest, settings.server, meters, latencies, live)
    return Services(
        settings=settings,
        store=opened,
        owns_store=store is None,
        ingest=ingest,
        traces=Traces(ingest),
        meters=meters,
        latencies=latencies,
        live=live,
        metrics_page=MetricsPage(meters, ingest, latencies, live, opened),
        reads=Reads("read", settings.read.max_concurrent, settings.read.max_waiting, meters),
        pages=Reads("pages", 1, settings.read.max_waiting, meters),
        started_ns=time.time_ns(),
    )


def services_of(request: Request) -> Services:
    """The parts of the app that serves this request. Raises NotReady before start-up and after shutdown."""
    return services_in(request.app)


def services_in(app: FastAPI | Any) -> Services:
    """The parts of a started app."""
    services: Services | None = getattr(app.state, "services", None)
    if services is None:
        raise NotReady("the collector has not started yet; ask again in a moment")
    return services
