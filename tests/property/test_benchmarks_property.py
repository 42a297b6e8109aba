"""Benchmark outputs, logs, mappings and OTLP of any shape: one error that names the place, or rows that keep the contract."""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_probe.adapters.genai import is_request, request_row
from engine_probe.adapters.genai_names import TABLES
from engine_probe.adapters.otlp import decode_traces
from engine_probe.adapters.otlp_points import Exponential, Metrics, Point, decode_points
from engine_probe.adapters.otlp_series import SeriesBook
from engine_probe.errors import KvscopeError
from engine_probe.readers.detect import FORMATS, open_source
from engine_probe.readers.mapping import load_mapping, shipped
from engine_probe.readers.sniff import csv_header, foreign, top_keys
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

DATA = Path(__file__).parents[1] / "data" / "benchmarks"
LINES = "profile_export.jsonl.gz"
FILES = {
    "vllm-bench": "vllm-0.32.0-detailed.json",
    "sglang-bench": "sglang-0.5.23-details.jsonl",
    "aiperf": f"aiperf-0.13.0/{LINES}",
    "aiperf-summary": "aiperf-0.13.0/profile_export_aiperf.json",
    "guidellm": "guidellm-0.8.1.json.gz",
    "genai-perf": "genai-perf-0.0.16.json",
    "azure-llm": "azure-llm-2023.csv",
    "burstgpt": "burstgpt-2.csv",
    "otlp": "genai-spans.jsonl",
}
AT = 1_764_403_200_000_000_000
FAR = 2**62
FEW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

DEEP: Any = json.loads("[" * 60 + "]" * 60)
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 2**53, 2**64, -(2**70), 10**400]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from([[], {}, [None], [[]], {"a": 1}, DEEP, "x" * 400, "NaN", "\ud800"]),
)


@cache
def body(name: str) -> bytes:
    raw = (DATA / FILES[name]).read_bytes()
    return gzip.decompress(raw) if FILES[name].endswith(".gz") else raw


@cache
def document(name: str) -> Any:
    """The file's first object (of lines the first line), small: long lists are cut to three entries."""
    text = body(name)
    first = text if name in ("guidellm", "aiperf-summary", "genai-perf") else text.split(b"\n")[0]
    return _cut(json.loads(first))


def _cut(value: Any) -> Any:
    if isinstance(value, list):
        return [_cut(item) for item in value[:3]]
    return {key: _cut(item) for key, item in value.items()} if isinstance(value, dict) else value


def read(name: str, content: bytes, mapping: str | None = None) -> None:
    """Read and judge a file; what is refused is refused by an error of ours with a sentence."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            source = open_source(Path(file.name), None if mapping else name, mapping)
            for tables in source.chunks(ReadOptions(), Notes()):
                for kind, table in tables.items():
                    validate(kind, table, FAR)
        except KvscopeError:
            return


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, item in inner for found in _paths(item, (*path, key))]


@cache
def paths(name: str) -> list[tuple[Any, ...]]:
    return _paths(document(name))


@FEW
@given(st.data(), st.sampled_from([name for name in FILES if not name.startswith(("azure", "burst"))]))
def test_any_value_in_any_place_of_a_document(data: st.DataObject, name: str) -> None:
    """Wrong types, huge numbers, NaN, deep nesting, missing keys: an error with its place, or sound rows."""
    changed = copy.deepcopy(document(name))
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(paths(name)))
        target = changed
        for step in way:
            try:
                target = target[step]
            except (KeyError, IndexError, TypeError):
                target = None
                break
        if isinstance(target, dict) and last in target:
            if data.draw(st.booleans()):
                target[last] = data.draw(STRANGE)
            else:
                del target[last]
        elif isinstance(target, list) and isinstance(last, int) and last < len(target):
            target[last] = data.draw(STRANGE)
    read(name, json.dumps(changed).encode("utf-8", "surrogatepass"))


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A real file with bytes changed, cut out, doubled or put in, or cut off."""
    name = draw(st.sampled_from(list(FILES)))
    changed = bytearray(body(name)[:20_000])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        how = draw(st.sampled_from(("put", "change", "cut", "end", "double")))
        piece = draw(st.binary(min_size=1, max_size=6))
        if how == "put":
            changed[at:at] = piece
        elif how == "change":
            changed[at : at + len(piece)] = piece
        elif how == "cut":
            del changed[at : at + draw(st.integers(0, 60))]
        elif how == "double":
            changed[at:at] = changed[at : at + 50]
        else:
            del changed[at:]
    return name, bytes(changed)


@FEW
@given(damaged())
def test_any_damage_to_a_file(case: tuple[str, bytes]) -> None:
    """Half files, flipped bytes: read as what it was, and as whatever its content now looks like."""
    name, content = case
    read(name, content)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            for _ in open_source(Path(file.name)).chunks(ReadOptions(), Notes()):
                pass
        except KvscopeError:
            return


@FEW
@given(st.binary(max_size=300), st.sampled_from(sorted(FORMATS)))
def test_any_bytes_as_any_format(content: bytes, name: str) -> None:
    """--format may be wrong: an error, never a crash."""
    if name != "recording":
        read(name, content)


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_sniffing_reads_any_bytes(content: bytes) -> None:
    """Keys are texts, headers are cells, and what is foreign is told in two sentences."""
    assert all(isinstance(key, str) for key in top_keys(content))
    assert all(cell for cell in csv_header(content))
    told = foreign(content)
    assert told is None or all(told)


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=9) | st.lists(st.integers())),
    st.integers(0, 99),
)
def test_keys_of_a_whole_object_are_its_keys(told: dict[str, Any], cut: int) -> None:
    """Of a cut one they are the first of these, however it was cut."""
    text = json.dumps(told).encode()
    keys = tuple(json.loads(text))
    assert top_keys(text) == tuple(json.dumps(key)[1:-1] for key in keys)
    some = top_keys(text[: len(text) * cut // 100])
    assert some == top_keys(text)[: len(some)]


@FEW
@given(st.data(), st.sampled_from(shipped()))
def test_any_line_by_a_shipped_mapping(data: st.DataObject, mapping: str) -> None:
    """A real line with parts changed, and lines of anything."""
    lines = (DATA / "logs" / f"{mapping}.log").read_bytes().splitlines()
    line = bytearray(data.draw(st.sampled_from(lines)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(line)))
        line[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    read("", bytes(line) + b"\n" + data.draw(st.binary(max_size=60)), mapping)


TOML = st.text(alphabet="[]{}=\"'.,\n abcfieldvaluntmsp0123456789_", max_size=200)
PARTS = st.lists(
    st.sampled_from(
        [
            "[columns]",
            "[input]",
            "[row]",
            "[labels]",
            'kind = "step"',
            'lines = "text"',
            "pattern = '(?P<t>x)'",
            'arrival_ns = "t"',
            "model = { value = 3 }",
            'queue_s = { field = "a", unit = "ms", plus = { value = 1 } }',
            "x = [1]",
            'only = { a = "(" }',
            'arrival_ns = { field = "t", time = "%" }',
        ]
    ),
    max_size=6,
).map("\n".join)


@settings(deadline=None)
@given(TOML | PARTS)
def test_any_mapping_file(text: str) -> None:
    """A mapping, or one error that names it; a mapping reads any line or refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.toml"
        path.write_text(text)
        try:
            load_mapping(str(path))
        except KvscopeError as error:
            told = error.message
        else:
            told = ""
        if told:
            assert "m.toml" in told
            return
        (Path(folder) / "log").write_text('{"t": 1764403200, "a": "3"}\nx\n')
        try:
            for tables in open_source(Path(folder) / "log", mapping=str(path)).chunks(ReadOptions(), Notes()):
                for kind, table in tables.items():
                    validate(kind, table, FAR)
        except KvscopeError:
            return


# --- OpenTelemetry

ATTRIBUTES = st.dictionaries(
    st.sampled_from(
        [
            "gen_ai.operation.name",
            "gen_ai.system",
            "gen_ai.request.model",
            "gen_ai.usage.input_tokens",
            "gen_ai.usage.cache_read.input_tokens",
            "gen_ai.response.time_to_first_chunk",
            "gen_ai.server.time_per_output_token",
            "gen_ai.response.finish_reasons",
            "gen_ai.response.id",
            "http.response.status_code",
            "error.type",
        ]
    ),
    STRANGE.filter(lambda value: value != "\ud800"),
)


@settings(deadline=None)
@given(
    ATTRIBUTES,
    st.integers(0, 2**64 - 1) | st.just(AT),
    st.integers(0, 2**64 - 1) | st.just(AT + 5),
    st.integers(0, 6),
    st.none() | st.text(max_size=8),
    st.lists(st.integers(0, 2**64 - 1), max_size=4),
)
def test_any_span_is_a_row_of_the_contract(
    attributes: dict[str, Any], start_ns: int, end_ns: int, kind: int, failed: str | None, chunks: list[int]
) -> None:
    """Whatever stands in its attributes: what is kept has the right type and is in order."""
    assert is_request(attributes) in (True, False)
    row = request_row(
        attributes,
        trace_id="1" * 32,
        span_id="2" * 16,
        start_ns=start_ns,
        end_ns=end_ns,
        kind=kind,
        failed=failed,
        service=None,
        received_ns=AT,
        chunk_ns=chunks,
    )
    table = table_from_rows("request", [row])
    if all(10**17 < row[name] < FAR for name in row if name.endswith("_ns") and name != "token_ns"):
        try:
            validate("request", table, FAR)
        except KvscopeError:
            assert any(not 10**17 < at < FAR for at in row.get("token_ns", []))


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["application/x-protobuf", "application/json"]))
def test_metrics_and_traces_of_any_bytes(content: bytes, media_type: str) -> None:
    """KvscopeError or what can be stored."""
    for decode in (decode_traces, decode_points):
        try:
            decode(content, media_type, AT)  # type: ignore[operator]
        except KvscopeError:
            continue


@FEW
@given(st.data())
def test_any_value_in_any_place_of_metrics(data: st.DataObject) -> None:
    """OTLP JSON with strange values: an error, or points that become samples."""
    changed = json.loads((DATA / "genai-metrics.json").read_text())
    *way, last = data.draw(st.sampled_from(_paths(changed)))
    target = changed
    for step in way:
        target = target[step]
    target[last] = data.draw(STRANGE)
    try:
        batch = decode_points(json.dumps(changed).encode("utf-8", "surrogatepass"), "application/json", AT + 10**12)
    except KvscopeError:
        return
    SeriesBook(TABLES).prepare(batch)


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(COUNTS, st.integers(-8, 8)), min_size=1, max_size=5), st.integers(-3, 6), st.booleans())
def test_exponential_counts_are_kept_whatever_the_scale(
    deltas: list[tuple[list[int], int]], scale: int, is_delta: bool
) -> None:
    """Cumulative buckets ascend with their bound, and the last of them is all that was counted; of deltas the sum of all."""
    book = SeriesBook(TABLES)
    total = 0.0
    for number, (counts, offset) in enumerate(deltas):
        shape = Exponential(scale, 0.0, 0.0, offset, [float(count) for count in counts], 0.0)
        told = Point(
            "h", "", "exponential", is_delta, AT + number * 10**9, (), count=float(sum(counts)), exponential=shape
        )
        prepared = book.prepare([Metrics({}, [told])])
        book.apply(prepared)
        total = total + sum(counts) if is_delta else float(sum(counts))
        buckets = {labels["le"]: value for _, _, name, labels, value in prepared.rows if name == "h_bucket"}
        ordered = [buckets[le] for le in sorted(buckets, key=float)]
        assert ordered == sorted(ordered)
        assert buckets["+Inf"] == total
        finite = [value for le, value in buckets.items() if le != "+Inf"]
        assert not finite or max(finite) == total


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.floats(0, 1e6)), max_size=20))
def test_sums_of_deltas_are_the_plain_sums(sent: list[tuple[str, int, float]]) -> None:
    """An oracle: per series, values of instants that are newer than all before them are added up, others are repetitions."""
    book = SeriesBook(TABLES)
    totals: dict[str, float] = {}
    newest: dict[str, int] = {}
    for series, second, value in sent:
        told = Point("x", "", "counter", True, AT + second * 10**9, (("s", series),), value=value)
        prepared = book.prepare([Metrics({}, [told])])
        book.apply(prepared)
        if second <= newest.get(series, -1):
            assert prepared.rows == []
            continue
        newest[series] = second
        totals[series] = totals.get(series, 0.0) + value
        assert [row[4] for row in prepared.rows] == [totals[series]]
