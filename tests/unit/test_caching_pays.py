"""Whether a prefix cache would pay, told from prompts that were all computed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from collector.cli import main
from diagnosis.capacity.caching_pays import LOOKUP_S, caching_pays
from diagnosis.capacity.traces import REQUEST_COLUMNS, TIMES, WORKER_COLUMNS, cache_loads
from diagnosis.lab.run import Order, run_lab
from engine_probe.schema import table_from_rows
from store.interface import Batch
from store.open import open_store

N, SHARED = 60, 10
"""60 requests of 10 shared blocks of 16 tokens and 1 to 5 of their own; a token takes 1 ms, the first one 20 ms more."""


def rows(*, shared: bool = True, times: bool = True) -> list[dict[str, Any]]:
    made = []
    for number in range(N):
        own = 1 + number % 5
        common = range(1, SHARED + 1) if shared else range(1000 * number + 500, 1000 * number + 500 + SHARED)
        tokens = 16 * (SHARED + own)
        prefill = 0.02 + 0.001 * tokens
        at = number * 10**9
        made.append(
            {
                "request_id": f"r{number}",
                "vantage": "engine",
                "state": "finished",
                "worker": "w0",
                "at_ns": at + 2 * 10**9,
                "arrival_ns": at,
                "prompt_tokens": tokens,
                "prompt_blocks": [*common, *range(1000 * number + 1, 1000 * number + 1 + own)],
            }
        )
        made[-1] |= {"prefill_s": prefill, "first_token_ns": at + round((0.1 + prefill) * 1e9)} if times else {}
    return made


def kvscope(*argv: str) -> None:
    """The command, which ends well."""
    with pytest.raises(SystemExit) as ended:
        main([*argv])
    assert not ended.value.code


def asked(found: list[dict[str, Any]], num_blocks: int = 1000) -> Any:
    requests = table_from_rows("request", found).select([*REQUEST_COLUMNS, *TIMES])
    worker = {"worker": "w0", "at_ns": 0, "block_size": 16, "num_blocks": num_blocks}
    loads = cache_loads(requests, table_from_rows("worker", [worker]).select(WORKER_COLUMNS))
    return caching_pays(loads, num_blocks)


def test_what_is_shared_is_worth_its_prefill() -> None:
    """All but the first find 160 tokens: 160 ms each, 157 ms on average over 60; a look-up of 208 tokens costs 15 us."""
    found = asked(rows())
    assert found.pays is True
    assert found.token_s == pytest.approx(0.001)
    assert found.saved_s == pytest.approx(0.16 * 59 / 60)
    assert found.lookup_s == pytest.approx(208 * LOOKUP_S)
    assert found.hit_ratio == pytest.approx(160 * 59 / (208 * 60))
    assert found.ttft_s[0] - found.ttft_then_s[0] == pytest.approx(found.saved_s - found.lookup_s, abs=1e-6)
    assert found.break_even_ratio == pytest.approx(LOOKUP_S / 0.001)
    assert "Would caching pay here? Yes" in found.sentence


def test_what_a_cache_serves_already_is_not_said_to_be_worth_nothing() -> None:
    """All that a cache could find was found: a cache of that size gains no more, which is no word against the one that is there."""
    found = asked([row | {"cached_tokens": 160 if number else 0} for number, row in enumerate(rows())])
    assert (found.pays, found.saved_s) == (False, 0.0)
    assert "Would caching pay here? No more than it does already: " in found.sentence


def test_prompts_that_share_nothing_do_not_pay() -> None:
    """Nothing is found, and every request pays for its look-up."""
    found = asked(rows(shared=False))
    assert (found.pays, found.saved_s, found.hit_ratio) == (False, 0.0, 0.0)
    assert found.ttft_then_s[0] > found.ttft_s[0]
    assert "Would caching pay here? No" in found.sentence


def test_a_cache_that_is_too_small_for_what_is_shared() -> None:
    """A pool of 5 blocks keeps the shared beginning's first 5: half of what it is worth."""
    small, large = asked(rows(), num_blocks=5), asked(rows())
    assert small.saved_s == pytest.approx(large.saved_s / 2)


def test_without_times_tokens_alone_are_told() -> None:
    """What a token costs is not known, and is not guessed."""
    found = asked(rows(times=False))
    assert (found.pays, found.token_s, found.saved_s, found.ttft_s) == (None, None, None, None)
    assert found.hit_ratio > 0.7
    assert "cannot be told" in found.sentence


def test_it_tells_what_caching_then_does(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run without a cache `kvscope capacity` tells the hit rate that the same traffic has with one, and a saving that TTFT shows."""
    run = run_lab(Order("prefix_caching_off", "mild", seed=3, requests=500))
    store = open_store(str(tmp_path / "s.duckdb"))
    for tables in (run.baseline, run.suspect):
        store.append(Batch(tables))
    store.close()
    argv = ["capacity", "--store", str(tmp_path / "s.duckdb"), "--run", "suspect"]
    kvscope(*argv, "--facts", "--json")
    told = json.loads(capsys.readouterr().out)["caching"]
    kvscope(*argv)
    assert "Would caching pay here? Yes" in " ".join(capsys.readouterr().out.split())
    judged = [row for row in run.baseline["request"].to_pylist() if dict(row["labels"] or []).get("phase") != "warmup"]
    cached = sum(row["cached_tokens"] for row in judged) / sum(row["prompt_tokens"] for row in judged)
    assert told["hit_ratio"] == pytest.approx(cached, abs=0.05)
    ttft = [
        np.mean([(row["first_token_ns"] - row["arrival_ns"]) / 1e9 for row in tables["request"].to_pylist()])
        for tables in (run.baseline, run.suspect)
    ]
    assert 0 < told["saved_s"] < ttft[1] - ttft[0], "less waiting comes of it too, and is not counted"
