"""The documents say what is true today: generated parts are current, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from collector.cli import build
from docs import readme

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
COMMAND = re.compile(r"^ {4,}\$?\s*((?:\.venv/bin/)?kvscope [^#|<>\n]+)|`(kvscope [a-z][^`\n]*)`", re.MULTILINE)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("part", ["settings", "verbs", "engines"])
def test_generated_parts_of_the_readme_are_current(part: str) -> None:
    """The tables are what their definitions render today (`make docs` writes them)."""
    shown = readme.part((ROOT / "README.md").read_text(), part)
    assert shown.strip() == getattr(readme, part)().strip()


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_to_files_that_exist(document: Path) -> None:
    """Every relative link of a document is a file of this tree."""
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_commands_in_documents_exist_with_their_options(document: Path) -> None:
    """Each `kvscope VERB --option` that a document shows is a verb and an option of the command line."""
    unknown = []
    for found in COMMAND.findall(document.read_text()):
        text = (found[0] or found[1]).strip()
        problem = _problem(text)
        if problem:
            unknown.append(f"{text}: {problem}")
    assert unknown == []


SOURCES = [
    path for folder in ("collector", "engine_probe", "store", "diagnosis") for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("what", ["documents", "messages"])
def test_nobody_is_told_to_install_kvscope_from_a_package_index(what: str) -> None:
    """It is on none: a quick start would end at its first line, or with what somebody else put there under this name."""
    texts = {path: path.read_text() for path in (DOCUMENTS if what == "documents" else SOURCES)}
    named = re.compile(r"pip3? (?:install|download)[^\n`#]*[ '\"]kvscope\b(?!'s|[/.])")
    assert [_name(path) for path, text in texts.items() if named.search(text)] == []
    assert named.search("pip install 'kvscope[service]'")
    assert named.search("pip install -U kvscope")


def test_the_check_of_commands_would_notice() -> None:
    """A verb or an option that does not exist is found."""
    assert _problem("kvscope diagnoze --baseline a") == "no verb diagnoze"
    assert _problem("kvscope diagnose --base a") == "diagnose has no --base"
    assert _problem("kvscope diagnose --baseline ample --json") is None


def test_every_verb_says_what_it_does_and_answers_json() -> None:
    """Each verb has a sentence of help, and --json (those that only hold verbs pass it down)."""
    for name, command in _verbs().items():
        assert command.help, name
        leaves = getattr(command, "commands", {"": command})
        for leaf in leaves.values():
            options = {option for parameter in leaf.params for option in parameter.opts}
            assert "--json" in options, f"{name} {leaf.name}"


def test_help_of_verbs_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of 80 columns a list says of each verb its whole first paragraph, on as many lines as it takes."""
    monkeypatch.setenv("COLUMNS", "80")
    groups: list[Any] = [get_command(build()), *(verb for verb in _verbs().values() if hasattr(verb, "commands"))]
    assert len(groups) > 2
    for group in groups:
        told = group.get_help(group.make_context("kvscope", [], resilient_parsing=True))
        assert max(len(line) for line in told.splitlines()) <= 80
        shown = " ".join(told.split())
        for name, verb in group.commands.items():
            assert f"{name} {' '.join(verb.help.partition(chr(10) * 2)[0].split())}" in shown


def _verbs() -> dict[str, Any]:
    return dict(get_command(build()).commands)  # type: ignore[attr-defined]


def _problem(text: str) -> str | None:
    """What is wrong with a command line, None where nothing is."""
    words = shlex.split(text.rstrip("&").strip(), posix=True)
    if len(words) < 2 or words[1].startswith("-") or not words[1].islower():
        return None
    command = _verbs().get(words[1])
    if command is None:
        return f"no verb {words[1]}"
    rest = words[2:]
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"{words[1]} has no verb {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    missing = [word for word in rest if word.startswith("--") and word.split("=")[0] not in known | {"--help"}]
    return f"{words[1]} has no {missing[0]}" if missing else None
