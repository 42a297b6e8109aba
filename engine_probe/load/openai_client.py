"""Asks an OpenAI endpoint and watches each piece of the answer come. Every way in which that goes wrong is a sentence.

What stops an experiment before it begins is raised by `check`; what goes wrong with one request is that request's row.
Invariant: the instant of a piece is taken before it is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from engine_probe.attach.fetch import normalise_url, split_auth, why_unreachable
from engine_probe.clock import Clock
from engine_probe.errors import EngineUnreachable, UnknownFormat, UsageError
from engine_probe.proxy.dialects import read_event, read_whole
from engine_probe.proxy.order import OpenAnswers, Order
from engine_probe.proxy.reading import Reading
from engine_probe.proxy.sse import SseParser

CHECK_TIMEOUT_S: Final = 10.0
MAX_ERROR_BYTES: Final = 1 << 16
RESET_PATH: Final = "/reset_prefix_cache"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where, and how to get in. model None: the only one that is served there."""

    url: str
    model: str | None = None
    key: str | None = None
    verify: bool | ssl.SSLContext = True
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Answered:
    """How one request went. Instants are monotonic, ns; status None: nothing came; error: why it failed, without content."""

    sent_ns: int
    end_ns: int
    reading: Reading
    status: int | None
    error: str | None
    num_retries: int = 0

    @property
    def is_good(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class _Tried:
    """One attempt. is_stale: the connection broke before any answer."""

    reading: Reading
    status: int | None
    error: str | None
    is_stale: bool


class OpenAiClient:
    """One endpoint. Use inside one event loop: `async with OpenAiClient(endpoint) as client`."""

    def __init__(self, endpoint: Endpoint, clock: Clock) -> None:
        self.clock = clock
        self.url, auth = split_auth(normalise_url(endpoint.url))
        self.model = endpoint.model or ""
        self._asked_model = endpoint.model
        self._timeout_s = endpoint.timeout_s
        headers = {"Accept-Encoding": "identity"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        self._client = httpx.AsyncClient(
            verify=endpoint.verify if self.url.startswith("https:") else False,  # making a TLS context takes 20 ms
            headers=headers,
            auth=auth,
            timeout=httpx.Timeout(endpoint.timeout_s, connect=CHECK_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.5),
        )
        self._open = OpenAnswers()

    async def __aenter__(self) -> OpenAiClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self) -> dict[str, Any]:
        """That somebody answers, in the right words, and serves the model; what it says of itself: model, owner, version.

        Raises EngineUnreachable, UsageError (key, model) or UnknownFormat.
        """
        response = await self._get("/v1/models")
        if response.status_code in (401, 403):
            raise UsageError(
                f"{self.url} answers {response.status_code}: it wants another key. Give it with --key or KVSCOPE_ENGINE_KEY.",
                url=self.url,
            )
        if response.status_code >= 500:
            raise EngineUnreachable(
                f"{self.url}/v1/models answers {response.status_code}: the server is up, but its engine may not be.",
                url=self.url,
            )
        if response.status_code != 200:
            raise UnknownFormat(
                f"{self.url} answers {response.status_code} to /v1/models. Is it an OpenAI endpoint? Give the address before /v1.",
                url=self.url,
            )
        served = self._models(response)
        if self._asked_model is None and len(served) != 1:
            raise UsageError(
                f"{self.url} serves {', '.join(served) or 'no model'}; name one with --model", url=self.url
            )
        if self._asked_model is not None and served and self._asked_model not in served:
            raise UsageError(
                f"{self.url} does not serve {self._asked_model!r}; it serves {', '.join(list(served)[:5])}",
                url=self.url,
            )
        self.model = self._asked_model or next(iter(served))
        return {"model": self.model, "served_by": served.get(self.model), "engine_version": await self._version()}

    async def reset_prefix_cache(self) -> bool:
        """Empty its cache; False where it has no such door (vLLM's is open with VLLM_SERVER_DEV_MODE=1)."""
        try:
            response = await self._client.post(self.url + RESET_PATH, timeout=CHECK_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return response.status_code in (200, 204)

    async def ask(self, path: str, body: Mapping[str, Any], request_id: str) -> Answered:
        """One streamed request, to its end. Never raises for what the other side does.

        A connection that was idle may close just as it is used: what got no answer at all is sent once more, and counted.
        """
        now = self.clock.monotonic_ns
        sent_ns = now()
        tried = await self._try(path, body, request_id)
        num_retries = 0
        if tried.is_stale:
            num_retries = 1
            tried = await self._try(path, body, request_id)
        if tried.reading.order.answer_id is not None:
            self._open.leave(tried.reading.order)
        return Answered(sent_ns, now(), tried.reading, tried.status, tried.error, num_retries)

    async def _try(self, path: str, body: Mapping[str, Any], request_id: str) -> _Tried:
        reading = Reading(Order(request_id, self._open))
        status: int | None = None
        is_stale = False
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._client.stream(
                    "POST", self.url + path, json={**body, "model": self.model}, headers={"X-Request-Id": request_id}
                ) as response:
                    status = response.status_code
                    error = await self._read(response, reading)
        except TimeoutError:
            error = f"no end of the answer within {self._timeout_s:g} s"
        except httpx.TimeoutException:
            error = (
                f"nothing came for {self._timeout_s:g} s" if status else f"no connection within {CHECK_TIMEOUT_S:g} s"
            )
        except httpx.HTTPError as failure:
            is_stale = status is None and isinstance(
                failure, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError
            )
            cut = "the stream was cut: " if reading.tokens.num_chunks else ""
            error = cut + why_unreachable(self.url, failure)
        return _Tried(reading, status, error, is_stale)

    async def _read(self, response: httpx.Response, reading: Reading) -> str | None:
        """Take the answer in; why it is none, or None."""
        now = self.clock.monotonic_ns
        if response.status_code >= 400:
            with contextlib.suppress(httpx.HTTPError):
                read_whole(reading, (await response.aread())[:MAX_ERROR_BYTES])
            return f"HTTP {response.status_code}" + (f" ({reading.error})" if reading.error else "")
        kind = response.headers.get("content-type", "")
        if "event-stream" not in kind:
            return f"it answers {kind.split(';')[0] or 'something'}, not a stream of events"
        parser = SseParser()
        async for data in response.aiter_raw():
            at_ns = now()
            for event in parser.feed(data):
                read_event(reading, event.name, event.data, at_ns)
        for event in parser.finish():
            read_event(reading, event.name, event.data, now())
        if reading.error is not None:
            return f"an error in the stream ({reading.error})"
        if not reading.has_end and reading.finish_reason is None:
            return "the stream was cut: it ended without saying that it was at its end"
        if not reading.tokens.num_chunks and reading.finish_reason is None:
            return "nothing in the stream is an answer: it ended without a token or a reason"
        return None

    def _models(self, response: httpx.Response) -> dict[str, str | None]:
        """Served models, and who owns them."""
        try:
            told = msgspec.json.decode(response.content)
            return {str(row["id"]): row.get("owned_by") for row in told["data"]}
        except (msgspec.DecodeError, RecursionError, TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            kind = response.headers.get("content-type", "").split(";")[0] or "something"
            raise UnknownFormat(
                f"{self.url}/v1/models answers {kind} that is no list of models. Is it an OpenAI endpoint, or a page in front of it?",
                url=self.url,
            ) from error

    async def _version(self) -> str | None:
        with contextlib.suppress(EngineUnreachable, msgspec.DecodeError, UnicodeDecodeError):
            response = await self._get("/version")
            told = msgspec.json.decode(response.content) if response.status_code == 200 else None
            found = told.get("version") if isinstance(told, dict) else None
            return found if isinstance(found, str) else None
        return None

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._client.get(self.url + path, timeout=CHECK_TIMEOUT_S)
        except httpx.TimeoutException as error:
            raise EngineUnreachable(
                f"{self.url} did not answer within {CHECK_TIMEOUT_S:g} s. It may be overloaded, or behind a firewall.",
                url=self.url,
            ) from error
        except httpx.HTTPError as error:
            raise EngineUnreachable(why_unreachable(self.url, error), url=self.url) from error


def sampling(output_tokens: int, *, seed: int, temperature: float = 0.0) -> dict[str, Any]:
    """Fields that fix an answer's length and words as far as the endpoint lets them be fixed."""
    return {
        "max_tokens": output_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def path_of(kind: str) -> str:
    """Where prompts of this kind go."""
    return "/v1/chat/completions" if kind == "chat" else "/v1/completions"
