"""From the rows of runs to the experiment's document: the one way for virtual time and endpoints alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from collector.experiments.runner import Ran
from diagnosis.experiments.contrast import contrast
from diagnosis.experiments.design import Arm, Trial, contrasts
from diagnosis.experiments.document import experiment_document
from diagnosis.experiments.observed import observe
from diagnosis.experiments.reading import read
from diagnosis.experiments.summary import ArmSummary, summarise
from store.metrics import Slo


def judged(
    name: str,
    fixed: Mapping[str, Any],
    arms: Sequence[Arm],
    trials: Sequence[Trial],
    ran: Sequence[Ran],
    slo: Slo,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The document of an experiment. ran: one a trial, in the trials' order."""
    summaries = {arm.name: arm_summary(arm, trials, ran, slo) for arm in arms}
    found = [contrast(summaries[base], summaries[suspect], slo) for base, suspect in contrasts(arms)]
    told = [(each, read(each)) for each in found]
    return experiment_document(
        name, fixed, trials, list(summaries.values()), told, [*notes, *_notes(summaries.values())]
    )


def arm_summary(arm: Arm, trials: Sequence[Trial], ran: Sequence[Ran], slo: Slo) -> ArmSummary:
    """What one arm did, its runs in the order of their repeats."""
    mine = [(trial.repeat, run) for trial, run in zip(trials, ran, strict=True) if trial.arm == arm]
    mine.sort(key=lambda pair: pair[0])
    return summarise(arm, [observe(run.run_id, *_tables(run)) for _, run in mine], slo)


def common_facts(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Facts by arm -> what they have in common, by name; what differs stands as {differs: {arm: value}}."""
    first = next(iter(told.values()))
    fixed: dict[str, Any] = {}
    for key, value in first.items():
        of_arm = {name: facts.get(key) for name, facts in told.items()}
        if all(other == value for other in of_arm.values()):
            fixed[key] = value
        elif isinstance(value, Mapping):
            inner = common_facts({name: facts or {} for name, facts in of_arm.items()})
            differing = {k: v for k, v in inner.items() if isinstance(v, Mapping) and set(v) == {"differs"}}
            fixed[key] = {k: v for k, v in inner.items() if k not in differing}
            fixed |= {f"{key}.{k}": v for k, v in differing.items()}
        else:
            fixed[key] = {"differs": of_arm}
    return fixed


def _tables(run: Ran) -> tuple[Any, Any, Any, Any]:
    return run.tables["request"], *(run.tables.get(kind) for kind in ("step", "worker", "sample"))


def _notes(told: Iterable[ArmSummary]) -> list[str]:
    arms = list(told)
    left_out = sum(arm.num_warmup for arm in arms)
    notes = [
        f"warm-up is left out: {left_out:,} calls, told apart by the label phase=warmup"
        if left_out
        else "there was no warm-up: a warm arm is as cold as a cold one when counting begins",
        "intervals resample whole repeats, the n-th repeats of two arms together; P99.9 from 2,995 requests on",
        "arms run in an order drawn by seed, round by round",
    ]
    late = max((arm.sent_late_max_s for arm in arms if arm.sent_late_max_s is not None), default=None)
    if late is not None:
        notes.append(
            f"latency counts from the instant at which a call was due; the latest was sent {late * 1e3:.1f} ms after it"
        )
    return notes
