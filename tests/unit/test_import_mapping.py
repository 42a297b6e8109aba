"""Mapping files: fields become columns with their units, and a mistake names file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_probe.errors import UnknownFormat, UsageError
from engine_probe.readers.detect import open_source
from engine_probe.readers.mapping import load_mapping, shipped
from engine_probe.readers.source import Notes, ReadOptions

LOGS = Path(__file__).parents[1] / "data" / "benchmarks" / "logs"
AT = 1_764_403_200_000_000_000  # 2025-11-29T08:00:00Z


def read(path: Path, mapping: str, options: ReadOptions | None = None) -> tuple[list[dict[str, Any]], Notes]:
    notes = Notes()
    found = []
    for tables in open_source(path, mapping=mapping).chunks(options or ReadOptions(), notes):
        for table in tables.values():
            found += [{key: value for key, value in row.items() if value is not None} for row in table.to_pylist()]
    return found, notes


def mapped(tmp_path: Path, mapping: str, *lines: object) -> list[dict[str, Any]]:
    """Rows of these lines (objects are JSON) by this mapping."""
    (tmp_path / "log").write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    (tmp_path / "map.toml").write_text(mapping)
    return read(tmp_path / "log", str(tmp_path / "map.toml"))[0]


MINIMAL = '[columns]\narrival_ns = "t"\n'


# --- values


def test_a_line_needs_an_arrival_and_nothing_else(tmp_path: Path) -> None:
    """Vantage, state, instant and id of a request are filled where the mapping leaves them out."""
    (row,) = mapped(tmp_path, MINIMAL, {"t": 1764403200})
    expected = {"at_ns": AT, "request_id": "log-1", "vantage": "router", "state": "finished", "arrival_ns": AT}
    assert row == expected


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        ('"t"', 1764403200.25, AT + 250_000_000),
        ('"t"', "1764403200.123456789", AT + 123_456_789),
        ('{ field = "t", unit = "ms" }', 1764403200123, AT + 123_000_000),
        ('{ field = "t", unit = "us" }', "1764403200000001", AT + 1_000),
        ('{ field = "t", unit = "ns" }', AT + 5, AT + 5),
        ('{ field = "t", time = "iso8601" }', "2025-11-29T08:00:00.123456789Z", AT + 123_456_789),
        ('{ field = "t", time = "iso8601" }', "2025-11-29 08:00:00,5", AT + 500_000_000),
        ('{ field = "t", time = "iso8601", zone = "+01:00" }', "2025-11-29T09:00:00", AT),
        ('{ field = "t", time = "clf" }', "29/Nov/2025:09:00:00 +0100", AT),
        ('{ field = "t", time = "%Y%m%d %H%M%S.%f" }', "20251129 080000.25", AT + 250_000_000),
        ('{ fields = ["absent", "t"] }', 1764403200, AT),
        ('{ field = "deep.list.1" }', None, AT + 1),
        ('{ field = "t", minus = { field = "d", unit = "ms" } }', 1764403201, AT),
        ('{ field = "t", plus = [{ value = 1 }, { value = 500, unit = "ms" }] }', 1764403200, AT + 1_500_000_000),
    ],
)
def test_instants(tmp_path: Path, rule: str, value: object, expected: int) -> None:
    """Every spelling of an instant, to the nanosecond; durations are added in whole ns."""
    line = {"t": value, "d": 1000, "deep": {"list": [0, 1764403200.000000001]}}
    if value is None:
        line["deep"] = {"list": [0, "1764403200.000000001"]}
    (row,) = mapped(tmp_path, f"[columns]\narrival_ns = {rule}\n", line)
    assert row["arrival_ns"] == expected


@pytest.mark.parametrize(
    ("column", "rule", "value", "expected"),
    [
        ("queue_s", '{ field = "v", unit = "ms" }', 250, 0.25),
        ("queue_s", '"v"', "1.5", 1.5),
        ("queue_s", '{ field = "v", minus = { value = 100, unit = "ms" } }', 0.5, 0.4),
        ("prompt_tokens", '"v"', "12", 12),
        ("prompt_tokens", '"v"', 12.0, 12),
        ("prefix_hash", '"v"', "0xff", 255),
        ("http_status", '"v"', 200, 200),
        ("model", '"v"', 7, "7"),
        ("model", '{ field = "v", pattern = "/([^/]+)$" }', "a/b/c", "c"),
        ("model", '{ field = "v", pattern = "^x" }', "a/b/c", None),
        ("retry_count", '{ field = "v", split = ",", pick = "count", minus = { value = 1 } }', "0.1, 0.2", 1),
        ("queue_s", '{ field = "v", split = ",", pick = "sum" }', "0.25, -, 0.5", 0.75),
        ("queue_s", '{ field = "v", split = ",", pick = "last" }', "0.25, 0.5", 0.5),
        ("state", '{ field = "v", cases = { "2.." = "finished", "4.." = "failed" } }', 404, "failed"),
        ("finish_reason", '{ field = "v", cases = { a = "stop" }, default = "other" }', "zzz", "other"),
        ("model", '{ field = "v", when = { t = "17.*" } }', "m", "m"),
        ("model", '{ field = "v", when = { t = "18.*" } }', "m", None),
        ("tenant", '{ value = "acme" }', None, "acme"),
        ("prompt_tokens", '"v"', "-", None),
        ("prompt_tokens", '"v"', None, None),
        ("prompt_tokens", '"v.absent"', {"other": 1}, None),
    ],
)
def test_values(tmp_path: Path, column: str, rule: str, value: object, expected: object) -> None:
    """Units, patterns, cases, lists in one text, conditions, constants; nothing is null, never zero."""
    (row,) = mapped(tmp_path, f"{MINIMAL}{column} = {rule}\n", {"t": 1764403200, "v": value})
    assert row.get(column) == expected


def test_states_follow_from_status_and_error(tmp_path: Path) -> None:
    """200 finished, 404 failed, 429 rejected, 499 (the client left) aborted; an error alone failed."""
    mapping = MINIMAL + 'http_status = "s"\nerror = "e"\n'
    lines = [{"t": 1764403200, "s": s} for s in (200, 404, 429, 499)] + [{"t": 1764403200, "e": "reset"}]
    assert [row["state"] for row in mapped(tmp_path, mapping, *lines)] == [
        "finished",
        "failed",
        "rejected",
        "aborted",
        "failed",
    ]


def test_text_lines_by_a_pattern_and_csv_by_a_header(tmp_path: Path) -> None:
    """Named groups are fields; of CSV the cells under the header are."""
    text = "[input]\nlines = \"text\"\npattern = '''^(?P<t>\\d+) (?P<id>\\w+)$'''\n" + MINIMAL + 'request_id = "id"\n'
    assert [row["request_id"] for row in mapped(tmp_path, text, "1764403200 a", "1764403201 b")] == ["a", "b"]
    csv = '[input]\nlines = "csv"\n' + MINIMAL + 'request_id = "the id"\n'
    assert [row["request_id"] for row in mapped(tmp_path, csv, "t,the id", '1764403200,"a,b"')] == ["a,b"]


def test_json_inside_a_line_is_found(tmp_path: Path) -> None:
    """A log's own prefix stands before the object."""
    mapping = "[input]\nlines = \"json\"\npattern = '''(?P<json>\\{.*\\})$'''\nunmatched = \"skip\"\n" + MINIMAL
    assert len(mapped(tmp_path, mapping, 'INFO {"t": 1764403200}', "INFO nothing here")) == 1


def test_other_kinds_of_rows_can_be_mapped(tmp_path: Path) -> None:
    """A router's own log as `route` rows; only a request's gaps are filled."""
    mapping = '[row]\nkind = "route"\n[columns]\nat_ns = "t"\nrequest_id = "id"\nchosen = "to"\n'
    (row,) = mapped(tmp_path, mapping, {"t": 1764403200, "id": "r", "to": "w-1"})
    assert row == {"at_ns": AT, "request_id": "r", "chosen": "w-1"}


def test_labels_are_texts(tmp_path: Path) -> None:
    """Keys of the labels by the same rules; what is unknown has no key."""
    mapping = MINIMAL + '[labels]\nproduct = { value = "chat" }\nup = "u"\nnone = "absent"\n'
    (row,) = mapped(tmp_path, mapping, {"t": 1764403200, "u": 3})
    assert dict(row["labels"]) == {"product": "chat", "up": "3"}


# --- what is shipped


def test_the_shipped_mappings_read_their_logs() -> None:
    """nginx, by hand: it ended at .942, took 0.5 s; a retry went to two upstreams; 499 is the client's going."""
    rows, notes = read(LOGS / "nginx.log", "nginx")
    first, second, third = rows
    end_ns = 1_764_403_235_942_000_000
    assert (first["end_ns"], first["arrival_ns"]) == (end_ns, end_ns - 500_000_000)
    assert (first["request_id"], first["retry_count"], first["last_token_ns"]) == ("a1", 0, end_ns)
    assert (second["state"], second["retry_count"], dict(second["labels"])["upstream"]) == (
        "failed",
        1,
        "10.0.0.2:8000",
    )
    assert (third["state"], third["request_id"]) == ("aborted", "nginx.log-3")
    assert "last_token_ns" not in second
    assert all("first_token_ns" not in row for row in rows)  # a header is no token
    assert any("nothing joins" in text for text in notes.assumed)


def test_sglangs_log_is_read_by_its_mapping() -> None:
    """Lines of received requests and of batches are left out; instants are the engine's own."""
    rows, notes = read(LOGS / "sglang.log", "sglang")
    first, second = rows
    assert first["first_token_ns"] - first["arrival_ns"] == 50_000_000
    assert (first["cached_tokens"], first["cached_tokens_device"], first["queue_s"]) == (64, 48, 0.008)
    assert second["state"] == "aborted"
    assert notes.left_out[0].startswith("1 lines that do not match")


def test_every_shipped_mapping_is_explained_at_its_head() -> None:
    """Each says which log it reads before its first table."""
    assert shipped() == ["combined", "envoy", "litellm", "nginx", "sglang"]
    for name in shipped():
        assert load_mapping(name).path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("combined", '1.2.3.4 - - [t] "GET /' + "x" * 500_000),
        ("combined", '1.2.3.4 - - [t] "' + "x" * 500_000),
        ("nginx", '1 "POST /' + "x" * 500_000),
        ("nginx", '1 "POST /v1/x" 200 rt=1 uht=' + " -," * 200_000),
        ("nginx", '1 "POST /v1/x" 200 rt=1 uht=- urt=- up=' + " id=x" * 200_000 + " y z"),
        ("sglang", '{"timestamp": ' * 100_000),
        ("sglang", '{"timestamp": ' + "}   " * 200_000 + "x"),
    ],
)
def test_a_hostile_line_costs_no_more_than_its_length(tmp_path: Path, name: str, line: str) -> None:
    """The shipped patterns have nothing to try again and again: such a line ends in an error, at once."""
    (tmp_path / "log").write_text(line + "\n")
    with pytest.raises(UnknownFormat):
        read(tmp_path / "log", name)


# --- mistakes


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (MINIMAL + 'prompt_tokns = "p"\n', r"map\.toml, line 3: columns\.prompt_tokns request rows have no such column; did you mean prompt_tokens\?"),
        (MINIMAL + "model = 3\n", r"line 3: columns\.model is 3, expected a field's name"),
        (MINIMAL + 'model = { feld = "m" }\n', r"line 3: columns\.model\.feld is not known there; did you mean field"),
        (MINIMAL + 'queue_s = { field = "q", unit = "hours" }\n', r"line 3: columns\.queue_s unit is 'hours', expected s or ms"),
        (MINIMAL + 'queue_s = { field = "q", time = "iso8601" }\n', r"line 3: columns\.queue_s time is 'iso8601', expected nothing"),
        (MINIMAL + 'model = { field = "m", pattern = "(" }\n', r"line 3: columns\.model .* is no regular expression"),
        (MINIMAL + 'model = { field = "m", value = "x" }\n', r"line 3: columns\.model needs either a field"),
        (MINIMAL + 'prompt_tokens = { value = "many" }\n', r"line 3: columns\.prompt_tokens value is 'many', expected a number"),
        (MINIMAL + 'prompt_parts = "p"\n', r"line 3: columns\.prompt_parts a column of type list<struct> cannot be filled"),
        (MINIMAL + 'model = { field = "m", pick = "best" }\n', r"line 3: columns\.model pick is 'best', expected one of"),
        (MINIMAL + 'model = { field = "m", plus = "x" }\n', r"line 3: columns\.model plus is for numbers"),
        (MINIMAL + '[row]\nkind = "elephant"\n', r"line 4: row\.kind is 'elephant', expected one of request"),
        ('[colums]\nx = "y"\n', r"line 1: colums is not known there; did you mean columns"),
        ("[input]\nlines = \"text\"\n" + MINIMAL, r"line 1: input lines = \"text\" needs a pattern with named groups"),
        ("[input]\nlines = \"text\"\npattern = '(?P<a>x)'\n" + MINIMAL, r"line 5: columns\.arrival_ns reads the field t, and the pattern has no such group; its groups are a"),
        ("[input]\nlines = \"json\"\npattern = '(?P<a>x)'\n" + MINIMAL, r"line 3: input\.pattern a pattern for JSON lines needs the group"),
        ("[input]\nonly = 3\n" + MINIMAL, r"line 2: input\.only a condition is a table"),
        ("# nothing\n", r"has no \[columns\]"),
        ("[columns\n", r"map\.toml is not TOML: .*line 1"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_line_and_key(tmp_path: Path, mapping: str, message: str) -> None:
    """Before any line of the log is read."""
    with pytest.raises(UsageError, match=message):
        mapped(tmp_path, mapping, {"t": 1764403200})


@pytest.mark.parametrize(
    ("mapping", "line", "message"),
    [
        (MINIMAL, {"t": "soon"}, r"log, line 1: t is 'soon', expected a number \(map\.toml, line 2: columns\.arrival_ns\)"),
        (MINIMAL, {"t": {"x": 1}}, r"t is an object, expected a number"),
        (MINIMAL, {"u": 1}, r"line 1: arrival_ns is not known: its field is empty \(map\.toml, line 2"),
        ('[columns]\nmodel = "m"\n', {"m": "x"}, r"line 1: arrival_ns is not known: no rule of the mapping fills it"),
        (MINIMAL + 'prompt_tokens = "p"\n', {"t": 1764403200, "p": 1.5}, r"p is 1\.5, expected a whole number \(map\.toml, line 3"),
        ('[columns]\narrival_ns = { field = "t", time = "iso8601" }\n', {"t": "29 Nov"}, r"t is '29 Nov', expected an instant like 2026"),
        (MINIMAL, "{broken", r"log, line 1 is not a JSON object"),
        (MINIMAL, "[1]", r"log, line 1 is not what was expected"),
    ],
)  # fmt: skip
def test_a_bad_line_names_line_field_and_rule(tmp_path: Path, mapping: str, line: object, message: str) -> None:
    """Where in the log, what it holds, and which rule asked for it; never what a prompt may say."""
    with pytest.raises(UnknownFormat, match=message):
        mapped(tmp_path, mapping, line)


def test_lines_that_do_not_match_are_refused_or_counted(tmp_path: Path) -> None:
    """Refused with what to say; with unmatched = "skip" counted; where none matches that is said."""
    text = "[input]\nlines = \"text\"\npattern = '''^(?P<t>\\d+)$'''\n%s" + MINIMAL
    with pytest.raises(UnknownFormat, match=r'log, line 2 does not match .*unmatched = "skip"'):
        mapped(tmp_path, text % "", "1764403200", "noise")
    skipping = text % 'unmatched = "skip"\n'
    assert len(mapped(tmp_path, skipping, "1764403200", "noise")) == 1
    with pytest.raises(UnknownFormat, match=r"gave no row by map\.toml: 2 lines did not match"):
        mapped(tmp_path, skipping, "noise", "noise")


# --- the command


def test_a_dry_run_shows_the_first_rows_and_stores_nothing(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """Columns with their values, counts, what was left out; no store is made, and no run name is needed."""
    store = tmp_path / "s.duckdb"
    ended = kvscope("import", LOGS / "nginx.log", "--mapping", "nginx", "--dry-run", "--store", store)
    assert ended.code == 0
    assert "Would import a log (nginx): 3 request. Nothing was stored" in ended.out
    assert "request_id             a1" in ended.out
    assert not store.exists()
    told = json.loads(kvscope("import", LOGS / "nginx.log", "--mapping", "nginx", "--dry-run", "--json").out)
    assert told["rows"] == {"request": 3}
    assert told["first"]["request"][1]["labels"]["upstream"] == "10.0.0.2:8000"


def test_a_mapping_is_part_of_the_identity(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """The same log by another mapping is another import; by the same one it adds nothing."""
    store, log, mapping = tmp_path / "s.duckdb", tmp_path / "log", tmp_path / "m.toml"
    log.write_text('{"t": 1764403200, "m": "x"}\n')
    for text, already in ((MINIMAL, False), (MINIMAL, True), (MINIMAL + 'model = "m"\n', False)):
        mapping.write_text(text)
        ended = kvscope("import", log, "--run", "r", "--mapping", mapping, "--store", store, "--json")
        assert json.loads(ended.out)["already_imported"] is already


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mapping", "nosuch"], "Those that come along are: combined, envoy, litellm, nginx, sglang"),
        (["--mapping", "nginx", "--format", "otlp"], "exclude each other"),
        (["--format", "elephant"], "--format 'elephant' is not known. Known are recording, vllm-bench"),
    ],
)
def test_options_that_make_no_sense(
    kvscope: Callable[..., Any], tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Exit 2 and one sentence."""
    ended = kvscope("import", LOGS / "nginx.log", "--run", "a", "--store", tmp_path / "s.duckdb", *arguments)
    assert ended.code == 2
    assert message in ended.err


def test_the_mapping_on_the_page_works(tmp_path: Path) -> None:
    """docs/import.md: its example reads a line as it says; 250 ms before 09:00:00.5+01:00, and who after the @."""
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    lines = ["2025-11-29T09:00:00.5 250ms 200 ann@acme id-1", "2025-11-29T09:00:01 1ms 301 x y", "noise"]
    (row,) = mapped(tmp_path, example, *lines)
    assert (row["end_ns"], row["arrival_ns"]) == (AT + 500_000_000, AT + 250_000_000)
    assert (row["request_id"], row["tenant"], dict(row["labels"])) == ("id-1", "acme", {"product": "search"})
    assert all(f"| `{name}` |" in page for name in shipped())
