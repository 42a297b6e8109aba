"""Metrics pages of one target, scrape after scrape -> `sample` rows, and `worker` and `mark` rows where facts change.

Invariant: pages are given in the order of their instants. Names that no adapter maps are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine_probe.adapters.adapter import Adapter, Discovery
from engine_probe.adapters.facts import WorkerFacts
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import Page, PageParser
from engine_probe.adapters.registry import recognise, tables_for
from engine_probe.adapters.thinning import Row, Thinner
from engine_probe.errors import UnknownFormat
from engine_probe.schema import arrow_schema, table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa


class ScrapeTarget:
    """One instance whose pages were kept. `worker` None: the source names none, the rows have none.

    names_worker  the worker that labels mean by rules of the user's; None where none fits
    """

    def __init__(
        self, worker: str | None, *, names_worker: Callable[[Mapping[str, str]], str | None] = lambda labels: None
    ) -> None:
        self._worker = worker
        self._names_worker = names_worker
        self._parser = PageParser()
        self._mapper: SampleMapper | None = None
        self.maker: Adapter | None = None
        self._thinner = Thinner()
        self._facts = WorkerFacts()
        self.rows: list[Row] = []
        self.slow: dict[str, list[dict[str, Any]]] = {"worker": [], "mark": []}
        self.num_read = 0

    def take(self, text: str | bytes, at_ns: int) -> None:
        """Add one page. Raises UnknownFormat, naming the page's line."""
        mapped = self.take_page(self._parser.parse(text), at_ns)
        if len({(row[1], row[2], row[0], id(row[3])) for row in mapped}) < len(mapped):
            raise UnknownFormat(
                "The same series stands twice in one page. Several scrapes in one file cannot be told apart: "
                "keep each scrape in its own file."
            )

    def take_page(self, page: Page, at_ns: int) -> list[Row]:
        """Add one page that was parsed already; its rows before thinning. Who made it is decided by the first page."""
        if self._mapper is None:
            self.maker = recognise(page)
            self._mapper = SampleMapper(self._worker, tables_for(page), names_worker=self._names_worker)
        mapped = self._mapper.rows(page, at_ns)
        self.num_read += len(mapped)
        self.rows += self._thinner.thin(mapped)
        self._take_facts(page, at_ns)
        return mapped

    def _take_facts(self, page: Page, at_ns: int) -> None:
        """What the page alone tells of the engine; its other endpoints were not kept."""
        if self.maker is None:
            return
        for rank, facts in self.maker.facts(page, Discovery(series=frozenset(page.names()))).items():
            if {key for key, value in facts.items() if value is not None} <= {"engine", "flags"}:
                continue
            name = self.maker.rank_worker(self._worker or "", rank)
            for kind, found in self._facts.observe(name, facts, at_ns).items():
                self.slow[kind] += [{**row, "worker": row["worker"] or None} for row in found]

    def finish(self) -> None:
        """Release what the thinner holds back. Call after the last page."""
        self.rows += self._thinner.flush()

    def drain(self) -> dict[str, pa.Table]:
        """Tables of the rows so far; kinds without rows are absent."""
        tables = {kind: table_from_rows(kind, rows) for kind, rows in self.slow.items() if rows}
        if self.rows:
            tables["sample"] = sample_table(self.rows)
        self.rows, self.slow = [], {"worker": [], "mark": []}
        return tables


def sample_table(rows: list[Row]) -> pa.Table:
    """(worker, at_ns, name, labels, value) rows -> `sample` table of the full schema."""
    import pyarrow as pa

    schema = arrow_schema("sample")
    workers, instants, names, labels, values = zip(*rows, strict=True)
    # A page's rows share few label sets: each is converted once and taken by position.
    positions: dict[int, int] = {}
    distinct: list[list[tuple[str, str]]] = []
    for pairs in labels:
        if id(pairs) not in positions:
            positions[id(pairs)] = len(distinct)
            distinct.append(list(pairs.items()))
    sets = pa.array(distinct, schema.field("labels").type)
    columns = {
        "worker": pa.array(workers, pa.string()),
        "at_ns": pa.array(instants, pa.int64()),
        "name": pa.array(names, pa.string()),
        "labels": sets.take(pa.array([positions[id(pairs)] for pairs in labels])),
        "value": pa.array(values, pa.float64()),
    }
    return pa.table(
        [columns[field.name] if field.name in columns else pa.nulls(len(rows), field.type) for field in schema],
        schema=schema,
    )
