"""The read API of a real collector, over rows whose answers are worked out by hand."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from tests.integration.collector_harness import NOW_NS, Collector, request_row, running, step_row

S = 1_000_000_000
MS = 1_000_000


def requests() -> list[dict[str, Any]]:
    """100 client requests, one a second; TTFT of request i is (i + 1) ms; every tenth failed without a token."""
    rows = []
    for i in range(100):
        arrival = NOW_NS + i * S
        failed = i % 10 == 9
        rows.append(
            request_row(
                f"r{i:03}",
                worker=f"w{i % 2}",
                model="m",
                tenant="acme" if i < 50 else "umbrella",
                state="failed" if failed else "finished",
                arrival_ns=arrival,
                first_token_ns=None if failed else arrival + (i + 1) * MS,
                last_token_ns=None if failed else arrival + 400 * MS,
                at_ns=arrival + 400 * MS,
                token_ns=None if failed else [arrival + 200 * MS, arrival + 300 * MS, arrival + 400 * MS],
                num_preemptions=i % 3,
            )
        )
    return rows


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running(tmp_path_factory.mktemp("reads") / "kvscope.duckdb", read={"max_points": 500}) as made:
        detailed = request_row(
            "detail",
            vantage="engine",
            worker="w9",
            run_id="run-1",
            queue_s=0.04,
            first_scheduled_ns=NOW_NS + 40 * MS,
            end_ns=NOW_NS + 301 * MS,
            spans=[
                {"phase": "queue", "start_ns": NOW_NS, "end_ns": NOW_NS + 40 * MS, "tokens": None},
                {"phase": "prefill", "start_ns": NOW_NS + 40 * MS, "end_ns": NOW_NS + 100 * MS, "tokens": 512},
            ],
        )
        rows = {
            "request": [*requests(), detailed],
            "step": [
                step_row(i, worker="w9", run_id="run-1", num_running=i, num_preempted=i % 2) for i in range(1, 40)
            ],
            "route": [{"request_id": "detail", "at_ns": NOW_NS + 1, "chosen": "w9", "policy": "rr", "run_id": "run-1"}],
            "transfer": [
                {"request_id": "detail", "at_ns": NOW_NS + 60 * MS, "wire_s": 0.01, "outcome": "ok", "run_id": "run-1"}
            ],
            "block": [
                {
                    "request_id": "detail",
                    "at_ns": NOW_NS + 50 * MS,
                    "change": "hit",
                    "block_hash": 2**64 - 1,
                    "run_id": "run-1",
                }
            ],
            "sample": [
                {"name": "preemptions_total", "at_ns": NOW_NS + i * S, "value": value, "worker": "w0"}
                for i, value in enumerate([3.0, 5.0, 9.0, 1.0, 2.0])
            ],
            "mark": [
                {"at_ns": NOW_NS - 5 * S, "mark": "deployed", "text": "v2", "run_id": "run-1"},
                {"at_ns": NOW_NS + 1, "mark": "fault", "subject": "w0"},
            ],
        }
        made.post(rows).raise_for_status()
        yield made


def get(collector: Collector, path: str, **params: Any) -> Any:
    answer = collector.client.get(f"/api/v1/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(collector: Collector, path: str, **params: Any) -> str:
    answer = collector.client.get(f"/api/v1/{path}", params=params)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    return str(answer.json()["detail"])


def test_newest_requests_come_first(collector: Collector) -> None:
    """Without parameters: live rows by arrival; rows of runs are not among them."""
    page = get(collector, "requests", limit=3)
    assert [row["request_id"] for row in page["requests"]] == ["r099", "r098", "r097"]
    assert page["window"] == "all live rows"
    assert page["requests"][1]["ttft_s"] == pytest.approx(0.099)
    assert page["requests"][0]["ttft_s"] is None


@pytest.mark.parametrize("sort", ["arrival", "ttft", "e2e", "preemptions", "queue"])
@pytest.mark.parametrize("order", ["desc", "asc"])
def test_pages_in_any_order_hold_every_request_once(collector: Collector, sort: str, order: str) -> None:
    """Ties, unknown values and all: following the cursor gives all 100, each once, in order."""
    rows: list[dict[str, Any]] = []
    cursor = None
    while True:
        params = {"sort": sort, "order": order, "limit": 7} | ({} if cursor is None else {"cursor": cursor})
        page = get(collector, "requests", **params)
        rows += page["requests"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        assert len(page["requests"]) == 7
    assert len(rows) == len({row["request_id"] for row in rows}) == 100
    column = {"arrival": "arrival_ns", "preemptions": "num_preemptions", "queue": "queue_s"}.get(sort, f"{sort}_s")
    known = [row[column] for row in rows if row[column] is not None]
    assert known == sorted(known, reverse=order == "desc")
    assert [row[column] for row in rows] == known + [None] * (100 - len(known)), "unknown comes last"


def test_rows_that_arrive_meanwhile_shift_no_page(collector: Collector) -> None:
    """The second page continues after the last row of the first, though a newer row came in."""
    first = get(collector, "requests", limit=2, tenant="umbrella")
    late = request_row("late", tenant="umbrella", arrival_ns=NOW_NS + 1000 * S, run_id=None)
    collector.post({"request": [late | {"at_ns": NOW_NS + 1000 * S}]}).raise_for_status()
    second = get(collector, "requests", limit=2, tenant="umbrella", cursor=first["next_cursor"])
    assert [row["request_id"] for row in first["requests"] + second["requests"]] == ["r099", "r098", "r097", "r096"]


def test_filters_narrow_together(collector: Collector) -> None:
    """Worker, tenant, state, window and least TTFT: the ten that meet all."""
    window = f"{NOW_NS}/{NOW_NS + 50 * S}"
    page = get(collector, "requests", worker="w0", tenant="acme", state="finished", window=window, min_ttft_s=0.03)
    assert [row["request_id"] for row in page["requests"]] == [f"r{i:03}" for i in range(48, 28, -2)]
    assert get(collector, "requests", worker="nobody")["requests"] == []
    assert len(get(collector, "requests", window="run-1")["requests"]) == 1


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"sort": "beauty"}, "query.sort"),
        ({"limit": 0}, "query.limit"),
        ({"limit": 10**6}, "at most 5000"),
        ({"colour": "red"}, "has no parameter 'colour'; it takes window, worker"),
        ({"limit": [1, 2]}, "comes 2 times"),
        ({"state": "open", "worker": "w0"}, "only limit and worker_matches beside it, not worker"),
        ({"worker_matches": "(w0"}, "no pattern"),
        ({"state": "open", "worker_matches": "(w0"}, "no pattern"),
        ({"state": "open", "window": "run-1", "sort": "ttft"}, "not sort, window"),
        ({"window": "never-imported"}, "run-1"),
        ({"window": "tomorrow/yesterday"}, "ISO 8601"),
        ({"window": "now/-15m"}, "ends before"),
        ({"cursor": "!!"}, "cursor"),
        ({"cursor": "WzFd"}, "cursor"),
        ({"cursor": "W1tb" * 4_000}, "cursor"),  # 12,000 brackets
        ({"min_ttft_s": "-1"}, "min_ttft_s"),
        ({"min_ttft_s": "nan"}, "min_ttft_s"),
    ],
)
def test_parameter_that_makes_no_sense_is_named(collector: Collector, params: dict[str, Any], said: str) -> None:
    """400 with the parameter, what was sent, and what is possible."""
    assert said in refused(collector, "requests", **params)


def test_patterns_narrow_as_labels_do_in_promql(collector: Collector) -> None:
    """The whole name by RE2; `.*` is all of them, those without a name too; names that are not told are the empty name."""

    def found(**params: str) -> set[str]:
        return {row["request_id"] for row in get(collector, "requests", limit=200, **params)["requests"]}

    assert found(worker_matches=".*") == found()
    assert found(worker_matches="(w0|w7)") == found(worker="w0")
    assert found(worker_matches="w") == set()
    assert found(tenant_matches="acme", worker_matches="w1") == {f"r{i:03}" for i in range(1, 50, 2)}
    assert found(tenant_matches="") == found() - found(tenant="acme") - found(tenant="umbrella")


def test_cursor_of_another_order_is_refused(collector: Collector) -> None:
    """A page in another order does not continue this one."""
    cursor = get(collector, "requests", limit=1)["next_cursor"]
    assert "another order" in refused(collector, "requests", sort="ttft", cursor=cursor)


def test_one_request_with_everything_told_of_it(collector: Collector) -> None:
    """Every column of its rows, its routing and its transfers."""
    found = get(collector, "requests/detail")
    assert [row["vantage"] for row in found["rows"]] == ["engine"]
    assert found["rows"][0]["spans"][1] == {
        "phase": "prefill",
        "start_ns": NOW_NS + 40 * MS,
        "end_ns": NOW_NS + 100 * MS,
        "tokens": 512,
    }
    assert found["rows"][0]["ttft_s"] == pytest.approx(0.1)
    assert (found["routes"][0]["chosen"], found["transfers"][0]["outcome"]) == ("w9", "ok")


def test_what_is_left_out_of_a_request_is_said(collector: Collector) -> None:
    """An id that was used 1,001 times, over 2,001 steps and 101 marks: cut, and named."""
    at = [NOW_NS + i for i in range(2_001)]
    rows = {
        "request": [
            request_row("again", run_id="many", vantage="engine", worker="w8", arrival_ns=NOW_NS) for _ in at[:1_001]
        ],
        "step": [step_row(i, worker="w8", run_id="many", at_ns=instant) for i, instant in enumerate(at)],
        "mark": [{"at_ns": instant, "mark": "fault", "run_id": "many"} for instant in at[:101]],
        "block": [{"at_ns": NOW_NS, "change": "hit", "request_id": "again", "run_id": "many"} for _ in at],
    }
    collector.post(rows).raise_for_status()
    found = get(collector, "requests/again")
    assert (len(found["rows"]), found["truncated"]) == (1_000, ["rows"])
    course = get(collector, "requests/again/timeline")
    assert course["truncated"] == ["rows", "blocks", "steps", "marks"]
    assert (len(course["steps"]), len(course["marks"])) == (2_000, 100)
    assert get(collector, "requests/detail/timeline")["truncated"] == []


def test_unknown_request_is_404(collector: Collector) -> None:
    """Also where it is stored, but not in the window asked for; and for its timeline."""
    for path in ("requests/nobody", "requests/nobody/timeline"):
        answer = collector.client.get(f"/api/v1/{path}")
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:kvscope:error:not-found")
    assert collector.client.get("/api/v1/requests/r001", params={"window": "run-1"}).status_code == 404


def test_request_whose_id_holds_slashes_is_found(collector: Collector) -> None:
    """An id is what the client sent, not what fits a path."""
    collector.post({"request": [request_row("team/a b/1?x#y", run_id="odd")]}).raise_for_status()
    answer = collector.client.get("/api/v1/requests/team%2Fa%20b%2F1%3Fx%23y/timeline")
    assert answer.json()["request_id"] == "team/a b/1?x#y"


@pytest.mark.parametrize("part", ["timeline", "perfetto"])
def test_request_whose_own_id_ends_like_a_part_of_one_is_found(collector: Collector, part: str) -> None:
    """Within an id a slash is %2F, so both are told apart: the request, and that part of it."""
    collector.post({"request": [request_row(f"shop/{part}", run_id="odd")]}).raise_for_status()
    found = collector.client.get(f"/api/v1/requests/shop%2F{part}").json()
    assert [row["request_id"] for row in found["rows"]] == [f"shop/{part}"]
    assert collector.client.get(f"/api/v1/requests/shop%2F{part}/timeline").json()["request_id"] == f"shop/{part}"
    assert collector.client.get(f"/api/v1/requests/shop/{part}").status_code == 404
    spelled = f"shop%2F{part}/%{ord(part[0]):X}{part[1:]}"
    assert set(get(collector, f"requests/{spelled}")) == set(get(collector, f"requests/shop%2F{part}/{part}"))


@pytest.mark.parametrize("request_id", ["a\nb", "a\n", "\n/timeline", "\r\n/perfetto\n"])
def test_request_whose_id_holds_line_breaks_is_found(collector: Collector, request_id: str) -> None:
    """Its rows, its course, its trace and its page, and not those of the id without them."""
    collector.post({"request": [request_row(request_id, run_id="odd")]}).raise_for_status()
    path = f"requests/{quote(request_id, safe='')}"
    assert get(collector, path)["request_id"] == request_id
    assert get(collector, f"{path}/timeline")["request_id"] == request_id
    assert get(collector, f"{path}/perfetto")["otherData"]["requests"] == 1
    assert collector.client.get(f"/{path}").status_code == 200


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("timeline", "timeline"),
        ("%2Ftimeline", "/timeline"),
        ("timeline%2Ftimeline", "timeline/timeline"),
        ("a%2Ftimeline%2Fperfetto", "a/timeline/perfetto"),
        ("..%2F..%2Fetc", "../../etc"),
        ("%3Cb%3Ex%3C%2Fb%3E", "<b>x</b>"),
        ("%E2%80%AEx", "\u202ex"),
    ],
)
def test_an_odd_id_names_a_request_that_there_is_not(collector: Collector, path: str, named: str) -> None:
    """404 with the id as it was meant, and as JSON, in which it is no page."""
    found = collector.client.get(f"/api/v1/requests/{path}")
    assert (found.status_code, found.headers["content-type"]) == (404, "application/problem+json")
    assert repr(named) in found.json()["detail"]


def test_timeline_tells_the_course_in_order(collector: Collector) -> None:
    """Arrival, routing, phases, transfer, block hit, tokens, end; 30 steps lived through; the mark before."""
    course = get(collector, "requests/detail/timeline", window="run-1")
    assert [event["what"] for event in course["events"]] == [
        "arrived",
        "phase queue",
        "routed",
        "first scheduled",
        "phase prefill",
        "block hit",
        "transfer",
        "first token",
        "last token",
        "finished",
    ]
    transfer = next(event for event in course["events"] if event["what"] == "transfer")
    assert transfer["end_ns"] - transfer["start_ns"] == 10 * MS
    block = next(event for event in course["events"] if event["what"] == "block hit")
    assert block["facts"]["block_hash"] == 2**64 - 1
    assert [step["step"] for step in course["steps"]] == list(range(1, 31))
    assert [mark["text"] for mark in course["marks"]] == ["v2"]


@pytest.mark.parametrize(
    "path",
    [
        "requests",
        "requests/r001",
        "requests/r001/timeline",
        "series",
        "marks",
        "diagnosis",
        "findings",
        "reports",
        "capacity",
    ],
)
def test_parameter_that_a_route_does_not_have_is_refused(collector: Collector, path: str) -> None:
    """A misspelt window must not be answered about all rows; every route of the API says so, with what it takes."""
    needed = {"metric": "ttft"} if path == "series" else {}
    assert "has no parameter 'windw'; it takes" in refused(collector, path, windw="-15m/now", **needed)
    name = "limit" if path == "findings" else "window" if path not in ("diagnosis", "reports") else "baseline"
    assert "comes 2 times" in refused(collector, path, **{name: ["1", "2"]}, **needed)


def _cursor(*parts: Any) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(["arrival", True, *parts])).decode().rstrip("=")


@pytest.mark.parametrize(
    "parts",
    [
        (1, "x", "a", "client", "", 0, 1, ""),
        (1, 2, 3, 4, 5, 6, 7, 8),
        (True, True, "a", "client", "", 0, 1, ""),
        ("1", 1, "a", "client", "", 0, 1, ""),
        (None, 1, "a", "client", "", 0, 1, ""),
        (1, 1, "a", "client", "", 0, 1),
        (1, 1, "a", "client", "", 0, 1, "", 1),
        (1, 2**70, "a", "client", "", 0, 1, ""),
        (),
    ],
)
def test_cursor_that_was_made_up_is_refused(collector: Collector, parts: tuple[Any, ...]) -> None:
    """Right in form and wrong in its parts: 400, and nothing of it reaches the database."""
    assert "the cursor is none that this API gave" in refused(collector, "requests", cursor=_cursor(*parts))


def test_series_never_mixes_vantages(collector: Collector) -> None:
    """One request told by three: the client's numbers are drawn and named; others where asked for, or side by side."""
    told = [("client", 300), ("engine", 200), ("router", 250)]
    rows = [
        request_row("seen", vantage=vantage, run_id="seen", arrival_ns=NOW_NS, first_token_ns=NOW_NS + ms * MS)
        for vantage, ms in told
    ]
    collector.post({"request": rows}).raise_for_status()

    def drawn(**params: Any) -> Any:
        found = get(collector, "series", metric="ttft", window="seen", step_s=60, **params)
        return found["vantage"], [(line["labels"], line["points"][0][1:]) for line in found["series"]]

    assert drawn() == ("client", [({}, [pytest.approx(0.3), 1])])
    assert drawn(vantage="engine") == ("engine", [({}, [pytest.approx(0.2), 1])])
    vantage, lines = drawn(by="vantage")
    assert (vantage, [labels["vantage"] for labels, _ in lines]) == (None, ["client", "engine", "router"])
    assert get(collector, "series", metric="requests", window="seen", step_s=60)["series"][0]["points"] == [
        [NOW_NS // (60 * S) * 60 * S, 1, 1]
    ]


def test_series_of_exact_quantiles(collector: Collector) -> None:
    """P99 TTFT by 50 s: nearest rank of the 45 known values of each half: the largest, 49 and 99 ms."""
    window = f"{NOW_NS}/{NOW_NS + 100 * S}"
    found = get(collector, "series", metric="ttft", window=window, step_s=50)
    assert found["unit"] == "s"
    assert found["series"] == [
        {"labels": {}, "points": [[NOW_NS, pytest.approx(0.049), 45], [NOW_NS + 50 * S, pytest.approx(0.099), 45]]}
    ]
    median = get(collector, "series", metric="ttft", window=window, step_s=100, stat="0.5")
    # 90 values 1..100 without the tens; the 45th smallest is 49 (nine a decade: 45 = 5 * 9).
    assert median["series"][0]["points"] == [[NOW_NS, pytest.approx(0.049), 90]]


@pytest.mark.parametrize(
    ("metric", "stat", "expected"),
    [
        ("requests", None, (100, 100)),
        ("ttft", "count", (90, 90)),
        ("ttft", "min", (0.001, 90)),
        ("ttft_s", "max", (0.099, 90)),
        ("itl", "mean", (0.1, 180)),
        ("itl", "0.99", (0.1, 180)),
        ("sample.preemptions_total", "last", (2.0, 5)),
        ("sample.preemptions_total", "increase", (2 + 4 + 1 + 1, 4)),
    ],
)
def test_series_by_kind_of_number(
    collector: Collector, metric: str, stat: str | None, expected: tuple[float, int]
) -> None:
    """Counts, gaps between tokens, scraped numbers; a counter that restarts at 1 after 9 has grown by 1."""
    window = f"{NOW_NS}/{NOW_NS + 100 * S}"
    params = {"metric": metric, "window": window, "step_s": 100} | ({} if stat is None else {"stat": stat})
    ((_, value, count),) = get(collector, "series", **params)["series"][0]["points"]
    assert (value, count) == (pytest.approx(expected[0]), expected[1])


def test_series_by_group_and_default_step(collector: Collector) -> None:
    """One line a worker; the step is chosen so that a line has at most 120 points."""
    found = get(collector, "series", metric="requests", by="worker,state", window=f"{NOW_NS}/{NOW_NS + 100 * S}")
    labels = [line["labels"] for line in found["series"]]
    assert {"worker": "w0", "state": "finished"} in labels
    assert len(labels) == 3, "only the odd ones fail"
    assert found["step_s"] == 1
    steps = get(collector, "series", metric="step.num_running", window="run-1", step_s=1)
    assert steps["series"][0]["points"] == [[NOW_NS, pytest.approx(20.0), 39]]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"metric": "beauty"}, "no metric 'beauty'"),
        ({"metric": "step.beauty"}, "no number"),
        ({"metric": "step.at_ns"}, "no number"),
        ({"metric": "block.melted"}, "evicted"),
        ({"metric": "ttft", "stat": "1.5"}, "quantile"),
        ({"metric": "ttft", "stat": "increase"}, "counters"),
        ({"metric": "ttft", "by": "request_id"}, "cannot be grouped"),
        ({"metric": "ttft; DROP TABLE request"}, "no metric"),
        ({"metric": "requests", "stat": "0.5"}, "requests are counted"),
        ({"metric": "step.num_running", "vantage": "client"}, "has no vantage"),
        ({"metric": "ttft", "vantage": "moon"}, "query.vantage"),
        ({"metric": "step.step FROM step --"}, "no number"),
        ({"metric": "ttft", "step_s": 0}, "step_s"),
        ({}, "query.metric"),
    ],
)
def test_series_that_cannot_be_is_refused(collector: Collector, params: dict[str, Any], said: str) -> None:
    """With what is possible; text of a caller never becomes SQL."""
    assert said in refused(collector, "series", **params)


def test_series_of_too_many_points_is_refused(collector: Collector) -> None:
    """The limit is said, and how to stay below it."""
    for i in range(6):
        rows = [request_row("p", run_id="points", arrival_ns=NOW_NS + (i * 100 + k) * S) for k in range(100)]
        collector.post({"request": [row | {"at_ns": row["arrival_ns"]} for row in rows]}).raise_for_status()
    assert "more than 500 points" in refused(collector, "series", metric="requests", window="points", step_s=1)


def test_series_of_many_groups_takes_longer_buckets(collector: Collector) -> None:
    """120 buckets of 20 workers would be 2,400 points where 500 are allowed: buckets of 30 s are 400, and every row is in one."""
    rows = [
        request_row(f"{worker}", run_id="groups", worker=f"w{worker}", arrival_ns=(NOW_NS // (60 * S) * 60 + 5 * k) * S)
        for worker in range(20)
        for k in range(120)
    ]
    collector.post({"request": [row | {"at_ns": row["arrival_ns"]} for row in rows]}).raise_for_status()
    found = get(collector, "series", metric="requests", window="groups", by="worker")
    assert found["step_s"] == 30
    points = [point for one in found["series"] for point in one["points"]]
    assert len(points) == 400
    assert sum(point[1] for point in points) == 2400
    assert "choose a larger step" in refused(
        collector, "series", metric="requests", window="groups", by="worker", step_s=5
    )


def test_marks_are_set_and_read(collector: Collector) -> None:
    """A mark set over HTTP is on disk when 201 comes, with the time it was given or now."""
    before = time.time_ns()
    made = collector.client.post("/api/v1/marks", json={"mark": "canary", "subject": "w0", "attrs": {"share": "5 %"}})
    assert made.status_code == 201
    assert before <= made.json()["at_ns"] <= time.time_ns()
    (found,) = get(collector, "marks", mark="canary")["marks"]
    assert found == made.json()
    assert [mark["mark"] for mark in get(collector, "marks", window="run-1")["marks"]] == ["deployed"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"mark": "party"}, 400),
        ({}, 400),
        ({"mark": "deployed", "at_ns": 1_764_403_200}, 422),
        ({"mark": "deployed", "at_ns": 2**63}, 400),
        ({"mark": "deployed", "colour": "red"}, 400),
        ({"mark": "deployed", "text": "x" * 3000}, 400),
    ],
)
def test_bad_mark_is_refused(collector: Collector, body: dict[str, Any], status: int) -> None:
    """Unknown words, wrong units and unknown fields."""
    answer = collector.client.post("/api/v1/marks", json=body)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", ["marks", "sql"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"mark": }', "no sound JSON at character 9"),
        (b'{"sql": "SELECT 1"', "no sound JSON at character 18"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"sql": "\xff"}', "no UTF-8"),
        (b'{"max_rows": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    ],
    ids=["hole", "cut off", "deep", "no UTF-8", "huge number"],
)
def test_body_of_a_question_that_is_no_json_is_told_with_its_place(
    collector: Collector, path: str, body: bytes, said: str
) -> None:
    """A bad request as any other, for every route that takes JSON."""
    answer = collector.client.post(f"/api/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:kvscope:error:bad-request")
    assert said in answer.json()["detail"]


def test_sql_answers_with_columns_and_rows(collector: Collector) -> None:
    """Over tables and views, with 64-bit hashes intact; cut at max_rows and told."""
    question = {
        "sql": "SELECT request_id, arrival_ns FROM request WHERE run_id IS NULL ORDER BY 2 LIMIT 3",
        "max_rows": 2,
    }
    answer = collector.client.post("/api/v1/sql", json=question).json()
    assert answer["columns"] == [{"name": "request_id", "type": "VARCHAR"}, {"name": "arrival_ns", "type": "BIGINT"}]
    assert answer["rows"] == [["r000", NOW_NS], ["r001", NOW_NS + S]]
    assert answer["truncated"] is True
    lineage = collector.client.post("/api/v1/sql", json={"sql": "SELECT count(*) FROM evidence_lineage"}).json()
    assert lineage["rows"][0][0] >= 101


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"sql": "DROP TABLE request"}, {}, 400),
        ({"sql": "SELECT 1; SELECT 2"}, {}, 400),
        ({"sql": "SELECT * FROM read_csv('/etc/passwd')"}, {}, 400),
        ({"sql": "SELECT nothing FROM nowhere"}, {}, 400),
        ({"sql": ""}, {}, 400),
        ({"sql": "SELECT 1", "max_rows": -1}, {}, 400),
        ({"sql": "SELECT 1"}, {"content-type": "text/plain"}, 415),
    ],
)
def test_sql_that_is_not_allowed_is_refused(
    collector: Collector, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    """With a problem document; the collector does not notice."""
    answer = collector.client.post("/api/v1/sql", json=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert collector.count("request") > 100


def test_open_requests_and_workers_are_told_honestly(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing tells: an empty list and no claim. A router tells: the longest open first. Steps tell: counts."""
    with running(tmp_path_factory.mktemp("open") / "kvscope.duckdb") as collector:
        empty = get(collector, "requests", state="open")
        assert empty == {"told_by": [], "num_open": 0, "num_dropped": 0, "requests": [], "workers": []}
        now = time.time_ns()
        routes = [{"request_id": f"q{i}", "at_ns": now - i * S, "chosen": "w0", "router": "r"} for i in range(3)]
        steps = [step_row(7, worker="w0", at_ns=now - S, num_running=2)]
        collector.post({"route": routes, "step": steps}).raise_for_status()
        collector.post({"request": [request_row("q1", arrival_ns=now, at_ns=now)]}).raise_for_status()
        told = get(collector, "requests", state="open")
        assert told["told_by"] == ["route", "step"]
        assert [row["request_id"] for row in told["requests"]] == ["q2", "q0"]
        assert told["requests"][0]["open_s"] >= 2
        assert (told["workers"][0]["num_running"], told["workers"][0]["num_waiting_prefill"]) == (2, None)


def test_open_requests_of_some_workers(tmp_path: Path) -> None:
    """A pattern narrows requests and workers; it is matched as a whole."""
    with running(tmp_path / "kvscope.duckdb") as collector:
        now = time.time_ns()
        routes = [{"request_id": f"q{i}", "router": "r", "chosen": f"w{i}", "at_ns": now} for i in range(12)]
        steps = [step_row(1, worker=f"w{i}", at_ns=now) for i in (1, 10)]
        collector.post({"route": routes, "step": steps}).raise_for_status()
        told = get(collector, "requests", state="open", worker_matches="(w1|w3)")
        assert [row["request_id"] for row in told["requests"]] == ["q1", "q3"]
        assert [worker["worker"] for worker in told["workers"]] == ["w1"]
        assert len(get(collector, "requests", state="open", worker_matches=".*")["requests"]) == 12


def test_queries_beyond_the_limit_are_429(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One runs, one waits, the third is refused at once and may come again."""
    limits = {"max_concurrent": 1, "max_waiting": 1}
    with running(tmp_path_factory.mktemp("busy") / "kvscope.duckdb", read=limits) as collector:
        entered, leave = threading.Event(), threading.Event()

        def hold(*_: Any) -> str:
            entered.set()
            assert leave.wait(20)
            return "done"

        reads = collector.app.state.services.reads
        loop_calls: list[Any] = []
        import asyncio

        loop = _loop_of(collector)
        for _ in range(2):
            loop_calls.append(asyncio.run_coroutine_threadsafe(reads.run("test", hold), loop))
        assert entered.wait(10)
        answer = collector.client.get("/api/v1/requests")
        assert (answer.status_code, answer.json()["type"]) == (429, "urn:kvscope:error:too-many-queries")
        assert answer.headers["retry-after"] == "1"
        assert collector.client.get("/healthz").status_code == 200
        assert collector.client.get("/metrics").status_code == 200, "metrics do not wait behind queries"
        leave.set()
        assert [call.result(20) for call in loop_calls] == ["done", "done"]
        assert collector.client.get("/api/v1/requests").status_code == 200


def _loop_of(collector: Collector) -> Any:
    return collector.server.servers[0].get_loop()
