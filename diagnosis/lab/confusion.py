"""What a matrix comes to: by fault how often right, wrong or unable to tell, what was named, and whether confidence can be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.lab.grade import OUTCOMES

BINS = ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.0))
NOTHING = "nothing"
Result = Mapping[str, Any]


def confusion(results: Sequence[Result]) -> dict[str, Any]:
    """The document of `kvscope lab matrix --json`: totals, a row a fault, the bins of confidence, the cells."""
    by_fault: dict[str, list[Result]] = {}
    for result in results:
        by_fault.setdefault(result["fault"], []).append(result)
    judged = [result for result in results if result["outcome"] in OUTCOMES]
    known = [result for result in judged if result["has_cause"] or result["is_silent"]]
    return {
        "cells": len(results),
        "failed": len(results) - len(judged),
        "all": shares(judged),
        "with_cause_file": shares(known),
        "faults": [_row(name, found) for name, found in by_fault.items()],
        "reliability": reliability(results),
        "results": list(results),
    }


def shares(results: Sequence[Result]) -> dict[str, Any]:
    """n, and the share of each outcome (None where there is no cell)."""
    counts = Counter(result["outcome"] for result in results)
    n = len(results)
    return {"n": n, **{name: counts[name] / n if n else None for name in OUTCOMES}}


def reliability(results: Sequence[Result]) -> list[dict[str, Any]]:
    """By bin of confidence: how many causes were named with such, and how many of them were the fault's.

    Only of faults whose cause can be named at all, and of those in which nothing is to be named.
    """
    named = [
        (confidence, is_right)
        for result in results
        if result["has_cause"] or result["is_silent"]
        for _, confidence, is_right in result["judgements"]
    ]
    found = []
    for low, high in BINS:
        inside = [(c, right) for c, right in named if low <= c < high or (high == 1.0 and c == 1.0)]
        n = len(inside)
        found.append(
            {
                "from": low,
                "to": high,
                "n": n,
                "mean_confidence": sum(c for c, _ in inside) / n if n else None,
                "right": sum(right for _, right in inside) / n if n else None,
            }
        )
    return found


def _row(name: str, results: Sequence[Result]) -> dict[str, Any]:
    judged = [result for result in results if result["outcome"] in OUTCOMES]
    named = Counter(result["causes"][0]["cause"] if result["causes"] else NOTHING for result in judged)
    subjects = [r["is_subject_right"] for r in judged if r["is_subject_right"] is not None]
    claimed = sorted(r["share_of_truth"] for r in judged if r["share_of_truth"] is not None)
    first = results[0]
    return {
        "fault": name,
        "family": first["family"],
        "metric": first["metric"],
        "expected": first["expected"],
        "is_silent": first["is_silent"],
        "has_cause": first["has_cause"],
        **shares(judged),
        "failed": len(results) - len(judged),
        "moved": sum(bool(r["is_moved"]) for r in judged),
        "named_first": dict(named.most_common()),
        "subject_right": sum(subjects) / len(subjects) if subjects else None,
        "median_share_of_truth": claimed[len(claimed) // 2] if claimed else None,
        "whys": sorted({r["why"] for r in results if r["outcome"] != "right"}),
    }
