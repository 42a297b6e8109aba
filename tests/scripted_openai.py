"""A small OpenAI endpoint for tests of those who ask: a prefix cache of words, and every way to behave badly.

It counts the words of a prompt as tokens, remembers which beginnings it has seen, and says so in its usage.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import Loopback

WORDS_PER_BLOCK = 16


class ScriptedOpenAi(Loopback):
    """misbehaviour: None, or what it does to completions: cut, html, error, refuse, bad_request, whole, hang_up, in_stream,
                   empty, nonsense, no_usage, no_cached (its usage does not tell what was cached).

    has_reset   it has /reset_prefix_cache; num_resets counts its calls; forgets: and that empties the cache
    delay_s     before the first token
    """

    def __init__(self, *, key: str | None = None, models: tuple[str, ...] = ("m",), has_reset: bool = True) -> None:
        super().__init__()
        self.key, self.models, self.has_reset = key, models, has_reset
        self.misbehaviour: str | None = None
        self.models_page: bytes | None = None
        self.models_status = 200
        self.delay_s = 0.0
        self.num_resets = 0
        self.forgets = True
        self.asked: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._seen: set[tuple[str, ...]] = set()
        self.listen(self._handler())

    def cached(self, words: list[str]) -> int:
        """Tokens of the prompt's beginning that it had seen; it has seen all of it now."""
        ends = range(WORDS_PER_BLOCK, len(words) + 1, WORDS_PER_BLOCK)
        found = 0
        with self._lock:
            for end in ends:
                if tuple(words[:end]) not in self._seen:
                    break
                found = end
            self._seen |= {tuple(words[:end]) for end in ends}
        return min(found, len(words) - 1)

    def enter(self) -> None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)

    def leave(self) -> None:
        with self._lock:
            self._at_once -= 1

    def reset(self) -> None:
        with self._lock:
            self.num_resets += 1
            if self.forgets:
                self._seen.clear()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Silence."""

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                        self._send(401, b'{"error": {"message": "no"}}')
                        return
                    told = {"data": [{"id": name, "owned_by": "scripted"} for name in server.models]}
                    page = server.models_page
                    kind = "application/json" if page is None else "text/html"
                    self._send(server.models_status, json.dumps(told).encode() if page is None else page, kind)
                elif self.path == "/version":
                    self._send(200, b'{"version": "9.9"}')
                else:
                    self._send(404, b"{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if self.path == "/reset_prefix_cache":
                    if server.has_reset:
                        server.reset()
                    self._send(200 if server.has_reset else 404, b"")
                    return
                server.enter()
                try:
                    self._complete(json.loads(body))
                finally:
                    server.leave()

            def _complete(self, asked: dict[str, Any]) -> None:
                with server._lock:
                    server.asked.append({"path": self.path, **asked})
                bad = server.misbehaviour
                if bad == "hang_up":
                    self.close_connection = True
                    return
                statuses = {"error": 500, "refuse": 429, "bad_request": 400}
                if bad in statuses:
                    self._send(statuses[bad], b'{"error": {"type": "overloaded", "message": "secret"}}')
                    return
                if bad in ("html", "whole"):
                    self._send(200, b"<html>hello</html>", "text/html" if bad == "html" else "application/json")
                    return
                self._stream(asked, bad)

            def _stream(self, asked: dict[str, Any], bad: str | None) -> None:
                is_chat = "messages" in asked
                prompt = asked["messages"][0]["content"] if is_chat else asked["prompt"]
                words = prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
                cached = server.cached(words)
                time.sleep(server.delay_s)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                if bad in ("empty", "nonsense"):
                    for event in ["{nope", [1, 2], {"choices": "x"}, {"choices": [5]}] if bad == "nonsense" else []:
                        self._event(event)
                    self._event("[DONE]")
                    self.wfile.write(b"0\r\n\r\n")
                    return
                count = asked["max_tokens"]
                for number in range(count):
                    if bad == "cut" and number == count // 2:
                        self.close_connection = True
                        self.connection.close()
                        return
                    if bad == "in_stream" and number == count // 2:
                        self._event({"error": {"type": "engine_dead", "message": "secret"}})
                        break
                    text = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
                    end = "length" if number == count - 1 else None
                    self._event({"id": "c-1", "model": "m", "choices": [{"index": 0, **text, "finish_reason": end}]})
                if bad != "no_usage":
                    usage = {"prompt_tokens": len(words), "completion_tokens": count}
                    if bad != "no_cached":
                        usage["prompt_tokens_details"] = {"cached_tokens": cached}
                    self._event({"id": "c-1", "model": "m", "choices": [], "usage": usage})
                self._event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")

            def _event(self, document: Any) -> None:
                data = document if isinstance(document, str) else json.dumps(document)
                event = f"data: {data}\n\n".encode()
                self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                self.wfile.flush()

            def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler
