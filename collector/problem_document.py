"""The problem document (RFC 9457) of an error, for both borders: `problems.py` answers it over HTTP, `cli.py` under `--json`.

The four standard members, and the error's own facts beside them, so that a program reads what a person reads in `detail`.
`type` is `urn:kvscope:error:<class-name-in-kebab-case>` and stays as it is. Light: the command line imports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from engine_probe.errors import KvscopeError

MAX_TEXT: Final = 500
_BITS_64: Final = range(-(2**63), 2**64)


def slug(error: type[KvscopeError]) -> str:
    """Name of an error in `type` and in metrics: `InvalidRows` -> `invalid-rows`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", error.__name__).lower()


def document(error: KvscopeError) -> dict[str, Any]:
    """The problem document of an error; facts never replace the four standard members."""
    facts = {str(key): plain(value) for key, value in error.facts.items()}
    return {
        **facts,
        "type": f"urn:kvscope:error:{slug(type(error))}",
        "title": error.title,
        "status": error.http_status,
        "detail": _encodable(error.message),
    }


def plain(value: Any) -> Any:
    """A fact as JSON: long text cut, NaN, infinity and integers beyond 64 bits as text, unknown types as their text."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value in _BITS_64):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in list(value.items())[:100]}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in list(value)[:100]]
    text = _encodable(value if isinstance(value, str) else str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def _encodable(text: str) -> str:
    """Half a surrogate pair (a path or an argument that is no UTF-8) as its escape: UTF-8 has no form for it."""
    return text.encode("utf-8", "backslashreplace").decode()
