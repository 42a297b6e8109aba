"""The command `kvscope`: one module a verb in `collector/commands/`, loaded when it is asked for.

Results go to stdout (`--json`: one JSON document and nothing else, of a failure its problem document), talk to stderr.
Exit 0 fine, 1 a finding or a failed check, 2 misuse, 3 the other side could not be reached; 70 a defect of ours, 130 Ctrl+C.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
import traceback
from typing import Annotated, cast

try:
    import typer
except ImportError as _missing:
    print(
        f"kvscope: {_missing.name or 'typer'} is not installed: this environment has the probe alone. The command needs "
        "the extra `service`: pip install '.[service]' in kvscope's folder",
        file=sys.stderr,
    )
    sys.exit(2)

from collector import commands
from collector.terminal.output import JsonOut, emit_json
from collector.terminal.verb_list import VerbList
from engine_probe.errors import EXIT_DEFECT, EXIT_OK, EXIT_STOPPED, DiskFull, KvscopeError, UsageError

app = typer.Typer(
    name="kvscope",
    cls=VerbList,
    help="Flight recorder and doctor for LLM serving: which cause owns how much of the P99, and what to change.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# click's ClickException, above BadParameter and UsageError. Newer typers bring a click of their own, older ones use the
# installed one: so it is taken from what typer exports.
_MISUSE = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        print(f"kvscope {metadata.version('kvscope')}")
        raise typer.Exit


@app.callback()
def _kvscope(
    version: Annotated[
        bool, typer.Option("--version", help="Show the release and exit.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    """Flight recorder and doctor for LLM serving: which cause owns how much of the P99, and what to change."""


def build() -> typer.Typer:
    """The app with every verb registered."""
    if not app.registered_commands:
        for module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda m: m.name):
            importlib.import_module(f"collector.commands.{module.name}").register(app)
        for group in app.registered_groups:
            if group.typer_instance is not None:
                group.typer_instance.info.cls = VerbList
    return app


def main(argv: list[str] | None = None) -> None:
    """Run the command line; every error becomes one readable message, its problem document under `--json`, and its code."""
    JsonOut.is_told = False
    code: object = EXIT_OK
    try:
        code = build()(args=argv, prog_name="kvscope", standalone_mode=False)
    except typer.Exit as end:
        code = end.exit_code
    except _MISUSE as error:
        error.show()
        code = _failed(UsageError(error.format_message()), argv)
    except (typer.Abort, KeyboardInterrupt):
        print("kvscope: stopped", file=sys.stderr)
        code = EXIT_STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KvscopeError as error:
        print(f"kvscope: {error.title}: {error.message}", file=sys.stderr)
        code = _failed(error, argv)
    except OSError as error:
        known = _of_system(error)
        print(f"kvscope: {known.title}: {known.message}", file=sys.stderr)
        code = _failed(known, argv)
    except Exception as error:
        traceback.print_exc()
        print("kvscope: this is a defect of kvscope; please report it with the lines above", file=sys.stderr)
        _failed(KvscopeError(f"a defect of kvscope: {type(error).__name__}: {error}"), argv)
        code = EXIT_DEFECT
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _failed(error: KvscopeError, argv: list[str] | None) -> int:
    """The exit code of an error. Under `--json` the failure is the one document on stdout."""
    words = sys.argv[1:] if argv is None else argv
    options = words[: words.index("--")] if "--" in words else words
    if "--json" in options and not JsonOut.is_told:
        from collector.problem_document import document

        emit_json(document(error))
    return error.exit_code


def _of_system(error: OSError) -> KvscopeError:
    """A refusal of the system that no verb foresaw, as an error of ours: a path that makes no sense, or a disk that fails."""
    what = error.strerror or str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{where}{what}. Free some space and try again.")
    if isinstance(error.filename, str | bytes) and error.errno != errno.EIO:
        return UsageError(f"{where}{what}. Give another path, or this user the right to it.")
    return KvscopeError(f"The system refused: {where}{what}.")


if __name__ == "__main__":
    main()
