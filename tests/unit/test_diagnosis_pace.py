"""What a decode step took, by gaps between chunks that tell their tokens: alike whatever share of the drafts is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.facts import Gaps
from diagnosis.ledger.pace import quiet_gaps
from tests.factories import request_facts


@pytest.mark.parametrize("brought", [[1.0, 4.0, 4.0, 4.0], [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
def test_a_step_that_speculates_takes_as_long_whatever_is_accepted(brought: list[float]) -> None:
    """Four steps of 20 ms: 13 tokens of which 9 were drafts, 5 of which 1 was, 4 of which none was. By single chunks the first are 5 to 20 ms."""
    tokens = float(sum(brought))
    at = 0.1 + 0.02 * np.arange(1.0, 5.0)
    gaps = Gaps(np.zeros(4, dtype=np.int64), at, np.full(4, 0.02), np.array(brought))
    requests = request_facts(
        [0.0],
        queue=[0.0],
        prefill=[0.1],
        decode=[0.08],
        output_tokens=[tokens + 1.0],
        accepted_tokens=[tokens - 4.0],
        gaps=gaps,
    )
    assert quiet_gaps(requests).step_s.tolist() == pytest.approx([0.02] * 4)


def test_without_a_word_on_drafts_a_gap_is_shared_by_its_tokens() -> None:
    """A chunk of two tokens after 40 ms is two steps of 20 ms."""
    gaps = Gaps(np.zeros(2, dtype=np.int64), np.array([0.13, 0.17]), np.array([0.02, 0.04]), np.array([1.0, 2.0]))
    requests = request_facts([0.0], queue=[0.0], prefill=[0.1], decode=[0.06], output_tokens=[4.0], gaps=gaps)
    assert quiet_gaps(requests).step_s.tolist() == pytest.approx([0.02, 0.02])
