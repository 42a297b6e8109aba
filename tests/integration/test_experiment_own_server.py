"""`kvscope experiment` against the embedded engine's own server, with and without its cache: both sides tell the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine_probe.adapters.vllm import normalise_request_id
from tests.conftest import Ended
from tests.engine_server import engine_server, served_model
from tests.torch_models import TINY

WORDS = (
    "--prompt", "tokens", "--vocab", str(TINY.vocab_size), "--requests", "8", "--warmup", "2", "--shared-tokens", "48", "--groups", "1",
    "--own-tokens", "8", "--output-tokens", "3", "--concurrency", "2",
)  # fmt: skip


@pytest.mark.timeout(120)
def test_the_clients_rows_and_the_engines_own_are_of_the_same_calls(
    kvscope: Callable[..., Ended], tmp_path: Path
) -> None:
    """Two servers, one without a cache: caches are emptied through the endpoint, what the usage says was cached is what the engine
    wrote down, and the engine knows each call by the id that the client's row has."""
    with (
        engine_server(served_model(256)) as on,
        engine_server(served_model(256), prefix_caching=False) as off,
    ):
        out = tmp_path / "out"
        ended = kvscope(
            "experiment", "run", "--endpoint", on.url, "--endpoint-off", off.url, "--model", "tiny", *WORDS, "--out", out, "--json"
        )  # fmt: skip
        assert ended.code in (0, 1), ended.err
        for server in (on, off):
            server.ask(lambda engine: engine.flight.recorder.flush())
        found = json.loads(ended.out)
        rows = {row["request_id"]: row for row in on.sink.table("request").to_pylist()}
        without = {row["request_id"]: row for row in off.sink.table("request").to_pylist()}
    assert "through /reset_prefix_cache" in " ".join(found["notes"])
    arms = {arm["arm"]: arm for arm in found["arms"]}
    assert arms["D"]["by_class"]["hit"]["num_requests"] > 0
    assert "hit" not in arms["B"]["by_class"]
    assert all(arm["num_unfinished"] == 0 for arm in arms.values())
    # What the engine counted on its own page between the first and the last call that counts.
    assert arms["B"]["reused_ratio"] == 0.0 < arms["D"]["reused_ratio"]
    assert all((arm["preemptions"], arm["evicted_blocks"]) == (0, 0) for arm in arms.values())
    assert [load["num_requests"] for load in arms["D"]["workers"]] == [3 * 8]
    assert all(load["queue_mean_s"] >= 0 for arm in arms.values() for load in arm["workers"])
    assert found["fixed"]["prefix_caching"] == {"differs": {"A": False, "B": False, "C": True, "D": True}}
    assert (found["fixed"]["block_size"], found["fixed"]["blocks_per_worker"]) == (4, 256)
    told = pq.read_table(out / "D" / "1" / "kind=request", partitioning=None).to_pylist()
    by_engine = {normalise_request_id(name): row for name, row in rows.items()}
    # What a cache would be good for can be told where there is none: the same call's blocks have the same names.
    bare = {normalise_request_id(name): row for name, row in without.items()}
    for number in range(2, 10):
        with_cache, no_cache = by_engine[f"D-r1-{number:06d}"], bare[f"B-r1-{number:06d}"]
        assert len(no_cache["prompt_blocks"]) == 56 // 4
        assert no_cache["prompt_blocks"] == with_cache["prompt_blocks"]
        assert no_cache["cached_tokens"] is None
    for row in told:
        engines = by_engine[row["request_id"]]
        assert row["cached_tokens"] == engines["cached_tokens"]
        assert row["prompt_tokens"] == engines["prompt_tokens"] == 56
        assert row["output_tokens"] == 3
        assert row["first_token_ns"] >= engines["first_token_ns"]


@pytest.mark.timeout(120)
def test_a_server_whose_cache_is_not_what_the_arm_says_is_refused(
    kvscope: Callable[..., Ended], tmp_path: Path
) -> None:
    """Two servers with their caches on, one of them given as the one without: it tells so itself, before anything is asked."""
    with engine_server(served_model(64)) as one, engine_server(served_model(64)) as other:
        ended = kvscope(
            "experiment", "run", "--endpoint", one.url, "--endpoint-off", other.url, "--model", "tiny", *WORDS, "--out", tmp_path / "out"
        )  # fmt: skip
        assert other.metric("vllm:request_success_total") == 1  # the first look, of arm A's server
        assert one.metric("vllm:request_success_total") == 0
    assert ended.code == 2
    assert "is to have its prefix cache off, and the engine" in ended.err
    assert "says that it is on" in ended.err


@pytest.mark.timeout(120)
def test_a_small_pool_is_seen_to_evict(kvscope: Callable[..., Ended], tmp_path: Path) -> None:
    """Twenty blocks of 4 hold one prompt of 56 tokens: the page's count of evictions is the engine's own rows'."""
    with engine_server(served_model(20)) as server:
        ended = kvscope(
            "experiment", "sweep", "--endpoint", server.url, "--model", "tiny", *WORDS[:-2], "--groups", "4", "--concurrency", "1,2",
            "--out", tmp_path / "out", "--json",
        )  # fmt: skip
        assert ended.code == 0, ended.err
    levels = json.loads(ended.out)["levels"]
    evicted = server.sink.table("block").column("change").to_pylist().count("evicted")
    assert 0 < sum(level["evicted_blocks"] for level in levels) <= evicted
