"""`kvscope doctor [URL]`: is everything between an engine and a verdict as it should be, and what to do if not?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json
from engine_probe.errors import EXIT_FINDING, KvscopeError

if TYPE_CHECKING:
    from collector.doctor.check import Check

DEFAULT_COLLECTOR = "http://127.0.0.1:8321"
SIGNS = {"ok": "ok  ", "note": "note", "warn": "WARN", "fail": "FAIL"}


def register(app: typer.Typer) -> None:
    """Add the verb `doctor`."""

    @app.command("doctor")
    def doctor(
        url: Annotated[
            str | None, typer.Argument(help="An engine's HTTP address, such as http://127.0.0.1:8000.")
        ] = None,
        store: StoreOption = DEFAULT_STORE,
        to: Annotated[
            str | None, typer.Option("--to", help=f"The collector.  [default: {DEFAULT_COLLECTOR}, if it is there]")
        ] = None,
        token: Annotated[str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Token of the collector.")] = None,
        spool: Annotated[
            Path | None, typer.Option(envvar="KVSCOPE_SPOOL_DIR", help="Folder that attach spools to.")
        ] = None,
        salt_file: Annotated[
            Path | None, typer.Option(envvar="KVSCOPE_SALT_FILE", help="Secret of the block hashes.")
        ] = None,
        engine_key: Annotated[
            str | None, typer.Option(envvar="KVSCOPE_ENGINE_KEY", help="API key of the engine.")
        ] = None,
        ca: Annotated[Path | None, typer.Option(help="Certificate authority of the engine's TLS.")] = None,
        insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the engine's certificate.")] = False,
        json: JsonOption = False,
    ) -> None:
        """Say what is visible, which verdicts that allows, and what to do next. Exit 1: something does not work."""
        from collector.doctor import engine, machine, service
        from collector.doctor.check import Check, worst
        from engine_probe.attach.fetch import EngineClient, trust
        from engine_probe.attach.salt import default_path

        checks: list[Check] = []
        exit_code = EXIT_FINDING
        if url is not None:
            client = EngineClient(url, key=engine_key, verify=trust(ca, insecure=insecure))
            try:
                checks += engine.checks_of(engine.look_at_engine(client))
            except KvscopeError as error:
                checks.append(Check("engine", client.url, "fail", error.message))
                exit_code = max(error.exit_code, EXIT_FINDING)
            finally:
                client.close()
        checks += machine.look(_file_of(store), spool, salt_file or default_path())
        checks += service.look_at_store(store)
        checks += service.look_at_collector((to or DEFAULT_COLLECTOR).rstrip("/"), token, is_asked=to is not None)
        state = worst(checks)
        if json:
            emit_json({"state": state, "checks": checks})
        else:
            emit(text_of(checks))
        if state == "fail":
            raise typer.Exit(exit_code)


def text_of(checks: list[Check], columns: int | None = None) -> str:
    """A block an area; what is to be done stands in lines of its own under its check. `columns`: width of the page."""
    from diagnosis.telling.wording import wrapped

    columns = max(columns or shutil.get_terminal_size((100, 24)).columns, 60)
    width = min(max((len(check.subject) for check in checks), default=0), 24)
    indent = " " * (width + 10)
    lines: list[str] = []
    for area in dict.fromkeys(check.area for check in checks):
        lines += ["", area] if lines else [area]
        for check in (check for check in checks if check.area == area):
            lines.append(wrapped(check.text, columns, f"  {SIGNS[check.state]}  {check.subject:<{width}}  ", indent))
            if check.do:
                lines.append(wrapped(check.do, columns, f"{indent}-> ", f"{indent}   "))
    failed, doubtful = (sum(check.state == state for check in checks) for state in ("fail", "warn"))
    end = f"{failed} failed, {doubtful} to look at." if failed or doubtful else "Nothing is wrong."
    return "\n".join([*lines, "", end])


def _file_of(store: str) -> Path | None:
    from store.open import path_of

    try:
        path = path_of(store)
    except KvscopeError:
        return None
    return None if path == ":memory:" else Path(path)
