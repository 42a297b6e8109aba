"""What `kvscope serve` says when it starts: to a person, on a terminal of 80 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collector.commands.serve import welcome
from collector.settings import load_settings
from engine_probe.schema import table_from_rows
from store.interface import Batch
from store.open import open_store

URL = "http://127.0.0.1:8321"


def said(server: dict[str, Any], store: str = ":memory:") -> str:
    with open_store(store) as opened:
        lines = welcome(URL, opened, load_settings(server=server))
    assert all(len(line) <= 80 for line in lines), "a line would be broken"
    return "\n".join(lines)


def test_it_says_where_it_is_and_how_to_go_on() -> None:
    """Address, store, every way in and out, and how to stop."""
    text = said({})
    for part in ("/v1/events", "/v1/traces", "/metrics", "/openapi.json", "kvscope attach vllm", "Ctrl+C", "(empty)"):
        assert part in text


def test_it_says_what_it_holds(tmp_path: Path) -> None:
    """Requests and runs, so that a wrong --store is seen at once."""
    row = {"request_id": "a", "vantage": "client", "state": "finished", "at_ns": 10**18, "arrival_ns": 10**18}
    path = str(tmp_path / "k.duckdb")
    with open_store(path) as store:
        store.append(Batch({"request": table_from_rows("request", [row, {**row, "run_id": "one"}])}))
    assert "(2 requests, 1 run)" in said({}, path)


@pytest.mark.parametrize(
    ("server", "access"),
    [
        ({}, "this machine only, no token"),
        ({"token": "x"}, "with the token only"),
        ({"host": "0.0.0.0", "token": "x"}, "with the token only"),
        ({"host": "0.0.0.0", "allow_unauthenticated": True}, "EVERY machine that reaches this address, no token"),
    ],
)
def test_it_says_who_is_let_in(server: dict[str, Any], access: str) -> None:
    """Nobody opens a collector to the network without reading it."""
    assert f"access   {access}" in said(server)
