"""Decoders on hostile bytes: one error or rows that keep the contract, never anything else; both wire forms alike."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.adapters import vllm
from engine_probe.adapters.geometry import startup_facts
from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.kv_wire import REMOVED_FIELDS, STORED_FIELDS
from engine_probe.adapters.metric_names import SampleMapper, deltas
from engine_probe.adapters.otlp import decode_traces
from engine_probe.adapters.prometheus import PageParser, parse_page
from engine_probe.adapters.thinning import Row, Thinner
from engine_probe.adapters.vllm import normalise_request_id
from engine_probe.chain_hash import chain
from engine_probe.errors import KvscopeError
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.wire.validate import validate

DATA = Path(__file__).parents[1] / "data"
RECORDING = DATA / "recordings" / "vllm-0.32.0-squeezed"
AT_NS = 1_795_958_453_000_000_000
FAR = 2**62
SALT = b"salt"


@cache
def recorded(stream: str, field: str) -> tuple[bytes, ...]:
    """Bodies of a recorded stream: real bytes to mutate."""
    with gzip.open(RECORDING / f"{stream}.jsonl.gz", "rt") as lines:
        bodies = [json.loads(line)[field] for line in lines][:40]
    return tuple(body.encode() if field == "text" else base64.b64decode(body) for body in bodies)


@st.composite
def mutated(draw: st.DrawFn, stream: str, field: str) -> bytes:
    """A recorded body with bytes changed, cut out, doubled or put in."""
    body = bytearray(draw(st.sampled_from(recorded(stream, field))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body)))
        piece = draw(st.binary(max_size=6))
        how = draw(st.sampled_from(("put", "change", "cut", "end")))
        if how == "put":
            body[at:at] = piece
        elif how == "change":
            body[at : at + len(piece)] = piece
        elif how == "cut":
            del body[at : at + draw(st.integers(0, 40))]
        else:
            del body[at:]
    return bytes(body)


def validated(tables: Any) -> None:
    for kind, table in tables.items():
        validate(kind, table, FAR)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=400), mutated("kv_events", "payload_b64")))
def test_kv_events_of_any_bytes(payload: bytes) -> None:
    """KvscopeError or rows that pass the rules of ingest."""
    decoder = KvEventDecoder(SALT)
    try:
        decoder.feed("w", 3, payload, AT_NS)
    except KvscopeError:
        assert decoder.drain() == {}
    validated(decoder.drain())


@settings(deadline=None)
@given(
    st.one_of(st.binary(max_size=400), mutated("otlp", "body_b64")),
    st.sampled_from(["application/x-protobuf", "application/json"]),
)
def test_traces_of_any_bytes(body: bytes, content_type: str) -> None:
    """KvscopeError or rows that pass the rules of ingest."""
    try:
        result = decode_traces(body, content_type, AT_NS)
    except KvscopeError:
        return
    assert result.num_spans == result.num_ignored + len(result.rows["request"])
    assert len(result.span_ids) == len(result.rows["request"])
    rows = result.rows["request"]
    # An instant of another century is refused at ingest, with its row; all else must be sound.
    if all(10**18 < row["at_ns"] < FAR and 10**18 < row["arrival_ns"] < FAR for row in rows):
        validated(result.tables())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "key", "value", "spans"]), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON, st.sampled_from(["resourceSpans", "scopeSpans", "spans", "attributes", "resource", "status"]))
def test_json_traces_of_any_shape(inner: Any, place: str) -> None:
    """Anything in the place of any part of the message: KvscopeError or a result."""
    document: Any = {"attributes": []} if place == "attributes" else {}
    document = {"name": "llm_request", "spanId": "00", place: inner}
    for outer in ("spans", "scopeSpans", "resourceSpans"):
        document = {outer: [document], place: inner} if outer == place else {outer: [document]}
    try:
        decode_traces(json.dumps(document).encode(), "application/json", AT_NS)
    except KvscopeError:
        return


@settings(deadline=None)
@given(
    st.one_of(st.binary(max_size=300), st.text(max_size=300), mutated("metrics", "text").map(lambda page: page[:6000]))
)
def test_pages_of_any_bytes(page: bytes | str) -> None:
    """KvscopeError or samples; a second reading by the same parser says the same."""
    parser = PageParser()
    try:
        first = parser.parse(page)
    except KvscopeError:
        return
    second = parser.parse(page)
    told = [
        [(s.series.name, dict(s.series.labels), repr(s.value), s.at_ns) for s in p.samples] for p in (first, second)
    ]
    assert told[0] == told[1]
    SampleMapper("w", (vllm.NAMES,)).rows(first, AT_NS)


NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,8}", fullmatch=True)
LABELS = st.dictionaries(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True), st.text(max_size=8), max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, LABELS, st.floats(allow_nan=False)), max_size=5))
def test_a_page_that_was_written_is_read_back(samples: list[tuple[str, dict[str, str], float]]) -> None:
    """Any label value survives its escapes; newlines of other kinds are text."""

    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    def line(name: str, labels: dict[str, str], value: float) -> str:
        pairs = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
        return f"{name}{{{pairs}}} {value!r}\n"

    page = parse_page("".join(line(*sample) for sample in samples))
    assert [(s.series.name, dict(s.series.labels), s.value) for s in page.samples] == samples


HASHES = st.integers(0, 9) | st.integers(-(2**63), 2**64 - 1)
EVENTS = st.one_of(
    st.builds(
        lambda hashes, size, extra, fields: {
            "type": "BlockStored",
            "block_hashes": hashes,
            "token_ids": list(range(max(len(hashes) * size - extra, 0))),
            "block_size": size,
            **fields,
        },
        st.lists(HASHES, max_size=4),
        st.integers(1, 4),
        st.integers(0, 3),
        st.fixed_dictionaries(
            {
                "parent_block_hash": st.none() | HASHES,
                "lora_id": st.none() | st.integers(0, 3),
                "medium": st.sampled_from([None, "GPU", "CPU", "FS", "odd"]),
                "lora_name": st.sampled_from([None, "sql"]),
                "extra_keys": st.none() | st.lists(st.none() | st.lists(st.text(max_size=3), max_size=2), max_size=4),
                "group_idx": st.sampled_from([None, 0, 1]),
                "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "sliding_window"]),
            }
        ),
    ),
    st.builds(
        lambda hashes, medium, group: {
            "type": "BlockRemoved",
            "block_hashes": hashes,
            "medium": medium,
            "group_idx": group,
        },
        st.lists(HASHES, max_size=4),
        st.sampled_from([None, "GPU", "CPU"]),
        st.sampled_from([None, 0, 1]),
    ),
    st.just({"type": "AllBlocksCleared"}),
)


def as_array(event: dict[str, Any]) -> list[Any]:
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(event["type"], ())
    return [event["type"], *(event.get(name) for name in names)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.lists(EVENTS, max_size=3)), max_size=6))
def test_both_wire_forms_give_identical_rows(messages: list[tuple[int, int, list[dict[str, Any]]]]) -> None:
    """Whatever the order of messages and events: arrays and maps, the same rows, marks and counts."""
    results = []
    for form in (lambda event: event, as_array):
        decoder = KvEventDecoder(SALT, max_blocks=8)
        for seq, at_s, events in messages:
            ts = AT_NS / 1e9 + at_s
            decoder.feed("w", seq, msgspec.msgpack.encode([ts, [form(event) for event in events], None]), AT_NS)
        tables = decoder.drain()
        validated(tables)
        results.append(({kind: table.to_pylist() for kind, table in tables.items()}, decoder.counts))
    assert results[0] == results[1]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_residency_is_that_of_the_engine(prompts: list[list[int]], data: st.DataObject) -> None:
    """A pool that stores prompts block by block and evicts at random: every row's hash is its prompt's chain, every
    eviction has an age, and what is left is what was stored and not evicted."""
    decoder = KvEventDecoder(SALT)
    resident: dict[tuple[int, ...], int] = {}
    engine_hash = {}
    seq = 0
    expected = []

    def send(event: dict[str, Any]) -> None:
        nonlocal seq
        decoder.feed("w", seq, msgspec.msgpack.encode([AT_NS / 1e9 + seq, [event], 0]), AT_NS)
        seq += 1

    for prompt in prompts:
        prefixes = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        new = [prefix for prefix in prefixes if prefix not in resident]
        # A child stays only as long as its parents in this pool, so what is new is the tail.
        if new:
            parent = new[0][:-1]
            for prefix in new:
                engine_hash[prefix] = hash(prefix) & (2**64 - 1)
                resident[prefix] = 1
            tokens = [token * 7 + n for prefix in new for token in prefix[-1:] for n in range(2)]
            send(
                {
                    "type": "BlockStored",
                    "block_hashes": [engine_hash[prefix] for prefix in new],
                    "parent_block_hash": engine_hash[parent] if parent else None,
                    "token_ids": tokens,
                    "block_size": 2,
                    "medium": "GPU",
                }
            )
            expected += [("stored", prefix) for prefix in new]
        leaves = [p for p in resident if not any(q[:-1] == p for q in resident)]
        for leaf in data.draw(st.lists(st.sampled_from(leaves), unique=True, max_size=2)):
            del resident[leaf]
            send({"type": "BlockRemoved", "block_hashes": [engine_hash[leaf]], "medium": "GPU"})
            expected.append(("evicted", leaf))
    rows = decoder.drain()["block"].to_pylist()

    def chain_of(prefix: tuple[int, ...]) -> int:
        return chain([token * 7 + n for token in prefix for n in range(2)], 2, SALT)[-1]

    assert [(row["change"], row["block_hash"]) for row in rows] == [
        (what, chain_of(prefix)) for what, prefix in expected
    ]
    assert all(row["age_s"] is not None for row in rows if row["change"] == "evicted")
    assert decoder.counts.stored - decoder.counts.removed == len(resident)
    assert decoder.counts.unknown_parents == decoder.counts.unknown_removed == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 39), st.integers(1, 40))
def test_thinning_loses_no_increment(steps: list[int], start: int, length: int) -> None:
    """In any window that holds a kept row, the increments of kept rows are those of all scrapes in it."""
    values = [sum(steps[: n + 1]) for n in range(len(steps))]
    thinner = Thinner(heartbeat_s=7.0)
    labels = {"le": "1"}
    kept: list[Row] = []
    for at, value in enumerate(values):
        kept += thinner.thin([("w", at * 10**9, "x_bucket", labels, float(value))])
    kept += thinner.flush()
    inside = [(row[1] // 10**9, row[4]) for row in sorted(kept, key=lambda row: row[1])]
    window = [value for at, value in inside if start <= at < start + length]
    full = [float(value) for at, value in enumerate(values) if start <= at < start + length]
    if window:
        assert sum(deltas(window)) == sum(deltas(full))
    carried = dict(inside)
    seen = 0.0
    for at, value in enumerate(values):
        seen = carried.get(at, seen)
        assert seen == value


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), max_size=20))
def test_increments_are_never_negative(values: list[float]) -> None:
    """A counter that falls was restarted."""
    assert all(step >= 0 for step in deltas(values))


@settings(deadline=None)
@given(st.text(max_size=40), st.integers(0, 99))
def test_the_clients_id_survives_the_engine(sent: str, index: int) -> None:
    """What vLLM makes of an id is undone, for any id."""
    assert normalise_request_id(f"chatcmpl-{sent}") == sent
    if sent:
        assert normalise_request_id(f"cmpl-{sent}-{index}") == sent


FRAGMENTS = st.sampled_from(
    [
        "non-default args: {",
        "args: Namespace(",
        "'max_num_seqs': ",
        "16",
        "}",
        ")",
        "GPU KV cache size: ",
        "1,2,",
        " tokens",
        "Initializing a V1 LLM engine (v0.3",
        "tensor_parallel_size=",
        "9" * 30,
        "²",
        "# GPU blocks: ",
        "None",
        "[",
        "'",
        "<a: 0>",
    ]
)


@settings(deadline=None)
@given(st.lists(FRAGMENTS | st.text(max_size=8), max_size=12).map("".join))
def test_no_line_of_a_log_raises(line: str) -> None:
    """Facts or nothing."""
    startup_facts([line])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_of_any_bytes_is_read_or_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Whatever stands in it and whatever it is called: KvscopeError, or tables of the contract."""
    start = data.draw(
        st.sampled_from(
            [
                b"",
                b"{",
                b'{"timestamp": 0, "input_length": 1, "output_length": 1}\n',
                b'{"at_ns": 1, "text": "x 1"}\n',
                b'{"kind": "mark", "at_ns": 1, "mark": "gap"}\n',
                b"# TYPE x gauge\nx 1\n",
                b"PAR1",
                b"\x1f\x8b\x08\x00",
            ]
        )
    )
    content = start + data.draw(st.binary(max_size=60))
    if data.draw(st.booleans()):
        content = gzip.compress(content)[: data.draw(st.integers(0, 200))]
    path = tmp_path_factory.mktemp("any") / data.draw(
        st.sampled_from(["a", "a.prom", "a.jsonl", "a.parquet", "mark.ndjson.gz"])
    )
    path.write_bytes(content)
    try:
        for tables in open_source(path).chunks(ReadOptions(), Notes()):
            assert all(table.num_rows >= 0 for table in tables.values())
    except KvscopeError:
        return
