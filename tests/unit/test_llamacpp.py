"""llama.cpp: names of its page, slots, timings, start-up lines."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.llamacpp import (
    ALSO,
    CANONICAL,
    DRAINING,
    NAMES,
    LlamaCppLog,
    SlotPoll,
    model_name,
    slots,
    timings_columns,
)
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.errors import UnknownFormat

ROOT = Path(__file__).parents[2]
AT_NS = 1_790_000_000_000_000_000


def mapped(text: str) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for _, _, name, _, value in SampleMapper("w", (NAMES,)).rows(parse_page(text), AT_NS):
        sums[name] += value
    return dict(sums)


def test_computed_and_cached_tokens_are_the_prompt() -> None:
    """116 tokens were computed and 81 came from the cache: 197 were asked for, and looked up."""
    values = mapped("llamacpp:prompt_tokens_total 116\nllamacpp:prompt_tokens_cached_total 81\n")
    assert values == {
        "prompt_tokens_computed_total": 116.0,
        "prompt_tokens_cached_total": 81.0,
        "prompt_tokens_total": 197.0,
        "prefix_queries_tokens_total": 197.0,
        "prefix_hits_tokens_total": 81.0,
    }


def test_an_older_build_does_not_tell_the_prompt() -> None:
    """Where cached tokens are not counted, computed tokens are not the prompt, and nothing is known of hits."""
    assert mapped("llamacpp:prompt_tokens_total 116\n") == {"prompt_tokens_computed_total": 116.0}


def test_gauges_that_depend_on_the_last_reader_are_left_out() -> None:
    """Throughputs since the previous scrape, whoever made it."""
    text = (ROOT / "tests" / "data" / "samples" / "llamacpp_metrics.synthetic.prom").read_text()
    assert all(f"llamacpp:{name}" in text for name in DRAINING)
    values = mapped(text)
    assert not any(name.endswith(tuple(DRAINING)) for name in values)
    assert (values["requests_running"], values["requests_waiting"]) == (3.0, 1.0)
    assert values["output_tokens_total"] == 24317.0


def test_timings_become_columns() -> None:
    """Milliseconds to seconds; prompt = computed + cached. The wait for a slot is not in them."""
    told = {"cache_n": 81, "prompt_n": 1, "prompt_ms": 61.07, "predicted_n": 8, "predicted_ms": 516.291}
    told |= {"draft_n": 12, "draft_n_accepted": 9, "prompt_per_second": 16.4}
    assert timings_columns(told) == {
        "prefill_s": pytest.approx(0.06107),
        "decode_s": pytest.approx(0.516291),
        "prompt_tokens": 82,
        "cached_tokens": 81,
        "computed_tokens": 1,
        "output_tokens": 8,
        "draft_tokens": 12,
        "accepted_tokens": 9,
    }


def test_timings_without_the_cache_do_not_tell_the_prompt() -> None:
    """Builds before cache_n: computed tokens only."""
    assert timings_columns({"prompt_n": 5, "prompt_ms": 10}) == {"prefill_s": 0.01, "computed_tokens": 5}


@given(
    st.dictionaries(
        st.sampled_from(["cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n"]),
        st.none() | st.booleans() | st.text(max_size=3) | st.integers() | st.floats(),
        max_size=6,
    )
)
def test_strange_timings_are_unknown(told: dict[str, Any]) -> None:
    """Negative, infinite, text: never a column that the contract refuses."""
    for name, value in timings_columns(told).items():
        assert value >= 0, name
        assert value < 2**62


SLOT: dict[str, Any] = {
    "id": 1,
    "n_ctx": 512,
    "is_processing": True,
    "id_task": 7,
    "n_prompt_tokens": 307,
    "n_prompt_tokens_processed": 94,
    "n_prompt_tokens_cache": 192,
    "params": {"grammar": "secret"},
    "prompt": "secret",
    "next_token": [{"has_next_token": True, "n_remain": 55, "n_decoded": 21}],
}


def test_slots_tell_what_each_holds() -> None:
    """307 = 94 computed + 192 cached + 21 generated tokens in the KV cache; an idle slot keeps 100 for reuse."""
    idle = {"id": 0, "n_ctx": 512, "is_processing": False, "n_prompt_tokens": 100, "next_token": {"n_decoded": 4}}
    table = SlotPoll("w").tables(json.dumps([idle, SLOT, {"id": 2, "is_processing": False}]).encode(), AT_NS)["sample"]
    rows = table.to_pylist(maps_as_pydicts="strict")
    values = {(row["name"].removeprefix("llamacpp:"), row["labels"].get("slot")): row["value"] for row in rows}
    assert values["slot_kv_tokens", "1"] == 307.0
    assert values["slot_prompt_tokens_cached", "1"] == 192.0
    assert values["slot_tokens_decoded", "1"] == 21.0
    assert values["slot_tokens_decoded", "0"] == 4.0
    assert ("slot_kv_tokens", "2") not in values
    assert (values["slots_busy", None], values["slots_total", None]) == (1.0, 3.0)
    assert (values["slots_kv_tokens_serving", None], values["slots_kv_tokens_idle", None]) == (307.0, 100.0)
    assert {row["labels"]["wire"] for row in rows} == {"/slots"}
    assert "secret" not in str(rows)


def test_an_idle_server_is_left_alone() -> None:
    """Asking /slots keeps llama-server from sleeping: it is asked while somebody is served, and once after."""
    poll = SlotPoll("w")
    idle, busy = (parse_page(f"llamacpp:requests_processing {n}\nllamacpp:requests_deferred 0\n") for n in (0, 1))
    queued = parse_page("llamacpp:requests_processing 0\nllamacpp:requests_deferred 2\n")
    assert [poll.is_due(page) for page in (None, idle, busy, queued)] == [False, False, True, True]
    poll.tables(json.dumps([SLOT]).encode(), AT_NS)
    assert poll.is_due(idle)
    poll.tables(json.dumps([{**SLOT, "is_processing": False}]).encode(), AT_NS)
    assert not poll.is_due(idle)


@pytest.mark.parametrize("body", [b"", b"{}", b"<html>", b"[1]", b'[{"id": 0', b'{"error": {"code": 501}}'])
def test_what_is_no_list_of_slots_is_refused(body: bytes) -> None:
    """With the endpoint's name."""
    with pytest.raises(UnknownFormat, match="/slots"):
        slots(body)


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (
            "0.02.301.898 I srv load_model: initializing, n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'",
            {"max_context": 512, "block_size": 1, "num_blocks": 1024},
        ),
        (
            "srv  load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'",
            {"max_context": 8192, "block_size": 1, "num_blocks": 8192},
        ),
        ("srv init: initializing slots, n_slots = 4", {}),
        (
            "llama_kv_cache: size =    9.00 MiB (   512 cells,  30 layers,  2/2 seqs), K (q8_0):    4.50 MiB, V (q8_0): 4.5",
            {"kv_dtype": "q8_0"},
        ),
        ("main: build: 6710 (74b8fc17) with cc", {"engine_version": "b6710-74b8fc17"}),
        ("print_timing: prompt eval time = 1.0 ms", {}),
    ],
)
def test_start_up_lines_tell_the_kv_cells(line: str, facts: dict[str, Any]) -> None:
    """Each slot has its share, or all share one pool; a cell is one token."""
    log = LlamaCppLog()
    assert log.feed(line) == {}
    told = log.worker_facts()
    assert told.pop("engine") == "llamacpp"
    told.pop("flags")
    assert told == facts


@given(st.text(max_size=300))
def test_no_line_raises(line: str) -> None:
    """Whatever a log holds."""
    for text in (line, "n_slots = " + line, "llama_kv_cache: size = " + line, "build: " + line):
        LlamaCppLog().feed(text)


def test_a_path_is_no_name() -> None:
    """Without --alias the model's name is its path: the file's name is kept."""
    assert model_name("/home/me/models/tiny.Q4.gguf") == "tiny.Q4.gguf"
    assert model_name("C:\\models\\tiny.gguf") == "tiny.gguf"
    assert model_name("org/model") == "org/model"


def test_the_guide_names_every_mapped_series() -> None:
    """docs/engines/llamacpp.md lists each contract name with each wire name it stands for."""
    guide = (ROOT / "docs" / "engines" / "llamacpp.md").read_text().replace("\\|", "|")
    for canonical, wires in CANONICAL.items():
        assert f"| `{canonical}` | " + ", ".join(f"`{wire}`" for wire in wires) + " |" in guide
    for canonical in ALSO:
        assert f"`{canonical}`" in guide
