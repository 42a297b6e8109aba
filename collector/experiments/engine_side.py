"""What an endpoint tells of itself on its own metrics page: settings before a run, counters before and after the counted calls.

The page is read by whichever adapter knows it. Invariant: a page that is not there, or not read in time, costs the run nothing but
these numbers; what is missing is not told, never zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import PageParser
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.find import find_engine
from engine_probe.attach.scraper import sample_table
from engine_probe.errors import KvscopeError
from engine_probe.load.openai_client import Endpoint
from engine_probe.schema import table_from_rows

TIMEOUT_S = 5.0


class EngineSide:
    """One endpoint's page. facts: columns of `worker`, by worker; {} where it tells nothing. why: why it tells nothing."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._parser = PageParser()
        self.facts: dict[str, dict[str, Any]] = {}
        self.why: str | None = None
        try:
            with contextlib.closing(self._client()) as client:
                self._adapter, page = find_engine(client)
                seen = self._adapter.discover(client, page)
            worker = seen.plugin_worker or seen.worker or client.url.partition("://")[2]
            self._mapper = SampleMapper(worker, self._adapter.tables)
            for rank, told in self._adapter.facts(page, seen).items():
                self.facts[self._adapter.rank_worker(worker, rank)] = told
        except KvscopeError as error:
            self.why = error.message

    def fact(self, name: str) -> Any:
        """What all its workers say of that; None where they differ or nobody tells."""
        told = [facts.get(name) for facts in self.facts.values()]
        return told[0] if told and all(one == told[0] for one in told) else None

    async def look(self) -> pa.Table | None:
        """The page's numbers now, as `sample` rows; None where it cannot be read."""
        if self.why is not None:
            return None
        with contextlib.suppress(KvscopeError):
            return await asyncio.to_thread(self._look)
        return None

    def _look(self) -> pa.Table:
        at_ns = time.time_ns()
        with contextlib.closing(self._client()) as client:
            page = self._adapter.page(client, self._parser)
        return sample_table(self._mapper.rows(page, at_ns))

    def _client(self) -> EngineClient:
        to = self._endpoint
        return EngineClient(to.url, key=to.key, verify=to.verify, timeout_s=TIMEOUT_S)

    def tables(self, before: pa.Table | None, after: pa.Table | None) -> Mapping[str, pa.Table]:
        """Rows of a run: the two looks, and a `worker` row each; {} where one look is missing, since nothing can be differenced."""
        if before is None or after is None:
            return {}
        at_ns = int(before["at_ns"][0].as_py()) if before.num_rows else time.time_ns()
        rows = [{**facts, "worker": name, "at_ns": at_ns} for name, facts in self.facts.items()]
        return {"sample": pa.concat_tables([before, after]), "worker": table_from_rows("worker", rows)}
