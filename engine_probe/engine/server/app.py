"""The HTTP routes: OpenAI's, and those of vLLM's server that tools rely on.

Handlers are thin: a body becomes a call (`front_end.py`), a call becomes an answer (`exchange.py`); every error has
OpenAI's shape (`error_answer.py`).
"""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from engine_probe.engine.server import error_answer
from engine_probe.engine.server.answers import Answer, ChatAnswer, CompletionAnswer
from engine_probe.engine.server.call import Call
from engine_probe.engine.server.exchange import Stream, asked, read_body, whole
from engine_probe.engine.server.front_end import FrontEnd
from engine_probe.engine.server.kv_publisher import KvPublisher
from engine_probe.engine.server.metrics_page import CONTENT_TYPE, MetricsPage
from engine_probe.engine.server.openapi import describe
from engine_probe.engine.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    parse,
)
from engine_probe.errors import KvscopeError, PromptRefused

R = TypeVar("R", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def create_app(front: FrontEnd, page: MetricsPage, publisher: KvPublisher | None = None) -> FastAPI:
    """The app over an engine that runs."""
    app = FastAPI(title="kvscope engine", version=version("kvscope"), docs_url=None, redoc_url=None)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    model, thread = front.model, front.thread
    created = int(time.time())

    async def read(request: Request, into: type[R]) -> R:
        return parse(await read_body(request), into)

    async def answer(request: Request, body: GenerateRequest, call: Call, shape: type[Any]) -> Response:
        made: Answer = shape(call, body.model or model.names[0])
        headers = {"X-Request-Id": call.request_id}
        if not body.stream:
            return await whole(call, made, request.receive, headers)
        # An error that comes instead of the first word still has its status: nothing is sent before the engine took it.
        await call.accepted()
        return Stream(call, made, body, headers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's completions: text, texts or token ids; n, stop, stream, seed, top_p, temperature."""
        body = await read(request, CompletionRequest)
        call = await front.complete(body, asked(request, front.now_ns()))
        return await answer(request, body, call, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """OpenAI's chat completions, through the model's template."""
        body = await read(request, ChatRequest)
        call = await front.chat(body, asked(request, front.now_ns()))
        return await answer(request, body, call, ChatAnswer)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """What is served, in vLLM's cards."""
        return {"object": "list", "data": [card(name) for name in model.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """One of them."""
        front.check(name)
        return card(name)

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "kvscope",
            "root": model.root,
            "parent": None,
            "max_model_len": front.max_context,
            "permission": [],
        }

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        """Text or conversation to token ids."""
        body = await read(request, TokenizeRequest)
        front.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise PromptRefused("give a prompt or messages, one of them", field="prompt")
        if body.messages is not None:
            opens = body.add_generation_prompt is not False
            text = model.template.render(body.messages, add_generation_prompt=opens)
            ids = await front.tokenize(text, begins=bool(body.add_special_tokens))
        else:
            ids = await front.tokenize(body.prompt or "", begins=body.add_special_tokens is not False)
        words = [model.tokenizer.decode([one]) for one in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": front.max_context, "tokens": ids, "token_strs": words}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        """Token ids to text."""
        body = await read(request, DetokenizeRequest)
        front.check(body.model)
        return {"prompt": model.tokenizer.decode(front.checked(body.tokens, "tokens"))}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        """Forget every cached prefix; what runs keeps its blocks."""
        front.check(None)
        forgotten = await asyncio.wrap_future(thread.call(lambda engine: engine.reset_prefix_cache()))
        return {"success": True, "blocks": forgotten}

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        """200 while it takes requests, 503 while it drains or is dead."""
        front.check(None)
        return Response()

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        """kvscope's release."""
        return {"version": f"{version('kvscope')}+kvscope", "engine": "kvscope"}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Calls under way."""
        return {"server_load": front.num_open}

    @app.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, Any]:
        """Where KV events are published, by rank; empty where they are not."""
        return {} if publisher is None else {"0": publisher.sources}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(page.render(), media_type=CONTENT_TYPE)

    @app.exception_handler(KvscopeError)
    async def ours(request: Request, error: KvscopeError) -> Response:
        return error_answer.response(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        message = f"{request.method} {path}: {error.detail}"
        return error_answer.plain(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        return error_answer.plain(500, f"a defect of kvscope ({type(error).__name__}); its log has more")

    return app
