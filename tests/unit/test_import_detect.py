"""What PATH is, is told by its content, whatever it is called; what is foreign is said with what to do."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from engine_probe.errors import UnknownFormat
from engine_probe.readers.detect import FORMATS, open_source
from engine_probe.readers.lines import MAX_DOCUMENT_BYTES, document, json_lines, text_lines
from engine_probe.readers.sniff import csv_header, top_keys
from engine_probe.readers.source import Notes, ReadOptions

DATA = Path(__file__).parents[1] / "data" / "benchmarks"
FORMAT_OF = {
    "vllm-0.32.0-detailed.json": "vllm bench serve result",
    "sglang-0.5.23-details.jsonl": "SGLang bench_serving result",
    "guidellm-0.8.1.json.gz": "GuideLLM report",
    "genai-perf-0.0.16.json": "GenAI-Perf profile export",
    "aiperf-0.13.0/profile_export.jsonl.gz": "AIPerf run",
    "aiperf-0.13.0/profile_export_aiperf.json": "aiperf summary",
    "azure-llm-2024.csv": "Azure LLM inference trace",
    "burstgpt-2.csv": "BurstGPT trace",
    "genai-spans.jsonl": "OTLP JSON",
    "genai-metrics.json": "OTLP JSON",
}


@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
@pytest.mark.parametrize("name", list(FORMAT_OF))
def test_a_format_is_known_by_its_content(tmp_path: Path, name: str, packing: str) -> None:
    """Without a telling name, and compressed in either way."""
    body = (DATA / name).read_bytes()
    body = gzip.decompress(body) if name.endswith(".gz") else body
    pack = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}[packing]
    (tmp_path / "something").write_bytes(pack(body))
    assert open_source(tmp_path / "something").format == FORMAT_OF[name]


def test_a_summary_is_found_beside_its_records(tmp_path: Path) -> None:
    """By AIPerf's own name or by the run's; another JSON file is not taken for it."""
    shutil.copy(DATA / "aiperf-0.13.0/profile_export.jsonl.gz", tmp_path / "night.jsonl.gz")
    assert [p.name for p in open_source(tmp_path / "night.jsonl.gz").files] == ["night.jsonl.gz"]
    (tmp_path / "night.json").write_text("{}")
    assert [p.name for p in open_source(tmp_path / "night.jsonl.gz").files] == ["night.jsonl.gz"]
    shutil.copy(DATA / "aiperf-0.13.0/profile_export_aiperf.json", tmp_path / "night.json")
    assert [p.name for p in open_source(tmp_path / "night.jsonl.gz").files] == ["night.jsonl.gz", "night.json"]


def test_a_folder_of_one_run_is_that_run(tmp_path: Path) -> None:
    """AIPerf's folder holds logs, tables and a summary beside its records; two runs in one folder are told apart."""
    folder = tmp_path / "artifacts"
    shutil.copytree(DATA / "aiperf-0.13.0", folder)
    (folder / "profile_export_console.txt").write_text("Request latency 12 ms\n")
    (folder / "inputs.json").write_text('{"data": []}')
    assert open_source(folder).format == "AIPerf run"
    shutil.copy(DATA / "azure-llm-2023.csv", folder / "trace.csv")
    with pytest.raises(UnknownFormat, match=r"holds 2 outputs of benchmarks .*import them one by one"):
        open_source(folder)


def test_a_format_may_be_told(tmp_path: Path) -> None:
    """--format opens it as that; its reader then says what is wrong with it."""
    path = tmp_path / "x"
    path.write_text('{"a": 1}\n')
    assert open_source(path, "aiperf").format == "AIPerf run"
    with pytest.raises(UnknownFormat, match=r"x, line 1 is not what was expected there: .*metadata"):
        list(open_source(path, "aiperf").chunks(ReadOptions(), Notes()))
    with pytest.raises(UnknownFormat, match="is a folder; --format aiperf reads one file"):
        open_source(tmp_path, "aiperf")


def _tar(body: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("x.json")
        info.size = len(body)
        archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def _zip(body: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x.json", body)
    return out.getvalue()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "is a web page. Was a log-in page"),
        (b"\n  <html>", "is a web page"),
        (_tar(b"{}"), "is a tar archive. Unpack it"),
        (gzip.compress(_tar(b"{}")), "is a tar archive. Unpack it"),
        (_zip(b"{}"), "is a zip archive. Unpack it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"%PDF-1.7", "is a PDF"),
        (gzip.compress(b'{"experiments": []}' * 99)[:40], "damaged or half gzip file"),
        (zstandard.compress(b'{"experiments": []}' * 99)[:20], "damaged or half zstd file"),
        (b"a,b,c\n1,2,3\n", "is CSV with the columns a, b, c, which are not known"),
        (b'{"benchmarks": [{"requests": {"succ', "is not a JSON object: it ends in the middle, after 35 bytes"),
        (b"metadata:\n  version: 2\n", "a report of GuideLLM as YAML. Write it as JSON"),
        (b'{"experiments": [{"requests": 3}]}', "requests is not what was expected"),
        (b'{"benchmarks": []}', "GuideLLM report without requests"),
        (b'{"experiments": []}', "export without requests"),
        (b'{"model_id": "m", "num_prompts": 1, "backend": "vllm", "ttfts": 3}', "ttfts is not what was expected"),
        (b'{"resourceSpans": 3}', "line 1: .*is not an ExportTraceServiceRequest"),
        (b"[" * 100_000, "not known|not one whole JSON object"),
        (b'{"benchmarks": ' + b"[" * 100_000, "is not a JSON object|not what was expected"),
    ],
)  # fmt: skip
def test_what_is_foreign_or_half_is_said_in_a_sentence(tmp_path: Path, body: bytes, message: str) -> None:
    """One error that names the file and helps; deep nesting is no crash."""
    path = tmp_path / "file"
    path.write_bytes(body)
    with pytest.raises(UnknownFormat, match=message) as caught:
        list(open_source(path).chunks(ReadOptions(), Notes()))
    assert "file" in caught.value.message


def test_a_half_file_is_named_with_its_line(tmp_path: Path) -> None:
    """Records of AIPerf cut off in mid-line: file and line."""
    text = gzip.decompress((DATA / "aiperf-0.13.0/profile_export.jsonl.gz").read_bytes())
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes(text[: len(text) // 2])
    lines = text[: len(text) // 2].count(b"\n") + 1
    with pytest.raises(UnknownFormat, match=rf"profile_export\.jsonl, line {lines} is not a JSON object"):
        list(open_source(path).chunks(ReadOptions(), Notes()))


def test_a_zstd_file_that_was_cut_off_is_said_so(tmp_path: Path) -> None:
    """Frames one after another are one text; a frame without its end is an error, whatever was read before."""
    frame = zstandard.compress(b'{"a": 1}\n' * 3)
    path = tmp_path / "x"
    path.write_bytes(frame * 2)
    assert len(list(json_lines(path))) == 6
    path.write_bytes((frame * 2)[:-3])
    with pytest.raises(UnknownFormat, match="the zstd stream has no end"):
        list(json_lines(path))


def test_what_expands_without_end_is_bounded(tmp_path: Path) -> None:
    """A line and a document have limits after decompression; nothing larger is held."""
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b'"' + b"0" * 3_000_000, mtime=0))
    with pytest.raises(UnknownFormat, match="line 1 is longer than 1000000 bytes"):
        list(text_lines(path, 1_000_000))
    with pytest.raises(UnknownFormat, match="more than 1 MiB in one JSON document"):
        document(path, 1 << 20)
    assert MAX_DOCUMENT_BYTES == 512 << 20


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    """NaN and Infinity as Python writes them; inside a text they stay text."""
    path = tmp_path / "x"
    path.write_text('{"a": NaN, "b": -Infinity, "c": "NaN \\" Infinity", "d": [Infinity, 1]}\n')
    assert list(json_lines(path)) == [(1, {"a": None, "b": None, "c": 'NaN " Infinity', "d": [None, 1]})]


def test_a_text_without_end_is_refused_and_not_tried_quote_by_quote(tmp_path: Path) -> None:
    """A million escaped quotes, no closing one, and a NaN: refused in time linear in its size."""
    path = tmp_path / "x"
    path.write_bytes(b'{"a": "' + b'\\"' * 1_000_000 + b" NaN\n")
    with pytest.raises(UnknownFormat, match="line 1 is not a JSON object"):
        list(json_lines(path))
    assert top_keys(path.read_bytes()) == ("a",)


@pytest.mark.parametrize(
    ("start", "keys"),
    [
        (b'{"a": 1, "b": {"c": 2}, "d": [{"e": 1}]}', ("a", "b", "d")),
        (b'{"a": "x{\\"y\\":", "b', ("a",)),
        (b'{"a": "unterminated \\" { "b": ', ("a",)),
        (b'  {"a" : 1}{"b": 2}', ("a",)),
        (b'[{"a": 1}]', ()),
        (b'"a": 1', ()),
        (b"}{", ()),
        (b"", ()),
    ],
)
def test_keys_of_a_cut_object(start: bytes, keys: tuple[str, ...]) -> None:
    """Of the first object alone, as far as it reaches; a colon in a text is none."""
    assert top_keys(start) == keys


def test_a_header_is_names_and_no_numbers() -> None:
    """A line of data is no header, and neither is one word."""
    assert csv_header(b'\xef\xbb\xbfa, "b",c\r\n1,2,3') == ("a", "b", "c")
    assert csv_header(b"1,2,3\n") == ()
    assert csv_header(b"word\n") == ()


def test_every_format_says_what_it_is() -> None:
    """Names for --format are words; each has a description."""
    assert all(name.replace("-", "").isalpha() and found.what for name, found in FORMATS.items())
