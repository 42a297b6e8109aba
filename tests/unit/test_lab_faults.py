"""Each fault of the lab does what it says, by the rows that its run leaves; and the catalogue holds what it promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from diagnosis.lab.catalogue import PAIRS, all_faults, find_fault
from diagnosis.lab.fault import Fault, severity_of
from diagnosis.lab.faults.routing import STRAGGLER
from diagnosis.lab.faults.steps import SWAP_S
from diagnosis.lab.faults.telemetry import AHEAD, LIAR
from diagnosis.lab.play import Played, play
from diagnosis.lab.scene import Scene, base_scene
from engine_probe.errors import UsageError

NAMES = """
admission_blocked_on_blocks premature_eviction ttl_expiry preemption_recompute decode_block_shortage block_leak
hotspot_affinity hotspot_straggler hotspot_dead_signal hotspot_tie_breaking hotspot_stale_index
hotspot_unreachable_threshold lookup_overhead eviction_overhead cache_lock_contention tier_slower_than_recompute
tier_saves_nothing tier_never_read transfer_wire transfer_orchestration transfer_failures long_prefill_interference
chunk_budget prefill_backlog decode_backlog decode_bandwidth small_batch speculation_collapse load_step client_retries
length_shift mix_shift prompt_uncacheable reuse_below_unit cold_start slow_steps prefix_caching_off recompile
adapter_swap front_end probe_overhead clock_skew telemetry_contradiction fixed_offset
"""
"""Of the design, section 7."""
DESIGN = set(NAMES.split())
QUIET = {"none", "aa", "innocent_mark", "too_few"}
SMALL = 200
LARGER = {"recompile": 500, "decode_block_shortage": 800, "premature_eviction": 500}
"""Requests of a run in which the fault would not show in so few."""

Rows = dict[str, pa.Table]


def scenes(name: str, requests: int = SMALL) -> tuple[Scene, Scene]:
    """Without and with the fault, at its typical severity."""
    fault = find_fault(name)
    severity = fault.severity.at("typical")
    without = fault.setting(base_scene(requests), severity)
    return without, fault.change(without, severity)


@cache
def played(name: str, *, with_fault: bool) -> Played:
    """A small run of it; each is played once."""
    return play(scenes(name, LARGER.get(name, SMALL))[with_fault], "r")


def rows(name: str, *, with_fault: bool = True) -> Rows:
    return played(name, with_fault=with_fault).tables


def column(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table[name].to_numpy())


def engines_requests(tables: Rows) -> pa.Table:
    return tables["request"].filter(pc.equal(tables["request"]["vantage"], "engine"))


def hit_rate(tables: Rows) -> float:
    requests = engines_requests(tables)
    return float(pc.sum(requests["cached_tokens"]).as_py() or 0) / float(pc.sum(requests["prompt_tokens"]).as_py())


# The catalogue


def test_every_fault_is_a_cause_of_the_design_or_says_that_nothing_is_wrong() -> None:
    """Names are the stable ones, so that a verdict can be held against them."""
    assert set(all_faults()) <= DESIGN | QUIET
    assert set(all_faults()) >= QUIET | {"admission_blocked_on_blocks", "hotspot_straggler", "slow_steps", "load_step"}


@pytest.mark.parametrize("fault", all_faults().values(), ids=lambda fault: fault.name)
def test_what_should_be_said_of_a_fault_makes_sense(fault: Fault) -> None:
    """Causes are named by the design's names, its own first; nothing is both expected and forbidden; silence expects nothing."""
    expected = fault.expected
    assert {*expected.causes, *expected.acceptable, *expected.never} <= DESIGN
    assert not {*expected.causes, *expected.acceptable} & set(expected.never)
    assert expected.is_silent == (not expected.causes)
    if not expected.is_silent:
        assert fault.name in expected.causes
    assert fault.metric in ("ttft", "tpot", "e2e")
    assert fault.what[0].isupper()


@pytest.mark.parametrize("fault", all_faults().values(), ids=lambda fault: fault.name)
def test_severities_lie_in_their_range(fault: Fault) -> None:
    """mild, typical and strong are numbers that `at` takes too; what lies outside is refused with the unit."""
    severity = fault.severity
    for word in ("mild", "typical", "strong"):
        assert severity.at(str(severity.at(word))) == severity.at(word)
    with pytest.raises(UsageError, match="severity '-3' is neither mild"):
        severity.at("-3")
    for nonsense in ("", "nan", "very", "1e999"):
        with pytest.raises(UsageError):
            severity.at(nonsense)


def test_pairs_are_both_faults_each_at_its_own_severity() -> None:
    """A pair's word goes to both: typical is 1.5 times the step time and two resets."""
    fault = find_fault("slow_steps+cold_start")
    assert fault.expected.causes == ("slow_steps", "cold_start")
    assert "slow_steps" not in fault.expected.never
    assert "cold_start" not in fault.expected.never
    assert severity_of(find_fault("slow_steps"), fault.severity.at("typical")) == 1.5
    without = fault.setting(base_scene(SMALL), 1)
    assert len(fault.change(without, 1).hooks) == 1 + 2
    assert [find_fault(name).parts for name in PAIRS] == [tuple(name.split("+")) for name in PAIRS]


@pytest.mark.parametrize(
    "name", ["", "slow_step", "slow_steps+", "slow_steps+slow_steps", "a+b+c", "none+slow_steps", "too_few+slow_steps"]
)
def test_faults_that_are_not_there_are_refused(name: str) -> None:
    """Unknown names list the known ones; a fault is no pair with itself, nor with nothing."""
    with pytest.raises(UsageError):
        find_fault(name)


def test_the_base_scene_is_healthy() -> None:
    """No preemption, no wait for blocks, about half of the prompts from the cache, P99 of TTFT below half a second."""
    tables = rows("none")
    assert pc.sum(tables["request"]["num_preemptions"]).as_py() == 0
    assert pc.sum(pc.struct_field(tables["step"]["waiting_on"].combine_chunks(), "blocks")).as_py() == 0
    assert 0.4 < hit_rate(tables) < 0.7
    ttft = column(tables["request"], "first_token_ns") - column(tables["request"], "arrival_ns")
    assert np.quantile(ttft, 0.99) < 0.5e9
    assert set(tables["request"]["state"].to_pylist()) == {"finished"}


# What each fault changes


def waits_for_blocks(before: Rows, after: Rows) -> None:
    """Steps with requests that wait for blocks: none before."""
    told = [
        pc.sum(pc.struct_field(t["step"]["waiting_on"].combine_chunks(), "blocks")).as_py() for t in (before, after)
    ]
    assert told[0] == 0 < told[1]


def prefixes_are_evicted_and_missed(before: Rows, after: Rows) -> None:
    """More evictions, fewer hits, and the cause of some is the tenant's request."""
    evicted = [t["block"].filter(pc.equal(t["block"]["change"], "evicted")) for t in (before, after)]
    assert evicted[1].num_rows > evicted[0].num_rows
    assert any(str(cause).startswith("b") for cause in evicted[1]["request_id"].to_pylist())
    assert hit_rate(after) < hit_rate(before)


def blocks_expire(before: Rows, after: Rows) -> None:
    """Evictions with the reason ttl, none before."""
    reasons = [set(t["block"]["reason"].to_pylist()) - {None} for t in (before, after)]
    assert "ttl" not in reasons[0]
    assert "ttl" in reasons[1]
    idle = after["block"].filter(pc.equal(after["block"]["reason"], "ttl"))
    assert min(idle["idle_s"].to_pylist()) > 1.0


def blocks_leak(before: Rows, after: Rows) -> None:
    """Callers go away in both runs; only in one are blocks used at the end, when nothing runs any more."""
    assert "aborted" in before["request"]["state"].to_pylist()
    last = [
        t["sample"].filter(pc.equal(t["sample"]["name"], "kv_usage_ratio"))["value"].to_pylist()[-1]
        for t in (before, after)
    ]
    assert last[0] == 0.0 < last[1]


def loads_read_zero(before: Rows, after: Rows) -> None:
    """Every candidate's load is 0 in the router's eyes, while the engines run several at once."""
    believed = [candidate["load"] for row in after["route"]["candidates"].to_pylist() for candidate in row]
    assert set(believed) == {0.0}
    assert max(after["step"]["num_running"].to_pylist()) > 2
    assert any(candidate["load"] for row in before["route"]["candidates"].to_pylist() for candidate in row)


def a_tenant_has_one_worker(before: Rows, after: Rows) -> None:
    """Calls of one tenant lie on one worker; before on all."""
    served = [
        {
            worker
            for tenant, worker in zip(
                t["request"]["tenant"].to_pylist(), t["request"]["worker"].to_pylist(), strict=True
            )
            if tenant == "search"
        }
        for t in (before, after)
    ]
    assert len(served[0]) == 4
    assert len(served[1]) == 1


def one_worker_is_slow(before: Rows, after: Rows) -> None:
    """Decode steps of the straggler take twice the others'."""
    pace = {}
    for worker in ("w0", STRAGGLER):
        steps = after["step"].filter(pc.equal(after["step"]["worker"], worker))
        late = steps.filter(
            pc.greater(steps["at_ns"], played("hotspot_straggler", with_fault=True).start_ns + 2 * 10**9)
        )
        pace[worker] = np.median(column(late.filter(pc.equal(late["prefill_tokens"], 0)), "duration_s"))
    assert pace[STRAGGLER] / pace["w0"] > 1.8


def ties_go_to_the_first(before: Rows, after: Rows) -> None:
    """Of those that match best (and enough) the first is chosen, always; before any."""

    def first_of_equals(tables: Rows) -> list[bool]:
        found = []
        for row in tables["route"].to_pylist():
            matched = [candidate["matched_tokens"] for candidate in row["candidates"]]
            if max(matched) >= 1024:
                found.append(row["chosen"] == f"w{matched.index(max(matched))}")
        return found

    assert all(first_of_equals(after))
    assert not all(first_of_equals(before))


def beliefs_are_stale(before: Rows, after: Rows) -> None:
    """What the router believes of the chosen worker is more often not what the engine finds."""

    def wrong(tables: Rows) -> float:
        found = dict(
            zip(
                tables["request"]["request_id"].to_pylist(), tables["request"]["cached_tokens"].to_pylist(), strict=True
            )
        )
        believed = [
            (row["request_id"], next(c["matched_tokens"] for c in row["candidates"] if c["worker"] == row["chosen"]))
            for row in tables["route"].to_pylist()
        ]
        return float(np.mean([abs(found[name] - tokens) > 512 for name, tokens in believed]))

    assert wrong(after) > 2 * wrong(before)


def hits_are_lost(before: Rows, after: Rows) -> None:
    """Calls go by load and find less."""
    assert hit_rate(after) < 0.8 * hit_rate(before)


def look_ups_cost(before: Rows, after: Rows) -> None:
    """Each request's look-up takes 30 ms and its blocks; before well below 1 ms."""
    assert min(after["request"]["cache_lookup_s"].to_pylist()) >= 0.03
    assert max(before["request"]["cache_lookup_s"].to_pylist()) < 0.001


def some_look_ups_wait(before: Rows, after: Rows) -> None:
    """About three in ten wait for the lock, the others do not."""
    waited = np.mean(column(after["request"], "cache_lookup_s") > 0.001)
    assert 0.2 < waited < 0.4
    assert max(before["request"]["cache_lookup_s"].to_pylist()) < 0.001


def evictions_cost(before: Rows, after: Rows) -> None:
    """Scheduling takes long in steps that evict, and only there."""
    steps = after["step"]
    took, evicted = column(steps, "schedule_s"), column(steps, "blocks_evicted")
    assert took[evicted > 0].mean() > 10 * took[evicted == 0].mean()


def the_recorder_costs(before: Rows, after: Rows) -> None:
    """5 ms of every step are the probe's."""
    assert set(np.round(column(after["step"], "probe_s"), 6)) == {0.005}
    assert set(np.round(column(before["step"], "probe_s"), 6)) == {0.00002}


def long_prompts_come(before: Rows, after: Rows) -> None:
    """Some calls of 12,000 tokens, few of them."""
    long = [sum(tokens == 12_000 for tokens in t["request"]["prompt_tokens"].to_pylist()) for t in (before, after)]
    assert long[0] == 0
    assert 0 < long[1] < 0.02 * after["request"].num_rows


def steps_are_small(before: Rows, after: Rows) -> None:
    """No step computes more than 96 tokens."""
    assert max(np.nan_to_num(column(after["step"], "prefill_tokens")) + column(after["step"], "decode_tokens")) <= 96
    assert max(column(before["step"], "prefill_tokens")) > 96


def seats_are_few(before: Rows, after: Rows) -> None:
    """Never more than nine at once, and some wait for seats."""
    assert max(after["step"]["num_running"].to_pylist()) == 9
    assert pc.sum(pc.struct_field(after["step"]["waiting_on"].combine_chunks(), "seats")).as_py() > 0


def batches_are_fuller(before: Rows, after: Rows) -> None:
    """More at once than the six seats there were."""
    assert max(before["step"]["num_running"].to_pylist()) == 6
    assert max(after["step"]["num_running"].to_pylist()) > 8


def all_steps_are_slower(before: Rows, after: Rows) -> None:
    """Decode steps of one sequence take 1.5 times as long."""
    alone = [
        t["step"].filter(pc.and_(pc.equal(t["step"]["decode_tokens"], 1), pc.equal(t["step"]["prefill_tokens"], 0)))
        for t in (before, after)
    ]
    late = [found.filter(pc.greater(found["at_ns"], played("slow_steps", with_fault=True).start_ns)) for found in alone]
    ratio = np.median(column(late[1], "duration_s")) / np.median(column(late[0], "duration_s"))
    assert ratio == pytest.approx(1.5, rel=0.02)


def the_first_step_of_a_shape_is_long(before: Rows, after: Rows) -> None:
    """Of steps that compute prompts, in classes of 64 tokens, the first of each worker takes about 0.1 s more than those after it."""
    begun_ns = played("recompile", with_fault=True).start_ns
    longer = []
    for tables in (before, after):
        steps = tables["step"].filter(
            pc.and_(pc.greater(tables["step"]["at_ns"], begun_ns), pc.greater(tables["step"]["prefill_tokens"], 0))
        )
        by_class: dict[tuple[str, int], list[float]] = {}
        for step in steps.to_pylist():
            tokens = step["prefill_tokens"] + step["decode_tokens"]
            by_class.setdefault((step["worker"], -(-tokens // 64)), []).append(step["duration_s"])
        longer.append(np.median([first - np.median(later) for first, *later in by_class.values() if later]))
    assert abs(longer[0]) < 0.02
    assert longer[1] == pytest.approx(0.1, abs=0.03)


def adapters_come_and_go(before: Rows, after: Rows) -> None:
    """Twelve are asked for in both; steps that compute prompts take some swaps' time longer on average."""
    mean = []
    for tables in (before, after):
        assert len(set(tables["request"]["model"].to_pylist())) == 12
        steps = tables["step"].filter(pc.greater(tables["step"]["prefill_tokens"], 0))
        mean.append(float(column(steps, "duration_s").mean()))
    assert mean[1] > mean[0] + 0.2 * SWAP_S


def drafts_are_refused(before: Rows, after: Rows) -> None:
    """Of 4 drafts 2.36 are accepted at 0.8 (59 %), and 0.65 at 0.4 (16 %), less at an answer's end."""
    accepted = [
        pc.sum(tables["request"]["accepted_tokens"]).as_py() / pc.sum(tables["request"]["draft_tokens"]).as_py()
        for tables in (before, after)
    ]
    assert accepted == pytest.approx([0.59, 0.16], abs=0.03)


def nothing_is_cached(before: Rows, after: Rows) -> None:
    """The engines say that caching is off; nobody tells of cached tokens."""
    assert set(after["worker"]["prefix_caching"].to_pylist()) == {False}
    assert after["request"]["cached_tokens"].null_count == after["request"].num_rows


def nothing_is_found(before: Rows, after: Rows) -> None:
    """Caching is on, and finds nothing."""
    assert set(after["worker"]["prefix_caching"].to_pylist()) == {True}
    assert hit_rate(after) == 0.0 < hit_rate(before)


def more_arrive(before: Rows, after: Rows) -> None:
    """Four tenths more a second."""
    rates = []
    for tables in (before, after):
        arrivals = column(tables["request"], "arrival_ns")
        rates.append(len(arrivals) / (arrivals.max() - arrivals.min()))
    assert rates[1] / rates[0] == pytest.approx(1.4, rel=0.1)


def callers_ask_again(before: Rows, after: Rows) -> None:
    """Attempts that were given up, others after them, and one call each in the callers' eyes."""
    engines = engines_requests(after)
    assert "client_timeout" in engines["finish_reason"].to_pylist()
    assert max(engines["attempt"].to_pylist()) >= 1
    clients = after["request"].filter(pc.equal(after["request"]["vantage"], "client"))
    assert len(set(clients["request_id"].to_pylist())) == clients.num_rows < engines.num_rows
    assert "aborted" not in before["request"]["state"].to_pylist()


def own_parts_are_longer(before: Rows, after: Rows) -> None:
    """Prompts less the shared 1,024 tokens are 1.7 times as long."""
    own = [column(t["request"], "prompt_tokens").astype(float).mean() - 1024 for t in (before, after)]
    assert own[1] / own[0] == pytest.approx(1.7, rel=0.02)


def reports_are_more(before: Rows, after: Rows) -> None:
    """About a tenth of the calls, 2 % before, of about as many calls."""
    share = [np.mean([name == "report" for name in t["request"]["workload"].to_pylist()]) for t in (before, after)]
    assert share[0] < 0.05 < 0.08 < share[1] < 0.12
    assert after["request"].num_rows == pytest.approx(before["request"].num_rows, rel=0.02)


def caches_are_lost(before: Rows, after: Rows) -> None:
    """Two resets of four workers, marked."""
    marks = after["mark"]["mark"].to_pylist()
    assert marks.count("cache_reset") == 2 * 4
    assert "cache_reset" not in before["mark"]["mark"].to_pylist()


def the_front_end_queues(before: Rows, after: Rows) -> None:
    """Time before the engine is many times what it was."""
    spent = [np.nanmean(column(engines_requests(t), "frontend_s")) for t in (before, after)]
    assert spent[1] > 5 * spent[0]


def heads_are_held_back(before: Rows, after: Rows) -> None:
    """The first token reaches the caller 101 ms after the engine sent it, 1 ms before."""
    for tables, late_ns in ((before, 1_000_000), (after, 101_000_000)):
        sent = dict(
            zip(*(engines_requests(tables)[name].to_pylist() for name in ("request_id", "first_token_ns")), strict=True)
        )
        clients = tables["request"].filter(pc.equal(tables["request"]["vantage"], "client"))
        seen = dict(zip(*(clients[name].to_pylist() for name in ("request_id", "first_token_ns")), strict=True))
        assert {seen[name] - sent[name] for name in sent} == {late_ns}


def a_counter_lies(before: Rows, after: Rows) -> None:
    """It reads 0 while requests hit; everything else is as it was."""
    told = after["sample"].filter(pc.equal(after["sample"]["name"], LIAR))
    assert set(told["value"].to_pylist()) == {0.0}
    assert after["request"].equals(before["request"])
    assert hit_rate(after) > 0.3


def a_clock_is_ahead(before: Rows, after: Rows) -> None:
    """Rows of that worker are half a second later, token by token; nobody else's."""
    for worker, move_ns in ((AHEAD, 500_000_000), ("w0", 0)):
        then, now = (
            engines_requests(t).filter(pc.equal(engines_requests(t)["worker"], worker)) for t in (before, after)
        )
        assert set(column(now, "arrival_ns") - column(then, "arrival_ns")) == {move_ns}
        assert now["token_ns"].to_pylist()[0][0] - then["token_ns"].to_pylist()[0][0] == move_ns
    clients = [t["request"].filter(pc.equal(t["request"]["vantage"], "client")) for t in (before, after)]
    assert clients[0].equals(clients[1])


def a_deployment_is_marked(before: Rows, after: Rows) -> None:
    """One mark more, and nothing else: every other row is the same to the last value."""
    assert after["mark"]["mark"].to_pylist().count("deployed") == 1
    for kind in ("request", "step", "block", "route", "sample"):
        then, now = (tables[kind].drop_columns(["run_id"]) for tables in (before, after))
        for worker in {None, *now["worker"].to_pylist(), *then["worker"].to_pylist()}:
            same = [
                rows.filter(pc.is_null(rows["worker"]) if worker is None else pc.equal(rows["worker"], worker))
                for rows in (then, now)
            ]
            assert same[0].equals(same[1]), (kind, worker)


def _loads(tables: Rows) -> pa.Table:
    return tables["transfer"].filter(pc.equal(tables["transfer"]["outcome"], "ok"))


def loads_are_slow(before: Rows, after: Rows) -> None:
    """The wire of a load takes longer by the ratio of the rates, 20 against 0.9 GB/s; requests wait for it and say so."""
    for tables, rate in ((before, 20e9), (after, 0.9e9)):
        loads = _loads(tables)
        assert loads.num_rows > 20
        assert np.allclose(column(loads, "num_bytes") / column(loads, "wire_s"), rate, rtol=1e-4)
        loaded = tables["block"].filter(pc.equal(tables["block"]["change"], "loaded"))
        assert set(loaded["tier"].to_pylist()) == {"host"}
        assert loaded.num_rows * 2 * 1024 * 1024 == pc.sum(loads["num_bytes"]).as_py()  # 2 MiB a block
    assert pc.sum(after["request"]["kv_load_s"]).as_py() > 5 * pc.sum(before["request"]["kv_load_s"]).as_py()
    assert pc.sum(after["request"]["cached_tokens_host"]).as_py() > 0
    assert pc.sum(pc.struct_field(after["step"]["waiting_on"].combine_chunks(), "dependency")).as_py() > 0


def nothing_is_loaded(before: Rows, after: Rows) -> None:
    """The tier was read, and is hardly any more."""
    assert before["transfer"].num_rows > 20
    assert "transfer" not in after or after["transfer"].num_rows < 0.5 * before["transfer"].num_rows


def fewer_prefill(before: Rows, after: Rows) -> None:
    """One worker with this role, two before."""
    assert [t["worker"]["role"].to_pylist().count("prefill") for t in (before, after)] == [2, 1]


def fewer_decode(before: Rows, after: Rows) -> None:
    """One worker with this role, two before."""
    assert [t["worker"]["role"].to_pylist().count("decode") for t in (before, after)] == [2, 1]


def the_wire_is_slow(before: Rows, after: Rows) -> None:
    """Hand-overs at 2.5 in place of 25 GB/s: kv_transfer grows, what is orchestrated without a byte does not."""
    for tables, rate in ((before, 25e9), (after, 2.5e9)):
        loads = _loads(tables)
        moved = loads.filter(pc.greater(loads["num_bytes"], 0))
        assert np.allclose(column(moved, "num_bytes") / column(moved, "wire_s"), rate, rtol=1e-4)
        assert set(loads["source_worker"].to_pylist()) == {"w0", "w1"}
        assert set(loads["target_worker"].to_pylist()) == {"w2", "w3"}
    assert pc.sum(after["request"]["kv_transfer_s"]).as_py() > 5 * pc.sum(before["request"]["kv_transfer_s"]).as_py()


def hand_overs_wait(before: Rows, after: Rows) -> None:
    """At least 100 ms pass before the first byte, 2 ms before; the two workers' rows of a call have one id."""
    assert min(_loads(after)["wait_s"].to_pylist()) >= 0.1
    assert min(_loads(before)["wait_s"].to_pylist()) == pytest.approx(0.002)
    names = engines_requests(after)["request_id"].to_pylist()
    assert len(names) > 1.8 * len(set(names))
    assert {row["role"] for row in after["worker"].to_pylist()} == {"prefill", "decode"}


def hand_overs_break(before: Rows, after: Rows) -> None:
    """About 8 % fall back after half a second, and the decode worker computes the prompt."""
    outcomes = after["transfer"]["outcome"].to_pylist()
    assert 0.03 < outcomes.count("fell_back") / len(outcomes) < 0.14
    assert "fell_back" not in before["transfer"]["outcome"].to_pylist()


def prefills_wait_for_room(before: Rows, after: Rows) -> None:
    """Some hand-overs wait long for blocks of a decode worker, none before; nobody's answer is lost."""
    waited = [max(t["transfer"]["wait_s"].to_pylist()) for t in (before, after)]
    assert waited[1] > 5 * waited[0]
    clients = after["request"].filter(pc.equal(after["request"]["vantage"], "client"))
    assert set(clients["state"].to_pylist()) == {"finished"}


CHANGES: dict[str, Callable[[Rows, Rows], None]] = {
    "premature_eviction": prefixes_are_evicted_and_missed,
    "ttl_expiry": blocks_expire,
    "block_leak": blocks_leak,
    "hotspot_dead_signal": loads_read_zero,
    "hotspot_affinity": a_tenant_has_one_worker,
    "hotspot_straggler": one_worker_is_slow,
    "hotspot_tie_breaking": ties_go_to_the_first,
    "hotspot_stale_index": beliefs_are_stale,
    "hotspot_unreachable_threshold": hits_are_lost,
    "lookup_overhead": look_ups_cost,
    "cache_lock_contention": some_look_ups_wait,
    "eviction_overhead": evictions_cost,
    "probe_overhead": the_recorder_costs,
    "long_prefill_interference": long_prompts_come,
    "chunk_budget": steps_are_small,
    "small_batch": seats_are_few,
    "decode_bandwidth": batches_are_fuller,
    "slow_steps": all_steps_are_slower,
    "recompile": the_first_step_of_a_shape_is_long,
    "adapter_swap": adapters_come_and_go,
    "speculation_collapse": drafts_are_refused,
    "prefix_caching_off": nothing_is_cached,
    "prompt_uncacheable": nothing_is_found,
    "reuse_below_unit": nothing_is_found,
    "load_step": more_arrive,
    "client_retries": callers_ask_again,
    "length_shift": own_parts_are_longer,
    "mix_shift": reports_are_more,
    "cold_start": caches_are_lost,
    "tier_slower_than_recompute": loads_are_slow,
    "tier_never_read": nothing_is_loaded,
    "tier_saves_nothing": nothing_is_loaded,
    "prefill_backlog": fewer_prefill,
    "decode_backlog": fewer_decode,
    "transfer_wire": the_wire_is_slow,
    "transfer_orchestration": hand_overs_wait,
    "transfer_failures": hand_overs_break,
    "decode_block_shortage": prefills_wait_for_room,
    "front_end": the_front_end_queues,
    "fixed_offset": heads_are_held_back,
    "telemetry_contradiction": a_counter_lies,
    "clock_skew": a_clock_is_ahead,
    "innocent_mark": a_deployment_is_marked,
    "admission_blocked_on_blocks": waits_for_blocks,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_changes_what_it_says(name: str) -> None:
    """By the rows of a small run without and with it."""
    CHANGES[name](rows(name, with_fault=False), rows(name))


def test_a_preemption_storm_preempts() -> None:
    """Requests give their blocks back and compute again; nobody does before. It needs its full load: a strong one of 500."""
    fault = find_fault("preemption_recompute")
    without = fault.setting(base_scene(500), fault.severity.strong)
    tables = play(fault.change(without, fault.severity.strong), "r").tables
    assert pc.sum(tables["request"]["num_preemptions"]).as_py() > 0
    assert pc.sum(tables["request"]["recomputed_tokens"]).as_py() > 0


def test_every_fault_has_its_check() -> None:
    """Whoever adds a fault says by which rows it shows."""
    others = {"none", "aa", "too_few", "preemption_recompute"}
    assert set(CHANGES) | others == set(all_faults())
