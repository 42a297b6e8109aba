"""Caches that lose everything now and then, as engines do when weights are updated: told by a block event, or by nobody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Engine, Rows, Setup, simulate

EVERY_S = 8
SETUP = Setup(num_requests=600, prefix_tokens=512, output_tokens=(8, 32))
pytestmark = pytest.mark.usefixtures("few_replicates")


class Resetting(Engine):
    """Clears its cache every EVERY_S seconds before it admits the next request; `tells`: with a block event."""

    def __init__(self, setup: Setup, *, tells: bool) -> None:
        super().__init__(setup)
        self.tells, self.due = tells, float(EVERY_S)

    def _admit(self, waiting: Any, running: Any, now: float) -> Any:
        if now >= self.due:
            self.due += EVERY_S * (1 + (now - self.due) // EVERY_S)
            self.free += len(self.cached)
            self.cached.clear()
            if self.tells:
                self._block(0, "cleared", now)
                self.rows["block"][-1].update(block_hash=None, num_tokens=None)
        return super()._admit(waiting, running, now)


def verdict(folder: Path, *, tells: bool, without: Iterable[str] = ()) -> Verdict:
    """On a window without resets and one with them; `without`: columns of requests that nobody tells."""
    base = simulate(SETUP, "base")
    suspect = Resetting(replace(SETUP, seed=2), tells=tells).run()
    suspect = {kind: [{**row, "run_id": "suspect"} for row in rows] for kind, rows in suspect.items()}
    pair: list[Rows] = []
    for rows in (base, suspect):
        requests = [{name: value for name, value in row.items() if name not in without} for row in rows["request"]]
        pair.append({**rows, "request": requests})
    with stored(folder / "s.duckdb", pair) as store:
        return judged(store, "base", "suspect")


def test_resets_that_blocks_tell_are_a_cold_start(tmp_path: Path) -> None:
    """No mark, as of a vLLM whose cache is reset over its API: AllBlocksCleared is all there is."""
    found = verdict(tmp_path, tells=True)
    assert (found.status, [cause.cause for cause in found.causes]) == ("explained", ["cold_start"])
    statements = [evidence["statement"] for evidence in found.causes[0].evidence]
    assert "by their blocks' events" in statements[0]
    assert found.causes[0].share_p99 == pytest.approx(1.0, abs=0.25)


def test_resets_that_nobody_tells_are_no_unit(tmp_path: Path) -> None:
    """By the blocks' events all was there, and pieces of the same 512 tokens were given to others: lost, and nobody tells why."""
    found = verdict(tmp_path, tells=False)
    assert (found.status, found.causes) == ("not_observable", [])
    assert "why it was not found is not observable here" in found.verdict
    because = {row["cause"]: row["because"] for row in found.excluded}["reuse_below_unit"]
    assert "other requests were given pieces as short" in because
