"""`{id:text}` in a path: an id as a client sent it, with slashes, line breaks and all.

Starlette's own `path` takes no line break, and leaves one at the end away.
"""

from __future__ import annotations

from typing import Final

from starlette.convertors import PathConvertor, register_url_convertor

TEXT: Final = "text"


class _TextConvertor(PathConvertor):
    regex = "(?s:.*)"


register_url_convertor(TEXT, _TextConvertor())


def text(name: str) -> str:
    """The part of a path that is the parameter `name`."""
    return f"{{{name}:{TEXT}}}"
