"""SGLang's `bench_serving`: JSON lines, one a run; `--output-details` adds lists with one entry a request.

Instants: the file has none at all, neither of the run nor of a request. Requests stand in the order they were sent, so
they are laid evenly over the run's `duration`, from 2025-01-01 or `--start` on, and say `labels.arrival = assumed`;
durations are the tool's. Several runs of one file lie a minute apart. With the native backend a chunk of k tokens is
written as k equal gaps, which are taken together again; other backends write one gap a chunk. `cached_tokens` is 0
where a server behind another backend did not report it, so it counts there only with details. A success whose tokens carried no text has no times.
Source: sglang 0.5.23 `benchmark/serving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.sglang import info_facts
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.benchmarks.document import Counts, Document, Numbers, aligned
from engine_probe.readers.benchmarks.rows import ASSUMED, seconds
from engine_probe.readers.lines import MAX_DOCUMENT_BYTES, text_lines
from engine_probe.readers.marks import window_marks
from engine_probe.readers.source import FoundWindow, Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

TOOL: Final = "sglang-bench"
KEYS: Final = frozenset(("dataset_name", "backend", "random_range_ratio", "request_rate"))
NATIVE: Final = frozenset(("sglang", "sglang-native"))
_ENGINES: Final = {"sglang": "sglang", "sglang-native": "sglang", "sglang-oai": "sglang", "sglang-oai-chat": "sglang", "vllm": "vllm"}  # fmt: skip
_BETWEEN_NS: Final = 60_000_000_000


class SglangBench:
    """One file of result lines."""

    format = "SGLang bench_serving result"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` rows of each run, its window as marks, and the tool's own figures as samples."""
        path = self.files[0]
        at_ns = shared.beginning(options)
        for position, (number, line) in enumerate(text_lines(path, MAX_DOCUMENT_BYTES)):
            document = Document(line, f"{path.name}, line {number}")
            duration_s = seconds(document.get("duration", float), document.where, "duration") or 0.0
            name = f"run-{position + 1}"
            end_ns = at_ns + round(duration_s * 1e9)
            for table in shared.chunked(_rows(document, at_ns, duration_s, position)):
                end_ns = max(end_ns, *table["request"]["at_ns"].to_pylist())
                yield table
            window = FoundWindow(name, at_ns, end_ns + 1)
            notes.windows.append(window)
            samples = shared.summary_samples(_figures(document), TOOL, end_ns, {"window": name})
            tables = {
                "mark": table_from_rows("mark", window_marks(window)),
                "sample": table_from_rows("sample", samples),
            }
            if facts := _server(document):
                worker = {"worker": options.worker, "at_ns": at_ns, **facts}
                tables["worker"] = table_from_rows("worker", [worker])
            yield tables
            at_ns = end_ns + _BETWEEN_NS
            _say(document, name, notes)
        if options.start_ns is None:
            notes.assumed.append("instants: the file tells none; it is laid from 2025-01-01, or from --start, on")


def _figures(document: Document) -> dict[str, float]:
    report = document.part("cache_report")
    cache = {} if report is None else {f"cache_report.{key}": value for key, value in report.scalars().items()}
    return document.scalars() | cache


def _say(document: Document, name: str, notes: Notes) -> None:
    if "ttfts" not in document:
        notes.not_told.append(
            f"{name}: the file has no numbers of single requests; `--output-details` writes them. The tool's own "
            "figures are samples"
        )
    else:
        notes.assumed.append(
            f"{name}: arrivals are not in the file; requests are laid evenly over the run in the order they were sent "
            "(label arrival=assumed). Request ids are not in it either, so nothing joins the engine's own rows"
        )


def _rows(document: Document, anchor_ns: int, duration_s: float, run: int) -> Iterator[dict[str, Any]]:
    where = document.where
    ttfts = document.get("ttfts", Numbers)
    if ttfts is None:
        return
    size = len(ttfts)
    prompts, outputs = document.get("input_lens", Counts), document.get("output_lens", Counts)
    gaps: list[list[float]] | None = document.get("itls", list[list[float]])
    errors: list[str | None] | None = document.get("errors", list[str | None])
    cached = document.get("cached_tokens", Counts)
    details: list[dict[str, Any] | None] | None = document.get("cached_tokens_details", list[dict[str, Any] | None])
    aligned(
        where, size, input_lens=prompts, output_lens=outputs, itls=gaps, errors=errors, cached_tokens=cached,
        cached_tokens_details=details,
    )  # fmt: skip
    backend = document.get("backend", str) or ""
    arrivals = shared.spread(size, duration_s, anchor_ns)
    common = {"vantage": "client", "engine": _ENGINES.get(backend), "model": _model(document)}
    for i in range(size):
        here = f"{where}: request {i}"
        prompt = shared.count(prompts[i] if prompts else None, here, "input_lens")
        output = shared.count(outputs[i] if outputs else None, here, "output_lens")
        error = errors[i] if errors else None
        mine: Sequence[float] = gaps[i] if gaps else []
        chunks, tokens = _joined(mine, output) if backend in NATIVE else (mine, None)
        seen = shared.streamed(arrivals[i], ttfts[i] or None, chunks, output, here, tokens)
        ended = not error  # every failure has a text there; an answer of empty tokens has no times
        tiers = details[i] if details else None
        hits = shared.count(cached[i] if cached else None, here, "cached_tokens")
        known = ended and (backend in NATIVE or tiers is not None)
        yield {
            **common,
            "request_id": f"{TOOL}-{run + 1}-{i}",
            "labels": {"arrival": ASSUMED},
            "arrival_ns": arrivals[i],
            "at_ns": seen.get("last_token_ns", arrivals[i]),
            "prompt_tokens": prompt,
            **seen,
            **({"state": "finished", "http_status": 200} if ended else shared.failure(error)),
            "output_tokens": output if ended else None,
            **(shared.prefix_sizes(prompt, hits) if known else {}),
            **(_tiers(tiers, here) if tiers is not None and ended else {}),
        }


def _joined(gaps: Sequence[float], output: int | None) -> tuple[list[float], list[int] | None]:
    """Equal neighbours are the tokens of one chunk: (gap before each chunk, tokens in each, the first included)."""
    groups = [(gap, len(list(group))) for gap, group in groupby(gaps)]
    first = None if output is None else output - len(gaps)
    tokens = None if first is None or first < 1 else [first, *(num for _, num in groups)]
    return [gap * num for gap, num in groups], tokens


def _tiers(details: Mapping[str, Any], where: str) -> dict[str, int | None]:
    """`cached_tokens_*` by tier; storage is what is neither device nor host memory."""
    found = {"cached_tokens_device": "device", "cached_tokens_host": "host", "cached_tokens_remote": "storage"}
    return {
        column: shared.count(details[key], where, f"cached_tokens_details.{key}")
        for column, key in found.items()
        if type(details.get(key)) is int
    }


def _server(document: Document) -> dict[str, Any]:
    """What the server said of itself, as `worker` columns; {} where it was not asked, or is no SGLang."""
    info = document.get("server_info", dict[str, Any])
    if info is None or not isinstance(version := info.get("version"), str) or "page_size" not in info:
        return {}
    facts = info_facts(info)
    off, tokens, size = info.get("disable_radix_cache"), info.get("max_total_num_tokens"), facts.get("block_size")
    told = {
        "engine": "sglang",
        "engine_version": version,
        "model": _model(document),
        "prefix_caching": not off if isinstance(off, bool) else None,
        "num_blocks": tokens // size if type(tokens) is int and tokens > 0 and size else None,
    }
    return facts | {key: value for key, value in told.items() if value is not None}


def _model(document: Document) -> str | None:
    info = document.get("server_info", dict[str, Any])
    names = [] if info is None else [info.get("served_model_name"), info.get("model_path")]
    return next((name for name in names if isinstance(name, str) and name), None)
