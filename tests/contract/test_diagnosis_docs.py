"""What the docs say of diagnosis is what the code does: the page of causes, the precedence table, the levels of observation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diagnosis.cause import all_causes
from diagnosis.causes_page import render
from diagnosis.ledger import rows
from tests.diagnosed import as_run, few_replicates, judged, runs, stored
from tests.simulate import LEVELS, Setup, at_level
from tests.unit.test_diagnosis_text import DESIGN_KEYS, OUR_KEYS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "diagnosis.md").read_text(encoding="utf-8")


def part(name: str) -> str:
    """What stands between the markers of a generated or checked part."""
    found = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_the_page_of_causes_is_generated() -> None:
    """`python -m diagnosis.causes_page > docs/causes.md`."""
    assert (DOCS / "causes.md").read_text(encoding="utf-8") == render()


def test_every_cause_is_on_its_page() -> None:
    """A heading, a remedy and the needs of each."""
    for cause in all_causes().values():
        section = render().split(f"\n## {cause.name}\n")[1].split("\n## ")[0]
        assert cause.remedies()[0] in section
        assert "**Needs.**" in section


def test_the_precedence_table_is_the_ledger_s() -> None:
    """The table of `diagnosis/ledger/rows.py`, word for word."""
    lines = [line for line in (rows.__doc__ or "").splitlines() if line.startswith("|")]
    assert part("precedence") == "\n".join(lines) + "\n"


def test_the_table_names_rows_that_exist() -> None:
    """Every row in it is a row of the ledger."""
    named = set(re.findall(r"`([a-z_]+)`", part("precedence"))) - {"slow_factor"}
    assert named <= set(rows.ROWS)


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What a verdict says that it cannot see, by level of observation, on runs in which everything is quiet."""
    simulated = runs({"a": {}, "b": {"seed": 4}}, Setup(num_requests=240))
    parts = [as_run(at_level(found, level), f"{name}-{level}") for name, found in simulated.items() for level in LEVELS]
    with stored(tmp_path_factory.mktemp("levels") / "store.duckdb", parts) as store, few_replicates():
        return {
            level: {row["cause"] for row in judged(store, f"a-{level}", f"b-{level}").not_observable}
            for level in LEVELS
        }


@pytest.mark.parametrize("level", LEVELS)
def test_the_levels_are_those_of_a_verdict(unseen: dict[str, set[str]], level: str) -> None:
    """`no` in the table is `not observable here` in a verdict at that level, and nothing else is."""
    column = 2 + LEVELS.index(level)
    table = [[cell.strip() for cell in line.split("|")] for line in part("levels").splitlines()[2:]]
    assert [row[1].strip("`") for row in table] == sorted(all_causes())
    said = {row[1].strip("`") for row in table if row[column].split(" ")[0].strip(",") == "no"}
    assert said == unseen[level]


def test_every_key_of_the_document_is_explained() -> None:
    """Whoever scripts against it finds each key in the table."""
    told = set(re.findall(r"`([a-z0-9_]+)`", PAGE.split("## From a program")[1]))
    assert told >= DESIGN_KEYS | OUR_KEYS


def test_every_status_is_explained() -> None:
    """The four of them."""
    assert {"explained", "no_change", "not_observable", "not_distinguishable"} <= set(
        re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    )
