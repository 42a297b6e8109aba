"""What attempts that were given up cost a caller: diagnosis/ledger/attempts.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts
from diagnosis.judge import judge
from diagnosis.ledger.attempts import attempts_before
from diagnosis.windows import Chosen
from store.interface import Window
from tests.factories import facts, request_facts

N = 60
EVERY_S = 2.0
TRIES = np.where(np.arange(N) % 3 == 0, 2.0, 0.0)
"""Every third request was asked twice again."""


def seen(wait: Any, tries: Any = TRIES, vantage: str = "client", **numbers: Any) -> Facts:
    """Requests one each 2 s, of which only the wait for the first token and the attempts are told."""
    told = {"retry_count": np.broadcast_to(tries, N), **numbers}
    waits = np.broadcast_to(np.asarray(wait, dtype=float), N)
    return facts(request_facts(np.arange(N) * EVERY_S, prefill=list(waits), vantage=vantage, **told))


def cost(window: Facts) -> np.ndarray:
    return attempts_before(window, window.requests.first_token_s - window.requests.arrival_s)


def test_callers_alone_tell_it_by_what_others_waited_at_that_time() -> None:
    """Who asked once waits 0.2 s, who asked twice again 1.1 s: 0.9 s are beyond others, of which two of three parts of 1.1 s are certain."""
    found = cost(seen(np.where(TRIES > 0, 1.1, 0.2)))
    assert found == pytest.approx(np.where(TRIES > 0, 1.1 * 2 / 3, 0.0))


def test_a_refusal_that_took_no_time_costs_no_more_than_others_did_not_wait() -> None:
    """Two refusals at once, and then a wait of 0.25 s where others wait 0.2 s: 50 ms, and not two thirds of it."""
    assert cost(seen(np.where(TRIES > 0, 0.25, 0.2))) == pytest.approx(np.where(TRIES > 0, 0.05, 0.0))


def test_it_is_the_others_of_that_time_that_count() -> None:
    """In the second half everybody waits 0.7 s longer, who asked again too: that is no attempt that was lost.

    The first three and the last three of ten who asked again have their twenty neighbours in their own half.
    """
    late = np.where(np.arange(N) >= N // 2, 0.7, 0.0)
    found = cost(seen(0.2 + late + np.where(TRIES > 0, 0.1, 0.0)))
    again = found[TRIES > 0]
    assert again[[0, 1, 2, -3, -2, -1]] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "window",
    [
        seen(np.where(TRIES > 0, 1.1, 0.2), vantage="engine"),
        seen(np.where(np.arange(N) < 50, 1.1, 0.2), tries=np.where(np.arange(N) < 50, 2.0, 0.0)),
        seen(1.0, tries=0.0),
        seen(1.0, tries=np.nan),
    ],
    ids=[
        "an engine's row begins with its attempt",
        "ten who asked once are too few",
        "nobody asked again",
        "nobody tells",
    ],
)
def test_where_it_is_not_known_it_is_none(window: Facts) -> None:
    """Unknown seconds are given to nobody."""
    assert not cost(window).any()


def test_an_engines_row_tells_it_better() -> None:
    """Between caller and engine lie 0.5 s where asked again and 2 ms else: 0.498 s, whatever others waited."""
    between = np.where(TRIES > 0, 0.5, 0.002)
    found = cost(seen(np.where(TRIES > 0, 1.1, 0.2), network_s=between))
    assert found == pytest.approx(np.where(TRIES > 0, 0.498, 0.0))


def test_callers_alone_name_it() -> None:
    """Half of the wait of one in three is lost to attempts before: from the callers' clocks alone it is named, with all of the change.

    It was 0.2 s, and is 0.2 s for who asks once: (1.1 - 0.2) / 3 = 0.3 s more a request, of which 1.1 * 2 / 3 / 3 = 0.244 s are certain.
    """
    jitter = 1.0 + 0.01 * np.sin(np.arange(N))
    before, after = seen(0.2 * jitter, tries=0.0), seen(np.where(TRIES > 0, 1.1, 0.2) * jitter)
    base, suspect = replace(before, name="baseline"), replace(after, name="suspect")
    chosen = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "given")
    verdict = judge(base, suspect, chosen, "ttft", "0.99")
    assert verdict.status == "explained"
    assert [cause.cause for cause in verdict.causes] == ["client_retries"]
    assert verdict.causes[0].mean_s == pytest.approx(0.244, abs=0.003)
