"""Recordings of real engines: what each stream becomes, and that the answer is never read."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine_probe.adapters.metric_names import deltas
from engine_probe.errors import UnknownFormat
from engine_probe.readers.client_rows import client_row
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.wire.validate import validate

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"
SQUEEZED = RECORDINGS / "vllm-0.32.0-squeezed"
FAR = 2**62


def read(path: Path, options: ReadOptions | None = None) -> tuple[dict[str, list[dict[str, Any]]], Notes]:
    """Every row by kind; each table has passed the rules of ingest."""
    notes = Notes()
    rows: dict[str, list[dict[str, Any]]] = {}
    for tables in open_source(path).chunks(options or ReadOptions(), notes):
        for kind, table in tables.items():
            validate(kind, table, FAR)
            rows.setdefault(kind, []).extend(table.to_pylist())
    return rows, notes


@pytest.fixture(scope="module")
def squeezed() -> tuple[dict[str, list[dict[str, Any]]], Notes]:
    """The cut with 112 KV blocks: 15 s, 18 warm-up and 47 measured requests."""
    return read(SQUEEZED)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as stream:
        return [json.loads(line) for line in stream]


def rewrite(folder: Path, name: str, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of one stream of a copied recording."""
    path = folder / f"{name}.jsonl.gz"
    with gzip.open(path, "rt") as stream:
        kept = change(stream.readlines())
    with gzip.open(path, "wt") as stream:
        stream.writelines(kept)


def copy(tmp_path: Path, source: Path = SQUEEZED) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    return folder


def test_every_client_row_is_a_request_at_the_clients_vantage(squeezed: tuple[Any, Notes]) -> None:
    """65 of them; instants, tokens, cached tokens and blocks are the recorded ones."""
    rows = [row for row in squeezed[0]["request"] if row["vantage"] == "client"]
    recorded = lines(SQUEEZED, "client")
    assert len(rows) == len(recorded) == 65
    for row, told in zip(rows, recorded, strict=True):
        assert row["arrival_ns"] == told["send_ns"]
        assert row["token_ns"] == told["token_ns"]
        assert row["last_token_ns"] == told["token_ns"][-1]
        assert (row["prompt_tokens"], row["cached_tokens"]) == (told["prompt_tokens"], told["cached_tokens"])
        assert row["computed_tokens"] == told["prompt_tokens"] - told["cached_tokens"]
        assert row["prompt_blocks"] == told["prompt_blocks"]
        assert row["prefill_s"] == told["engine_metrics"]["time_to_first_token_ms"] / 1e3
        assert (row["state"], row["worker"], row["model"]) == ("finished", "worker-0", "tiny")
    assert Counter(dict(row["labels"])["phase"] for row in rows) == {"measure": 47, "warmup": 18}


def test_every_client_request_has_its_engine_row(squeezed: tuple[Any, Notes]) -> None:
    """Joined by the client's id, with the client's phase; the engine's own id stays in the labels."""
    by_vantage: dict[str, dict[str, Any]] = {"client": {}, "engine": {}}
    for row in squeezed[0]["request"]:
        by_vantage[row["vantage"]][row["request_id"]] = row
    assert by_vantage["client"].keys() == by_vantage["engine"].keys()
    for request_id, engine in by_vantage["engine"].items():
        labels = dict(engine["labels"])
        assert labels["engine_request_id"] == f"cmpl-{request_id}-0"
        assert labels["phase"] == dict(by_vantage["client"][request_id]["labels"])["phase"]
        assert engine["output_tokens"] == by_vantage["client"][request_id]["output_tokens"]
        total = engine["frontend_s"] + engine["queue_s"] + engine["prefill_s"]
        assert total == pytest.approx((engine["first_token_ns"] - engine["arrival_ns"]) / 1e9, abs=1e-8)


def test_block_rows_are_the_engines_events(squeezed: tuple[Any, Notes]) -> None:
    """BlockStored and BlockRemoved hashes of this cut, counted in its raw messages with another library."""
    changes = Counter(row["change"] for row in squeezed[0]["block"])
    assert changes == {"stored": 723, "evicted": 616}
    assert all(row["age_s"] >= 0 for row in squeezed[0]["block"] if row["change"] == "evicted")


def test_prompts_join_the_life_of_their_blocks(squeezed: tuple[Any, Notes]) -> None:
    """Every full block of every finished prompt has a block row: client and engine speak of the same hashes."""
    known = {row["block_hash"] for row in squeezed[0]["block"]}
    asked = {block for row in squeezed[0]["request"] for block in row["prompt_blocks"] or ()}
    assert asked
    assert asked <= known


def test_another_salt_makes_other_hashes() -> None:
    """The salt is the deployment's: without it nothing joins."""
    rows, _ = read(SQUEEZED, ReadOptions(salt=b"another"))
    known = {row["block_hash"] for row in rows["block"]}
    assert not known & {block for row in rows["request"] for block in row["prompt_blocks"] or ()}


def test_counters_are_the_engines(squeezed: tuple[Any, Notes]) -> None:
    """Increments over the kept pages equal the last page's totals of a fresh engine: 3 preemptions."""
    series: dict[str, list[float]] = {}
    for row in sorted(squeezed[0]["sample"], key=lambda row: row["at_ns"]):
        series.setdefault(row["name"], []).append(row["value"])
    last = lines(SQUEEZED, "metrics")[-1]["text"].splitlines()
    total = {line.split("{")[0]: float(line.split()[-1]) for line in last if line.startswith("vllm:p")}
    assert sum(deltas(series["preemptions_total"])) == 3.0
    assert series["prefix_hits_tokens_total"][-1] == total["vllm:prefix_cache_hits_total"]
    assert series["prefix_queries_tokens_total"][-1] == total["vllm:prefix_cache_queries_total"]
    assert len(series["preemptions_total"]) == len(lines(SQUEEZED, "metrics"))


def test_host_shares_are_samples_of_no_worker(squeezed: tuple[Any, Notes]) -> None:
    """cpu_busy is cpu_util; the parts have names of their own, so that a mean is not mixed."""
    shares = [row for row in squeezed[0]["sample"] if row["name"] == "cpu_util"]
    recorded = lines(SQUEEZED, "host")
    assert [row["value"] for row in shares] == [row["cpu_busy"] for row in recorded]
    assert all(row["worker"] is None for row in shares)


def test_slow_facts_are_one_row_a_worker(squeezed: tuple[Any, Notes]) -> None:
    """Geometry from scenario, log and cache_config_info: 111 usable blocks of 32 tokens, 3,072 bytes a token."""
    (row,) = squeezed[0]["worker"]
    expected = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "block_size": 32,
        "num_blocks": 111,
        "kv_bytes_per_block": 98_304,
        "max_context": 2048,
        "prefix_caching": True,
        "tp": 1,
        "kv_dtype": "bfloat16",
    }
    assert {key: row[key] for key in expected} == expected
    flags = dict(row["flags"])
    assert (flags["max_num_seqs"], flags["max_num_batched_tokens"]) == ("16", "2048")
    assert (flags["num_gpu_blocks_override"], flags["gpu_memory_utilization"]) == ("112", "0.92")


def test_windows_and_clocks_are_marked(squeezed: tuple[Any, Notes]) -> None:
    """Both windows with both edges; one clock for all, offset and error 0."""
    rows, notes = squeezed
    marks = [(row["mark"], row["subject"], dict(row["attrs"])) for row in rows["mark"]]
    assert [window.name for window in notes.windows] == ["warmup", "measure"]
    measure = notes.windows[1]
    span = {"window": "measure", "start_ns": str(measure.start_ns), "end_ns": str(measure.end_ns)}
    assert ("experiment", "measure", span | {"edge": "start"}) in marks
    assert ("experiment", "measure", span | {"edge": "end"}) in marks
    for subject in ("worker-0", "client"):
        assert ("clock", subject, {"offset_s": "0", "error_s": "0"}) in marks


def test_the_answer_is_never_read(tmp_path: Path, squeezed: tuple[Any, Notes]) -> None:
    """Other truth, titles, groups, workload and folder name give the same rows."""
    folder = copy(tmp_path)
    scenario = json.loads((folder / "scenario.json").read_text())
    for key in ("truth", "title", "scenario", "workload", "engine_notes", "cut"):
        scenario[key] = {"cause": "hotspot", "sentence": "elephants"}
    (folder / "scenario.json").write_text(json.dumps(scenario))

    def regroup(kept: list[str]) -> list[str]:
        return [json.dumps(json.loads(line) | {"prefix_group": "elephants"}) + "\n" for line in kept]

    rewrite(folder, "client", regroup)
    rows, _ = read(folder)
    assert rows == squeezed[0]
    assert "elephants" not in repr(rows)


def test_two_workers_are_two_workers() -> None:
    """Each stream's rows carry the worker's name; both have facts, and none is evicted."""
    rows, _ = read(RECORDINGS / "vllm-0.32.0-two-workers")
    assert {row["worker"] for row in rows["worker"]} == {"worker-0", "worker-1"}
    for kind in ("request", "block"):
        assert {row["worker"] for row in rows[kind]} == {"worker-0", "worker-1"}
    assert {row["change"] for row in rows["block"]} == {"stored"}


def test_chunks_with_several_tokens_have_no_counts() -> None:
    """Fewer chunks than tokens: how many each held is unknown."""
    rows, _ = read(RECORDINGS / "vllm-0.32.0-two-workers")
    clients = [row for row in rows["request"] if row["vantage"] == "client"]
    packed = [row for row in clients if len(row["token_ns"]) < row["output_tokens"]]
    assert packed
    assert all(row["token_counts"] is None for row in packed)
    even = [row for row in clients if len(row["token_ns"]) == row["output_tokens"]]
    assert all(row["token_counts"] == [1] * row["output_tokens"] for row in even)


def test_caching_switched_off_is_a_fact() -> None:
    """--no-enable-prefix-caching: prefix_caching false, 0 hits of 0 looked up, and no events are no error."""
    rows, _ = read(RECORDINGS / "vllm-0.32.0-cache-off")
    (worker,) = rows["worker"]
    assert worker["prefix_caching"] is False
    assert dict(worker["flags"])["enable_prefix_caching"] == "False"
    assert "block" not in rows
    assert {row["value"] for row in rows["sample"] if row["name"] == "prefix_queries_tokens_total"} == {0.0}


def test_sglangs_recording_speaks_the_contract() -> None:
    """Client, samples under the contract's names, blocks of one token, geometry from page and log; no spans were kept."""
    rows, notes = read(RECORDINGS / "sglang-0.5.23")
    assert len([row for row in rows["request"] if row["vantage"] == "client"]) == 38
    samples = {row["name"] for row in rows["sample"]}
    assert {"cpu_util", "prefix_queries_tokens_total", "prefix_hits_tokens_total", "requests_running"} <= samples
    (worker,) = rows["worker"]
    assert (worker["block_size"], worker["num_blocks"], worker["kv_bytes_per_block"]) == (1, 65536, 512)
    assert (worker["engine_version"], worker["prefix_caching"], worker["kv_dtype"]) == ("0.5.23", True, "bfloat16")
    stored = [row for row in rows["block"] if row["change"] == "stored"]
    assert {row["num_tokens"] for row in stored} == {1}
    assert len(stored) == notes.facts["kv_stored"]
    assert notes.not_told == ["otlp: the recording has no otlp.jsonl.gz"]


def test_cached_tokens_of_sglangs_page_are_those_of_its_clients() -> None:
    """Hits and lookups on the newest page are the sums of what clients were told until then, and the warm-up's own."""
    rows, _ = read(RECORDINGS / "sglang-0.5.23")
    last = {}
    for row in rows["sample"]:
        key = (row["name"], str(row["labels"]))
        last[key] = row
    at_ns = max(row["at_ns"] for row in last.values() if row["name"] == "prefix_hits_tokens_total")
    hits = sum(row["value"] for row in last.values() if row["name"] == "prefix_hits_tokens_total")
    done = [row for row in rows["request"] if row["end_ns"] <= at_ns]
    running = [row for row in rows["request"] if row["arrival_ns"] <= at_ns < row["end_ns"]]
    low = sum(row["cached_tokens"] for row in done)
    assert low <= hits <= low + sum(row["cached_tokens"] for row in running)


def test_llamacpps_recording_speaks_the_contract() -> None:
    """Client rows with the engine's own timings, samples under the contract's names, slots; no events, no spans."""
    rows, notes = read(RECORDINGS / "llamacpp")
    assert len(rows["request"]) == 30
    served = [row for row in rows["request"] if row["state"] == "finished"]
    assert all(row["prefill_s"] > 0 and row["decode_s"] > 0 for row in served)
    assert {row["vantage"] for row in rows["request"]} == {"client"}
    samples = {row["name"] for row in rows["sample"]}
    assert {"prompt_tokens_total", "prefix_hits_tokens_total", "llamacpp:slot_kv_tokens", "cpu_util"} <= samples
    (worker,) = rows["worker"]
    assert (worker["block_size"], worker["num_blocks"], worker["max_context"]) == (1, 8192, 2048)
    assert worker["engine_version"] is None
    assert notes.not_told == [
        "otlp: the recording has no otlp.jsonl.gz",
        "kv_events: the recording has no kv_events.jsonl.gz",
    ]


def test_an_engine_that_nobody_knows_is_imported_as_far_as_it_speaks(tmp_path: Path) -> None:
    """Names stay as they are, events are left out, and both is said."""
    shutil.copytree(RECORDINGS / "sglang-0.5.23", tmp_path / "x")
    scenario = tmp_path / "x" / "scenario.json"
    scenario.write_text(scenario.read_text().replace('"engine": "sglang"', '"engine": "newcomer"'))
    rows, notes = read(tmp_path / "x")
    assert "block" not in rows
    assert any(said.startswith("kv_events: no adapter for newcomer") for said in notes.left_out)
    assert any(said.startswith("metrics: newcomer names") for said in notes.assumed)


def test_a_failed_request_keeps_its_error() -> None:
    """llama-server closed one connection during warm-up: failed, without tokens, with the client's words."""
    rows, _ = read(RECORDINGS / "llamacpp")
    (failed,) = [row for row in rows["request"] if row["state"] == "failed"]
    assert failed["error"].startswith("ClientOSError")
    assert failed["first_token_ns"] is failed["output_tokens"] is failed["token_ns"] is None


@pytest.mark.parametrize(
    ("status", "error", "finish_reason", "state"),
    [
        (200, None, "length", "finished"),
        (200, None, "abort", "aborted"),
        (429, None, None, "rejected"),
        (503, "busy", None, "rejected"),
        (500, None, None, "failed"),
        (200, "cut", None, "failed"),
        (None, None, None, "failed"),
    ],
)
def test_how_a_request_ended(status: int | None, error: str | None, finish_reason: str | None, state: str) -> None:
    """429 and 503 are rejections, other errors failures, an abort an abort."""
    row = {"request_id": "a", "send_ns": 1, "end_ns": 2, "http_status": status, "error": error}
    assert client_row(row | {"finish_reason": finish_reason}, "here")["state"] == state


@pytest.mark.parametrize("bad", [{"send_ns": "1"}, {"token_ns": [1.5]}, {"prompt_tokens": 1.5}, {"request_id": 7}])
def test_a_client_row_of_other_types_is_named(bad: dict[str, Any]) -> None:
    """The place is said."""
    with pytest.raises(UnknownFormat, match="client, line 4"):
        client_row({"request_id": "a", "send_ns": 1, "end_ns": 2} | bad, "client, line 4")


def test_a_half_stream_is_named(tmp_path: Path) -> None:
    """A gzip file that was cut off says so, with the last whole line."""
    folder = copy(tmp_path)
    path = folder / "client.jsonl.gz"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UnknownFormat, match=r"client\.jsonl\.gz was cut off after line \d+"):
        read(folder)


@pytest.mark.parametrize(
    ("stream", "line", "message"),
    [
        ("client", '{"request_id": "a"}\n', "line 66 has no 'send_ns'"),
        ("client", "{oops\n", "line 66 is not a JSON object"),
        ("kv_events", '{"at_ns": 1, "worker": "w", "seq": 0, "payload_b64": "%%"}\n', "is not base64"),
        ("kv_events", '{"at_ns": 1, "worker": "w", "seq": 0, "payload_b64": "AAAA"}\n', "KV-event message"),
        ("kv_events", '{"at_ns": 1, "worker": "w", "seq": "0", "payload_b64": ""}\n', "no instant"),
        ("otlp", '{"at_ns": 1, "content_type": "application/x-protobuf", "body_b64": "/////w=="}\n', "OTLP protobuf"),
        ("metrics", '{"at_ns": 1, "worker": "w", "status": 200, "text": "a b"}\n', "Line 1 of the metrics page"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, stream: str, line: str, message: str) -> None:
    """File, line, and what is wrong."""
    folder = copy(tmp_path)
    rewrite(folder, stream, lambda kept: [*kept, line])
    with pytest.raises(UnknownFormat, match=message) as caught:
        read(folder)
    assert f"{stream}.jsonl.gz" in caught.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"engine": "vllm"}', '{"engine": "vllm", "workers": 3}'])
def test_a_scenario_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """Half or foreign scenario.json: one sentence."""
    (tmp_path / "scenario.json").write_text(text)
    with pytest.raises(UnknownFormat, match=r"scenario\.json"):
        open_source(tmp_path)


def test_a_scrape_that_failed_is_counted_and_left_out(tmp_path: Path) -> None:
    """An engine that answered 503 has no numbers."""
    folder = copy(tmp_path)
    row = json.dumps({"at_ns": 1, "worker": "worker-0", "status": 503, "text": "no"}) + "\n"
    rewrite(folder, "metrics", lambda kept: [*kept, row])
    _, notes = read(folder)
    assert "metrics: 1 scrapes that the engine did not answer with 200" in notes.left_out


def test_a_setting_that_changed_is_marked(tmp_path: Path) -> None:
    """The engine came back with other blocks: a new worker row, and marks with old and new."""
    folder = copy(tmp_path)

    def change(kept: list[str]) -> list[str]:
        last = json.loads(kept[-1])
        last["text"] = last["text"].replace('num_gpu_blocks="112"', 'num_gpu_blocks="512"')
        return [*kept[:-1], json.dumps(last) + "\n"]

    rewrite(folder, "metrics", change)
    rows, _ = read(folder)
    changed = {
        dict(row["attrs"])["setting"]: dict(row["attrs"]) for row in rows["mark"] if row["mark"] == "config_changed"
    }
    assert changed["num_blocks"] == {"setting": "num_blocks", "old": "111", "new": "511"}
    assert [row["num_blocks"] for row in rows["worker"]] == [111, 511]


def test_reading_twice_gives_the_same_chunks() -> None:
    """Chunks are numbered: their order and content are fixed."""
    first, second = (list(open_source(SQUEEZED).chunks(ReadOptions(), Notes())) for _ in range(2))
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(pa.Table.equals(one[kind], other[kind]) for kind in one)
