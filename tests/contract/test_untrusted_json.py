"""Wherever foreign text is decoded as JSON inside a `try`, text that is nested too deeply is answered like any other that is broken."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine_probe", "collector", "store", "diagnosis")
ENOUGH = frozenset(("RecursionError", "Exception", "BaseException"))
JSON_ERRORS = frozenset(("MsgspecError", "DecodeError", "ValidationError", "JSONDecodeError"))


def names_of(node: ast.expr | None) -> frozenset[str]:
    """Last words of the exceptions that a handler names."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return frozenset(
        part.attr if isinstance(part, ast.Attribute) else part.id
        for part in parts
        if isinstance(part, ast.Attribute | ast.Name)
    )


def decodes(node: ast.AST) -> bool:
    """Whether JSON is decoded somewhere in it."""
    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(ast.unparse(call) in ("msgspec.json.decode", "json.loads") for call in calls)


def unguarded(tree: ast.AST) -> Iterator[int]:
    """Lines of `try` blocks that decode JSON and look after broken JSON, but not after JSON that is too deep."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try) or not any(decodes(one) for one in node.body):
            continue
        caught = frozenset[str]().union(*(names_of(handler.type) for handler in node.handlers))
        if caught & JSON_ERRORS and not caught & ENOUGH:
            yield node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_json_that_is_too_deep_is_answered_like_broken_json(folder: str) -> None:
    """msgspec raises RecursionError for it, which is none of its own errors: 100,000 brackets would end the program."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in unguarded(ast.parse(path.read_text()))
    ]
    assert found == []


def test_the_rule_sees_what_it_should() -> None:
    """A `try` that names msgspec's error alone is found, one that names both is not."""
    text = "try:\n    a = msgspec.json.decode(b)\nexcept {}:\n    pass\n"
    assert list(unguarded(ast.parse(text.format("msgspec.MsgspecError")))) == [1]
    assert list(unguarded(ast.parse(text.format("(msgspec.DecodeError, RecursionError)")))) == []
