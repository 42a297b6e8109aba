"""`kvscope import PATH --run NAME`: bring what was recorded into the store, as the run NAME.

Invariant: the identity of a chunk is (source "import", digest of content, run and options, number of the chunk), so that
importing the same thing again under the same name adds nothing, and another name makes another run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json, say
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.readers.source import Notes, Source
    from store.interface import Store


def register(app: typer.Typer) -> None:
    """Add the verb `import`."""

    @app.command("import")
    def import_path(
        path: Annotated[
            Path, typer.Argument(help="Recording folder, Mooncake trace, Prometheus text, NDJSON or Parquet events.")
        ],
        run: Annotated[str, typer.Option("--run", help="Name of the run: tags every row, and names the window later.")],
        store: StoreOption = DEFAULT_STORE,
        salt: Annotated[str | None, typer.Option(help="Key of the chain hash for token ids in KV events.")] = None,
        worker: Annotated[str | None, typer.Option(help="Worker name where the source names none.")] = None,
        start: Annotated[
            str | None,
            typer.Option(help="Instant at which a trace with relative times begins, or of a page without time."),
        ] = None,
        json: JsonOption = False,
    ) -> None:
        """Import recordings, traces, metrics pages or events as a named run."""
        from engine_probe.readers.detect import open_source
        from engine_probe.readers.source import RECORDINGS_SALT, ReadOptions
        from store.open import open_store

        if not run.strip():
            raise UsageError("--run needs a name, for example --run bad.")
        if salt is not None and not 0 < len(salt.encode()) <= 64:
            raise UsageError("--salt is a text of 1 to 64 bytes.")
        start_ns = None if start is None else _instant_ns(start)
        options = ReadOptions(RECORDINGS_SALT if salt is None else salt.encode(), worker, start_ns, start_ns)
        source = open_source(path)
        target = open_store(store)
        try:
            summary = import_source(source, target, run, options, progress=say)
        finally:
            target.close()
        if json:
            emit_json({"path": str(path), "store": store, **summary})
        else:
            emit(_text(summary, store))


def import_source(
    source: Source, store: Store, run: str, options: Any, progress: Any = lambda text: None
) -> dict[str, Any]:
    """Append every chunk of `source` under the run's name; returns what was imported (rows by kind, windows, left out)."""
    from hashlib import blake2b

    from engine_probe.readers.source import Notes, digest
    from store.interface import Batch, BatchId

    notes = Notes()
    identity = f"{digest(source.files)} run={run} {options.text()}"
    epoch = blake2b(identity.encode(), digest_size=16).hexdigest()
    rows: dict[str, int] = {}
    num_chunks = duplicates = total = 0
    for seq, tables in enumerate(source.chunks(options, notes)):
        tagged = {kind: _tag(table, run) for kind, table in tables.items()}
        receipt = store.append(Batch(tagged, BatchId("import", epoch, seq), source="import"))
        num_chunks += 1
        duplicates += receipt.duplicate
        for kind, table in tagged.items():
            rows[kind] = rows.get(kind, 0) + table.num_rows
            total += table.num_rows
        progress(f"{source.format}: {total} rows read")
    return _summary(source, notes, run, rows, num_chunks, duplicates)


def _tag(table: pa.Table, run: str) -> pa.Table:
    import pyarrow as pa

    position = table.schema.get_field_index("run_id")
    column = pa.repeat(pa.scalar(run, pa.string()), table.num_rows)
    return table.set_column(position, table.schema.field(position), column)


def _summary(
    source: Source, notes: Notes, run: str, rows: dict[str, int], num_chunks: int, duplicates: int
) -> dict[str, Any]:
    return {
        "run": run,
        "format": source.format,
        "rows": rows,
        "already_imported": num_chunks > 0 and duplicates == num_chunks,
        "windows": [{"name": w.name, "start_ns": w.start_ns, "end_ns": w.end_ns} for w in notes.windows],
        "left_out": notes.left_out,
        "facts": notes.facts,
    }


def _text(summary: dict[str, Any], store: str) -> str:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in summary["rows"].items()) or "no rows"
    if summary["already_imported"]:
        lines = [f"Run {summary['run']} had this {summary['format']} already ({counts}); nothing was added."]
    else:
        lines = [f"Imported a {summary['format']} as run {summary['run']}: {counts}."]
    for window in summary["windows"]:
        seconds = (window["end_ns"] - window["start_ns"]) / 1e9
        lines.append(f"  window {window['name']}: {seconds:.1f} s")
    lines += [f"  left out: {text}" for text in summary["left_out"]]
    lines.append(f"Next: kvscope diagnose --store {store} --baseline RUN --suspect {summary['run']}")
    return "\n".join(lines)


def _instant_ns(text: str) -> int:
    """ISO 8601 (with zone; without one it is UTC) or nanoseconds since 1970 -> ns."""
    from datetime import UTC, datetime

    if text.isascii() and text.isdigit() and len(text) >= 18:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no instant; give one like 2026-11-29T13:20:00Z.") from error
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return int(at.timestamp()) * 1_000_000_000 + at.microsecond * 1_000
