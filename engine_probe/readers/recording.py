"""A recording folder: `scenario.json` beside gzip JSON lines of what client, engine and host said in one run.

What becomes what: client.jsonl.gz -> `request` at the client's vantage; otlp -> `request` at the engine's; metrics and
slots -> `sample`; kv_events -> `block`; host -> `sample` cpu_util; scenario, the endpoints' answers in it and engine
logs -> `worker`; its windows -> `mark` experiment with attrs window, edge, start_ns, end_ns. All instants are of one host clock: a `clock` mark with offset
and error 0 says so for the client and each worker. Invariant: the folder's name and the keys `truth`, `title`,
`scenario`, `workload` and `prefix_group`, which tell the answer, are never read into rows.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine_probe.adapters import llamacpp, registry, vllm
from engine_probe.adapters.geometry import SAFE_FLAGS, startup_facts
from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.otlp import decode_traces
from engine_probe.adapters.prometheus import Page, PageParser
from engine_probe.adapters.thinning import Row
from engine_probe.errors import UnknownFormat
from engine_probe.readers.client_rows import client_row
from engine_probe.readers.lines import json_lines, text_lines
from engine_probe.readers.marks import window_marks
from engine_probe.readers.scrapes import ScrapeTarget, sample_table
from engine_probe.readers.source import CHUNK_ROWS, FoundWindow, Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

Tables = Mapping[str, "pa.Table"]
_STREAMS = ("client", "otlp", "metrics", "kv_events", "slots", "host")
_KV_ENGINES = frozenset(("vllm", "sglang"))


class Recording:
    """One folder. Only `scenario.json` and one of client, otlp, metrics, kv_events or host need be there."""

    format = "recording"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        streams = [folder / f"{name}.jsonl.gz" for name in _STREAMS]
        self._streams = {path.name.split(".")[0]: path for path in streams if path.is_file()}
        self._logs = sorted(folder.glob("engine-*.log.gz"))
        self._scenario = _scenario(folder / "scenario.json")
        self._engine = str(self._scenario.get("engine", "unknown"))
        self._phases: dict[str, str] = {}
        self.files = [folder / "scenario.json", *self._streams.values(), *self._logs]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        """Tables in the order worker and marks, client, engine spans, samples, blocks, host."""
        notes.facts["engine"] = self._engine
        yield from self._slow_facts(notes)
        for name, read in (
            ("client", self._client),
            ("otlp", self._spans),
            ("metrics", self._metrics),
            ("kv_events", self._blocks),
            ("slots", self._slots),
            ("host", self._host),
        ):
            if name in self._streams:
                yield from read(self._streams[name], options, notes)
            elif name != "slots":
                notes.not_told.append(f"{name}: the recording has no {name}.jsonl.gz")
        others = sorted(p.name for p in self._folder.iterdir() if p.is_file() and p not in self.files)
        for name in others:
            notes.left_out.append(f"{name}: no reader for this file yet")

    # --- slow facts and windows

    def _slow_facts(self, notes: Notes) -> Iterator[Tables]:
        scenario, marks, workers = self._scenario, [], []
        for name, span in _dict(scenario.get("windows")).items():
            if isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span):
                window = FoundWindow(name, span[0], span[1])
                notes.windows.append(window)
                marks += window_marks(window)
        for worker in scenario.get("workers") or []:
            at_ns = _dict(scenario.get("engine_ready_ns")).get(worker) or scenario.get("start_ns") or 0
            workers.append({"worker": worker, "at_ns": at_ns, **self._worker_facts(worker)})
            marks.append(_mark("worker_up", at_ns, worker, f"{worker} was ready.", {}, worker))
            marks.append(_clock_mark(worker, at_ns))
        marks.append(_clock_mark("client", int(scenario.get("start_ns") or 0)))
        tables = {"mark": table_from_rows("mark", marks)}
        if workers:
            tables["worker"] = table_from_rows("worker", workers)
        yield tables

    def _worker_facts(self, worker: str) -> dict[str, Any]:
        """Scenario first; what it does not tell from the engine's log, its page and its endpoints' answers."""
        facts = _scenario_facts(self._scenario, worker)
        others = []
        log = self._folder / f"engine-{worker}.log.gz"
        if self._engine == vllm.ENGINE:
            if log in self._logs:
                others.append(startup_facts(line.decode("utf-8", "replace") for _, line in text_lines(log)))
            if "metrics" in self._streams:
                others.append(self._first_cache_config(worker))
        elif self._engine in registry.ENGINES:
            others += self._told_facts(worker, log)
        for other in others:
            flags = {**other.get("flags", {}), **facts["flags"]}
            known = {key: value for key, value in facts.items() if value is not None}
            facts = {**other, **known, "flags": flags}
        return facts

    def _told_facts(self, worker: str, log: Path) -> Iterator[dict[str, Any]]:
        """What `attach` would have found: page and endpoints, then the log."""
        adapter = registry.adapter(self._engine)
        page = self._first_page(worker)
        if page is not None:
            asked = _Recorded(_dict(_dict(self._scenario.get("endpoint_info")).get(worker)))
            told = adapter.facts(page, adapter.discover(asked, page)).get("0", {})
            yield {key: value for key, value in told.items() if value is not None}
        reader = adapter.log_reader(worker)
        if log in self._logs and reader is not None:
            for _, line in text_lines(log):
                reader.feed(line.decode("utf-8", "replace"))
            yield reader.worker_facts()

    def _first_page(self, worker: str) -> Page | None:
        if "metrics" in self._streams:
            for _, row in json_lines(self._streams["metrics"]):
                if row.get("worker") == worker and row.get("status") == 200 and isinstance(row.get("text"), str):
                    return PageParser().parse(row["text"])
        return None

    def _first_cache_config(self, worker: str) -> dict[str, Any]:
        page = self._first_page(worker)
        labels = {} if page is None else vllm.cache_config(page)
        return vllm.cache_config_facts(labels["0"]) if "0" in labels else {}

    # --- streams

    def _client(self, path: Path, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        rows: list[dict[str, Any]] = []
        model = self._scenario.get("served_model")
        for number, recorded in json_lines(path, ("request_id", "send_ns", "end_ns")):
            row = client_row(recorded, f"{path.name}, line {number}")
            row["engine"], row["model"] = self._engine, model
            self._phases[row["request_id"]] = row["labels"].get("phase", "")
            rows.append(row)
            if len(rows) >= 2_000:
                yield {"request": table_from_rows("request", rows)}
                rows = []
        if rows:
            yield {"request": table_from_rows("request", rows)}

    def _spans(self, path: Path, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        rows: list[dict[str, Any]] = []
        ignored = 0
        for number, message in json_lines(path, ("at_ns", "content_type", "body_b64")):
            where = f"{path.name}, line {number}"
            body = _base64(message["body_b64"], where)
            if message.get("content_encoding") == "gzip":
                body = _gunzip(body, where)
            try:
                result = decode_traces(body, str(message["content_type"]), _instant(message["at_ns"], where))
            except UnknownFormat as error:
                raise UnknownFormat(f"{where}: {error.message}", line=number) from error
            ignored += result.num_ignored
            for row in result.rows["request"]:
                phase = self._phases.get(row["request_id"])
                if phase:
                    row["labels"] = {**row["labels"], "phase": phase}
                row.setdefault("model", self._scenario.get("served_model"))
                rows.append(row)
        if ignored:
            notes.left_out.append(f"otlp: {ignored} spans that are not requests (start-up)")
        for start in range(0, len(rows), CHUNK_ROWS):
            yield {"request": table_from_rows("request", rows[start : start + CHUNK_ROWS])}

    def _metrics(self, path: Path, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        targets: dict[str, ScrapeTarget] = {}
        failed = 0
        for number, scrape in json_lines(path, ("at_ns", "worker", "status", "text")):
            worker, at_ns = str(scrape["worker"]), _instant(scrape["at_ns"], f"{path.name}, line {number}")
            if scrape["status"] != 200:
                failed += 1
                continue
            target = targets.setdefault(worker, ScrapeTarget(worker))
            try:
                target.take(scrape["text"], at_ns)
            except UnknownFormat as error:
                raise UnknownFormat(f"{path.name}, line {number}: {error.message}", line=number) from error
            # The first sight of a worker's settings went into its row already.
            target.slow["worker"] = target.slow["worker"] if target.slow["mark"] else []
            if len(target.rows) >= CHUNK_ROWS:
                yield target.drain()
        for target in targets.values():
            target.finish()
            if tables := target.drain():
                yield tables
        notes.facts["samples_read"] = sum(target.num_read for target in targets.values())
        if failed:
            notes.left_out.append(f"metrics: {failed} scrapes that the engine did not answer with 200")
        if self._engine not in registry.ENGINES:
            notes.assumed.append(f"metrics: {self._engine} names are kept as they are, no adapter maps them yet")

    def _blocks(self, path: Path, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        if self._engine not in _KV_ENGINES:
            notes.left_out.append(f"kv_events: no adapter for {self._engine} yet")
            return
        decoder = KvEventDecoder(options.salt)
        pending = 0
        for number, message in json_lines(path, ("at_ns", "worker", "seq", "payload_b64")):
            where = f"{path.name}, line {number}"
            payload = _base64(message["payload_b64"], where)
            try:
                seq, at_ns = _instant(message["seq"], where), _instant(message["at_ns"], where)
                fed = decoder.feed(str(message["worker"]), seq, payload, at_ns)
            except UnknownFormat as error:
                raise UnknownFormat(f"{where}: {error.message}", line=number) from error
            pending += fed.num_rows
            if pending >= CHUNK_ROWS:
                yield decoder.drain()
                pending = 0
        if tables := decoder.drain():
            yield tables
        notes.facts.update({f"kv_{key}": value for key, value in asdict(decoder.counts).items() if value})

    def _slots(self, path: Path, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        rows: list[dict[str, Any]] = []
        for number, look in json_lines(path, ("at_ns", "worker", "status", "text")):
            where = f"{path.name}, line {number}"
            if look["status"] == 200 and isinstance(look["text"], str):
                try:
                    found = llamacpp.slots(look["text"].encode())
                except UnknownFormat as error:
                    raise UnknownFormat(f"{where}: {error.message}", line=number) from error
                rows += llamacpp.slot_samples(found, str(look["worker"]), _instant(look["at_ns"], where))
            if len(rows) >= CHUNK_ROWS:
                yield {"sample": table_from_rows("sample", rows)}
                rows = []
        if rows:
            yield {"sample": table_from_rows("sample", rows)}

    def _host(self, path: Path, options: ReadOptions, notes: Notes) -> Iterator[Tables]:
        rows: list[Row] = []
        labels: dict[str, dict[str, str]] = {}
        for _, row in json_lines(path, ("at_ns", "cpu_busy")):
            for part, value in row.items():
                if part != "at_ns" and isinstance(value, int | float):
                    name = "cpu_util" if part == "cpu_busy" else f"cpu_util_{part}"
                    rows.append(
                        (
                            None,
                            _instant(row["at_ns"], path.name),
                            name,
                            labels.setdefault(part, {"wire": part}),
                            float(value),
                        )
                    )
        if rows:
            yield {"sample": sample_table(rows)}


class _Recorded:
    """An engine's endpoints as they answered when the recording was made."""

    url = ""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers

    def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
        raise UnknownFormat(f"a recording has no further pages ({path})")

    def json(self, path: str) -> Any:
        return self._answers.get(path)


def _scenario(path: Path) -> dict[str, Any]:
    try:
        scenario = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnknownFormat(f"{path.name} is not a JSON object: {error}. Is the recording complete?") from error
    if not isinstance(scenario.get("engine"), str):
        raise UnknownFormat(f"{path.name} has no 'engine': this is not a recording's scenario.")
    workers = scenario.get("workers")
    if workers is not None and not (isinstance(workers, list) and all(isinstance(w, str) for w in workers)):
        raise UnknownFormat(f"{path.name}: 'workers' is not a list of names.")
    if type(scenario.get("start_ns")) is not int:
        raise UnknownFormat(f"{path.name} has no 'start_ns' (ns since 1970): this is not a recording's scenario.")
    return scenario


def _scenario_facts(scenario: Mapping[str, Any], worker: str) -> dict[str, Any]:
    """`worker` columns told by scenario.json; the command line's flags under the engine's own names."""
    model = _dict(scenario.get("model"))
    flags: dict[str, str] = {}
    for flag, value in _dict(scenario.get("flags")).items():
        name = str(flag).lstrip("-").replace("-", "_")
        if name.removeprefix("no_") in SAFE_FLAGS and name.startswith("no_"):
            name, value = name.removeprefix("no_"), False
        if name in SAFE_FLAGS or (scenario["engine"] != vllm.ENGINE and not isinstance(value, str)):
            flags[name] = str(value)
    size, per_token = model.get("block_size"), model.get("kv_bytes_per_token")
    version = _dict(_dict(_dict(scenario.get("endpoint_info")).get(worker)).get("/version")).get("version")
    caching = flags.get("enable_prefix_caching")
    kv_dtype = model.get("kv_cache_dtype")
    return {
        "engine": scenario["engine"],
        "engine_version": str(version) if version else _version(scenario.get("engine_version")),
        "model": scenario.get("served_model"),
        "role": "mixed",
        "dtype": model.get("dtype"),
        "kv_dtype": None if kv_dtype is None else kv_dtype.removeprefix("auto (").removesuffix(")"),
        "block_size": size,
        "num_blocks": model.get("usable_blocks") or model.get("num_blocks"),
        "kv_bytes_per_block": size * per_token if size and per_token else None,
        "max_context": model.get("max_model_len"),
        "prefix_caching": None if caching is None else caching == "True",
        "flags": flags,
    }


def _version(text: Any) -> str | None:
    """The first word where it is a version: a description of the build is none."""
    word = str(text or "").split(" ")[0]
    return word if re.match(r"[vb]?\d", word) else None


def _clock_mark(subject: str, at_ns: int) -> dict[str, Any]:
    attrs = {"offset_s": "0", "error_s": "0"}
    return _mark("clock", at_ns, subject, f"{subject} was recorded with the clock of the one host.", attrs)


def _mark(
    mark: str, at_ns: int, subject: str, text: str, attrs: dict[str, str], worker: str | None = None
) -> dict[str, Any]:
    return {"mark": mark, "at_ns": at_ns, "subject": subject, "text": text, "attrs": attrs, "worker": worker}


def _instant(value: Any, where: str) -> int:
    if type(value) is not int:
        raise UnknownFormat(f"{where}: {value!r} is no instant in ns.")
    return value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _base64(text: Any, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UnknownFormat(f"{where}: the body is not base64: {error}") from error


def _gunzip(body: bytes, where: str) -> bytes:
    try:
        return gzip.decompress(body)
    except (OSError, EOFError) as error:
        raise UnknownFormat(f"{where}: the body is not gzip: {error}") from error
