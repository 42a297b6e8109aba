"""The SQL behind the evidence of every verdict runs, and gives the number that is stated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from diagnosis.telling.verdict import Verdict
from store.interface import Store
from store.sandbox.sandbox import SqlLimits, SqlRunner
from tests.diagnosed import as_run, few_replicates, judged, runs, stored, with_client
from tests.simulate import Setup, at_level

FAULTS: dict[str, dict[str, Any]] = {
    "base": {},
    "squeeze": {"num_blocks": 300},
    "starve": {"num_blocks": 160},
    "load": {"rate": 11.0},
    "slow": {"slow": 1.6},
    "off": {"caching": False},
    "long": {"long_every": 25},
    "longer": {"tail_tokens": (32, 300)},
    "chatty": {"output_tokens": (96, 320), "rate": 3.0, "groups": 1},
    "storm": {"output_tokens": (96, 320), "rate": 3.0, "groups": 1, "num_blocks": 175},
}
PAIRS = [
    *(("base", fault) for fault in ("squeeze", "starve", "load", "slow", "off", "long", "longer")),
    ("chatty", "storm"),
    ("off", "base"),
    ("squeeze", "base"),
]
METRICS = dict.fromkeys(("slow", "storm", "load"), ("ttft", "tpot"))
POORER = ("base", "squeeze", "off", "slow")
"""What is looked at from poorer levels of observation too."""
EXPECTED = {
    "admission_blocked_on_blocks",
    "decode_bandwidth",
    "length_shift",
    "load_step",
    "long_prefill_interference",
    "premature_eviction",
    "prefix_caching_off",
    "slow_steps",
}
"""Causes that these pairs name, so that the SQL of each is tried."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Faults as seen by the plugin, by client and plugin, and by spans; warm-up and a row delivered twice among them."""
    simulated = runs(FAULTS, Setup(num_requests=200))
    for rows in simulated.values():
        first = min(rows["request"], key=lambda row: row["arrival_ns"])
        rows["request"] += [
            {**first, "request_id": "warm", "labels": {"phase": "warmup"}},
            dict(rows["request"][-1]),
        ]
    parts = [
        *simulated.values(),
        *(as_run(with_client(simulated[name]), f"{name}+client") for name in POORER),
        *(as_run(at_level(simulated[name], "otlp"), f"{name}+otlp") for name in POORER),
    ]
    with stored(tmp_path_factory.mktemp("sql") / "store.duckdb", parts) as opened:
        yield opened


@pytest.fixture(scope="module")
def verdicts(store: Store) -> list[Verdict]:
    with few_replicates():
        return [
            *(
                judged(store, base, suspect, metric)
                for base, suspect in PAIRS
                for metric in METRICS.get(suspect, ("ttft",))
            ),
            *(judged(store, "base" + level, fault + level) for level in ("+client", "+otlp") for fault in POORER[1:]),
        ]


def evidence(verdicts: list[Verdict]) -> Iterator[tuple[str, dict[str, Any]]]:
    for verdict in verdicts:
        for cause in verdict.causes:
            for found in cause.evidence:
                yield cause.cause, found


def test_every_statement_gives_the_stated_number(store: Store, verdicts: list[Verdict]) -> None:
    """One row, and its first column is the value: warm-up, double delivery and joined rows are treated as judgement does."""
    wrong = []
    tried = set()
    for cause, found in evidence(verdicts):
        if found["sql"] is None:
            continue
        tried.add(cause)
        answer = store.query(found["sql"])
        told = answer.column(0)[0].as_py() if answer.num_rows == 1 else None
        if told is None or float(told) != pytest.approx(found["value"], rel=1e-6, abs=1e-9):
            wrong.append(f"{cause}: {found['statement']} ({found['value']}), SQL says {told}: {found['sql']}")
    assert not wrong, "\n".join(wrong)
    assert tried >= EXPECTED


def test_every_cause_has_evidence_with_numbers_and_requests(verdicts: list[Verdict]) -> None:
    """A claim without a number is no claim; those that name requests name real ones."""
    for cause, found in evidence(verdicts):
        assert found["statement"]
        assert found["value"] is not None, cause
        assert found["unit"], cause
        assert all(isinstance(rid, str) for rid in found["request_ids"])


def test_people_can_run_it(store: Store, verdicts: list[Verdict]) -> None:
    """One statement of each cause passes the sandbox of `kvscope sql` and gives the same number there."""
    first = {cause: found for cause, found in evidence(verdicts) if found["sql"] is not None}
    with SqlRunner(SqlLimits(timeout_s=120.0), max_children=1, prewarm=False) as runner:
        for cause, found in first.items():
            result = runner.run(found["sql"], data=store.sql_data(direct=False))
            assert float(result.table.column(0)[0].as_py()) == pytest.approx(found["value"], rel=1e-6), cause
