"""`kvscope diagnose` and `kvscope report` as a person runs them: exit codes, documents, files, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended
from tests.diagnosed import runs, shifted, stored, with_client
from tests.simulate import Setup
from tests.unit.test_diagnosis_text import DESIGN_KEYS, OUR_KEYS

Run = Callable[..., Ended]
LIVE_START = "2026-05-28T20:26:40Z"  # the simulated engine's T0


pytestmark = pytest.mark.usefixtures("few_replicates")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with three runs and some live requests; nobody holds it open."""
    simulated = runs(
        {"base": {}, "quiet": {"seed": 2}, "off": {"caching": False}}, Setup(num_requests=200, output_tokens=(8, 32))
    )
    simulated["base"] = with_client(simulated["base"])
    live = {kind: [{**row, "run_id": None} for row in rows] for kind, rows in shifted(simulated["quiet"], 60.0).items()}
    file = tmp_path_factory.mktemp("command") / "store.duckdb"
    with stored(file, [*simulated.values(), live]):
        pass
    return str(file)


@pytest.fixture
def diagnose(kvscope: Run, path: str) -> Run:
    def run(*args: object) -> Ended:
        return kvscope("diagnose", "--store", path, *args)

    return run


OFF = ("--baseline", "base", "--suspect", "off")


def test_a_finding_exits_with_1(diagnose: Run) -> None:
    """Something changed: the answer on stdout, one sentence first."""
    ended = diagnose(*OFF)
    assert ended.code == 1, ended.err
    first = ended.out.split("\n\n")[0]
    assert first.startswith("EXPLAINED: ")
    assert "prefix_caching_off" in first
    assert "sql: SELECT" in ended.out


def test_no_change_exits_with_0(diagnose: Run) -> None:
    """Nothing changed: 0, so that a script can go on."""
    ended = diagnose("--baseline", "base", "--suspect", "quiet")
    assert ended.code == 0, ended.out
    assert ended.out.startswith("NO CHANGE: ")


def test_json_is_one_document_with_the_design_s_keys(diagnose: Run) -> None:
    """Nothing else on stdout; exit code as without --json."""
    ended = diagnose(*OFF, "--json")
    assert ended.code == 1
    document = json.loads(ended.out)
    assert set(document) == DESIGN_KEYS | OUR_KEYS
    assert set(document["delta"]) == {"mean_s", "p99_s", "judged_s", "baseline", "suspect"}
    assert set(document["delta"]["p99_s"]) == {"value", "interval_95"}
    cause = document["causes"][0]
    assert {
        "cause",
        "subject",
        "interval",
        "share_p99",
        "confidence",
        "confidence_word",
        "evidence",
        "refuted_by",
        "remedy",
    } <= set(cause)
    assert set(cause["subject"]) == {"kind", "id"}
    assert set(cause["evidence"][0]) == {"statement", "value", "unit", "sql", "request_ids", "computed_by"}
    assert {"cause", "mean_s", "p99_s", "es_s", "interval_95"} <= set(document["attribution"][0])
    assert set(document["excluded"][0]) == {"cause", "because"}
    assert set(document["quality"][0]) == {"check", "status", "statement"}
    keys = {"metric", "baseline", "suspect", "interval_95", "p_value", "changed"}
    assert set(document["side_effects"][0]) == keys


def test_no_sql(diagnose: Run) -> None:
    """The queries can be left out."""
    assert "SELECT" not in diagnose(*OFF, "--no-sql").out


@pytest.mark.parametrize(
    ("quantile", "judged"),
    [("0.5", "0.5"), ("0.95", "0.95"), ("0.999", "0.95"), ("0.9999", "0.95"), ("0.01", "0.01")],
)
def test_any_quantile(diagnose: Run, quantile: str, judged: str) -> None:
    """A quantile that 200 requests cannot carry falls back to P95 and the mean, and says so."""
    document = json.loads(diagnose(*OFF, "--quantile", quantile, "--json").out)
    assert document["requested_quantile"] == quantile
    assert document["quantile"] == judged
    if judged != quantile:
        assert any("too few" in note for note in document["notes"])


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
def test_any_metric(diagnose: Run, metric: str) -> None:
    """Rows sum to the change for each."""
    document = json.loads(diagnose(*OFF, "--metric", metric, "--json").out)
    told = sum(row["mean_s"] for row in document["attribution"])
    assert told == pytest.approx(document["delta"]["mean_s"]["value"], abs=1e-9)


def test_vantage_can_be_chosen(diagnose: Run) -> None:
    """The client saw only the baseline, so the engine's is taken; asked for the client's, the window without it is named."""
    assert json.loads(diagnose(*OFF, "--json").out)["vantage"] == "engine"
    ended = diagnose(*OFF, "--vantage", "client")
    assert ended.code == 2
    assert "window off (off) holds no client requests" in ended.err


def test_parts_of_runs_and_live_windows(diagnose: Run) -> None:
    """NAME@START/END against START/END."""
    start, minute = LIVE_START, "2026-05-28T20:27:40Z"
    ended = diagnose("--baseline", f"base@{start}/{minute}", "--suspect", f"{minute}/2026-05-28T20:28:10Z", "--json")
    assert ended.code in (0, 1), ended.err
    windows = json.loads(ended.out)["windows"]
    assert (windows["baseline"]["run"], windows["suspect"]["run"]) == ("base", None)


def test_the_same_seed_gives_the_same_document(diagnose: Run) -> None:
    """Another seed may move an interval, never the change itself."""
    first, again = diagnose(*OFF, "--json").out, diagnose(*OFF, "--json").out
    assert first == again
    other = json.loads(diagnose(*OFF, "--json", "--seed", "9").out)
    assert other["delta"]["p99_s"]["value"] == json.loads(first)["delta"]["p99_s"]["value"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--baseline", "base", "--suspect", "nowhere"), "neither a run nor START/END; known runs: base, off, quiet"),
        (("--baseline", "base", "--suspect", "base"), "the same window"),
        (("--baseline", "base", "--suspect", "now/-15m"), "ends before it starts"),
        (("--baseline", "base", "--suspect", "2100-01-01/2100-01-02"), "future"),
        (("--baseline", "base", "--suspect", "2020-01-01/2020-01-02"), "holds no requests"),
        (("--suspect", "off"), "a baseline is needed for the run 'off'"),
        ((*OFF, "--metric", "latency"), "unknown metric 'latency'; known: ttft, tpot, e2e"),
        ((*OFF, "--vantage", "moon"), "unknown vantage 'moon'; known: client, engine, router"),
        ((*OFF, "--quantile", "99"), "'99' is no quantile"),
        ((*OFF, "--quantile", "P99"), "'P99' is no quantile"),
        ((*OFF, "--quantile", "0"), "'0' is no quantile"),
        ((*OFF, "--quantile", "1"), "'1' is no quantile"),
        ((*OFF, "--quantile", "nan"), "'nan' is no quantile"),
        ((*OFF, "--quantile", ""), "'' is no quantile"),
        ((*OFF, "--quantile", "0.9999999"), "give a decimal from 0.0001 to 0.9999"),
        ((*OFF, "--quantile", "0.99" + "0" * 99), "no quantile"),
        ((*OFF, "--seed", "x"), "seed"),
        ((*OFF, "--seed", "-1"), "seed"),
        ((*OFF, "--colour", "red"), "colour"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_would_do(diagnose: Run, args: tuple[str, ...], says: str) -> None:
    """Nothing on stdout, one readable message on stderr, no traceback."""
    ended = diagnose(*args)
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert says in " ".join(ended.err.replace("│", " ").split())
    assert "Traceback" not in ended.err


def test_a_store_that_is_not_there(kvscope: Run, tmp_path: Path) -> None:
    """A wrong path is said, and no empty database is made of it."""
    absent = tmp_path / "absent.duckdb"
    ended = kvscope("diagnose", "--store", absent, *OFF)
    assert ended.code != 0
    assert str(absent) in ended.err
    assert "Traceback" not in ended.err
    assert not absent.exists()


def test_a_file_that_is_no_store(kvscope: Run, tmp_path: Path) -> None:
    """A text in place of a database."""
    wrong = tmp_path / "notes.duckdb"
    wrong.write_text("not a database")
    ended = kvscope("diagnose", "--store", wrong, *OFF)
    assert ended.code != 0
    assert "Traceback" not in ended.err


def test_report_is_written_and_named(kvscope: Run, path: str, tmp_path: Path) -> None:
    """Markdown in the file, the sentence on stdout, the path on stderr, exit 0: writing it is what was asked."""
    output = tmp_path / "out.md"
    ended = kvscope("report", "--store", path, *OFF, "-o", output)
    assert ended.code == 0, ended.err
    assert f"report: {output}" in ended.err
    text = output.read_text(encoding="utf-8")
    assert text.startswith("# P99 TTFT: explained\n")
    assert ended.out.strip() in text
    assert "~~~sql" in text


def test_report_as_json(kvscope: Run, path: str, tmp_path: Path) -> None:
    """Where it is, and what it says."""
    output = tmp_path / "out.markdown"
    document: dict[str, Any] = json.loads(kvscope("report", "--store", path, *OFF, "-o", output, "--json").out)
    assert document["report"] == str(output)
    assert document["status"] == "explained"
    assert set(document) == {"report", "status", "verdict"}


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("out.pdf", "give a file that ends in .html or .md"),
        ("no/folder/out.md", "there is no folder"),
        ("folder.md", "it is a folder"),
    ],
)
def test_a_report_that_cannot_be_written_is_said_first(
    kvscope: Run, path: str, tmp_path: Path, output: str, says: str
) -> None:
    """Before a long diagnosis, as a mistake of use."""
    (tmp_path / "folder.md").mkdir()
    ended = kvscope("report", "--store", path, *OFF, "-o", tmp_path / output)
    assert ended.code == 2
    assert says in ended.err


def test_a_bundle_gives_the_same_document_and_report(kvscope: Run, diagnose: Run, path: str, tmp_path: Path) -> None:
    """Written beside a diagnosis or a report, read back by both verbs without the store: but for which store the next command asks."""
    here = f" --store {path}"
    bundle = tmp_path / "incident.zip"
    told = diagnose(*OFF, "--bundle", bundle, "--json")
    assert f"incident bundle: {bundle}" in told.err
    again = kvscope("diagnose", "--from-bundle", bundle, "--json", "--store", tmp_path / "nowhere.duckdb")
    assert (again.code, again.out) == (told.code, told.out.replace(here, ""))
    report = kvscope("report", "--from-bundle", bundle, "-o", tmp_path / "a.md")
    assert report.code == 0, report.err
    kvscope("report", "--store", path, *OFF, "-o", tmp_path / "b.md")
    assert (tmp_path / "a.md").read_text() == (tmp_path / "b.md").read_text().replace(here, "")


def test_bundle_mistakes(kvscope: Run, diagnose: Run, tmp_path: Path) -> None:
    """Both ways at once, no folder, no such file, no bundle."""
    exclusive = diagnose("--bundle", tmp_path / "a.zip", "--from-bundle", tmp_path / "b.zip")
    assert (exclusive.code, "exclude each other" in exclusive.err) == (2, True)
    folder = diagnose(*OFF, "--bundle", tmp_path / "no" / "a.zip")
    assert (folder.code, "there is no folder" in folder.err) == (2, True)
    absent = kvscope("diagnose", "--from-bundle", tmp_path / "absent.zip")
    assert (absent.code, "there is no bundle at" in absent.err) == (2, True)
    (tmp_path / "text.zip").write_text("no zip")
    wrong = kvscope("diagnose", "--from-bundle", tmp_path / "text.zip")
    assert (wrong.code, "is no incident bundle" in wrong.err) == (2, True)


def test_help_names_the_windows(kvscope: Run) -> None:
    """How a window is written stands in the help of both verbs."""
    for verb in ("diagnose", "report"):
        assert "NAME@START/END" in kvscope(verb, "--help").out
