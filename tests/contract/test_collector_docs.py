"""docs/http-api.md names every route and every error of the API, with the right status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collector.app import create_app
from collector.settings import load_settings

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")


def _document() -> dict[str, Any]:
    made: dict[str, Any] = create_app(load_settings()).openapi()
    return made


def test_every_route_is_on_the_page() -> None:
    """Method and path, as they are called."""
    for path, operations in _document()["paths"].items():
        for method in operations:
            assert f"`{method.upper()} {path}`" in PAGE, (method, path)


def test_every_error_is_on_the_page_and_no_other() -> None:
    """A row an error that some route documents: status and name."""
    documented = {
        (status, name)
        for operations in _document()["paths"].values()
        for operation in operations.values()
        for status, answer in operation["responses"].items()
        for name in answer.get("content", {}).get("application/problem+json", {}).get("examples", {})
    }
    rows = [line.split("|") for line in PAGE.partition("## Errors")[2].partition("## Reading")[0].splitlines()]
    listed = {(row[1].strip(), row[2].strip(" `")) for row in rows if len(row) == 5 and row[1].strip().isdigit()}
    assert listed == documented


def test_limits_on_the_page_are_the_defaults() -> None:
    """Numbers that are said in words follow the settings."""
    settings = load_settings()
    mib = 1 << 20
    assert f"larger than {settings.ingest.max_body_bytes // mib} MiB as sent" in PAGE
    assert f"or {settings.ingest.max_decoded_bytes // mib} MiB decompressed" in PAGE
    assert f"({settings.ingest.max_text_bytes // mib} MiB for JSON" in PAGE
    assert f"408 after {settings.server.body_idle_timeout_s:g} s without a byte" in PAGE
    assert f"({settings.server.body_timeout_s:g} s in all)" in PAGE
    assert f"After {settings.server.drain_timeout_s:g} s" in PAGE
    assert f"At most {settings.metrics.max_series} worker and model pairs" in PAGE
    assert f"http://{settings.server.host}:{settings.server.port}" in PAGE
