"""Speculation, adapters and shapes in virtual time: what they take, and that no token and no block is lost by them."""

from __future__ import annotations

from typing import Any

import pytest

from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.fleet.build import FleetSettings, build_fleet, recorders
from engine_probe.engine.roofline.extras import Adapters, ExtendedExecutor, Extras, Shapes, Speculation
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.errors import UsageError
from engine_probe.sending.sink import MemorySink

SHAPE, HARDWARE = find_shape("llama-3-8b"), find_hardware("a100")
TRAFFIC = Traffic(num_requests=60, rate=10, groups=3, shared_tokens=256, output_tokens=Lengths(1, 64))


def executor(**extras: Any) -> ExtendedExecutor:
    return ExtendedExecutor(SHAPE, HARDWARE, VirtualClock(0), num_blocks=1000).extend(Extras(**extras), 1)


def prompt(tokens: int, model: str | None = None) -> StepPlan:
    columns = {} if model is None else {"model": model}
    sequence = Sequence("r", tokens, SamplingParams(max_tokens=8), 0, columns=columns)
    return StepPlan(prefills=[Chunk(sequence, 0, tokens, True)])


def taken_s(engine: ExtendedExecutor, plan: StepPlan) -> float:
    before = engine.clock.monotonic_ns()
    engine.execute(plan)
    return (engine.clock.monotonic_ns() - before) / 1e9


def played(extras: Extras | None, traffic: Traffic = TRAFFIC, **changes: Any) -> tuple[Any, MemorySink]:
    sink = MemorySink()
    fleet = build_fleet(FleetSettings(SHAPE, HARDWARE, num_blocks=1000, extras=extras, **changes), sink)
    tally = fleet.run(traffic.calls())
    fleet.check_integrity()
    for recorder in recorders(fleet):
        recorder.close()
    return tally, sink


def test_a_swap_is_taken_once_while_the_adapter_holds_its_slot() -> None:
    """Two slots: a, b, a, c, b takes a swap for a, b, c, and for b again, which c pushed out; no adapter takes none."""
    engine = executor(adapters=Adapters(slots=2, swap_s=0.5))
    plain = taken_s(engine, prompt(100))
    beside = [round(taken_s(engine, prompt(100, name)) - plain, 6) for name in "abacb"]
    assert beside == [0.5, 0.5, 0.0, 0.5, 0.5]


def test_the_first_step_of_a_class_compiles() -> None:
    """Classes of 100 tokens: 90 compiles, 40 is of the same class, 140 is not; what was forgotten is compiled again."""
    engine = executor(shapes=Shapes(class_tokens=100, compile_s=2.0))
    plain = executor()
    beside = [round(taken_s(engine, prompt(n)) - taken_s(plain, prompt(n)), 6) for n in (90, 40, 140)]
    assert beside == [2.0, 0.0, 2.0]
    engine.forget_shapes()
    assert taken_s(engine, prompt(90)) > 2.0


def test_speculation_gives_each_answer_its_tokens_and_no_more() -> None:
    """As many tokens as without; of 4 drafts at 0.8 a step keeps 2.36 + its own (0.8 + 0.64 + 0.512 + 0.41), less at an answer's end."""
    plain, without = played(None)
    told, sink = played(Extras(speculation=Speculation(4, 0.8)))
    assert told.output_tokens == plain.output_tokens
    rows = sink.table("request").to_pylist()
    assert sorted((r["request_id"], r["output_tokens"]) for r in rows) == sorted(
        (r["request_id"], r["output_tokens"]) for r in without.table("request").to_pylist()
    )
    for row in rows:
        assert sum(row["token_counts"] or [1] * len(row["token_ns"])) == row["output_tokens"]
    drafted, accepted = (sum(row[name] or 0 for row in rows) for name in ("draft_tokens", "accepted_tokens"))
    steps = drafted / 4
    assert 1.6 < accepted / steps <= 2.5
    assert sum(row["output_tokens"] - 1 for row in rows) == steps + accepted
    assert all(row["draft_tokens"] is None for row in without.table("request").to_pylist())
    counters = {row["name"]: row["value"] for row in sink.table("sample").to_pylist()}  # the last of each
    assert (counters["draft_tokens_total"], counters["accepted_tokens_total"]) == (drafted, accepted)
    assert "draft_tokens_total" not in without.table("sample").column("name").to_pylist()


def test_speculation_that_is_never_accepted_costs_time() -> None:
    """Every draft is refused: as many steps as without, each of them longer."""
    plain, _ = played(None)
    told, sink = played(Extras(speculation=Speculation(4, 0.0)))
    assert told.virtual_s >= plain.virtual_s
    assert all(row["accepted_tokens"] in (0, None) for row in sink.table("request").to_pylist())


def test_speculation_in_a_pool_that_is_too_small_loses_nothing() -> None:
    """Blocks run out while drafts are accepted: requests are preempted, all of them end."""
    sink = MemorySink()
    settings = FleetSettings(SHAPE, HARDWARE, num_blocks=60, extras=Extras(speculation=Speculation(8, 0.9)))
    fleet = build_fleet(settings, sink)
    traffic = Traffic(
        num_requests=60, rate=50, shared_tokens=0, own_tokens=Lengths(64, 200), output_tokens=Lengths(60, 90)
    )
    tally = fleet.run(traffic.calls())
    fleet.check_integrity()
    assert (tally.finished, tally.stuck) == (60, 0)


def test_calls_name_their_adapters() -> None:
    """Each shared prefix belongs to one of two adapters, and rows say which was asked for."""
    _, sink = played(Extras(adapters=Adapters(1, 0.01)), Traffic(num_requests=40, rate=10, groups=4, adapters=2))
    models: dict[int, set[str]] = {}
    for row in sink.table("request").to_pylist():
        models.setdefault(row["prefix_hash"] or 0, set()).add(row["model"])
    assert set().union(*models.values()) == {"adapter-0", "adapter-1"}
    assert all(len(found) == 1 for prefix, found in models.items() if prefix)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Speculation(draft_tokens=0),
        lambda: Speculation(acceptance=1.0),
        lambda: Adapters(slots=0),
        lambda: Adapters(swap_s=-1.0),
        lambda: Shapes(class_tokens=0),
        lambda: Shapes(compile_s=float("nan")),
        lambda: Traffic(adapters=-1),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        wrong()
