"""The opponent: a judge by thresholds on aggregated gauges, as dashboards and alert rules have them, made as good as it can be.

An ordered list of rules ("preemptions went up", "KV usage is above 90 %", "the hit rate fell", "one worker is busier"); the
first that fires names its cause, and where none does nothing is named. Order, thresholds, and which of its family's causes a rule
names are searched for on one half of the seeds, against the very labels that the diagnosis is graded by; what is published is the
other half. So it is a stronger opponent than any rule book: it was tuned on the faults it is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnosis.statistics.quantiles import F64

Gauges = Mapping[str, "float | None"]
Feature = Callable[[Gauges, Gauges], float]
NOTHING = "nothing"
STEPS = 16
"""Thresholds that are tried of each rule: quantiles of its feature over the tuning runs."""
ROUNDS = 3


def grown(name: str) -> Feature:
    """A gauge of the suspect window over the baseline's."""

    def feature(base: Gauges, suspect: Gauges) -> float:
        before, after = base.get(name), suspect.get(name)
        return np.nan if before is None or after is None else (after + 1e-9) / (before + 1e-9)

    return feature


def level(name: str) -> Feature:
    """A gauge of the suspect window."""

    def feature(base: Gauges, suspect: Gauges) -> float:
        after = suspect.get(name)
        return np.nan if after is None else after

    return feature


def risen(name: str) -> Feature:
    """A gauge of the suspect window less the baseline's."""

    def feature(base: Gauges, suspect: Gauges) -> float:
        before, after = base.get(name), suspect.get(name)
        return np.nan if before is None or after is None else after - before

    return feature


def fallen(name: str) -> Feature:
    """A gauge of the baseline window less the suspect's."""
    rise = risen(name)
    return lambda base, suspect: -rise(base, suspect)


@dataclass(frozen=True, slots=True)
class Rule:
    """`feature` above `threshold` names `cause`, one of `family`. threshold infinite: the rule is not used."""

    name: str
    feature: Feature
    family: tuple[str, ...]
    threshold: float = np.inf
    cause: str = NOTHING


PRESSURE = ("admission_blocked_on_blocks", "preemption_recompute", "decode_block_shortage", "block_leak")
CACHE = (
    "premature_eviction", "ttl_expiry", "prefix_caching_off", "prompt_uncacheable", "reuse_below_unit", "cold_start", "tier_never_read",
    "tier_saves_nothing", "hotspot_stale_index", "hotspot_unreachable_threshold",
)  # fmt: skip
HOTSPOTS = ("hotspot_affinity", "hotspot_straggler", "hotspot_dead_signal", "hotspot_tie_breaking", "hotspot_stale_index", "hotspot_unreachable_threshold")  # fmt: skip
LOAD = ("load_step", "client_retries", "prefill_backlog", "decode_backlog")
LENGTHS = ("length_shift", "mix_shift", "long_prefill_interference")
DECODE = (
    "slow_steps",
    "decode_bandwidth",
    "small_batch",
    "recompile",
    "adapter_swap",
    "probe_overhead",
    "speculation_collapse",
)
QUEUE = (
    "prefill_backlog",
    "chunk_budget",
    "long_prefill_interference",
    "small_batch",
    "load_step",
    "admission_blocked_on_blocks",
)
FRONT = ("front_end", "lookup_overhead", "eviction_overhead", "cache_lock_contention", "fixed_offset", "transfer_wire", "transfer_orchestration", "tier_slower_than_recompute")  # fmt: skip

RULES: tuple[Rule, ...] = (
    Rule("preemptions a request rose", risen("preemptions"), PRESSURE),
    Rule("KV usage of the fullest worker is high", level("kv_usage_max"), PRESSURE),
    Rule("KV usage rose", risen("kv_usage_mean"), PRESSURE),
    Rule("prefix hit rate fell", fallen("hit_ratio"), CACHE),
    Rule("request rate rose", grown("rate_rps"), LOAD),
    Rule("prompts got longer", grown("prompt_tokens_mean"), LENGTHS),
    Rule("answers got longer", grown("output_tokens_mean"), LENGTHS),
    Rule("one worker is busier than the mean", level("imbalance_ratio"), HOTSPOTS),
    Rule("imbalance rose", risen("imbalance_ratio"), HOTSPOTS),
    Rule("TPOT rose", grown("tpot_mean_s"), DECODE),
    Rule("the queue grew", risen("queue_mean"), QUEUE),
    Rule("mean TTFT rose", grown("ttft_mean_s"), FRONT),
    Rule("P99 TTFT rose", grown("ttft_p99_s"), FRONT),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run as the opponent has it. names: the right causes; empty where nothing is to be named."""

    base: Gauges
    suspect: Gauges
    names: frozenset[str]


def tune(runs: Sequence[Run], rules: Sequence[Rule] = RULES) -> tuple[Rule, ...]:
    """The rules in the order, with the thresholds and names, that are right most often on these runs: greedy, then by turns.

    Every step takes the rule, place, threshold and name that helps most, so the result is never worse than naming nothing.
    """
    if not runs:
        return ()
    table = _Table(runs, rules)
    chosen: list[Rule] = []
    best = table.score(chosen)
    for _ in range(ROUNDS):
        before = best
        for rule in rules:
            others = [each for each in chosen if each.name != rule.name]
            options = [(table.score(others), others)]
            for threshold in table.candidates(rule):
                tried = replace(rule, threshold=float(threshold))
                for place in range(len(others) + 1):
                    listed = table.labelled([*others[:place], tried, *others[place:]])
                    options.append((table.score(listed), listed))
            score, listed = max(options, key=lambda option: option[0])
            if score > best or (score == best and len(listed) < len(chosen)):
                chosen, best = list(listed), score
        if best == before:
            break
    return tuple(chosen)


def named_by(rules: Sequence[Rule], base: Gauges, suspect: Gauges) -> str:
    """The cause that the first rule names that fires; NOTHING where none does."""
    for rule in rules:
        value = rule.feature(base, suspect)
        if value > rule.threshold:
            return rule.cause
    return NOTHING


def is_right(named: str, names: frozenset[str]) -> bool:
    """Whether this is what should be said."""
    return named in names if names else named == NOTHING


def accuracy(rules: Sequence[Rule], runs: Sequence[Run]) -> float | None:
    """Share of the runs of which it says what should be said; None of none."""
    return sum(is_right(named_by(rules, r.base, r.suspect), r.names) for r in runs) / len(runs) if runs else None


class _Table:
    """Features of all rules on all runs, and which names are right of each run: what a search asks thousands of times."""

    def __init__(self, runs: Sequence[Run], rules: Sequence[Rule]) -> None:
        self.n = len(runs)
        self.values = {
            rule.name: np.asarray([rule.feature(run.base, run.suspect) for run in runs], dtype=np.float64)
            for rule in rules
        }
        names = [NOTHING, *dict.fromkeys(name for rule in rules for name in rule.family)]
        self.column = {name: index for index, name in enumerate(names)}
        self.right = np.asarray([[is_right(name, run.names) for name in names] for run in runs], dtype=np.int64)

    def candidates(self, rule: Rule) -> F64:
        """Thresholds that are tried of a rule."""
        known = self.values[rule.name][np.isfinite(self.values[rule.name])]
        return np.unique(np.quantile(known, np.linspace(0.0, 1.0, STEPS))) if len(known) else known

    def labelled(self, rules: Sequence[Rule]) -> list[Rule]:
        """Each rule names the cause of its family that is right most often where it is the first to fire."""
        first = self._first(rules)
        labelled = []
        for index, rule in enumerate(rules):
            votes = self.right[first == index].sum(axis=0)
            labelled.append(replace(rule, cause=max(rule.family, key=lambda name: votes[self.column[name]])))
        return labelled

    def score(self, rules: Sequence[Rule]) -> int:
        """Runs of which the right thing is said."""
        said = np.asarray([*(self.column[rule.cause] for rule in rules), self.column[NOTHING]])
        return int(self.right[np.arange(self.n), said[self._first(rules)]].sum())

    def _first(self, rules: Sequence[Rule]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """[n] index of the first rule that fires; len(rules) where none does. An unknown feature fires nothing."""
        first = np.full(self.n, len(rules), dtype=np.int64)
        for index in reversed(range(len(rules))):
            first[self.values[rules[index].name] > rules[index].threshold] = index
        return first
