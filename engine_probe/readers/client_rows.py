"""One row of a load generator's log -> one `request` row at the client's vantage.

Invariant: only what the client saw. Token counts a chunk are known where there are as many chunks as tokens (then
each has one); phases come only from the engine's answer (vLLM's `metrics`, llama-server's `timings`), they are
durations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_probe.adapters.llamacpp import timings_columns
from engine_probe.errors import UnknownFormat

_REJECTED = frozenset((429, 503))
_TOLD = {
    # vLLM's time_to_first_token_ms begins at the first schedule here (queue excluded): it is the prefill.
    "engine_metrics": {
        "queue_s": "queue_time_ms",
        "prefill_s": "time_to_first_token_ms",
        "decode_s": "generation_time_ms",
    },
}


def client_row(recorded: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Raises UnknownFormat, naming `where`, for a row whose instants or counts are of another type."""
    for key in (
        "send_ns",
        "first_token_ns",
        "end_ns",
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
        "http_status",
    ):
        if not isinstance(recorded.get(key), int | None):
            raise UnknownFormat(f"{where}: {key} is {recorded[key]!r}, expected a whole number or null.")
    if not isinstance(recorded["request_id"], str) or not isinstance(recorded["send_ns"], int):
        raise UnknownFormat(f"{where}: request_id and send_ns are needed.")
    token_ns = recorded.get("token_ns") or []
    if not isinstance(token_ns, list) or not all(isinstance(at, int) for at in token_ns):
        raise UnknownFormat(f"{where}: token_ns is not a list of instants.")
    end_ns = recorded.get("end_ns")
    prompt, output, cached = (recorded.get(key) for key in ("prompt_tokens", "output_tokens", "cached_tokens"))
    row: dict[str, Any] = {
        "worker": recorded.get("worker"),
        "at_ns": recorded["send_ns"] if end_ns is None else end_ns,
        "request_id": recorded["request_id"],
        "vantage": "client",
        "state": _state(recorded),
        "labels": {"phase": str(recorded["phase"])} if recorded.get("phase") else {},
        "arrival_ns": recorded["send_ns"],
        "first_token_ns": recorded.get("first_token_ns"),
        "last_token_ns": token_ns[-1] if token_ns else None,
        "end_ns": end_ns,
        "token_ns": token_ns or None,
        "token_counts": [1] * output if output and output == len(token_ns) else None,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached if prompt is not None and cached is not None and cached <= prompt else None,
        "finish_reason": recorded.get("finish_reason"),
        "http_status": recorded.get("http_status"),
        "error": recorded.get("error"),
        "prompt_blocks": recorded.get("prompt_blocks"),
    }
    if recorded.get("response_id"):
        row["labels"]["engine_request_id"] = str(recorded["response_id"])
    row.update(told_phases(recorded))
    return row


def _state(recorded: Mapping[str, Any]) -> str:
    status = recorded.get("http_status")
    if status in _REJECTED:
        return "rejected"
    if recorded.get("error") is not None or (status is not None and status >= 400) or status is None:
        return "failed"
    return "aborted" if recorded.get("finish_reason") == "abort" else "finished"


def told_phases(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine put into its answer: durations (s) of `engine_metrics` (vLLM); durations and speculated tokens of
    `engine_timings` (llama.cpp)."""
    timings = recorded.get("engine_timings")
    if isinstance(timings, dict):
        told = timings_columns(timings)
        return {key: told[key] for key in ("prefill_s", "decode_s", "draft_tokens", "accepted_tokens") if key in told}
    for key, names in _TOLD.items():
        answer = recorded.get(key)
        if isinstance(answer, dict):
            told = {column: answer.get(name) for column, name in names.items()}
            return {
                column: value / 1e3
                for column, value in told.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e10
            }
    return {}
