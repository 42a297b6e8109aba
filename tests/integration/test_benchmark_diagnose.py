"""Every benchmark output goes file -> import -> store -> diagnose, and a verdict says what its file can tell, no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collector.commands.import_ import import_source
from diagnosis.cause import all_causes
from diagnosis.observability import judgeable
from diagnosis.telling.verdict import Verdict
from engine_probe.adapters.benchmark_provides import PROVIDES
from engine_probe.errors import BadWindow
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import ReadOptions
from store.interface import Store, Window
from store.open import open_store
from tests.benchmark_files import WRITERS, load
from tests.diagnosed import few_replicates, judged

DATA = Path(__file__).parents[1] / "data" / "benchmarks"
SOURCES = {one.source: one for one in PROVIDES}
BEFORE, AFTER = load(150, seed=3), load(150, seed=4, slower=1.6)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two runs a format: the same load twice, the second with a TTFT 1.6 times as long."""
    folder = tmp_path_factory.mktemp("benchmarks")
    opened = open_store(str(folder / "store.duckdb"))
    for source, write in WRITERS.items():
        for name, sent in (("before", BEFORE), ("after", AFTER)):
            (folder / name).mkdir(exist_ok=True)
            mapping = source if source == "nginx" else None
            found = open_source(write(sent, folder / name), mapping=mapping)
            import_source(found, opened, f"{source}-{name}", ReadOptions())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def verdicts(store: Store) -> dict[str, Verdict]:
    """TTFT where a format knows it, else E2E."""
    with few_replicates():
        return {
            source: judged(store, f"{source}-before", f"{source}-after", "e2e" if source == "nginx" else "ttft")
            for source in WRITERS
        }


@pytest.mark.parametrize("source", list(WRITERS))
def test_the_change_is_seen_at_its_true_size(verdicts: dict[str, Verdict], source: str) -> None:
    """Mean TTFT of lognormal(-2, 0.4) times 1.6: the mean moved by what the files hold, within the resolution of a log."""
    told = verdicts[source].delta.mean_s
    moved = sum(one.ttft_s for one in AFTER) / len(AFTER) - sum(one.ttft_s for one in BEFORE) / len(BEFORE)
    assert told == pytest.approx(moved, abs=0.002)


@pytest.mark.parametrize("source", list(WRITERS))
def test_no_cause_is_named_that_the_format_cannot_see(verdicts: dict[str, Verdict], source: str) -> None:
    """Causes that were named or excluded by a number are among those that its declaration allows; others are not observable."""
    allowed = set(judgeable(SOURCES[source].judged).causes)
    assert {cause.cause for cause in verdicts[source].causes} <= allowed
    unseen = {entry["cause"] for entry in verdicts[source].not_observable}
    assert set(all_causes()) - allowed <= unseen


def test_assumed_arrivals_are_said_and_give_no_moment(verdicts: dict[str, Verdict]) -> None:
    """SGLang's file: a warning of the quality checks, and no cause has an interval in time."""
    verdict = verdicts["sglang-bench"]
    checks = [check for check in verdict.quality if check["check"] == "arrivals"]
    assert {check["status"] for check in checks} == {"warning"}
    assert "does not tell when 150 requests arrived" in checks[0]["statement"]
    assert all(cause.interval is None for cause in verdict.causes)
    assert {"slow_steps", "decode_bandwidth"} <= {entry["cause"] for entry in verdict.not_observable}


@pytest.mark.parametrize("source", ["vllm-bench", "aiperf", "guidellm"])
def test_told_arrivals_are_no_matter_of_quality(verdicts: dict[str, Verdict], source: str) -> None:
    """No warning where the tool wrote its instants."""
    assert "arrivals" not in {check["check"] for check in verdicts[source].quality}


def test_a_metric_that_a_format_does_not_know_is_refused_in_a_sentence(store: Store) -> None:
    """nginx knows no first token: how many requests, and that none has one."""
    with pytest.raises(BadWindow, match=rf"has a known .*{len(AFTER)} requests"):
        judged(store, "nginx-before", "nginx-after", "ttft")


@pytest.mark.parametrize("name", ["azure-llm-2023.csv", "aiperf-0.13.0/profile_export_aiperf.json"])
def test_a_trace_and_a_summary_judge_nothing(tmp_path: Path, name: str) -> None:
    """No latency in it: a sentence, not a verdict."""
    opened = open_store(str(tmp_path / "s.duckdb"))
    for run in ("a", "b"):
        import_source(open_source(DATA / name), opened, run, ReadOptions())
    with pytest.raises(BadWindow):
        judged(opened, "a", "b")
    opened.close()


@pytest.mark.parametrize(
    ("name", "prefix", "num"),
    [("vllm-0.32.0-detailed.json", "bench-a-", 24), ("guidellm-0.8.1.json.gz", "", 20), ("aiperf-0.13.0", "", 26)],
)
def test_real_client_rows_join_the_engines_own_spans(tmp_path: Path, name: str, prefix: str, num: int) -> None:
    """The client's file and vLLM's spans of the same run: every request finds its engine row, lengths agree, and the
    engine's TTFT is not longer than the client's."""
    opened = open_store(str(tmp_path / "s.duckdb"))
    for path in (DATA / name, DATA / "vllm-0.32.0-spans.jsonl.gz"):
        import_source(open_source(path), opened, "both", ReadOptions())
    joined = opened.query(
        "SELECT c.request_id, c.output_tokens = e.output_tokens AS same, c.first_token_ns - c.arrival_ns AS theirs, "
        "e.first_token_ns - e.arrival_ns AS engines FROM request c JOIN request e USING (request_id) "
        "WHERE c.vantage = 'client' AND e.vantage = 'engine'"
    ).to_pylist()
    opened.close()
    assert len(joined) == num
    assert all(row["request_id"].startswith(prefix) and row["same"] for row in joined)
    assert all(row["engines"] <= row["theirs"] for row in joined)


def test_the_command_line_reads_each_real_file(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """As a user would: by content, as JSON, twice; the second time nothing is added."""
    store = tmp_path / "s.duckdb"
    for name, expected in (
        ("sglang-0.5.23-details.jsonl", "SGLang bench_serving result"),
        ("aiperf-0.13.0", "AIPerf run"),
    ):
        for again in (False, True):
            ended = kvscope("import", DATA / name, "--run", name, "--store", store, "--json")
            summary = json.loads(ended.out)
            assert (ended.code, summary["format"], summary["already_imported"]) == (0, expected, again)
    opened = open_store(str(store), read_only=True)
    assert opened.rows("request", Window(run_id="aiperf-0.13.0")).num_rows == 26
    opened.close()
