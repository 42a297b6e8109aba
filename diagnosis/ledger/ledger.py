"""The ledger: each request's TTFT, decode or E2E split into cause-seconds that sum to it.

The order in which seconds are given away is the table in `rows.py`, followed by `first_token.py` and `decode.py`. Where a
phase was not observed its seconds stand in one `..._unobserved` row. Two ledgers are kept a request: first-order (what it
did itself: own phases, all waiting in one row) and passed-on (waiting split by what the steps spent their time on). A
request whose first token never came counts with what it waited at least (`censored.py`). Invariant: rows sum to the metric
within 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64, Bool, Facts
from diagnosis.ledger import timeline as timelines
from diagnosis.ledger.decode import write_decode
from diagnosis.ledger.first_token import write_ttft
from diagnosis.ledger.rows import UNOBSERVED
from diagnosis.ledger.sheet import Sheet
from diagnosis.ledger.spent import Context, own_work, token_s
from diagnosis.ledger.values import count, metric_values


def write(facts: Facts, metric: str, context: Context) -> Ledger:
    """The ledger of one window for `metric`: ttft, tpot or e2e."""
    counted = count(facts, metric)
    keep = counted.rows
    spent = own_work(facts, context)
    shrank = context.pair.smaller_pool is not None
    lines = timelines.build_all(facts, spent, context.most_running, token_s(context), shrank=shrank)
    sheet = Sheet(len(facts.requests))
    if metric in ("ttft", "e2e"):
        write_ttft(sheet, facts, spent, lines, context)
    if metric in ("tpot", "e2e"):
        decoded = Sheet(sheet.n)
        write_decode(decoded, facts, spent, lines, context)
        r = facts.requests
        sheet.join(decoded, context.model.spell_shares((r.first_token_s + r.last_token_s) / 2, suspect=context.suspect))
    if metric == "e2e":
        whole = metric_values(facts, "e2e")
        sheet.add("answer_unobserved", np.where(np.isfinite(facts.requests.first_token_s), 0.0, whole))
    if metric == "tpot":
        tokens = facts.requests.get("output_tokens")
        sheet.scale(1.0 / np.where(tokens > 1, tokens - 1, np.nan))
    names, parts = sheet.table(keep)
    first = sheet.first_order(keep)
    # float dust: the largest part takes the last 1e-12 so that the rows sum to the value
    if len(keep):
        dust = counted.values - parts.sum(axis=1)
        parts[np.arange(len(keep)), np.abs(parts).argmax(axis=1)] += dust
    return Ledger(metric, names, parts, first, counted.values, keep, counted.censored)


@dataclass(frozen=True, slots=True)
class Ledger:
    """`parts` [n, k] cause-seconds of the requests that have the metric; `rows` [n] their position in the facts.

    `censored` [n]: the first token never came, the value is what the request waited at least.
    """

    metric: str
    names: tuple[str, ...]
    parts: F64
    first_order: F64
    values: F64
    rows: I64
    censored: Bool

    def column(self, name: str) -> F64:
        """Seconds of one row, [n]; zeros where the ledger has no such row."""
        return self.parts[:, self.names.index(name)] if name in self.names else np.zeros(len(self.values))

    def unobserved_share(self) -> float:
        """Share of all seconds that stand in rows whose cause cannot be seen."""
        total = float(self.values.sum())
        hidden = sum(float(self.column(name).sum()) for name in UNOBSERVED)
        return hidden / total if total > 0 else 0.0
