"""`kvscope experiment` against a real llama-server, and from its rows through import to a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from store.open import open_store
from tests.conftest import Ended
from tests.servers import running_llama_server

SMALL = (
    "--requests",
    "6",
    "--warmup",
    "2",
    "--shared-tokens",
    "96",
    "--own-tokens",
    "16",
    "--output-tokens",
    "4",
    "--groups",
    "1",
)


@pytest.mark.server
@pytest.mark.timeout(300)
def test_a_real_server_is_asked_and_its_cache_seen(kvscope: Callable[..., Ended], tmp_path: Path) -> None:
    """Every call is answered in its length; warm calls hit what the warm-up left, imitated-off ones nothing; instants are real."""
    with running_llama_server(ctx_size=4096, num_slots=2) as url:
        out = tmp_path / "out"
        ended = kvscope("experiment", "run", "--endpoint", url, "--concurrency", "2", *SMALL, "--out", out, "--json")
        found = json.loads(ended.out)
        swept = kvscope(
            "experiment", "sweep", "--endpoint", url, "--concurrency", "1,2", *SMALL, "--out", tmp_path / "s", "--json"
        )
    assert ended.code in (0, 1), ended.err
    arms = {arm["arm"]: arm for arm in found["arms"]}
    assert all(arm["num_unfinished"] == 0 for arm in arms.values())
    assert all(arm["concurrency_max"] <= 2 for arm in arms.values())
    assert "hit" in arms["D"]["by_class"]
    assert set(arms["B"]["by_class"]) == {"new"}
    assert "new word in front of every prompt" in " ".join(found["notes"])
    assert [level["load"] for level in json.loads(swept.out)["levels"]] == [1, 2]


@pytest.mark.timeout(300)
def test_the_rows_of_an_experiment_are_imported_and_diagnosed(kvscope: Callable[..., Ended], tmp_path: Path) -> None:
    """An arm's folder is a run: three repeats, warm-up left out; the verdict names what the arms differ in."""
    out, store = tmp_path / "out", str(tmp_path / "kvscope.duckdb")
    words = (
        "--requests",
        "120",
        "--warmup",
        "8",
        "--shared-tokens",
        "4096",
        "--groups",
        "1",
        "--jobs",
        "1",
        "--seed",
        "3",
    )
    kvscope("experiment", "run", *words, "--arm", "B:cache=off", "--arm", "D:cache=on", "--out", out)
    for arm in ("B", "D"):
        assert kvscope("import", out / arm, "--run", arm, "--store", store).code == 0
    assert kvscope("import", out / "D" / "2", "--run", "D/2", "--store", store).code == 0
    stored = open_store(store, read_only=True)
    assert set(stored.runs()) == {"B", "D", "D/2"}
    stored.close()
    verdict = json.loads(kvscope("diagnose", "--store", store, "--baseline", "B", "--suspect", "D", "--json").out)
    assert verdict["n"] == {"baseline": 360, "suspect": 360}
    assert verdict["causes"][0]["cause"] == "prefix_caching_off"
