"""The cheapest experiment that separates the first two causes of a verdict, the command that runs it, and how many requests it takes.

Idea: an experiment is told by which causes' latency falls in it, and which rises; under every other cause it stays. Two causes
are separated where they do not do the same, so a table of experiments (`next_experiments.toml`) is a table of all pairs, and it
grows by a line a cause. Commands are filled with the window's own load, lengths and pool.

Invariant: every command is one that `kvscope` takes as it stands; the engine's addresses alone are the reader's to fill in.
Source: the size of a difference of means is the textbook's (z_0.975 + z_0.9)^2 (s1^2 + s2^2) / d^2.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from shlex import quote
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from diagnosis.cause import Case, all_causes, rate_per_s
from diagnosis.facts import F64, Facts
from diagnosis.statistics.judged import Judged
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.statistics.sufficiency import MOST_REQUESTS, n_for_change
from diagnosis.telling.verdict import NamedCause
from store.interface import Window

TABLE: Final = "next_experiments.toml"
POWER: Final = 0.9
"""Chance that an experiment shows what is there."""
REPEATS: Final = 3
"""Runs of each arm: what `kvscope experiment` takes at least."""
FEWEST, MOST = 100, 20_000
"""Requests of one run: below, no repeat tells anything; above, virtual time takes too long to be called cheap."""
SMALLEST, LARGEST = 0.02, 0.9
"""Relative change that an experiment is laid out for."""
URL, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
"""The engine, and another one beside it, where nobody says their addresses."""
MORE: Final = 1.5
"""Times the blocks or seats that there are."""
VIRTUAL_MINUTES: Final = 2.0
"""What an experiment costs that is played in virtual time."""
REPLAYED: Final = 1.0
"""Up to this cost nothing is sent, so no number of requests is told."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One line of the table. `virtual`: the same on a fleet in virtual time, where that can show it (`VIRTUAL_MINUTES`)."""

    name: str
    minutes: float
    statement: str
    command: str
    falls: frozenset[str]
    rises: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    store: bool = False
    virtual: str | None = None

    def does(self, cause: str) -> int:
        """What the latency does in it if this is the cause: -1 falls, 1 rises, 0 stays."""
        return (cause in self.rises) - (cause in self.falls)

    def can_be_done(self, visible: frozenset[str]) -> bool:
        return all(any(option in visible for option in need.split("|")) for need in self.needs)


@cache
def table() -> tuple[Experiment, ...]:
    """All experiments, cheapest first."""
    made = [
        Experiment(
            **{
                **row,
                "falls": frozenset(row["falls"]),
                "rises": frozenset(row.get("rises", ())),
                "needs": tuple(row.get("needs", ())),
            }
        )
        for row in _data()["experiment"]
    ]
    return tuple(sorted(made, key=lambda one: one.minutes))


@cache
def shown_in_virtual_time() -> frozenset[str]:
    """Causes that load, lengths and pool bring about, so that a fleet in virtual time has them too."""
    return frozenset(_data()["virtual"])


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("diagnosis") / TABLE).read_text(encoding="utf-8"))


def separating(one: str, other: str | None, visible: frozenset[str]) -> Experiment | None:
    """The cheapest experiment in which the two do not do the same (other None: in which the one does anything)."""
    apart = [
        experiment
        for experiment in table()
        if experiment.can_be_done(visible) and experiment.does(one) != (0 if other is None else experiment.does(other))
    ]
    return min(apart, key=lambda experiment: minutes_of(experiment, one, other), default=None)


def minutes_of(experiment: Experiment, one: str, other: str | None) -> float:
    """What it costs between these two."""
    return VIRTUAL_MINUTES if _is_virtual(experiment, one, other) else experiment.minutes


def _is_virtual(experiment: Experiment, one: str, other: str | None) -> bool:
    return experiment.virtual is not None and {one, other or one} <= shown_in_virtual_time()


def next_experiment(causes: Sequence[NamedCause], case: Case, judged: Judged) -> dict[str, Any] | None:
    """What would separate the first two causes, or confirm the only one; None where there is nothing to do."""
    if not causes or causes[0].ended:
        return None
    first, second = causes[0], causes[1] if len(causes) > 1 else None
    found = separating(first.cause, None if second is None else second.cause, case.suspect.visible)
    names = [first.cause] if second is None else [first.cause, second.cause]
    if found is None:  # a cause that the table does not know: what its own runbook says
        said = all_causes()[first.cause].paragraph("Experiment")
        return _document(names, "its_own", said, None, None, judged.requested.n_needed, None, reads_store=False)
    moving = next((each for each in (first, second) if each is not None and found.does(each.cause)), first)
    need = requests_needed(moving, case, judged)
    words = _words(case, need)
    outcomes = "; ".join(f"if it is {name}, {_does(found.does(name))}" for name in names)
    minutes = minutes_of(found, names[0], names[-1])
    on_engine = found.command.format_map(words)
    virtual = found.virtual if _is_virtual(found, names[0], names[-1]) else None
    return _document(
        names,
        found.name,
        f"{found.statement}; {outcomes}",
        on_engine if virtual is None else virtual.format_map(words),
        None if virtual is None else on_engine,
        need if minutes > REPLAYED else None,
        minutes,
        reads_store=found.store,
    )


def requests_needed(cause: NamedCause, case: Case, judged: Judged, power: float = POWER) -> int | None:
    """Requests of each arm that show the seconds of this cause come or go, with that power; None where no window holds them."""
    values = case.suspect_ledger.values
    if len(values) < 2:
        return None
    owned = abs(cause.mean_s if judged.by_mean else cause.p99_s)
    if judged.by_mean:
        size = float(values.mean())
        step = min(max(owned, SMALLEST * size), LARGEST * size)
        return n_for_mean(values, step, power)
    at = judged.quantile
    size = nearest_rank(values, at)
    change = min(max(owned / size if size > 0 else LARGEST, SMALLEST), LARGEST)
    return n_for_change(values, at, change, power)


def n_for_mean(values: F64, step_s: float, power: float = POWER) -> int | None:
    """Requests of each of two arms whose means are to differ by `step_s` visibly; None beyond what any window holds."""
    if step_s <= 0:
        return None
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(power)
    needed = math.ceil(2.0 * z**2 * float(values.var()) * _inflation(values) / step_s**2)
    return max(needed, 2) if needed <= MOST_REQUESTS else None


def _inflation(values: F64, batches: int = 20) -> float:
    """How many requests count as one, since neighbours are alike: from the scatter of means of batches; 1 at least."""
    size = len(values) // batches
    if size < 2 or float(values.var()) == 0.0:
        return 1.0
    means = values[: size * batches].reshape(batches, size).mean(axis=1)
    return max(size * float(means.var(ddof=1)) / float(values.var()), 1.0)


def _document(
    separates: Sequence[str],
    name: str,
    statement: str,
    command: str | None,
    engine: str | None,
    need: int | None,
    minutes: float | None,
    *,
    reads_store: bool,
) -> dict[str, Any]:
    return {
        "separates": list(separates),
        "experiment": name,
        "statement": statement,
        "command": command,
        "engine_command": engine,
        "reads_store": reads_store,
        "requests_per_window": need,
        "minutes": minutes,
    }


def _does(direction: int) -> str:
    return {-1: "the latency falls or its part stands apart", 0: "it stays", 1: "it rises"}[direction]


def _words(case: Case, need: int | None) -> dict[str, str]:
    """Everything that a command can be filled with, from the suspect window; usual values where it tells none."""
    facts = case.suspect
    workers = max(len([name for name in facts.requests.worker_names if name is not None]), 1)
    blocks = (facts.num_blocks() or 4000 * workers) // workers
    flags = next((worker.flags for worker in facts.workers if worker.flags), {})
    seats, budget = _whole(flags.get("max_num_seqs"), 64), _whole(flags.get("max_num_batched_tokens"), 2048)
    rates = [max(round(rate_per_s(each), 2), 0.01) for each in (case.base, facts)]
    two = sorted({rates[0], rates[1]}) if abs(rates[0] - rates[1]) > 0.05 * rates[1] else [rates[1] / 2, rates[1]]
    per_run = min(max(math.ceil((need or FEWEST) / REPEATS), FEWEST), MOST)
    arrived = [_in_quotes(case.sql_where(window, "arrival_ns")) for window in (case.base_window, case.suspect_window)]
    asked = _traffic(facts)
    blocks = max(blocks, _blocks_of_one(asked, facts.block_size() or 16))
    lengths = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asked.items())
    pool = f"--set num_workers={workers} --set num_blocks={blocks} --set max_num_seqs={seats} --set max_num_batched_tokens={budget}"
    return {
        "traffic": f"--rate {rates[1]:g} --requests {per_run} {lengths}",
        "traffic_without_rate": f"--requests {per_run} {lengths}",
        "fleet": pool,
        "blocks": str(blocks),
        "more_blocks": str(math.ceil(blocks * MORE)),
        "seats": str(seats),
        "more_seats": str(math.ceil(seats * MORE)),
        "budget": str(budget),
        "double_budget": str(2 * budget),
        "unit": str(64 * (facts.block_size() or 16)),
        "rate": f"{rates[1]:g}",
        "two_rates": ",".join(f"{rate:g}" for rate in two),
        "at_once": str(_at_once(facts)),
        "requests": str(per_run),
        "own_tokens": asked["own_tokens"],
        "output_tokens": asked["output_tokens"],
        "prompt_tokens": str(_middle(facts.requests.get("prompt_tokens"), 1024)),
        "url": URL,
        "other": OTHER,
        "run": f" --run {quote(case.suspect_window.run_id)}" if case.suspect_window.run_id else "",
        "window": quote(_window(case, facts)),
        "vantage": facts.requests.vantage,
        "suspect_sql": _in_quotes(case.sql_where(case.suspect_window, "at_ns")),
        "window_sql": f"CASE WHEN {arrived[1]} THEN 'suspect' ELSE 'baseline' END",
        "either_sql": f"({arrived[0]} OR {arrived[1]})",
    }


def _in_quotes(sql: str) -> str:
    """SQL as it stands between double quotes of a shell."""
    return re.sub(r'([\\"$`])', r"\\\1", sql)


def _traffic(facts: Facts) -> dict[str, str]:
    """Lengths and sharing of the window's calls as options of `kvscope experiment`."""
    r = facts.requests
    prompt, cached = r.get("prompt_tokens"), r.get("cached_tokens")
    found = cached[np.isfinite(cached) & (cached > 0)]
    shared = int(np.median(found)) if len(found) else 0
    known = np.isfinite(cached)
    ratio = len(found) / int(known.sum()) if known.any() else 0.0
    own = np.where(np.isfinite(cached), prompt - np.nan_to_num(cached), prompt)
    return {
        "groups": str(min(max(len({each for each in r.prefix if each is not None}), 1), 1000)),
        "shared_tokens": str(shared),
        "shared_ratio": f"{ratio:.2g}" if shared else "0",
        "own_tokens": _range(own, "64-1024"),
        "output_tokens": _range(r.get("output_tokens"), "16-128"),
    }


def _blocks_of_one(asked: Mapping[str, str], block_size: int) -> int:
    """Blocks that the longest of these calls fills, and one to go on: a smaller pool could not serve it at all."""
    longest = [int(asked[name].rpartition("-")[2]) for name in ("own_tokens", "output_tokens", "shared_tokens")]
    return math.ceil(sum(longest) / block_size) + 1


def _range(values: F64, usual: str) -> str:
    """`LOW-HIGH` of the middle four fifths; a single number where they are one."""
    known = values[np.isfinite(values) & (values >= 1)]
    if len(known) == 0:
        return usual
    low, high = (max(int(q), 1) for q in np.quantile(known, [0.1, 0.9]))
    return str(low) if low == high else f"{low}-{high}"


def _middle(values: F64, usual: int) -> int:
    known = values[np.isfinite(values) & (values >= 1)]
    return int(np.median(known)) if len(known) else usual


def _at_once(facts: Facts) -> int:
    """Requests under way, by Little's law; two at least."""
    r = facts.requests
    took = r.end_s - r.arrival_s
    known = took[np.isfinite(took) & (took >= 0)]
    return max(round(rate_per_s(facts) * float(known.mean())), 2) if len(known) else 8


def _whole(text: str | None, usual: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and 0 < len(text) < 10 else usual


def _window(case: Case, facts: Facts) -> str:
    """The suspect window as an option takes it."""
    window: Window = case.suspect_window
    if window.start_ns is None and window.end_ns is None and window.run_id:
        return window.run_id
    origin = facts.requests.origin_ns
    start = window.start_ns if window.start_ns is not None else origin + int(facts.start_s * 1e9)
    end = window.end_ns if window.end_ns is not None else origin + int(facts.end_s * 1e9)
    return f"{window.run_id}@{start}/{end}" if window.run_id else f"{start}/{end}"
