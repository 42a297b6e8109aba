"""A common mix of requests: diagnosis/statistics/comparability.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diagnosis.attribution.traffic import row_name
from diagnosis.statistics.comparability import Mix, _between, common_mix
from engine_probe.errors import DiagnosisError

Window = dict[str, Any]


def window(
    n: int, seed: int, *, prompt: float = 1000.0, chat: float = 0.5, tenants: tuple[str, ...] = ("acme", "zeta")
) -> Window:
    rng = np.random.default_rng(seed)
    return {
        "prompt_tokens": np.round(rng.lognormal(np.log(prompt), 1.0, n)),
        "output_tokens": np.round(rng.lognormal(5.0, 0.5, n)),
        "workload": np.where(rng.random(n) < chat, "chat", "code").astype(object),
        "tenant": rng.choice(np.array(tenants, dtype=object), n),
    }


def text_of(mix: Mix) -> str:
    return "\n".join(mix.statements)


def test_alike_windows_are_left_alone():
    """The same mix twice: weights of 1, every request kept, and the test's numbers said."""
    mix = common_mix(window(800, 1), window(900, 2))
    assert not mix.shifted
    assert (mix.w_base == 1.0).all()
    assert (mix.w_suspect == 1.0).all()
    assert mix.n_effective == (800.0, 900.0)
    assert mix.left_out == []
    assert mix.moved == ()
    assert "do not differ materially" in text_of(mix)
    assert "total variation" in text_of(mix)
    assert ", p " in text_of(mix)


def test_alike_windows_rarely_look_shifted():
    """Of 30 pairs with the same mix hardly any is reweighted: five tests at 1 % each."""
    shifted = [common_mix(window(400, 2 * i), window(400, 2 * i + 1), seed=i).shifted for i in range(30)]
    assert sum(shifted) <= 2


def test_longer_prompts_are_named_and_weighed_away():
    """Prompts 1.8 times as long: the dimension is named, and the weighted means come together."""
    base, suspect = window(1500, 1), window(1500, 2, prompt=1800.0)
    mix = common_mix(base, suspect)
    assert mix.shifted
    assert mix.moved == ("prompt_tokens",)
    assert mix.dimension_shift["prompt_tokens"] > 0.15
    assert max(mix.dimension_shift[name] for name in ("output_tokens", "workload", "tenant")) < 0.08
    assert "prompt length moved" in text_of(mix)
    means = [np.average(w["prompt_tokens"], weights=m) for w, m in ((base, mix.w_base), (suspect, mix.w_suspect))]
    assert means[1] / means[0] < 1.1 < 1.5 < suspect["prompt_tokens"].mean() / base["prompt_tokens"].mean()
    assert all(600 < n < 1500 for n in mix.n_effective)


def test_weights_have_mean_one_and_give_each_window_half_a_voice():
    """100 chat and 300 code against 600 and 200: shares .25/.75 and .75/.25, common .5/.5, whatever the sizes."""

    def of(chat: int, code: int) -> Window:
        return {"workload": np.array(["chat"] * chat + ["code"] * code, dtype=object)}

    mix = common_mix(of(100, 300), of(600, 200))
    assert mix.tv_distance == pytest.approx(0.5)
    assert mix.w_base[[0, -1]].tolist() == pytest.approx([2.0, 2 / 3])
    assert mix.w_suspect[[0, -1]].tolist() == pytest.approx([2 / 3, 2.0])
    assert mix.w_base.mean() == pytest.approx(1.0)
    assert mix.w_suspect.mean() == pytest.approx(1.0)
    # Kish: (100 * 2 + 300 * 2/3)^2 / (100 * 4 + 300 * 4/9) = 160000 / 533.3
    assert mix.n_effective == pytest.approx((300.0, 600.0))


def test_what_only_one_window_has_is_left_out_by_name():
    """A new workload of 20 % in the suspect window has no counterpart: weight 0, its name and share are said."""
    base = {"workload": np.array(["chat"] * 500, dtype=object)}
    suspect = {"workload": np.array(["chat"] * 400 + ["batch"] * 100, dtype=object)}
    mix = common_mix(base, suspect)
    assert mix.left_out == ["workload batch (0.0% of the baseline, 20.0% of the suspect)"]
    assert (mix.w_suspect[400:] == 0.0).all()
    assert (mix.w_suspect[:400] == 1.0).all()
    assert mix.n_effective == (500.0, 400.0)
    assert "1 strata with 0.0% of the baseline and 20.0% of the suspect" in text_of(mix)


def test_windows_with_nothing_in_common_cannot_be_compared():
    """Prompts of about 100 and about a billion tokens: no bin reaches across the gap, all weigh 0, and it is said."""
    mix = common_mix(window(500, 1, prompt=100.0), window(900, 2, prompt=1e9))
    assert mix.shifted
    assert mix.n_effective == (0.0, 0.0)
    assert not mix.w_base.any()
    assert not mix.w_suspect.any()
    assert mix.tv_distance > 0.99
    assert "no kind of request in common" in text_of(mix)


def test_a_longer_tail_of_prompts_is_seen():
    """One more percent of very long prompts hardly moves the mix, but decides a P99: it is found and left out."""
    base, suspect = window(3000, 1), window(3000, 2)
    suspect["prompt_tokens"][:60] = 90_000.0
    mix = common_mix(base, suspect)
    assert mix.moved == ("prompt_tokens",)
    assert "prompt length moved in its tail" in text_of(mix)
    assert (mix.w_suspect[:60] == 0.0).all()
    assert sum(mix.n_effective) > 5800


def test_a_small_class_is_not_drowned_by_many_strata():
    """Reports are 4 % of 2,000 requests and then 8 %: over all lengths and tenants the mixes look alike, over workloads they do not.
    At the common 6 % a report counts 1.5 and 0.75 times, and all others together as 94 %."""
    base, suspect = window(2000, 1), window(2000, 2)
    base["workload"][:80] = suspect["workload"][:160] = "report"
    mix = common_mix(base, suspect)
    assert mix.moved == ("workload",)
    assert mix.shifted
    assert "over 3 strata" in text_of(mix)
    assert mix.w_base[0] == pytest.approx(1.5)
    assert mix.w_suspect[0] == pytest.approx(0.75)
    assert mix.w_base[80:].sum() == pytest.approx(0.94 * 2000)
    assert mix.w_suspect[160:].sum() == pytest.approx(0.94 * 2000)


def test_dimensions_that_moved_together_are_seen():
    """Chat and code swap their tenants: no dimension moves alone, the cross does."""
    names = np.array(["chat", "code"] * 300, dtype=object)
    base = {"workload": names, "tenant": np.array(["acme", "zeta"] * 300, dtype=object)}
    suspect = {"workload": names, "tenant": np.array(["acme", "acme", "zeta", "zeta"] * 150, dtype=object)}
    mix = common_mix(base, suspect)
    assert mix.moved == ()
    assert mix.shifted
    assert mix.tv_distance == pytest.approx(0.5)


def test_unknown_is_a_stratum_of_its_own():
    """A tenth without a tenant in both windows is compared with the same tenth; its share moving is a shift."""
    base, suspect = window(600, 1), window(600, 2)
    base["tenant"][:60], suspect["tenant"][:60] = None, None
    base["prompt_tokens"][:30], suspect["prompt_tokens"][:30] = np.nan, np.nan
    assert not common_mix(base, suspect).shifted
    suspect["tenant"][60:300] = None
    mix = common_mix(base, suspect)
    assert mix.moved == ("tenant",)
    assert mix.shifted


def test_a_dimension_that_one_window_does_not_know_is_not_compared():
    """Tenants were not recorded in the baseline: that is no shift, and the reader is told."""
    base, suspect = window(600, 1), window(600, 2)
    base["tenant"] = np.array([None] * 600, dtype=object)
    mix = common_mix(base, suspect)
    assert not mix.shifted
    assert "tenant" not in mix.dimension_shift
    assert "tenant is not known in the baseline window" in text_of(mix)
    del suspect["output_tokens"]
    assert "output length is not known in the suspect window" in text_of(common_mix(base, suspect))


def test_dimensions_that_nobody_recorded_are_passed_over_in_silence():
    """Neither window knows tenants: nothing to compare, nothing to say."""
    base, suspect = window(600, 1), window(600, 2)
    for side in (base, suspect):
        side["tenant"] = np.array([None] * 600, dtype=object)
        side["output_tokens"] = np.full(600, np.nan)
    mix = common_mix(base, suspect)
    assert set(mix.dimension_shift) == {"prompt_tokens", "workload"}
    assert "tenant" not in text_of(mix)


def test_many_tenants_are_compared_by_the_largest_and_the_rest():
    """Of 40 tenants six have names of their own; a shift inside the small ones does not explode the strata."""
    tenants = tuple(f"tenant-{i:02}" for i in range(40))
    base, suspect = window(2000, 1, tenants=tenants), window(2000, 2, tenants=tenants)
    suspect["tenant"][:800] = "tenant-00"
    mix = common_mix(base, suspect)
    assert mix.moved == ("tenant",)
    assert sum(mix.n_effective) > 2000


def test_same_seed_same_weights():
    """The answer is a function of its arguments."""
    base, suspect = window(500, 1), window(500, 2, chat=0.8)
    first, again = common_mix(base, suspect, seed=3), common_mix(base, suspect, seed=3)
    assert (first.w_base == again.w_base).all()
    assert first.statements == again.statements


def test_lists_are_as_good_as_arrays_and_order_is_kept():
    """Weights stand in the order of the requests given."""
    base = {"workload": ["chat", "code"] * 100}
    suspect = {"workload": ["code"] * 150 + ["chat"] * 50}
    mix = common_mix(base, suspect)
    assert mix.w_suspect[0] < 1.0 < mix.w_suspect[-1]
    assert mix.w_base[0] < mix.w_base[1]


def test_an_empty_window_is_not_compared():
    """No request: nothing is weighted and the reader is told."""
    mix = common_mix({"prompt_tokens": []}, {"prompt_tokens": [1.0, 2.0]})
    assert not mix.shifted
    assert mix.w_base.size == 0
    assert (mix.w_suspect == 1.0).all()
    assert "could not be compared" in text_of(mix)


def test_columns_that_do_not_fit_are_refused():
    """Columns of different lengths, or none that is known here."""
    with pytest.raises(DiagnosisError, match="baseline"):
        common_mix({"prompt_tokens": [1.0], "tenant": ["a", "b"]}, {"tenant": ["a"]})
    with pytest.raises(DiagnosisError, match="suspect"):
        common_mix({"tenant": ["a"]}, {"model": ["m"]})


def test_lengths_that_follow_from_another_tenant_are_the_tenants():
    """Long reports went from 10 % to 30 % of the calls, each kind as long as before: all of the longer mean is the shares'."""
    mixes = []
    for share in (0.1, 0.3):
        heavy = int(1000 * share)
        tenants = ["reports"] * heavy + ["chat"] * (1000 - heavy)
        mixes.append({"prompt_tokens": np.array([3000.0] * heavy + [500.0] * (1000 - heavy)), "tenant": tenants})
    mix = common_mix(*mixes)
    assert set(mix.moved) == {"prompt_tokens", "tenant"}
    assert mix.by_category == pytest.approx(1.0)
    assert row_name(mix) == "mix_shift"


def test_lengths_that_grew_within_each_tenant_are_lengths():
    """Shares moved from 10 % to 12 %, and every prompt is twice as long: 2 of 32 parts of the longer mean are the shares'."""
    mixes = []
    for heavy, factor in ((100, 1.0), (120, 2.0)):
        rest = 1000 - heavy
        mixes.append(
            {
                "prompt_tokens": factor * np.array([1000.0] * heavy + [500.0] * rest),
                "tenant": ["a"] * heavy + ["b"] * rest,
            }
        )
    base, suspect = mixes
    assert _between(
        np.array([0] * 100 + [1] * 900 + [0] * 120 + [1] * 880),
        np.concatenate([m["prompt_tokens"] for m in mixes]),
        1000,
    ) == pytest.approx(15.0 / 570.0)
    assert row_name(common_mix(base, suspect)) == "length_shift"
