"""Parts that meet on fewer requests than before: what the rows add to the tail, and that takes away again.

Idea: a row says what a cause adds to the quantile beside the other parts as the suspect window has them together; `dependence` is how much
they are together at all, worked out at baseline sizes. Where it goes against the change the rows add up to more than there is: seconds that
no request waited. It is given back by the rows that go with the change, in proportion to their seconds, for it is their joint tail that is
shorter. Where it goes with the change nobody is charged for it, as before: a claim may be less than the truth, and the rest is unexplained.

Invariant: rows + dependence stay what they sum to, no row changes its sign, and those that go against the change keep their seconds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diagnosis.attribution.coalitions import Play
from diagnosis.statistics.quantiles import F64


def with_overlap_given_back(play: Play) -> Play:
    """The same reading of the game, its rows of the quantile and of the expected shortfall adding up to no more than the change."""
    rows, dependence = give_back(play.rows, play.dependence)
    es_rows, es_dependence = give_back(play.es_rows, play.es_dependence)
    return replace(play, rows=rows, dependence=dependence, es_rows=es_rows, es_dependence=es_dependence)


def give_back(rows: F64, dependence: F64) -> tuple[F64, F64]:
    """Rows [r, g] and dependence [r] in seconds, replicate by replicate, without dependence that goes against their sum."""
    sign = np.sign(rows.sum(axis=1) + dependence)
    toward = rows * sign[:, None] > 0.0
    gained = np.abs(np.where(toward, rows, 0.0)).sum(axis=1)
    against = dependence * sign < 0.0
    # the change is what was gained less dependence and less the other rows, so what was gained is more than dependence
    kept = np.where(against, np.maximum(1.0 - np.abs(dependence) / np.where(against, gained, 1.0), 0.0), 1.0)
    return np.where(toward, rows * kept[:, None], rows), np.where(against, 0.0, dependence)
