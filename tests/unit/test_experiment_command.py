"""`kvscope experiment run|sweep` in virtual time: what it prints, keeps and reads; and against a small endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.conftest import Ended
from tests.scripted_openai import ScriptedOpenAi
from tests.servers import free_port

SMALL = ("--requests", "24", "--warmup", "4", "--jobs", "1", "--own-tokens", "64", "--output-tokens", "4")
SHORT = ("--requests", "8", "--warmup", "2", "--shared-tokens", "64", "--own-tokens", "16", "--output-tokens", "3")
ENDPOINT = (*SHORT, "--rate", "200")

Kvscope = Callable[..., Ended]


@pytest.fixture
def out(tmp_path: Path) -> str:
    """A folder of its own."""
    return str(tmp_path / "out")


@pytest.fixture
def server() -> Iterator[ScriptedOpenAi]:
    """An endpoint whose cache can be emptied."""
    running = ScriptedOpenAi()
    yield running
    running.stop()


def document(ended: Ended) -> dict[str, Any]:
    """The one JSON document on stdout."""
    found: dict[str, Any] = json.loads(ended.out)
    return found


def kinds(found: dict[str, Any], pair: int = 0) -> list[str]:
    """Readings of a pair."""
    return [reading["kind"] for reading in found["contrasts"][pair]["reading"]]


def test_four_arms_by_default_with_everything_that_is_fixed(kvscope: Kvscope, out: str) -> None:
    """A, B, C, D; warm-up left out; load as it was; what nobody tells is null."""
    found = document(kvscope("experiment", "run", *SMALL, "--out", out, "--json"))
    assert [(arm["arm"], arm["start"]) for arm in found["arms"]] == [
        ("A", "cold"),
        ("B", "warm"),
        ("C", "cold"),
        ("D", "warm"),
    ]
    assert len(found["order"]) == 12
    assert {arm["num_requests"] for arm in found["arms"]} == {72}
    assert {arm["num_warmup_left_out"] for arm in found["arms"]} == {12}
    fixed = found["fixed"]
    assert fixed["tokenizer"] is None
    assert fixed["engine_flags.enable_prefix_caching"] == {
        "differs": {"A": "false", "B": "false", "C": "true", "D": "true"}
    }
    assert {
        "model",
        "hardware",
        "workers",
        "routing",
        "engine_flags",
        "sampling",
        "stop",
        "seed",
        "rate",
        "shared_ratio",
    } <= set(fixed)
    assert all(arm["arrival_rate"]["value"] > 0 and arm["concurrency"]["value"] > 0 for arm in found["arms"])
    assert kinds(found, 3) == ["too_few"]  # A to B: no difference, and too few for P99


def test_the_same_seed_gives_the_same_document(kvscope: Kvscope, tmp_path: Path) -> None:
    """To the nanosecond, in any folder; another seed another one."""
    runs = []
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        ended = kvscope("experiment", "run", *SMALL, "--seed", seed, "--out", str(tmp_path / name), "--json")
        runs.append({key: value for key, value in document(ended).items() if key != "folder"})
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0]["order"] != runs[2]["order"]


def test_every_row_of_every_run_is_kept(kvscope: Kvscope, out: str) -> None:
    """One folder a run, its rows named by it; warm-up is there, labelled."""
    kvscope("experiment", "run", *SMALL, "--out", out)
    for run in (f"{arm}/{repeat}" for arm in "ABCD" for repeat in (1, 2, 3)):
        table = pq.read_table(Path(out) / run / "kind=request", partitioning=None)
        assert set(table["run_id"].to_pylist()) == {run}
        assert table.num_rows == 28
        phases = [dict(labels).get("phase") for labels in table["labels"].to_pylist()]
        assert phases.count("warmup") == 4
        assert table["token_ns"].null_count == 0
        assert (Path(out) / run / "kind=step").is_dir()
        marks = pq.read_table(Path(out) / run / "kind=mark", partitioning=None).to_pylist()
        (begins,) = [mark for mark in marks if mark["mark"] == "experiment"]
        counted = [row["arrival_ns"] for row in table.to_pylist() if "phase" not in dict(row["labels"])]
        assert begins["at_ns"] == min(counted)
        assert dict(begins["attrs"])["arm"] == run[0]
    assert (Path(out) / "D" / "1" / "kind=block").is_dir()
    report = (Path(out) / "report.md").read_text()
    assert report.startswith("# Experiment: cache off and on\n\n## B to D\n")
    assert "## Held fixed" in report
    assert json.loads((Path(out) / "experiment.json").read_text())["order"]


def test_a_second_experiment_takes_the_place_of_the_first(kvscope: Kvscope, out: str) -> None:
    """Two arms of one's own after A to D: the folder holds the two alone."""
    kvscope("experiment", "run", *SMALL, "--no-blocks", "--out", out)
    kvscope("experiment", "run", *SMALL, "--no-blocks", "--out", out, "--arm", "x:", "--arm", "y:max_num_seqs=4")
    assert sorted(path.name for path in Path(out).iterdir()) == ["experiment.json", "report.md", "x", "y"]
    assert not list(Path(out).glob("*/*/kind=block"))


def test_arms_of_ones_own_differ_in_what_they_say(kvscope: Kvscope, out: str) -> None:
    """A canary of another release and other seats, against its control."""
    ended = kvscope(
        "experiment", "run", *SMALL, "--out", out, "--json", "--arm", "control:version=1", "--arm", "canary:version=2,max_num_seqs=2",
    )  # fmt: skip
    found = document(ended)
    assert [(pair["baseline"], pair["suspect"]) for pair in found["contrasts"]] == [("control", "canary")]
    assert found["fixed"]["engine_flags.max_num_seqs"] == {"differs": {"control": "256", "canary": "2"}}
    assert found["arms"][1]["settings"]["version"] == "2"


def test_a_closed_loop_keeps_its_clients_busy(kvscope: Kvscope, out: str) -> None:
    """Three in flight: never more, and about as many."""
    found = document(kvscope("experiment", "run", *SMALL, "--concurrency", "3", "--out", out, "--json"))
    assert {arm["concurrency_max"] for arm in found["arms"]} == {3}
    assert all(2 < arm["concurrency"]["value"] <= 3 for arm in found["arms"])
    cold, warm = found["arms"][2], found["arms"][3]
    assert cold["by_class"]["new"]["num_requests"] > warm["by_class"]["new"]["num_requests"]


LOCALITY = ("founding", "--arm", "off:cache=off,routing=round_robin", "--arm", "on:")
CAPACITY = ("founding-capacity", "--arm", "off:cache=off", "--arm", "on:", "--requests", "140", "--repeats", "3")
LOOKUP = ("--set", "lookup_s=0.05", "--requests", "110", "--warmup", "5", "--shared-tokens", "64", "--rate", "2")


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (LOCALITY, "locality", "only the worker with the hot prefix queues"),
        (CAPACITY, "capacity", "hits are fast but misses slow through eviction"),
        (LOOKUP, "lookup", "pays a fixed extra"),
    ],
)
def test_each_reading_from_a_run_of_its_own(
    kvscope: Kvscope, out: str, words: tuple[str, ...], kind: str, said: str
) -> None:
    """The first two are the built-in cases, by their warm arms. Exit code 1: something got worse."""
    ended = kvscope("experiment", "run", *words, "--no-blocks", "--jobs", "1", "--out", out, "--json")
    found = document(ended)
    assert kinds(found)[0] == kind
    reading = found["contrasts"][0]["reading"][0]
    assert said in reading["sentence"]
    assert len(reading["evidence"]) >= 2
    assert ended.code == 1
    if kind != "lookup":  # what the founding case is about: the mean falls and P99 rises, both beyond noise
        told = found["contrasts"][0]["difference"]["ttft"]
        assert told["mean"]["interval_95"][1] < 0
        assert told["p99"]["interval_95"][0] > 0


def test_sweep_finds_where_p99_breaks(kvscope: Kvscope, out: str) -> None:
    """One worker that takes 2 requests/s easily and not 64: the knee lies between, and the levels stand in order."""
    ended = kvscope(
        "experiment", "sweep", "--rate", "64,2", "--requests", "40", "--warmup", "2", "--shared-tokens", "4096", "--cache", "off",
        "--jobs", "1", "--out", out, "--json",
    )  # fmt: skip
    found = document(ended)
    assert ended.code == 0
    assert [level["load"] for level in found["levels"]] == [2, 64]
    assert (found["knee"]["load"], found["knee"]["breaks_at"]) == (2, 64)
    assert "rate" not in found["fixed"]
    assert pq.read_table(Path(out) / "loads" / "64" / "1" / "kind=request", partitioning=None).num_rows == 42
    text = kvscope("experiment", "sweep", "--concurrency", "1,2", "--requests", "20", "--jobs", "1", "--out", out).out
    assert "in flight" in text


def test_sweep_goes_up_by_itself(kvscope: Kvscope, out: str) -> None:
    """From 1 in flight, doubling, until a limit that is soon broken, then narrowed down: whole numbers, each once."""
    ended = kvscope(
        "experiment", "sweep", "--by", "concurrency", "--slo-ttft", "0.5", "--requests", "30", "--warmup", "2", "--cache", "off",
        "--shared-tokens", "8192", "--jobs", "1", "--out", out, "--json",
    )  # fmt: skip
    found = document(ended)
    loads = [level["load"] for level in found["levels"]]
    assert loads[:2] == [1, 2]
    assert len(set(loads)) == len(loads)
    assert found["knee"]["load"] in loads
    assert found["knee"]["breaks_at"] in loads


def test_an_endpoint_with_a_reset(kvscope: Kvscope, server: ScriptedOpenAi, out: str) -> None:
    """Twelve runs: each begins with a reset, cold ones have another; off is imitated and said; D hits where B cannot."""
    ended = kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out, "--json")
    found = document(ended)
    assert server.num_resets == 12 + 6
    by_name = {arm["arm"]: arm for arm in found["arms"]}
    assert by_name["D"]["vantage"] == "client"
    assert by_name["D"]["by_class"]["hit"]["num_requests"] > 0
    assert set(by_name["B"]["by_class"]) == {"new"}
    assert found["fixed"]["model"] == "m"
    assert found["fixed"]["engine_version"] == "9.9"
    assert found["fixed"]["hardware"] is None
    text = " ".join(found["notes"])
    assert "off is imitated" in text
    assert "/reset_prefix_cache before each run" in text
    assert "latency counts from the instant at which a call was due" in text
    assert {path.name for path in (Path(out) / "D" / "1").iterdir()} == {"kind=request", "kind=mark"}
    ids = pq.read_table(Path(out) / "D" / "2" / "kind=request", partitioning=None)["request_id"].to_pylist()
    assert ids[0] == "D-r2-000000"  # told to the engine, whose own rows join these and no other arm's
    assert "same calls" in (Path(out) / "report.md").read_text()


def test_a_cache_that_is_not_what_it_is_said_to_be_is_told(kvscope: Kvscope, server: ScriptedOpenAi, out: str) -> None:
    """A reset that empties nothing: calls of a new run, which share nothing with those before them, are found cached."""
    server.forgets = False
    words = [word if word != "0" else "2" for word in ENDPOINT]
    found = document(kvscope("experiment", "run", "--endpoint", server.url, *words, "--out", out, "--json"))
    assert "the cache was not empty" in " ".join(found["notes"])


def test_a_long_run_says_how_long_and_how_far(
    kvscope: Kvscope, server: ScriptedOpenAi, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long the calls of all runs take to come, and each answer, where each is worth a word."""
    from collector.experiments import endpoint

    monkeypatch.setattr(endpoint, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(endpoint, "WORTH_SAYING_S", 0.0)
    ended = kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out, "--json")
    document(ended)
    total = 8 + 2
    assert f"D/3: {total} of {total} calls answered" in ended.err
    assert "the calls of 12 runs come within" in ended.err


def test_a_usage_without_cached_tokens_is_said(kvscope: Kvscope, server: ScriptedOpenAi, out: str) -> None:
    """Hits and misses are then not known, and the note says what vLLM needs for it."""
    server.misbehaviour = "no_cached"
    found = document(kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out, "--json"))
    text = " ".join(found["notes"])
    assert "does not tell cached tokens (vLLM: --enable-prompt-tokens-details)" in text
    assert "the engine's own counters are not known" in text
    assert all(not arm["by_class"] for arm in found["arms"])
    assert all(arm["reused_ratio"] is None and arm["preemptions"] is None for arm in found["arms"])


def test_an_endpoint_without_a_reset_is_kept_apart_by_a_new_word(kvscope: Kvscope, out: str) -> None:
    """No prompt's beginning is shared between two runs, nor between warm-up and a cold run."""
    server = ScriptedOpenAi(has_reset=False)
    try:
        found = document(kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out, "--json"))
    finally:
        server.stop()
    assert "new word in front of every prompt" in " ".join(found["notes"])
    first_words = [
        asked["prompt"].split()[0] for asked in server.asked[2:]
    ]  # one first look an arm that is another endpoint
    assert all(word.startswith("x") for word in first_words)
    # C: a word for the warm-up and one for what counts; D one; A and B one a call: 3 repeats of 1 + 2 + 10 + 10
    assert len(set(first_words)) >= 3 * 23 - 1


def test_arms_on_two_endpoints(kvscope: Kvscope, server: ScriptedOpenAi, out: str) -> None:
    """A and B go to the server whose cache is off; nothing is imitated."""
    off = ScriptedOpenAi()
    off.cached = lambda words: 0  # type: ignore[method-assign]
    try:
        ended = kvscope(
            "experiment", "run", "--endpoint", server.url, "--endpoint-off", off.url, *ENDPOINT, "--out", out, "--json"
        )
    finally:
        off.stop()
    found = document(ended)
    assert "imitated" not in " ".join(found["notes"])
    assert found["fixed"]["endpoint"]["differs"]["A"] == off.url
    assert len(off.asked) == len(server.asked) == 6 * 10 + 1


def test_an_endpoint_where_nothing_is_answered_is_unreachable(
    kvscope: Kvscope, server: ScriptedOpenAi, out: str
) -> None:
    """Its first prompt is not completed: exit 3, and why."""
    server.misbehaviour = "html"
    ended = kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out)
    assert ended.code == 3
    assert "did not complete a first prompt: it answers text/html" in ended.err
    assert not Path(out).exists()
    server.misbehaviour = "nonsense"
    ended = kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out)
    assert ended.code == 3
    assert "did not complete a first prompt: nothing in the stream is an answer" in ended.err
    server.misbehaviour = "bad_request"
    ended = kvscope("experiment", "run", "--endpoint", server.url, *ENDPOINT, "--out", out)
    assert ended.code == 2
    assert "HTTP 400" in ended.err
    assert "--prompt of another kind" in ended.err


def test_a_server_that_turns_all_away_is_past_its_knee(kvscope: Kvscope, server: ScriptedOpenAi, out: str) -> None:
    """At two in flight every answer is 429: the level breaks, the sweep goes on to its end."""
    enough = server.enter

    def at_most_one() -> None:
        enough()
        if server.most_at_once > 1:
            server.misbehaviour = "refuse"

    server.enter = at_most_one  # type: ignore[method-assign]
    server.delay_s = 0.01
    words = ("--concurrency", "1,2", "--requests", "20", "--warmup", "0", "--own-tokens", "16", "--output-tokens", "2")
    ended = kvscope("experiment", "sweep", "--endpoint", server.url, *words, "--out", out, "--json")
    found = document(ended)
    assert (found["knee"]["load"], found["knee"]["breaks_at"]) == (1, 2)


def test_calls_that_fail_are_counted_and_said(kvscope: Kvscope, server: ScriptedOpenAi, out: str) -> None:
    """Every third answer is refused: they are unfinished, and the note says how many and why."""
    handler = server.cached
    count = iter(range(10_000))

    def sometimes(words: list[str]) -> int:
        server.misbehaviour = "in_stream" if next(count) % 3 == 1 else None
        return handler(words)

    server.cached = sometimes  # type: ignore[method-assign]
    ended = kvscope("experiment", "run", "--endpoint", server.url, *SHORT, "--concurrency", "1", "--out", out, "--json")
    found = document(ended)
    assert sum(arm["num_unfinished"] for arm in found["arms"]) > 0
    assert "calls failed; most say: an error in the stream (engine_dead)" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "fonding"), 2, "there is no built-in experiment"),
        (("run", "--repeats", "2"), 2, "3 or more"),
        (("run", "--requests", "0"), 2, "--requests"),
        (("run", "--rate", "1", "--concurrency", "1"), 2, "give one of them"),
        (("run", "--rate", "fast"), 2, "--rate"),
        (("run", "--arm", "x:"), 2, "two or more"),
        (("run", "--arm", "x:", "--arm", "X:"), 2, "one name"),
        (("run", "--arm", "x:", "--arm", "y:cash=off"), 2, "did you mean cache"),
        (("run", "--set", "blocks"), 2, "KEY=VALUE"),
        (("run", "--set", "blocks=4"), 3, "no request was served"),
        (("run", "--set", "routing=magic"), 2, "magic"),
        (("run", "--set", "eviction=magic"), 2, "magic"),
        (("run", "--model", "nothing"), 2, "nothing"),
        (("run", "--trace", "/no/such/file"), 2, "no file"),
        (("run", "--slo-ttft", "-1"), 2, "--slo-ttft"),
        (("run", "--endpoint-off", "http://x"), 2, "--endpoint-off"),
        (("run", "--endpoint", "nonsense://x"), 2, "HTTP address"),
        (("run", "--endpoint", "http://x", "--ca", "/no/such/ca"), 2, "--ca"),
        (("run", "--jobs", "0"), 2, "--jobs"),
        (("sweep", "--rate", "1", "--concurrency", "1"), 2, "sweep one of them"),
        (("sweep", "--by", "hope"), 2, "--by"),
        (("sweep", "--cache", "warm"), 2, "--cache"),
        (("sweep", "--start", "0"), 2, "--start"),
        (("sweep", "--by", "concurrency", "--start", "1.5"), 2, "a whole number"),
        (("sweep", "--repeats", "1"), 2, "--repeats"),
        (("sweep", "--concurrency", "1.5"), 2, "whole numbers"),
    ],
)
def test_what_makes_no_sense_is_refused(
    kvscope: Kvscope, out: str, words: tuple[str, ...], code: int, said: str
) -> None:
    """By name, with what would do; nothing is left behind."""
    ended = kvscope("experiment", *words, "--out", out)
    assert ended.code == code, ended.err
    assert said in ended.err


def test_an_endpoint_that_is_not_there_is_exit_3(kvscope: Kvscope, out: str) -> None:
    """And the failure is the document under --json."""
    url = f"http://127.0.0.1:{free_port()}"
    ended = kvscope("experiment", "run", "--endpoint", url, *ENDPOINT, "--out", out, "--json")
    assert ended.code == 3
    assert "Nothing answers" in document(ended)["detail"]


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("y:blocks=5", "cannot be set at an endpoint"),
        ("y:cache=maybe", "expected on or off"),
        ("y:temperature=9", "0 to 2"),
    ],
)
def test_an_arm_of_an_endpoint_takes_what_a_client_can_change(
    kvscope: Kvscope, server: ScriptedOpenAi, out: str, arm: str, said: str
) -> None:
    """An engine's own settings are the engine's to start with."""
    ended = kvscope("experiment", "run", "--endpoint", server.url, "--arm", "x:", "--arm", arm, "--out", out)
    assert ended.code == 2
    assert said in ended.err
