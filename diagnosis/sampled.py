"""Windows of which only a share was kept: totals are estimates, and what a request waited beside is told by its neighbours in time.

Idea: rows kept at one rate p are a fair sample, so quantiles, means and shares of them need no weights; a count or a sum is
divided by p (Horvitz and Thompson 1952), with standard error sqrt((1 - p) / p^2 * sum x^2). A window whose rows have several
rates is first thinned to the lowest, by a hash of the request: then one rate holds everywhere, in a bootstrap too, and every
n is a number of requests really looked at.

Invariant: a window that was kept whole gives exactly what it gave without this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from diagnosis.facts import F64, Facts, LineageFacts, RequestFacts
from diagnosis.telling.wording import number, percent
from store.interface import Store
from store.statements import one_text, rows_of

NEIGHBOURS = 20
"""Requests of the sample that tell what a worker was doing around an instant."""
SIGMAS_95 = 1.96
"""Standard errors to either side of which 95 % lie."""


def one_rate(store: Store, table: pa.Table) -> tuple[pa.Table, float | None, int]:
    """(rows at one sampling rate, that rate or None where all were kept, rows left out for it) of rows of the kind `request`."""
    rates = table["sample_rate"]
    if rates.null_count == len(rates):
        return table, None, 0
    known = np.asarray(rates.fill_null(1.0))
    lowest = float(known.min())
    if lowest == known.max():
        return table, lowest, 0
    draws = store.query(
        f"SELECT {_DRAW} AS draw FROM (SELECT {rows_of('VARCHAR')} AS request_id, unnest(range(?)) AS place) ORDER BY place",
        [one_text(table["request_id"].to_pylist()), table.num_rows],
    )
    kept = np.asarray(draws["draw"]) < lowest / known
    return table.filter(pa.array(kept)), lowest, int((~kept).sum())


def one_rate_sql(requests: RequestFacts) -> str:
    """SQL condition that keeps the rows which `one_rate` kept; 'true' where it left out none."""
    if requests.sample_rate is None or not requests.num_thinned:
        return "true"
    return f"{_DRAW} < {requests.sample_rate!r} / coalesce(sample_rate, 1.0)"


_DRAW = "(hash(request_id) >> 11) / 9007199254740992.0"
"""SQL of a number in [0, 1) that a request id draws; not that of `engine_probe.sampling`, or only low draws would meet it."""


def rate_of(requests: RequestFacts, column: str | None = None) -> float:
    """Share of the window's requests that this column is known of by sampling; of the rows themselves without one."""
    own = requests.sample_rate or 1.0
    borrowed = column is not None and requests.sources.get(column) in ("engine", "implied")
    return min(own, requests.engine_rate or 1.0) if borrowed else own


def num_requests(requests: RequestFacts) -> float:
    """How many requests the window had."""
    return len(requests) / rate_of(requests)


def total(requests: RequestFacts, column: str) -> float | None:
    """Sum of a column over all requests of the window; None where unknown."""
    values = requests.get(column)
    return float(np.nansum(values)) / rate_of(requests, column) if np.isfinite(values).any() else None


def margin(requests: RequestFacts, column: str) -> float:
    """Half the 95 % interval that sampling leaves of `total`; 0 where all requests were kept."""
    return half_interval(np.nan_to_num(requests.get(column)), rate_of(requests, column))


def half_interval(values: F64, rate: float) -> float:
    """Half the 95 % interval of sum(values) / rate, each value having been kept with probability `rate`."""
    return SIGMAS_95 * float(np.sqrt((1.0 - rate) * float((values * values).sum()))) / rate


def beside_rate(requests: RequestFacts) -> float:
    """Share of the requests that ran beside a request which the window's rows show."""
    return min(requests.sample_rate or 1.0, requests.engine_rate or 1.0)


def around(edges: F64, shares: Mapping[str, F64], num_seen: int, rate: float) -> dict[str, F64]:
    """Levels of a sampled crowd [m] in the pieces between edges, as those of the whole: averaged over the time in which
    NEIGHBOURS of the sample's requests come, and divided by the rate.

    A single instant of a sample tells too little: nine of ten prefills are not there, and the tenth would count as ten.
    """
    half_s = NEIGHBOURS / 2 * float(edges[-1] - edges[0]) / max(num_seen, 1)
    middle = (edges[:-1] + edges[1:]) / 2
    low, high = np.maximum(middle - half_s, edges[0]), np.minimum(middle + half_s, edges[-1])
    width = np.diff(edges)
    out = {}
    for name, share in shares.items():
        through = np.concatenate([[0.0], np.cumsum(share * width)])
        out[name] = (np.interp(high, edges, through) - np.interp(low, edges, through)) / (high - low) / rate
    return out


def within(estimates: F64, most: F64) -> F64:
    """Estimates [n] none of which exceeds its bound; what they exceed it by goes to the others that have any, so that the sum
    stays, while there is room."""
    wanted, held = float(estimates.sum()), np.minimum(estimates, most)
    for _ in range(50):
        room = np.where(estimates > 0, most - held, 0.0)
        missing = wanted - float(held.sum())
        if missing <= 1e-9 * max(wanted, 1.0) or room.sum() <= 1e-9:
            break
        growth = missing / max(float(held[room > 0].sum()), 1e-12)
        held = np.where(room > 0, np.minimum(held * (1.0 + growth), most), held)
    return held


def sampled_words(rate: float | None) -> str:
    """' (estimated from a sample of 10 %)', or nothing where all was kept."""
    return "" if rate is None or rate >= 1.0 else f" (estimated from a sample of {percent(rate)})"


def count_words(lineage: LineageFacts) -> str:
    """How sure an estimated number of lost tokens is: ' +- 1,200', or nothing where it was counted."""
    return "" if lineage.margin_tokens is None else f" +- {number(lineage.margin_tokens)}"


def notes(windows: Sequence[Facts]) -> list[str]:
    """What of the windows is a sample, and what follows from that."""
    said = []
    for facts in windows:
        r = facts.requests
        if r.sample_rate is not None:
            said.append(
                f"{facts.name}: requests are a sample of {percent(r.sample_rate)}; {number(len(r))} of about "
                f"{number(round(num_requests(r)))} were looked at, and counts, rates and token sums are estimates"
            )
        if r.num_thinned:
            said.append(
                f"{facts.name}: requests were kept at several rates; {number(r.num_thinned)} were left out, so that one rate holds"
            )
        if r.engine_rate is not None and r.vantage != "engine":
            said.append(f"{facts.name}: the engine's rows are a sample of {percent(r.engine_rate)} of its requests")
        if facts.blocks is not None and facts.blocks.sample_rate is not None:
            said.append(
                f"{facts.name}: blocks are a sample of {percent(facts.blocks.sample_rate)}, each for its whole life; "
                "numbers of blocks and of lost tokens are estimates"
            )
    return said
