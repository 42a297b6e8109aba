"""`vllm bench serve --save-result`: one JSON object a run; `--save-detailed` adds lists with one entry a request.

Instants: `start_times` are a monotonic clock, so the distances between arrivals are exact; the absolute ones are laid so
that the run ends at its `date` (local time without a zone, read as UTC), or begins at `--start`. `latencies` and the
sum of `ttfts` and `itls` end at the last chunk with a choice: the end of the stream is not told. Ids are not in the
file; with `--request-id-prefix P --metadata request_id_prefix=P` they are P0, P1, ... in its order, and join the
engine's. Files without `--save-detailed` keep `latencies` alone (0.32) or nothing of a request (before).
Source: vLLM 0.32.0 `benchmarks/serve.py`, `lib/endpoint_request_func.py`; `server_*` lists from 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import UnknownFormat
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.benchmarks.document import Counts, Document, Numbers, aligned
from engine_probe.readers.benchmarks.rows import ASSUMED, seconds
from engine_probe.readers.lines import MAX_DOCUMENT_BYTES, text_lines
from engine_probe.readers.marks import window_marks
from engine_probe.readers.mooncake import ANCHOR_NS
from engine_probe.readers.source import FoundWindow, Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

TOOL: Final = "vllm-bench"
KEYS: Final = frozenset(("endpoint_type", "model_id", "tokenizer_id", "num_prompts"))
_ENGINES: Final = {
    "vllm": None,
    "tgi": "tgi",
    "tensorrt-llm": "tensorrt-llm",
    "sglang": "sglang",
    "llama.cpp": "llamacpp",
}
_BETWEEN_NS: Final = 60_000_000_000


class VllmBench:
    """One file: a result, or several, one a line (`--append-result`)."""

    format = "vllm bench serve result"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` rows of each run, its window as marks, and the tool's own figures as samples."""
        anchor_ns = options.start_ns
        for position, document in enumerate(results(self.files[0])):
            run = _Run(document, position, anchor_ns, notes)
            yield from run.tables()
            anchor_ns = None if anchor_ns is None else run.end_ns + _BETWEEN_NS


def results(path: Path) -> Iterator[Document]:
    """Each result of the file. A file of one result may be spread over many lines."""
    from engine_probe.readers.lines import document

    lines = text_lines(path, MAX_DOCUMENT_BYTES)
    first = next(lines, None)
    if first is None:
        raise UnknownFormat(f"{path.name} holds nothing but empty lines.")
    if first[1].rstrip().endswith(b"}"):
        yield Document(first[1], path.name if first[0] == 1 else f"{path.name}, line {first[0]}")
        for number, line in lines:
            yield Document(line, f"{path.name}, line {number}")
        return
    yield Document(document(path), path.name)


class _Run:
    """One result: where its requests lie in time, and what can be said of each."""

    def __init__(self, document: Document, position: int, start_ns: int | None, notes: Notes) -> None:
        self._document = document
        self._notes = notes
        self._where = where = document.where
        self._name = document.get("label", str) or f"run-{position + 1}"
        self._duration_s = seconds(document.get("duration", float), where, "duration") or 0.0
        self._starts = document.get("start_times", Numbers)
        self._ttfts = document.get("ttfts", Numbers)
        self._latencies = document.get("latencies", Numbers)
        known = self._ttfts if self._ttfts is not None else self._latencies
        self.num_requests = 0 if known is None else len(known)
        self._anchor_ns = self._begin(start_ns, position)
        self._arrivals = self._lay()
        self.end_ns = self._anchor_ns + round(self._duration_s * 1e9)

    def tables(self) -> Iterator[Mapping[str, pa.Table]]:
        made = []
        for table in shared.chunked(self._rows()):
            made.append(table)
            self.end_ns = max(self.end_ns, *table["request"]["at_ns"].to_pylist())
            yield table
        window = FoundWindow(self._name, self._anchor_ns, self.end_ns + 1)
        self._notes.windows.append(window)
        numbers = self._document.scalars()
        samples = shared.summary_samples(numbers, TOOL, self.end_ns, {"window": self._name})
        tables = {"mark": table_from_rows("mark", window_marks(window))}
        if samples:
            tables["sample"] = table_from_rows("sample", samples)
        self._say_what_is_missing()
        yield tables

    def _begin(self, start_ns: int | None, position: int) -> int:
        date_ns = shared.local_date_ns(self._document.get("date", str))
        if start_ns is not None:
            return start_ns
        if date_ns is None:
            self._notes.assumed.append(
                f"{self._name}: instants: the file has no date, its start is laid at 2025-01-01; give --start"
            )
            return ANCHOR_NS + position * 86_400_000_000_000
        self._notes.assumed.append(
            f"{self._name}: instants: the run is laid to end at its 'date', a local time without zone that is read as "
            "UTC; distances in time are exact, give --start for the first request's instant"
        )
        return date_ns - round(self._duration_s * 1e9)

    def _lay(self) -> list[int]:
        starts = self._starts
        if starts is None or self.num_requests == 0:
            if self.num_requests:
                self._notes.assumed.append(
                    f"{self._name}: arrivals: the file has no start_times, so {self.num_requests} requests are laid "
                    "evenly over the run (label arrival=assumed); durations are the tool's"
                )
            return shared.spread(self.num_requests, self._duration_s, self._anchor_ns)
        aligned(self._where, self.num_requests, start_times=starts)
        known = [start for start in starts if start is not None]
        if len(known) < len(starts) or not all(abs(start - known[0]) < shared.LONGEST_S for start in known):
            raise UnknownFormat(f"{self._where}: start_times are not instants of one clock in seconds.")
        first = min(known)
        return [self._anchor_ns + round((start - first) * 1e9) for start in known]

    def _rows(self) -> Iterator[dict[str, Any]]:
        document, where, size = self._document, self._where, self.num_requests
        prompts, outputs = document.get("input_lens", Counts), document.get("output_lens", Counts)
        gaps: list[list[float]] | None = document.get("itls", list[list[float]])
        errors: list[str | None] | None = document.get("errors", list[str | None])
        waits = document.get("queue_times", Numbers)
        queues, prefills = document.get("server_queue_times", Numbers), document.get("server_ttfts", Numbers)
        aligned(
            where, size, input_lens=prompts, output_lens=outputs, itls=gaps, errors=errors, queue_times=waits,
            server_queue_times=queues, server_ttfts=prefills, latencies=self._latencies,
        )  # fmt: skip
        prefix = document.get("request_id_prefix", str)
        common = {
            "vantage": "client",
            "engine": _ENGINES.get(document.get("backend", str) or ""),
            "model": document.get("model_id", str),
        }
        for i in range(size):
            here = f"{where}: request {i}"
            prompt = shared.count(prompts[i] if prompts else None, here, "input_lens")
            output = shared.count(outputs[i] if outputs else None, here, "output_lens")
            ttft = self._ttfts[i] if self._ttfts else None
            latency = seconds(self._latencies[i] if self._latencies else None, here, "latencies")
            error = errors[i] if errors else None
            arrival_ns = self._arrivals[i]
            seen = shared.streamed(arrival_ns, ttft or None, gaps[i] if gaps else [], output, here)
            if not seen and latency and self._ttfts is None:
                # An embedding has no tokens, its end is told; of an answer the latency ends at its last token.
                ended = "end_ns" if "input_sequence_throughput" in document else "last_token_ns"
                seen = {ended: arrival_ns + round(latency * 1e9)}
            labels = {} if self._starts is not None else {"arrival": ASSUMED}
            if waits and waits[i]:
                labels["client_queue_s"] = f"{seconds(waits[i], here, 'queue_times'):.6f}"
            yield {
                **common,
                "request_id": f"{TOOL}-{i}" if prefix is None else f"{prefix}{i}",
                "labels": labels,
                "arrival_ns": arrival_ns,
                "at_ns": seen.get("last_token_ns", seen.get("end_ns", arrival_ns)),
                "prompt_tokens": prompt,
                **seen,
                **({"state": "finished", "http_status": 200} if seen and not error else shared.failure(error)),
                "output_tokens": output if seen and not error else None,
                "queue_s": seconds(queues[i] if queues else None, here, "server_queue_times"),
                # vLLM's server-side time to first token begins at the first schedule: it is the prefill.
                "prefill_s": seconds(prefills[i] if prefills else None, here, "server_ttfts"),
            }

    def _say_what_is_missing(self) -> None:
        if self._ttfts is None:
            kept = f"{self.num_requests} latencies and nothing else" if self.num_requests else "nothing"
            self._notes.not_told.append(
                f"{self._name}: the file keeps {kept} of single requests; `vllm bench serve --save-result "
                "--save-detailed` writes arrivals, TTFT, ITL, lengths and errors. The tool's own figures are samples"
            )
        elif self._document.get("request_id_prefix", str) is None:
            self._notes.not_told.append(
                f"{self._name}: request ids are not in the file; run with --request-id-prefix P and --metadata "
                "request_id_prefix=P to join these requests to the engine's own rows"
            )
