"""The one tree of errors: every class can be shown at both borders, the HTTP answer and the exit code."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import typer

from collector import cli, problems
from engine_probe import errors
from engine_probe.errors import KvscopeError

if TYPE_CHECKING:
    from tests.conftest import Ended


def _tree(root: type[KvscopeError] = KvscopeError) -> Iterator[type[KvscopeError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


CLASSES = [
    error for error in _tree() if error.__module__.startswith(("engine_probe", "store", "diagnosis", "collector"))
]


def test_all_errors_live_in_one_module_and_are_drawn_in_its_tree() -> None:
    """No folder defines an error of its own, and the picture in the docstring names each class once, under its parent."""
    assert {error.__module__ for error in CLASSES} == {"engine_probe.errors"}
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([|+\- ]*)([A-Z]\w+)(?: |$)", line):
            drawn[found[2]] = len(found[1])
    assert set(drawn) == {error.__name__ for error in CLASSES}
    for error in CLASSES[1:]:
        parent = error.__mro__[1]
        assert drawn[error.__name__] == drawn[parent.__name__] + 4, f"{error.__name__} is not below {parent.__name__}"


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_has_a_status_an_exit_code_and_a_title(error: type[KvscopeError]) -> None:
    """400 to 599, 1 to 3, and a short name without a full stop."""
    assert 400 <= error.http_status <= 599
    assert error.exit_code in (errors.EXIT_FINDING, errors.EXIT_MISUSE, errors.EXIT_UNREACHABLE)
    assert error.title
    assert not error.title.endswith(".")


def test_no_two_errors_share_a_title() -> None:
    """A title says which error it is."""
    titles = [error.title for error in CLASSES]
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_becomes_a_problem_document_with_its_facts(error: type[KvscopeError]) -> None:
    """The HTTP border shows title, status, detail and facts; a fact cannot overwrite them."""
    shown = problems.document(error("what happened", row=3, title="not this"))
    assert shown["title"] == error.title
    assert (shown["status"], shown["detail"], shown["row"]) == (error.http_status, "what happened", 3)
    assert shown["type"] == f"urn:kvscope:error:{problems.slug(error)}"


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_becomes_one_line_and_its_exit_code(
    error: type[KvscopeError], kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line shows title and message on stderr, nothing on stdout, and ends with the error's code."""

    def build() -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def fail() -> None:
            raise error("what happened and what to do next")

        return app

    monkeypatch.setattr(cli, "build", build)
    ended = kvscope()
    assert (ended.code, ended.out) == (error.exit_code, "")
    assert ended.err == f"kvscope: {error.title}: what happened and what to do next\n"


def test_facts_are_attributes_and_unknown_ones_are_not() -> None:
    """error.row is the fact; what is no fact raises AttributeError, so hasattr works."""
    error = errors.InvalidRows("bad", kind="step", row=7)
    assert (error.kind, error.row) == ("step", 7)
    assert not hasattr(error, "column")


def test_an_error_survives_a_process_border() -> None:
    """Errors of a worker process reach the parent with their message and facts."""
    again = pickle.loads(pickle.dumps(errors.UnknownFormat("half a file", line=3)))
    assert (type(again), again.message, again.line) == (errors.UnknownFormat, "half a file", 3)
