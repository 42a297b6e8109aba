"""Asks an engine how it tokenizes a prompt: vLLM and SGLang (`/tokenize`), llama.cpp (`/apply-template`, then `/tokenize`).

Which engine it is, and how large its KV blocks are, is asked once. A prompt that came as token ids is not asked for. What
cannot be tokenized as the engine would (images, other templates, several prompts) raises `NoTokens`, never a guess; so does
every answer that is not one. Messages of errors are free of content. Source: reference 4.1, 5.1, 6.
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine_probe.errors import UnknownFormat
from engine_probe.proxy import chat_form
from engine_probe.proxy.heads import RequestHead
from engine_probe.proxy.upstreams import Upstream

TIMEOUT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 64 << 20
DEFAULT_BLOCK_SIZE: Final = 16
MIN_OWN_BLOCK_SIZE: Final = 4
"""An engine with smaller pages (SGLang's default is 1) would give a hash a token: then DEFAULT_BLOCK_SIZE is used."""

VLLM, SGLANG, LLAMA = "vllm", "sglang", "llamacpp"
_KEYS: Final = (b"authorization", b"api-key", b"x-api-key")
_CHAT: Final = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class NoTokens(Exception):
    """The prompt's tokens are not known; the message says why in a few constant words."""


class Tokenizer:
    """Of one upstream; used by one thread. block_size: tokens in a block; None: the engine's own."""

    def __init__(self, upstream: Upstream, block_size: int | None = None) -> None:
        self._upstream = upstream
        self._connection: http.client.HTTPConnection | None = None
        self._headers: dict[str, str] = {}
        self._engine: str | None = None
        self._block_size = block_size

    @property
    def block_size(self) -> int:
        """Tokens in a block; known once tokens were asked for."""
        return self._block_size or DEFAULT_BLOCK_SIZE

    def tokens(self, head: RequestHead, body: bytes) -> list[int]:
        """Token ids of the request's prompt, as the engine sees it. Raises NoTokens."""
        self._headers = {
            name.decode("ascii"): value.decode("latin-1") for name in _KEYS if (value := head.get(name)) is not None
        }
        try:
            asked = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise NoTokens("the request is not JSON") from None
        if not isinstance(asked, dict):
            raise NoTokens("the request is not an object")
        if self._engine is None:
            self._engine = self._find_engine()
        path = head.path.rstrip(b"/")
        if path.endswith(chat_form.PATHS):
            messages = chat_form.chat_of(path, asked)
            if messages is None:
                raise NoTokens("the prompt is not text alone")
            return self._chat({"model": asked.get("model"), "messages": messages})
        if isinstance(asked.get("messages"), list):
            return self._chat(asked)
        return self._prompt(asked)

    def _chat(self, asked: Mapping[str, Any]) -> list[int]:
        for message in asked["messages"]:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and any(not _is_text(part) for part in content):
                raise NoTokens("the prompt is not text alone")
        chosen = {name: asked[name] for name in ("messages", *_CHAT) if asked.get(name) is not None}
        if self._engine == LLAMA:
            rendered = self._ask("/apply-template", chosen).get("prompt")
            if not isinstance(rendered, str):
                raise NoTokens("the engine does not apply its template")
            return self._llama(rendered)
        return self._tokens(self._ask("/tokenize", {"model": asked.get("model"), **chosen}))

    def _prompt(self, asked: Mapping[str, Any]) -> list[int]:
        prompt = next((asked[key] for key in ("prompt", "text", "input_ids") if key in asked), None)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        if not isinstance(prompt, str):
            raise NoTokens("the prompt is not one text")
        if self._engine == LLAMA:
            return self._llama(prompt)
        adds = asked.get("add_special_tokens")
        document = {"model": asked.get("model"), "prompt": prompt, "add_special_tokens": adds is not False}
        return self._tokens(self._ask("/tokenize", document))

    def _llama(self, text: str) -> list[int]:
        return self._tokens(self._ask("/tokenize", {"content": text, "add_special": True, "parse_special": True}))

    def _tokens(self, answer: Mapping[str, Any]) -> list[int]:
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise NoTokens("the engine's answer holds no tokens")
        return tokens

    def _find_engine(self) -> str:
        """vLLM tells its version, llama.cpp its properties, SGLang its model; sets the block size where it is told."""
        if "version" in self._look("/version"):
            self._block_size = self._block_size or self._vllm_block_size()
            return VLLM
        props = self._look("/props")
        if "default_generation_settings" in props or "total_slots" in props:
            return LLAMA
        if "model_path" in self._look("/model_info") or "model_path" in self._look("/get_model_info"):
            page = self._look("/server_info").get("page_size")
            if self._block_size is None and isinstance(page, int) and page >= MIN_OWN_BLOCK_SIZE:
                self._block_size = page
            return SGLANG
        raise NoTokens("the engine is none that is known to tokenize")

    def _vllm_block_size(self) -> int | None:
        from engine_probe.adapters.prometheus import parse_page
        from engine_probe.adapters.vllm import cache_config

        status, body = self._send("GET", "/metrics", None)
        if status != 200:
            return None
        with contextlib.suppress(UnknownFormat, ValueError):
            for labels in cache_config(parse_page(body)).values():
                return int(labels.get("block_size", "")) or None
        return None

    def _look(self, path: str) -> Mapping[str, Any]:
        status, body = self._send("GET", path, None)
        return _object(body) if status == 200 else {}

    def _ask(self, path: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        sent = {name: value for name, value in document.items() if value is not None}
        status, body = self._send("POST", path, msgspec.json.encode(sent))
        if status != 200:
            raise NoTokens(f"the engine answers {status} to {path}")
        return _object(body)

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """One request; a kept-alive connection that has gone is made anew once."""
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        target = self._upstream.prefix.decode("ascii") + path
        for is_last in (self._connection is None, True):
            connection = self._connection or self._connect()
            try:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
                answer = response.read(MAX_ANSWER_BYTES + 1)
                if len(answer) > MAX_ANSWER_BYTES:
                    raise NoTokens("the engine's answer is too large")
            except (OSError, http.client.HTTPException):
                self.close()
                if is_last:
                    raise NoTokens("the engine does not answer its tokenizer") from None
            except NoTokens:
                self.close()
                raise
            else:
                return response.status, answer
        raise AssertionError("unreachable: the last try returns or raises")

    def _connect(self) -> http.client.HTTPConnection:
        host, port, tls = self._upstream.host, self._upstream.port, self._upstream.tls
        if tls is None:
            self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=tls)
        return self._connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
