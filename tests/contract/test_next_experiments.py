"""The next experiment: every two causes are separated by one, and its command is one that `kvscope` takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

from collector import cli
from collector.experiments.arm_settings import parse_arm, virtual_arm
from collector.experiments.scenarios import find_scenario
from collector.experiments.setting_up import arms_of
from diagnosis.cause import all_causes
from diagnosis.judge import judge
from diagnosis.next_experiment import Experiment, n_for_mean, next_experiment, separating, table
from diagnosis.telling.verdict import Verdict
from diagnosis.windows import Chosen
from store.interface import Window
from store.open import open_store
from tests.cause_scenarios import SCENARIOS
from tests.diagnosed import few_replicates
from tests.unit.test_lab_faults import DESIGN

CHOSEN = Chosen(Window(run_id="a"), Window(1, 10**18, 'it\'s "$b"'), "baseline", "suspect", "both windows were given")
EVERYTHING = frozenset(option for one in table() for need in one.needs for option in need.split("|"))


@pytest.fixture(scope="module")
def verdict() -> Iterator[Verdict]:
    """Blocks ran short: admission_blocked_on_blocks alone."""
    with few_replicates():
        base, suspect, metric = SCENARIOS["admission_blocked_on_blocks"].fires()
        yield judge(base, suspect, CHOSEN, metric, "0.99")


def commands(one: Experiment) -> Iterator[str]:
    yield one.command
    if one.virtual is not None:
        yield one.virtual


@pytest.fixture(scope="module")
def filled(monkeypatch_module: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(name, command) of every line of the table, filled from a window's own facts."""
    from diagnosis import next_experiment as module

    words: dict[str, str] = {}
    kept = module._words

    def keep(*given: Any) -> dict[str, str]:
        words.update(kept(*given))
        return words

    monkeypatch_module.setattr(module, "_words", keep)
    base, suspect, metric = SCENARIOS["admission_blocked_on_blocks"].fires()
    judge(base, suspect, CHOSEN, metric, "0.99")
    return [(one.name, command.format_map(words)) for one in table() for command in commands(one)]


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch, few_replicates():
        yield patch


@pytest.mark.parametrize("visible", [frozenset(), EVERYTHING], ids=["nothing more seen", "everything seen"])
def test_every_two_causes_are_separated(visible: frozenset[str]) -> None:
    """Of any two causes that can stand beside each other, and each alone; also where nothing but requests was seen."""
    names = {*DESIGN, *all_causes()}
    assert not [pair for pair in combinations(sorted(names), 2) if separating(*pair, visible) is None]
    assert not [name for name in names if separating(name, None, visible) is None]


def test_the_table_names_causes_that_exist() -> None:
    """By their stable names, none both falling and rising, each experiment once and worth something."""
    for one in table():
        assert one.falls | one.rises <= DESIGN, one.name
        assert not one.falls & one.rises
        assert one.falls
    assert len({one.name for one in table()}) == len(table())
    assert [one.minutes for one in table()] == sorted(one.minutes for one in table())


def test_the_cheapest_comes_first() -> None:
    """What is stored is read before a fleet is played, and that before the engine is asked."""

    def name(*asked: Any) -> str:
        found = separating(*asked)
        assert found is not None
        return found.name

    assert name("length_shift", "load_step", EVERYTHING) == "length_classes"
    assert name("length_shift", "load_step", frozenset()) == "load_of_before"
    assert name("premature_eviction", "prompt_uncacheable", EVERYTHING) == "replay_with_more_blocks"
    assert name("admission_blocked_on_blocks", "load_step", frozenset()) == "more_blocks"
    assert name("small_batch", "chunk_budget", frozenset()) == "more_seats"
    assert name("slow_steps", "recompile", EVERYTHING) == "compiled_ahead"


def test_every_command_is_one_that_kvscope_takes(filled: list[tuple[str, str]], tmp_path: Path) -> None:
    """The verb exists, its options are known, values have their types, arms have known settings, SQL runs on a store."""
    store = open_store(str(tmp_path / "store.duckdb"))
    assert len(filled) >= len(table())
    for name, command in filled:
        words = shlex.split(command)
        assert words[0] == "kvscope", name
        verb, options = parsed(words[1:])
        if verb[0] == "experiment":
            check_experiment(name, options)
        elif verb[0] == "sql":
            assert store.query(words[2]).num_rows == 0, name
        else:
            assert verb[0] in ("capacity", "hotspots"), name


def parsed(words: list[str]) -> tuple[list[str], Mapping[str, Any]]:
    """(verb, its parameters) as the command line itself reads them; raises where it would refuse."""
    command: Any = typer.main.get_command(cli.build())
    verb, rest = [], words
    while hasattr(command, "get_command"):
        verb.append(rest[0])
        command = command.get_command(None, rest[0])
        assert command is not None, rest[0]
        rest = rest[1:]
    context = command.make_context(verb[-1], list(rest))
    return verb, context.params


def check_experiment(name: str, options: Mapping[str, Any]) -> None:
    endpoint = options.get("endpoint")
    scenario = find_scenario(options.get("scenario"))
    arms = arms_of(scenario, options.get("arm") or [], options.get("settings") or [], None, is_virtual=endpoint is None)
    for arm in arms:
        if endpoint is None:
            virtual_arm(arm.settings, name)
        else:
            assert set(arm.settings) <= {"endpoint", "note", "cache", "no_reuse", "version"}, name
    assert all(parse_arm(word) for word in options.get("arm") or [])


def test_a_verdict_names_it_with_its_command_and_size(verdict: Verdict) -> None:
    """More blocks, filled with the load of the window and its pool of 20, or what its longest call needs: (320 + 8) / 16 + 1; the
    same for the engine itself beside it."""
    found = verdict.next_experiment
    assert found is not None
    assert found["separates"] == ["admission_blocked_on_blocks"]
    assert found["experiment"] == "more_blocks"
    assert "--arm control:num_blocks=22 --arm more:num_blocks=33" in found["command"]
    assert "--endpoint http://127.0.0.1:8000" in found["engine_command"]
    assert found["requests_per_window"] > 0
    assert "if it is admission_blocked_on_blocks, the latency falls" in found["statement"]


def test_the_number_of_requests_is_the_textbook_s() -> None:
    """Scatter 1 s, step 0.5 s, power 0.9: 2 * (1.960 + 1.2816)^2 / 0.25 = 84.06 independent ones; four times as many for half the step."""
    values = np.tile([1.0, 3.0], 500)
    assert n_for_mean(values, 0.5) == 85
    assert n_for_mean(values, 0.25) == pytest.approx(4 * 84.06, abs=1.0)
    assert n_for_mean(values, 0.0) is None
    slow = np.repeat([1.0, 3.0], 500)
    assert (n_for_mean(slow, 0.5) or 0) > 10 * 85


def test_nothing_to_do_needs_no_experiment(verdict: Verdict) -> None:
    """No cause, no experiment."""
    assert next_experiment([], None, None) is None  # type: ignore[arg-type]  # neither is looked at


def test_the_command_that_is_told_runs(verdict: Verdict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, with fewer calls: two arms are played and compared."""
    assert verdict.next_experiment is not None
    words = shlex.split(verdict.next_experiment["command"])[1:]
    words[words.index("--requests") + 1] = "30"
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--warmup", "5", "--out", str(tmp_path / "out"), "--jobs", "1", "--json"])
    assert end.value.code in (0, 1)
    document = json.loads(capsys.readouterr().out)
    assert [arm["arm"] for arm in document["arms"]] == ["control", "more"]
