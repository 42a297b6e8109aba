"""The process that waits for one statement: how it is started, what it inherits (nothing), and how it is ended.

Invariant: `Child.end` leaves no process, zombie or descriptor, whatever state the child is in; a child that is forgotten
is ended when it is collected.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from engine_probe.errors import StoreError


class Child:
    """A process that has imported what it needs and waits for its one job."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                _command(theirs.fileno()),
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StoreError(f"No process could be started for the statement: {error}. Try again later.") from error
        finally:
            theirs.close()
        self.socket = ours
        self._finalizer = weakref.finalize(self, _end, self.process, ours)

    def is_alive(self) -> bool:
        """The process still runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it and all it may have started, and let go of what it held."""
        self._finalizer()

    def last_words(self) -> str:
        """What a dead child left on its error stream; nothing where another thread has let go of it."""
        if self.process.stderr is None:
            return ""
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self.process.stderr.fileno(), False)
            return (self.process.stderr.read(4096) or b"").decode(errors="replace").strip()
        return ""


_ENVIRONMENT = {
    # Nothing of the parent's: these keep malloc, Arrow and BLAS small and single-threaded, and text UTF-8.
    "MALLOC_ARENA_MAX": "2",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
}


def _command(descriptor: int) -> list[str]:
    """The child finds modules where the parent does, and nowhere else (`-I -S`: no environment, no site, no cwd)."""
    here = str(Path(__file__).resolve().parent.parent.parent)
    path = [here, *(str(Path(entry).resolve()) for entry in sys.path if entry and Path(entry).exists())]
    start = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
        "from store.sandbox.child import main; main(int(sys.argv[1]))"
    )
    return [sys.executable, "-I", "-S", "-c", start, str(descriptor), json.dumps(path)]


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    sock.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    if process.stderr:
        process.stderr.close()
