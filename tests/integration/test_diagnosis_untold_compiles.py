"""Prompts that got a little longer while something that no row tells of stood still: what lengths are not blamed for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_diagnosis_reports_of_engines import NUM, Columns, names, served, verdict_of

pytestmark = pytest.mark.usefixtures("few_replicates")


def of_lengths(draws: Any, stands_s: float) -> Callable[[int, float], Columns]:
    """The first 150 lengths that are new stand still for so long."""
    seen = set[int]()

    def told(i: int, _: float) -> Columns:
        is_new = int(draws[i]) not in seen and len(seen) < 150
        seen.add(int(draws[i]))
        return {"prompt_tokens": int(draws[i]), "hidden_s": stands_s if is_new else 0.0}

    return told


@pytest.mark.parametrize("stands_s", [0.3, 0.8])
def test_lengths_do_not_own_what_stood_still(tmp_path: Path, stands_s: float) -> None:
    """1,325 tokens become 1,400: 7.5 ms of prefill, beside half a second a request that nobody tells of and all that waits behind it."""
    rng = np.random.default_rng(13)
    base = served("base", 4, told=of_lengths(rng.integers(1300, 1350, NUM), 0.0))
    verdict = verdict_of(
        tmp_path, base, served("suspect", 23, told=of_lengths(rng.integers(1300, 1500, NUM), stands_s))
    )
    assert (verdict.status, names(verdict)) == ("not_distinguishable", []), verdict.verdict
