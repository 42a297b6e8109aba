"""Fuzz one decoder for a bounded time: `python -m tests.fuzz NAME [--seconds 10] [--corpus FOLDER]`.

Exit 0: nothing found. A finding ends the process with a traceback, and its input is written beside the corpus. Inputs are
bounded (64 KiB), one input may take 10 s and the process 1 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["engine_probe"]):
    from engine_probe.errors import KvscopeError
    from tests.fuzz.targets import MAX_FILE_BYTES, TARGETS, seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--corpus", type=Path, help="where inputs that reach new code are kept")
    arguments = parser.parse_args()
    target = TARGETS[arguments.name]
    corpus = arguments.corpus or Path(tempfile.mkdtemp(prefix="kvscope-fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(arguments.name)):
        (corpus / f"seed-{number}").write_bytes(seed)

    with atheris.instrument_imports(include=["engine_probe"]), contextlib.suppress(KvscopeError):
        target(b"")  # decoders import their parts when they are first used: those are to be watched too

    def one(data: bytes) -> None:
        with contextlib.suppress(KvscopeError):
            target(data)

    limits = [f"-max_total_time={arguments.seconds}", f"-max_len={MAX_FILE_BYTES}", "-timeout=10", "-rss_limit_mb=1024"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={corpus}/found-", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
