"""The collector as an ASGI application: guard around everything, problem documents for every error, routes by family.

`create_app` opens nothing: the store is opened at start-up (lifespan) and closed, with all that was accepted committed,
at shutdown. So the OpenAPI document can be made without a store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import metadata
from typing import Any

from anyio import to_thread
from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi

from alerts.receivers import read_receivers
from collector import problems
from collector.api import OPEN_ROUTERS, ROUTERS
from collector.api.common import documented_query
from collector.guard import Guard, is_loopback
from collector.intake.small_bodies import SmallBodies
from collector.services import open_services, services_in
from collector.settings import ServerSettings, Settings
from engine_probe.errors import UsageError
from store.interface import Store


def create_app(settings: Settings, store: Store | None = None) -> FastAPI:
    """The application. A store that is given is used and left open; else `settings.store_url` is opened at start-up.

    Raises UsageError where it would listen beyond this machine without a token, or the token cannot be read, and AlertMisuse
    for receivers of alerts that cannot work.
    """
    if settings.alerts.receivers_file is not None:
        read_receivers(settings.alerts.receivers_file)
    token = read_token(settings.server)
    loopback = is_loopback(settings.server.host)
    if token is None and not loopback and not settings.server.allow_unauthenticated:
        raise UsageError(
            f"listening on {settings.server.host} lets every machine that reaches it read and write; give a token with "
            "--token-file, or say --allow-unauthenticated"
        )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.services = await to_thread.run_sync(open_services, settings, store)
        try:
            yield
        finally:
            services, app.state.services = services_in(app), None
            await to_thread.run_sync(services.close)

    app = FastAPI(
        title="kvscope collector",
        version=metadata.version("kvscope"),
        summary="Flight recorder and doctor for LLM serving.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = None
    problems.install(app)
    for router in OPEN_ROUTERS:
        app.include_router(router)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(documented_query)])
    app.add_middleware(SmallBodies, idle_s=settings.server.body_idle_timeout_s, total_s=settings.server.body_timeout_s)
    app.add_middleware(
        Guard,
        token=token,
        check_host=token is None or bool(settings.server.allowed_hosts),
        allowed_hosts=settings.server.allowed_hosts,
        loopback=loopback,
    )
    app.openapi = partial(_openapi, app, token is not None)  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def read_token(server: ServerSettings) -> str | None:
    """The bearer token, from the setting or the first line of its file. Raises UsageError."""
    if server.token_file is None:
        return None if server.token is None else _sound_token(server.token.get_secret_value(), "the token")
    try:
        lines = server.token_file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {server.token_file} cannot be read: {error}") from error
    return _sound_token(lines[0] if lines else "", f"the first line of the token file {server.token_file}")


def _sound_token(text: str, what: str) -> str:
    """Raises UsageError for a token that is none, or that no header could carry."""
    token = text.strip()
    if not token:
        raise UsageError(f"{what} is empty; a collector with an empty token would let everybody in")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{what} holds characters that a header cannot carry; use letters, digits and -._~+/=")
    return token


def _openapi(app: FastAPI, needs_token: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = problems.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        for name in ("HTTPValidationError", "ValidationError"):  # our own answer to such parameters is a Problem
            schemas.pop(name, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                validation = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
                if validation.get("schema", {}).get("$ref", "").endswith("HTTPValidationError"):
                    del operation["responses"]["422"]
        document["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": "asked for where the collector has a token"}
        }
        document["security"] = [{"token": []}] if needs_token else [{}, {"token": []}]
        app.openapi_schema = document
    return app.openapi_schema
