"""The command `kvscope`: one module a verb in `collector/commands/`, loaded when it is asked for.

Results go to stdout (`--json`: one JSON document and nothing else), talk to stderr. Exit 0 fine, 1 a finding or a
failed check, 2 misuse, 3 the other side could not be reached.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import cast

try:
    import typer
except ImportError as _missing:
    sys.exit(
        f"kvscope: {_missing.name or 'typer'} is not installed: this environment has the probe alone. The command needs "
        "the extra: pip install 'kvscope[service]' (from the source tree: pip install '.[service]')"
    )

from collector import commands
from engine_probe.errors import EXIT_MISUSE, KvscopeError

app = typer.Typer(
    name="kvscope",
    help="Flight recorder and doctor for LLM serving: which cause owns how much of the P99, and what to change.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# click's ClickException, above BadParameter and UsageError. Newer typers bring a click of their own, older ones use the
# installed one: so it is taken from what typer exports.
_MISUSE = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


@app.callback()
def _kvscope() -> None:
    """Flight recorder and doctor for LLM serving: which cause owns how much of the P99, and what to change."""


def build() -> typer.Typer:
    """The app with every verb registered."""
    if not app.registered_commands:
        for module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda m: m.name):
            importlib.import_module(f"collector.commands.{module.name}").register(app)
    return app


def main(argv: list[str] | None = None) -> None:
    """Run the command line; every `KvscopeError` becomes one readable message and its exit code."""
    try:
        code = build()(args=argv, prog_name="kvscope", standalone_mode=False)
    except typer.Exit as end:
        code = end.exit_code
    except _MISUSE as error:
        error.show()
        code = EXIT_MISUSE
    except (typer.Abort, KeyboardInterrupt):
        print("kvscope: stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KvscopeError as error:
        print(f"kvscope: {error.title}: {error.message}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
