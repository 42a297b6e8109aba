"""Traces, pages and events as files: recognised by content, read whole, and refused in one clear sentence."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_probe.errors import InvalidRows, KvscopeError, UnknownFormat
from engine_probe.readers import mooncake, pages
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import Notes, ReadOptions, digest
from engine_probe.schema import table_from_rows
from engine_probe.sending.file_sink import FileSink
from engine_probe.wire.codec import encode_ndjson

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
AT = 1_795_958_453_000_000_000


def read(path: Path, options: ReadOptions | None = None) -> tuple[dict[str, list[dict[str, Any]]], Notes]:
    notes = Notes()
    rows: dict[str, list[dict[str, Any]]] = {}
    for tables in open_source(path).chunks(options or ReadOptions(), notes):
        for kind, table in tables.items():
            rows.setdefault(kind, []).extend(table.to_pylist())
    return rows, notes


def marks(count: int = 3) -> pa.Table:
    return table_from_rows(
        "mark", [{"at_ns": AT + n, "mark": "deployed", "text": f"release {n}"} for n in range(count)]
    )


# --- Mooncake


def test_a_mooncake_line_is_a_request_without_timing(tmp_path: Path) -> None:
    """Arrival 1.5 s after the anchor; ids become prompt_blocks; no token times, no hits."""
    path = tmp_path / "trace"
    path.write_text('{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}\n')
    rows, notes = read(path)
    (row,) = rows["request"]
    assert {key: value for key, value in row.items() if value is not None} == {
        "request_id": "mooncake-1",
        "vantage": "client",
        "state": "finished",
        "at_ns": mooncake.ANCHOR_NS + 1_500_000_000,
        "arrival_ns": mooncake.ANCHOR_NS + 1_500_000_000,
        "prompt_tokens": 700,
        "output_tokens": 9,
        "labels": [("block_tokens", "512")],
        "prompt_blocks": [0, 7],
    }
    assert notes.windows[0].name == "trace"
    assert "TTFT" in notes.not_told[0]


def test_a_trace_begins_where_it_is_told_to(tmp_path: Path) -> None:
    """--start moves the anchor; gzip is known by content."""
    path = tmp_path / "trace.jsonl"
    line = b'{"timestamp": 0, "input_length": 7, "output_length": 9, "hash_ids": []}\n'
    path.write_bytes(gzip.compress(line))
    rows, _ = read(path, ReadOptions(start_ns=AT))
    assert rows["request"][0]["arrival_ns"] == AT


@pytest.mark.parametrize(
    "change",
    [{"timestamp": -1}, {"timestamp": "0"}, {"input_length": 1.5}, {"output_length": None}, {"hash_ids": [-1]}],
)
def test_a_trace_line_of_other_types_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    """Line and field."""
    good = {"timestamp": 0, "input_length": 7, "output_length": 9, "hash_ids": [1]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(UnknownFormat, match=rf"t\.jsonl, line 2.*{next(iter(change))}"):
        read(path)


# --- Prometheus pages


def test_one_page_has_the_instant_it_is_given() -> None:
    """--start for a page without time; the worker's name is the option's."""
    rows, notes = read(SAMPLES / "vllm_metrics.synthetic.prom", ReadOptions(worker="pod-0", at_ns=AT))
    assert {row["at_ns"] for row in rows["sample"]} == {AT}
    running = [row for row in rows["sample"] if row["name"] == "requests_running"]
    assert [(row["worker"], row["value"]) for row in running] == [("pod-0", 24.0)]
    assert [(row["worker"], row["num_blocks"]) for row in rows["worker"]] == [("pod-0", 27_391)]
    assert notes.left_out == []


def test_a_page_without_time_says_whose_time_it_got(tmp_path: Path) -> None:
    """The file's last change, and that is said; no worker is made up."""
    path = tmp_path / "page.prom"
    path.write_text('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 2\n')
    os.utime(path, ns=(AT, AT))
    rows, notes = read(path)
    assert [(row["at_ns"], row["worker"]) for row in rows["sample"]] == [(AT, None)]
    assert "last change" in notes.assumed[0]


def test_a_folder_of_pages_is_read_in_the_order_of_its_instants(tmp_path: Path) -> None:
    """Names that are instants: seconds and ISO; other files are left out and named."""
    (tmp_path / "1795958460.prom").write_text("vllm:num_preemptions_total 9\n")
    (tmp_path / "scrape-2026-11-29T13:20:53Z.txt").write_text("vllm:num_preemptions_total 4\n")
    (tmp_path / "notes.doc").write_text("x")
    rows, notes = read(tmp_path)
    assert [(row["at_ns"], row["value"]) for row in rows["sample"]] == [
        (1_795_958_453_000_000_000, 4.0),
        (1_795_958_460_000_000_000, 9.0),
    ]
    assert notes.left_out == ["notes.doc: not a page"]


@pytest.mark.parametrize(
    ("stem", "at_ns"),
    [
        ("1795958453", AT),
        ("vllm-1795958453461", AT + 461_000_000),
        ("1795958453461917714", 1_795_958_453_461_917_714),
        ("2026-11-29_13-20-53", AT),
        ("page-7", None),
        ("2026-13-99T00:00:00", None),
        ("12345678901", None),
    ],
)
def test_instants_in_names(stem: str, at_ns: int | None) -> None:
    """s, ms, ns or ISO; anything else is no instant."""
    assert pages.instant_of_name(stem) == at_ns


def test_several_scrapes_in_one_file_are_refused(tmp_path: Path) -> None:
    """Without instants they cannot be told apart."""
    path = tmp_path / "all.prom"
    path.write_text("vllm:num_preemptions_total 4\nvllm:num_preemptions_total 9\n")
    with pytest.raises(UnknownFormat, match="each scrape in its own file"):
        read(path)


def test_scrapes_with_instants_may_share_a_file(tmp_path: Path) -> None:
    """OpenMetrics with timestamps on its samples: each is an instant of its own."""
    path = tmp_path / "dump.prom"
    path.write_text("vllm:num_preemptions_total 4 1795958453\nvllm:num_preemptions_total 9 1795958454\n# EOF\n")
    rows, _ = read(path)
    assert [(row["at_ns"], row["value"]) for row in rows["sample"]] == [(AT, 4.0), (AT + 10**9, 9.0)]


def test_a_log_of_scrapes_is_read(tmp_path: Path) -> None:
    """JSON lines with at_ns and text, as recordings keep them; a failed scrape is counted."""
    path = tmp_path / "metrics.jsonl"
    scrapes = [{"at_ns": AT + n, "worker": "w", "status": 200 + 300 * (n == 1), "text": f"x {n}\n"} for n in range(3)]
    path.write_text("".join(json.dumps(scrape) + "\n" for scrape in scrapes))
    rows, notes = read(path)
    assert [(row["at_ns"] - AT, row["worker"], row["value"]) for row in rows["sample"]] == [
        (0, "w", 0.0),
        (2, "w", 2.0),
    ]
    assert "1 scrapes" in notes.left_out[0]


# --- events


@pytest.mark.parametrize("header", [None, {"source": "s", "epoch": "e", "seq": 0, "sent_ns": AT}])
def test_ndjson_events_come_back(tmp_path: Path, header: dict[str, object] | None) -> None:
    """With and without a header line."""
    path = tmp_path / "events.ndjson"
    path.write_bytes(encode_ndjson({"mark": marks()}, header))
    rows, _ = read(path)
    assert rows == {"mark": marks().to_pylist()}


@pytest.mark.parametrize("format", ["parquet", "ndjson"])
def test_what_a_file_sink_wrote_comes_back(tmp_path: Path, format: Any) -> None:
    """A sink's folder is a PATH; kinds are told by folder or line."""
    sink = FileSink(tmp_path / "sink", format)
    sink.write(
        {"mark": marks(), "sample": table_from_rows("sample", [{"at_ns": AT, "name": "gpu_util", "value": 0.5}])}
    )
    sink.close()
    rows, _ = read(tmp_path / "sink")
    assert rows["mark"] == marks().to_pylist()
    assert [row["value"] for row in rows["sample"]] == [0.5]


def test_parquet_of_a_sealed_store_is_read(tmp_path: Path) -> None:
    """kind=/date=/hour= folders; columns of the store's own are counted and left out."""
    folder = tmp_path / "kind=mark" / "date=2026-11-29" / "hour=13"
    folder.mkdir(parents=True)
    table = pa.table(dict(zip(marks().column_names, marks().columns, strict=True)))
    pq.write_table(table.append_column("received_ns", pa.array([1, 2, 3])), folder / "part.parquet")
    rows, notes = read(tmp_path)
    assert rows["mark"] == marks().to_pylist()
    assert notes.left_out == ["mark.received_ns: not a column of the contract (3 rows)"]


def test_a_parquet_file_may_be_named_by_its_kind(tmp_path: Path) -> None:
    """mark.parquet holds marks; a name that tells nothing is refused with what to do."""
    table = marks().replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "mark-2026.parquet")
    assert len(read(tmp_path / "mark-2026.parquet")[0]["mark"]) == 3
    pq.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(UnknownFormat, match="kind=NAME"):
        read(tmp_path / "data.parquet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "mark", "at_ns": 1.5, "mark": "deployed"}', "line 2"),
        ('{"kind": "elephant"}', "elephant"),
        ('{"kind": "mark", ', "line 2"),
    ],
)
def test_a_bad_event_is_named_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    """File and line."""
    path = tmp_path / "events.ndjson"
    path.write_text('{"kind": "mark", "at_ns": 1, "mark": "deployed"}\n' + line + "\n")
    with pytest.raises(InvalidRows, match=message) as caught:
        read(path)
    assert "events.ndjson" in caught.value.message


# --- what is nothing


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.prom", b"", "is empty"),
        ("blank.jsonl", b"\n\n", "nothing but empty lines"),
        ("blank.txt", b"hello world\nthis is text\n", "nothing that is known"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\0\0", "nothing that is known"),
        ("half.jsonl", b'{"timestamp": 0, "inp', "not one whole JSON object"),
        ("other.jsonl", b'{"a": 1}\n', "JSON lines with a are not known"),
        ("list.json", b"[1, 2]\n", "not known"),
        ("half.jsonl.gz", gzip.compress(b'{"timestamp": 0}' * 100)[:30], "half gzip"),
        ("bad.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("only.prom", b"# HELP a b\n# TYPE a gauge\n", "no samples"),
    ],
)
def test_what_is_nothing_is_said_in_a_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """Empty, half, foreign and damaged files."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(KvscopeError, match=message):
        read(path)


def test_a_folder_with_nothing_known_says_what_it_holds(tmp_path: Path) -> None:
    """An empty one, one with strange files, and a path that is not there."""
    with pytest.raises(UnknownFormat, match="it holds nothing"):
        open_source(tmp_path)
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(UnknownFormat, match=r"1 files, the first a\.doc"):
        open_source(tmp_path)
    with pytest.raises(UnknownFormat, match="There is nothing at"):
        open_source(tmp_path / "absent")


def test_a_digest_is_of_content_not_of_names(tmp_path: Path) -> None:
    """Moved or renamed it is the same; a changed byte or another cut between files is not."""
    paths = [tmp_path / name for name in ("a", "b", "c", "d")]
    for path, content in zip(paths, (b"12", b"3", b"1", b"23"), strict=True):
        path.write_bytes(content)
    assert digest(paths[:2]) != digest(paths[2:])
    renamed = tmp_path / "other"
    renamed.write_bytes(b"12")
    assert digest([renamed]) == digest(paths[:1]) != digest(paths[1:2])
