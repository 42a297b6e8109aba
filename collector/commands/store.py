"""`kvscope store migrate|export|prune|verify|backup`: care for the database, with nothing else running on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING, StoreDamaged, UsageError

if TYPE_CHECKING:
    from store.upkeep.retention import PruneReport

_DURATION = re.compile(r"(?P<n>\d+(?:\.\d+)?)(?P<unit>s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = re.compile(r"(?P<n>\d+(?:\.\d+)?)\s*(?P<unit>|B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_POWERS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_POWERS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def register(app: typer.Typer) -> None:
    """Add the family `store`."""
    family = typer.Typer(help="Care for the database: migrate, export, prune, verify, backup.", no_args_is_help=True)
    family.command()(migrate)
    family.command()(export)
    family.command()(prune)
    family.command()(verify)
    family.command()(backup)
    app.add_typer(family, name="store")


def migrate(store: StoreOption = DEFAULT_STORE, json: JsonOption = False) -> None:
    """Bring the database's schema to this release; makes the file where there is none."""
    from store.open import open_store

    with open_store(store) as opened:
        done = [f"{migration.number:04d}_{migration.name}" for migration in opened.migrated]
    if json:
        emit_json({"store": store, "applied": done})
    else:
        emit(f"{store}: " + (f"applied {', '.join(done)}" if done else "the schema is current"))


def export(
    folder: Annotated[Path, typer.Argument(help="Folder to write into, one file a kind.")],
    window: Annotated[
        str | None, typer.Option("--window", help="Run name or START/END; without it all live rows.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only this kind; may be given again.")] = None,
    file_format: Annotated[str, typer.Option("--format", help="parquet, ndjson or csv.")] = "parquet",
    store: StoreOption = DEFAULT_STORE,
    json: JsonOption = False,
) -> None:
    """Write the rows of a window to files that other tools and `kvscope import` read."""
    from store.interface import Window
    from store.open import open_store
    from store.upkeep.export import FORMATS
    from store.upkeep.export import export as run

    chosen = next((name for name in FORMATS if name == file_format), None)
    if chosen is None:
        raise UsageError(f"There is no format {file_format!r}. The formats are {', '.join(FORMATS)}.")
    with open_store(store, read_only=True) as opened:
        span = Window() if window is None else _window(window, opened)
        files = run(opened, folder, span, kinds=kind, file_format=chosen, progress=say)
    if json:
        emit_json({"window": str(span), "files": [asdict(file) for file in files]})
    else:
        rows = sum(file.num_rows for file in files)
        emit(f"{rows} rows of {span} in {len(files)} files in {folder}" if files else f"no rows in {span}")


def prune(
    older_than: Annotated[str, typer.Option("--older-than", help="Delete live rows received so long ago.")] = "48h",
    max_bytes: Annotated[str, typer.Option("--max-bytes", help="Delete the oldest live rows above this.")] = "50GB",
    parquet_older_than: Annotated[
        str, typer.Option("--parquet-older-than", help="Delete sealed files of live rows received so long ago.")
    ] = "14d",
    seal: Annotated[bool, typer.Option(help="Write rows to Parquet before they are deleted.")] = True,
    run: Annotated[str | None, typer.Option("--run", help="Delete this imported run, and nothing else.")] = None,
    store: StoreOption = DEFAULT_STORE,
    json: JsonOption = False,
) -> None:
    """Apply retention once. Imported runs stay, unless one is named with --run."""
    from store.open import open_store
    from store.upkeep.retention import RetentionPolicy, drop_run
    from store.upkeep.retention import prune as apply

    policy = RetentionPolicy(
        seal_after_s=300.0 if seal else None,
        max_age_s=parse_duration(older_than),
        max_bytes=parse_bytes(max_bytes),
        parquet_max_age_s=parse_duration(parquet_older_than),
    )
    with open_store(store, must_exist=True) as opened:
        report = drop_run(opened, run, say) if run is not None else apply(opened, policy, say)
    if json:
        emit_json(asdict(report))
    else:
        emit(_told(report))


def verify(store: StoreOption = DEFAULT_STORE, json: JsonOption = False) -> None:
    """Check tables, batch identities, row counts, sealed files and nulls. Exit 1 where something is wrong."""
    from store.interface import Problem
    from store.open import open_store

    problems: Sequence[Problem]
    try:
        with open_store(store, read_only=True) as opened:
            say(f"checking {store}")
            problems = opened.verify()
            rows = sum(opened.stats().rows.values())
    except StoreDamaged as damage:
        problems = [Problem(store, damage.message)]
    if json:
        emit_json({"store": store, "sound": not problems, "problems": [asdict(problem) for problem in problems]})
    elif problems:
        for problem in problems:
            emit(f"{problem.where}: {problem.statement}")
    else:
        emit(f"{store} is sound: {rows} rows")
    if problems:
        raise typer.Exit(EXIT_FINDING)


def backup(
    target: Annotated[Path, typer.Argument(help="Database file to make; its sealed files go beside it.")],
    store: StoreOption = DEFAULT_STORE,
    json: JsonOption = False,
) -> None:
    """Copy the store: the database in one snapshot, and its sealed files. The copy opens as a store."""
    from store.open import open_store
    from store.upkeep.backup import backup as run

    with open_store(store, must_exist=True) as opened:
        report = run(opened, target, say)
    if json:
        emit_json(asdict(report))
    else:
        rows = sum(report.rows.values())
        emit(f"{report.path}: {rows} rows, {report.num_files} sealed files, {report.num_bytes / 1e6:.1f} MB")


def parse_duration(text: str) -> float:
    """Seconds of a text such as 90s, 30m, 48h or 14d; UsageError for anything else."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no duration. Write a number and s, m, h or d, such as 48h.")
    return float(found["n"]) * _SECONDS[found["unit"]]


def parse_bytes(text: str) -> int:
    """Bytes of a text such as 500MB or 50GiB; UsageError for anything else."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no size. Write a number and a unit, such as 50GB.")
    return round(float(found["n"]) * _POWERS[found["unit"].lower()])


def _window(text: str, opened: Any) -> Any:
    import time

    from diagnosis.windows import parse_window

    return parse_window(text, opened, time.time_ns())


def _told(report: PruneReport) -> str:
    parts = [f"deleted {count} {kind} rows" for kind, count in report.rows.items()]
    if report.num_files:
        parts.append(f"deleted {report.num_files} sealed files")
    if report.sealed.num_files:
        parts.append(f"sealed {sum(report.sealed.rows.values())} rows into {report.sealed.num_files} files")
    left = f"{report.database_bytes / 1e6:.1f} MB of rows and {report.parquet_bytes / 1e6:.1f} MB of Parquet are left"
    return f"{'; '.join(parts) or 'nothing to delete'}; {left}"
