"""Windows that no sound engine would send: each ends in a clear answer or a clear error, never in a traceback or a warning.

An attack takes the rows of a sound run and breaks them; all warnings are errors. What is expected of an attack beside that
stands in its docstring and is checked below.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts
from diagnosis.judge import judge
from diagnosis.report import render_markdown
from diagnosis.telling.text import render
from diagnosis.telling.verdict import Verdict
from diagnosis.windows import Chosen
from engine_probe.errors import KvscopeError
from store.interface import Store, Window
from tests.diagnosed import add, as_run, judged, runs, stored, with_client
from tests.factories import facts, request_facts
from tests.simulate import Rows, Setup, at_level

NS = 1_000_000_000
HOUR_NS = 3600 * NS
INSTANTS = ("at_ns", "arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns", "end_ns")
TOKENS = ("first_token_ns", "last_token_ns", "token_ns", "prefill_s", "decode_s", "output_tokens", "stalled_s")
Attack = Callable[[Rows], None]
ATTACKS: dict[str, Attack] = {}


def attack(made: Attack) -> Attack:
    ATTACKS[made.__name__] = made
    return made


def set_all(rows: Rows, kind: str, **values: Any) -> None:
    for row in rows[kind]:
        row.update(values)


def no_tokens(row: dict[str, Any], *, state: str, after_ns: int) -> None:
    row.update(
        dict.fromkeys((*TOKENS, "first_scheduled_ns", "queue_s")), state=state, end_ns=row["arrival_ns"] + after_ns
    )


# how many, and how they ended


@attack
def one_request(rows: Rows) -> None:
    rows["request"] = rows["request"][:1]


@attack
def none_finished(rows: Rows) -> None:
    for row in rows["request"]:
        no_tokens(row, state="failed", after_ns=2 * NS)


@attack
def all_aborted_midway(rows: Rows) -> None:
    set_all(rows, "request", state="aborted")


@attack
def all_rejected_at_once(rows: Rows) -> None:
    for row in rows["request"]:
        no_tokens(row, state="rejected", after_ns=0)


@attack
def a_burst_of_timeouts(rows: Rows) -> None:
    for row in rows["request"][-12:]:
        no_tokens(row, state="aborted", after_ns=30 * NS)


@attack
def only_one_token_each(rows: Rows) -> None:
    for row in rows["request"]:
        first = row["first_token_ns"]
        row.update(output_tokens=1, last_token_ns=first, token_ns=[first], decode_s=0.0)


@attack
def only_warm_up(rows: Rows) -> None:
    set_all(rows, "request", labels={"phase": "warmup"})


# who, and how often


@attack
def every_row_twice(rows: Rows) -> None:
    rows["request"] += copy.deepcopy(rows["request"])


@attack
def retries_under_one_id(rows: Rows) -> None:
    for row in copy.deepcopy(rows["request"][:30]):
        row.update({name: row[name] + NS for name in INSTANTS}, attempt=1, token_ns=[t + NS for t in row["token_ns"]])
        rows["request"].append(row)
    for row in rows["request"][:30]:
        no_tokens(row, state="failed", after_ns=NS // 2)


@attack
def one_id_for_all(rows: Rows) -> None:
    set_all(rows, "request", request_id="x")


@attack
def names_full_of_markup(rows: Rows) -> None:
    for i, row in enumerate(rows["request"]):
        row.update(request_id=f"é|`'\n\"<b>{i}", tenant="a'|b\n", workload="x" * 3000)


@attack
def a_tenant_for_each_request(rows: Rows) -> None:
    for i, row in enumerate(rows["request"]):
        row.update(tenant=f"t{i}", workload=f"w{i}")


@attack
def two_workers_of_different_size(rows: Rows) -> None:
    for i, row in enumerate(rows["request"]):
        row["worker"] = f"w{i % 2}"
    rows["worker"].append(
        {**rows["worker"][0], "worker": "w1", "num_blocks": 17, "block_size": 32, "flags": {"max_num_seqs": "x"}}
    )


@attack
def no_worker_named(rows: Rows) -> None:
    for kind in rows:
        set_all(rows, kind, worker=None)


@attack
def every_other_worker_named(rows: Rows) -> None:
    for row in rows["request"][::2]:
        row["worker"] = None


@attack
def steps_of_another_worker(rows: Rows) -> None:
    set_all(rows, "step", worker="elsewhere")


@attack
def a_worker_without_size(rows: Rows) -> None:
    set_all(rows, "worker", block_size=0, num_blocks=0, flags={"max_num_seqs": "0"})


@attack
def no_worker_facts(rows: Rows) -> None:
    rows["worker"] = []


# client and engine


@attack
def a_third_without_engine_row(rows: Rows) -> None:
    rows["request"] = [row for i, row in enumerate(with_client(rows)["request"]) if row["vantage"] == "client" or i % 3]


@attack
def a_client_an_hour_ahead(rows: Rows) -> None:
    rows["request"] = with_client(rows, skew_s=3600.0)["request"]


@attack
def a_client_that_is_faster_than_the_engine(rows: Rows) -> None:
    rows["request"] = with_client(rows)["request"]
    for row in rows["request"]:
        if row["vantage"] == "client":
            row["first_token_ns"] = row["arrival_ns"] + 1


@attack
def nothing_but_arrival_and_first_token(rows: Rows) -> None:
    kept = ("at_ns", "request_id", "vantage", "state", "arrival_ns", "first_token_ns")
    rows["request"] = [{key: row[key] for key in kept} for row in rows["request"]]
    for kind in ("step", "block", "worker", "sample", "mark"):
        rows[kind] = []


@attack
def spans_and_metrics_only(rows: Rows) -> None:
    seen = at_level(rows, "otlp")
    for kind in rows:
        rows[kind] = seen.get(kind, [])


@attack
def no_engine_in_one_window(rows: Rows) -> None:
    seen = at_level(rows, "client")
    for row in seen["request"]:
        row["vantage"] = "engine"
    for kind in rows:
        rows[kind] = seen.get(kind, [])


@attack
def only_the_router_saw_it(rows: Rows) -> None:
    set_all(rows, "request", vantage="router")


# values


@attack
def negative_phases(rows: Rows) -> None:
    set_all(rows, "request", queue_s=-5.0, decode_s=-1.0, frontend_s=-0.1)


@attack
def phases_of_ages(rows: Rows) -> None:
    set_all(rows, "request", queue_s=1e9, prefill_s=1e12, decode_s=1e15)


@attack
def infinite_and_nan(rows: Rows) -> None:
    set_all(rows, "request", queue_s=float("inf"), prefill_s=float("nan"))
    set_all(rows, "step", duration_s=float("inf"))
    set_all(rows, "sample", value=float("nan"))


@attack
def empty_prompts(rows: Rows) -> None:
    set_all(rows, "request", prompt_tokens=0, cached_tokens=0, computed_tokens=0, prompt_blocks=[])


@attack
def more_cached_than_there_is(rows: Rows) -> None:
    set_all(rows, "request", cached_tokens=10**6, computed_tokens=None)


@attack
def counts_beyond_all_reason(rows: Rows) -> None:
    set_all(rows, "request", prompt_tokens=2**62, cached_tokens=2**61, computed_tokens=2**61, output_tokens=2**62)


@attack
def one_hash_for_all_blocks(rows: Rows) -> None:
    set_all(rows, "request", prompt_blocks=[2**64 - 1] * 3)
    set_all(rows, "block", block_hash=2**64 - 1)


@attack
def blocks_without_hash(rows: Rows) -> None:
    set_all(rows, "block", block_hash=None)


@attack
def caches_cleared_all_the_time(rows: Rows) -> None:
    rows["block"] += [{**row, "change": "cleared", "block_hash": None} for row in rows["block"][::50]]


@attack
def idle_steps_only(rows: Rows) -> None:
    set_all(rows, "step", duration_s=0.0, num_running=0, prefill_tokens=0, decode_tokens=0)


@attack
def steps_that_know_nothing(rows: Rows) -> None:
    rows["step"] = [{key: row[key] for key in ("worker", "at_ns", "step")} for row in rows["step"]]


@attack
def counters_that_restart_all_the_time(rows: Rows) -> None:
    for row in rows["sample"][::3]:
        row["value"] = 0.0


@attack
def marks_that_make_no_sense(rows: Rows) -> None:
    at = rows["request"][0]["at_ns"]
    for kind, attrs in (
        ("gap", {"dropped_rows": "many"}),
        ("clock", {"error_s": "big"}),
        ("clock", None),
        ("worker_up", None),
    ):
        rows["mark"].append({"at_ns": at, "mark": kind, "attrs": attrs})


# time


@attack
def everything_at_one_instant(rows: Rows) -> None:
    at = rows["request"][0]["arrival_ns"]
    zero = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "frontend_s", "stalled_s"), 0.0)
    for row in rows["request"]:
        row.update(zero, **dict.fromkeys(INSTANTS, at), token_ns=[at] * len(row["token_ns"]))


@attack
def everybody_arrived_at_once(rows: Rows) -> None:
    set_all(rows, "request", arrival_ns=rows["request"][0]["arrival_ns"])


@attack
def all_latencies_equal(rows: Rows) -> None:
    for row in rows["request"]:
        at = row["arrival_ns"]
        row.update(first_scheduled_ns=at, first_token_ns=at + NS // 10, last_token_ns=at + NS, end_ns=at + NS)
        row.update(
            token_ns=[at + NS // 10, at + NS], queue_s=0.0, prefill_s=0.1, decode_s=0.9, stalled_s=0.0, output_tokens=2
        )


@attack
def tokens_before_their_request(rows: Rows) -> None:
    for row in rows["request"]:
        row["first_token_ns"] = row["arrival_ns"] - NS


@attack
def tokens_in_the_wrong_order(rows: Rows) -> None:
    for row in rows["request"]:
        row["token_ns"] = row["token_ns"][::-1]


@attack
def token_times_of_a_few(rows: Rows) -> None:
    for row in rows["request"][4:]:
        row["token_ns"] = None


@attack
def empty_and_absent_token_times(rows: Rows) -> None:
    for i, row in enumerate(rows["request"]):
        row["token_ns"] = [] if i % 2 else None


@attack
def chunks_that_do_not_count(rows: Rows) -> None:
    for i, row in enumerate(rows["request"]):
        n = len(row["token_ns"])
        row["token_counts"] = [[0] * n, [None] * n, [1]][i % 3]


@attack
def streams_without_end(rows: Rows) -> None:
    set_all(rows, "request", end_ns=None, last_token_ns=None)


@attack
def a_request_of_three_years(rows: Rows) -> None:
    for row in rows["request"][:2]:
        row.update(end_ns=row["end_ns"] + 10**17, last_token_ns=row["last_token_ns"] + 10**17)


pytestmark = pytest.mark.usefixtures("few_replicates")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A sound baseline, also as a client sees it, and a run for each attack."""
    sound = runs({"base": {}, "plain": {"seed": 3, "num_blocks": 250}}, Setup(num_requests=60, output_tokens=(8, 24)))
    sound["base"] = with_client(sound["base"])
    with stored(tmp_path_factory.mktemp("attacks") / "store.duckdb", [sound["base"]]) as opened:
        parts = []
        for name, made in ATTACKS.items():
            rows = copy.deepcopy(sound["plain"])
            made(rows)
            parts.append(as_run(rows, name))
        add(opened, parts)
        yield opened


@cache
def asked(store: Store, base: str, suspect: str, metric: str) -> Verdict | KvscopeError:
    try:
        return judged(store, base, suspect, metric)
    except KvscopeError as error:
        return error


def answer(store: Store, base: str, suspect: str, metric: str) -> Verdict | KvscopeError:
    """The verdict, once it was shown to be whole; or the error, once it was shown to say something."""
    verdict = asked(store, base, suspect, metric)
    if isinstance(verdict, KvscopeError):
        assert len(verdict.message) > 20
        assert verdict.http_status < 500, "it is the question or the data, not us"
        return verdict
    document = verdict.to_dict()
    json.dumps(document, allow_nan=False)
    assert verdict.verdict.endswith(".")
    assert "nan" not in verdict.verdict.split()
    for column in ("mean_s", "p99_s", "judged_s"):
        told, whole = sum(getattr(row, column) for row in verdict.attribution), getattr(verdict.delta, column)
        assert told == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert verdict.causes == [] or verdict.status != "no_change"
    assert "None" not in render(document, sql=False)
    assert "\n\n\n" not in render_markdown(document, version="1")
    return verdict


@pytest.mark.parametrize("name", ATTACKS)
def test_ends_in_an_answer_or_an_error(store: Store, name: str) -> None:
    """As the suspect for TTFT; every third one as the baseline too, for E2E or TPOT in turn."""
    answer(store, "base", name, "ttft")
    turn = list(ATTACKS).index(name)
    if turn % 3 == 0:
        answer(store, name, "base", ("e2e", "tpot")[turn % 2])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("one_request", "Too few requests to say anything: 60 in the baseline, 1 in the suspect window"),
        ("only_warm_up", "holds no engine requests (60 warm-up requests are left out)"),
        ("all_rejected_at_once", "cannot be compared"),
        ("a_burst_of_timeouts", "1 separate episode of slow ones"),
        ("empty_prompts", "no kind of request in common"),
        ("counts_beyond_all_reason", "no kind of request in common"),
        (
            "only_the_router_saw_it",
            "were not seen from one vantage (base by client, engine and only_the_router_saw_it by router)",
        ),
        ("tokens_before_their_request", "60 with instants in the wrong order"),
        ("none_finished", "2.00 s or more"),
    ],
)
def test_what_is_said(store: Store, name: str, says: str) -> None:
    """The reason, in the words of the person who asked."""
    found = answer(store, "base", name, "ttft")
    assert says in (found.verdict if isinstance(found, Verdict) else found.message)


@pytest.mark.parametrize(
    ("name", "check", "status"),
    [
        ("every_row_twice", "duplicates", "ok"),
        ("negative_phases", "values", "warning"),
        ("phases_of_ages", "phases", "contradiction"),
        ("a_third_without_engine_row", "engine_rows", "warning"),
        ("a_client_that_is_faster_than_the_engine", "client_ttft", "contradiction"),
        ("streams_without_end", "gaps", "ok"),
        ("marks_that_make_no_sense", "gaps", "warning"),
        ("none_finished", "unfinished", "warning"),
    ],
)
def test_what_quality_finds(store: Store, name: str, check: str, status: str) -> None:
    """The check that finds it, about the suspect window."""
    found = answer(store, "base", name, "ttft")
    assert isinstance(found, Verdict)
    said = [row for row in found.quality if row["check"] == check and row["statement"].startswith(name)]
    assert [row["status"] for row in said] == [status]


def test_a_client_ahead_of_its_time_changes_nothing(store: Store) -> None:
    """Instants of two vantages are never subtracted: the verdict's numbers are those of the client without skew."""
    ahead, plain = (
        asked(store, "base", name, "ttft") for name in ("a_client_an_hour_ahead", "a_third_without_engine_row")
    )
    assert isinstance(ahead, Verdict)
    assert isinstance(plain, Verdict)
    assert ahead.vantage == "client"
    assert ahead.delta == plain.delta


def _window(count: int, slow: float, name: str) -> Facts:
    rng = np.random.default_rng(count)
    prefill = rng.gamma(4.0, 0.025, count) * slow
    requests = request_facts(
        np.cumsum(rng.exponential(0.2, count)),
        queue=[0.0] * count,
        prefill=prefill,
        decode=rng.gamma(4.0, 0.25, count),
        prompt_tokens=rng.integers(50, 400, count),
        output_tokens=rng.integers(2, 60, count),
        computed_tokens=rng.integers(50, 400, count),
    )
    return facts(requests, name=name)


@pytest.mark.parametrize(("n_base", "n_suspect"), [(30, 100_000), (30_000, 30)])
def test_windows_of_very_different_size(n_base: int, n_suspect: int) -> None:
    """30 requests against 100,000, or 30,000 against 30, three times as slow: the small window decides what can be said, and the mean can be."""
    chosen = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")
    verdict = judge(_window(n_base, 1.0, "baseline"), _window(n_suspect, 3.0, "suspect"), chosen, "ttft", "0.99")
    assert verdict.n == {"baseline": n_base, "suspect": n_suspect}
    assert verdict.delta.interval_95 is None
    assert verdict.delta.mean_s == pytest.approx(0.2, abs=0.05)
    assert verdict.verdict.startswith("Mean TTFT rose")
    told = sum(row.p99_s for row in verdict.attribution)
    assert told == pytest.approx(verdict.delta.p99_s, abs=1e-9)
