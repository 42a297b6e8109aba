"""What each source of SGLang, llama.cpp, TensorRT-LLM, Triton and TGI declares is what its rows fill, name by name.

SGLang and llama.cpp: recordings of real engines and a real `/server_info`. TensorRT-LLM, Triton and TGI: samples written
from their source (`tests/data/samples/README.md`). What a recorded engine did not do is named here, one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters import llamacpp_provides, sglang_provides, tgi_provides, triton, trtllm_provides
from engine_probe.adapters.adapter import Discovery
from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.provides import Provides, names
from engine_probe.adapters.registry import adapter
from engine_probe.attach.kv_link import read_message
from engine_probe.readers.detect import open_source
from engine_probe.readers.lines import text_lines
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.sampling import Sampling
from tests.contract.test_adapters_contract import filled
from tests.unit import test_sglang_log, test_sglang_spans, test_tgi, test_trtllm_polls
from tests.unit.test_engines_attach import ANSWERS

Told = list[tuple[str, Mapping[str, Any]]]
DATA = Path(__file__).parents[1] / "data"
SAMPLES, RECORDINGS = DATA / "samples", DATA / "recordings"
AT_NS = 1_795_958_453_000_000_000
ALL = ("request", "step", "block", "transfer", "worker", "sample")


def holds(source: Provides, told: Told, rare: str = "", kinds: tuple[str, ...] = ALL) -> None:
    """These rows fill exactly what the source declares of these kinds, `rare` aside."""
    declared_names = {name for name in source.names if name.split(".")[0] in kinds}
    mine = {name for name in filled(told) if name.split(".")[0] in kinds} - {f"{kind}.run_id" for kind in kinds}
    assert mine == declared_names - names(rare)
    assert names(rare) <= source.names


def recorded(name: str) -> Told:
    found: Told = []
    for tables in open_source(RECORDINGS / name).chunks(ReadOptions(), Notes()):
        found += [(kind, row) for kind, table in tables.items() for row in table.to_pylist(maps_as_pydicts="strict")]
    return found


@pytest.fixture(scope="module")
def sglang() -> Told:
    return recorded("sglang-0.5.23")


@pytest.fixture(scope="module")
def llamacpp() -> Told:
    return recorded("llamacpp")


def of_kind(told: Told, kind: str) -> Told:
    """Samples of the host come from elsewhere."""
    return [(k, row) for k, row in told if k == kind and not str(row.get("name", "")).startswith("cpu_util")]


def sampled(engine: str, text: str) -> Told:
    """`sample` rows of a page, and the `worker` row that the page alone tells."""
    one, page = adapter(engine), parse_page(text)
    told: Told = [
        ("sample", {"worker": worker, "at_ns": at_ns, "name": name, "labels": labels, "value": value})
        for worker, at_ns, name, labels, value in SampleMapper("w", one.tables).rows(page, AT_NS)
    ]
    return told + facts(engine, text, Discovery(series=frozenset(page.names())))


def facts(engine: str, text: str, seen: Discovery) -> Told:
    found = adapter(engine).facts(parse_page(text), seen)["0"]
    return [("worker", {"worker": "w", "at_ns": AT_NS, **found})]


class Client:
    """An engine's JSON endpoints."""

    url = "http://engine"

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = {"/" + name.replace("__", "/"): value for name, value in answers.items()}

    def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
        raise AssertionError(path)

    def json(self, path: str) -> Any:
        return self._answers.get(path)


def asked(engine: str, text: str, answers: Mapping[str, Any]) -> Told:
    """The `worker` row of an attach."""
    return facts(engine, text, adapter(engine).discover(Client(answers), parse_page(text)))


def logged(engine: str, lines: Iterable[str]) -> Told:
    reader = adapter(engine).log_reader("w")
    assert reader is not None, f"{engine} reads no log"
    told: Told = [(kind, row) for line in lines for kind, rows in reader.feed(line).items() for row in rows]
    worker = reader.worker_facts()
    return told + ([("worker", {"worker": "w", "at_ns": AT_NS, **worker})] if worker else [])


# --- SGLang


def test_sglangs_page(sglang: Told) -> None:
    """Nothing was retracted, aborted or moved between tiers in the recording."""
    rare = "sample: preemptions_total requests_failed_total tier_read_bytes_total tier_written_bytes_total"
    holds(sglang_provides.METRICS, of_kind(sglang, "sample"), rare, ("sample",))
    text = (SAMPLES / "sglang_metrics.synthetic.prom").read_text()
    holds(sglang_provides.METRICS, sampled("sglang", text), "", ("worker",))


def test_the_rare_series_of_sglang_have_their_names() -> None:
    """Retractions, aborts, tiers: series that come at their first use."""
    page = "".join(
        f'sglang:{name}{{tp_rank="0"}} 1\\n'.replace("\\n", "\n")
        for name in (
            "num_retracted_requests_total",
            "num_aborted_requests_total",
            "load_back_bytes_total",
            "hicache_backup_bytes_total",
        )
    )
    found = filled(of_kind(sampled("sglang", page), "sample"))
    assert (
        names("sample: preemptions_total requests_failed_total tier_read_bytes_total tier_written_bytes_total") <= found
    )


def test_sglangs_server_info() -> None:
    """A real answer of 0.5.23, with types set; no path and no key in it."""
    info = json.loads((SAMPLES / "sglang_server_info-0.5.23.json").read_text())
    info |= {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "api_key": "secret"}
    models = {"data": [{"id": "tiny", "parent": None, "max_model_len": 2048}]}
    told = asked("sglang", "sglang:x 1\n", {"server_info": info, "v1__models": models})
    holds(sglang_provides.SERVER_INFO, told)
    assert "secret" not in str(told)
    assert "<path>" not in str(told)


def test_sglangs_events(sglang: Told) -> None:
    """A recording that only stores, and samples that evict and offload; with a rate, its column."""
    decoder = KvEventDecoder(b"s", sampling=Sampling(0.999999))
    for seq, line in enumerate((SAMPLES / "kv_events.synthetic.jsonl").read_text().splitlines()[1:]):
        row = json.loads(line)
        if row["engine"] == "sglang" and "frames_hex" in row:
            message = read_message([bytes.fromhex(frame) for frame in row["frames_hex"]])
            assert message is not None
            decoder.feed("w", seq, message[1], AT_NS)
    samples: Told = [("block", row) for row in decoder.drain()["block"].to_pylist()]
    holds(sglang_provides.KV_EVENTS, of_kind(sglang, "block") + samples, "", ("block",))


def test_sglangs_log() -> None:
    """Start-up lines of the recording; finished requests as the logger writes them, one refused, one speculating."""
    path = RECORDINGS / "sglang-0.5.23" / "engine-worker-0.log.gz"
    lines = [line.decode("utf-8", "replace") for _, line in text_lines(path)]
    meta = test_sglang_log.META
    refusal = {"type": "abort", "message": "m", "status_code": 400, "err_type": "BadRequestError"}
    more = {"spec_num_proposed_drafts": 9, "spec_num_correct_drafts": 5}
    lines += [  # the cut ends before the scheduler's line
        "[2026-11-29 12:44:26] max_total_num_tokens=65536, chunked_prefill_size=4096, max_prefill_tokens=16384, "
        "max_running_requests=16, context_len=2048, available_cpu_mem=21.60 GB",
        test_sglang_log.json_line({**meta, **more, "cached_tokens_details": {"device": 60, "host": 4, "storage": 0}}),
        test_sglang_log.text_line({**meta, "finish_reason": refusal}),
    ]
    told = logged("sglang", lines)
    told = [(kind, {**row, "dtype": "bfloat16"} if kind == "worker" else row) for kind, row in told]
    holds(sglang_provides.LOG, told, "worker: weights_bytes")


def test_sglangs_spans() -> None:
    """The root of one request."""
    told: Told = [("request", test_sglang_spans.row(test_sglang_spans.ROOT))]
    holds(sglang_provides.OTLP, told)


def test_sglangs_clients(sglang: Told) -> None:
    """Rows of a load generator; no error, no block hashes in this recording."""
    holds(sglang_provides.CLIENT, of_kind(sglang, "request"), "request: error prompt_blocks", ("request",))


# --- llama.cpp


def test_llamacpps_page(llamacpp: Told) -> None:
    """A build of 2026: no usage gauge any more. An old build has it."""
    told = [(kind, row) for kind, row in of_kind(llamacpp, "sample") if row["labels"].get("wire") != "/slots"]
    holds(llamacpp_provides.METRICS, told, "sample: kv_usage_ratio", ("sample",))
    assert "sample.kv_usage_ratio" in filled(sampled("llamacpp", "llamacpp:kv_cache_usage_ratio 0.5\n"))


def test_llamacpps_slots(llamacpp: Told) -> None:
    """Samples under their own names."""
    told = [(kind, row) for kind, row in of_kind(llamacpp, "sample") if row["labels"].get("wire") == "/slots"]
    holds(llamacpp_provides.SLOTS, told)


def test_llamacpps_props() -> None:
    """As llama-server answers them."""
    props = ANSWERS["llamacpp"]["props"] | {"model_ftype": "Q4_1"}
    told = asked("llamacpp", "llamacpp:x 1\n", {"props": props, "v1__models": {"data": [{"id": "/m/tiny.gguf"}]}})
    holds(llamacpp_provides.PROPS, told)


def test_llamacpps_log() -> None:
    """The recorded start-up line tells slots and cells; a more verbose one the cache's type and the build."""
    path = RECORDINGS / "llamacpp" / "engine-worker-0.log.gz"
    lines = [line.decode("utf-8", "replace") for _, line in text_lines(path)]
    holds(llamacpp_provides.LOG, logged("llamacpp", lines), "worker: kv_dtype engine_version")
    lines += ["llama_kv_cache: size =    9.00 MiB (   512 cells,  30 layers,  2/2 seqs), K (f16):    4.50 MiB"]
    holds(llamacpp_provides.LOG, logged("llamacpp", [*lines, "build: 6710 (74b8fc17) with cc"]))


def test_llamacpps_clients(llamacpp: Told) -> None:
    """Timings of the answers; nothing was speculated, and no block hashes are in this recording."""
    rare = "request: draft_tokens accepted_tokens prompt_blocks"
    holds(llamacpp_provides.TIMINGS, of_kind(llamacpp, "request"), rare, ("request",))


# --- TensorRT-LLM and Triton


def test_trtllms_page() -> None:
    """Samples, and settings of the info series; version and model are told by endpoints."""
    text = (SAMPLES / "trtllm_metrics.synthetic.prom").read_text()
    told = of_kind(sampled("trtllm", text), "sample") + asked("trtllm", text, ANSWERS["trtllm"])
    holds(trtllm_provides.METRICS, told)


def test_trtllms_iterations() -> None:
    """Two records, one of which speculates; marks come from holes."""
    speculates = test_trtllm_polls.iteration(2, specDecodingStats={"numDraftTokens": 5, "numAcceptedTokens": 4})
    rows = test_trtllm_polls.rows(test_trtllm_polls.IterationPoll("w"), [test_trtllm_polls.iteration(1), speculates])
    holds(trtllm_provides.ITERATIONS, [(kind, row) for kind, found in rows.items() for row in found])


def test_trtllms_requests() -> None:
    """One request with speculation and a transfer."""
    item = test_trtllm_polls.perf(kv_cache_size=4096, kv_cache_transfer_start=100.5, kv_cache_transfer_end=100.6)
    item["perf_metrics"]["speculative_decoding"] = {"total_draft_tokens": 9, "total_accepted_draft_tokens": 4}
    rows = test_trtllm_polls.rows(test_trtllm_polls.RequestPoll("w", test_trtllm_polls.OFFSET_S), [item])
    holds(trtllm_provides.REQUESTS, [(kind, row) for kind, found in rows.items() for row in found])


def test_trtllms_events() -> None:
    """Stored twice, moved to the host and back, removed; with a rate, its column."""
    polls = test_trtllm_polls
    diff = {"type": "event_diff", "old_value": 0, "new_value": 1}
    move = {"type": "updated", "block_hash": 11, "cache_level": diff}
    back = {"type": "updated", "block_hash": 11, "cache_level": {**diff, "old_value": 1, "new_value": 0}}
    events = [
        polls.stored(0, [11, 12], [[1], [2]]),
        polls.event(1, move),
        polls.event(2, back),
        polls.event(3, {"type": "removed", "block_hashes": [11]}),
    ]
    rows = polls.rows(polls.EventPoll("w", b"s", Sampling(0.999999)), events)
    holds(trtllm_provides.KV_EVENTS, [("block", row) for row in rows["block"]])


def test_tritons_page() -> None:
    """Gauges, and the geometry of the one model."""
    text = (SAMPLES / "triton_trtllm_metrics.synthetic.prom").read_text()
    told = of_kind(sampled("triton-trtllm", text), "sample") + asked("triton-trtllm", text, {})
    holds(triton.METRICS, told)


# --- TGI


def test_tgis_page() -> None:
    """Samples; its settings are in /info."""
    text = (SAMPLES / "tgi_metrics.synthetic.prom").read_text()
    holds(tgi_provides.METRICS, of_kind(sampled("tgi", text), "sample"))


def test_tgis_info() -> None:
    """As the router answers it."""
    holds(tgi_provides.INFO, asked("tgi", "tgi_queue_size 0\n", ANSWERS["tgi"]))


def test_tgis_log() -> None:
    """One success."""
    holds(tgi_provides.LOG, logged("tgi", [test_tgi.json_line()]))
