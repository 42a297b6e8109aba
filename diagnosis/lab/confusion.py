"""What a matrix comes to: who was named for what, how often that is right, and which of the promised figures are met.

Pure: from results to a document. A *run* is one fault at one severity and seed, a *cell* all runs of a fault at a severity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from diagnosis.attribution.ranking import CAP_WHEN_FEW, CAP_WHEN_TENTATIVE
from diagnosis.cause import all_causes
from diagnosis.lab.catalogue import find_fault
from diagnosis.lab.fault import Fault
from diagnosis.lab.grade import OUTCOMES
from diagnosis.lab.plan import NULL_SEEDS, is_null
from diagnosis.lab.reliability import reliability
from diagnosis.lab.results import NOTHING, Result
from diagnosis.lab.targets import Figures, targets
from diagnosis.lab.thresholds import Rule, Run, accuracy, tune

JUDGED_AT = ("typical", "strong")
HIGH = 0.8
"""Confidence that is called high."""
FIRST_PLACES = 3
TRUTH_AT = "0.99"


def confusion(results: Sequence[Result]) -> dict[str, Any]:
    """The document of `kvscope lab matrix --json`, without the runs themselves."""
    judged = [r for r in results if r.outcome in OUTCOMES]
    plain = [r for r in judged if r.observe == "full" and not r.marked and r.seed < NULL_SEEDS]
    loud = [r for r in plain if is_loud(r) and not find_fault(r.fault).parts]
    pooled = [r for r in loud if r.severity in JUDGED_AT]
    nulls = [r for r in judged if r.observe == "full" and not r.marked and is_null(r.fault)]
    pairs = [r for r in plain if is_loud(r) and find_fault(r.fault).parts]
    less = [r for r in judged if r.observe != "full"]
    cells = _cells(plain)
    opponent = against(pooled, nulls)
    found = {
        "runs": len(results),
        "failed": len(results) - len(judged),
        "seeds": sorted({r.seed for r in plain}),
        "requests": sorted({r.requests for r in results}),
        "accuracy": share(r.outcome == "right" for r in pooled),
        "exact": share(
            r.outcome == "right" and r.first in (*find_fault(r.fault).expected.causes, NOTHING) for r in pooled
        ),
        "abstained": share(r.outcome == "cannot_tell" for r in pooled),
        "wrong": share(r.outcome == "wrong" for r in pooled),
        "n": len(pooled),
        "false_cause_rate": share(is_false(r) for r in nulls),
        "baseline_accuracy": opponent["accuracy"],
        "baseline": opponent,
        "cells": cells,
        "nulls": {
            "n": len(nulls),
            "false": sum(is_false(r) for r in nulls),
            "false_high": sum(is_false(r) and _is_high(r) for r in nulls),
            "named": dict(Counter(r.first for r in nulls if is_false(r)).most_common()),
        },
        "attribution": attribution(pooled),
        "pairs": _pairs(pairs),
        "marks": _marks(judged),
        "observed": _observed(less),
        **_confidence([*plain, *(r for r in nulls if r.seed >= NULL_SEEDS)]),
    }
    figures = Figures(found, [cell for cell in cells if cell["severity"] in JUDGED_AT and cell["is_single_fault"]])
    return found | {"targets": targets(figures)}


def is_loud(result: Result) -> bool:
    """Whether something is to be named."""
    return not find_fault(result.fault).expected.is_silent


def right_names(fault: Fault) -> frozenset[str]:
    """Causes that are right in the first place; empty where nothing is to be named."""
    return frozenset() if fault.expected.is_silent else frozenset({*fault.expected.causes, *fault.expected.acceptable})


def wanted_names(result: Result) -> frozenset[str]:
    """Causes that should stand first; empty where nothing is to be named, or the fault moved nothing that it should have moved."""
    fault = find_fault(result.fault)
    return right_names(fault) if result.is_moved or fault.expected.is_told else frozenset()


def is_first_right(result: Result) -> bool:
    """Whether the first cause is one that may stand there, of a fault that showed."""
    return result.first in wanted_names(result)


def is_false(result: Result) -> bool:
    """Whether somebody is accused where nothing was done."""
    return result.outcome == "wrong"


def share(flags: Iterable[bool]) -> float | None:
    """None of none."""
    told = list(flags)
    return sum(told) / len(told) if told else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known; the lower of two in the middle. None of none."""
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


def attribution(results: Sequence[Result]) -> dict[str, Any]:
    """How far the claim of the right cause is from what it truly cost, as a share of that, and what nobody owns; medians.

    Measured in P99 where that carries the verdict, else in the mean: of other quantiles the truth is not kept.
    """
    right = [r for r in results if r.outcome == "right" and r.causes]
    carried = [r.share_p99 if r.carried_by == TRUTH_AT else r.share_mean for r in right]
    return {
        "n": len(right),
        "error": median(None if value is None else abs(value - 1.0) for value in carried),
        "error_mean": median(None if r.share_mean is None else abs(r.share_mean - 1.0) for r in right),
        "error_p99": median(None if r.share_p99 is None else abs(r.share_p99 - 1.0) for r in right),
        "claimed": median(carried),
        "unexplained": median(None if r.unexplained is None else abs(r.unexplained) for r in right),
        "subject_right": share(r.is_subject_right for r in right if r.is_subject_right is not None),
    }


def against(pooled: Sequence[Result], nulls: Sequence[Result]) -> dict[str, Any]:
    """The opponent on the other half of the seeds than it was tuned on, beside the diagnosis on the same runs."""
    halves: tuple[list[Result], list[Result]] = ([], [])
    for many in (pooled, nulls):
        seeds = sorted({r.seed for r in many})
        first = set(seeds[: (len(seeds) + 1) // 2])
        for result in many:
            halves[result.seed not in first].append(result)
    rules = tune([_run(r) for r in halves[0]])
    published = [r for r in halves[1] if is_loud(r)]
    silent = [r for r in halves[1] if not is_loud(r)]
    ours = share(r.outcome == "right" for r in published)
    theirs = accuracy(rules, [_run(r) for r in published])
    of_nulls = accuracy(rules, [_run(r) for r in silent])
    return {
        "tuned_on": len(halves[0]),
        "n": len(published),
        "accuracy": theirs,
        "accuracy_of_family": _of_family(rules, published),
        "diagnosis": ours,
        "margin": None if ours is None or theirs is None else ours - theirs,
        "nulls": len(silent),
        "false_cause_rate": None if of_nulls is None else 1.0 - of_nulls,
        "rules": [{"rule": rule.name, "above": rule.threshold, "names": rule.cause} for rule in rules],
    }


def _of_family(rules: Sequence[Rule], results: Sequence[Result]) -> float | None:
    """How often the right cause is in the family of the first rule that fires: its answer taken as "one of these"."""

    def is_near(result: Result) -> bool:
        names = _run(result).names
        for rule in rules:
            if rule.feature(result.base, result.suspect) > rule.threshold:
                return bool(names.intersection(rule.family))
        return not names

    return share(is_near(r) for r in results)


def _run(result: Result) -> Run:
    """As the opponent has it, with the labels that the diagnosis is graded by."""
    return Run(result.base, result.suspect, wanted_names(result))


def _cells(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row a fault and severity, in the order of the catalogue as they came."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.fault, result.severity), []).append(result)
    return [_cell(name, severity, found) for (name, severity), found in groups.items()]


def _cell(name: str, severity: str, results: Sequence[Result]) -> dict[str, Any]:
    fault = find_fault(name)
    counts = Counter(r.outcome for r in results)
    of_right = attribution(results)
    return {
        "fault": name,
        "severity": severity,
        "family": fault.family,
        "metric": fault.metric,
        "expected": list(fault.expected.causes),
        "is_silent": fault.expected.is_silent,
        "is_single_fault": not fault.expected.is_silent and not fault.parts,
        "has_cause": fault.expected.is_silent or any(cause in all_causes() for cause in fault.expected.causes),
        "n": len(results),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "moved": sum(r.is_moved for r in results),
        "named_first": dict(Counter(r.first for r in results).most_common()),
        "claimed": of_right["claimed"],
        "unexplained": of_right["unexplained"],
        "subject_right": of_right["subject_right"],
    }


def _pairs(results: Sequence[Result]) -> dict[str, Any]:
    """Whether both of two causes stand in the first three, where both moved something and both can be named."""
    told: dict[str, list[bool]] = {}
    for result in results:
        parts = [find_fault(name) for name in find_fault(result.fault).parts]
        loud = [part for part in parts if not part.expected.is_silent]
        if len(loud) < 2:
            continue
        first = {name for name, _ in result.causes[:FIRST_PLACES]}
        told.setdefault(result.fault, []).append(all(right_names(part) & first for part in loud))
    flat = [each for found in told.values() for each in found]
    return {
        "n": len(flat),
        "both": share(flat),
        "by_pair": {name: {"n": len(found), "both": sum(found)} for name, found in told.items()},
    }


def _marks(results: Sequence[Result]) -> dict[str, Any]:
    """Verdicts with an innocent mark beside those without, of the same runs."""
    plain = {(r.fault, r.severity, r.seed, r.requests): r for r in results if not r.marked and r.observe == "full"}
    marked = [(r, plain.get((r.fault, r.severity, r.seed, r.requests))) for r in results if r.marked]
    both = [(r, other) for r, other in marked if other is not None]
    changed = [r for r, other in both if (r.status, r.first, r.outcome) != (other.status, other.first, other.outcome)]
    return {"n": len(both), "changed": len(changed), "which": sorted({f"{r.fault}, seed {r.seed}" for r in changed})}


def _observed(results: Sequence[Result]) -> dict[str, Any]:
    """By way of observing: how often right, wrong, unable to tell, and wrong with high confidence."""

    def told(some: Sequence[Result]) -> dict[str, Any]:
        counts = Counter(r.outcome for r in some)
        wrong_high = sum(r.outcome == "wrong" and _is_high(r) for r in some)
        return {"n": len(some), **{name: counts[name] for name in OUTCOMES}, "wrong_high": wrong_high}

    modes = dict.fromkeys(r.observe for r in results)
    return {"all": told(results), **{mode: told([r for r in results if r.observe == mode]) for mode in modes}}


def _confidence(results: Sequence[Result]) -> dict[str, Any]:
    """Bins of stated confidence, without what is held down by rule; those by themselves, for what they are."""
    named = [r for r in results if r.confidence is not None]
    held = [r for r in named if r.is_held_down]
    return {
        "reliability": reliability((r.confidence or 0.0, is_first_right(r)) for r in named if not r.is_held_down),
        "held_down": [
            {"at": cap, "n": len(some), "observed": share(is_first_right(r) for r in some)}
            for cap in (CAP_WHEN_TENTATIVE, CAP_WHEN_FEW)
            for some in [[r for r in held if r.confidence == cap]]
        ],
    }


def _is_high(result: Result) -> bool:
    return result.confidence is not None and result.confidence >= HIGH
