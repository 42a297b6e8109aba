"""Starts collectors by fork, so that a hundred kill -9 take seconds: the imports are paid once.

A line on stdin is a store's path and a free port's number; the answer on stdout is the pid of a new process that runs
`kvscope serve` there. Nothing is opened, and no thread runs, before the fork.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

import duckdb
import pyarrow
import uvicorn

import collector.app
import collector.cli
import collector.serving
import engine_probe.wire.validate
import store.duckdb_store

PRELOADED = (duckdb, pyarrow, uvicorn, collector.app, collector.serving, engine_probe.wire.validate, store.duckdb_store)


def main() -> None:
    """Fork on every line until stdin ends; children that ended are reaped by the kernel."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    commands = collector.cli.build()
    gc.freeze()  # a collection in the child would copy every page that it looks at
    for line in sys.stdin:
        path, port = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            commands(args=["serve", "--port", port, "--store", path], standalone_mode=False)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
