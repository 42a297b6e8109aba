"""Everything that is derived from the contract has every kind and every column of it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_probe.docs_page import page
from engine_probe.events import CONTRACT_VERSION, DROP_ORDER, KIND_DOC, KINDS, PHASES, Column, column_names
from engine_probe.recording import step_ring
from engine_probe.recording.recorder import Recorder
from engine_probe.schema import arrow_schema
from engine_probe.wire.codec import decode_json
from engine_probe.wire.json_codec import row_struct

ROOT = Path(__file__).parents[2]
SCALARS: dict[str, tuple[Any, str]] = {
    "string": ("left", "string"),
    "int64": (1_764_000_000_000_000_000, "int64"),
    "uint64": (2**64 - 1, "uint64"),
    "float64": (0.5, "double"),
    "bool": (True, "bool"),
}


def example(column: Column) -> Any:
    """A value of the column's type."""
    if column.choices:
        return column.choices[0]
    if column.fields:
        struct = {name: SCALARS[type_][0] for name, type_ in column.fields}
        return [struct] if column.type == "list<struct>" else struct
    if column.type == "map<string,string>":
        return {"a": "b"}
    if column.type.startswith("list<"):
        return [SCALARS[column.type[5:-1]][0]]
    return SCALARS[column.type][0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_in_the_arrow_schema_in_order(kind: str) -> None:
    """The schema has exactly the contract's columns, and says which kind and which contract it is."""
    schema = arrow_schema(kind)
    assert tuple(schema.names) == column_names(kind)
    assert schema.metadata == {b"kvscope.kind": kind.encode(), b"kvscope.contract": str(CONTRACT_VERSION).encode()}
    for column in KINDS[kind]:
        type_ = schema.field(column.name).type
        if column.type in SCALARS:
            assert str(type_) == SCALARS[column.type][1]
        elif column.fields:
            struct = type_.value_type if column.type == "list<struct>" else type_
            assert [field.name for field in struct] == [name for name, _ in column.fields]


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_decoded_from_json(kind: str) -> None:
    """A row with a value in every column comes back with a value in every column."""
    row = {column.name: example(column) for column in KINDS[kind]}
    decoded = decode_json(msgspec.json.encode({"events": {kind: [row]}}))
    assert decoded.ignored_columns == {}
    (back,) = decoded.tables[kind].to_pylist()
    expected = {name: list(value.items()) if value == {"a": "b"} else value for name, value in row.items()}
    assert back == expected
    assert row_struct(kind, True, False).__struct_fields__ == column_names(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_in_the_docs_page(kind: str) -> None:
    """The page names each kind in a heading and each column in a row of a table."""
    text = page()
    assert f"## `{kind}`" in text
    assert KIND_DOC[kind] in text
    for name in column_names(kind):
        assert f"| `{name}` |" in text


def test_the_docs_page_is_the_one_that_the_contract_gives() -> None:
    """docs/events.md was written from this contract; else: python -m engine_probe.docs_page docs/events.md."""
    assert (ROOT / "docs" / "events.md").read_text(encoding="utf-8") == page()


def test_every_kind_has_its_place_in_the_drop_order() -> None:
    """Overload knows what to do with each kind: block events first, requests last."""
    assert sorted(DROP_ORDER) == sorted(KINDS)
    assert (DROP_ORDER[0], DROP_ORDER[-1]) == ("block", "request")


def test_every_phase_has_its_column() -> None:
    """A phase that is named is measured: `prefill` in `prefill_s`."""
    columns = column_names("request")
    assert all(f"{phase}_s" in columns for phase in PHASES)


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_documented_and_sound(kind: str) -> None:
    """A column says what it means; names are unique; choices belong to texts; a quantity carries its unit."""
    names = column_names(kind)
    assert len(set(names)) == len(names)
    for column in KINDS[kind]:
        assert column.doc
        assert not column.doc.endswith(".") or column.doc.endswith("...")
        assert not column.choices or column.type == "string"
        assert bool(column.fields) == column.type.endswith("struct") or column.type == "list<struct>"
        if column.name.endswith("_ns"):
            assert column.type in ("int64", "list<int64>")
        if column.name.endswith(("_s", "_ratio", "_util")) and column.type.startswith(("int", "float")):
            assert column.type == "float64"


def test_the_recorder_takes_every_number_of_a_step() -> None:
    """`end_step` has a parameter for each numeric column of `step`, in the order in which the ring packs them."""
    parameters = list(inspect.signature(Recorder.end_step).parameters)
    assert parameters == [
        "self",
        *step_ring.INTS,
        *step_ring.WAITING_ON,
        *step_ring.FLOATS,
        "at_ns",
        "probe_s",
        "run",
    ]
    own = {"at_ns", "step", "duration_s", "probe_s", "sample_rate", "waiting_on"}
    numeric = {column.name for column in KINDS["step"] if column.type in ("int64", "float64")} - own
    assert {*step_ring.INTS, *step_ring.FLOATS} == numeric


HEAVY = (
    "fastapi",
    "pydantic",
    "duckdb",
    "sqlalchemy",
    "torch",
    "triton",
    "pyarrow",
    "numpy",
    "pandas",
    "msgspec",
    "httpx",
)
LIGHT = (
    "engine_probe",
    "engine_probe.events",
    "engine_probe.errors",
    "engine_probe.wire.codec",
    "engine_probe.recording.recorder",
    "engine_probe.sending.sink",
)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_probe_imports_nothing_heavy(module: str) -> None:
    """The probe enters other people's processes: what it needs is imported when it is used."""
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []
