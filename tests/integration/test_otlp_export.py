"""Requests of one collector leave as spans and arrive at another, whole, whichever way they are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ended
from tests.integration.collector_harness import request_row, running


@pytest.mark.parametrize("way", ["store", "collector"])
def test_every_request_arrives_once(way: str, tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """1,100 requests are three pages; sent twice they are still 1,100, as their ids are the same."""
    store, start = tmp_path / "from.duckdb", time.time_ns() - 10**12
    rows = [
        request_row(f"r{n}", vantage="engine", worker="w", model="m", prompt_tokens=n, arrival_ns=start, at_ns=start)
        | {"first_token_ns": start + 10**8, "last_token_ns": start + 2 * 10**8, "end_ns": start + 2 * 10**8}
        for n in range(1, 1101)
    ]
    with running(tmp_path / "to.duckdb") as target:
        with running(store) as source:
            source.post({"request": rows}, source="test")
            if way == "collector":
                send(kvscope, "--url", source.url, target=target.url)
        if way == "store":
            send(kvscope, "--store", str(store), target=target.url)
        assert target.count("request") == 1100
        assert target.count("request", "request_id = 'r' || prompt_tokens AND vantage = 'engine'") == 1100


def send(kvscope: Callable[..., Ended], *where: str, target: str) -> None:
    """Send all requests, two times."""
    for _ in range(2):
        ended = kvscope("requests", "export", "--otlp", target, *where, "--json")
        assert ended.code == 0, ended.err
        told = {"url": f"{target}/v1/traces", "requests": 1100, "spans_not_taken": 0, "backend_says": []}
        assert json.loads(ended.out) == told


def test_backend_that_is_none_and_a_header_that_is_none_are_said(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """Exit 2, before the store is opened."""
    for words in (["--otlp", "localhost"], ["--otlp", "http://h", "--header", "x"]):
        ended = kvscope("requests", "export", *words, "--store", tmp_path / "none.duckdb")
        assert ended.code == 2
        assert "no address" in ended.err or "NAME=VALUE" in ended.err
