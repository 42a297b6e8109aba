"""Lists that are bound to a statement as one text come out of it item by item, whatever they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.open import open_store
from store.statements import one_text, rows_of


@pytest.mark.parametrize(
    ("type_name", "items"),
    [
        ("UBIGINT", [0, 1, 2**53 + 1, 2**64 - 1]),
        ("VARCHAR", ["plain", "a,b", "quote ' and \"", "é\n", "", "\\u0041"]),
        ("VARCHAR", []),
    ],
)
def test_items_come_back_as_they_were(tmp_path: Path, type_name: str, items: list[object]) -> None:
    """Whole numbers of 64 bits keep their last digit, texts their quotes and commas; nothing gives no row."""
    store = open_store(str(tmp_path / "store.duckdb"))
    try:
        found = store.query(f"SELECT {rows_of(type_name)} AS item", [one_text(items)])
        assert found["item"].to_pylist() == items
    finally:
        store.close()
