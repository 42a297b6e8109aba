"""What happened to an upstream, in the words that `kvscope attach` uses too."""

from __future__ import annotations

from engine_probe.attach import fetch


def why_unreachable(url: str, error: Exception, timeout_s: float) -> str:
    """One sentence on why no connection came about."""
    if isinstance(error, TimeoutError) and not error.args:
        return f"{url} was not connected to within {timeout_s:g} s. It may be overloaded, or behind a firewall."
    return fetch.why_unreachable(url, error)


def why_lost(error: Exception | None) -> str:
    """How a connection that was there ended."""
    if error is None:
        return "it closed the connection"
    return str(getattr(error, "strerror", None) or error or type(error).__name__).lower()
