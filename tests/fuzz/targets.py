"""What is fuzzed: one function a decoder, from bytes to nothing. Anything it raises but a `KvscopeError` is a finding.

`seeds` gives each target what the real thing sends, so that the fuzzer starts behind the first check.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from engine_probe.errors import KvscopeError

DATA: Final = Path(__file__).parents[1] / "data"
NOW_NS: Final = 1_795_958_453_000_000_000
MAX_FILE_BYTES: Final = 1 << 16

Target = Callable[[bytes], None]


def _arrow(data: bytes) -> None:
    from engine_probe.wire.codec import decode_arrow
    from engine_probe.wire.validate import validate

    for kind, table in decode_arrow(data, max_decoded_bytes=64 << 20).tables.items():
        validate(kind, table, NOW_NS)


def _json(data: bytes) -> None:
    from engine_probe.wire.codec import decode_json
    from engine_probe.wire.validate import validate

    for kind, table in decode_json(data).tables.items():
        validate(kind, table, NOW_NS)


def _ndjson(data: bytes) -> None:
    from engine_probe.wire.codec import decode_ndjson
    from engine_probe.wire.validate import validate

    for kind, table in decode_ndjson(data).tables.items():
        validate(kind, table, NOW_NS)


def _kv_events(data: bytes) -> None:
    from engine_probe.adapters.kv_events import KvEventDecoder

    decoder = KvEventDecoder(b"salt")
    half = len(data) // 2
    for number, payload in enumerate((data, data[:half], data[half:])):
        decoder.feed("w", number, payload, NOW_NS)
    decoder.drain()


def _otlp_protobuf(data: bytes) -> None:
    from engine_probe.adapters.otlp import decode_traces

    decode_traces(data, "application/x-protobuf", NOW_NS).tables()


def _otlp_json(data: bytes) -> None:
    from engine_probe.adapters.otlp import decode_traces

    decode_traces(data, "application/json", NOW_NS).tables()


def _prometheus(data: bytes) -> None:
    from engine_probe.adapters.metric_names import SampleMapper
    from engine_probe.adapters.prometheus import PageParser
    from engine_probe.adapters.registry import recognise, tables_for

    parser = PageParser()
    for text in (data, data[len(data) // 3 :]):
        page = parser.parse(text)
        SampleMapper("w", tables_for(page)).rows(page, NOW_NS)
        maker = recognise(page)
        if maker is not None:
            from engine_probe.adapters.adapter import Discovery

            maker.facts(page, Discovery(series=frozenset(page.names())))


def _router_logs(data: bytes) -> None:
    from engine_probe.adapters.dynamo_log import DynamoLog
    from engine_probe.adapters.llm_d_log import PickerLog
    from engine_probe.adapters.lmcache_log import LmcacheLog
    from engine_probe.adapters.router_log import SglangRouterLog, StackRouterLog, VllmRouterLog
    from engine_probe.schema import table_from_rows
    from engine_probe.wire.validate import validate

    routers = (SglangRouterLog("r"), StackRouterLog("r"), VllmRouterLog("r"), DynamoLog("r"), PickerLog("r"))
    lines = data.decode("utf-8", "replace").splitlines()
    for reader in (*routers, LmcacheLog("w", clock=lambda: NOW_NS)):
        for line in lines:
            for kind, rows in reader.feed(line).items():
                validate(kind, table_from_rows(kind, rows), NOW_NS)


def _prometheus_server(data: bytes) -> None:
    """What a metrics server answers: its JSON, then the pages within."""
    from engine_probe.attach.prometheus_api import PrometheusApi
    from engine_probe.readers.server_targets import ServerTargets

    class Api(PrometheusApi):
        def _ask(self, path: str, form: Mapping[str, str]) -> tuple[int, bytes]:
            return 200, data

    api, targets = Api("http://127.0.0.1:9", verify=False), ServerTargets()
    try:
        targets.take(api.raw(['{job="a"}'], NOW_NS - 10**12, NOW_NS).series)
    finally:
        api.close()
    targets.finish()
    targets.drain()


def _start_up_log(data: bytes) -> None:
    from engine_probe.adapters.geometry import StartupLog

    reader = StartupLog()
    for line in data.decode("utf-8", "replace").splitlines():
        reader.feed(line)
    reader.worker_facts()


def _import(data: bytes) -> None:
    """Any file that a person hands to `import`: the format is found by content."""
    from engine_probe.readers.detect import open_source
    from engine_probe.readers.source import Notes, ReadOptions

    with tempfile.TemporaryDirectory(prefix="kvscope-fuzz-") as folder:
        path = Path(folder) / "file"
        path.write_bytes(data[:MAX_FILE_BYTES])
        for _ in open_source(path).chunks(ReadOptions(), Notes()):
            pass


def _targets(data: bytes) -> None:
    from engine_probe.attach.targets import read_file

    with tempfile.TemporaryDirectory(prefix="kvscope-fuzz-") as folder:
        for name in ("t.json", "t.yml"):
            path = Path(folder) / name
            path.write_bytes(data)
            with contextlib.suppress(KvscopeError):
                read_file(path)


def _proxied_stream(data: bytes) -> None:
    """What the proxy reads of an answer: an event stream in two pieces, each API by turns; then the same in one piece."""
    from engine_probe.proxy.dialects import read_event, read_whole
    from engine_probe.proxy.order import OpenAnswers, Order
    from engine_probe.proxy.reading import Reading
    from engine_probe.proxy.sse import SseParser

    parser, reading = SseParser(), Reading(Order("r", OpenAnswers()))
    half = len(data) // 2
    for now, part in enumerate((data[:half], data[half:]), 1):
        for event in parser.feed(part):
            read_event(reading, event.name, event.data, now)
    for event in parser.finish():
        read_event(reading, event.name, event.data, 3)
    reading.tokens.counts(reading.columns.get("output_tokens"))
    read_whole(Reading(Order("r", OpenAnswers())), data)


def _proxied_wire(data: bytes) -> None:
    """Heads, chunked bodies, compressed bodies and picked values, as they come from sockets."""
    from engine_probe.proxy.framing import BadFraming, ChunkedBody
    from engine_probe.proxy.heads import BadHead, parse_request, parse_response
    from engine_probe.proxy.inflate import Unreadable, inflater
    from engine_probe.proxy.peek import Peek

    half = len(data) // 2
    for parse in (parse_request, parse_response):
        with contextlib.suppress(BadHead):
            parse(data + b"\r\n\r\n")
    body, peek = ChunkedBody(), Peek(["model", "n"], ["usage"])
    with contextlib.suppress(BadFraming):
        for part in (data[:half], data[half:]):
            body.feed(part, [])
    for part in (data[:half], data[half:]):
        peek.feed(part)
    for encoding in (b"gzip", b"deflate", b"zstd"):
        reader = inflater(encoding)
        if reader is not None:
            with contextlib.suppress(Unreadable):
                for part in (data[:half], data[half:]):
                    for _ in reader.feed(part):
                        pass


def _engine_request(data: bytes) -> None:
    from engine_probe.engine.server.requests import (
        ChatRequest,
        CompletionRequest,
        DetokenizeRequest,
        TokenizeRequest,
        parse,
    )
    from engine_probe.engine.torch_executor.chat_template import ChatTemplate

    with contextlib.suppress(KvscopeError):
        asked = parse(data, CompletionRequest)
        assert asked.prompts()
        assert all(asked.stops)
    with contextlib.suppress(KvscopeError):
        ChatTemplate().render(parse(data, ChatRequest).messages)
    for other in (TokenizeRequest, DetokenizeRequest):
        with contextlib.suppress(KvscopeError):
            parse(data, other)


TARGETS: Final[dict[str, Target]] = {
    "engine_request": _engine_request,
    "arrow": _arrow,
    "json": _json,
    "ndjson": _ndjson,
    "kv_events": _kv_events,
    "otlp_protobuf": _otlp_protobuf,
    "otlp_json": _otlp_json,
    "prometheus": _prometheus,
    "prometheus_server": _prometheus_server,
    "router_logs": _router_logs,
    "start_up_log": _start_up_log,
    "import": _import,
    "targets": _targets,
    "proxied_stream": _proxied_stream,
    "proxied_wire": _proxied_wire,
}


def seeds(name: str) -> Iterator[bytes]:
    """Real or realistic inputs of a target, each at most `MAX_FILE_BYTES`."""
    for seed in _SEEDS.get(name, lambda: iter(()))():
        yield seed[:MAX_FILE_BYTES]


def _files(*patterns: str) -> Callable[[], Iterator[bytes]]:
    def read() -> Iterator[bytes]:
        for pattern in patterns:
            for path in sorted(DATA.glob(pattern)):
                if path.is_file():
                    yield gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()

    return read


def _event_rows() -> dict[str, list[dict[str, object]]]:
    request = {"request_id": "r", "vantage": "engine", "state": "finished", "worker": "w", "at_ns": NOW_NS}
    block = {"worker": "w", "at_ns": NOW_NS, "change": "stored", "block_hash": 7}
    return {"request": [request | {"arrival_ns": NOW_NS, "token_ns": [NOW_NS], "labels": {"a": "b"}}], "block": [block]}


def _arrow_seeds() -> Iterator[bytes]:
    from engine_probe.schema import table_from_rows
    from engine_probe.wire.codec import encode_arrow

    tables = {kind: table_from_rows(kind, rows) for kind, rows in _event_rows().items()}
    for compression in (None, "lz4", "zstd"):
        yield encode_arrow(tables, compression)


def _json_seeds() -> Iterator[bytes]:
    yield json.dumps({"source": "s", "epoch": "e", "seq": 0, "sent_ns": NOW_NS, "events": _event_rows()}).encode()


def _ndjson_seeds() -> Iterator[bytes]:
    lines: list[dict[str, object]] = [{"source": "s", "epoch": "e", "seq": 0, "sent_ns": NOW_NS}]
    lines += [{"kind": kind, **row} for kind, rows in _event_rows().items() for row in rows]
    yield "\n".join(map(json.dumps, lines)).encode()


def _kv_seeds() -> Iterator[bytes]:
    import msgspec

    stored = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None]
    yield msgspec.msgpack.encode([1.5, [stored, ["BlockRemoved", [1]], ["AllBlocksCleared"]], 0])
    tagged = {"type": "BlockStored", "block_hashes": [b"12345678"], "parent_block_hash": None, "token_ids": [1, 2]}
    yield msgspec.msgpack.encode([1.5, [tagged | {"block_size": 2, "medium": "GPU"}]])


def _server_seeds() -> Iterator[bytes]:
    def series(name: str, **labels: str) -> dict[str, object]:
        told = {"__name__": name, "job": "a", "instance": "w:8000", **labels}
        return {"metric": told, "values": [[NOW_NS / 1e9 - 5, "1"], [NOW_NS / 1e9 - 1, "2.5"]]}

    found = [series("vllm:num_requests_running", engine="0"), series("up"), series("DCGM_FI_DEV_XID_ERRORS", gpu="0")]
    found.append({"metric": {"__name__": "h"}, "histograms": [[1.5, {"count": "1"}]]})
    data = {"resultType": "matrix", "result": found}
    yield json.dumps({"status": "success", "data": data, "warnings": ["partial"]}).encode()
    yield b'{"status":"error","errorType":"bad_data","error":"parse error"}'


def _stream_seeds() -> Iterator[bytes]:
    from tests.proxy_answers import chat, llama, messages, responses, sglang, usage, wire

    yield b"".join(
        wire([chat("a"), chat("b"), chat(finish="stop"), usage(prompt_tokens=2, completion_tokens=2), "[DONE]"])
    )
    yield b"".join(wire(responses("a", "b"), names=True))
    yield b"".join(wire(messages("a", "b"), names=True)).replace(b"\n", b"\r\n")
    yield b"".join(wire([*sglang(1, 3), *llama("a")]))
    yield json.dumps(
        {"id": "a", "choices": [{"index": 0, "message": {"content": "x"}}], "usage": {"prompt_tokens": 1}}
    ).encode()


def _wire_seeds() -> Iterator[bytes]:
    yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nConnection: x, close"
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream"
    yield b"3;a=b\r\nabc\r\n0\r\nX-T: 1\r\n\r\n"
    yield b'{"messages": [{"content": "\\"x\\" {["}], "model": "m", "n": 2, "usage": {"a": [1]}}'
    yield gzip.compress(b"data: x\n\n" * 9)


def _request_seeds() -> Iterator[bytes]:
    yield b'{"model": "m", "prompt": "x", "n": 2, "stop": ["a"], "stream_options": {"include_usage": true}, "top_k": -1}'
    yield b'{"prompt": [[1, 2], [3]], "seed": -1, "priority": 2, "logit_bias": {}, "temperature": 0.5}'
    yield b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_completion_tokens": 3}'
    yield b'{"tokens": [1, 2]}'


_SEEDS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "engine_request": _request_seeds,
    "arrow": _arrow_seeds,
    "json": _json_seeds,
    "ndjson": _ndjson_seeds,
    "kv_events": _kv_seeds,
    "otlp_protobuf": _files("otlp/*.pb"),
    "otlp_json": _files("otlp/*.json", "benchmarks/*otlp*.json"),
    "prometheus": _files("samples/**/*.prom"),
    "prometheus_server": _server_seeds,
    "router_logs": _files(
        "samples/*.log", "samples/*log*.jsonl", "samples/dynamo-*/*log*", "samples/dynamo-*/trace.jsonl"
    ),
    "start_up_log": _files("recordings/*/engine-worker-0.log.gz"),
    "import": _files("benchmarks/*", "samples/*.prom", "samples/*.jsonl"),
    "proxied_stream": _stream_seeds,
    "proxied_wire": _wire_seeds,
    "targets": lambda: iter((b'[{"targets": ["a:1"], "labels": {"engine": "vllm"}}]', b"- targets: ['a:1']\n")),
}
