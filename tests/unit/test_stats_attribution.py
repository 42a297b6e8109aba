"""Which cause owns how much of the change: diagnosis/attribution/shapley.py, diagnosis/attribution/arms.py, diagnosis/attribution/coalitions.py, diagnosis/attribution/overlap.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from diagnosis.attribution.arms import Arm
from diagnosis.attribution.coalitions import Game, shapley_matrix
from diagnosis.attribution.overlap import give_back
from diagnosis.attribution.shapley import Attribution, affordable, attribute
from diagnosis.statistics.quantiles import nearest_rank
from engine_probe.errors import BadWindow, DiagnosisError, UsageError


def rows_of(found: Attribution) -> dict[str, float]:
    return {row.name: row.quantile_s for row in found.rows}


def eviction_alone() -> tuple[np.ndarray, np.ndarray]:
    """20 requests that queue 0.1, 0.2 .. 2.0 s; the suspect window adds 3 s of eviction to two of them (10 %)."""
    queue = np.arange(1, 21) / 10.0
    eviction = np.zeros(20)
    eviction[[4, 10]] = 3.0  # the requests that queue 0.5 s and 1.1 s
    return np.stack([queue, np.zeros(20)], axis=1), np.stack([queue, eviction], axis=1)


def test_eviction_alone_owns_all_of_the_change_it_caused():
    """P95 goes from 1.9 s (19th of 20) to 3.5 s (0.5 queue + 3.0 eviction): 1.6 s, all eviction's, none the queue's.

    An Euler allocation of the difference compares the request at P95 with the one at P95 before: the queue would get
    0.5 - 1.9 = -1.4 s (-88 %) and eviction 3.0 s (188 %), though nothing happened to the queue.
    """
    base, suspect = eviction_alone()
    found = attribute(["queue", "eviction"], base, suspect, "0.95")
    assert found.delta_quantile_s == pytest.approx(1.6)
    assert rows_of(found) == pytest.approx({"queue": 0.0, "eviction": 1.6}, abs=1e-12)
    assert found.dependence.quantile_s == 0.0
    assert found.delta_mean_s == pytest.approx(0.3)
    at_p95_before, at_p95 = base[base.sum(axis=1) == 1.9][0], suspect[suspect.sum(axis=1) == 3.5][0]
    assert (at_p95 - at_p95_before).tolist() == pytest.approx([-1.4, 3.0])


def test_eviction_alone_leaves_the_queue_zero_within_its_interval():
    """Two windows of 1,500 independent requests, eviction injected into 10 % of the second: the queue's interval has 0."""
    rng = np.random.default_rng(0)
    queue_b, queue_s = rng.exponential(0.1, 1500), rng.exponential(0.1, 1500)
    eviction = np.where(rng.random(1500) < 0.1, rng.exponential(1.0, 1500), 0.0)
    base, suspect = np.stack([queue_b, np.zeros(1500)], axis=1), np.stack([queue_s, eviction], axis=1)
    found = attribute(["queue", "eviction"], base, suspect, "0.99")
    queue, evicted = found.row("queue"), found.row("eviction")
    assert queue is not None
    assert evicted is not None
    assert queue.interval_95 is not None
    assert queue.interval_95[0] <= 0.0 <= queue.interval_95[1]
    assert abs(queue.quantile_s) < 0.05 * found.delta_quantile_s
    assert evicted.quantile_s == pytest.approx(found.delta_quantile_s, rel=0.1)
    assert evicted.interval_95 is not None
    assert evicted.interval_95[0] > 0.0
    assert found.first_share["eviction"] == 1.0
    assert found.material_share == {"queue": 0.0, "eviction": 1.0}


def test_two_causes_that_hit_different_requests_share_by_what_each_would_add():
    """Ten requests of 1 s; one gets 4 s of a, another 2 s of b; P90 is the second largest.

    v() = 1, v(a) = 1, v(b) = 1, v(a, b) = 3: each alone moves nothing, together they move 2 s, so each owns 1 s.
    """
    base = np.column_stack([np.ones(10), np.zeros(10), np.zeros(10)])
    suspect = base.copy()
    suspect[0, 1], suspect[1, 2] = 4.0, 2.0
    found = attribute(["work", "a", "b"], base, suspect, "0.9")
    assert found.delta_quantile_s == pytest.approx(2.0)
    assert rows_of(found) == pytest.approx({"work": 0.0, "a": 1.0, "b": 1.0}, abs=1e-12)


def test_causes_that_newly_coincide_make_the_row_dependence():
    """In both windows a and b are 0, 0, 0, 2; in the suspect window the two fall on the same request.

    P75 of four is the third smallest: of 0, 0, 2, 2 it is 2, of 0, 0, 0, 4 it is 0. No part changed its sizes, so no
    row moves; the change of -2 s is all dependence.
    """
    base = np.array([[0.0, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    suspect = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    found = attribute(["a", "b"], base, suspect, "0.75")
    assert found.delta_quantile_s == -2.0
    assert rows_of(found) == {"a": 0.0, "b": 0.0}
    assert found.dependence.quantile_s == -2.0
    assert found.dependence.mean_s == 0.0


def test_what_parts_meet_less_often_is_taken_from_who_grew():
    """In the baseline 2 s of a and 2 s of b fall on one request (the largest: 4 s); then a takes 5 s, on another than b: 5 s.

    Sizes alone, a adds 3 s in whatever order (v() = v(b) = 2, v(a) = v(a, b) = 5), and that they meet no more takes 2 s away
    (2 - 4). The largest rose by 1 s: no more than that is a's.
    """
    base = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    suspect = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 2.0], [5.0, 0.0]])
    found = attribute(["a", "b"], base, suspect, "0.9")
    assert found.delta_quantile_s == 1.0
    assert rows_of(found) == pytest.approx({"a": 1.0, "b": 0.0})
    assert found.dependence.quantile_s == 0.0
    assert found.row("a").mean_s == pytest.approx(0.75)  # 3 s more on one of four: the mean has no overlap


def test_overlap_is_given_back_in_proportion_by_rows_that_go_with_the_change():
    """Replicate by replicate: 3 + 1 - 1 s of rows less 1 s of overlap are 2 s, and the 4 s that rose give back a quarter each.

    A fall is the same the other way round. Overlap that goes with the change, or with no change at all, is nobody's.
    """
    rows = np.array([[3.0, 1.0, -1.0], [-3.0, -1.0, 1.0], [3.0, 1.0, -1.0], [1.0, 0.0, 0.0]])
    told, dependence = give_back(rows, np.array([-1.0, 1.0, 1.0, -1.0]))
    assert told.tolist() == [[2.25, 0.75, -1.0], [-2.25, -0.75, 1.0], [3.0, 1.0, -1.0], [1.0, 0.0, 0.0]]
    assert dependence.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_identical_windows_give_exact_zeros():
    """Whatever ties and correlations there are: not small rows, but 0.0, also for mean and shortfall."""
    rng = np.random.default_rng(0)
    parts = np.round(rng.exponential(size=(300, 5)), 1)
    parts[rng.random((300, 5)) < 0.4] = 0.0
    for weights in (None, rng.uniform(0.5, 2.0, 300)):
        found = attribute(list("abcde"), parts, parts, "0.95", w_base=weights, w_suspect=weights, replicates=3)
        for row in [*found.rows, found.dependence]:
            assert (row.mean_s, row.quantile_s, row.es_s) == (0.0, 0.0, 0.0)
        assert set(found.first_share.values()) == {0.0}


def test_permuting_the_names_permutes_the_rows():
    """A part's row does not depend on where in the list it stands."""
    rng = np.random.default_rng(1)
    base, suspect = rng.exponential(size=(200, 4)), rng.exponential([1.0, 1.2, 1.5, 2.0], size=(200, 4))
    base[rng.random((200, 4)) < 0.5] = 0.0
    names = ["queue", "prefill", "decode", "load"]
    expected = rows_of(attribute(names, base, suspect, "0.9", replicates=0))
    for order in itertools.permutations(range(4)):
        chosen = list(order)
        found = attribute([names[k] for k in chosen], base[:, chosen], suspect[:, chosen], "0.9", replicates=0)
        assert rows_of(found) == pytest.approx(expected, abs=1e-12)
        assert [row.name for row in found.rows] == [names[k] for k in chosen]


def test_parts_that_hardly_differ_are_reported_inside_other():
    """Two parts of microseconds and an absent one beside two that matter: one row `other`, and it names them."""
    rng = np.random.default_rng(2)
    scale = [0.1, 1e-6, 1.0, 1e-6, 0.0]
    base, suspect = rng.exponential(scale, (400, 5)), rng.exponential(scale, (400, 5)) * [3, 1, 3, 1, 1]
    found = attribute(["queue", "lookup", "prefill", "alloc", "transfer"], base, suspect, "0.95", replicates=5)
    assert [row.name for row in found.rows] == ["queue", "prefill", "other"]
    assert found.merged == ["alloc", "lookup", "transfer"]
    assert found.row("lookup") == found.row("other")
    assert found.row("nothing") is None


def test_at_most_max_groups_rows_are_kept():
    """Twelve parts that all differ: the seven that differ most and `other`."""
    rng = np.random.default_rng(3)
    names = [f"part{k:02}" for k in range(12)]
    base, suspect = rng.exponential(1.0, (300, 12)), rng.exponential(np.linspace(1.2, 5.0, 12), (300, 12))
    found = attribute(names, base, suspect, "0.9", replicates=0)
    assert [row.name for row in found.rows] == [*names[5:], "other"]
    assert found.merged == names[:5]
    assert len(attribute(names, base, suspect, "0.9", replicates=0, max_groups=3).rows) == 3


def test_all_zero_windows_have_nothing_to_attribute():
    """Nothing happened to anyone: one row of zeros."""
    found = attribute(["a", "b"], np.zeros((30, 2)), np.zeros((40, 2)), "0.9", replicates=3)
    assert [(row.name, row.quantile_s) for row in found.rows] == [("other", 0.0)]
    assert found.delta_quantile_s == 0.0


def test_one_request_in_each_window_is_attributed_without_an_interval():
    """The smallest windows there are: the whole difference, by part, and no claim about its certainty."""
    found = attribute(["a", "b"], np.array([[1.0, 2.0]]), np.array([[4.0, 2.5]]), "0.99")
    assert rows_of(found) == pytest.approx({"a": 3.0, "b": 0.5})
    assert found.replicates == 0
    assert all(row.interval_95 is None and row.mean_interval_95 is None for row in found.rows)
    assert found.reason is not None


def test_few_requests_get_shares_but_no_interval_of_the_quantile():
    """Sixty requests cannot carry P99: its rows have no interval, those of the mean have, and the reason is said."""
    rng = np.random.default_rng(4)
    base, suspect = rng.exponential(1.0, (60, 2)), rng.exponential([3.0, 1.0], (60, 2))
    found = attribute(["a", "b"], base, suspect, "0.99")
    assert all(row.interval_95 is None for row in found.rows)
    assert all(row.mean_interval_95 is not None for row in found.rows)
    assert found.reason is not None
    assert "0.99" in found.reason
    assert found.first_share_mean["a"] > 0.9


@pytest.mark.parametrize("q", ["0.5", "0.9", "0.99"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_game_agrees_with_its_definition(q: str, weighted: bool):
    """Presorted, pruned and banded, the game gives what putting causes back one by one and sorting gives."""
    rng = np.random.default_rng(5)
    base, suspect = rng.exponential(1.0, (83, 3)), rng.exponential([1.0, 2.0, 1.5], (120, 3))
    w_b, w_s = (rng.uniform(0.2, 3.0, 83), rng.uniform(0.2, 3.0, 120)) if weighted else (None, None)
    found = attribute(list("abc"), base, suspect, q, w_base=w_b, w_suspect=w_s, replicates=2)
    expected, dependence = given_back(*definition(base, suspect, q, w_b, w_s))
    assert [row.quantile_s for row in found.rows] == pytest.approx(expected, abs=1e-12)
    assert found.dependence.quantile_s == pytest.approx(dependence, abs=1e-12)


def definition(
    base: np.ndarray, suspect: np.ndarray, q: str, w_b: np.ndarray | None, w_s: np.ndarray | None
) -> tuple[list[float], float]:
    """Shapley rows and dependence by definition: average over all orders in which causes are let in, no ties."""
    w_b = np.ones(len(base)) if w_b is None else w_b
    w_s = np.ones(len(suspect)) if w_s is None else w_s
    matched = np.empty_like(suspect)
    for k in range(suspect.shape[1]):
        order = np.argsort(base[:, k])
        reached = np.cumsum(w_b[order])
        for i, value in enumerate(suspect[:, k]):
            rank = (w_s[suspect[:, k] < value].sum() + w_s[i] / 2) / w_s.sum()
            matched[i, k] = base[order[np.flatnonzero(reached >= rank * w_b.sum())[0]], k]

    def value_of(inside: Sequence[int]) -> float:
        mixed = matched.copy()
        mixed[:, list(inside)] = suspect[:, list(inside)]
        return nearest_rank(mixed.sum(axis=1), q, w_s)

    orders = list(itertools.permutations(range(suspect.shape[1])))
    rows = [
        float(np.mean([value_of(o[: o.index(k) + 1]) - value_of(o[: o.index(k)]) for o in orders]))
        for k in range(suspect.shape[1])
    ]
    return rows, value_of([]) - nearest_rank(base.sum(axis=1), q, w_b)


def given_back(rows: list[float], dependence: float) -> tuple[list[float], float]:
    """Rows whose change rises: where dependence takes from it, rows above 0 bear that by their seconds."""
    change, gained = sum(rows) + dependence, sum(row for row in rows if row > 0)
    assert change > 0
    if dependence >= 0:
        return rows, dependence
    return [row + dependence * row / gained if row > 0 else row for row in rows], 0.0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "q"), [(40, "0.5"), (700, "0.95"), (1500, "0.99")])
def test_pruning_never_changes_a_value(n: int, q: str, weighted: bool, monkeypatch: pytest.MonkeyPatch):
    """Points and replicates are the same when everyone is looked at: no band, no bound, no request passed over."""
    rng = np.random.default_rng(n)
    arms = []
    for side, size in enumerate((n, n // 2)):
        columns = np.round(rng.exponential(1.0 + side, (3, size)), 1)
        columns[rng.random(columns.shape) < 0.4] = 0.0
        weights = rng.uniform(0.2, 3.0, size) if weighted else None
        arms.append(Arm(columns, ["a", "b", "c"], weights, None, q, seed=side))
    game = Game(arms[0], arms[1], q)
    drawn = [(arms[0].itself(), arms[1].itself()), *zip(arms[0].draw(5, 1, 2), arms[1].draw(5, 2, 2), strict=True)]
    assert [len(base.mass) for base, _ in drawn] == [1, 2, 2, 1]
    pruned = [game.play(*some) for some in drawn]
    monkeypatch.setattr(Arm, "stays_in_band", lambda _self, _through, _k, total: np.zeros(len(total), dtype=bool))
    monkeypatch.setattr(
        Game, "_can_matter", lambda _self, own, _matched, held, _total: [np.arange(own.shape[1])] * len(held)
    )
    for quick, some in zip(pruned, drawn, strict=True):
        full = game.play(*some)
        for name in ("rows", "dependence", "es_rows", "es_dependence", "mean_rows"):
            assert getattr(quick, name) == pytest.approx(getattr(full, name), abs=1e-12)


def test_shapley_matrix_by_hand():
    """Two players with v() = 0, v(a) = 1, v(b) = 3, v(a, b) = 10: a owns (1 + 7) / 2, b owns (3 + 9) / 2."""
    assert (shapley_matrix(2) @ np.array([0.0, 1.0, 3.0, 10.0])).tolist() == [4.0, 6.0]
    assert shapley_matrix(0).shape == (0, 1)


def test_arms_with_repeats_resample_the_repeats():
    """Where each repeat had its own speed, resampling repeats makes the row less certain than resampling requests."""
    rng = np.random.default_rng(6)
    repeat = np.repeat(np.arange(12), 100)
    base = rng.exponential(1.0, (1200, 2)) * (1.0 + 0.5 * rng.random(12))[repeat][:, None]
    suspect = rng.exponential(1.0, (1200, 2)) * (1.0 + 0.5 * rng.random(12))[repeat][:, None]
    by_repeat = attribute(["a", "b"], base, suspect, "0.9", repeat_base=repeat, repeat_suspect=repeat)
    by_request = attribute(["a", "b"], base, suspect, "0.9")
    widths = [r.rows[0].mean_interval_95[1] - r.rows[0].mean_interval_95[0] for r in (by_repeat, by_request)]  # type: ignore[index]
    assert widths[0] > 1.3 * widths[1]


def test_requests_of_weight_zero_are_left_out():
    """A request that the common mix leaves out changes nothing, however slow it was."""
    rng = np.random.default_rng(7)
    base, suspect = rng.exponential(1.0, (100, 2)), rng.exponential(2.0, (100, 2))
    more = np.vstack([suspect, [[1e6, 1e6]]])
    weights = np.append(np.ones(100), 0.0)
    left_out = attribute(["a", "b"], base, more, "0.9", w_suspect=weights)
    assert left_out.rows == attribute(["a", "b"], base, suspect, "0.9").rows


def test_same_seed_same_answer_in_one_thread_or_two(monkeypatch: pytest.MonkeyPatch):
    """The answer is a function of its arguments; without ties the seed decides the intervals alone."""
    rng = np.random.default_rng(8)
    base, suspect = rng.exponential(1.0, (1500, 3)), rng.exponential(1.5, (1500, 3))
    one = attribute(list("abc"), base, suspect, "0.95", replicates=20, seed=1)
    monkeypatch.setattr("diagnosis.attribution.shapley.WORK_PER_THREAD", 0.0)
    two = attribute(list("abc"), base, suspect, "0.95", replicates=20, seed=1)
    assert one.rows == two.rows
    assert one.material_share == two.material_share
    other = attribute(list("abc"), base, suspect, "0.95", replicates=20, seed=2)
    assert rows_of(other) == rows_of(one)
    assert other.rows != one.rows


def test_large_windows_draw_fewer_replicates():
    """Three hundred million numbers are about a second; below 40 replicates an interval would mean little."""
    assert affordable(200, 1_000_000) == 200
    assert affordable(200, 3_000_000) == 100
    assert affordable(200, 1_000_000_000) == 40
    assert affordable(10, 1_000_000_000) == 10


@pytest.mark.parametrize(
    ("names", "base", "suspect", "message"),
    [
        ([], np.ones((3, 0)), np.ones((3, 0)), "different names"),
        (["a", "a"], np.ones((3, 2)), np.ones((3, 2)), "different names"),
        (["a"], np.ones((3, 2)), np.ones((3, 1)), "baseline parts have shape"),
        (["a"], np.ones((3, 1)), np.ones(3), "suspect parts have shape"),
        (["a"], np.ones((3, 1)), np.array([[1.0], [np.nan]]), "suspect parts hold unknown"),
        (["a"], np.array([[np.inf]]), np.ones((3, 1)), "baseline parts hold unknown"),
    ],
)
def test_parts_that_do_not_fit_are_refused(names: list, base: np.ndarray, suspect: np.ndarray, message: str):
    """The error says which window and what is wrong with it."""
    with pytest.raises(DiagnosisError, match=message):
        attribute(names, base, suspect, "0.9")


def test_bad_windows_weights_and_quantiles_are_refused():
    """No request, weights that do not fit, P100, and a game too large to play."""
    ones = np.ones((3, 1))
    with pytest.raises(BadWindow, match="suspect window holds no request"):
        attribute(["a"], ones, np.ones((0, 1)), "0.9")
    with pytest.raises(BadWindow, match="baseline"):
        attribute(["a"], ones, ones, "0.9", w_base=np.zeros(3))
    with pytest.raises(DiagnosisError, match="suspect weights"):
        attribute(["a"], ones, ones, "0.9", w_suspect=np.array([1.0, -1.0, 1.0]))
    with pytest.raises(DiagnosisError, match="below 1"):
        attribute(["a"], ones, ones, "1")
    with pytest.raises(DiagnosisError, match="groups"):
        attribute(["a"], ones, ones, "0.9", max_groups=13)
    with pytest.raises(UsageError):
        attribute(["a"], ones, ones, "99")
