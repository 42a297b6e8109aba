"""Caching that a worker says is off, where no request and no counter tells what was found: prefill of whole prompts tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_diagnosis_reports_of_engines import names, ns, served, verdict_of
from tests.simulate import Rows

pytestmark = pytest.mark.usefixtures("few_replicates")


def untold(run: str, seed: int, *, finds: int, says_on: bool | None) -> Rows:
    """Prompts of about 1,400 tokens find this many of them, and tell neither that nor what they computed."""
    rows = served(run, seed, told=lambda _, __: {"cached_tokens": finds})
    for row in rows["request"]:
        del row["cached_tokens"], row["computed_tokens"]
    fact = {"worker": "w0", "run_id": run, "at_ns": ns(-3.0), "block_size": 16, "num_blocks": 8000}
    rows["worker"] = [{**fact, "prefix_caching": says_on}]
    return rows


def test_a_flag_and_longer_prefill_name_it(tmp_path: Path) -> None:
    """1,024 tokens more to compute at 0.1 ms, and all who wait behind them."""
    base = untold("base", 1, finds=1024, says_on=True)
    verdict = verdict_of(tmp_path, base, untold("suspect", 2, finds=0, says_on=False))
    assert (verdict.status, names(verdict)) == ("explained", ["prefix_caching_off"]), verdict.verdict


def test_a_flag_that_changes_no_prefill_is_no_reason(tmp_path: Path) -> None:
    """Nothing was found before either; what is longer is the wait, for twice as many came."""
    base = untold("base", 1, finds=0, says_on=True)
    suspect = served("suspect", 2, told=lambda _, __: {"cached_tokens": 0}, rate=2.0)
    for row in suspect["request"]:
        del row["cached_tokens"], row["computed_tokens"]
    suspect["worker"] = untold("suspect", 2, finds=0, says_on=False)["worker"]
    assert "prefix_caching_off" not in names(verdict_of(tmp_path, base, suspect))


@pytest.mark.parametrize("before", [False, None])
def test_a_worker_whose_flag_did_not_change_is_no_reason(tmp_path: Path, before: bool | None) -> None:
    """Off before, or nobody says what it was before: longer prefill is then told by nobody."""
    base = untold("base", 1, finds=1024, says_on=before)
    verdict = verdict_of(tmp_path, base, untold("suspect", 2, finds=0, says_on=False))
    assert "prefix_caching_off" not in names(verdict), verdict.verdict
