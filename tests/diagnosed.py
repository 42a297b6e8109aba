"""Stores for tests of diagnosis: simulated runs, few requests each, written once a module."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diagnosis import judge
from diagnosis.attribution.shapley import attribute
from diagnosis.diagnose import diagnose
from diagnosis.telling.verdict import Verdict
from engine_probe.schema import table_from_rows
from store.interface import Batch, Store, Window
from store.open import open_store
from tests.simulate import Rows, Setup, simulate

SMALL = Setup(num_requests=300)


@contextmanager
def few_replicates() -> Iterator[None]:
    """Attribution draws 40 replicates in place of 200: for tests that look at many verdicts, and at no interval."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "attribute", partial(attribute, replicates=40))
        yield


def runs(changes: Mapping[str, Mapping[str, Any]], setup: Setup = SMALL) -> dict[str, Rows]:
    """Rows of simulated runs by name; `changes` are those of the setup."""
    return {name: simulate(setup, name, **change) for name, change in changes.items()}


def stored(path: Path, parts: Iterable[Rows]) -> Store:
    """A store that holds all these rows."""
    store = open_store(str(path))
    add(store, parts)
    return store


def add(store: Store, parts: Iterable[Rows]) -> None:
    """Append rows in one batch."""
    merged: Rows = {}
    for part in parts:
        for kind, rows in part.items():
            merged.setdefault(kind, []).extend(rows)
    store.append(Batch({kind: table_from_rows(kind, rows) for kind, rows in merged.items() if rows}))


def as_run(rows: Rows, run_id: str | None) -> Rows:
    """Copies of the rows under another run (None: live)."""
    return {kind: [{**row, "run_id": run_id} for row in part] for kind, part in rows.items()}


def shifted(rows: Rows, seconds: float) -> Rows:
    """Copies of the rows that many seconds later."""
    move = round(seconds * 1e9)

    def later(row: dict[str, Any]) -> dict[str, Any]:
        return {
            key: [t + move for t in value]
            if key == "token_ns" and value is not None
            else value + move
            if key.endswith("_ns") and value is not None
            else value
            for key, value in row.items()
        }

    return {kind: [later(row) for row in part] for kind, part in rows.items()}


def with_client(rows: Rows, *, every: int = 1, skew_s: float = 0.0) -> Rows:
    """Engine rows joined by what their client saw (every `every`-th request), on a clock that is `skew_s` ahead.

    Token times stand in the client's rows alone, as they do for a real engine.
    """
    move = round(skew_s * 1e9)
    seen = ("request_id", "state", "run_id", "prompt_tokens", "output_tokens")
    instants = ("at_ns", "arrival_ns", "first_token_ns", "last_token_ns", "end_ns")
    client = []
    for row in rows["request"][::every]:
        theirs: dict[str, Any] = {key: row.get(key) for key in seen}
        theirs |= {key: None if row[key] is None else row[key] + move for key in instants}
        theirs |= {"vantage": "client", "token_ns": [t + move for t in row["token_ns"] or []]}
        client.append(theirs)
    engine = [{**row, "token_ns": None} for row in rows["request"]]
    return {**rows, "request": [*engine, *client]}


def judged(store: Store, base: str, suspect: str, metric: str = "ttft", **asked: Any) -> Verdict:
    """The verdict on two runs."""
    return diagnose(store, Window(run_id=base), Window(run_id=suspect), metric=metric, now_ns=time.time_ns(), **asked)
