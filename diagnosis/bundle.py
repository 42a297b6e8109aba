"""An incident bundle: one zip with the rows behind a verdict, its question and its answer.

Another machine unpacks it into a store of its own and must come to the identical verdict; `diagnose` says so where it does
not. Invariant: rows are copied whole (every column, every kind, both windows and what came before them that judgement
looks at), and the question holds the instant at which it was asked.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from diagnosis import windows as window_rules
from diagnosis.diagnose import diagnose as run
from diagnosis.verdict import Verdict
from engine_probe.errors import BadWindow, DiagnosisError
from engine_probe.events import KINDS
from engine_probe.schema import conform
from store.interface import Batch, Store, Window
from store.open import open_store

FORMAT = 1
LOOKBACK_NS = 3600 * 1_000_000_000
"""What came before a live window and may still matter: worker facts, marks, the life of blocks."""
MAX_BYTES = 4 << 30
"""Largest unpacked member that is read."""


def write(
    path: Path,
    store: Store,
    verdict: Verdict,
    baseline: Window | None,
    suspect: Window | None,
    *,
    vantage: str | None,
    now_ns: int,
    seed: int,
) -> None:
    """Write the bundle of a verdict. Raises DiagnosisError where the file cannot be written."""
    chosen = window_rules.choose(store, baseline, suspect, now_ns)
    question = {
        "format": FORMAT,
        "metric": verdict.metric,
        "quantile": verdict.requested_quantile,
        "vantage": vantage,
        "now_ns": now_ns,
        "seed": seed,
        "baseline": _window(chosen.base),
        "suspect": _window(chosen.suspect),
        "names": [chosen.base_name, chosen.suspect_name],
        "why": chosen.why,
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("question.json", msgspec.json.encode(question))
            archive.writestr("verdict.json", msgspec.json.encode(verdict.to_dict()))
            for kind in KINDS:
                table = pa.concat_tables([_rows(store, kind, w) for w in _scopes(chosen)])
                if table.num_rows:
                    buffer = io.BytesIO()
                    pq.write_table(table, buffer, compression="zstd")
                    archive.writestr(f"rows/{kind}.parquet", buffer.getvalue())
    except OSError as error:
        raise DiagnosisError(
            f"the incident bundle cannot be written to {path}: {error.strerror}", path=str(path)
        ) from error


def diagnose(path: Path) -> Verdict:
    """Diagnose a bundle. Raises DiagnosisError where the file is no bundle, or where the answer differs from the one inside."""
    question, told, tables = read(path)
    with tempfile.TemporaryDirectory(prefix="kvscope-bundle-") as folder:
        store = open_store(str(Path(folder) / "bundle.duckdb"))
        try:
            store.append(Batch(tables=tables, source="bundle"), timeout_s=120.0)
            verdict = run(
                store,
                Window(**question["baseline"]),
                Window(**question["suspect"]),
                metric=question["metric"],
                quantile=question["quantile"],
                vantage=question["vantage"],
                now_ns=question["now_ns"],
                seed=question["seed"],
                why=question["why"],
            )
        finally:
            store.close()
    mine = verdict.to_dict()
    if msgspec.json.encode(mine) != msgspec.json.encode(told):
        differing = sorted(key for key in mine if mine[key] != told.get(key))
        raise DiagnosisError(
            f"this kvscope comes to another answer than the one in {path.name} (differs in: {', '.join(differing)}); "
            "the bundle was changed, or it was written by another version",
            path=str(path),
            differing=differing,
        )
    return verdict


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, pa.Table]]:
    """(question, verdict, rows by kind) of a bundle file. Raises DiagnosisError for anything that is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for info in archive.infolist():
                if info.file_size > MAX_BYTES:
                    raise DiagnosisError(
                        f"{path}: member {info.filename} is larger than {MAX_BYTES >> 30} GiB", path=str(path)
                    )
            question = msgspec.json.decode(archive.read("question.json"))
            told = msgspec.json.decode(archive.read("verdict.json"))
            if question["format"] > FORMAT:
                raise DiagnosisError(
                    f"{path} was written by a newer kvscope (bundle format {question['format']})", path=str(path)
                )
            tables = {
                kind: conform(kind, pq.read_table(io.BytesIO(archive.read(f"rows/{kind}.parquet"))))
                for kind in KINDS
                if f"rows/{kind}.parquet" in names
            }
        return question, told, tables
    except FileNotFoundError as error:
        raise BadWindow(f"there is no bundle at {path}", window=str(path)) from error
    except (zipfile.BadZipFile, KeyError, TypeError, msgspec.DecodeError, pa.ArrowInvalid, OSError) as error:
        raise DiagnosisError(f"{path} is no incident bundle, or only a part of one: {error}", path=str(path)) from error


def _scopes(chosen: window_rules.Chosen) -> list[Window]:
    """The two windows with what came before them; one scope where they share a run, so that no row is copied twice."""
    spans: dict[str | None, list[tuple[int | None, int | None]]] = {}
    for window in (chosen.base, chosen.suspect):
        start = None if window.start_ns is None else window.start_ns - LOOKBACK_NS
        spans.setdefault(window.run_id, []).append((start, window.end_ns))
    scopes = []
    for run_id, parts in spans.items():
        merged: list[tuple[int | None, int | None]] = []
        for start, end in sorted(parts, key=lambda p: (p[0] is not None, p[0] or 0)):
            last = merged[-1] if merged else None
            if last is not None and (last[1] is None or start is None or start <= last[1]):
                merged[-1] = (last[0], None if last[1] is None or end is None else max(last[1], end))
            else:
                merged.append((start, end))
        scopes += [Window(start, end, run_id) for start, end in merged]
    return scopes


def _rows(store: Store, kind: str, window: Window) -> pa.Table:
    """Rows of a scope; worker facts are slow, so all of them up to its end are taken."""
    if kind == "worker":
        window = Window(None, window.end_ns, window.run_id)
    return conform(kind, store.rows(kind, window, order_by="at_ns"))


def _window(window: Window) -> dict[str, Any]:
    return {"start_ns": window.start_ns, "end_ns": window.end_ns, "run_id": window.run_id}
