"""Decoding that stands still while a prompt is computed: who holds it up is told by steps and phases, and is no riddle."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored, with_client
from tests.simulate import Rows, Setup, simulate

WHOLE = Setup(num_requests=400, rate=3.0, budget=16_384, output_tokens=(20, 60))
"""A step may take any prompt whole: 9,000 tokens are 0.9 s, the usual gap is 13 ms."""
UNTOLD = ("stalled_s", "num_preemptions", "prompt_blocks", "recomputed_tokens", "self_hit_tokens")


pytestmark = pytest.mark.usefixtures("few_replicates")


def told(rows: Rows, *kinds: str) -> Rows:
    """What an engine tells that knows no stalls, and a caller who streams."""
    seen = with_client(rows)
    requests = [{name: value for name, value in row.items() if name not in UNTOLD} for row in seen["request"]]
    return {"request": requests, **{kind: seen[kind] for kind in kinds}}


def verdict_of(folder: Path, *runs: Rows, metric: str) -> Verdict:
    with stored(folder / "s.duckdb", runs) as store:
        return judged(store, "base", "suspect", metric)


@pytest.mark.parametrize("kinds", [("step", "worker"), ()], ids=["steps", "phases alone"])
def test_prompts_that_are_computed_whole_hold_up_who_decodes(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Every 20th prompt has 9,000 tokens and blocks the loop for 70 usual gaps: it owns what others lost, between tokens too."""
    base = told(simulate(WHOLE, "base"), *kinds)
    suspect = told(simulate(WHOLE, "suspect", seed=2, long_every=20, long_tokens=9000), *kinds)
    verdict = verdict_of(tmp_path, base, suspect, metric="tpot")
    assert (verdict.status, verdict.causes[0].cause) == ("explained", "long_prefill_interference"), verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["long_prefill_interference"] > 0.7 * verdict.delta.mean_s
    assert abs(seconds.get("decode_stall", 0.0)) < 0.1 * verdict.delta.mean_s


def test_stalls_that_no_prompt_explains_stay_unseen(tmp_path: Path) -> None:
    """A tenth of the answers stops for half a second while nobody's prompt is computed: it is not put down to prompts."""
    base = told(simulate(WHOLE, "base"), "step", "worker")
    suspect = told(simulate(WHOLE, "suspect", seed=2), "step", "worker")
    for row in suspect["request"]:
        number = int(row["request_id"].rpartition("-")[2])
        if number % 10 == 0:
            moved = ("last_token_ns", "end_ns", "at_ns")
            row.update({name: row[name] + 500_000_000 for name in moved})
            if row["vantage"] == "client":
                row["token_ns"] = [*row["token_ns"][:-1], row["token_ns"][-1] + 500_000_000]
            else:
                row["decode_s"] += 0.5
    verdict = verdict_of(tmp_path, base, suspect, metric="tpot")
    assert "long_prefill_interference" not in [cause.cause for cause in verdict.causes]
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["decode_stall"] > 0.7 * verdict.delta.mean_s
