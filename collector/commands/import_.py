"""`kvscope import PATH --run NAME`: bring what was recorded into the store, as the run NAME.

Invariants: nothing is stored before the whole of PATH was read and judged, so a half file leaves no half run. The
identity of a chunk is (source "import", digest of content, run and options, number of the chunk): importing the same
thing again under the same name adds nothing, an import that was interrupted is completed, and another name makes
another run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.instants import iso_ns
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.readers.source import Notes, ReadOptions, Source
    from store.interface import Store

SOURCE = "import"
_PREVIEW_ROWS = 3
_PREVIEW_ITEMS = 4
_NO_FUTURE_NS = (1 << 63) - 1 - 2 * 86_400_000_000_000  # a recording may come from a machine whose clock is ahead


def register(app: typer.Typer) -> None:
    """Add the verb `import`."""

    @app.command("import")
    def import_path(
        path: Annotated[
            str,
            typer.Argument(
                help="Recording folder, benchmark output, trace, OTLP or Prometheus text, NDJSON or Parquet events, log; "
                "or a Prometheus server, prometheus+http://host:9090."
            ),
        ],
        run: Annotated[
            str, typer.Option("--run", help="Name of the run: tags every row, and is a window by itself.")
        ] = "",
        store: StoreOption = DEFAULT_STORE,
        salt: Annotated[
            str | None, typer.Option(help="Key of the chain hash for token ids in KV events (1 to 64 bytes).")
        ] = None,
        worker: Annotated[str | None, typer.Option(help="Worker name where the source names none.")] = None,
        start: Annotated[
            str | None,
            typer.Option(
                help="Instant at which a trace with relative times begins, or of a page without time (ISO 8601). Of a "
                "server's samples the first instant, or how long ago (2h)."
            ),
        ] = None,
        end: Annotated[str | None, typer.Option(help="Of a server: end of the stretch. Default: now.")] = None,
        match: Annotated[
            list[str] | None, typer.Option(help="Of a server: which series, such as '{job=\"vllm\"}'. Repeatable.")
        ] = None,
        worker_map: Annotated[
            list[str] | None, typer.Option("--map", help="Of a server: LABEL:VALUE=WORKER. Repeatable.")
        ] = None,
        worker_label: Annotated[
            str | None, typer.Option(help="Of a server: label that names the worker. Default: pod, else instance.")
        ] = None,
        key: Annotated[
            str | None, typer.Option("--engine-key", envvar="KVSCOPE_ENGINE_KEY", help="Of a server: bearer token.")
        ] = None,
        header: Annotated[list[str] | None, typer.Option(help="Of a server: NAME: VALUE. Repeatable.")] = None,
        ca: Annotated[Path | None, typer.Option(help="Of a server: certificate authority of its TLS.")] = None,
        insecure: Annotated[
            bool, typer.Option("--insecure", help="Of a server: do not check its certificate.")
        ] = False,
        format_name: Annotated[
            str | None, typer.Option("--format", help="Take PATH for this format, whatever its content looks like.")
        ] = None,
        mapping: Annotated[
            str | None,
            typer.Option(help="Read lines of a log by this TOML file, or by a shipped one: nginx, envoy, litellm, ..."),
        ] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Read all, store nothing, and show the first rows as they would be.")
        ] = False,
        json: JsonOption = False,
    ) -> None:
        """Import recordings, benchmark outputs, traces, logs, metrics pages or events as a named run."""
        import tempfile

        from collector.terminal.server_options import server_source
        from engine_probe.attach.fetch import split_auth
        from engine_probe.readers.detect import open_source
        from engine_probe.readers.prometheus_server import SCHEME, is_server
        from engine_probe.readers.source import RECORDINGS_SALT, ReadOptions
        from store.open import open_store

        if not run.strip() and not dry_run:
            raise UsageError("--run needs a name, for example --run bad.")
        if salt is not None and not 0 < len(salt.encode()) <= 64:
            raise UsageError("--salt is a text of 1 to 64 bytes.")
        hash_key = RECORDINGS_SALT if salt is None else salt.encode()
        if is_server(path):
            source: Source = server_source(
                path,
                match=match or (),
                start=start,
                end=end,
                worker_map=worker_map or (),
                worker_label=worker_label,
                key=key,
                header=header or (),
                ca=ca,
                insecure=insecure,
            )
            options = ReadOptions(hash_key, worker)
            path = split_auth(path.removeprefix(SCHEME))[0]
        else:
            if match or end or worker_map or worker_label or header:
                raise UsageError(
                    f"--match, --end, --map, --worker-label and --header are for a server ({SCHEME}http://)."
                )
            start_ns = None if start is None else iso_ns("--start", start)
            options = ReadOptions(hash_key, worker, start_ns, start_ns, format_name)
            source = open_source(Path(path), format_name, mapping)
        progress = _Progress()
        if dry_run:
            tried = preview(source, options, progress)
            progress.end()
            if json:
                emit_json({"path": path, **tried})
            else:
                emit(_preview_text(tried))
            return
        try:
            # Read first: a file that cannot be read must not even make a store.
            with tempfile.TemporaryFile() as file:
                staged = stage(source, run, options, file, progress)
                target = open_store(store)
                try:
                    summary = append(staged, target, progress)
                finally:
                    target.close()
        finally:
            progress.end()
        if json:
            emit_json({"path": path, "store": store, **summary})
        else:
            emit(_text(summary, store))


@dataclass(frozen=True, slots=True)
class Staged:
    """A source that was read whole: its chunks as Arrow in a file, and what is to be said about it."""

    file: IO[bytes]
    sizes: list[int]
    epoch: str
    run: str
    format: str
    rows: dict[str, int]
    span: tuple[int, int] | None
    notes: Notes


def preview(
    source: Source, options: ReadOptions, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Read and judge the whole of `source` and store nothing; the first rows of each kind, and what an import would say.

    Returns format, rows (counts by kind), first (kind -> up to 3 rows, known columns alone), windows, left_out, not_told,
    assumed, facts.
    Raises UnknownFormat, InvalidRows.
    """
    from engine_probe.readers.source import Notes
    from engine_probe.wire.validate import validate

    notes = Notes()
    rows: dict[str, int] = {}
    first: dict[str, list[dict[str, Any]]] = {}
    for tables in source.chunks(options, notes):
        for kind, table in tables.items():
            validate(kind, table, _NO_FUTURE_NS)
            rows[kind] = rows.get(kind, 0) + table.num_rows
            kept = first.setdefault(kind, [])
            kept += [
                {name: _plain(value) for name, value in row.items() if value is not None and value != []}
                for row in table.slice(0, _PREVIEW_ROWS - len(kept)).to_pylist()
            ]
        progress(f"reading {source.format}: {sum(rows.values()):,} rows")
    return {
        "format": source.format,
        "rows": rows,
        "first": first,
        "windows": _windows(notes),
        **_sentences(notes),
        "facts": notes.facts,
    }


def import_source(source: Source, store: Store, run: str, options: ReadOptions) -> dict[str, Any]:
    """Import `source` as the run `run`; returns the summary that `--json` prints. Raises UnknownFormat, InvalidRows."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        return append(stage(source, run, options, file), store)


def stage(
    source: Source, run: str, options: ReadOptions, file: IO[bytes], progress: Callable[[str], None] = lambda text: None
) -> Staged:
    """Read every chunk, judge its rows, tag them with the run, and put them into `file`."""
    from hashlib import blake2b

    from engine_probe.readers.prometheus_server import ServerSource
    from engine_probe.readers.source import Notes, digest
    from engine_probe.wire.codec import encode_arrow
    from engine_probe.wire.validate import validate

    notes = Notes()
    sizes: list[int] = []
    rows: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for tables in source.chunks(options, notes):
        tagged = {kind: _tag(table, run) for kind, table in tables.items() if table.num_rows}
        for kind, table in tagged.items():
            validate(kind, table, _NO_FUTURE_NS)
            rows[kind] = rows.get(kind, 0) + table.num_rows
            spans.append(_span(table, "arrival_ns" if kind == "request" else "at_ns"))
        if tagged:
            sizes.append(file.write(encode_arrow(tagged)))
        progress(f"reading {source.format}: {sum(rows.values()):,} rows")
    span = (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None
    # A server's content is known only now.
    content = source.content_digest() if isinstance(source, ServerSource) else digest(source.files)
    epoch = blake2b(f"{content} run={run} {options.text()}".encode(), digest_size=16).hexdigest()
    return Staged(file, sizes, epoch, run, source.format, rows, span, notes)


def append(staged: Staged, store: Store, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Commit the staged chunks; returns the summary: rows by kind, windows, what was left out, was not told, was assumed."""
    from store.interface import Batch, BatchId

    runs = store.runs()
    others = [name for name in runs if name != staged.run]
    num_duplicates = 0
    for seq, tables in enumerate(_staged_chunks(staged)):
        receipt = store.append(Batch(tables, BatchId(SOURCE, staged.epoch, seq), source=SOURCE))
        num_duplicates += receipt.duplicate
        progress(f"storing: {seq + 1} of {len(staged.sizes)} chunks")
    return {
        "run": staged.run,
        "format": staged.format,
        "rows": staged.rows,
        "already_imported": bool(staged.sizes) and num_duplicates == len(staged.sizes),
        "run_had_rows": staged.run in runs and num_duplicates == 0,
        "other_runs": others,
        "start_ns": None if staged.span is None else staged.span[0],
        "end_ns": None if staged.span is None else staged.span[1],
        "windows": _windows(staged.notes),
        **_sentences(staged.notes),
        "facts": staged.notes.facts,
    }


class _Progress:
    """One line on stderr: rewritten in place on a terminal; elsewhere the name of each stage, once."""

    def __init__(self) -> None:
        self._stage = ""
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text.split(":")[0] != self._stage:
            print(text.split(":")[0], file=sys.stderr)
        self._stage = text.split(":")[0]

    def end(self) -> None:
        if self._is_terminal and self._stage:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _staged_chunks(staged: Staged) -> Iterator[dict[str, pa.Table]]:
    from engine_probe.wire.codec import decode_arrow

    staged.file.seek(0)
    for size in staged.sizes:
        yield decode_arrow(staged.file.read(size)).tables


def _tag(table: pa.Table, run: str) -> pa.Table:
    import pyarrow as pa

    position = table.schema.get_field_index("run_id")
    column = pa.repeat(pa.scalar(run, pa.string()), table.num_rows)
    return table.set_column(position, table.schema.field(position), column)


def _span(table: pa.Table, column: str) -> tuple[int, int]:
    import pyarrow.compute as pc

    edges = pc.min_max(table.column(column))
    return edges["min"].as_py(), edges["max"].as_py()


def _text(summary: dict[str, Any], store: str) -> str:
    from shlex import quote

    counts = ", ".join(f"{count:,} {kind}" for kind, count in summary["rows"].items()) or "no rows"
    if summary["already_imported"]:
        lines = [f"Run {summary['run']} held this {summary['format']} already ({counts}); nothing was added."]
    else:
        lines = [f"Imported {_article(summary['format'])} {summary['format']} as run {summary['run']}: {counts}."]
    for window in summary["windows"]:
        seconds = (window["end_ns"] - window["start_ns"]) / 1e9
        lines.append(f"  window {window['name']}: {seconds:.1f} s from {_iso(window['start_ns'])}")
    lines += _said(summary)
    if summary["run_had_rows"]:
        lines.append(
            f"  note: run {summary['run']} held rows of another import before; it is now both together. "
            "Two recordings to compare need two names."
        )
    where = "" if store == DEFAULT_STORE else f" --store {quote(store)}"
    baseline = quote(summary["other_runs"][-1]) if summary["other_runs"] else "RUN"
    lines.append(f"Next: kvscope diagnose{where} --baseline {baseline} --suspect {quote(summary['run'])}")
    return "\n".join(lines)


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOaeio" or name.startswith("SGLang") else "a"


def _sentences(notes: Notes) -> dict[str, list[str]]:
    return {"left_out": notes.left_out, "not_told": notes.not_told, "assumed": notes.assumed}


def _said(summary: dict[str, Any]) -> list[str]:
    """What was made of the source, a line each, what matters most to a reader of the numbers first."""
    words = {"assumed": "assumed", "not_told": "not told", "left_out": "left out"}
    return [f"  {word}: {text}" for key, word in words.items() for text in summary[key]]


def _windows(notes: Notes) -> list[dict[str, Any]]:
    return [{"name": w.name, "start_ns": w.start_ns, "end_ns": w.end_ns} for w in notes.windows]


def _plain(value: Any) -> Any:
    """A cell for people and JSON: maps as objects, long lists by their first entries."""
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        return dict(value)
    if isinstance(value, list) and len(value) > _PREVIEW_ITEMS:
        return [*value[:_PREVIEW_ITEMS], f"... {len(value)} in all"]
    return value


def _preview_text(tried: dict[str, Any]) -> str:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in tried["rows"].items()) or "no rows"
    lines = [f"Would import {_article(tried['format'])} {tried['format']}: {counts}. Nothing was stored (--dry-run)."]
    for kind, rows in tried["first"].items():
        for number, row in enumerate(rows, 1):
            lines.append(f"  {kind} {number}")
            lines += [f"    {name:<22} {_cell(name, value)}" for name, value in row.items()]
    lines += _said(tried)
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if name.endswith("_ns") and isinstance(value, int):
        return f"{value}  {_iso(value)}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={text}" for key, text in value.items())
    return str(value)


def _iso(at_ns: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
