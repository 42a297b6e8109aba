"""`kvscope bench NAME`: the figures of `bench/`, run by name. They live beside the source, not in the installed package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.output import JsonOption, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING, UsageError

if TYPE_CHECKING:
    from types import ModuleType


def register(app: typer.Typer) -> None:
    """Add the verb `bench`."""
    app.command("bench")(bench)


def bench(
    name: Annotated[
        str | None,
        typer.Argument(help="ingest, query, probe, ...; without a name: those there are.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure: ratios and rates of one run on this machine, beside their gates. Exit 1 where a gate is missed."""
    folder = _folder()
    names = _names(folder)
    if name is None:
        if as_json:
            emit_json(names)
        else:
            emit("\n".join(f"{known:12} {_first_line(folder / f'{known}.py')}" for known in names))
        return
    if name not in names:
        raise UsageError(f"there is no benchmark {name!r}; there are {', '.join(names)}", name=name)
    module = _load(name)
    say(f"measuring {name}; the machine should have nothing else to do")
    document = _run(module, as_json)
    if as_json:
        emit_json(document)
    else:
        render = getattr(module, "render", None)
        emit(str(render(document)) if render is not None else "\n".join(_lines(document)))
    if not all(_verdicts(document)):
        raise typer.Exit(EXIT_FINDING)


def _folder() -> Path:
    """The folder `bench/` of the source. Raises UsageError where this is an installed package without it."""
    import collector

    folder = Path(collector.__file__).parent.parent / "bench"
    if not (folder / "reference_rows.py").is_file():
        raise UsageError(
            "the benchmarks are not part of the installed package; run this verb from a checkout of the source "
            "(pip install -e '.[service]' there)"
        )
    return folder


def _names(folder: Path) -> list[str]:
    """Modules that have a `run`, told without importing them."""
    return sorted(path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8"))


def _first_line(path: Path) -> str:
    import ast

    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _load(name: str) -> ModuleType:
    import importlib
    import sys

    root = str(_folder().parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(f"bench.{name}")


def _run(module: ModuleType, as_json: bool) -> Any:
    """The module's figures; it may ask to tell its progress and which form is wanted."""
    import inspect

    offered: dict[str, Any] = {"tell": say, "json": as_json}
    asked = inspect.signature(module.run).parameters
    return module.run(**{name: value for name, value in offered.items() if name in asked})


def _lines(value: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    """A document as indented lines, for modules that render nothing themselves."""
    margin = "  " * depth
    if isinstance(value, Mapping):
        if name:
            yield f"{margin}{name}"
        for key, item in value.items():
            yield from _lines(item, str(key), depth + bool(name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, item in enumerate(value):
            yield from _lines(item, f"{name} {number}", depth)
    else:
        yield f"{margin}{name}: {f'{value:,.4g}' if isinstance(value, float) else value}"


def _verdicts(value: Any) -> Iterator[bool]:
    """Every `met` or `passed` of a document."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in ("met", "passed") and isinstance(item, bool):
                yield item
            else:
                yield from _verdicts(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _verdicts(item)
