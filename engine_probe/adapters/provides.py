"""What each way of looking at an engine lets us see: declared by its adapter, so that a cause that needs more can say
"not observable here" instead of guessing, and so that the docs table is generated and never typed.

A thing that can be seen is named `kind.column`; for block events `block.<change>`, for scraped numbers
`sample.<canonical name>`. Invariant: a name stands here exactly when rows of that source fill it (tests compare the
declarations with real recordings). The page of it is made in `diagnosis.observability`, which knows what causes need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_probe.events import CANONICAL_SAMPLES, KINDS


@dataclass(frozen=True, slots=True)
class Provides:
    """One source of one engine: `needs` is the flag or step that opens it, `caveats` what to know of a name.

    `unjudged`: names that rows fill and no verdict may rest on, as instants that an importer had to assume.
    """

    engine: str
    source: str
    needs: str
    names: frozenset[str]
    caveats: Mapping[str, str] = field(default_factory=dict)
    unjudged: frozenset[str] = frozenset()

    @property
    def judged(self) -> frozenset[str]:
        """Names that verdicts may rest on."""
        return self.names - self.unjudged


def names(text: str) -> frozenset[str]:
    """`"request: a b  step: c"` -> {request.a, request.b, step.c}."""
    found: set[str] = set()
    kind = ""
    for word in text.split():
        if word.endswith(":"):
            kind = word[:-1]
        else:
            found.add(f"{kind}.{word}")
    return frozenset(found)


def declared() -> tuple[Provides, ...]:
    """Every declaration, in the order of the docs table."""
    from engine_probe.adapters import benchmark_provides, proxy_provides
    from engine_probe.adapters.registry import adapters

    engines = (one for each in adapters() for one in each.provides)
    return (*engines, *proxy_provides.PROVIDES, *benchmark_provides.PROVIDES)


def visible(engine: str, sources: Sequence[str]) -> frozenset[str]:
    """Names that these sources of this engine show together. KeyError where a source is not declared."""
    by_source = {one.source: one.names for one in declared() if one.engine == engine}
    return frozenset().union(*(by_source[source] for source in sources))


def all_names() -> list[str]:
    """Every name of the contract in its order: columns of each kind, then changes of blocks and canonical samples."""
    found = []
    for kind, columns in KINDS.items():
        if kind == "block":
            changes = next(column for column in columns if column.name == "change").choices
            found += [f"block.{change}" for change in changes]
        if kind == "sample":
            found += [f"sample.{name}" for name in CANONICAL_SAMPLES]
        found += [f"{kind}.{column.name}" for column in columns if not (kind == "block" and column.name == "change")]
    return found
