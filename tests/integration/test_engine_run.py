"""`kvscope engine run`: a trace or made-up traffic through the virtual fleet, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import Ended

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"


def test_running_requests_cost_the_cache_some_hits(kvscope: Callable[..., Ended]) -> None:
    """1,500 requests of the Mooncake trace over ten workers: every one ends, and the engines hit less than caches alone."""
    ended = kvscope(
        *("engine", "run", "--trace", TRACE, "--workers", "10", "--blocks", "1500"),
        *("--policy", "affinity_with_load", "--requests", "1500", "--json"),
    )
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["tally"]["finished"] == told["requests"] == 1500
    assert 0.0 < told["hit_rate"] < told["cache_only"]["hit_rate"] <= told["cache_only"]["pooled_hit_rate"] + 0.01
    assert 1.0 <= told["max_over_mean_load"] < 1.3
    assert told["num_blocks"] == 1500
    assert sum(worker["requests"] for worker in told["workers"]) == 1500


def test_screen_shows_the_engines_beside_the_caches_alone(kvscope: Callable[..., Ended]) -> None:
    """Block 0 is in every prompt: caches alone pin all to one worker; calls that come before it is known spread it."""
    command = ("engine", "run", "--trace", TRACE, "--workers", "4", "--blocks", "1500", "--requests", "400")
    told = json.loads(kvscope(*command, "--policy", "prefix_affinity", "--json").out)
    assert told["cache_only"]["max_over_mean_load"] > 3.9
    assert told["max_over_mean_load"] < 2.0
    text = kvscope(*command, "--policy", "prefix_affinity").out
    assert "caches alone" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_router_that_hears_nothing_finds_nothing(kvscope: Callable[..., Ended]) -> None:
    """Every block event lost, or later than the run: affinity has nothing to go by, and the caches hit less."""
    command = ("engine", "run", "--requests", "120", "--workers", "4", "--policy", "prefix_affinity", "--json")
    heard = json.loads(kvscope(*command).out)["hit_rate"]
    for deaf in (("--index-loss", "1"), ("--index-delay", "1000")):
        assert json.loads(kvscope(*command, *deaf).out)["hit_rate"] < heard - 0.1


def test_same_seed_gives_the_same_run_and_its_rows_can_be_imported(
    kvscope: Callable[..., Ended], tmp_path: Path
) -> None:
    """Twice the same: equal answers, equal rows; `import` reads the folder, with the run's name on every row."""
    answers = []
    for name in ("one", "two"):
        ended = kvscope(
            *("engine", "run", "--requests", "60", "--workers", "2", "--seed", "7", "--run", "made"),
            *("--out", tmp_path / name, "--json"),
        )
        told = json.loads(ended.out)
        del told["speed"]
        answers.append(told)
    assert answers[0] == answers[1]
    tables = [
        {path.parent.name: pq.read_table(path) for path in (tmp_path / name).glob("kind=*/*.parquet")}
        for name in ("one", "two")
    ]
    assert tables[0].keys() == tables[1].keys() >= {"kind=request", "kind=step", "kind=block", "kind=route"}
    for kind, table in tables[0].items():
        assert table.drop_columns(["probe_s"] if "probe_s" in table.column_names else []).equals(
            tables[1][kind].drop_columns(["probe_s"] if "probe_s" in table.column_names else [])
        ), kind
    store = tmp_path / "store.duckdb"
    assert kvscope("import", tmp_path / "one", "--run", "made", "--store", store).code == 0
    listed = json.loads(kvscope("requests", "list", "--store", store, "--run", "made", "--json").out)
    assert listed


def test_workers_that_compute_serve_the_same_traffic(kvscope: Callable[..., Ended], tmp_path: Path) -> None:
    """Two processes with a tiny model: every call ends, shared prefixes are found, the rows are kept."""
    ended = kvscope(
        *("engine", "run", "--compute", "--requests", "12", "--rate", "20", "--workers", "2"),
        *("--policy", "sticky", "--run", "real", "--out", tmp_path / "rows", "--json"),
    )
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["tally"]["finished"] == told["requests"] == 12
    assert told["is_virtual"] is False
    assert told["hit_rate"] > 0
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {"w0", "w1", "router"}
    assert told["rows"]["route"] == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workers", "0"), "a fleet of 0 workers"),
        (("--workers", "1000000"), "--workers is 1,000,000; give up to 4,096"),
        (("--policy", "best"), "known: round_robin"),
        (("--model", "gpt-9"), "gpt-9"),
        (("--hardware", "abacus"), "abacus"),
        (("--requests", "0"), "--requests is 0"),
        (("--rate", "0"), "rate is 0.0"),
        (("--block-size", "0"), "block_size"),
        (("--blocks", "0"), "0 KV blocks"),
        (("--tp", "0"), "tp 0 does not divide"),
        (("--compute", "--blocks", "0"), "0 KV blocks"),
        (("--seats", "0"), "max_num_seqs is 0"),
        (("--eviction", "mru"), "known: lru"),
        (("--in-flight", "0"), "in_flight is 0"),
        (("--index-delay", "-1"), "delay_s is -1.0"),
        (("--index-loss", "2"), "loss_ratio is 2.0"),
        (("--compute", "--hardware", "H100", "--tp", "2"), "--hardware and --tp"),
        (("--compute", "--workers", "0"), "a fleet of 0 workers"),
        (("--compute", "--workers", "65"), "--workers is 65; give up to 64"),
        (("--compute", "--model", "/nowhere"), "/nowhere"),
        (("--trace", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--trace", __file__), "line 1"),
    ],
)
def test_setting_that_makes_no_sense_is_misuse(
    kvscope: Callable[..., Ended], options: tuple[str, ...], says: str
) -> None:
    """Exit 2 and one sentence that names it; no traceback."""
    ended = kvscope("engine", "run", "--requests", "5", *options)
    assert ended.code == 2, ended.err
    assert says in ended.err
    assert "Traceback" not in ended.err
