"""Nearest rank in Python and in SQL equals sorting with exact arithmetic, whatever the values and the quantile."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st

from store.percentile import nearest_rank, quantile_sql, rank_index, rank_interval

DATABASE = duckdb.connect(config={"threads": "2"})

quantiles = st.integers(1, 6).flatmap(
    lambda digits: st.integers(1, 10**digits).map(lambda n: format(Decimal(n).scaleb(-digits), "f"))
)
values = st.lists(st.floats(-1e12, 1e12, allow_nan=False) | st.none(), max_size=300)


def by_sorting(found, q):
    """The definition, in rational numbers."""
    known = sorted(value for value in found if value is not None)
    return known[math.ceil(Fraction(q) * len(known)) - 1] if known else None


@given(st.integers(1, 10**9), quantiles)
def test_rank_is_the_smallest_that_covers_the_share(n, q):
    """rank/n >= q, and one rank less does not reach q."""
    rank = rank_index(n, q)
    assert Fraction(rank, n) >= Fraction(q) > Fraction(rank - 1, n)


@given(values, quantiles)
def test_python_equals_sorting(found, q):
    """`nearest_rank` picks the value that exact arithmetic picks."""
    assert nearest_rank(found, q) == by_sorting(found, q)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), values, min_size=1), quantiles)
def test_sql_by_group_equals_sorting(groups, q):
    """The SQL aggregate by group picks the same values, nulls left out."""
    rows = [(name, value) for name, found in groups.items() for value in found]
    if not rows:
        return
    names, found = zip(*rows, strict=True)
    sql = f"SELECT g, {quantile_sql('x', q)} FROM (SELECT unnest(?::VARCHAR[]) g, unnest(?::DOUBLE[]) x) GROUP BY g"
    answer = dict(DATABASE.execute(sql, [list(names), list(found)]).fetchall())
    assert answer == {name: by_sorting(found, q) for name, found in groups.items() if found}


@settings(deadline=None)
@given(st.integers(1, 5000), quantiles)
def test_sql_rank_on_many_values(n, q):
    """Over 1..n the quantile is its own rank, also where q*n is a whole number."""
    sql = f"SELECT {quantile_sql('i', q)} FROM range(1, ?) t(i)"
    assert DATABASE.execute(sql, [n + 1]).fetchone() == (rank_index(n, q),)


@settings(deadline=None)
@given(st.integers(1, 2000), st.sampled_from(["0.5", "0.9", "0.95", "0.99", "0.999"]))
def test_interval_encloses_the_rank(n, q):
    """Where an interval exists its ranks enclose the rank of the quantile itself."""
    low, high = rank_interval(n, q)
    rank = rank_index(n, q)
    assert low is None or 1 <= low <= rank
    assert high is None or rank <= high <= n
