"""Every error of the tree can be shown: as problem+json, as an exit code, as one sentence."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import engine_probe
from engine_probe import errors
from engine_probe.errors import EXIT_MISUSE, EXIT_UNREACHABLE, KvscopeError
from engine_probe.wire.row_errors import invalid_rows


def tree(root: type[KvscopeError] = KvscopeError) -> Iterator[type[KvscopeError]]:
    """The class and all below it."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


for module in pkgutil.iter_modules(engine_probe.__path__):
    if module.name not in ("vllm_plugin", "engine"):
        importlib.import_module(f"engine_probe.{module.name}")


@pytest.mark.parametrize("error", list(tree()), ids=lambda error: error.__name__)
def test_every_error_has_a_status_an_exit_code_and_a_title(error: type[KvscopeError]) -> None:
    """The border can show any error without knowing it."""
    assert 400 <= error.http_status <= 599
    assert error.exit_code in (EXIT_MISUSE, EXIT_UNREACHABLE)
    assert "title" in error.__dict__, "a title of its own, not its parent's"
    assert error.title[0].isupper() or error is KvscopeError
    assert not error.title.endswith(".")


def test_titles_tell_errors_apart() -> None:
    """Two errors with one title would be one problem type."""
    titles = [error.title for error in tree()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("error", list(tree()), ids=lambda error: error.__name__)
def test_every_error_is_drawn_in_the_tree(error: type[KvscopeError]) -> None:
    """The module's docstring shows the whole tree."""
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


def test_an_error_keeps_its_facts_as_attributes() -> None:
    """Facts are readable by name, and an unknown one is an AttributeError like any other."""
    error = invalid_rows("is -1", kind="step", row=3, column="num_running", value=-1, expected="0 or more")
    assert (error.kind, error.row, error.column, error.value, error.expected) == (
        "step",
        3,
        "num_running",
        -1,
        "0 or more",
    )
    assert error.message == "step row 3, column num_running is -1; expected 0 or more"
    with pytest.raises(AttributeError):
        _ = error.colour
