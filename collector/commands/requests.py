"""`kvscope requests list|show`: the requests that were recorded, from a store or from a running collector."""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from collector.perfetto.file import PerfettoOption, write_trace
from collector.terminal.asking import TokenOption, UrlOption, ask
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json, printable, say
from collector.terminal.width import padded, width_of
from engine_probe.errors import UsageError
from engine_probe.events import column

if TYPE_CHECKING:
    from collector.terminal.client import CollectorClient

WindowOption = Annotated[
    str | None,
    typer.Option(help="A run's name, START/END or NAME@START/END.", show_default="all live rows"),
]
_COLUMNS: Final = (
    "request_id",
    "vantage",
    "worker",
    "state",
    "arrival",
    "TTFT",
    "TPOT",
    "E2E",
    "prompt",
    "cached",
    "output",
)


_LEFT_OUT: Final = ("cached", "TPOT", "vantage", "output", "prompt", "worker")
"""Columns that a narrow terminal does without, in this order; --json has them."""


def register(app: typer.Typer) -> None:
    """Add the verbs `requests list`, `requests show` and `requests export`."""
    from collector.otlp_export.verb import export

    group = typer.Typer(no_args_is_help=True, help="The requests that were recorded: list, show, export.")
    group.command("list")(list_)
    group.command("show")(show)
    group.command("export")(export)
    app.add_typer(group, name="requests")


def list_(
    window: WindowOption = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    workload: Annotated[str | None, typer.Option(help="Only this workload.")] = None,
    vantage: Annotated[str | None, typer.Option(help="Only rows measured at: engine, client, router.")] = None,
    state: Annotated[str | None, typer.Option(help="Only: finished, failed, aborted, rejected.")] = None,
    sort: Annotated[
        str, typer.Option(help="arrival, ttft, tpot, e2e, queue, prefill, prompt_tokens, output_tokens, preemptions.")
    ] = "arrival",
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=5000, help="Most rows.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on where the last page ended.")] = None,
    perfetto: PerfettoOption = None,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List requests, newest first; unknown values come last. --perfetto draws those of the list and what went on around them."""
    narrowed = {
        "worker": worker,
        "model": model,
        "tenant": tenant,
        "workload": workload,
        "vantage": vantage,
        "state": state,
    }
    equal = {name: value for name, value in narrowed.items() if value is not None}
    for name in ("vantage", "state"):
        known = column("request", name).choices
        if name in equal and equal[name] not in known:
            raise UsageError(
                f"there is no {name} {equal[name]!r}; the words are {', '.join(known)}", **{name: equal[name]}
            )

    asked = {"window": window, "sort": sort, "order": "asc" if ascending else "desc", "limit": limit, "cursor": cursor}

    def from_collector(client: CollectorClient) -> dict[str, Any]:
        path = "/api/v1/requests" if perfetto is None else "/api/v1/perfetto"
        found: dict[str, Any] = client.get(path, {**asked, **equal})
        return found

    def from_store() -> dict[str, Any]:
        return _list_from_store(store, window, equal, sort, not ascending, limit, cursor, draw=perfetto is not None)

    page = ask(store, url, token, from_store, from_collector)
    if perfetto is not None:
        write_trace(page, perfetto, as_json)
        return
    if as_json:
        emit_json(page)
        return
    lines = [list(_COLUMNS), *(_cells(row) for row in page["requests"])]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = fitting(lines, width)
    emit(_table([[line[i] for i in shown] for line in lines]))
    if missing := [name for i, name in enumerate(_COLUMNS) if i not in shown]:
        say(f"no room for {', '.join(missing)} in {width} characters; --json has every column")
    if not page["requests"]:
        say(_why_empty(page))
    elif page["next_cursor"]:
        say(f"more: --cursor {page['next_cursor']}")


def show(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    window: WindowOption = None,
    perfetto: PerfettoOption = None,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the course of one request: instants, phases, routing, blocks, steps. --json has every column too.

    --perfetto draws it on a time axis, with the steps of its workers and the requests that shared them.
    """
    if perfetto is not None:
        drawn = ask(
            store,
            url,
            token,
            lambda: _trace_from_store(store, request_id, window),
            lambda client: client.get(f"{client.path('/api/v1/requests', request_id)}/perfetto", {"window": window}),
        )
        write_trace(drawn, perfetto, as_json)
        return

    def from_collector(client: CollectorClient) -> tuple[dict[str, Any], dict[str, Any]]:
        path = client.path("/api/v1/requests", request_id)
        return client.get(f"{path}/timeline", {"window": window}), client.get(path, {"window": window})

    course, rows = ask(store, url, token, lambda: _show_from_store(store, request_id, window), from_collector)
    if as_json:
        emit_json({**rows, "timeline": course})
    else:
        emit(_course(course))
        if course["truncated"]:
            say(f"not all of its {', '.join(course['truncated'])} are shown; ask with --window, or in SQL")


def _list_from_store(
    url: str,
    window: str | None,
    equal: dict[str, str],
    sort: str,
    descending: bool,
    limit: int,
    cursor: str | None,
    draw: bool,
) -> dict[str, Any]:
    import time

    from collector.perfetto.export import trace_of_requests
    from collector.reading.request_queries import RequestFilter, list_requests
    from diagnosis.windows import parse_window
    from store.interface import Window
    from store.open import open_store

    with open_store(url, read_only=True) as store:
        chosen = Window() if window is None else parse_window(window, store, time.time_ns())
        page = list_requests(store, RequestFilter(chosen, equal, {}, sort, descending, limit, cursor))
        if draw:
            return trace_of_requests(store, [row["request_id"] for row in page.rows], chosen)
        answer = {"window": str(chosen), "requests": page.rows, "next_cursor": page.next_cursor}
        return answer if page.rows else {**answer, "runs": list(store.runs())}


def _show_from_store(url: str, request_id: str, window: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    import time

    from collector.reading.request_queries import get_request
    from collector.reading.request_timeline import timeline
    from diagnosis.windows import parse_window
    from store.open import open_store

    with open_store(url, read_only=True) as store:
        chosen = None if window is None else parse_window(window, store, time.time_ns())
        return timeline(store, request_id, chosen), get_request(store, request_id, chosen)


def _trace_from_store(url: str, request_id: str, window: str | None) -> dict[str, Any]:
    import time

    from collector.perfetto.export import trace_of_request
    from diagnosis.windows import parse_window
    from store.open import open_store

    with open_store(url, read_only=True) as store:
        chosen = None if window is None else parse_window(window, store, time.time_ns())
        return trace_of_request(store, request_id, chosen)


def _why_empty(page: dict[str, Any]) -> str:
    runs = page.get("runs") or []
    hint = f"; imported runs: {', '.join(runs)} (choose one with --window)" if runs else ""
    return f"no request matches in {page['window']}{hint}"


def _cells(row: dict[str, Any]) -> list[str]:
    arrival = datetime.fromtimestamp(row["arrival_ns"] / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    times = [_seconds(row[name]) for name in ("ttft_s", "tpot_s", "e2e_s")]
    counts = [_known(row[name]) for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    return [_known(row["request_id"]), row["vantage"], _known(row["worker"]), row["state"], arrival, *times, *counts]


def fitting(lines: list[list[str]], width: int | None) -> list[int]:
    """Positions of the columns that are shown: those of _LEFT_OUT go, one after another, until a line has its room."""
    widths = [max(width_of(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    shown = list(range(len(_COLUMNS)))
    for name in _LEFT_OUT:
        if width is None or sum(widths[i] + 2 for i in shown) - 2 <= width:
            break
        shown.remove(_COLUMNS.index(name))
    return shown


def _table(lines: list[list[str]]) -> str:
    widths = [max(width_of(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(padded(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _course(course: dict[str, Any]) -> str:
    lines = [f"request {_known(course['request_id'])}"]
    for row in course["rows"]:
        times = "  ".join(
            f"{name} {_seconds(row[key])}" for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
        )
        where = ", ".join(_known(row[name]) for name in ("worker", "model", "run_id") if row[name] is not None)
        lines.append(f"  at the {row['vantage']}: {row['state']}  {times}  {where}".rstrip())
    if course["events"]:
        origin = course["events"][0]["start_ns"]
        lines += ["", f"{'after':>10}  {'lasts':>9}  {'at':8}  what"]
        lines += [_event(event, origin) for event in course["events"]]
    if course["steps"]:
        lines += ["", _steps(course["steps"])]
    for mark in course["marks"]:
        lines.append(f"mark {mark['mark']}: {_known(mark['text'] or mark['subject'])}")
    return "\n".join(lines)


def _event(event: dict[str, Any], origin: int) -> str:
    after = f"{(event['start_ns'] - origin) / 1e6:,.1f} ms"
    length = event["end_ns"] - event["start_ns"]
    lasts = f"{length / 1e6:,.1f} ms" if length else ""
    facts = "  ".join(f"{name}={_known(value)}" for name, value in event["facts"].items())
    return f"{after:>10}  {lasts:>9}  {event['vantage'] or '':8}  {event['what']}  {facts}".rstrip()


def _steps(steps: list[dict[str, Any]]) -> str:
    slowest = max(steps, key=lambda step: step["duration_s"] or 0.0)
    preempted = sum(step["num_preempted"] or 0 for step in steps)
    return (
        f"lived through {len(steps)} {'step' if len(steps) == 1 else 'steps'}; the slowest (step {slowest['step']}) took {_seconds(slowest['duration_s'])}; "
        f"{preempted} preemptions among all requests meanwhile"
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _known(value: object) -> str:
    return "-" if value is None else printable(str(value))
