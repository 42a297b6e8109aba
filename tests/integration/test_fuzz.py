"""Every decoder under a coverage-guided fuzzer for a bounded time, in a process of its own: no crash, no hang, no flood.

`KVSCOPE_FUZZ_SECONDS` lengthens it (a night's run); inputs that were findings once are kept below and read first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_probe.errors import KvscopeError
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
SECONDS = int(os.environ.get("KVSCOPE_FUZZ_SECONDS", "4"))

FOUND: list[tuple[str, bytes]] = [
    # a text of a column that is ignored, with a byte that is no UTF-8
    ("json", b'{"events": {"block": [{"at_ns": 1, "change": "stored", "block_hash": 7, "x": "\xff"}]}}'),
    # the same in a line before the one that is wrong
    ("ndjson", b'{"kind": "block", "at_ns": 1, "change": "stored", "x": "\xff"}\n{"kind": "block", "at_ns": "no"}\n'),
    # a line that says its kind twice
    ("ndjson", b'{"kind": "request", "request_id": "r", "vantage": "engine", "kind": "block", "at_ns": 1}\n'),
    # an instant that no int64 of nanoseconds can hold
    ("import", b"TIMESTAMP,ContextTokens,GeneratedTokens\n4046-11-16 18:17:03.9799600,4808,10\n"),
    # a zero byte within a setting that looks like a literal
    ("start_up_log", b"non-default args: {'model_tag': 'a\x00b', 'x': <M: 0>}\n"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_once_stays_mended(name: str, data: bytes) -> None:
    """Rows, or an error of ours."""
    with contextlib.suppress(KvscopeError):
        TARGETS[name](data)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no build for this Python")
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_decoder_withstands_the_fuzzer(name: str, tmp_path: Path) -> None:
    """Ends by itself and well; one input may take 10 s, the process 1 GiB."""
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(SECONDS), "--corpus", str(tmp_path)]
    # a child starts with the peak of its parent's memory, and this process may be large: the shell stands between
    command = ["sh", "-c", '"$@"; exit $?', "fuzz", *command]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS + 120, check=False)
    said = ended.stderr.decode("utf-8", "replace")
    assert ended.returncode == 0, said[-6000:]
    assert b"Done " in ended.stderr
