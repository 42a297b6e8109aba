"""Each wall alone: what DuckDB's settings refuse without the check, and what the kernel refuses without DuckDB."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine_probe.schema import table_from_rows
from store.sandbox.sandbox import run_sql

ON_LINUX = sys.platform == "linux"


def in_a_process(body: str, *arguments: object) -> Any:
    """Run `body` in a process of its own; it prints one JSON document. `sys.argv[1:]` are the arguments."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"},
        check=False,
    )
    assert done.stdout, f"ended with {done.returncode}: {done.stderr}"
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that may be read, a secret beside it, and a link from one to the other."""
    inside = tmp_path / "parquet"
    inside.mkdir()
    pq.write_table(table_from_rows("mark", [{"mark": "fault", "at_ns": 1}]), inside / "1.parquet")
    (tmp_path / "secret.txt").write_text("secret")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    return tmp_path


SYSTEM_CALLS = """
    import ctypes, errno, json, mmap, os, signal, socket, subprocess, sys, threading
    from pathlib import Path
    from store.sandbox.jail import Jail

    root = Path(sys.argv[1])
    jail = Jail()
    spare = socket.socketpair()
    libc = ctypes.CDLL(None, use_errno=True)
    walls = jail.enter([root / "parquet"], cpu_s=30, wall_s=60)

    def call(number, *arguments):
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), "")

    attempts = {
        "read inside": lambda: (root / "parquet" / "1.parquet").read_bytes(),
        "list inside": lambda: os.listdir(root / "parquet"),
        "talk to the parent": lambda: spare[0].sendall(b"x"),
        "start a thread": lambda: (t := threading.Thread(target=int), t.start(), t.join()),
        "read outside": lambda: (root / "secret.txt").read_text(),
        "read through a link": lambda: (root / "parquet" / "link.txt").read_text(),
        "read through dots": lambda: open(f"{root}/parquet/../secret.txt").read(),
        "read the system": lambda: open("/etc/passwd").read(),
        "read a process": lambda: open("/proc/self/environ").read(),
        "list outside": lambda: os.listdir(root),
        "write inside": lambda: (root / "parquet" / "new").write_text("x"),
        "append inside": lambda: open(root / "parquet" / "1.parquet", "ab"),
        "truncate inside": lambda: os.truncate(root / "parquet" / "1.parquet", 0),
        "delete inside": lambda: os.unlink(root / "parquet" / "1.parquet"),
        "rename inside": lambda: os.rename(root / "parquet" / "1.parquet", root / "parquet" / "2.parquet"),
        "make a folder": lambda: os.mkdir(root / "parquet" / "d"),
        "make a link": lambda: os.symlink("/etc/passwd", root / "parquet" / "l"),
        "write outside": lambda: open("/dev/shm/kvscope-jail", "w"),
        "open a socket": lambda: socket.socket(),
        "open a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "open a Unix socket": lambda: socket.socket(socket.AF_UNIX),
        "fork": lambda: os.fork() or os._exit(0),
        "run a program": lambda: subprocess.run(["/bin/true"]),
        "replace itself": lambda: os.execv("/bin/true", ["/bin/true"]),
        "signal another process": lambda: os.kill(os.getppid(), 0),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = errno.errorcode[error.errno]
    threads = {}
    def try_it():
        try:
            attempts["read outside"]()
            threads["read outside"] = "done"
        except OSError as error:
            threads["read outside"] = errno.errorcode[error.errno]
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    print(json.dumps({"walls": walls, "found": found, "in a thread": threads}))
"""


@pytest.mark.skipif(not ON_LINUX, reason="the kernel's walls are Linux's")
def test_the_kernel_lets_the_process_read_its_folder_and_nothing_else(folder: Path) -> None:
    """Reading below the folder, threads and the parent's socket work; every other way out is refused."""
    answer = in_a_process(SYSTEM_CALLS, folder)
    walls, found = answer["walls"], answer["found"]
    allowed = {"read inside", "list inside", "talk to the parent", "start a thread"}
    assert {name for name in allowed if found[name] != "done"} == set()
    if "seccomp" in walls:
        seccomp = {
            "open a socket",
            "open a UDP socket",
            "open a Unix socket",
            "fork",
            "run a program",
            "replace itself",
        }
        seccomp |= {"signal another process", "write inside", "append inside", "truncate inside", "delete inside"}
        seccomp |= {"rename inside", "make a folder", "make a link", "write outside"}
        assert {name: found[name] for name in seccomp if found[name] not in ("EPERM", "EACCES")} == {}
    if "landlock" in walls:
        outside = {"read outside", "read through a link", "read through dots", "read the system", "read a process"}
        assert {name: found[name] for name in outside | {"list outside"} if found[name] != "EACCES"} == {}
        assert answer["in a thread"] == {"read outside": "EACCES"}
    assert sorted(path.name for path in (folder / "parquet").iterdir()) == ["1.parquet", "link.txt"]
    assert not Path("/dev/shm/kvscope-jail").exists()


@pytest.mark.skipif(not ON_LINUX, reason="the kernel's walls are Linux's")
def test_this_machine_has_every_wall() -> None:
    """CI's kernel has Landlock and seccomp: the tests of this file do not pass by having nothing to test."""
    assert run_sql("SELECT 1").walls == ("rlimits", "landlock", "seccomp")


@pytest.mark.skipif(not ON_LINUX, reason="address space is limited on Linux")
def test_memory_beyond_the_limit_is_not_given() -> None:
    """A gigabyte is refused under a limit of 64 MiB, a few megabytes are given."""
    answer = in_a_process(
        """
        import json
        from store.sandbox.jail import Jail
        jail = Jail()
        jail.enter([], cpu_s=30, wall_s=60)
        limited = jail.limit_memory(64 << 20)
        small = len(bytearray(8 << 20))
        try:
            large = len(bytearray(1 << 30))
        except MemoryError:
            large = "refused"
        print(json.dumps([limited, small, large]))
        """
    )
    assert answer == [True, 8 << 20, "refused"]


def test_the_kernel_ends_the_process_at_its_time_without_a_parents_help() -> None:
    """The alarm is the kernel's: it ends a process that computes and one that sleeps."""
    for body in ("while True: pass", "import time; time.sleep(60)"):
        script = f"from store.sandbox.jail import Jail; Jail().enter([], cpu_s=60, wall_s=0.5)\n{body}"
        done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
        assert done.returncode == -14


DUCKDB_ALONE = """
    import json, sys
    from pathlib import Path
    from store.sandbox.child import _connect, _lock

    root = Path(sys.argv[1])
    connection = _connect()
    job = {"memory_bytes": 256 << 20, "threads": 1, "database": None, "parquet_dir": str(root / "parquet")}
    _lock(connection, job)
    pa_table = __import__("pyarrow").table({"a": [1]})
    statements = {
        "read inside": f"SELECT count(*) FROM read_parquet('{root}/parquet/*.parquet')",
        "read_csv": f"SELECT * FROM read_csv('{root}/secret.txt')",
        "read_text": "SELECT * FROM read_text('/etc/passwd')",
        "dots": f"SELECT * FROM read_text('{root}/parquet/../secret.txt')",
        "glob": "SELECT * FROM glob('/etc/*')",
        "copy": f"COPY (SELECT 1) TO '{root}/stolen.csv'",
        "attach": f"ATTACH '{root}/other.duckdb'",
        "install": "INSTALL httpfs",
        "load": "LOAD httpfs",
        "secrets": "SELECT * FROM duckdb_secrets()",
        "http": "SELECT * FROM read_csv('http://127.0.0.1:1/x.csv')",
        "unlock": "SET enable_external_access = true",
        "widen": "SET allowed_directories = ['/']",
        "reset": "RESET lock_configuration",
        "python variable": "SELECT * FROM pa_table",
        "temporary files": f"SET temp_directory = '{root}'",
    }
    found = {}
    for name, sql in statements.items():
        try:
            found[name] = connection.execute(sql).fetchall()
        except Exception as error:
            found[name] = type(error).__name__
    print(json.dumps({"found": found, "threads": len(list(Path("/proc/self/task").iterdir()))}))
"""


def test_duckdbs_own_settings_hold_without_the_check_and_without_the_kernel(folder: Path) -> None:
    """The same statements that the check refuses, given to the locked DuckDB directly: it refuses them too."""
    found = in_a_process(DUCKDB_ALONE, folder)["found"]
    assert found.pop("read inside") == [[1]]
    assert found.pop("secrets") in ([], "PermissionException")
    refusals = {"PermissionException", "InvalidInputException", "CatalogException", "Error", "IOException"}
    assert {name: outcome for name, outcome in found.items() if str(outcome) not in refusals} == {}
    assert not (folder / "stolen.csv").exists()


@pytest.mark.skipif(not ON_LINUX, reason="threads are counted in /proc")
def test_no_thread_runs_before_the_jail_is_entered() -> None:
    """Landlock binds the thread that enters and those it starts: one that was there before would stay outside.

    The imports of the child, its empty DuckDB and the Arrow functions leave one thread.
    """
    answer = in_a_process(
        """
        import json, os
        import pyarrow as pa
        import pyarrow.dataset
        from engine_probe.schema import arrow_schema
        from store.sandbox.child import _connect
        arrow_schema("request")
        pa.set_cpu_count(1)
        connection = _connect()
        print(json.dumps(len(os.listdir("/proc/self/task"))))
        """
    )
    assert answer == 1


def test_a_child_sees_nothing_of_the_parents_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens in the collector's environment are not in the child's; its working directory is no one's."""
    from store.sandbox.process import Child

    monkeypatch.setenv("KVSCOPE_TOKEN", "secret-token")
    child = Child()
    try:
        environment = Path(f"/proc/{child.process.pid}/environ")
        if not environment.exists():
            pytest.skip("no /proc here")
        assert b"secret-token" not in environment.read_bytes()
        assert b"HOME" not in environment.read_bytes()
        assert Path(f"/proc/{child.process.pid}/cwd").resolve() == Path("/")
        session = Path(f"/proc/{child.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[3]
        assert int(session) == child.process.pid
    finally:
        child.end()
