"""Two workers that number their requests use each id twice; with the callers' own rows beside them nobody's seconds become another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored, with_client
from tests.simulate import Rows, Setup, simulate

pytestmark = pytest.mark.usefixtures("few_replicates")


def numbered(rows: Rows) -> Rows:
    """The rows with the requests' places in order of arrival in place of their ids."""
    order = sorted(rows["request"], key=lambda row: row["arrival_ns"])
    ids = {row["request_id"]: f"req-{number}" for number, row in enumerate(order)}
    return {
        kind: [{**row, "request_id": ids[row["request_id"]]} if row.get("request_id") in ids else row for row in part]
        for kind, part in rows.items()
    }


def fleet(run: str, *, slow: float, shared: bool, seen: tuple[str, ...] = ("w0", "w1"), **setup: Any) -> list[Rows]:
    """400 requests at each of two workers, w1 `slow` times as slow; callers tell of those at `seen` alone."""
    parts = []
    for k, worker in enumerate(("w0", "w1")):
        seed = k + (11 if run == "suspect" else 1)
        told = {"num_requests": 400, "rate": 4.0, "output_tokens": (8, 32)} | setup
        rows = simulate(Setup(**told, worker=worker, seed=seed), run, slow=slow if worker == "w1" else 1.0)
        rows = numbered(rows) if shared else rows
        parts.append(with_client(rows) if worker in seen else rows)
    return parts


def verdict_of(path: Path, **how: Any) -> Verdict:
    with stored(path, [*fleet("base", slow=1.0, **how), *fleet("suspect", slow=3.0, **how)]) as store:
        return judged(store, "base", "suspect")


@pytest.mark.parametrize(
    "how",
    [{}, {"tail_tokens": (64, 64), "output_tokens": (16, 16)}],
    ids=["many lengths", "all of one length"],
)
def test_ids_used_twice_change_no_second(tmp_path: Path, how: dict[str, Any]) -> None:
    """The verdict is that of the same rows with ids of their own: the slow worker, and no time before the engine that was never spent."""
    own, twice = (verdict_of(tmp_path / f"{shared}.duckdb", shared=shared, **how) for shared in (False, True))
    assert [cause.cause for cause in own.causes] == ["hotspot_straggler"]
    assert [(cause.cause, cause.subject) for cause in twice.causes] == [
        (cause.cause, cause.subject) for cause in own.causes
    ]
    rows = [{row.cause: row.mean_s for row in verdict.attribution} for verdict in (own, twice)]
    assert rows[1] == pytest.approx(rows[0], abs=0.0005)
    assert not any(row["status"] == "contradiction" for row in twice.quality)
    assert "request_ids" in {row["check"] for row in twice.quality if row["status"] == "warning"}


def test_rows_of_callers_whom_nobody_recorded_are_nobodys(tmp_path: Path) -> None:
    """Callers of w1 alone tell, and w0 has served others under their ids: TTFT is not explained by what those waited or computed."""
    twice = verdict_of(tmp_path / "s.duckdb", shared=True, seen=("w1",))
    rows = {row.cause: abs(row.mean_s) for row in twice.attribution}
    assert max(rows.get("front_end", 0.0), rows.get("unexplained", 0.0)) < 0.0005
    assert {cause.cause for cause in twice.causes} <= {"hotspot_straggler"}
    assert not any(row["status"] == "contradiction" for row in twice.quality)
