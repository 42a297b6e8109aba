"""A verdict held against the truth: right, wrong, or that it could not tell.

    right         the cause in the first place is the fault's (or an acceptable name of it), and none is named that must not be;
                  of a run in which nothing is to be named: nothing is; where only what is told is wrong: that is named
    wrong         another cause is in the first place, or one is named that must not be; or "no change" is said of one that is
                  where a check of the data must raise its hand, it does
    cannot_tell   `not_distinguishable` or `not_observable` without a cause, or causes that are named tentatively alone; a check that is silent

A fault that moved neither P99 nor the mean by a tenth is held against silence: there is nothing to be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diagnosis.lab.fault import Fault
from diagnosis.lab.truth import is_material

OUTCOMES = ("right", "wrong", "cannot_tell")
CONFIDENT = 0.5
"""Confidence from which on naming a cause is an accusation and not a guess."""


@dataclass(frozen=True, slots=True)
class Grade:
    """outcome: one of OUTCOMES; why: in a sentence. judgements: (cause, confidence, whether it is one of the fault's).

    share_of_truth, share_of_mean: seconds of P99 and of the mean that the right causes claim (the fault's, and what it
    does by way of) over those that the fault cost.
    """

    outcome: str
    why: str
    is_moved: bool
    is_subject_right: bool | None
    share_of_truth: float | None
    share_of_mean: float | None
    judgements: tuple[tuple[str, float, bool], ...]


def grade(fault: Fault, truth: dict[str, Any], verdict: dict[str, Any]) -> Grade:
    """Of a verdict document (`Verdict.to_dict`) on the run that `truth` tells of."""
    expected = fault.expected
    effects = [told[fault.metric] for told in truth["attribution"].values() if fault.metric in told]
    moved = any(is_material(told) for told in effects)
    causes = verdict["causes"]
    right_names = {*expected.causes, *expected.acceptable}
    silence = (expected.is_silent or not moved) and not expected.is_told
    judgements = tuple(
        (cause["cause"], cause["confidence"], not silence and cause["cause"] in right_names) for cause in causes
    )
    if expected.is_told:
        outcome, why = _told(verdict, right_names, expected.never)
    else:
        outcome, why = _silent(verdict) if silence else _loud(verdict, right_names, expected.never)
    told = [name for name in expected.never if any(c["cause"] == name and c["confidence"] >= CONFIDENT for c in causes)]
    if expected.is_silent and told:
        outcome, why = "wrong", f"names {told[0]}, which must not be named"
    told_by = {row["check"] for row in verdict["quality"] if row["status"] != "ok"}
    unseen = [name for name in expected.quality if name not in told_by]
    if outcome == "right" and unseen:
        outcome, why = "cannot_tell", f"accuses nobody, and the check {unseen[0]} sees nothing"
    subject = _subject(truth, causes[0]) if outcome == "right" and causes else None
    alone = effects[0] if outcome == "right" and causes and len(effects) == 1 else None
    mine = [cause for cause in causes if cause["cause"] in right_names]
    tail, mean = (_share(mine, alone, name) for name in ("p99_s", "mean_s"))
    return Grade(outcome, why, moved, subject, tail, mean, judgements)


def _silent(verdict: dict[str, Any]) -> tuple[str, str]:
    """Nothing is to be named."""
    status, causes = verdict["status"], verdict["causes"]
    if status == "no_change" and not causes:
        return "right", "says that nothing changed"
    if status == "explained" and causes:
        return "wrong", f"names {causes[0]['cause']} where there is nothing to be named"
    accused = [cause["cause"] for cause in causes if cause["confidence"] >= CONFIDENT]
    if accused:
        return "wrong", f"names {accused[0]} where there is nothing to be named"
    return "right", f"accuses nobody ({status})"


def _told(verdict: dict[str, Any], names: set[str], never: tuple[str, ...]) -> tuple[str, str]:
    """A fault of what is told is to be named, whatever became of the latency."""
    causes = [cause["cause"] for cause in verdict["causes"]]
    accused = [cause for cause in verdict["causes"] if cause["cause"] not in names and cause["confidence"] >= CONFIDENT]
    if accused:
        return "wrong", f"names {accused[0]['cause']} where only what is told is wrong"
    if causes and causes[0] in names:
        return "right", f"names {causes[0]}"
    return "cannot_tell", f"accuses nobody ({verdict['status']})"


def _loud(verdict: dict[str, Any], names: set[str], never: tuple[str, ...]) -> tuple[str, str]:
    """The fault is to be named."""
    status, causes = verdict["status"], verdict["causes"]
    if status == "no_change":
        return "wrong", "says that nothing changed, and it did"
    if status == "not_distinguishable" or not causes:
        return "cannot_tell", status
    for cause in causes:
        if cause["cause"] in never and cause["confidence"] >= CONFIDENT:
            return "wrong", f"names {cause['cause']}, which must not be named"
    first = causes[0]["cause"]
    if first not in names:
        return "wrong", f"names {first} first"
    return "right", f"names {first}"


def _subject(truth: dict[str, Any], cause: dict[str, Any]) -> bool | None:
    """Whether it names whom the truth names; None where the truth names the whole fleet, or another kind is named."""
    true, said = truth["subject"], cause["subject"]
    if true["kind"] == "fleet" or said["kind"] != true["kind"]:
        return None
    return bool(said["id"] == true["id"])


def _share(causes: list[dict[str, Any]], true: dict[str, Any] | None, name: str) -> float | None:
    """Seconds that these claim over those that the fault cost."""
    return sum(cause[name] for cause in causes) / true[name] if true is not None and true[name] else None
