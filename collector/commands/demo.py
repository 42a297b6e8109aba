"""`kvscope demo`: the founding case on the embedded engine, then two recordings of a real vLLM, explained; offline.

The prefix cache is switched on, mean TTFT falls, P99 rises (`collector/founding.py`): at full size in virtual time, and, where
torch is there, with workers that compute on this machine. Recorded: the same
traffic was served twice by the same engine, once with ample KV blocks and once with few. Nothing is told to the diagnosis but
which run is the baseline. Every step is what the verbs do (`import`, `diagnose`, `capacity`, `sql`, `report`); the commands to
repeat them are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.output import JsonOption, columns, emit, emit_json, say
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from collector.commands.import_ import Staged
    from store.duckdb_store import DuckDBStore
    from store.interface import Store

RECORDINGS = Path(__file__).resolve().parents[2] / "examples" / "recordings"
RUNS = {"ample": "a-ample-long", "squeezed": "c-squeeze-long"}
STORE_NAME, REPORT_NAME, FOUNDING_NAME = "kvscope.duckdb", "report.md", "founding"
SQL = (
    "SELECT run_id, count(*) FILTER (change = 'stored') AS stored, count(*) FILTER (change = 'evicted') AS evicted, "
    "round(median(age_s) FILTER (change = 'evicted'), 1) AS median_life_s FROM block GROUP BY run_id ORDER BY run_id"
)


def register(app: typer.Typer) -> None:
    """Add the verb `demo`."""
    app.command("demo")(demo)


def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the store and the report; made where absent.")
    ] = Path("demo-out"),
    recordings: Annotated[Path, typer.Option(help="Folder of the two recordings.", show_default=False)] = RECORDINGS,
    live: Annotated[
        bool | None,
        typer.Option(
            help="Run the founding case on the embedded engine first.", show_default="where torch is installed"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """The cache is switched on, the mean falls, P99 rises: why? Then two recordings of a real vLLM."""
    started = time.perf_counter()
    is_live = _is_live(live)
    for name in RUNS.values():
        if not (recordings / name / "scenario.json").is_file():
            raise UsageError(
                f"the recording {name} is not in {recordings}. The demo runs from the source tree (make demo); elsewhere "
                "give --recordings FOLDER, the source tree's examples/recordings"
            )
    talk = _silent if json else say
    store = _fresh_store(folder)
    founding = _founding(folder / FOUNDING_NAME, talk, is_live=is_live)
    if not json:
        emit(render_founding(founding) + "\n")
    document = run(store, folder / REPORT_NAME, recordings, talk)
    if json:
        emit_json({**document, "founding": founding, "seconds": round(time.perf_counter() - started, 1)})
    else:
        emit(render(document))
        say(f"\n{time.perf_counter() - started:.1f} s")


def run(store_path: Path, report: Path, recordings: Path, talk: Callable[[str], None]) -> dict[str, Any]:
    """Import both recordings into a new store, judge, and write the report; everything that was found, as one document."""
    from diagnosis.diagnose import diagnose
    from diagnosis.windows import parse_window
    from store.open import open_store

    store = open_store(str(store_path))
    try:
        imported = _import(recordings, store, talk)
        talk("comparing the two runs")
        now_ns = time.time_ns()
        baseline, suspect = (parse_window(name, store, now_ns) for name in RUNS)
        verdict = diagnose(store, baseline, suspect, now_ns=now_ns).to_dict()
        capacity = _capacity(store)
        talk("asking the blocks themselves, in SQL")
        answer = _sql(store)
        engines = store.query("SELECT DISTINCT engine, engine_version FROM worker").to_pylist()
    finally:
        store.close()
    _write_report(report, verdict)
    return {
        "store": str(store_path),
        "report": str(report),
        "program": _program(),
        "engines": engines,
        "imported": imported,
        "diagnosis": verdict,
        "capacity": capacity,
        "sql": {"sql": SQL, **answer},
    }


def render(document: dict[str, Any]) -> str:
    """What a person reads of the document."""
    from diagnosis.telling.text import summary

    return "\n\n".join(
        [
            _introduction(document),
            summary(document["diagnosis"], width=columns()),
            _capacity_text(document["capacity"]),
            _sql_text(document["sql"]),
            _next_text(document),
        ]
    )


def render_founding(founding: dict[str, Any]) -> str:
    """What a person reads of the founding case: at full size, then on this machine."""
    full, live = founding["full_size"], founding["live"]
    folder = founding["folder"]
    parts = [
        "The founding case, on the embedded engine in virtual time: off is no prefix cache, on is a cache and routing by prefix.",
        _case_text(full),
    ]
    if live is not None:
        parts += [
            f"The same on this machine, computing: {live['rate']:g} calls/s, {live['seconds']:.0f} s in all.",
            _case_text(live),
        ]
    parts.append(f"Every row is in {folder}: kvscope import {folder}/full_size/on --run on, and the same for off.")
    return "\n\n".join(parts)


def _case_text(document: dict[str, Any]) -> str:
    from diagnosis.experiments.text import render_short

    fixed = document["fixed"]
    return (
        f"{fixed['workers']} workers of {fixed['hardware']}; {fixed['shared_ratio']:.0%} of the calls share {fixed['shared_tokens']:,} "
        f"tokens, answers of 64 tokens\n{render_short(document, columns())}"
    )


def _is_live(asked: bool | None) -> bool:
    from collector.founding import is_possible

    if asked is False or is_possible():
        return asked is not False
    if asked:
        raise UsageError("the live case computes with torch, which is not installed: pip install '.[service,engine]'")
    say("torch is not installed: the recordings alone (the live case needs pip install '.[service,engine]')")
    return False


def _founding(folder: Path, talk: Callable[[str], None], *, is_live: bool) -> dict[str, Any]:
    """The documents of the case at full size and, where that is wanted, of the live one."""
    import shutil

    from collector.founding import run_full_size, run_live

    shutil.rmtree(folder, ignore_errors=True)
    full = run_full_size(folder / "full_size", talk)
    live = run_live(folder / "live", talk) if is_live else None
    return {"full_size": full, "live": live, "folder": str(folder)}


def _fresh_store(folder: Path) -> Path:
    """Path of a store that does not exist yet; what an earlier demo left there is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in (STORE_NAME, f"{STORE_NAME}.wal", REPORT_NAME):
            (folder / left).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used for the demo: {error.strerror}; give another --dir") from error
    return folder / STORE_NAME


def _import(recordings: Path, store: Store, talk: Callable[[str], None]) -> dict[str, Any]:
    """Both recordings into the store. The second is read in a process of its own meanwhile: reading is what takes time."""
    import multiprocessing
    import tempfile
    from concurrent.futures import ProcessPoolExecutor
    from dataclasses import replace

    from collector.commands.import_ import append

    talk(f"reading {len(RUNS)} recordings of a real vLLM from {recordings}")
    summaries = {}
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
            paths = {run: Path(folder) / run for run in RUNS}
            first, second = RUNS
            reading = pool.submit(stage_to, recordings / RUNS[second], second, paths[second])
            staged = {first: stage_to(recordings / RUNS[first], first, paths[first]), second: reading.result()}
        for run, chunks in staged.items():
            with paths[run].open("rb") as file:
                summaries[run] = append(replace(chunks, file=file), store)
    return summaries


def stage_to(recording: Path, run: str, path: Path) -> Staged:
    """Read a recording into the file `path`; the answer can go to another process (its `file` is closed: reopen `path`)."""
    import io
    from dataclasses import replace

    from collector.commands.import_ import stage
    from engine_probe.readers.detect import open_source
    from engine_probe.readers.source import ReadOptions

    with path.open("w+b") as file:
        staged = stage(open_source(recording), run, ReadOptions(), file)
    return replace(staged, file=io.BytesIO())


def _capacity(store: Store) -> dict[str, Any]:
    """Verdict of each run; every curve also holds the size of the other run's cache."""
    from dataclasses import asdict

    from diagnosis.capacity.traces import REQUEST_COLUMNS, WORKER_COLUMNS
    from diagnosis.capacity.verdict import capacity_verdict
    from store.interface import Window

    tables = {
        name: (
            store.rows("request", Window(run_id=name), (*REQUEST_COLUMNS, "cached_tokens")),
            store.rows("worker", Window(run_id=name), WORKER_COLUMNS),
        )
        for name in RUNS
    }
    sizes = {size for _, workers in tables.values() for size in workers.column("num_blocks").to_pylist() if size}
    return {name: asdict(capacity_verdict(*both, also=sorted(sizes))) for name, both in tables.items()}


def _sql(store: DuckDBStore) -> dict[str, Any]:
    """The statement as `kvscope sql` runs it: in a jailed child process."""
    from store.sandbox.sandbox import run_sql

    return run_sql(SQL, data=store.sql_data()).to_dict()


def _write_report(path: Path, verdict: dict[str, Any]) -> None:
    from importlib.metadata import version

    from diagnosis.report import render_markdown

    path.write_text(render_markdown(verdict, version=version("kvscope")), encoding="utf-8")


def _introduction(document: dict[str, Any]) -> str:
    counts = [summary["rows"] for summary in document["imported"].values()]
    rows, blocks = sum(sum(kinds.values()) for kinds in counts), sum(kinds["block"] for kinds in counts)
    engine = ", ".join(f"{row['engine']} {row['engine_version']}" for row in document["engines"])
    return (
        f"The same traffic, served twice by a real engine ({engine}, a small model on a CPU): the runs ample and squeezed.\n"
        f"Imported: {rows:,} rows, among them {blocks:,} events of KV blocks. Told to kvscope: which run is the baseline."
    )


def _capacity_text(capacity: dict[str, Any]) -> str:
    from diagnosis.telling.text import table

    measured = {verdict["num_blocks"]: verdict["engine_ratio"] for verdict in capacity.values()}
    rows = []
    for point in capacity["squeezed"]["points"]:
        engine = measured.get(point["blocks"]) if point["blocks"] else None
        size = f"{point['blocks']:,}" if point["blocks"] else "no end"
        rows.append([size, f"{point['hit_rate']:.1%}", "" if engine is None else f"{engine:.1%}"])
    return "\n".join(
        [
            "Capacity: the blocks that prompts asked for, replayed at other sizes",
            *(f"  {name:9} {verdict['sentence']}" for name, verdict in capacity.items()),
            table(["blocks", "reused in the replay", "by the engine"], rows),
        ]
    )


def _sql_text(answer: dict[str, Any]) -> str:
    from diagnosis.telling.text import table

    rows = [[f"{cell:,}" if isinstance(cell, int | float) else str(cell) for cell in row] for row in answer["rows"]]
    return "The life of the blocks, from the raw events, in SQL\n" + table([c["name"] for c in answer["columns"]], rows)


def _program() -> str:
    """How this command is called from here: by its name where that is on PATH, else by its path."""
    import os
    import shutil
    import sys

    called = Path(sys.argv[0])
    if called.name != "kvscope" or shutil.which("kvscope"):
        return "kvscope"
    return os.path.relpath(called) if called.is_relative_to(Path.cwd()) or not called.is_absolute() else str(called)


def _next_text(document: dict[str, Any]) -> str:
    store, report, kvscope = document["store"], document["report"], document["program"]
    more = {
        f"{kvscope} diagnose --store {store} --baseline ample --suspect squeezed": "evidence, its SQL, what it is not",
        f'{kvscope} sql --store {store} "SELECT ..."': "any question of yours",
        f"{kvscope} serve --store {store}": "keep the service up, on 127.0.0.1:8321",
        f"{kvscope} attach vllm http://127.0.0.1:8000": "watch a vLLM of your own",
    }
    width = max(map(len, more))
    lines = [f"  {command:{width}}  {what}" for command, what in more.items()]
    return "\n".join([f"The report is {report}. Go on from here:", *lines])


def _silent(_: str) -> None:
    return
