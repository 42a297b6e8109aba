"""Instants as people type them."""

from __future__ import annotations

from datetime import UTC, datetime

from engine_probe.errors import UsageError


def iso_ns(option: str, text: str) -> int:
    """ISO 8601 (with zone; without one it is UTC) or nanoseconds since 1970 -> ns. Raises UsageError."""
    if text.isascii() and text.isdigit() and 18 <= len(text) <= 19:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no instant; give one like 2026-11-29T13:20:00Z.") from error
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return int(at.replace(microsecond=0).timestamp()) * 1_000_000_000 + at.microsecond * 1_000
