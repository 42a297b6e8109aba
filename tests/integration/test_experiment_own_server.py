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
    assert "through /reset_prefix_cache" in " ".join(found["notes"])
    arms = {arm["arm"]: arm for arm in found["arms"]}
    assert arms["D"]["by_class"]["hit"]["num_requests"] > 0
    assert "hit" not in arms["B"]["by_class"]
    assert all(arm["num_unfinished"] == 0 for arm in arms.values())
    told = pq.read_table(out / "D" / "1" / "kind=request", partitioning=None).to_pylist()
    by_engine = {normalise_request_id(name): row for name, row in rows.items()}
    for row in told:
        engines = by_engine[row["request_id"]]
        assert row["cached_tokens"] == engines["cached_tokens"]
        assert row["prompt_tokens"] == engines["prompt_tokens"] == 56
        assert row["output_tokens"] == 3
        assert row["first_token_ns"] >= engines["first_token_ns"]
