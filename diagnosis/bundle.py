"""An incident bundle: one zip with the rows behind a verdict, its question and its answer.

Another machine unpacks it into a store of its own and must come to the identical verdict; `diagnose` says so where it does
not. Invariant: rows are copied whole (every column, every kind, both windows and what came before them that judgement
looks at), and the question holds the instant at which it was asked.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from diagnosis import windows as window_rules
from diagnosis.diagnose import diagnose as run
from diagnosis.loading.clocks import engine_ahead_ns, moved
from diagnosis.loading.requests import JOIN_REACH_NS
from diagnosis.telling.verdict import Verdict
from engine_probe.errors import BadWindow, DiagnosisError
from engine_probe.events import KINDS
from engine_probe.schema import conform
from store.evidence.lineage import PAST_NS
from store.interface import Batch, Store, Window
from store.open import open_store

T = TypeVar("T")
FORMAT = 1
"""Of the files that are written; newer ones are refused."""
LOOKBACK_NS = PAST_NS
"""What came before a live window and may still matter: the life of blocks, marks, steps that began earlier."""
MAX_BYTES = 4 << 30
"""Largest bundle that is read: its members together, and each table again when unpacked."""
MAX_ROWS = 200_000_000
"""Most rows of a kind: a column of equal values unpacks far beyond its size."""


class Span(msgspec.Struct, forbid_unknown_fields=True):
    """A window as it stands in a bundle."""

    start_ns: int | None
    end_ns: int | None
    run_id: str | None

    def window(self) -> Window:
        return Window(self.start_ns, self.end_ns, self.run_id)


class Question(msgspec.Struct):
    """What was asked: enough to ask it again."""

    format: int
    metric: str
    quantile: str
    vantage: str | None
    now_ns: int
    seed: int
    baseline: Span
    suspect: Span
    why: str
    sha256: dict[str, str]
    """Of every member with rows, so that one that was damaged or changed is noticed where it does not change the answer."""


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
    question = Question(
        FORMAT,
        verdict.metric,
        verdict.requested_quantile,
        vantage,
        now_ns,
        seed,
        _span(chosen.base),
        _span(chosen.suspect),
        chosen.why,
        {},
    )
    spans = [w for window in (chosen.base, chosen.suspect) for w in _on_both_clocks(store, window, verdict.vantage)]
    part = path.with_name(path.name + ".part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("verdict.json", msgspec.json.encode(verdict.to_dict()))
            for kind in KINDS:
                table = _rows(store, kind, spans)
                if table.num_rows:
                    buffer = io.BytesIO()
                    pq.write_table(table, buffer, compression="zstd")
                    archive.writestr(_member(kind), buffer.getvalue())
                    question.sha256[_member(kind)] = sha256(buffer.getvalue()).hexdigest()
            archive.writestr("question.json", msgspec.json.encode(question))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DiagnosisError(
            f"the incident bundle cannot be written to {path}: {error.strerror}", path=str(path)
        ) from error


def diagnose(path: Path) -> Verdict:
    """Diagnose a bundle. Raises as `look_into`."""
    return look_into(path, lambda store, verdict: None)[0]


def look_into(path: Path, look: Callable[[Store, Verdict], T]) -> tuple[Verdict, T]:
    """Diagnose a bundle, and look at its rows with the verdict in hand.

    Raises DiagnosisError where the file is no bundle, or where the answer differs from the one inside.
    """
    question, told, tables = read(path)
    with tempfile.TemporaryDirectory(prefix="kvscope-bundle-") as folder:
        store = open_store(str(Path(folder) / "bundle.duckdb"))
        try:
            store.append(Batch(tables=tables, source="bundle"), timeout_s=120.0)
            verdict = run(
                store,
                question.baseline.window(),
                question.suspect.window(),
                metric=question.metric,
                quantile=question.quantile,
                vantage=question.vantage,
                now_ns=question.now_ns,
                seed=question.seed,
                why=question.why,
            )
            seen = look(store, verdict)
        finally:
            store.close()
    mine = verdict.to_dict()
    if msgspec.json.encode(mine) != msgspec.json.encode(told):
        differing = sorted(key for key in {**mine, **told} if mine.get(key) != told.get(key))
        raise DiagnosisError(
            f"this kvscope comes to another answer than the one in {path.name} (differs in: {', '.join(differing)}); "
            "the bundle was changed, or it was written by another version",
            path=str(path),
            differing=differing,
        )
    return verdict, seen


def read(path: Path) -> tuple[Question, dict[str, Any], dict[str, pa.Table]]:
    """(question, verdict, rows by kind) of a bundle file. Raises DiagnosisError for anything that is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
            if size > MAX_BYTES:
                raise _too_large(path, f"its members unpack to {size:,} bytes")
            raw = archive.read("question.json")
            written = msgspec.json.decode(raw, type=_Format).format
            if written > FORMAT:
                raise DiagnosisError(
                    f"{path} was written by a newer kvscope (bundle format {written}, this one reads up to {FORMAT}); "
                    "diagnose it with that version",
                    path=str(path),
                )
            question = msgspec.json.decode(raw, type=Question)
            told = msgspec.json.decode(archive.read("verdict.json"), type=dict[str, Any])
            names = archive.namelist()
            bodies = {kind: archive.read(_member(kind)) for kind in KINDS if _member(kind) in names}
            tables = {kind: _table(path, kind, body) for kind, body in bodies.items()}
        _check(path, question, {_member(kind): sha256(body).hexdigest() for kind, body in bodies.items()})
        return question, told, tables
    except FileNotFoundError as error:
        raise BadWindow(f"there is no bundle at {path}", window=str(path)) from error
    except (*NOT_A_BUNDLE, OSError) as error:
        raise DiagnosisError(f"{path} is no incident bundle, or only a part of one: {error}", path=str(path)) from error


def _check(path: Path, question: Question, found: dict[str, str]) -> None:
    """DiagnosisError where the rows are not those that were written."""
    for name in sorted({*question.sha256, *found}):
        if question.sha256.get(name) != found.get(name):
            what = (
                "is missing" if name not in found else "was not written" if name not in question.sha256 else "differs"
            )
            raise DiagnosisError(
                f"{path.name} does not hold the rows that it was written with: {name} {what}; the bundle was damaged or changed",
                path=str(path),
                member=name,
            )


NOT_A_BUNDLE = (
    zipfile.BadZipFile,
    zlib.error,
    KeyError,  # a member is missing
    NotImplementedError,  # a compression nobody wrote
    RuntimeError,  # encrypted
    msgspec.MsgspecError,
    pa.ArrowException,
    ValueError,
)


def _member(kind: str) -> str:
    return f"rows/{kind}.parquet"


class _Format(msgspec.Struct):
    format: int


def _table(path: Path, kind: str, body: bytes) -> pa.Table:
    """Rows of one kind; refused before they are unpacked where they would be too many."""
    file = pq.ParquetFile(io.BytesIO(body))
    unpacked = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
    if unpacked > MAX_BYTES or file.metadata.num_rows > MAX_ROWS:
        raise _too_large(path, f"rows/{kind}.parquet unpacks to {file.metadata.num_rows:,} rows, {unpacked:,} bytes")
    return conform(kind, file.read())


def _too_large(path: Path, why: str) -> DiagnosisError:
    return DiagnosisError(f"{path} is too large to be read: {why}; at most {MAX_BYTES:,} bytes are", path=str(path))


def _on_both_clocks(store: Store, window: Window, vantage: str) -> list[Window]:
    """The window, and where it lies on the engine's clock if that is elsewhere."""
    ahead_ns = engine_ahead_ns(store, window, vantage)
    return [window, moved(window, ahead_ns)] if ahead_ns else [window]


def _rows(store: Store, kind: str, spans: Sequence[Window]) -> pa.Table:
    """Rows of one kind behind both windows, each once.

    Worker facts are slow, so all of them up to the end are taken. Engine rows of a request may lie just outside the client's
    window, and the life of its blocks before it.
    """
    parts = []
    for run_id in dict.fromkeys(window.run_id for window in spans):
        mine = [w for w in spans if w.run_id == run_id]
        column = "arrival_ns" if kind == "request" else "at_ns"
        ends = [w.end_ns for w in mine]
        until = None if None in ends else max(end for end in ends if end is not None) + JOIN_REACH_NS
        past = Window(None, until, run_id)
        wanted = ["true"] if kind == "worker" else [_in_span(w, column) for w in mine]
        table = store.rows(kind, past, where="(" + " OR ".join(wanted) + ")", order_by="at_ns")
        parts.append(conform(kind, table))
    return pa.concat_tables(parts)


def _in_span(window: Window, column: str) -> str:
    """SQL: the window with what came just before and after it."""
    bounds = []
    if window.start_ns is not None:
        bounds.append(f"{column} >= {window.start_ns - LOOKBACK_NS}")
    if window.end_ns is not None:
        bounds.append(f"{column} < {window.end_ns + JOIN_REACH_NS}")
    return "(" + (" AND ".join(bounds) or "true") + ")"


def _span(window: Window) -> Span:
    return Span(window.start_ns, window.end_ns, window.run_id)
