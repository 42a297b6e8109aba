"""What a run came to, gathered from its request rows as they pass by on their way to a sink (or to none)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine_probe.sending.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa

NUMBERS = (
    "arrival_ns",
    "first_token_ns",
    "last_token_ns",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "num_preemptions",
)


@dataclass(frozen=True, slots=True)
class Served:
    """Requests of a run, in no order: [n] arrays. Unknown numbers are NaN; instants are seconds from the run's first arrival."""

    worker: list[str | None]
    state: list[str]
    numbers: Mapping[str, npt.NDArray[np.float64]]

    @property
    def is_finished(self) -> npt.NDArray[np.bool_]:
        return np.array([state == "finished" for state in self.state], dtype=np.bool_)

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """NaN where no token came."""
        return self.numbers["first_token_ns"] - self.numbers["arrival_ns"]


class SummarySink:
    """Notes what passes to `sink` (None: nowhere)."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._parts: list[pa.Table] = []
        self.num_rows: dict[str, int] = {}

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Note the rows, and hand them on."""
        for kind, table in tables.items():
            self.num_rows[kind] = self.num_rows.get(kind, 0) + table.num_rows
        if "request" in tables:
            self._parts.append(tables["request"].select(["worker", "state", *NUMBERS]))
        if self._sink is not None:
            self._sink.write(tables)

    def close(self) -> None:
        """Close the sink behind."""
        if self._sink is not None:
            self._sink.close()

    def served(self) -> Served:
        """The requests so far."""
        import pyarrow as pa

        if not self._parts:
            return Served([], [], {name: np.empty(0) for name in NUMBERS})
        table = pa.concat_tables(self._parts)
        numbers = {}
        origin = table["arrival_ns"].to_numpy().min()
        for name in NUMBERS:
            values = table[name].to_numpy(zero_copy_only=False)
            if name.endswith("_ns"):
                known = table[name].is_valid().to_numpy()
                exact = table[name].fill_null(int(origin)).to_numpy() - origin
                values = np.where(known, exact / 1e9, np.nan)
            numbers[name] = values.astype(np.float64)
        return Served(table["worker"].to_pylist(), table["state"].to_pylist(), numbers)
