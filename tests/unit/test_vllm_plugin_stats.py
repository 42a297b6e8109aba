"""vLLM's statistics objects become rows: every number by hand, every attribute may be missing."""

from __future__ import annotations

import enum
from types import SimpleNamespace as Fake
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.vllm.facts import Geometry, geometry_of, read, whole, worker_row
from engine_probe.vllm.stats import FirstTokens, StepRows, request_rows

S = 1_000_000_000
T0 = 1_700_000_000 * S


class FinishReason(enum.IntEnum):
    """As in vLLM: a number that prints its word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2

    def __str__(self) -> str:
        return self.name.lower()


def finished(**changes: Any) -> Fake:
    facts: dict[str, Any] = {
        "finish_reason": FinishReason.LENGTH,
        "request_id": "cmpl-abc-0",
        "e2e_latency": 2.0,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 64,
        "num_preemptions": 1,
        "num_generation_tokens": 9,
        "queued_time": 0.5,
        "prefill_time": 0.25,
        "decode_time": 1.0,
        "inference_time": 1.25,
    }
    return Fake(**(facts | changes))


def iteration(*requests: Fake, stamp: float = 1_700_000_010.0, **changes: Any) -> Fake:
    facts: dict[str, Any] = {
        "iteration_timestamp": stamp,
        "num_generation_tokens": 7,
        "prompt_token_stats": Fake(computed=36, total=100),
        "num_preempted_reqs": 2,
        "finished_requests": list(requests),
    }
    return Fake(**(facts | changes))


def scheduler(**changes: Any) -> Fake:
    facts: dict[str, Any] = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 4,
        "num_skipped_waiting_reqs": 1,
        "kv_cache_usage": 0.25,
        "iteration_details": None,
        "prefix_cache_stats": Fake(reset=False, preempted_queries=150, preempted_hits=96),
        "connector_prefix_cache_stats": None,
    }
    return Fake(**(facts | changes))


KNOWN = Geometry(num_blocks=40, kv_bytes_per_block=16_384, prefix_caching=True, policy="fcfs", model="tiny")


def test_phases_and_instants_of_a_request_sum_to_its_latency() -> None:
    """Arrival + front end + queue + prefill is the first token, + decode is the end, exactly."""
    (row,) = request_rows(iteration(finished()), "w", KNOWN, 0)
    # end 10 s after T0; arrival 2 s earlier; decode 1 s -> first token at +9 s; prefill 0.25 s -> scheduled at +8.75 s.
    assert row["end_ns"] == row["at_ns"] == row["last_token_ns"] == T0 + 10 * S
    assert row["arrival_ns"] == T0 + 8 * S
    assert row["first_token_ns"] == T0 + 9 * S
    assert row["first_scheduled_ns"] == T0 + 8_750_000_000
    assert (row["frontend_s"], row["queue_s"], row["prefill_s"], row["decode_s"]) == (0.25, 0.5, 0.25, 1.0)


def test_tokens_and_names_of_a_request() -> None:
    """Computed is prompt minus cached; the client's id is found; the engine's own id is kept."""
    (row,) = request_rows(iteration(finished()), "w", KNOWN, 0)
    assert (row["prompt_tokens"], row["cached_tokens"], row["computed_tokens"], row["output_tokens"]) == (
        100,
        64,
        36,
        9,
    )
    assert (row["request_id"], row["labels"]) == ("abc", {"engine_request_id": "cmpl-abc-0"})
    assert (row["state"], row["finish_reason"], row["num_preemptions"]) == ("finished", "length", 1)
    assert (row["vantage"], row["engine"], row["model"], row["worker"]) == ("engine", "vllm", "tiny", "w")


def test_cached_tokens_are_the_devices_only_without_a_connector() -> None:
    """A KV connector may serve tokens from elsewhere, so then the split is unknown."""
    assert request_rows(iteration(finished()), "w", KNOWN, 0)[0]["cached_tokens_device"] == 64
    with_connector = Geometry(has_connector=True)
    assert request_rows(iteration(finished()), "w", with_connector, 0)[0]["cached_tokens_device"] is None


@pytest.mark.parametrize(
    ("reason", "state", "word"),
    [
        (FinishReason.STOP, "finished", "stop"),
        (FinishReason.ABORT, "aborted", "abort"),
        (2, "aborted", "abort"),
        ("error", "failed", "error"),
        ("FinishReason.REPETITION", "finished", "repetition"),
        (None, "finished", None),
    ],
)
def test_finish_reason_in_every_form(reason: Any, state: str, word: str | None) -> None:
    """Enum, number, word or nothing: the state follows."""
    (row,) = request_rows(iteration(finished(finish_reason=reason)), "w", KNOWN, 0)
    assert (row["state"], row["finish_reason"]) == (state, word)


def test_a_request_that_never_ran_has_no_invented_phases() -> None:
    """vLLM subtracts from stamps that were never set: the negative results are unknown, not zero."""
    never_ran = finished(
        queued_time=-5000.0,
        prefill_time=0.0,
        decode_time=0.0,
        num_generation_tokens=0,
        finish_reason=FinishReason.ABORT,
    )
    (row,) = request_rows(iteration(never_ran), "w", KNOWN, 0)
    assert row["queue_s"] is None
    assert not {"first_token_ns", "last_token_ns", "prefill_s", "decode_s", "frontend_s"} & row.keys()
    assert (row["state"], row["output_tokens"]) == ("aborted", 0)


def test_an_old_release_leaves_nulls() -> None:
    """0.11 knows neither the request's name nor its preemptions nor its cached tokens."""
    old = Fake(
        finish_reason=FinishReason.STOP, e2e_latency=1.0, num_prompt_tokens=10, num_generation_tokens=2,
        queued_time=0.1, prefill_time=0.2, decode_time=0.3,
    )  # fmt: skip
    (row,) = request_rows(iteration(old), "w", KNOWN, 0)
    assert row["num_preemptions"] is None
    assert row["cached_tokens"] is None
    assert row["computed_tokens"] is None
    assert row["request_id"].startswith("unnamed-")
    assert "labels" not in row


def test_minus_one_cached_tokens_is_unknown() -> None:
    """vLLM says -1 where it has not counted."""
    (row,) = request_rows(iteration(finished(num_cached_tokens=-1)), "w", KNOWN, 0)
    assert row["cached_tokens"] is None


def test_a_wall_clock_set_back_keeps_the_core_clocks_phases() -> None:
    """With a negative latency the arrival is counted back over the phases, and the front end's share is unknown."""
    (row,) = request_rows(iteration(finished(e2e_latency=-3.0)), "w", KNOWN, 0)
    assert row["arrival_ns"] == T0 + 10 * S - 1_750_000_000
    assert row["frontend_s"] == 0.0
    assert request_rows(iteration(Fake(e2e_latency=-3.0)), "w", KNOWN, 0) == []


def test_the_first_token_is_when_the_front_end_saw_it() -> None:
    """Found by its arrival (stamp minus time to first token): 8 s + 0.9 s, and not end - decode = 9 s."""
    first_tokens = FirstTokens()
    end_s, arrival_s = 1_700_000_010.0, 1_700_000_008.0
    other_s = arrival_s + 1e-6
    first_tokens.note(
        Fake(iteration_timestamp=arrival_s + 0.9, time_to_first_tokens_iter=[0.9, arrival_s + 0.9 - other_s])
    )
    (row,) = request_rows(iteration(finished(), stamp=end_s), "w", KNOWN, 0, first_tokens)
    assert row["first_token_ns"] == round((arrival_s + 0.9) * 1e9)
    assert row["first_scheduled_ns"] == row["first_token_ns"] - 250_000_000
    # 0.9 - 0.5 queue - 0.25 prefill, to the resolution of a double at this time (0.24 us).
    assert row["frontend_s"] == pytest.approx(0.15, abs=1e-6)


@given(
    arrival=st.floats(1.7e9, 2.1e9),
    ttft=st.floats(0, 1e5),
    rest=st.floats(0, 1e5),
)
def test_arrival_is_the_same_number_from_both_ends(arrival: float, ttft: float, rest: float) -> None:
    """Differences of two wall-clock doubles are exact, so the key is found whatever the times."""
    first_s = arrival + ttft
    end_s = first_s + rest
    first_tokens = FirstTokens()
    first_tokens.note(Fake(iteration_timestamp=first_s, time_to_first_tokens_iter=[first_s - arrival]))
    assert first_tokens.of(end_s - (end_s - arrival)) == first_s


def test_requests_of_one_arrival_are_not_confused() -> None:
    """n = 2 shares an arrival: one iteration is unambiguous, two are unknown, and memory is bounded."""
    first_tokens = FirstTokens(max_open=2)
    first_tokens.note(Fake(iteration_timestamp=101.0, time_to_first_tokens_iter=[1.0, 1.0]))
    assert first_tokens.of(100.0) == 101.0
    first_tokens.note(Fake(iteration_timestamp=102.0, time_to_first_tokens_iter=[2.0]))
    assert first_tokens.of(100.0) is None
    first_tokens.note(Fake(iteration_timestamp=202.0, time_to_first_tokens_iter=[1.0, 2.0]))
    assert first_tokens.of(100.0) is None
    assert (first_tokens.of(201.0), first_tokens.of(200.0)) == (202.0, 202.0)


def test_latency_shorter_than_its_phases_gives_no_negative_phase() -> None:
    """Two clocks may disagree by microseconds: no phase is negative."""
    (row,) = request_rows(iteration(finished(e2e_latency=1.7)), "w", KNOWN, 0)
    assert row["frontend_s"] is None
    assert row["queue_s"] == 0.5


def test_a_step_in_numbers() -> None:
    """Blocks from usage, waiting with its deferred part, recompute from the look-ups of preempted requests."""
    row = StepRows("w", KNOWN).row(scheduler(), iteration(), T0)
    assert (row["step"], row["at_ns"], row["worker"], row["policy"]) == (0, T0, "w", "fcfs")
    assert (row["num_running"], row["num_waiting_prefill"]) == (3, 5)
    assert row["waiting_on"] == {"unknown": 4, "dependency": 1}
    assert (row["blocks_total"], row["blocks_used"], row["kv_cache_bytes"]) == (40, 10, 163_840)
    # 150 looked up by preempted requests, 96 found: 54 to compute again, on top of 36 computed for the first time.
    assert (row["recomputed_tokens"], row["prefill_tokens"], row["decode_tokens"]) == (54, 90, 7)
    assert row["num_preempted"] == 2


def test_step_duration_is_known_only_while_the_engine_had_work() -> None:
    """The time since the step before is a duration only where that one left work; an idle pause is not a long step."""
    steps = StepRows("w", KNOWN)
    assert steps.row(scheduler(), None, T0)["duration_s"] is None
    assert steps.row(scheduler(num_running_reqs=0, num_waiting_reqs=0), None, T0 + S // 2)["duration_s"] == 0.5
    row = steps.row(scheduler(), None, T0 + 60 * S)
    assert (row["duration_s"], row["step"]) == (None, 2)
    assert steps.row(scheduler(), None, T0 + 59 * S)["duration_s"] is None  # the clock was set back


def test_iteration_details_are_preferred() -> None:
    """With --enable-logging-iteration-details duration, batch and prefill tokens are the scheduler's own."""
    details = Fake(elapsed_ms=12.5, num_ctx_requests=1, num_ctx_tokens=512, num_generation_requests=6)
    row = StepRows("w", KNOWN).row(scheduler(iteration_details=details), iteration(), T0)
    assert (row["duration_s"], row["batch_size"], row["prefill_tokens"]) == (0.0125, 7, 512)


def test_several_front_ends_do_not_claim_the_whole_step() -> None:
    """Each API server sees only its own requests' tokens, so the step's tokens are unknown, not low."""
    row = StepRows("w", Geometry(num_frontends=2)).row(scheduler(), iteration(), T0)
    assert (row["decode_tokens"], row["prefill_tokens"], row["num_preempted"]) == (None, None, None)
    assert row["num_running"] == 3


def test_an_empty_object_gives_a_row_of_nulls() -> None:
    """Whatever vLLM renames, a step is still a step."""
    row = StepRows("w", Geometry()).row(Fake(), Fake(), T0)
    assert {k for k, v in row.items() if v is not None} == {"worker", "at_ns", "step"}


def test_prompt_tokens_of_an_old_release_count_only_without_caching() -> None:
    """Before prompt_token_stats the count held cached tokens too: usable only where nothing is cached."""
    old = Fake(num_generation_tokens=1, num_prompt_tokens=80, num_preempted_reqs=0)
    assert StepRows("w", Geometry(prefix_caching=True)).row(scheduler(), old, T0)["prefill_tokens"] is None
    assert StepRows("w", Geometry(prefix_caching=False)).row(scheduler(), old, T0)["prefill_tokens"] == 80


class Raises:
    @property
    def x(self) -> int:
        raise RuntimeError("foreign property")


def test_read_never_raises() -> None:
    """Absent, None and raising attributes are all unknown."""
    assert read(Fake(a=Fake(b=3)), "a.b") == 3
    assert read(Fake(a=None), "a.b") is None
    assert read(None, "a") is None
    assert read(Raises(), "x") is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (3.0, 3), (0, 0), (-1, None), (True, None), (float("nan"), None), ("3", None), (float("inf"), None)],
)
def test_a_count_is_a_count_or_unknown(value: Any, expected: int | None) -> None:
    """Bools, negatives, NaN, infinities and text are not counts."""
    assert whole(value) == expected


def config(**changes: Any) -> Fake:
    """Shaped like vLLM 0.32's VllmConfig for a 2-layer Llama with 2 KV heads of 32 in bf16."""
    model = Fake(
        served_model_name=["tiny", "other"],
        dtype="torch.bfloat16",
        max_model_len=1024,
        use_mla=False,
        is_hybrid=False,
        is_attention_free=False,
        enforce_eager=True,
        quantization=None,
        hf_text_config=Fake(layer_types=None),
        get_sliding_window=lambda: None,
        get_total_num_hidden_layers=lambda: 2,
        get_num_kv_heads=lambda parallel: 2 // parallel.tensor_parallel_size,
        get_head_size=lambda: 32,
    )
    cache = Fake(
        block_size=32,
        num_gpu_blocks=41,
        cache_dtype="bfloat16",
        enable_prefix_caching=True,
        kv_offloading_size=None,
        gpu_memory_utilization=0.92,
    )
    parallel = Fake(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, _api_process_count=1)
    facts: dict[str, Any] = {
        "model_config": model,
        "cache_config": cache,
        "parallel_config": parallel,
        "scheduler_config": Fake(policy="fcfs", max_num_seqs=8, max_num_batched_tokens=1024),
        "kv_transfer_config": None,
    }
    return Fake(**(facts | changes))


def test_geometry_of_a_plain_model() -> None:
    """One block is the null block; bytes of a block = 2 * 2 layers * 2 heads * 32 * 2 bytes * 32 tokens = 16,384."""
    geometry = geometry_of(config())
    assert geometry == Geometry(40, 16_384, True, False, 1, "fcfs", "tiny")


def test_tensor_parallel_ranks_hold_one_block_together() -> None:
    """Two ranks with one head each hold the same 16,384 bytes a block."""
    parallel = Fake(tensor_parallel_size=2, data_parallel_size=1)
    assert geometry_of(config(parallel_config=parallel)).kv_bytes_per_block == 16_384


def test_blocks_of_data_parallel_engines_are_divided() -> None:
    """The front end's config holds the sum over its engines: 82 over two is 41 each, 40 of them usable."""
    cache = Fake(num_gpu_blocks=82, block_size=32)
    two = Fake(tensor_parallel_size=1, data_parallel_size=2)
    assert geometry_of(config(cache_config=cache, parallel_config=two)).num_blocks == 40
    external = Fake(tensor_parallel_size=1, data_parallel_size=2, data_parallel_external_lb=True)
    assert geometry_of(config(cache_config=cache, parallel_config=external)).num_blocks == 81
    three = Fake(tensor_parallel_size=1, data_parallel_size=3)
    assert geometry_of(config(cache_config=cache, parallel_config=three)).num_blocks is None


def test_a_model_with_other_layers_has_no_simple_block_size() -> None:
    """MLA, hybrids and windows do not follow 2 * heads * size: unknown."""
    base = config().model_config
    for change in ({"use_mla": True}, {"is_hybrid": True}, {"get_sliding_window": lambda: 512}):
        assert geometry_of(config(model_config=Fake(**(vars(base) | change)))).kv_bytes_per_block is None
    mixed = Fake(layer_types=["full_attention", "sliding_attention"])
    assert geometry_of(config(model_config=Fake(**(vars(base) | {"hf_text_config": mixed})))).kv_bytes_per_block is None


def test_worker_row_names_settings_as_vllm_does() -> None:
    """Geometry, parallelism and flags; nothing where nothing is known."""
    row = worker_row(config(), "w", geometry_of(config()), version="0.32.0", host="h", at_ns=T0)
    assert (row["engine"], row["engine_version"], row["model"], row["role"]) == ("vllm", "0.32.0", "tiny", "mixed")
    assert (row["dtype"], row["kv_dtype"], row["block_size"], row["num_blocks"]) == ("bfloat16", "bfloat16", 32, 40)
    assert (row["tp"], row["pp"], row["dp"], row["max_context"]) == (1, 1, 1, 1024)
    assert row["flags"]["max_num_seqs"] == "8"
    assert row["flags"]["gpu_memory_utilization"] == "0.92"
    assert row["prefix_caching"] is True
    empty = worker_row(Fake(), "w", geometry_of(Fake()), version=None, host="h", at_ns=T0)
    assert {k for k, v in empty.items() if v not in (None, {})} == {"worker", "at_ns", "host", "role", "engine"}


def test_role_follows_the_kv_connector() -> None:
    """A producer prefills, a consumer decodes."""
    producer = config(kv_transfer_config=Fake(kv_role="kv_producer", kv_connector="NixlConnector"))
    assert worker_row(producer, "w", geometry_of(producer), version=None, host="h", at_ns=0)["role"] == "prefill"
    assert geometry_of(producer).has_connector is True
