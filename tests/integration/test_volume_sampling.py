"""A tenth of the requests and of the blocks tells what all of them tell, within what a tenth can tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from diagnosis.cause import rate_per_s
from diagnosis.facts import Facts
from diagnosis.loading.load import load
from diagnosis.sampled import half_interval, num_requests, total
from diagnosis.telling.verdict import Verdict
from engine_probe.sampling import Sampling
from store.interface import Store, Window
from tests.diagnosed import SMALL, as_run, judged, stored
from tests.simulate import Rows, simulate

RATE = 0.1
N = 2500


def sampled(rows: Rows, rate: float, block_rate: float | None = None) -> Rows:
    """What probes at these rates would have kept of a run."""
    of_requests, of_blocks = Sampling(rate), Sampling(rate if block_rate is None else block_rate)
    hashes = np.array([row["block_hash"] for row in rows["block"]], dtype=np.uint64)
    kept = of_blocks.keeps_blocks(hashes).tolist()
    requests = [r for r in rows["request"] if of_requests.keeps_request(r["request_id"])]
    return {
        **rows,
        "request": [r | {"sample_rate": of_requests.sample_rate} for r in requests],
        "block": [r | {"sample_rate": of_blocks.sample_rate} for r, k in zip(rows["block"], kept, strict=True) if k],
    }


@dataclass(frozen=True)
class Runs:
    """Runs of one store: `base`, `load`, `evict`, whole and as a sample (`-10`); `base-mixed`: half of it at a tenth."""

    store: Store

    def facts(self, name: str) -> Facts:
        return load(self.store, Window(run_id=name), name, "engine")

    def verdict(self, suspect: str, ending: str = "") -> Verdict:
        return judged(self.store, f"base{ending}", f"{suspect}{ending}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    base = simulate(SMALL, "base", num_requests=N)
    whole = {
        "base": base,
        "load": simulate(SMALL, "load", num_requests=N, seed=2, rate=8.0),
        "evict": simulate(SMALL, "evict", num_requests=N, seed=2, num_blocks=340),
    }
    parts = [*whole.values(), *(as_run(sampled(rows, RATE), f"{name}-10") for name, rows in whole.items())]
    early, late = ({**base, "request": part} for part in (base["request"][: N // 2], base["request"][N // 2 :]))
    mixed = {**base, "request": [*early["request"], *sampled(late, RATE)["request"]]}
    store = stored(tmp_path_factory.mktemp("volume") / "s.duckdb", [*parts, as_run(mixed, "base-mixed")])
    yield Runs(store)
    store.close()


@pytest.mark.parametrize("name", ["base", "load", "evict"])
def test_rates_and_token_sums_agree(runs: Runs, name: str) -> None:
    """Requests/s and output tokens lie within the interval that a tenth leaves, and that interval is a narrow one."""
    whole, tenth = runs.facts(name), runs.facts(f"{name}-10")
    assert (whole.requests.sample_rate, tenth.requests.sample_rate) == (None, RATE)
    seen = len(tenth.requests)
    assert abs(num_requests(tenth.requests) - N) <= half_interval(np.ones(seen), RATE) <= 0.15 * N
    assert rate_per_s(tenth) * tenth.offered_s == pytest.approx(seen / RATE)
    output = half_interval(tenth.requests.get("output_tokens"), RATE)
    told, true = total(tenth.requests, "output_tokens"), total(whole.requests, "output_tokens")
    assert told is not None
    assert true is not None
    assert abs(told - true) <= output <= 0.2 * true


@pytest.mark.parametrize("name", ["base", "evict"])
def test_hit_rates_agree(runs: Runs, name: str) -> None:
    """The token-weighted hit rate of a tenth lies within twice the standard error of a ratio (Cochran, section 6.4)."""
    (whole, _), (tenth, error) = (_hit_rate(runs.facts(run)) for run in (name, f"{name}-10"))
    assert abs(tenth - whole) <= 1.96 * error <= 0.05


def _hit_rate(facts: Facts) -> tuple[float, float]:
    cached, prompt = (facts.requests.get(column) for column in ("cached_tokens", "prompt_tokens"))
    ratio = float(cached.sum() / prompt.sum())
    return ratio, float(np.sqrt(((cached - ratio * prompt) ** 2).sum()) / prompt.sum())


def test_lost_tokens_and_evicted_blocks_agree(runs: Runs) -> None:
    """Lost tokens lie within the margin that is told with them; evictions within that of as many blocks; no request lost more
    than it missed."""
    whole, tenth = runs.facts("evict"), runs.facts("evict-10")
    assert whole.lineage is not None
    assert tenth.lineage is not None
    assert whole.blocks is not None
    assert tenth.blocks is not None
    assert whole.lineage.margin_tokens is None
    assert tenth.lineage.margin_tokens is not None
    assert abs(tenth.lineage.lost_tokens - whole.lineage.lost_tokens) <= tenth.lineage.margin_tokens
    assert whole.lineage.lost_tokens > 30_000
    cleared = tenth.lineage.cleared_tokens + tenth.lineage.evicted_tokens
    assert (cleared <= tenth.requests.get("prompt_tokens") - tenth.requests.get("cached_tokens")).all()
    # a block is evicted again and again: for the interval each of them counts with all its evictions
    assert tenth.blocks.evicted == pytest.approx(whole.blocks.evicted, rel=0.1)


@pytest.mark.parametrize(("suspect", "cause"), [("load", "load_step"), ("evict", "premature_eviction")])
def test_the_verdict_is_the_same_and_says_that_it_rests_on_a_sample(runs: Runs, suspect: str, cause: str) -> None:
    """Status and first cause are those of the full data; n is what was really seen; notes and evidence speak of estimates."""
    whole, tenth = runs.verdict(suspect), runs.verdict(suspect, "-10")
    assert (tenth.status, tenth.causes[0].cause) == (whole.status, whole.causes[0].cause) == ("explained", cause)
    assert tenth.n["suspect"] == len(runs.facts(f"{suspect}-10").requests)
    assert any("sample of 10 %" in note and "estimates" in note for note in tenth.notes)
    assert any("estimated from a sample of 10 %" in evidence["statement"] for evidence in tenth.causes[0].evidence)
    assert not any("sample" in note for note in whole.notes)


@pytest.mark.parametrize("suspect", ["load", "evict"])
def test_seconds_of_the_ledger_agree(runs: Runs, suspect: str) -> None:
    """Each row's mean seconds of the full data lie within the interval of the tenth's row, widened by the full row's own."""
    whole, tenth = (
        {row.cause: row for row in runs.verdict(suspect, ending).attribution if row.mean_interval_95 is not None}
        for ending in ("", "-10")
    )
    compared = [name for name in whole if name in tenth and name not in ("dependence", "other")]
    assert len(compared) >= 2
    for name in compared:
        interval, own = tenth[name].mean_interval_95, whole[name].mean_interval_95
        assert interval is not None
        assert own is not None
        (low, high), (own_low, own_high) = interval, own
        assert low - (own_high - own_low) / 2 <= whole[name].mean_s <= high + (own_high - own_low) / 2, name


@pytest.mark.parametrize("suspect", ["load", "evict"])
def test_the_sql_of_a_sample_gives_the_number_that_the_evidence_states(runs: Runs, suspect: str) -> None:
    """The estimate is in the query too."""
    checked = 0
    for cause in runs.verdict(suspect, "-10").causes:
        for evidence in cause.evidence:
            if evidence["sql"] is not None:
                assert runs.store.query(evidence["sql"]).column(0)[0].as_py() == pytest.approx(evidence["value"])
                checked += 1
    assert checked >= 1


def test_a_window_of_several_rates_is_thinned_to_one(runs: Runs) -> None:
    """The first half whole, the second at a tenth: about 125 of each are judged, the others are counted and said, and the rate
    is that of the full data within its interval."""
    facts = runs.facts("base-mixed")
    assert facts.requests.sample_rate == RATE
    assert facts.requests.num_thinned > 1000
    assert abs(num_requests(facts.requests) - N) <= half_interval(np.ones(len(facts.requests)), RATE)
    notes = judged(runs.store, "base-mixed", "load").notes
    assert any("kept at several rates" in note for note in notes)


def test_blocks_are_kept_for_their_whole_life(runs: Runs) -> None:
    """Of a block in the sample every event is there; of any other none."""
    life = "SELECT block_hash, count(*) AS n FROM block WHERE run_id = ? GROUP BY block_hash"
    whole, tenth = (
        {row["block_hash"]: row["n"] for row in runs.store.query(life, [run]).to_pylist()}
        for run in ("evict", "evict-10")
    )
    assert len(tenth) == pytest.approx(len(whole) * RATE, rel=0.15)
    assert all(whole[name] == count for name, count in tenth.items())
