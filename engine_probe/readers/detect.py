"""What is at PATH: a recording, a benchmark's output, a trace, pages, events. Content decides, or `--format`.

Names only tell what is worth opening in a folder. Invariant: one format is found or none; what was found and what would
be known is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine_probe.errors import UnknownFormat, UsageError
from engine_probe.readers import events, mooncake, otlp_files, pages
from engine_probe.readers.benchmarks import (
    aiperf,
    csv_traces,
    genai_perf,
    guidellm,
    sglang_bench,
    summaries,
    vllm_bench,
)
from engine_probe.readers.engine_log import EngineLog
from engine_probe.readers.lines import head
from engine_probe.readers.mapped import MappedLog
from engine_probe.readers.mapping import load_mapping
from engine_probe.readers.recording import Recording
from engine_probe.readers.sniff import HEAD_BYTES, csv_header, foreign, top_keys
from engine_probe.readers.source import Source

KNOWN: Final = (
    "a recording folder (with scenario.json), the output of a benchmark (vllm bench serve, SGLang bench_serving, AIPerf, "
    "GuideLLM, GenAI-Perf), a trace (Mooncake, Azure LLM, BurstGPT), OTLP as JSON lines, Prometheus text (a page or a "
    "folder of pages), NDJSON events, Parquet events, or a folder of them; anything else of JSON lines and access logs "
    "with --mapping FILE"
)
_DATA: Final = (".json", ".jsonl", ".ndjson", ".csv")
_PACKED: Final = (".gz", ".zst", ".zstd")


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its name for `--format`, how a PATH of it is opened, what it is, whether it is a benchmark or trace."""

    name: str
    open: Callable[[Path], Source]
    what: str
    is_benchmark: bool = False


def _aiperf(path: Path) -> Source:
    return aiperf.AiPerf(path, _aiperf_summary(path))


FORMATS: Final = {
    found.name: found
    for found in (
        Format("recording", lambda path: Recording(path if path.is_dir() else path.parent), "recording folder"),
        Format("vllm-bench", vllm_bench.VllmBench, "`vllm bench serve --save-result` JSON", True),
        Format("sglang-bench", sglang_bench.SglangBench, "SGLang `bench_serving` JSON lines", True),
        Format("aiperf", _aiperf, "AIPerf `profile_export.jsonl`", True),
        Format("aiperf-summary", lambda path: summaries.Summary(path, "aiperf"), "AIPerf summary JSON", True),
        Format("guidellm", guidellm.GuideLlm, "GuideLLM report JSON", True),
        Format("genai-perf", genai_perf.GenAiPerf, "GenAI-Perf `profile_export.json`", True),
        Format("genai-perf-summary", lambda path: summaries.Summary(path, "genai-perf"), "GenAI-Perf summary JSON", True),
        Format("mooncake", mooncake.MooncakeTrace, "Mooncake trace JSON lines", True),
        Format("azure-llm", csv_traces.azure, "Azure LLM inference trace CSV", True),
        Format("burstgpt", csv_traces.burst_gpt, "BurstGPT CSV", True),
        Format("otlp", otlp_files.OtlpFile, "OTLP JSON lines (spans and metrics)"),
        Format("prometheus", lambda path: pages.PageFiles([path]), "Prometheus text"),
        Format("scrapes", pages.ScrapeLog, "log of metrics scrapes"),
        Format("dynamo-log", lambda path: EngineLog(path, "dynamo", "Dynamo log"), "Dynamo's log or request trace"),
        Format("llm-d-log", lambda path: EngineLog(path, "llm-d", "llm-d log"), "log of llm-d's endpoint picker"),
        Format("events", lambda path: events.EventFiles([path], path.parent), "NDJSON or Parquet events"),
    )
}  # fmt: skip


def open_source(path: Path, format_name: str | None = None, mapping: str | None = None) -> Source:
    """Recognise PATH, or take it for `format_name`, or read it by a mapping (a file, or the name of one that is shipped).

    Raises UnknownFormat saying what was found and what would be known, UsageError for a wrong mapping or both.
    """
    if mapping is not None:
        return _mapped(path, mapping, format_name)
    if not path.exists():
        raise UnknownFormat(f"There is nothing at {path}. Give the path of {KNOWN}.")
    try:
        if format_name is not None:
            return _named(path, format_name)
        return _folder(path) if path.is_dir() else _file(path)
    except PermissionError as error:
        raise UnknownFormat(f"{path} may not be read by this user: {error.strerror}.") from error


def _mapped(path: Path, mapping: str, format_name: str | None) -> Source:
    if format_name is not None:
        raise UsageError("--format and --mapping exclude each other: a mapping is the format.")
    compiled = load_mapping(mapping)
    if not path.is_file():
        raise UnknownFormat(f"{path} is no file; a mapping reads the lines of one file.")
    if (told := foreign(_start(path))) is not None:
        raise UnknownFormat(f"{path} is {told[0]}. {told[1]}")
    return MappedLog(path, compiled)


def _named(path: Path, name: str) -> Source:
    known = FORMATS.get(name)
    if known is None:
        raise UnknownFormat(f"--format {name!r} is not known. Known are {', '.join(FORMATS)}.")
    if path.is_dir() and name != "recording":
        if name in ("events", "prometheus"):
            return _folder(path)
        raise UnknownFormat(f"{path} is a folder; --format {name} reads one file. Give the file.")
    _start(path)
    return known.open(path)


def _folder(path: Path) -> Source:
    if (path / "scenario.json").is_file():
        return Recording(path)
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    rows = [p for p in files if _holds_events(p)]
    if rows:
        return events.EventFiles(rows, path, [p for p in files if p not in rows])
    if (found := _one_benchmark(path, files)) is not None:
        return found
    kept = [p for p in files if _plain_name(p).endswith(pages.SUFFIXES) and p.stat().st_size]
    if kept:
        return pages.PageFiles(kept, [p for p in files if p not in kept])
    told = "nothing" if not files else f"{len(files)} files, the first {files[0].name}"
    raise UnknownFormat(f"The folder {path} holds nothing that is known (it holds {told}). Known are {KNOWN}.")


def _one_benchmark(folder: Path, files: list[Path]) -> Source | None:
    """The one benchmark whose files lie here; summaries do not count beside what they are of."""
    found = [(p, name) for p in files if _plain_name(p).endswith(_DATA) and (name := _benchmark_name(p)) is not None]
    runs = [(p, name) for p, name in found if not name.endswith("-summary")] or found
    if not runs:
        return None
    if len(runs) > 1:
        names = ", ".join(str(p.relative_to(folder)) for p, _ in runs[:4]) + (", ..." if len(runs) > 4 else "")
        raise UnknownFormat(
            f"The folder {folder} holds {len(runs)} outputs of benchmarks ({names}). Each is a run of its own: import "
            "them one by one, each under its own --run."
        )
    return FORMATS[runs[0][1]].open(runs[0][0])


def _benchmark_name(path: Path) -> str | None:
    try:
        start = head(path, HEAD_BYTES)
    except UnknownFormat:
        return None
    name = _by_keys(top_keys(start), csv_header(start))
    return name if name is not None and FORMATS[name].is_benchmark else None


def _file(path: Path) -> Source:
    if path.name == "scenario.json":
        return Recording(path.parent)
    start = _start(path)
    if start[:4] == b"PAR1" or path.name.endswith(events.PARQUET):
        return events.EventFiles([path], path)
    if not start.strip():
        raise UnknownFormat(f"{path} holds nothing but empty lines.")
    if (told := foreign(start)) is not None:
        raise UnknownFormat(f"{path} is {told[0]}. {told[1]}")
    start = start.removeprefix(b"\xef\xbb\xbf")
    if start.lstrip()[:1] in (b"{", b"["):
        return _json_file(path, start)
    if (name := _by_keys((), csv_header(start))) is not None:
        return FORMATS[name].open(path)
    if b"\0" not in start and _looks_like_page(start):
        return pages.PageFiles([path])
    if header := csv_header(start):
        raise UnknownFormat(
            f"{path} is CSV with the columns {', '.join(header[:8])}, which are not known. Known are {KNOWN}."
        )
    raise UnknownFormat(f"{path} is nothing that is known (it begins with {start[:24]!r}). Known are {KNOWN}.")


def _start(path: Path) -> bytes:
    """The first MiB, decompressed. Raises UnknownFormat for an empty file."""
    if path.stat().st_size == 0:
        raise UnknownFormat(f"{path} is empty. Was the copy complete?")
    return head(path, HEAD_BYTES)


def _holds_events(path: Path) -> bool:
    if path.name.endswith(events.PARQUET):
        return True
    if not _plain_name(path).endswith((".ndjson", ".jsonl")):
        return False
    try:
        return events.is_event_line(head(path, HEAD_BYTES).lstrip().split(b"\n", 1)[0])
    except UnknownFormat:
        return True  # the reader says what is wrong with it


def _json_file(path: Path, start: bytes) -> Source:
    first = start.lstrip().split(b"\n", 1)[0]
    keys = top_keys(start)
    if (name := _by_keys(keys, ())) is not None:
        return FORMATS[name].open(path)
    if events.is_event_line(first):
        return events.EventFiles([path], path)
    if not keys or len(start) < HEAD_BYTES:
        _require_json(path, start, first)
    shown = ", ".join(sorted(keys)[:8]) or "no keys"
    raise UnknownFormat(f"{path}: JSON lines with {shown} are not known. Known are {KNOWN}.")


def _require_json(path: Path, start: bytes, first: bytes) -> None:
    """Neither the first line nor the whole of a small file is JSON: that comes before what its keys might mean."""
    try:
        msgspec.json.decode(first)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        try:
            msgspec.json.decode(start)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise UnknownFormat(
                f"{path}: the first line is not one whole JSON object ({error}). Known are JSON lines, one object a line."
            ) from error


def _by_keys(found: tuple[str, ...], header: tuple[str, ...]) -> str | None:
    """Name of the format that has these top-level keys, or this header."""
    keys, cells = set(found), set(header)
    rules: tuple[tuple[str, bool], ...] = (
        ("mooncake", {"timestamp", "input_length"} <= keys),
        ("scrapes", {"at_ns", "text"} <= keys and "kind" not in keys),
        ("vllm-bench", {"model_id", "num_prompts"} <= keys and bool(keys & {"backend", "endpoint_type"})),
        ("sglang-bench", {"backend", "dataset_name", "request_rate"} <= keys and "model_id" not in keys),
        ("genai-perf", "experiments" in keys),
        ("guidellm", "benchmarks" in keys),
        ("aiperf", {"metadata", "metrics"} <= keys),
        ("aiperf-summary", "aiperf_version" in keys),
        ("genai-perf-summary", "input_config" in keys and bool(keys & {"request_throughput", "request_latency"})),
        ("dynamo-log", {"timestamp", "event"} == keys or {"schema", "event_type", "event_time_unix_ms"} <= keys),
        ("otlp", bool(keys & {"resourceSpans", "resourceMetrics"})),
        ("azure-llm", set(csv_traces.AZURE) <= cells),
        ("burstgpt", set(csv_traces.BURST) <= cells),
    )
    return next((name for name, matches in rules if matches), None)


def _aiperf_summary(records: Path) -> Path | None:
    """The summary that lies beside these records: by AIPerf's own name, or by the name of the run."""
    stem = _plain_name(records).removesuffix(".jsonl")
    for name in (aiperf.SUMMARY, f"{stem}_aiperf.json", f"{stem}.json"):
        for packed in ("", *_PACKED):
            path = records.parent / (name + packed)
            if path.is_file() and _benchmark_name(path) == "aiperf-summary":
                return path
    return None


def _plain_name(path: Path) -> str:
    """The name without the suffix of a compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in _PACKED else path.name


def _looks_like_page(start: bytes) -> bool:
    """Some of its first lines are comments of a page, or a name and a number."""
    for line in start.split(b"\n")[:50]:
        words = line.split()
        if line.startswith((b"# HELP ", b"# TYPE ")):
            return True
        if len(words) >= 2 and not line.startswith(b"#"):
            try:
                float(line.rpartition(b"}")[2].split()[0] if b"}" in line else words[1])
            except (ValueError, IndexError):
                return False
            return True
    return False


def known_formats() -> list[tuple[str, str]]:
    """(name for `--format`, what it is) of every format."""
    return [(found.name, found.what) for found in FORMATS.values()]
