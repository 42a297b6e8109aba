"""Asks the engine's HTTP port, and turns every way in which that can go wrong into a sentence that helps.

Foreign exceptions (httpx, TLS) end here: callers see EngineUnreachable (nobody answers, or not in time), UnknownFormat
(somebody else answers) and UsageError (the address or a key is wrong).
"""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

import httpx
import msgspec

from engine_probe.errors import EngineUnreachable, ProbeError, UnknownFormat, UsageError

TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = 32 << 20
KEPT: Final = httpx.Limits(keepalive_expiry=2.5)
"""Servers of engines close an idle connection after 5 s: at an interval of 5 s each scrape would cross that close."""
WHOLE_FACTOR: Final = 4.0
"""A whole answer may take so many time-outs: a server that drips holds nobody up for ever."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back, decompressed. `location` and `content_type` as the server wrote them."""

    status: int
    body: bytes
    content_type: str | None
    location: str | None


def normalise_url(text: str) -> str:
    """`host:port`, `http://host:port/`, `.../metrics`, `.../v1` -> `http://host:port`. Raises UsageError."""
    url = text.strip()
    if "://" not in url:
        url = "http://" + url
    url = re.sub(r"/(metrics/cadvisor|metrics|v1|health)/?$", "", url.rstrip("/"))
    return str(_address(url, text)).rstrip("/")


def split_auth(url: str) -> tuple[str, tuple[str, str] | None]:
    """Address without the user in it, and (user, password) for basic auth: a password belongs into no message.

    Raises UsageError where it is no HTTP address.
    """
    parsed = _address(url, url)
    if not parsed.userinfo:
        return url, None
    user, _, password = parsed.userinfo.decode().partition(":")
    return str(parsed.copy_with(userinfo=b"")).rstrip("/"), (unquote(user), unquote(password))


def _address(url: str, text: str) -> httpx.URL:
    """Raises UsageError, naming `text`, for what no connection can be tried to: httpx looks at names and ports later."""
    text = re.sub(r"//[^/@]*@", "//...@", text)  # a password belongs into no message
    try:
        parsed = httpx.URL(url)
        parsed.raw_host.decode("ascii").encode("idna")
        parsed.host  # noqa: B018  decodes a name of punycode
    except httpx.InvalidURL as error:
        raise UsageError(f"{text!r} is not an address: {error}. Expected http://host:port.", url=text) from error
    except UnicodeError as error:
        why = "a part of its name is empty, longer than 63 characters, or no word"
        raise UsageError(f"{text!r} is not an address: {why}. Expected http://host:port.", url=text) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{text!r} is not an HTTP address. Expected http://host:port.", url=text)
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise UsageError(f"{text!r} has no TCP port: {parsed.port}. Expected http://host:port.", url=text)
    return parsed


def trust(ca: Path | None, *, insecure: bool = False) -> bool | ssl.SSLContext:
    """What `EngineClient(verify=...)` takes: the system's authorities, those in `ca`, or none. Raises UsageError."""
    if ca is None or insecure:
        return not insecure
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        reason = error.strerror or "it holds no certificate"
        raise UsageError(f"The authority {ca} cannot be used ({reason}); --ca takes a PEM file.", ca=str(ca)) from error


class EngineClient:
    """GETs of one engine. Not for use by several threads at once."""

    def __init__(
        self, url: str, *, key: str | None = None, verify: bool | ssl.SSLContext = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.url, auth = split_auth(normalise_url(url))
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._requests: dict[tuple[str, str], httpx.Request] = {}  # building one costs as much as sending it
        self._client = httpx.Client(
            timeout=timeout_s, verify=verify, headers=headers, auth=auth, follow_redirects=False, limits=KEPT
        )

    @property
    def host(self) -> str:
        """The engine's host as the address names it, IPv6 without brackets."""
        return httpx.URL(self.url).host

    def close(self) -> None:
        self._client.close()

    def metrics(
        self, path: str = "/metrics", *, hint: str = "", method: Literal["GET", "POST"] = "GET"
    ) -> tuple[bytes, str | None]:
        """Body and content type of a page. `hint`: what to do where the server has no such page."""
        response = self._get(path, method)
        url = self.url + path
        if response.status in (401, 403):
            raise UsageError(
                f"{url} answers {response.status}: it wants a key. Give it with --engine-key or KVSCOPE_ENGINE_KEY.",
                url=self.url,
            )
        if response.status in (404, 501):
            what = hint or "Is this the engine's HTTP port? (llama-server needs --metrics, SGLang --enable-metrics.)"
            raise UnknownFormat(f"{self.url} answers, but has no {path}. {what}", url=self.url)
        if 300 <= response.status < 400:
            target = response.location or "elsewhere"
            raise UnknownFormat(f"{url} redirects to {target}; give that address instead.", url=self.url)
        if response.status >= 500:
            raise EngineUnreachable(
                f"{url} answers {response.status}: the server is up, but its engine may not be.",
                url=self.url,
                is_timeout=False,
            )
        if response.status != 200:
            raise UnknownFormat(f"{url} answers {response.status}; expected 200.", url=self.url)
        return response.body, response.content_type

    def json(self, path: str) -> Any:
        """The JSON that `path` answers, or None where it does not answer 200 with JSON (an older release, a key)."""
        try:
            response = self._get(path)
            return msgspec.json.decode(response.body) if response.status == 200 else None
        except (ProbeError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None

    def _get(self, path: str, method: str = "GET") -> _Answer:
        url = self.url
        try:
            request = self._requests.get((method, path))
            if request is None:
                request = self._requests[method, path] = self._client.build_request(method, url + path)
            end = time.monotonic() + WHOLE_FACTOR * self._timeout_s
            with contextlib.closing(self._client.send(request, stream=True)) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise UnknownFormat(
                            f"{url}{path} sent more than {MAX_BODY_BYTES >> 20} MiB; is it an engine?", url=url
                        )
                    if time.monotonic() > end:
                        raise EngineUnreachable(
                            f"{url}{path} began to answer, but was not at its end after {WHOLE_FACTOR * self._timeout_s:g} s.",
                            url=url,
                            is_timeout=True,
                        )
                told = response.headers
                return _Answer(response.status_code, bytes(body), told.get("content-type"), told.get("location"))
        except httpx.TimeoutException as error:
            raise EngineUnreachable(
                f"{url} did not answer within {self._timeout_s:g} s. It may be overloaded, or behind a firewall.",
                url=url,
                is_timeout=True,
            ) from error
        except httpx.DecodingError as error:
            raise UnknownFormat(
                f"{url}{path} is not compressed in the way that its header says ({error}).", url=url
            ) from error
        except httpx.HTTPError as error:
            raise EngineUnreachable(why_unreachable(url, error), url=url, is_timeout=False) from error


def why_unreachable(url: str, error: Exception) -> str:
    """One sentence on why there is no connection to `url`, from an error of httpx, of the system or of TLS."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"{url} shows a certificate that this machine does not trust ({text}). Give its authority with --ca FILE, "
            "or --insecure for a test."
        )
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text or "wrong version number" in text:
        return f"{url} does not speak TLS; use {url.replace('https://', 'http://', 1)}."
    if "incomplete chunked read" in text or "complete message body" in text:
        return f"{url} broke its answer off half-way ({text}). It is ending, or something between cuts answers short."
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)):
        hint = ""
        if url.startswith("http://"):
            hint = f", or it does not speak plain HTTP: if it speaks TLS, use {url.replace('http://', 'https://', 1)}"
        if "illegal" in text:  # h11's word for a first line that is none of HTTP/1
            return f"{url} answers, but not in HTTP/1.1 ({text}). It is another port of the engine{hint}."
        return f"{url} broke the connection off ({text or type(error).__name__}). It is starting or ending{hint}."
    if "Name or service not known" in text or "nodename nor servname" in text or "name resolution" in text:
        return f"The name in {url} is not known here ({text}). Check the spelling, or use the address."
    return f"Nothing answers at {url} ({text or type(error).__name__}). Is the engine up, and is this its HTTP port?"
