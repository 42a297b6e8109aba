"""What sentences of a verdict have in common: from where to where the metric went, and who owns how much of that."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.attribution.traffic import ROWS as TRAFFIC_ROWS
from diagnosis.cause import MATERIAL, Case
from diagnosis.claims.offered_load import past_knee
from diagnosis.statistics.judged import Judged
from diagnosis.telling.movement import moved_s, outweighed
from diagnosis.telling.verdict import Change, NamedCause
from diagnosis.telling.wording import listing, seconds, share_of, signed


def went(delta: Change) -> str:
    """From where to where the judged quantile went, and the mean."""
    before = quantile_value(delta.base_judged_s, delta.base_judged_range)
    after = quantile_value(delta.suspect_judged_s, delta.suspect_judged_range)
    return f"{before} -> {after} (mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)})"


def quantile_value(value: float, bounds: tuple[float, float | None] | None) -> str:
    """A quantile, with 'or more' where nothing bounds it from above."""
    return seconds(value) + (" or more" if bounds is not None and bounds[1] is None else "")


def owners(case: Case, judged: Judged, causes: Sequence[NamedCause]) -> str:
    """Who owns how much of the change, the first three; the traffic's part is seconds beside it."""
    what = "that" if outweighed(case, judged) else "the change of the mean" if judged.by_mean else "the change"
    parts = _shares(case, judged, causes)
    said = f"{listing(parts)} of {what}" if parts else ""
    if outweighed(case, judged):  # what the traffic adds is told before
        return said
    beside = [c for c in causes if set(c.rows) & set(TRAFFIC_ROWS)]
    if beside and case.traffic is not None:
        size = case.traffic.mean_s if judged.by_mean else case.traffic.quantile_s
        text = f"{beside[0].cause} (the traffic) adds {signed(size)} to the raw numbers"
        if any(part.startswith(f"{beside[0].cause} ") for part in parts):
            text = f"{beside[0].cause} itself adds {signed(size)} to the raw numbers"
        said = f"{said}; {text}" if said else text
    return said


def _shares(case: Case, judged: Judged, causes: Sequence[NamedCause]) -> list[str]:
    """The first three causes that own a share at the common mix, with it: of the traffic's only where others wait for it too."""
    moved, known = moved_s(case, judged), {row.name: row for row in case.attribution.rows}
    parts = []
    for c in causes:
        rows = [known[name] for name in c.rows if name in known]
        owned = sum(row.mean_s if judged.by_mean else row.quantile_s for row in rows)
        share = owned / moved if moved else None
        if set(c.rows) & set(TRAFFIC_ROWS) and (share is None or share < MATERIAL):
            continue
        knee = " (past the knee)" if c.cause == "load_step" and past_knee(case) is not None else ""
        over = "the end of " if c.ended and not set(c.rows) & set(TRAFFIC_ROWS) else ""
        parts.append(f"{over}{c.cause}{knee} owns {share_of(share)}")
    return parts[:3]
