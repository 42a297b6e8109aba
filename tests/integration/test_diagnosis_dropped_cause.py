"""Adding a cause is adding one file: dropped into the folder it owns seconds of the ledger, has its page, and is served."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis import cause, causes, causes_page, next_experiment
from diagnosis.observability import judgeable
from tests.diagnosed import judged, runs, stored
from tests.integration.collector_harness import running
from tests.simulate import Setup

NAME = "solar_flare"
FILE = '''"""The sun did it."""

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause


@cause("solar_flare", needs=("request.prefill_s",), rows=("own_prefill", "shared_prefill", "prefix_caching_off"))
def solar_flare(case: Case) -> Claim | Excluded | None:
    """Prompts are computed more slowly while the sun is active.

    Why: bits flip, and are computed again.

    Refuted by: the same at night.

    Remedy:
    - host: move the rack away from the window

    Experiment: wait for the night and send the same prompts again.
    """
    longer = float(case.suspect_ledger.column("prefix_caching_off").mean())
    if longer <= 0:
        return Excluded("0 s were spent in the sun")
    return Claim([Evidence("the sun shone", longer, "s")])
'''


@pytest.fixture
def _dropped(tmp_path: Path) -> Iterator[None]:
    """The file lies in a folder that the package of causes looks into, as if it lay in `diagnosis/causes/`."""
    folder = tmp_path / "causes"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(FILE, encoding="utf-8")
    causes.__path__.append(str(folder))
    cause.all_causes.cache_clear()
    try:
        yield
    finally:
        causes.__path__.remove(str(folder))
        cause._REGISTRY.pop(NAME, None)
        sys.modules.pop(f"diagnosis.causes.{NAME}", None)
        cause.all_causes.cache_clear()
    assert NAME not in cause.all_causes()


@pytest.mark.usefixtures("_dropped")
def test_one_file_is_seen_in_the_ledger_the_docs_and_the_api(tmp_path: Path) -> None:
    """Caching was switched off; the new cause claims those seconds (it explains more rows than the usual one) with its evidence."""
    made = runs({"on": {}, "off": {"caching": False}}, Setup(num_requests=200, output_tokens=(8, 16)))
    path = tmp_path / "store.duckdb"
    store = stored(path, made.values())
    verdict = judged(store, "on", "off")
    store.close()

    (mine,) = [found for found in verdict.causes if found.cause == NAME]
    assert "prefix_caching_off" in mine.rows
    owned = sum(row.mean_s for row in verdict.attribution if row.cause in mine.rows)
    assert mine.mean_s == pytest.approx(owned)
    assert mine.remedy == ["host: move the rack away from the window"]
    assert verdict.next_experiment is not None
    assert next_experiment.separating(NAME, None, frozenset()) is None, "the table does not know it"
    if verdict.causes[0].cause == NAME and len(verdict.causes) == 1:
        assert verdict.next_experiment["statement"].startswith("wait for the night")

    section = causes_page.render().split(f"\n## {NAME}\n")[1].split("\n## ")[0]
    assert "The same at night".lower() in section.lower()
    assert "**Needs.** `request.prefill_s`" in section or "request.prefill_s" in section
    assert NAME in judgeable({"request.arrival_ns", "request.first_token_ns", "request.prefill_s"}).causes

    with running(path) as collector:
        answer = collector.client.get("/api/v1/diagnosis", params={"baseline": "on", "suspect": "off"})
        assert answer.status_code == 200, answer.text
        assert NAME in [found["cause"] for found in answer.json()["causes"]]
        findings = collector.client.get("/api/v1/findings", params={"cause": NAME}).json()["findings"]
        assert len(findings) == 1


def test_without_the_file_nobody_knows_it() -> None:
    """It leaves no trace."""
    assert NAME not in cause.all_causes()
    assert f"## {NAME}" not in causes_page.render()
