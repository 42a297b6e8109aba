"""What each way of looking at an engine allows to judge: declarations of adapters joined to the needs of causes.

Idea: an adapter declares which names it fills, a cause which names it needs, so what can be judged is a join and is never
typed. Invariant: a cause counts as judgeable here exactly when `diagnose` would ask it on rows that fill these names.
Run as a module it prints docs/observability.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diagnosis.cause import all_causes
from diagnosis.loading.implied import names_implied
from engine_probe.adapters.provides import Provides, all_names, declared
from engine_probe.events import KINDS

METRICS = {
    "ttft": ("request.arrival_ns", "request.first_token_ns"),
    "tpot": ("request.first_token_ns", "request.last_token_ns", "request.output_tokens"),
    "e2e": ("request.arrival_ns", "request.last_token_ns"),
}
"""What one request row must know before a change of the metric can be judged at all."""

HEAD = """# What can be seen, engine by engine

Generated from the adapters' declarations and the causes' needs (`python -m diagnosis.observability`); do not edit.

First what can be judged, then every name. A name is `kind.column` of the event contract, `block.<change>`, or
`sample.<canonical name>`. An empty cell means null: unknown, never zero. What is not seen is answered with
`not observable here`, never guessed. What each cause needs: [causes.md](causes.md).
"""


@dataclass(frozen=True, slots=True)
class Judgeable:
    """What names allow: metrics whose change can be judged, causes that can be asked, and what the others lack."""

    metrics: tuple[str, ...]
    causes: tuple[str, ...]
    lacking: dict[str, list[str]]


def judgeable(names: Iterable[str]) -> Judgeable:
    """What rows that fill these names allow. Without request rows no latency can be judged, so no cause of one either."""
    seen = frozenset(names)
    seen |= names_implied(seen) | {name.partition(".")[0] for name in seen}
    metrics = tuple(metric for metric, needs in METRICS.items() if all(need in seen for need in needs))
    lacking = {name: cause.missing(seen) for name, cause in all_causes().items()}
    causes = tuple(name for name, lacks in lacking.items() if not lacks) if metrics else ()
    if not metrics:
        lacking = {name: ["request.arrival_ns", *lacks] for name, lacks in lacking.items()}
    return Judgeable(metrics, causes, {name: lacks for name, lacks in lacking.items() if name not in causes})


def openers(sources: Sequence[Provides], seen: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each source that is not seen yet, the causes that it alone would add to what is seen."""
    have = frozenset(seen)
    already = set(judgeable(have).causes)
    found = {}
    for source in sources:
        new = tuple(name for name in judgeable(have | source.judged).causes if name not in already)
        if new:
            found[source.source] = new
    return found


def page() -> str:
    """docs/observability.md."""
    everything = declared()
    engines = {name: [one for one in everything if one.engine == name] for name in {one.engine for one in everything}}
    # those that judge alone come first
    order = sorted(engines, key=lambda name: (not _together(engines[name]).metrics, name))
    return "\n".join([HEAD, *(_engine(name, engines[name]) for name in order)])


def _together(sources: Sequence[Provides]) -> Judgeable:
    return judgeable(frozenset[str]().union(*(one.judged for one in sources)))


def _engine(engine: str, sources: Sequence[Provides]) -> str:
    names = frozenset[str]().union(*(one.names for one in sources))
    lines = [f"## {engine}", "", "| source | what opens it |", "| --- | --- |"]
    lines += [f"| {one.source} | {one.needs.replace('|', chr(92) + '|')} |" for one in sources]
    header = " | ".join(one.source for one in sources)
    rule = "| --- |" + " --- |" * len(sources)
    together = _together(sources)
    if together.metrics:
        lines += ["", "What it allows to judge:", "", f"| verdict | {header} | all |", rule + " --- |"]
        each = [judgeable(one.judged) for one in sources]
        for metric in METRICS:
            lines.append(_row(f"change of {metric.upper()}", [metric in one.metrics for one in (*each, together)]))
        for cause in all_causes():
            lines.append(_row(f"`{cause}`", [cause in one.causes for one in (*each, together)]))
    else:
        what = (
            "No latency in its requests: it tells a load"
            if "request.arrival_ns" in names
            else "No request rows: it explains what others observe"
        )
        lines += ["", f"{what}, and judges no latency alone."]
    lines += ["", f"| name | {header} |", rule]
    lines += [_row(f"`{name}`", [name in one.names for one in sources]) for name in all_names() if name in names]
    caveats = [(one.source, name, text) for one in sources for name, text in one.caveats.items()]
    if caveats:
        lines += ["", "To know:", ""]
        lines += [f"- `{name}` ({source}): {text}" for source, name, text in caveats]
    return "\n".join([*lines, *_hidden(names)]) + "\n"


def _row(what: str, cells: Sequence[bool]) -> str:
    return f"| {what} |" + "".join(" yes |" if cell else " |" for cell in cells)


def _hidden(names: frozenset[str]) -> list[str]:
    """What no source of the engine shows: kinds that are absent in one line, others by column."""
    absent = [kind for kind in KINDS if not any(name.startswith(f"{kind}.") for name in names)]
    lines = ["", "Not seen by any source:", ""]
    if absent:
        lines.append(f"- no rows of {', '.join(absent)}")
    for kind in (kind for kind in KINDS if kind not in absent):
        rest = [name.partition(".")[2] for name in all_names() if name.startswith(f"{kind}.") and name not in names]
        rest = [name for name in rest if name not in ("run_id", "sample_rate")]
        if rest:
            lines.append(f"- {kind}: " + ", ".join(f"`{name}`" for name in rest))
    return lines


if __name__ == "__main__":
    print(page(), end="")
