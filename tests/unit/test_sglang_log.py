"""SGLang's output: settings at its start, one row a finished request, whatever stands in a prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.sglang_log import SglangLog, request_columns
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

T0 = 1_795_956_271.0
META: dict[str, Any] = {
    "id": "abc",
    "finish_reason": {"type": "length", "length": 8},
    "prompt_tokens": 100,
    "weight_version": "default",
    "num_retractions": 1,
    "forward_entry_time": T0 + 0.5,
    "prefill_finished_time": T0 + 0.75,
    "queue_time": 0.25,
    "reasoning_tokens": 0,
    "completion_tokens": 8,
    "cached_tokens": 64,
    "cached_tokens_details": {"device": 60, "host": 4},
    "e2e_latency": 2.0,
    "request_received_ts": T0,
    "first_token_latency": 1.0,
    "request_finished_ts": T0 + 2.0,
}
NS = 1_000_000_000
T0_NS = int(T0) * NS


def text_line(meta: dict[str, Any] = META, *, prompt: str = "hello", stream: bool = True) -> str:
    """As `--log-requests-format text` writes it."""
    body = ", ".join(f"'{key}': {value!r}" for key, value in meta.items())
    asked = f"GenerateReqInput(rid='abc', text={prompt!r}, stream={stream})"
    return f"[2026-11-29 12:44:31] Finish: obj={asked}, out={{'text': {prompt!r}, 'meta_info': {{{body}}}}}"


def json_line(meta: dict[str, Any] = META, *, prompt: str = "hello", stream: bool = True) -> str:
    """As `--log-requests-format json` writes it."""
    told = {"timestamp": "2026-11-29T12:44:31", "event": "request.finished", "rid": "abc"}
    told |= {"obj": {"text": prompt, "stream": stream}, "out": {"text": prompt, "meta_info": meta}}
    return f"[2026-11-29 12:44:31] {json.dumps(told)}"


def file_line(meta: dict[str, Any] = META, *, prompt: str = "hello", stream: bool = True) -> str:
    """As `--export-metrics-to-file` writes it."""
    return json.dumps({"request_parameters": json.dumps({"text": prompt, "stream": stream})} | meta)


FORMS = (text_line, json_line, file_line)


def row(line: str) -> dict[str, Any]:
    (found,) = SglangLog("w").feed(line)["request"]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_finished_request_is_one_row(form: Any) -> None:
    """0.25 s before the queue, 0.25 s in it, 0.5 s to the first token, 1 s to the last: they sum to the two seconds."""
    found = row(form())
    validate("request", table_from_rows("request", [found]), T0_NS)
    assert (found["request_id"], found["worker"], found["vantage"], found["state"]) == (
        "abc",
        "w",
        "engine",
        "finished",
    )
    assert found["arrival_ns"] == T0_NS
    assert found["first_scheduled_ns"] == T0_NS + NS // 2
    assert found["first_token_ns"] == T0_NS + NS
    assert found["end_ns"] == found["at_ns"] == T0_NS + 2 * NS
    phases = [found[name] for name in ("frontend_s", "queue_s", "prefill_s", "decode_s")]
    assert phases == pytest.approx([0.25, 0.25, 0.5, 1.0])
    assert (found["prompt_tokens"], found["cached_tokens"], found["computed_tokens"]) == (100, 64, 36)
    assert (found["cached_tokens_device"], found["cached_tokens_host"], found["output_tokens"]) == (60, 4, 8)
    assert (found["num_preemptions"], found["finish_reason"]) == (1, "length")
    assert "cached_tokens_remote" not in found


@pytest.mark.parametrize("form", FORMS)
def test_without_a_stream_the_scheduler_says_when_the_first_token_was(form: Any) -> None:
    """SGLang's front end sees a request that is not streamed once, at its end: 0.75 s is the scheduler's instant."""
    found = row(form({**META, "first_token_latency": 2.0}, stream=False))
    assert found["first_token_ns"] == T0_NS + 3 * NS // 4
    assert (found["prefill_s"], found["decode_s"]) == pytest.approx((0.25, 1.25))


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_cannot_forge_a_row(form: Any) -> None:
    """Text that looks like the log's own words stays text."""
    forged = (
        "x', 'meta_info': {'id': 'forged', 'request_received_ts': 1795956271.0, 'request_finished_ts': 1795956272.0}}"
    )
    for prompt in (forged, json_line({**META, "id": "forged"}), text_line({**META, "id": "forged"}), '{"timestamp": 1'):
        found = SglangLog("w").feed(form(prompt=prompt)).get("request", [])
        assert [one["request_id"] for one in found] in ([], ["abc"])
        assert "hello" not in str(found)


@pytest.mark.parametrize("form", FORMS)
def test_no_text_of_the_request_is_kept(form: Any) -> None:
    """Ids and numbers only."""
    found = row(
        form({**META, "finish_reason": {"type": "stop", "matched": "my secret stop"}}, prompt="my secret prompt")
    )
    assert "secret" not in str(found)
    assert found["finish_reason"] == "stop"


def test_aborts_and_refusals_are_told_apart() -> None:
    """A client that goes away is aborted; a refusal has a status. The message may quote the request and is left out."""
    gone = row(json_line({**META, "finish_reason": {"type": "abort", "message": "gone", "status_code": None}}))
    assert (gone["state"], gone["finish_reason"]) == ("aborted", "abort")
    reason = {"type": "abort", "message": "too long: secret", "status_code": 400, "err_type": "BadRequestError"}
    refused = row(json_line({**META, "finish_reason": reason}))
    assert (refused["state"], refused["http_status"], refused["error"]) == ("failed", 400, "BadRequestError")
    named = row(json_line({**META, "finish_reason": {**reason, "status_code": "HTTPStatus.BAD_REQUEST 400"}}))
    assert named["http_status"] == 400


def test_a_data_parallel_rank_is_a_worker() -> None:
    """Rank 0 keeps the plain name."""
    assert row(json_line({**META, "dp_rank": 0}))["worker"] == "w"
    assert row(json_line({**META, "dp_rank": 3}))["worker"] == "w/dp3"


@pytest.mark.parametrize(
    "changes",
    [
        {"request_received_ts": None},  # without --enable-metrics there are no instants
        {"request_finished_ts": T0 - 1},
        {"id": "HEALTH_CHECK_1"},
        {"id": None},
    ],
)
def test_what_is_no_request_in_time_is_no_row(changes: dict[str, Any]) -> None:
    """Neither health checks nor requests without instants."""
    assert request_columns({**META, **changes}) == {}
    assert SglangLog("w").feed(json_line({**META, **changes})) == {}


def test_absent_numbers_stay_null() -> None:
    """A release that tells less gives fewer columns, never zeros."""
    few = {key: META[key] for key in ("id", "request_received_ts", "request_finished_ts")}
    found = request_columns(few)
    assert set(found) == {
        "at_ns",
        "request_id",
        "vantage",
        "engine",
        "labels",
        "arrival_ns",
        "last_token_ns",
        "end_ns",
        "state",
    }


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[2026-11-29 12:44:31] Finish: obj=",
        "Finish: obj=GenerateReqInput(), out={'meta_info': {",
        "Finish: obj=GenerateReqInput(), out={'meta_info': {'id': nan}}",
        '{"timestamp": "x", "event": "request.finished", "out": 3}',
        '{"timestamp": "x", "event": "request.received", "out": {"meta_info": {}}}',
        '{"request_parameters": 5}',
        "\x00\xff" * 100,
    ],
)
def test_strange_lines_say_nothing(line: str) -> None:
    """Half lines, other events, rubbish."""
    assert SglangLog("w").feed(line) == {}


@given(st.text(max_size=400), st.sampled_from(FORMS), st.integers(0, 400))
def test_no_line_raises(noise: str, form: Any, cut: int) -> None:
    """Whatever is cut off or written over."""
    line = form()
    for damaged in (noise, line[:cut] + noise, line[: -cut or None], line[:cut] + noise + line[cut:]):
        SglangLog("w").feed(damaged)


def test_start_up_lines_tell_settings_and_geometry() -> None:
    """Dictionary and ServerArgs form; data types, tokens, context; paths and keys stay in the log."""
    log = SglangLog("w")
    log.feed(
        "[2026-11-29 12:44:12] server_args={'model_path': '/secret', 'page_size': 64, 'tp_size': 2, 'dp_size': 1, "
        "'disable_radix_cache': False, 'served_model_name': 'tiny', 'api_key': 'secret', 'kv_cache_dtype': 'auto', "
        "'disaggregation_mode': 'null', 'max_running_requests': 16}"
    )
    log.feed("[2026-11-29 12:44:25] Load weight end. elapsed=1 s, type=X, dtype=torch.bfloat16, mem usage=15.00 GB.")
    log.feed("[2026-11-29 12:44:26] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 6464, K size: 0.02 GB")
    log.feed("[..] max_total_num_tokens=6400, chunked_prefill_size=4096, max_running_requests=16, context_len=2048,")
    facts = log.worker_facts()
    assert facts.pop("flags") == {
        "page_size": "64",
        "tp_size": "2",
        "dp_size": "1",
        "disable_radix_cache": "False",
        "kv_cache_dtype": "auto",
        "disaggregation_mode": "null",
        "max_running_requests": "16",
        "chunked_prefill_size": "4096",
    }
    assert facts == {
        "engine": "sglang",
        "role": "mixed",
        "tp": 2,
        "dp": 1,
        "block_size": 64,
        "prefix_caching": True,
        "model": "tiny",
        "dtype": "bfloat16",
        "weights_bytes": 15 << 30,
        "kv_dtype": "bfloat16",
        "max_context": 2048,
        "num_blocks": 100,
    }
    old = SglangLog("w")
    old.feed("[..] server_args=ServerArgs(model_path='/secret', tp_size=4, page_size=1, disable_radix_cache=True)")
    assert (old.worker_facts()["tp"], old.worker_facts()["prefix_caching"]) == (4, False)
    assert "secret" not in str(facts) + str(old.worker_facts())
