"""Diagnosis, report, capacity and findings over HTTP: the same judgement as the command, kept for later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from collector.api.diagnosis import CapacityAnswer, Findings, VerdictDocument
from collector.commands.capacity import caching_worth
from diagnosis.capacity.traces import cache_loads, stored_requests
from diagnosis.diagnose import diagnose
from store.interface import Window
from store.open import open_store
from tests.integration.collector_harness import Collector, running

EXAMPLES = Path(__file__).parents[2] / "examples" / "recordings"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the two real recordings of the demo."""
    from collector.cli import main

    made = tmp_path_factory.mktemp("judging") / "kvscope.duckdb"
    for name in ("a-ample-long", "c-squeeze-long"):
        with pytest.raises(SystemExit) as end:
            main(["import", str(EXAMPLES / name), "--run", name, "--store", str(made)])
        assert not end.value.code
    return made


@pytest.fixture(scope="module")
def collector(path: Path) -> Iterator[Collector]:
    with running(path) as made:
        yield made


ASKED = {"baseline": "a-ample-long", "suspect": "c-squeeze-long"}


def test_verdict_over_http_is_the_verdict(collector: Collector) -> None:
    """Key for key what `diagnose` says of the same store; documented as it is."""
    answer = collector.client.get("/api/v1/diagnosis", params=ASKED)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    parsed = TypeAdapter(VerdictDocument).validate_json(answer.content)
    assert set(document) == set(parsed.model_dump())
    windows = [Window(run_id=name) for name in ASKED.values()]
    expected = diagnose(collector.store, *windows, now_ns=time.time_ns()).to_dict()
    assert document == json.loads(json.dumps(expected))
    assert document["status"] == "explained"


def test_verdicts_are_kept_as_findings_newest_first(collector: Collector) -> None:
    """With the question, and only those of the cause or status asked for."""
    for metric in ("ttft", "tpot"):
        collector.client.get("/api/v1/diagnosis", params=ASKED | {"metric": metric}).raise_for_status()
    answer = collector.client.get("/api/v1/findings", params={"limit": 2})
    TypeAdapter(Findings).validate_json(answer.content)
    newest, before = answer.json()["findings"]
    assert (newest["metric"], before["metric"]) == ("tpot", "ttft")
    assert newest["id"] == before["id"] + 1
    assert (before["baseline"], before["suspect"]) == ("a-ample-long", "c-squeeze-long")
    cause = before["causes"][0]["cause"]
    named = collector.client.get("/api/v1/findings", params={"cause": cause}).json()["findings"]
    assert all(cause in [item["cause"] for item in finding["causes"]] for finding in named)
    assert named
    assert collector.client.get("/api/v1/findings", params={"cause": "adapter_swap"}).json() == {"findings": []}


def test_report_is_markdown_of_the_same_verdict(collector: Collector) -> None:
    """For a postmortem, without the command line."""
    answer = collector.client.get("/api/v1/reports", params=ASKED)
    assert answer.headers["content-type"].startswith("text/markdown")
    verdict = collector.client.get("/api/v1/diagnosis", params=ASKED).json()["verdict"]
    assert answer.text.startswith("# ")
    assert verdict in answer.text


def test_page_shows_the_verdict(collector: Collector) -> None:
    """The newest judgement is one look away."""
    collector.client.get("/api/v1/diagnosis", params=ASKED).raise_for_status()
    assert "explained" in collector.client.get("/").text


def test_capacity_over_http_is_that_of_the_command(
    collector: Collector, path: Path, kvscope: Callable[..., Any], tmp_path: Path
) -> None:
    """The same sizes give the same hit rates; a copy of the store is asked by the command."""
    params = {"window": "c-squeeze-long", "blocks": "50,111,inf"}
    answer = collector.client.get("/api/v1/capacity", params=params)
    TypeAdapter(CapacityAnswer).validate_json(answer.content)
    points = answer.json()["points"]
    assert [point["blocks"] for point in points] == [50, 111, None]
    rates = [point["hit_rate"] for point in points]
    assert rates == sorted(rates)
    rows = collector.store.rows("request", Window(run_id="c-squeeze-long"))
    copy = tmp_path / "copy.duckdb"
    with open_store(str(copy)) as store:
        from store.interface import Batch

        store.append(Batch({"request": rows}))
    told = json.loads(
        kvscope("capacity", "--store", copy, "--run", "c-squeeze-long", "--blocks", "50,111,inf", "--json").out
    )
    assert [point["hit_rate"] for point in told] == pytest.approx(rates)


def test_capacity_over_http_tells_whether_caching_would_pay(collector: Collector) -> None:
    """As the command says it, of a cache of the size that the workers have."""
    answer = collector.client.get("/api/v1/capacity", params={"window": "c-squeeze-long", "blocks": "inf"})
    loads = cache_loads(*stored_requests(collector.store, Window(run_id="c-squeeze-long")))
    told = caching_worth(loads)
    assert told is not None
    worth = answer.json()["caching"]
    assert worth["sentence"] == told.sentence
    assert worth["sentence"].startswith("Would caching pay here?")
    assert 0 < worth["hit_ratio"] == pytest.approx(told.hit_ratio)


@pytest.mark.parametrize(
    ("route", "params", "status", "said"),
    [
        ("diagnosis", {"baseline": "nobody", "suspect": "c-squeeze-long"}, 400, "known runs"),
        ("diagnosis", {"baseline": "a-ample-long", "suspect": "a-ample-long"}, 400, "same window"),
        ("diagnosis", ASKED | {"quantile": "99"}, 400, "quantile"),
        ("diagnosis", ASKED | {"metric": "beauty"}, 400, "query.metric"),
        ("reports", ASKED | {"vantage": "moon"}, 400, "query.vantage"),
        ("capacity", {}, 400, "c-squeeze-long"),
        ("capacity", {"window": "c-squeeze-long", "blocks": "many"}, 400, "whole numbers"),
        ("capacity", {"window": "c-squeeze-long", "blocks": "0"}, 422, "holds nothing"),
        ("capacity", {"window": "c-squeeze-long", "policy": "random"}, 400, "query.policy"),
        ("findings", {"limit": 0}, 400, "query.limit"),
    ],
)
def test_judgement_that_cannot_be_made_says_why(
    collector: Collector, route: str, params: dict[str, Any], status: int, said: str
) -> None:
    """Unknown runs with the known ones, equal windows, and what is no quantile, metric, size or policy."""
    answer = collector.client.get(f"/api/v1/{route}", params=params)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["detail"]
