"""llm-d's endpoint picker: its page keeps its own names, its log becomes decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters import llm_d_log
from engine_probe.adapters.adapter import Discovery, Surroundings
from engine_probe.adapters.llm_d_log import PickerLog, instant
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter, recognise
from engine_probe.events import CANONICAL_SAMPLES
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
PAGE = (SAMPLES / "llmd_epp_metrics.synthetic.prom").read_text()
LOG = SAMPLES / "llmd_epp_log.synthetic.jsonl"
AT_NS = 1_779_098_400_000_000_000


class NoAnswers:
    """A picker has no JSON endpoints."""

    url = "http://picker:9090"

    def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
        raise AssertionError(path)

    def json(self, path: str) -> Any:
        raise AssertionError(path)


def routes(lines: list[str]) -> list[dict[str, Any]]:
    reader = PickerLog("epp")
    found = [row for line in lines for row in reader.feed(line).get("route", [])]
    validate("route", table_from_rows("route", found), AT_NS * 2)
    return found


def test_a_picker_is_a_router() -> None:
    """Role, pool, plugins and version from the page alone; no endpoint is asked."""
    page = parse_page(PAGE)
    one = recognise(page)
    assert one is not None
    assert one.engine == "llm-d"
    seen = one.discover(NoAnswers(), page)
    assert seen.models == ["tiny"]
    assert one.facts(page, seen) == {
        "0": {
            "engine": "llm-d",
            "role": "router",
            "model": "tiny",
            "engine_version": "v0.8.0",
            "flags": {"pool": "tiny-pool", "plugins": "precise-prefix-cache-scorer,max-score-picker"},
        }
    }
    said = "\n".join(line.text for line in one.lines(seen, Surroundings(interval_s=1.0)))
    assert "pool tiny-pool, 2 pods ready" in said
    assert "-v=4 --zap-encoder=json" in said
    assert "KV cache index of the engines' events" in said


def test_an_older_picker_without_an_index_says_so() -> None:
    """`inference_model_*` of earlier releases is recognised; what is not on the page is not told."""
    page = parse_page('inference_model_request_total{model_name="a",target_model_name="b"} 1\n')
    one = recognise(page)
    assert one is not None
    assert one.engine == "llm-d"
    seen = one.discover(NoAnswers(), page)
    assert one.facts(page, seen)["0"] == {"engine": "llm-d", "role": "router", "model": "a", "flags": {}}
    assert "guessed" in one.lines(seen, Surroundings(interval_s=1.0))[2].text


def test_a_pools_average_is_no_engines_number() -> None:
    """No canonical name: a pool's mean KV usage beside an engine's would be counted as a further engine."""
    mapper = SampleMapper("epp", adapter("llm-d").tables)
    rows = list(mapper.rows(parse_page(PAGE), AT_NS))
    assert {name for _, _, name, _, _ in rows}.isdisjoint(CANONICAL_SAMPLES)
    assert {worker for worker, _, _, _, _ in rows} == {"epp"}
    kept = {name for _, _, name, _, _ in rows}
    assert {"inference_pool_average_kv_cache_utilization", "kvcache_index_lookup_hits_total"} <= kept
    assert not any(name.startswith("go_") for name in kept)


def test_a_decision_with_all_its_candidates() -> None:
    """Scores are the weighted ones, load and queue what the picker had scraped; tokens are not told, so not invented."""
    found = routes(LOG.read_text().splitlines())
    assert found[0] == {
        "at_ns": 1_779_098_407_000_000_000,
        "request_id": "client-000",
        "router": "epp",
        "policy": "max-score-picker",
        "chosen": "10.0.0.1:8000",
        "candidates": [
            {"worker": "10.0.0.1:8000", "matched_tokens": None, "load": 3.0, "queue": 0.0, "score": 1.5},
            {"worker": "10.0.0.2:8000", "matched_tokens": None, "load": 4.0, "queue": 1.0, "score": 1.0},
        ],
    }


def test_prefill_and_decode_are_two_decisions() -> None:
    """One row a profile; the closing line adds none, and alone (at `-v=3`) it is the decision, without candidates."""
    found = [(row["request_id"], row["chosen"], row["candidates"]) for row in routes(LOG.read_text().splitlines())[1:]]
    assert [(name, chosen) for name, chosen, _ in found] == [
        ("client-001", "10.0.0.2:8000"),
        ("client-001", "10.0.0.3:8000"),
        ("client-002", "10.0.0.1:8000"),
    ]
    assert [one["worker"] for one in found[1][2]] == ["10.0.0.3:8000"]
    assert found[2][2] is None


def test_older_pickers_and_kubectls_prefix() -> None:
    """`pods-weighted-score`, a port that is missing, an IPv6 address, and a line as `kubectl logs --prefix` shows it."""
    head = {"ts": "2026-05-18T10:00:07Z", "x-request-id": "a"}
    pods = [
        {"Pod": {"Address": "10.0.0.1", "RunningQueueSize": 2, "WaitingQueueSize": 1}, "Score": 1},
        {"Pod": {"Address": "fd00::1", "Port": "8000"}, "Score": 0.5},
    ]
    lines = [
        json.dumps(head | {"msg": "Candidate pods for picking", "pods-weighted-score": pods}),
        json.dumps(head | {"msg": "Completed running picker plugin successfully", "result": {"TargetPods": pods[1:]}}),
    ]
    row = routes([f"[pod/epp-0/epp] {line}" for line in lines])[0]
    assert row["chosen"] == "[fd00::1]:8000"
    assert [(one["worker"], one["load"], one["queue"]) for one in row["candidates"]] == [
        ("10.0.0.1", 2.0, 1.0),
        ("[fd00::1]:8000", None, None),
    ]


def test_without_the_pickers_answer_the_candidates_stay() -> None:
    """A picker whose result is not understood: who was chosen comes with the closing line."""
    lines = [line for line in LOG.read_text().splitlines() if "Completed running picker" not in line]
    first = routes(lines)[0]
    assert first["chosen"] == "10.0.0.1:8000"
    assert len(first["candidates"]) == 2


@pytest.mark.parametrize(
    ("stamp", "at_ns"),
    [
        ("2026-05-18T10:00:07Z", 1_779_098_407_000_000_000),
        ("2026-05-18T12:00:07.123456789+02:00", 1_779_098_407_123_456_789),
        (1_779_098_407.5, 1_779_098_407_500_000_000),
        ("2026-05-18T10:00:07", None),
        ("2026-13-18T10:00:07Z", None),
        ("", None),
        (None, None),
        (True, None),
        (-5, None),
    ],
)
def test_instants(stamp: object, at_ns: int | None) -> None:
    """RFC 3339 in any zone, or seconds; a time without a zone is not guessed."""
    assert instant(stamp) == at_ns


@given(st.one_of(st.text(max_size=200), st.sampled_from(LOG.read_text().splitlines())), st.integers(0, 400))
def test_any_line_is_survived(line: str, cut: int) -> None:
    """Cut and foreign lines tell nothing, and never raise."""
    reader = PickerLog("epp")
    for text in (line, line[:cut], line.replace('"Address"', '"Elsewhere"')):
        for kind, found in reader.feed(text).items():
            validate(kind, table_from_rows(kind, found), AT_NS * 2)


def test_requests_that_never_end_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded."""
    monkeypatch.setattr(llm_d_log, "MAX_OPEN", 3)
    reader = PickerLog("epp")
    for i in range(10):
        line = {"ts": "2026-05-18T10:00:07Z", "x-request-id": str(i), "msg": "Candidate pods for picking"}
        reader.feed(json.dumps(line))
    assert len(reader._open) == 3


def test_a_kept_log_is_imported() -> None:
    """`--format llm-d-log`: the same rows, and the decision that names no request is said."""
    notes = Notes()
    tables = list(open_source(LOG, "llm-d-log").chunks(ReadOptions(), notes))
    assert sum(table.num_rows for one in tables for table in one.values()) == 4
    assert notes.left_out == ["1 decisions whose line names no request"]


def test_what_attach_says_of_a_log() -> None:
    """With a file it is undecided until lines come; an unreadable one is said as it is."""
    one, page = adapter("llm-d"), parse_page(PAGE)
    seen = Discovery(series=frozenset(page.names()))
    for around, word in ((Surroundings(1.0, log_path="x.log"), "x.log"), (Surroundings(1.0, log_error="gone"), "gone")):
        assert word in next(line for line in one.lines(seen, around) if line.subject == "routes").text
