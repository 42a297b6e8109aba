"""Which SLO a request is held to, and whether it met it: `store.metrics.meets_slo` for whole tables.

The first rule of the settings that fits decides; then the preset of the request's workload; then the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.counts.columns import words
from store.metrics import SloRule, slo_rules

Flags = npt.NDArray[np.bool_]
Codes = npt.NDArray[Any]
_KEYS: Final = ("model", "workload", "tenant")


class Slos:
    """The SLOs of the settings. `names[code]` is what `assign` numbers."""

    def __init__(self, rules: Sequence[SloRule] = (), default: str = "interactive") -> None:
        self.rules = slo_rules(rules, default)
        self._used = [key for key in _KEYS if any(getattr(rule, key) is not None for rule in self.rules)]
        self.names = tuple(rule.name for rule in self.rules)

    def assign(self, requests: pa.Table) -> Codes:
        """[rows] number of the rule that each request is held to."""
        of_rule = np.full(requests.num_rows, len(self.rules) - 1, dtype=np.int64)
        columns = {key: words(requests, key) for key in self._used}
        for number in range(len(self.rules) - 2, -1, -1):
            fits: Flags | None = None
            for key in self._used:
                wanted = getattr(self.rules[number], key)
                if wanted is not None:
                    of_row, found = columns[key]
                    mine = of_row == found.index(wanted) if wanted in found else np.zeros(len(of_row), dtype=np.bool_)
                    fits = mine if fits is None else fits & mine
            of_rule = np.full(len(of_rule), number) if fits is None else np.where(fits, number, of_rule)
        return of_rule

    def met(self, requests: pa.Table, of_rule: Codes, durations: Mapping[str, npt.NDArray[np.float64]]) -> Flags:
        """[rows] finished within every limit; what is unknown is not met, TPOT does not apply to one token."""
        met: Flags = pc.equal(requests.column("state"), "finished").to_numpy()
        short = pc.fill_null(pc.less_equal(requests.column("output_tokens"), 1), False).to_numpy()
        for name, limits in self._limits().items():
            limit = limits[of_rule]
            with np.errstate(invalid="ignore"):
                within = np.isnan(limit) | (durations[name] <= limit)
            met = met & (within | short if name == "tpot" else within)
        return met

    def _limits(self) -> dict[str, npt.NDArray[np.float64]]:
        """Duration -> [rules] its limit, NaN where there is none."""
        fields = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_token_s"}
        return {
            name: np.array([np.nan if (v := getattr(rule.slo, field)) is None else v for rule in self.rules])
            for name, field in fields.items()
        }
