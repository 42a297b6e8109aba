"""Tokens that come several a chunk, and nobody tells how many in which: another chunking is no slower step.

Callers alone tell, 20 ms a token; `output_tokens` says how many tokens an answer had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_diagnosis_reports_of_engines import NUM, names, ns, verdict_of
from tests.simulate import Rows

Chunks = Callable[[np.random.Generator, list[int]], list[int]]
"""The instants of an answer's tokens -> those of its chunks."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def single(_: np.random.Generator, token_ns: list[int]) -> list[int]:
    return token_ns


def of(each: int) -> Chunks:
    """The first token at once, then so many a chunk."""
    return lambda _, token_ns: [token_ns[0], *token_ns[each:-1:each], token_ns[-1]]


def joined_by_chance(rng: np.random.Generator, token_ns: list[int]) -> list[int]:
    """Every third event waits for the next one."""
    return [at for at in token_ns[:-1] if at == token_ns[0] or rng.random() > 1 / 3] + token_ns[-1:]


def streamed(
    run: str, seed: int, chunks: Chunks = single, *, token_s: float = 0.02, late_s: float = 0.0, told: bool = False
) -> Rows:
    """One request every 2.5 s; the first token of every fifth is `late_s` late. `told`: with how many tokens each chunk brought."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(NUM):
        at, output = 2.5 * i + rng.uniform(0.0, 0.1), int(rng.integers(40, 80))
        first = at + 0.1 * rng.uniform(0.97, 1.03) + (late_s if i % 5 == 0 else 0.0)
        tokens = [ns(t) for t in first + np.cumsum([0.0, *token_s * rng.uniform(0.97, 1.03, output - 1)])]
        seen = chunks(rng, tokens)
        row = {"request_id": f"{run}-{i}", "run_id": run, "worker": "w0", "vantage": "client", "state": "finished"}
        row |= {"arrival_ns": ns(at), "first_token_ns": tokens[0], "prompt_tokens": 500, "output_tokens": output}
        row |= dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), tokens[-1])
        if told:
            row["token_counts"] = np.diff(np.searchsorted(tokens, seen, "right"), prepend=0).tolist()
        rows.append({**row, "token_ns": seen})
    return {"request": rows}


@pytest.mark.parametrize("chunks", [of(2), of(4), of(10), joined_by_chance], ids=["2", "4", "10", "by chance"])
@pytest.mark.parametrize("both", [False, True], ids=["from now on", "all along"])
def test_another_chunking_is_no_slow_step(tmp_path: Path, chunks: Chunks, *, both: bool) -> None:
    """Half a second more before the first token of every fifth, and tokens as fast as before, however they come."""
    base = streamed("base", 1, chunks if both else single)
    verdict = verdict_of(tmp_path, base, streamed("suspect", 2, chunks, late_s=0.5), "e2e")
    assert "slow_steps" not in names(verdict), verdict.verdict
    assert not any(abs(row.mean_s) > 0.005 for row in verdict.attribution if row.cause == "slow_steps")


@pytest.mark.parametrize("chunks", [of(4), joined_by_chance], ids=["4", "by chance"])
def test_slow_steps_are_seen_through_equal_chunks(tmp_path: Path, chunks: Chunks) -> None:
    """Four tokens a chunk in both windows, and each token takes half as long again."""
    suspect = streamed("suspect", 2, chunks, token_s=0.03)
    verdict = verdict_of(tmp_path, streamed("base", 1, chunks), suspect, "tpot")
    assert names(verdict) == ["slow_steps"], verdict.verdict


def test_chunks_that_tell_their_tokens_are_compared_whatever_they_hold(tmp_path: Path) -> None:
    """One a chunk before and four now, told by `token_counts`: half as long again for a token is a slow step."""
    suspect = streamed("suspect", 2, of(4), token_s=0.03, told=True)
    verdict = verdict_of(tmp_path, streamed("base", 1, told=True), suspect, "tpot")
    assert names(verdict) == ["slow_steps"], verdict.verdict


def test_the_check_says_that_nobody_tells_the_chunks(tmp_path: Path) -> None:
    """Four tokens a chunk without their counts, and with them."""
    base, suspect = streamed("base", 1, of(4), told=True), streamed("suspect", 2, of(4))
    verdict = verdict_of(tmp_path, base, suspect, "tpot")
    told = {row["statement"].partition(":")[0]: row["statement"] for row in verdict.quality if row["check"] == "chunks"}
    assert "nobody tells how many" not in told["base"]
    assert told["suspect"].endswith("nobody tells how many tokens each chunk brought")
