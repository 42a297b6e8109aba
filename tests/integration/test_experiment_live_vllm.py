"""`kvscope experiment` against a real vLLM: its cache on and off, cold and warm, its own counters, a canary, a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.conftest import Ended
from tests.live_vllm import BLOCK_SIZE, VOCABULARY, VllmServer
from tests.servers import require

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
REQUESTS, WARMUP, REPEATS = 8, 2, 3
WORDS = (
    "--prompt", "tokens", "--vocab", str(VOCABULARY - 8), "--requests", str(REQUESTS), "--warmup", str(WARMUP), "--groups", "1",
    "--shared-tokens", str(10 * BLOCK_SIZE), "--shared-ratio", "1", "--own-tokens", "40", "--output-tokens", "6",
)  # fmt: skip


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    require("vllm")
    server = VllmServer(tmp_path_factory.mktemp("on") / "vllm.log", num_blocks=400, env=DEV)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def off(on: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The same without a cache; the second, since two that start at once take each other's time."""
    log = tmp_path_factory.mktemp("off") / "vllm.log"
    server = VllmServer(log, num_blocks=400, env=DEV, flags=("--no-enable-prefix-caching",))
    try:
        server.start()
        yield server
    finally:
        server.kill()


def document(ended: Ended) -> dict[str, Any]:
    assert ended.code in (0, 1), ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_cache_off_and_on_cold_and_warm(
    kvscope: Callable[..., Ended], on: VllmServer, off: VllmServer, tmp_path: Path
) -> None:
    """Of 360 tokens 320 are shared. Warm: the warm-up left them, so each of 24 calls finds 320. Cold: the first of each repeat
    finds nothing, since the cache was emptied through the engine's own door when counting began. Off: nothing. What the
    calls' usage says is what the engine's counters gained."""
    out = tmp_path / "out"
    asked = on.counter("vllm:request_success_total")
    found = document(
        kvscope("experiment", "run", "--endpoint", on.url, "--endpoint-off", off.url, *WORDS, "--concurrency", "1", "--out", out, "--json")
    )  # fmt: skip
    notes = " ".join(found["notes"])
    assert "emptied through /reset_prefix_cache" in notes
    assert "imitated" not in notes
    arms = {arm["arm"]: arm for arm in found["arms"]}
    total = REQUESTS * REPEATS
    assert {name: arm["num_unfinished"] for name, arm in arms.items()} == dict.fromkeys("ABCD", 0)
    assert {name: row["num_requests"] for name, row in arms["D"]["by_class"].items()} == {"hit": total}
    assert {name: row["num_requests"] for name, row in arms["C"]["by_class"].items()} == {
        "hit": total - REPEATS,
        "new": REPEATS,
    }
    assert "hit" not in arms["A"]["by_class"]
    assert "hit" not in arms["B"]["by_class"]
    assert arms["D"]["reused_ratio"] == pytest.approx(320 / 360)
    assert arms["C"]["reused_ratio"] == pytest.approx(320 * (total - REPEATS) / (360 * total))
    assert arms["A"]["reused_ratio"] == arms["B"]["reused_ratio"] == 0
    assert all(arm["preemptions"] == 0 and arm["evicted_blocks"] is None for arm in arms.values())
    assert [load["num_requests"] for load in arms["D"]["workers"]] == [total]
    assert found["fixed"]["prefix_caching"] == {"differs": {"A": False, "B": False, "C": True, "D": True}}
    assert (found["fixed"]["engine"], found["fixed"]["block_size"]) == ("vllm", BLOCK_SIZE)
    # every call of C and D, their warm-up, and the first look; nothing else was asked
    assert on.counter("vllm:request_success_total") - asked == 2 * REPEATS * (REQUESTS + WARMUP) + 1
    for repeat in range(1, REPEATS + 1):
        rows = pq.read_table(out / "D" / str(repeat) / "kind=sample", partitioning=None).to_pylist()
        hits = [row["value"] for row in rows if row["name"] == "prefix_hits_tokens_total"]
        assert hits[1] - hits[0] == 320 * REQUESTS


def test_rows_of_both_sides_go_through_import_to_a_verdict(
    kvscope: Callable[..., Ended], on: VllmServer, tmp_path: Path
) -> None:
    """Canary against control, both on one engine: nothing differs but the temperature, and both `experiment run` and
    `diagnose` over the imported rows say that there is nothing to blame."""
    out, store = tmp_path / "out", str(tmp_path / "kvscope.duckdb")
    found = document(
        kvscope("experiment", "run", "--endpoint", on.url, *WORDS, "--concurrency", "2", "--out", out, "--json",
                "--arm", "control:version=1", "--arm", "canary:version=2,temperature=0.5")
    )  # fmt: skip
    assert found["contrasts"][0]["baseline"] == "control"
    assert found["fixed"]["engine_version"] == {"differs": {"control": "1", "canary": "2"}}
    assert found["fixed"]["sampling"]["differs"]["canary"] == "temperature 0.5, seed 0"
    for arm in ("control", "canary"):
        ended = kvscope("import", out / arm, "--run", arm, "--store", store)
        assert ended.code == 0, ended.err
    verdict = json.loads(
        kvscope("diagnose", "--store", store, "--baseline", "control", "--suspect", "canary", "--json").out
    )
    assert verdict["vantage"] == "client"
    assert verdict["n"] == {"baseline": REQUESTS * REPEATS, "suspect": REQUESTS * REPEATS}
    assert not [row for row in verdict["quality"] if row["status"] == "contradiction"]


def test_sweep_raises_the_load(kvscope: Callable[..., Ended], on: VllmServer, tmp_path: Path) -> None:
    """One, two and eight in flight: as many are under way at most, all are answered, and all hit what the warm-up left."""
    found = document(
        kvscope("experiment", "sweep", "--endpoint", on.url, *WORDS, "--concurrency", "1,2,8", "--out", tmp_path / "out", "--json")
    )  # fmt: skip
    assert [level["load"] for level in found["levels"]] == [1, 2, 8]
    assert [level["concurrency_max"] for level in found["levels"]] == [1, 2, 8]
    assert all(level["num_unfinished"] == 0 for level in found["levels"])
    assert all(level["reused_ratio"] == pytest.approx(320 / 360) for level in found["levels"])
