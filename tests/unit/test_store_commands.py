"""`kvscope store ...` as a person uses it: results on stdout, talk on stderr, exit codes, readable refusals."""

from __future__ import annotations

import json

import pytest

from collector.cli import main
from collector.commands.store import parse_bytes, parse_duration
from engine_probe.errors import UsageError
from store.open import open_store
from tests.store_rows import batch, request, step


@pytest.fixture
def database(tmp_path):
    """Path of a database with a live request and a run of three steps."""
    path = str(tmp_path / "k.duckdb")
    with open_store(path) as store:
        store.append(batch({"request": [request("a")], "step": [step(n, run_id="exp") for n in range(3)]}, seq=0))
    return path


@pytest.fixture
def kvscope(capsys):
    """Run the command line; (exit code, stdout, stderr)."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


def test_migrate_makes_a_database_and_says_what_it_applied(kvscope, tmp_path):
    """First the migrations by name, then that nothing is to do; as JSON too."""
    path = tmp_path / "new.duckdb"
    code, out, _ = kvscope("store", "migrate", "--store", path)
    assert code == 0
    assert "applied 0001_events, 0002_bookkeeping, 0003_runs, 0004_alerts" in out
    code, out, err = kvscope("store", "migrate", "--store", path, "--json")
    assert (code, json.loads(out), err) == (0, {"store": str(path), "applied": []}, "")


def test_verify_of_a_sound_store(kvscope, database):
    """Exit 0, one line on stdout, progress on stderr."""
    code, out, err = kvscope("store", "verify", "--store", database)
    assert (code, out) == (0, f"{database} is sound: 4 rows\n")
    assert "checking" in err
    code, out, _ = kvscope("store", "verify", "--store", database, "--json")
    assert json.loads(out) == {"store": database, "sound": True, "problems": []}


def test_verify_exits_1_and_names_the_problem(kvscope, database):
    """A row deleted behind the store's back: exit 1, where and what, in text and JSON."""
    with open_store(database) as store:
        store.call(lambda cursor: cursor.execute("DELETE FROM step WHERE step = 1"))
    code, out, _ = kvscope("store", "verify", "--store", database)
    assert code == 1
    assert out.startswith("step: 2 rows are stored, but 3 were acknowledged")
    code, out, _ = kvscope("store", "verify", "--store", database, "--json")
    assert code == 1
    assert json.loads(out)["problems"][0]["where"] == "step"


@pytest.mark.parametrize("left", [0.5, 0.9], ids=["half", "nearly all"])
def test_verify_of_a_damaged_file_is_a_finding(kvscope, database, left):
    """A file that was cut off fails the check: exit 1 and the problem, in text and as one JSON document."""
    with open_store(database) as store:
        store.append(batch({"step": [step(n, policy=f"p{n}") for n in range(20_000)]}, seq=1))
        store.checkpoint()
    with open(database, "rb+") as file:
        file.truncate(int(file.seek(0, 2) * left))
    code, out, err = kvscope("store", "verify", "--store", database)
    assert code == 1, err
    assert "damaged" in out
    assert "restore a copy made with `kvscope store backup`" in out
    code, out, _ = kvscope("store", "verify", "--store", database, "--json")
    assert (code, json.loads(out)["sound"]) == (1, False)
    assert "damaged" in json.loads(out)["problems"][0]["statement"]


def test_export_of_a_run(kvscope, database, tmp_path):
    """The run's rows go to one file a kind; a second export into the same folder is refused."""
    code, out, err = kvscope("store", "export", tmp_path / "out", "--window", "exp", "--store", database, "--json")
    assert code == 0
    (file,) = json.loads(out)["files"]
    assert (file["kind"], file["num_rows"], file["path"]) == ("step", 3, str(tmp_path / "out" / "step.parquet"))
    assert "wrote 3 step rows" in err
    code, _, err = kvscope("store", "export", tmp_path / "out", "--window", "exp", "--store", database)
    assert code == 2
    assert "exists already" in err


def test_export_of_nothing_says_so(kvscope, database, tmp_path):
    """A kind without rows in the window writes no file."""
    code, out, _ = kvscope("store", "export", tmp_path / "out", "--kind", "mark", "--store", database)
    assert (code, out) == (0, "no rows in all live rows\n")


def test_prune_by_age_and_by_run(kvscope, database):
    """Everything live is younger than 48 h, so nothing goes; at 0 s it does; a run goes by name."""
    code, out, _ = kvscope("store", "prune", "--store", database)
    assert code == 0
    assert out.startswith("nothing to delete;")
    code, out, _ = kvscope("store", "prune", "--older-than", "0s", "--no-seal", "--store", database, "--json")
    assert json.loads(out)["rows"] == {"request": 1}
    code, out, err = kvscope("store", "prune", "--run", "exp", "--store", database)
    assert code == 0
    assert out.startswith("deleted 3 step rows;")
    assert "deleted 3 step rows of exp" in err


def test_backup(kvscope, database, tmp_path):
    """The copy verifies; the same target again is refused."""
    target = tmp_path / "copy.duckdb"
    code, out, _ = kvscope("store", "backup", target, "--store", database)
    assert code == 0
    assert "4 rows, 0 sealed files" in out
    assert kvscope("store", "verify", "--store", target)[0] == 0
    code, _, err = kvscope("store", "backup", target, "--store", database)
    assert code == 2
    assert "exists already" in err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["verify", "--store", "{tmp}/none.duckdb"], 2, "There is no database"),
        (["prune", "--store", "{tmp}/none.duckdb"], 2, "There is no database"),
        (["backup", "{tmp}/x.duckdb", "--store", "{tmp}/none.duckdb"], 2, "There is no database"),
        (["prune", "--older-than", "soon", "--store", "{db}"], 2, "'soon' is no duration"),
        (["prune", "--max-bytes", "much", "--store", "{db}"], 2, "'much' is no size"),
        (["prune", "--run", "nope", "--store", "{db}"], 2, "no run 'nope'"),
        (["export", "{tmp}/o", "--format", "xlsx", "--store", "{db}"], 2, "no format 'xlsx'"),
        (["export", "{tmp}/o", "--kind", "steps", "--store", "{db}"], 2, "no kind 'steps'"),
        (["export", "{tmp}/o", "--window", "nope", "--store", "{db}"], 2, "nope"),
        (["verify", "--store", "mysql://x"], 2, "Give a path"),
        (["verify", "--store", "/dev/null"], 2, "no file that can hold a database"),
        (["export", "{db}/o", "--store", "{db}"], 2, "Not a directory"),
    ],
)
def test_misuse_is_told_in_one_line(kvscope, database, tmp_path, words, code, says):
    """Nothing on stdout, a sentence on stderr, no traceback, and nothing is made."""
    filled = [word.format(tmp=tmp_path, db=database) for word in words]
    found, out, err = kvscope("store", *filled)
    assert (found, out) == (code, "")
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "none.duckdb").exists()


def test_a_database_that_another_store_holds_is_unreachable(kvscope, database):
    """Exit 3: the other side could not be reached now."""
    with open_store(database):
        code, out, err = kvscope("store", "verify", "--store", database)
    assert (code, out) == (3, "")
    assert "Store is busy" in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("48h", 172_800), ("1.5d", 129_600), ("0s", 0)]
)
def test_durations(text, seconds):
    """A number and its unit."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "num_bytes"), [("50GB", 50 * 10**9), ("1 KiB", 1024), ("5", 5), ("0.5mb", 500_000)])
def test_sizes(text, num_bytes):
    """Decimal and binary units, in any case."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "h", "-5h", "5 weeks", "1e3s"])
def test_what_is_no_duration_is_refused(text):
    """The message shows the text and an example."""
    with pytest.raises(UsageError, match="such as 48h"):
        parse_duration(text)
    with pytest.raises(UsageError, match="such as 50GB"):
        parse_bytes(text)
