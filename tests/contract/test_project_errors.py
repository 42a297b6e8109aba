"""The one tree of errors: every class can be shown at both borders, the HTTP answer and the exit code."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
import typer

from collector import cli, problems
from collector.terminal.output import JsonOption, emit_json
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
    """400 to 599, 2 or 3, and a short name without a full stop. 1 is left to verbs that did their work and found something."""
    assert 400 <= error.http_status <= 599
    assert error.exit_code in (errors.EXIT_MISUSE, errors.EXIT_UNREACHABLE)
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


def _verb(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Make `work` the only verb of the command line; it takes `--json` as every verb does."""

    def build() -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def fail(json: JsonOption = False, words: list[str] | None = None) -> None:
            work()

        return app

    monkeypatch.setattr(cli, "build", build)


def _raise(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_becomes_one_line_and_its_exit_code(
    error: type[KvscopeError], kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line shows title and message on stderr, nothing on stdout, and ends with the error's code."""
    _verb(monkeypatch, _raise(error("what happened and what to do next")))
    ended = kvscope()
    assert (ended.code, ended.out) == (error.exit_code, "")
    assert ended.err == f"kvscope: {error.title}: what happened and what to do next\n"


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_under_json_every_error_is_the_one_document_on_stdout(
    error: type[KvscopeError], kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same problem document that HTTP answers, its facts included; the line for people stays on stderr."""
    failed = error("what happened", row=3)
    _verb(monkeypatch, _raise(failed))
    ended = kvscope("--json")
    assert ended.code == error.exit_code
    assert json.loads(ended.out) == problems.document(failed)
    assert ended.err == f"kvscope: {error.title}: what happened\n"


def test_a_document_that_was_told_is_not_followed_by_a_second(
    kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb that fails after its JSON document (a service that ends badly) leaves one document on stdout."""

    def work() -> None:
        emit_json({"url": "http://127.0.0.1:1"})
        raise errors.StoreError("the disk is gone")

    _verb(monkeypatch, work)
    ended = kvscope("--json")
    assert (ended.code, json.loads(ended.out)) == (3, {"url": "http://127.0.0.1:1"})


def test_words_of_a_command_that_make_no_sense_are_a_document_too(kvscope: Callable[..., Ended]) -> None:
    """An unknown option, a missing argument, a number that is none: exit 2, and under --json a problem on stdout."""
    for words in (["store", "verify", "--nope"], ["store", "backup"], ["sql", "SELECT 1", "--max-rows", "many"]):
        ended = kvscope(*words, "--json")
        assert ended.code == 2
        assert json.loads(ended.out)["type"] == "urn:kvscope:error:usage-error"
        assert kvscope(*words).out == ""


def test_version_is_that_of_the_package(kvscope: Callable[..., Ended]) -> None:
    """One line on stdout, exit 0, whatever else stands there."""
    ended = kvscope("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"kvscope {metadata.version('kvscope')}\n", "")


def test_json_behind_two_dashes_is_a_word_and_no_option(
    kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands behind `--` was never read as an option."""
    _verb(monkeypatch, _raise(errors.StoreError("no")))
    assert kvscope("--", "--json").out == ""


@pytest.mark.parametrize(
    ("raised", "code", "title"),
    [
        (PermissionError(13, "Permission denied", "private/x"), 2, "Usage makes no sense"),
        (OSError(28, "No space left on device", "full/x"), 3, "Disk is full"),
        (OSError(24, "Too many open files"), 3, "kvscope error"),
    ],
)
def test_a_refusal_of_the_system_is_a_line_and_no_traceback(
    raised: OSError, code: int, title: str, kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever verb it hits: a path makes no sense (2), or the machine fails (3)."""
    _verb(monkeypatch, _raise(raised))
    ended = kvscope("--json")
    assert ended.code == code
    assert json.loads(ended.out)["title"] == title
    assert raised.strerror in ended.err
    assert "Traceback" not in ended.err


def test_a_defect_of_ours_is_neither_a_finding_nor_a_misuse(
    kvscope: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 70 with the traceback on stderr; Python's own 1 would read as a finding."""
    _verb(monkeypatch, _raise(ZeroDivisionError("oops")))
    ended = kvscope("--json")
    assert ended.code == errors.EXIT_DEFECT == 70
    assert "Traceback" in ended.err
    assert "defect of kvscope" in json.loads(ended.out)["detail"]


def test_facts_are_attributes_and_unknown_ones_are_not() -> None:
    """error.row is the fact; what is no fact raises AttributeError, so hasattr works."""
    error = errors.InvalidRows("bad", kind="step", row=7)
    assert (error.kind, error.row) == ("step", 7)
    assert not hasattr(error, "column")


def test_an_error_survives_a_process_border() -> None:
    """Errors of a worker process reach the parent with their message and facts."""
    again = pickle.loads(pickle.dumps(errors.UnknownFormat("half a file", line=3)))
    assert (type(again), again.message, again.line) == (errors.UnknownFormat, "half a file", 3)
