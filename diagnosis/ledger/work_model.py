"""How long the same work takes in each window: the calibration that the ledger rests on.

Two numbers matter. `prefill_s_per_token` turns tokens that had to be computed again into seconds. `slow_factor` says how
much longer a step with the *same* work took in the suspect window (`equal_work.py`), so that a fuller batch is not mistaken for a slower
machine. Where only a part of the window that is worse was slower, the ratio of the whole would be nobody's: that part is its `spell`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.ledger.drift import Spell
from diagnosis.ledger.equal_work import Side, compared, stands_out
from diagnosis.ledger.overheads import without_overheads
from diagnosis.ledger.pace import alike_chunks, decoding_at
from diagnosis.ledger.step_costs import MIN_LEVEL, fit_nonnegative, step_costs, step_design


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Calibration of a pair of windows.

    prefill_s_per_token   s a computed prompt token adds (baseline speed); None where it cannot be fitted
    decode_s_per_seq      s that one more running sequence adds to a step; None likewise
    step_s                typical step with one sequence, s
    slow_factor           suspect step time / baseline step time at equal work; 1.0 within the noise, None if unobservable
    slow_raw, slow_noise  the ratio as measured, and by how much it would have to differ from 1 (log scale) to stand out from drift
    source                steps | token gaps | mean gap per request | None
    spell                 the part of the worse window in which its steps were slow, where its rest was not; slow_factor is 1.0 then
    spell_in_suspect      whether that is the suspect window
    decoding              sequences in the batch that a sequence's step had, on average, of (baseline, suspect); as steps, else requests tell
    """

    prefill_s_per_token: float | None
    decode_s_per_seq: float | None
    step_s: float | None
    slow_factor: float | None
    slow_raw: float | None
    slow_noise: float | None
    num_compared: int
    source: str | None
    decoding: tuple[float | None, float | None] = (None, None)
    spell: Spell | None = None
    spell_in_suspect: bool = True

    def exchanged(self) -> WorkModel:
        """The model with the windows' roles exchanged; costs stay those of the faster window."""
        return replace(
            self,
            slow_factor=None if self.slow_factor is None else 1.0 / self.slow_factor,
            slow_raw=None if self.slow_raw is None else 1.0 / self.slow_raw,
            decoding=(self.decoding[1], self.decoding[0]),
            spell_in_suspect=self.spell_in_suspect == (self.spell is None),
        )

    def slow_share(self, *, suspect: bool) -> float:
        """Share of engine time in this window that slower steps added over the faster window's speed."""
        factor = self.slow_factor or 1.0
        if suspect:
            return max(0.0, 1.0 - 1.0 / factor)
        return max(0.0, 1.0 - factor)

    def spell_shares(self, at_s: F64, *, suspect: bool) -> F64:
        """Share of engine time that slower steps added at each instant of a spell of this window, [n]; 0 outside it."""
        if self.spell is None or suspect != self.spell_in_suspect:
            return np.zeros(len(at_s))
        return self.spell.shares(at_s)


def calibrate(base: Facts, suspect: Facts, *, suspect_is_worse: bool = True) -> WorkModel:
    """Fit the model on both windows. `suspect_is_worse`: a slow spell is looked for in the suspect window, else in the baseline."""
    base, suspect = without_overheads(base), without_overheads(suspect)
    requests = alike_chunks(base.requests, suspect.requests)
    base, suspect = replace(base, requests=requests[0]), replace(suspect, requests=requests[1])
    sides = (Side(base), Side(suspect))
    found = compared(*sides, suspect_is_worse=suspect_is_worse)
    factor, ratio = None, found.ratio
    if ratio is not None:
        factor = ratio.value if stands_out(ratio) and found.spell is None else 1.0
    per_seq, step = _decode_cost(sides[0])
    cost = _prefill_cost(base, suspect, factor or 1.0)
    return WorkModel(
        prefill_s_per_token=cost,
        decode_s_per_seq=per_seq,
        step_s=step,
        slow_factor=factor,
        slow_raw=None if ratio is None else ratio.value,
        slow_noise=None if ratio is None else ratio.noise,
        num_compared=found.num_compared,
        source=found.source,
        decoding=(sides[0].typical_running(), sides[1].typical_running()),
        spell=found.spell,
        spell_in_suspect=suspect_is_worse or found.spell is None,
    )


def _prefill_cost(base: Facts, suspect: Facts, factor: float) -> float | None:
    """Seconds a computed prompt token adds, at the faster window's speed."""
    if base.steps is not None:
        _, work, _ = step_design(base.steps)
        if len(work) >= 3 * MIN_LEVEL and np.ptp(work[:, 1]) > 0:
            fitted = float(step_costs(base.steps)[1])
            if fitted > 0:
                return fitted
    designs, targets = [], []
    for facts, speed in ((base, 1.0), (suspect, factor)):
        r = facts.requests
        prefill, computed = r.get("prefill_s"), r.get("computed_tokens")
        known = np.isfinite(prefill) & np.isfinite(computed) & np.isfinite(r.scheduled_s)
        if not known.any():
            continue
        running = np.zeros(len(r))
        for rows in r.by_worker():
            mine = rows[known[rows]]
            running[mine] = decoding_at(r, rows, r.scheduled_s[mine], with_itself=False)
        designs.append(np.stack([np.ones(int(known.sum())), computed[known], running[known]], axis=1))
        targets.append(prefill[known] / speed)
    if not designs or sum(map(len, targets)) < 3 * MIN_LEVEL:
        return None
    design, target = np.concatenate(designs), np.concatenate(targets)
    if np.ptp(design[:, 1]) == 0:
        return None
    fitted = float(fit_nonnegative(design, target)[1])
    return fitted if fitted > 0 else None


def _decode_cost(base: Side) -> tuple[float | None, float | None]:
    """(s one more sequence adds to a step, s of a step with one sequence), from the baseline."""
    if base.steps is not None:
        _, work, _ = step_design(base.steps)
        if len(work) >= 3 * MIN_LEVEL and np.ptp(work[:, 2]) > 0:
            fixed, _, per_seq = step_costs(base.steps)
            return float(per_seq), float(fixed + per_seq)
    pace = base.gaps if len(base.gaps) >= MIN_LEVEL else base.means
    step, running = pace.step_s, pace.running
    if len(step) < 3 * MIN_LEVEL:
        return None, (float(np.median(step)) if len(step) else None)
    keep = step <= np.quantile(step, 0.95)
    fixed, per_seq = fit_nonnegative(np.stack([np.ones(int(keep.sum())), running[keep]], axis=1), step[keep])
    return float(per_seq), float(fixed + per_seq)
