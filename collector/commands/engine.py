"""`kvscope engine`: the embedded engine; one file a verb in `collector/engine_verbs/`, found by itself."""

from __future__ import annotations

import importlib
import pkgutil

import typer

from collector import engine_verbs
from collector.terminal.verb_list import VerbList


def register(app: typer.Typer) -> None:
    """Add the group `engine` with every module of `collector.engine_verbs`: each has `register(group)`."""
    names = sorted(module.name for module in pkgutil.iter_modules(engine_verbs.__path__))
    verbs = ", ".join(name.rstrip("_") for name in names)
    group = typer.Typer(cls=VerbList, no_args_is_help=True, help=f"kvscope's own engine, fully instrumented: {verbs}.")
    for name in names:
        importlib.import_module(f"{engine_verbs.__name__}.{name}").register(group)
    app.add_typer(group, name="engine")
