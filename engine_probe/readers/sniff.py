"""What the beginning of a file tells: the keys of its first JSON object (however far it reaches), or that it is foreign.

Invariant: looks at the first MiB alone and takes time linear in it, whatever the bytes.
"""

from __future__ import annotations

import re
from typing import Final

HEAD_BYTES: Final = 1 << 20

# A string (perhaps cut off by the end), or a bracket. Possessive: no byte is looked at twice.
_TOKEN: Final = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_COLON: Final = re.compile(rb"\s*+:")

_FOREIGN: Final = (
    (re.compile(rb"\s*<(?:!doctype|html|head|\?xml)", re.IGNORECASE), "a web page", "Was a log-in page or a file viewer's page saved in its place? Download the raw file."),
    (re.compile(rb"PK\x03\x04"), "a zip archive", "Unpack it and give the file inside."),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive", "Unpack it and give the file or folder inside."),
    (re.compile(rb"BZh[1-9]"), "a bzip2 file", "Decompress it; gzip and zstd are read as they are."),
    (re.compile(rb"\xfd7zXZ\x00"), "an xz file", "Decompress it; gzip and zstd are read as they are."),
    (re.compile(rb"SQLite format 3\x00"), "an SQLite database", "Export what is to be read as CSV or JSON lines."),
    (re.compile(rb"(?:metadata|config|benchmarks|conclusions):\s*\n"), "a report of GuideLLM as YAML", "Write it as JSON: --output kind=json,path=FILE, or `guidellm export`."),
    (re.compile(rb"%PDF-"), "a PDF", "Give the file that the report was made from."),
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer", "Fetch the file itself with `git lfs pull`."),
)  # fmt: skip


def top_keys(start: bytes) -> tuple[str, ...]:
    """Keys of the first JSON object in `start`, in order, as far as it reaches; none where it begins otherwise."""
    keys: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(start):
        text = token[0]
        if text in (b"{", b"["):
            if depth == 0 and text == b"[":
                return ()
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                break
        elif depth == 0:
            return ()
        elif depth == 1 and _COLON.match(start, token.end()):
            keys.append(token[1].decode("utf-8", "replace"))
    return tuple(keys)


def foreign(start: bytes) -> tuple[str, str] | None:
    """(what it is, what to do) of a file that is certainly none of ours."""
    for pattern, what, advice in _FOREIGN:
        if pattern.match(start):
            return what, advice
    return None


def csv_header(start: bytes) -> tuple[str, ...]:
    """Cells of the first line where it looks like a header of CSV: several names, none of them a number."""
    first = start.lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0].strip()
    if b"," not in first or len(first) > 4096:
        return ()
    cells = tuple(cell.strip().strip('"') for cell in first.decode("utf-8", "replace").split(","))
    return cells if all(cell and not cell[0].isdigit() and cell.isprintable() for cell in cells) else ()
