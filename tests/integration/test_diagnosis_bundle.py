"""An incident bundle travels: another machine comes to the identical verdict, and what is no bundle is said to be none."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from diagnosis import bundle
from diagnosis.bundle import write
from diagnosis.diagnose import diagnose
from diagnosis.telling.verdict import Verdict
from diagnosis.windows import parse_window
from engine_probe.errors import BadWindow, DiagnosisError
from engine_probe.schema import table_from_rows
from store.interface import Store, Window
from tests.diagnosed import as_run, runs, shifted, stored, with_client
from tests.simulate import T0_NS, Rows, Setup

HOUR = 3600.0
LENGTH_S = 30.0
MINUTE_NS = 60_000_000_000
"""Windows are the first 30 s of a run of 200 requests at 5 a second: about 150 requests, the rest lies beyond them."""


pytestmark = pytest.mark.usefixtures("few_replicates")


@pytest.fixture(scope="module")
def simulated() -> dict[str, Rows]:
    return runs({"base": {}, "squeeze": {"num_blocks": 300}}, Setup(num_requests=200))


@pytest.fixture(scope="module")
def store(simulated: dict[str, Rows], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Both as runs, and as live traffic with a client whose clock is 2 s ahead: the squeezed hours three hours later, and
    other traffic five hours and half an hour before, whose blocks the later prompts find again."""
    live = [
        shifted(simulated["squeeze"], -5 * HOUR),
        shifted(simulated["squeeze"], 2.5 * HOUR),
        with_client(simulated["base"], skew_s=2.0),
        with_client(shifted(simulated["squeeze"], 3 * HOUR), skew_s=2.0),
    ]
    parts = [*simulated.values(), *(as_run(rows, None) for rows in live)]
    with stored(tmp_path_factory.mktemp("bundle") / "store.duckdb", parts) as opened:
        yield opened


NOW = T0_NS + round(4 * HOUR * 1e9)
LIVE = (
    Window(T0_NS, T0_NS + round(LENGTH_S * 1e9)),
    Window(T0_NS + round(3 * HOUR * 1e9), T0_NS + round((3 * HOUR + LENGTH_S) * 1e9)),
)
RUNS = (Window(run_id="base"), Window(run_id="squeeze"))
PARTS = tuple(
    Window(w.start_ns, w.end_ns, name) for w, name in zip((LIVE[0], LIVE[0]), ("base", "squeeze"), strict=True)
)


def written(store: Store, path: Path, windows: tuple[Window, Window], **asked: Any) -> Verdict:
    verdict = diagnose(store, *windows, now_ns=NOW, **asked)
    vantage = asked.get("vantage")
    write(path, store, verdict, *windows, vantage=vantage, now_ns=NOW, seed=asked.get("seed", 0))
    return verdict


@pytest.mark.parametrize(
    ("windows", "asked"),
    [
        (RUNS, {}),
        (RUNS, {"metric": "tpot", "quantile": "0.95", "seed": 7}),
        (PARTS, {}),
        (LIVE, {}),
        (LIVE, {"vantage": "engine"}),
    ],
    ids=["runs", "runs-tpot", "parts", "live-client", "live-engine"],
)
def test_another_machine_comes_to_the_identical_verdict(
    store: Store, tmp_path: Path, windows: tuple[Window, Window], asked: dict[str, Any]
) -> None:
    """Every key of the document is equal, whatever was asked; lineage of blocks stored half an hour before travels with it."""
    path = tmp_path / "incident.zip"
    verdict = written(store, path, windows, **asked)
    assert bundle.diagnose(path).to_dict() == verdict.to_dict()
    assert list(tmp_path.iterdir()) == [path], "nothing half-written is left"


def test_only_what_matters_travels(store: Store, tmp_path: Path) -> None:
    """What lies in the hour before a window is copied, the life of its blocks among it; what is older is not."""
    path = tmp_path / "incident.zip"
    written(store, path, LIVE)
    _, _, tables = bundle.read(path)
    edges = [(w.start_ns, w.end_ns) for w in LIVE if w.start_ns is not None and w.end_ns is not None]
    spans = [(start - bundle.LOOKBACK_NS, end + bundle.JOIN_REACH_NS) for start, end in edges]
    assert len(spans) == len(LIVE)
    for kind in ("request", "step", "block"):
        told = tables[kind].column("at_ns").to_pylist()
        assert all(any(first <= at < last for first, last in spans) for at in told), kind
    half_an_hour_before = round(2.5 * HOUR * 1e9) + T0_NS
    assert any(at < half_an_hour_before + MINUTE_NS for at in told if at >= half_an_hour_before)


def test_windows_that_were_chosen_are_not_chosen_again(store: Store, tmp_path: Path) -> None:
    """The bundle holds which windows were taken and why; the other machine takes those."""
    path = tmp_path / "incident.zip"
    suspect = parse_window(f"{LIVE[1].start_ns}/{LIVE[1].end_ns}", store, NOW)
    verdict = diagnose(store, None, suspect, now_ns=NOW)
    write(path, store, verdict, None, suspect, vantage=None, now_ns=NOW, seed=0)
    assert "quietest" in verdict.windows["why"]
    assert bundle.diagnose(path).windows == verdict.windows


@pytest.fixture(scope="module")
def good(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Members of a good bundle."""
    path = tmp_path_factory.mktemp("good") / "incident.zip"
    written(store, path, RUNS)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return path


def changed(body: bytes, **keys: Any) -> bytes:
    return json.dumps(json.loads(body) | keys).encode()


def test_a_changed_verdict_is_found(good: dict[str, bytes], tmp_path: Path) -> None:
    """Somebody made the sentence nicer: the answer differs in exactly that."""
    forged = good | {"verdict.json": changed(good["verdict.json"], verdict="All is well.", status="no_change")}
    with pytest.raises(DiagnosisError, match=r"differs in: status, verdict\)") as caught:
        bundle.diagnose(packed(tmp_path / "x.zip", forged))
    assert caught.value.differing == ["status", "verdict"]


def repacked(good: dict[str, bytes], kind: str, table: pa.Table | None, *, with_sum: bool) -> dict[str, bytes]:
    """The members with other rows of a kind (None: without them), and the checksum that belongs to them or the old one."""
    member, buffer = f"rows/{kind}.parquet", io.BytesIO()
    sums = dict(json.loads(good["question.json"])["sha256"])
    made = {name: body for name, body in good.items() if name != member}
    sums.pop(member, None)
    if table is not None:
        pq.write_table(table, buffer)
        made[member] = buffer.getvalue()
        sums[member] = sha256(made[member]).hexdigest()
    return made | ({"question.json": changed(good["question.json"], sha256=sums)} if with_sum else {})


def test_changed_rows_are_found(good: dict[str, bytes], tmp_path: Path) -> None:
    """One first token a microsecond later, which changes no answer: the checksum tells. With a forged checksum the answer tells
    what it can: a tenth of the requests left out is another answer."""
    table = pq.read_table(io.BytesIO(good["rows/request.parquet"]))
    first = pc.add(table["first_token_ns"], pa.array([1000] + [0] * (table.num_rows - 1), pa.int64()))
    later = table.set_column(table.column_names.index("first_token_ns"), table.schema.field("first_token_ns"), first)
    with pytest.raises(DiagnosisError, match=r"rows/request.parquet differs; the bundle was damaged or changed"):
        bundle.diagnose(packed(tmp_path / "x.zip", repacked(good, "request", later, with_sum=False)))
    fewer = table.slice(table.num_rows // 10)
    with pytest.raises(DiagnosisError, match="comes to another answer"):
        bundle.diagnose(packed(tmp_path / "y.zip", repacked(good, "request", fewer, with_sum=True)))


@pytest.mark.parametrize(
    ("kind", "words"), [("block", "rows/block.parquet is missing"), ("route", "rows/route.parquet was not written")]
)
def test_rows_that_came_or_went_are_found(good: dict[str, bytes], tmp_path: Path, kind: str, words: str) -> None:
    """A member left out, and one added."""
    table = None if kind == "block" else table_from_rows("route", [{"at_ns": 1, "request_id": "r"}])
    with pytest.raises(DiagnosisError, match=words):
        bundle.diagnose(packed(tmp_path / "x.zip", repacked(good, kind, table, with_sum=False)))


@pytest.mark.parametrize("member", ["question.json", "verdict.json"])
def test_a_missing_member_is_said(good: dict[str, bytes], tmp_path: Path, member: str) -> None:
    """Only a part of a bundle."""
    kept = {name: body for name, body in good.items() if name != member}
    with pytest.raises(DiagnosisError, match=f"only a part of one.*{member}"):
        bundle.diagnose(packed(tmp_path / "x.zip", kept))


def test_without_requests_there_is_nothing_to_judge(good: dict[str, bytes], tmp_path: Path) -> None:
    """The rows that were asked about are gone."""
    kept = repacked(good, "request", None, with_sum=True)
    with pytest.raises(BadWindow, match="holds no requests"):
        bundle.diagnose(packed(tmp_path / "x.zip", kept))


@pytest.mark.parametrize(
    ("member", "body"),
    [
        ("question.json", b"{"),
        ("question.json", b"[]"),
        ("question.json", b'{"format": 1}'),
        ("question.json", b'{"format": "one"}'),
        ("verdict.json", b"[]"),
        ("verdict.json", b"\xff\xfe"),
        ("rows/request.parquet", b"PAR1 and nothing else"),
        ("rows/request.parquet", b""),
    ],
)
def test_broken_members_are_said(good: dict[str, bytes], tmp_path: Path, member: str, body: bytes) -> None:
    """One message for a file that is no bundle, with the reason."""
    with pytest.raises(DiagnosisError, match="is no incident bundle, or only a part of one"):
        bundle.diagnose(packed(tmp_path / "x.zip", good | {member: body}))


@pytest.mark.parametrize(
    "keys",
    [
        {"baseline": "r1"},
        {"baseline": {"start_ns": "now", "end_ns": None, "run_id": None}},
        {"suspect": {"start_ns": None, "end_ns": None}},
        {"suspect": {"start_ns": None, "end_ns": None, "run_id": None, "where": "1=1"}},
        {"seed": None},
    ],
)
def test_a_question_of_the_wrong_shape_is_said(good: dict[str, bytes], tmp_path: Path, keys: dict[str, Any]) -> None:
    """Types are checked before anything is asked."""
    forged = good | {"question.json": changed(good["question.json"], **keys)}
    with pytest.raises(DiagnosisError, match="is no incident bundle"):
        bundle.diagnose(packed(tmp_path / "x.zip", forged))


def test_rows_of_another_shape_are_said(good: dict[str, bytes], tmp_path: Path) -> None:
    """A column of words where numbers belong."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"at_ns": ["yesterday"]}), buffer)
    with pytest.raises(DiagnosisError, match="is no incident bundle"):
        bundle.diagnose(packed(tmp_path / "x.zip", good | {"rows/step.parquet": buffer.getvalue()}))


def test_a_newer_format_is_said(good: dict[str, bytes], tmp_path: Path) -> None:
    """Whatever else a newer question holds: the version is what matters."""
    forged = good | {"question.json": b'{"format": 2, "windows": 3}'}
    with pytest.raises(DiagnosisError, match=r"written by a newer kvscope \(bundle format 2, this one reads up to 1\)"):
        bundle.diagnose(packed(tmp_path / "x.zip", forged))


def test_what_is_no_zip(tmp_path: Path) -> None:
    """A text, an empty file, half a zip, a folder, and nothing at all."""
    (tmp_path / "text.zip").write_text("not a zip")
    (tmp_path / "empty.zip").write_bytes(b"")
    packed(tmp_path / "whole.zip", {"question.json": b"x" * 1000})
    (tmp_path / "half.zip").write_bytes((tmp_path / "whole.zip").read_bytes()[:500])
    for name in ("text.zip", "empty.zip", "half.zip", ""):
        with pytest.raises(DiagnosisError, match="is no incident bundle"):
            bundle.diagnose(tmp_path / name)
    with pytest.raises(BadWindow, match="there is no bundle at"):
        bundle.diagnose(tmp_path / "absent.zip")


def test_damaged_bytes_are_said(good: dict[str, bytes], tmp_path: Path) -> None:
    """A flipped bit in a member: its checksum tells."""
    path = packed(tmp_path / "x.zip", good)
    body = bytearray(path.read_bytes())
    body[body.index(b"rows/request.parquet") + 5000] ^= 1
    path.write_bytes(bytes(body))
    with pytest.raises(DiagnosisError, match="is no incident bundle"):
        bundle.diagnose(path)


def test_a_zip_bomb_is_not_unpacked(good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million zeros in ten kilobytes: its members' sizes are added up before one is read."""
    monkeypatch.setattr(bundle, "MAX_BYTES", 9_000_000)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in good.items():
            archive.writestr(name, body)
        archive.writestr("rows/step.parquet.bak", b"\0" * 10_000_000)
    assert path.stat().st_size < 9_000_000
    with pytest.raises(DiagnosisError, match="too large to be read: its members unpack to"):
        bundle.diagnose(path)


def test_a_parquet_bomb_is_not_unpacked(
    good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of one value is a few bytes for any number of rows: rows are counted before they are read."""
    monkeypatch.setattr(bundle, "MAX_ROWS", 100_000)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"at_ns": pa.array([1] * 200_000, pa.int64())}), buffer)
    assert len(buffer.getvalue()) < 20_000
    with pytest.raises(DiagnosisError, match=r"rows/step.parquet unpacks to 200,000 rows"):
        bundle.diagnose(packed(tmp_path / "x.zip", good | {"rows/step.parquet": buffer.getvalue()}))


def test_a_bundle_that_cannot_be_written_is_said(store: Store, tmp_path: Path) -> None:
    """No such folder: the error names the path, and nothing is left behind."""
    verdict = diagnose(store, *RUNS, now_ns=NOW)
    with pytest.raises(DiagnosisError, match="cannot be written to"):
        write(tmp_path / "no" / "x.zip", store, verdict, *RUNS, vantage=None, now_ns=NOW, seed=0)
    assert list(tmp_path.iterdir()) == []
