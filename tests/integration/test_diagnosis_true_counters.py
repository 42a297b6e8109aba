"""Counters that are true though they look wrong: nothing to find, found elsewhere, cut by callers. None of them is called a liar.

Numbers are ours. Each input stands beside one with the same counters and the opposite truth, where such a one can be told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnosis.telling.verdict import Verdict
from tests.integration.test_diagnosis_reports_of_engines import NUM, names, ns, served, verdict_of
from tests.simulate import Rows

ASKED, FOUND = 1400 * NUM, 1024 * NUM
FINISHED, FAILED = "requests_finished_total", "requests_failed_total"
OUTSIDE = "external_hits_tokens_total"


pytestmark = pytest.mark.usefixtures("few_replicates")


def counted(rows: Rows, hits: float, asked: float = ASKED, **more: float) -> Rows:
    """The rows with counters that rise evenly to these, from the first instant to shortly before the last."""
    run, end = rows["request"][0]["run_id"], max(row["end_ns"] for row in rows["request"])
    totals = {"prefix_hits_tokens_total": hits, "prefix_queries_tokens_total": asked, **more}
    told = {"worker": "w0", "run_id": run}
    samples = [
        {**told, "at_ns": ns(0) + round((end - ns(0)) * share * 0.999), "name": name, "value": value * share}
        for name, value in totals.items()
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return {**rows, "sample": samples}


def untold(run: str, seed: int, *, finds: int, hidden_s: float = 0.0) -> Rows:
    """Prompts that find so many tokens and do not say so; `hidden_s` more prefill."""
    rows = served(run, seed, told=lambda _, __: {"cached_tokens": finds, "hidden_s": hidden_s}, rate=0.5)
    for row in rows["request"]:
        del row["cached_tokens"], row["computed_tokens"]
    return rows


def seen_by_callers(rows: Rows, way_s: float) -> Rows:
    """What callers `way_s` away see of the same requests."""
    kept = ("request_id", "run_id", "state", "worker", "prompt_tokens", "output_tokens", "arrival_ns")
    later = ("first_token_ns", "last_token_ns", "end_ns", "at_ns")
    requests = [
        {name: row[name] for name in kept}
        | {"vantage": "client"}
        | {name: row[name] + round(way_s * 1e9) for name in later}
        for row in rows["request"]
    ]
    return {**rows, "request": requests}


def flagged(rows: Rows, caching: bool | None, **flags: str) -> Rows:
    fact = {"worker": "w0", "run_id": rows["request"][0]["run_id"], "at_ns": ns(-3.0), "block_size": 16}
    return {**rows, "worker": [{**fact, "num_blocks": 8000, "prefix_caching": caching, "flags": flags}]}


def contradictions(verdict: Verdict) -> list[str]:
    return [row["statement"] for row in verdict.quality if row["status"] == "contradiction"]


def why_not(verdict: Verdict, cause: str) -> str:
    return next(row["because"] for row in verdict.excluded if row["cause"] == cause)


# Nothing to find: 0 hits in both windows


@pytest.mark.parametrize("hidden_s", [(0.0, 0.13), (0.13, 0.0)], ids=["slower", "faster"])
def test_another_prefill_kernel_makes_no_true_zero_a_lie(tmp_path: Path, hidden_s: tuple[float, float]) -> None:
    """No prompt shares anything; prefill takes 160 ms in one window and 290 in the other, and decoding what it took."""
    base, suspect = (
        counted(untold(run, seed, finds=0, hidden_s=more), 0)
        for seed, (run, more) in enumerate(zip(("base", "suspect"), hidden_s, strict=True), 1)
    )
    verdict = verdict_of(tmp_path, base, suspect)
    assert (names(verdict), contradictions(verdict)) == ([], [])
    assert any("cannot be told" in row["statement"] for row in verdict.quality)


def test_a_flag_that_changed_beside_another_kernel_makes_no_true_zero_a_lie(tmp_path: Path) -> None:
    """The same with caching on at first and off by the flag afterwards, when nothing is looked up: nobody knows what the flag changed."""
    base = flagged(counted(untold("base", 1, finds=0), 0), True)
    verdict = verdict_of(tmp_path, base, flagged(counted(untold("suspect", 2, finds=0, hidden_s=0.13), 0, 0), False))
    assert contradictions(verdict) == []
    assert "telemetry_contradiction" not in names(verdict)


@pytest.mark.parametrize("way_s", [(0.0, 0.2), (0.2, 0.0)], ids=["longer", "shorter"])
def test_a_longer_way_makes_no_true_zero_a_lie(tmp_path: Path, way_s: tuple[float, float]) -> None:
    """Callers see first tokens 0.2 s later: that is no prefill."""
    base, suspect = (
        counted(seen_by_callers(untold(run, seed, finds=0), way), 0)
        for seed, (run, way) in enumerate(zip(("base", "suspect"), way_s, strict=True), 1)
    )
    assert contradictions(verdict_of(tmp_path, base, suspect)) == []


# The counter fell to 0 of all


@pytest.mark.parametrize(
    ("finds", "hidden_s", "says"),
    [(0, 0.0, "bear the counter out"), (0, -0.085, "cannot be told"), (1024, 0.0, "not telling the truth")],
    ids=["and nothing is found", "and prefill became faster", "and all is found"],
)
def test_a_lost_hit_rate_is_held_against_times_that_stayed_alone(
    tmp_path: Path, finds: int, hidden_s: float, says: str
) -> None:
    """73 % were hits. Without them prefill takes 160 ms in place of 58; 75 by a faster kernel is neither; 58 speaks against the counter."""
    base = counted(untold("base", 1, finds=1024), FOUND)
    verdict = verdict_of(tmp_path, base, counted(untold("suspect", 2, finds=finds, hidden_s=hidden_s), 0))
    (said,) = [row["statement"] for row in verdict.quality if row["check"] == "hits_against_times"]
    assert says in said
    assert ("telemetry_contradiction" in names(verdict)) == (says == "not telling the truth")
    assert all(c.confidence_word == "medium" for c in verdict.causes if c.cause == "telemetry_contradiction")


def test_prompts_of_another_length_are_no_witness_of_prefill(tmp_path: Path) -> None:
    """350 of 700 tokens were found, then none of 1,400, behind a way of 50 ms: 0.15 ms a token in both, and the lost hits are true."""

    def asking(run: str, seed: int, prompt: int, finds: int) -> Rows:
        rows = served(run, seed, told=lambda _, __: {"prompt_tokens": prompt, "cached_tokens": finds}, rate=0.5)
        return seen_by_callers(rows, 0.05)

    base = counted(asking("base", 1, 700, 350), 350 * NUM, 700 * NUM)
    assert contradictions(verdict_of(tmp_path, base, counted(asking("suspect", 2, 1400, 0), 0))) == []


# Found elsewhere: a connector's hits are no hits of the engine's own cache


def finding(run: str, seed: int, hidden_s: float = 0.0) -> Rows:
    return served(run, seed, told=lambda _, __: {"hidden_s": hidden_s})


@pytest.mark.parametrize("tells", ["the outside counter", "a connector's flag", "nobody"])
def test_what_a_connector_found_is_not_missing_in_the_hit_counter(tmp_path: Path, tells: str) -> None:
    """Requests found 1,024 tokens each and the engine's own counter none: LMCache's were not its. Without one, somebody is wrong."""
    outside: dict[str, float] = {OUTSIDE: FOUND} if tells == "the outside counter" else {}
    flags = {"kv_connector": "LMCacheConnectorV1"} if tells == "a connector's flag" else {}
    runs = [
        flagged(counted(finding(run, seed, more), 0, **outside), True, **flags)
        for seed, (run, more) in enumerate((("base", 0.0), ("suspect", 0.1)), 1)
    ]
    assert bool(contradictions(verdict_of(tmp_path, runs[0], runs[1]))) == (tells == "nobody")


def test_tokens_that_no_step_computed_may_come_from_outside(tmp_path: Path) -> None:
    """No request tells; the engine counts what it computed, and the rest was found outside."""
    computed = {"prompt_tokens_total": ASKED, "prompt_tokens_computed_total": ASKED - FOUND}
    runs = [untold(run, seed, finds=1024) for seed, run in enumerate(("base", "suspect"), 1)]
    told = [counted(rows, 0, **computed, **{OUTSIDE: FOUND}) for rows in runs]
    assert contradictions(verdict_of(tmp_path, told[0], told[1])) == []
    mute = [counted(rows, 0, **computed) for rows in runs]
    (tmp_path / "mute").mkdir()
    assert len(contradictions(verdict_of(tmp_path / "mute", mute[0], mute[1]))) == 2


def test_a_flag_that_is_off_is_no_reason_where_as_much_is_found(tmp_path: Path) -> None:
    """The engine's own cache before, LMCache's after, 73 % of the prompts in both; each load takes 0.1 s that nobody tells."""
    base = flagged(counted(finding("base", 1), FOUND), True)
    suspect = flagged(counted(finding("suspect", 2, 0.1), 0, 0, **{OUTSIDE: FOUND}), False)
    verdict = verdict_of(tmp_path, base, suspect)
    assert not {"prefix_caching_off", "telemetry_contradiction"} & set(names(verdict)), verdict.verdict
    assert contradictions(verdict) == []
    assert "came from a cache, though 1 worker says" in why_not(verdict, "prefix_caching_off")


def test_a_flag_that_was_off_before_is_no_reason_where_the_connector_is_lost(tmp_path: Path) -> None:
    """Off in both windows; LMCache found 73 %, and finds nothing any more."""
    base = flagged(counted(finding("base", 1), 0, 0, **{OUTSIDE: FOUND}), False)
    cold = served("suspect", 2, told=lambda _, __: {"cached_tokens": 0})
    verdict = verdict_of(tmp_path, base, flagged(counted(cold, 0, 0, **{OUTSIDE: 0}), False))
    assert "prefix_caching_off" not in names(verdict), verdict.verdict
    assert "off in the baseline too" in why_not(verdict, "prefix_caching_off")


def test_a_flag_that_went_off_with_all_that_was_found_stays_the_reason(tmp_path: Path) -> None:
    """The same flag where nothing is found outside."""
    base = flagged(counted(finding("base", 1), FOUND), True)
    cold = served("suspect", 2, told=lambda _, __: {"cached_tokens": 0})
    verdict = verdict_of(tmp_path, base, flagged(counted(cold, 0, 0), False))
    assert names(verdict) == ["prefix_caching_off"], verdict.verdict


def test_a_worker_that_was_not_scraped_is_in_no_counter(tmp_path: Path) -> None:
    """w1 serves and finds, w0 is idle but for a few, and only w0 is scraped: its 0 hits say nothing of w1."""

    def told(run: str, seed: int) -> Rows:
        rows = counted(finding(run, seed), 0)
        for i, row in enumerate(rows["request"]):
            row["worker"] = "w1" if i % 10 else "w0"
        gauges = [{**row, "name": "requests_running", "value": 1.0} for row in rows["sample"][:5]]
        return {**rows, "sample": rows["sample"] + gauges}

    assert contradictions(verdict_of(tmp_path, told("base", 1), told("suspect", 2))) == []


# Cut by their callers: ends that the engine counts as failed


@pytest.mark.parametrize("failed", [NUM, 0], ids=["counted as failed", "counted nowhere"])
def test_streams_that_callers_cut_are_counted_as_failed(tmp_path: Path, failed: int) -> None:
    """The counter of finished requests stands still beside 300 answers: they are the failed ones, or it is dead."""
    ends: dict[str, Any] = {FINISHED: 0, FAILED: failed}
    base, suspect = (
        counted(finding(run, seed, more), FOUND, **ends)
        for seed, (run, more) in enumerate((("base", 0.0), ("suspect", 0.1)), 1)
    )
    verdict = verdict_of(tmp_path, base, suspect)
    assert any(FINISHED in said for said in contradictions(verdict)) == (failed == 0)


# Sentences that say no more than is known


def test_no_block_event_is_spoken_of_where_none_was_told(tmp_path: Path) -> None:
    """Caching is on and then off by the flag; no row of blocks in either window."""
    runs = [
        served(run, seed, told=lambda _, __: {"cached_tokens": 0}) for seed, run in enumerate(("base", "suspect"), 1)
    ]
    verdict = verdict_of(tmp_path, flagged(runs[0], True), flagged(runs[1], False))
    assert not [note for note in verdict.notes if "block events" in note]


def test_nobody_is_said_to_have_caching_on_who_does_not_say_so(tmp_path: Path) -> None:
    """1,024 tokens were found and now none; no worker says whether caching is on."""
    cold = served("suspect", 2, told=lambda _, __: {"cached_tokens": 0})
    verdict = verdict_of(tmp_path, flagged(finding("base", 1), None), flagged(cold, None))
    assert "prefix_caching_off" not in names(verdict)
    said = why_not(verdict, "prefix_caching_off")
    assert "was on" not in said
    assert "not shown to have been off" in said
