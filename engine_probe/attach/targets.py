"""Where the engines of a fleet are: a targets file, a DNS name, or Kubernetes; asked again and again.

A target is an address and labels. A targets file in Prometheus' file_sd format works as it is: `__scheme__` and the labels
are understood, `__metrics_path__` is left to the adapter. kvscope's own labels: `engine` (which adapter), `worker` (its
name here), `key` is never read from a file. Invariant: a source that cannot be read answers with an error and changes
nothing: engines do not disappear because a file is being written or an API server is away.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, quote, urlsplit

from engine_probe.digits import port_number
from engine_probe.errors import EngineUnreachable, UnknownFormat, UsageError

MAX_TARGETS: Final = 10_000
MAX_FILE_BYTES: Final = 16 << 20
SETTLE_S: Final = 0.2
SETTLE_TRIES: Final = 8
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FORMS: Final = "file:PATH, dns:NAME:PORT or kubernetes:NAMESPACE?selector=app%3Dvllm&port=8000"


@dataclass(frozen=True, slots=True)
class Target:
    """One engine. `url` without a path; `engine` and `worker` None where the source does not say."""

    url: str
    engine: str | None = None
    worker: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


class Targets(Protocol):
    """A source of targets."""

    def read(self) -> list[Target]:
        """The targets now, each address once. Raises UnknownFormat, EngineUnreachable where they cannot be told."""


def targets_of(text: str) -> Targets:
    """`file:PATH`, `dns:NAME:PORT`, `kubernetes:NAMESPACE?...`. Raises UsageError."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileTargets(rest)
    if kind == "dns":
        name, _, port = rest.rpartition(":")
        number = port_number(port)
        if name and number is not None:
            return DnsTargets(name.strip("[]"), number)
        raise UsageError(f"--targets {text} has no port; expected dns:NAME:PORT, such as dns:vllm.default.svc:8000.")
    if kind == "kubernetes" and rest:
        return kubernetes_of(rest)
    if kind not in ("file", "dns", "kubernetes") and (
        Path(text).is_file() or text.endswith((".json", ".yml", ".yaml"))
    ):
        return FileTargets(text)
    raise UsageError(f"--targets {text!r} is none; expected {FORMS}.")


class FileTargets:
    """A file, or a pattern for several, in Prometheus' file_sd format (JSON or YAML)."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def read(self) -> list[Target]:
        paths = sorted(glob.glob(self._pattern))
        if not paths:
            raise UnknownFormat(f"No targets file at {self._pattern}.", path=self._pattern)
        found: dict[str, Target] = {}
        for path in paths:
            _settle(Path(path))
            for target in read_file(Path(path)):
                found.setdefault(target.url, target)
        return list(found.values())


def read_file(path: Path) -> list[Target]:
    """The targets of one file_sd file. Raises UnknownFormat naming file and group."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnknownFormat(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; is it a targets file?")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownFormat(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    groups = _document(path, text)
    if not isinstance(groups, list):
        raise UnknownFormat(f"{path} is no targets file: expected a list of groups with `targets` and `labels`.")
    found: list[Target] = []
    for number, group in enumerate(groups, 1):
        addresses = group.get("targets") if isinstance(group, dict) else None
        labels = (group.get("labels") or {}) if isinstance(group, dict) else {}
        if not isinstance(addresses, list) or not all(isinstance(one, str) and one for one in addresses):
            raise UnknownFormat(f"{path}: group {number} has no list `targets` of host:port texts.", group=number)
        if not isinstance(labels, dict):
            raise UnknownFormat(f"{path}: `labels` of group {number} are no map.", group=number)
        if not all(isinstance(value, str | int | float | None) for value in labels.values()):
            raise UnknownFormat(f"{path}: `labels` of group {number} hold more than words and numbers.", group=number)
        words = {str(key): str(value) for key, value in labels.items() if value is not None}
        found += [_target(address, words, len(addresses)) for address in addresses]
        if len(found) > MAX_TARGETS:
            raise UnknownFormat(f"{path} names more than {MAX_TARGETS} targets.")
    return found


def _settle(path: Path) -> None:
    """Wait a moment where the file was written just now: half of a YAML file may read like a smaller fleet."""
    for _ in range(SETTLE_TRIES):
        try:
            age_s = time.time() - path.stat().st_mtime
        except OSError:
            return
        if not 0 <= age_s < SETTLE_S:
            return
        time.sleep(SETTLE_S / 4)


def _document(path: Path, text: str) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(text)
        import yaml

        return yaml.safe_load(text)
    except (ValueError, RecursionError) as error:
        raise UnknownFormat(f"{path} is no JSON: {error}.") from error
    except ImportError as error:
        raise UnknownFormat(f"{path} is YAML; `pip install pyyaml`, or write it as JSON.") from error
    except Exception as error:  # yaml's errors have no common importable base before yaml is imported
        raise UnknownFormat(f"{path} is no YAML: {str(error).splitlines()[0]}.") from error


def _target(address: str, labels: Mapping[str, str], size: int) -> Target:
    url = address if "://" in address else f"{labels.get('__scheme__', 'http')}://{address}"
    worker = labels.get("worker")
    own = {key: value for key, value in labels.items() if not key.startswith("__") and key not in ("engine", "worker")}
    # one name for several addresses would mix their rows
    return Target(url.rstrip("/"), labels.get("engine"), worker if size == 1 else None, own)


class DnsTargets:
    """All addresses of a name, as a headless service of Kubernetes has them; one port for all."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port

    def read(self) -> list[Target]:
        try:
            answers = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: an empty label, or one that is too long
            raise EngineUnreachable(f"The name {self._name} is not known here ({error}).", url=self._name) from error
        hosts = sorted({str(answer[4][0]) for answer in answers})
        return [
            Target(f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}") for host in hosts
        ]


@dataclass(frozen=True, slots=True)
class KubernetesTargets:
    """Running pods of a namespace. Pods that are not ready are targets too: a slow one is what we look for.

    api       the API server; in a pod it is told by the environment, elsewhere `kubectl proxy` offers one
    port      the engine's HTTP port, or None: the pod's annotation `prometheus.io/port`, else its first container port
    """

    namespace: str
    api: str
    selector: str | None = None
    port: int | None = None
    engine: str | None = None
    account: Path = ACCOUNT

    def read(self) -> list[Target]:
        pods = self._pods()
        found = []
        for pod in pods:
            status, meta = _map(pod, "status"), _map(pod, "metadata")
            host, port = status.get("podIP"), self.port or _port_of(pod)
            if status.get("phase") != "Running" or not host or port is None or meta.get("deletionTimestamp"):
                continue
            labels = {"pod": str(meta.get("name")), "namespace": self.namespace}
            labels["node"] = str(_map(pod, "spec").get("nodeName") or "")
            shown = f"[{host}]" if ":" in str(host) else host
            found.append(Target(f"http://{shown}:{port}", self.engine, str(meta.get("name")), labels))
        return found

    def _pods(self) -> Sequence[Mapping[str, Any]]:
        import httpx

        url = f"{self.api}/api/v1/namespaces/{quote(self.namespace, safe='')}/pods"
        params = {"limit": str(MAX_TARGETS)} | ({"labelSelector": self.selector} if self.selector else {})
        token, ca = self.account / "token", self.account / "ca.crt"
        try:
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
            verify: Any = str(ca) if ca.exists() else True
            answer = httpx.get(url, params=params, headers=headers, verify=verify, timeout=10.0, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise EngineUnreachable(
                f"The Kubernetes API at {self.api} does not answer ({error}).", url=self.api
            ) from error
        if answer.status_code in (401, 403):
            raise EngineUnreachable(
                f"The Kubernetes API refuses ({answer.status_code}): the service account needs `list` on pods of "
                f"{self.namespace}.",
                url=self.api,
            )
        try:
            items = answer.json()["items"] if answer.status_code == 200 else None
        except (ValueError, KeyError, TypeError, RecursionError):
            items = None
        if not isinstance(items, list):
            raise EngineUnreachable(
                f"The Kubernetes API answers {answer.status_code} for {url}; expected a list of pods."
            )
        return [pod for pod in items if isinstance(pod, dict)]


def kubernetes_of(text: str, env: Mapping[str, str] = os.environ) -> KubernetesTargets:
    """`NAMESPACE?selector=app%3Dvllm&port=8000&engine=vllm&api=http://127.0.0.1:8001`. Raises UsageError."""
    parts = urlsplit(text.removeprefix("//"))
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    unknown = sorted(options.keys() - {"selector", "port", "engine", "api"})
    if not parts.path or unknown:
        raise UsageError(
            f"--targets kubernetes:{text} is none ({', '.join(unknown) or 'no namespace'}); expected {FORMS}."
        )
    port = options.get("port")
    number = None if port is None else port_number(port)
    if port is not None and number is None:
        raise UsageError(f"The port {port!r} of --targets kubernetes is none.")
    api = options.get("api")
    if api is None:
        host, api_port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise UsageError(
                "This is no pod of Kubernetes, so its API is not known. Run `kubectl proxy` and add "
                "&api=http://127.0.0.1:8001 to --targets."
            )
        api = f"https://[{host}]:{api_port}" if ":" in host else f"https://{host}:{api_port}"
    engine = options.get("engine")
    return KubernetesTargets(parts.path, api.rstrip("/"), options.get("selector"), number, engine)


def _port_of(pod: Mapping[str, Any]) -> int | None:
    told = _map(_map(pod, "metadata"), "annotations").get("prometheus.io/port")
    number = port_number(told) if isinstance(told, str) else None
    if number is not None:
        return number
    for container in _maps(_map(pod, "spec"), "containers"):
        for port in _maps(container, "ports"):
            if isinstance(port.get("containerPort"), int):
                return int(port["containerPort"])
    return None


def _map(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The map under `key`; empty where there is something else: an API server's proxy may answer anything."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _maps(value: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = value.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
