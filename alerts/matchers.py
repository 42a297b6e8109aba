"""Matchers as Alertmanager writes them: `worker="w1"`, `cause=~"hotspot_.*"`, `!=`, `!~`; a label that is absent is empty.

Regular expressions are RE2 (Arrow's), as Alertmanager's are: anchored, and linear in time whatever somebody writes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.errors import AlertMisuse

MOST_CHARACTERS: Final = 500
_FORM = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*(=~|!~|!=|=)\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"{},]*))\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label."""

    name: str
    operator: str
    value: str

    def __str__(self) -> str:
        escaped = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.name}{self.operator}"{escaped}"'

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the label is as asked for."""
        found = labels.get(self.name, "")
        if self.operator in ("=", "!="):
            return (found == self.value) is (self.operator == "=")
        return _fits(self.value, found) is (self.operator == "=~")


def parse_matcher(text: str) -> Matcher:
    """A matcher from its text; quotes may be left out. Raises AlertMisuse."""
    found = _FORM.fullmatch(text) if len(text) <= MOST_CHARACTERS else None
    if found is None:
        raise AlertMisuse(f'{text[:100]!r} is no matcher; write label="value", or !=, =~, !~', matcher=text[:100])
    quoted, bare = found[3], found[4]
    value = bare if quoted is None else re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], quoted, flags=re.S)
    if found[2] in ("=~", "!~"):
        try:
            _fits(value, "")
        except pa.ArrowInvalid as error:
            raise AlertMisuse(f"{value[:100]!r} is no regular expression (RE2): {error}", matcher=text) from error
    return Matcher(found[1], found[2], value)


def parse_matchers(texts: Iterable[str]) -> tuple[Matcher, ...]:
    """Raises AlertMisuse for one that is none."""
    return tuple(parse_matcher(text) for text in texts)


def match_all(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """All of them match."""
    return all(matcher.matches(labels) for matcher in matchers)


def fingerprint(labels: Mapping[str, str]) -> str:
    """Identity of an alert: its labels, whatever their order. 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(labels.items()):
        digest.update(f"{len(name)}:{name}{len(value)}:{value}".encode())
    return digest.hexdigest()


def _fits(pattern: str, text: str) -> bool:
    found = pc.match_substring_regex(pa.array([text]), pattern=rf"\A(?:{pattern})\z")
    return bool(found[0].as_py())
