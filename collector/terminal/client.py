"""The command line's way to a running collector: ask it over HTTP, and find the one that holds a store.

A DuckDB file admits one process. While a collector has it, the collector answers in its place: it leaves its address in a
small file beside the database for as long as it runs, which is only believed where that address really answers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from engine_probe.errors import CollectorError, CollectorUnreachable, KvscopeError
from store.open import path_of

TIMEOUT_S = 120.0


class CollectorClient:
    """Reads from a collector's API; its problem documents become errors with the same message and facts."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    @staticmethod
    def path(prefix: str, name: str) -> str:
        """Path of one thing by its name, whatever the name holds."""
        return f"{prefix}/{quote(name, safe='')}"

    def get(self, path: str, params: Mapping[str, Any]) -> Any:
        """The JSON answer. Raises CollectorUnreachable, or what the collector says is wrong."""
        asked = {name: value for name, value in params.items() if value is not None}
        return self._json(self._send("GET", path, params=asked))

    def delete(self, path: str) -> Any:
        """The JSON answer to a DELETE. Raises as `get` does."""
        return self._json(self._send("DELETE", path))

    def post(self, path: str, document: Mapping[str, Any], accept: str) -> bytes:
        """The answer to a JSON document in the media type `accept`. Raises as `get` does."""
        return self._bytes(
            self._send("POST", path, json=dict(document), headers={**self._headers, "Accept": accept}), accept
        ).content

    def get_bytes(self, path: str, params: Mapping[str, Any], accept: str) -> tuple[bytes, Mapping[str, str]]:
        """(body, headers) of an answer in the media type `accept`. Raises as `get` does."""
        asked = {name: value for name, value in params.items() if value is not None}
        answer = self._bytes(self._send("GET", path, params=asked, headers={**self._headers, "Accept": accept}), accept)
        return answer.content, answer.headers

    def _bytes(self, answer: httpx.Response, accept: str) -> httpx.Response:
        if not answer.headers.get("content-type", "").startswith(accept):
            self._json(answer)
            raise CollectorUnreachable(
                f"the collector at {self.url} does not answer {answer.url.path} as {accept}; it is of another release",
                url=self.url,
            )
        return answer

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        request.setdefault("headers", self._headers)
        try:
            return httpx.request(method, self.url + path, timeout=self._timeout_s, trust_env=False, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CollectorUnreachable(
                f"no collector answers at {self.url} ({error}); start one with `kvscope serve`, or correct the address",
                url=self.url,
            ) from error

    def _json(self, answer: httpx.Response) -> Any:
        try:
            document = answer.json()
        except ValueError as error:
            raise CollectorUnreachable(
                f"what answers at {self.url} is no kvscope collector (no JSON at {answer.url.path})", url=self.url
            ) from error
        if answer.status_code >= 400:
            raise _as_error(document, answer.status_code)
        return document


@contextmanager
def announced(store_url: str, url: str) -> Iterator[None]:
    """While the block runs, `holder_of` finds `url` for that store."""
    path = _note(store_url)
    if path is None:
        yield
        return
    path.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def holder_of(store_url: str) -> str | None:
    """URL of the running collector that holds the store; None where none does."""
    path = _note(store_url)
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, httpx.HTTPError, httpx.InvalidURL):
        url = str(json.loads(path.read_text(encoding="utf-8"))["url"])
        if httpx.get(f"{url}/healthz", timeout=2.0, trust_env=False).json() == {"status": "alive"}:
            return url
    return None


def _note(store_url: str) -> Path | None:
    """File beside the database that names its collector; None for a store without a file."""
    try:
        path = path_of(store_url)
    except KvscopeError:
        return None
    return None if path == ":memory:" else Path(f"{path}.collector")


def _as_error(document: Any, status: int) -> KvscopeError:
    """The collector's error under its own class, so that message and exit code are as if it had happened here."""
    facts = dict(document) if isinstance(document, dict) else {}
    name = str(facts.pop("type", "")).rpartition(":")[2].replace("-", "").lower()
    message = str(facts.pop("detail", f"the collector answered {status}"))
    for known in ("title", "status"):
        facts.pop(known, None)
    kinds = {kind.__name__.lower(): kind for kind in _all_errors(KvscopeError)}
    return kinds.get(name, CollectorError)(message, **{str(key): value for key, value in facts.items()})


def _all_errors(kind: type[KvscopeError]) -> Iterator[type[KvscopeError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _all_errors(child)
