"""What was made for OpenAI's API or for vLLM works with the embedded engine as it is: its client, `kvscope attach`, the
doctor, readers of KV events, load generators.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq

from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.vllm import HISTOGRAMS, NAMES
from engine_probe.attach.kv_link import KvEndpoint
from engine_probe.attach.kv_reader import KvReader
from engine_probe.engine.server.assembly import ServerOptions
from tests.attach_running import Attached
from tests.engine_server import NAME, Running, engine_server, served_model
from tests.servers import require

ROOT = Path(__file__).parents[2]
PUBLISHED = ServerOptions(kv_events="0", kv_replay="0", kv_topic="kv@w0@tiny")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with engine_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_openais_client_completes(client: openai.OpenAI) -> None:
    """Its typed answer: text, finish reason, usage with cached tokens."""
    for cached in (0, 8):
        answer = client.completions.create(model=NAME, prompt="ten bytes.", max_tokens=4, temperature=0)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 11
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


def test_openais_client_streams_a_chat(client: openai.OpenAI) -> None:
    """The deltas joined are the whole answer; the last chunk has the usage."""
    asked: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    whole = client.chat.completions.create(**asked, max_completion_tokens=9)
    stream = client.chat.completions.create(
        **asked, max_completion_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert chunks[0].choices[0].delta.role == "assistant"


def test_openais_client_lists_models_and_raises_its_own_errors(client: openai.OpenAI) -> None:
    """BadRequestError with param and code, NotFoundError for a model that is none."""
    assert [model.id for model in client.models.list()] == [NAME, "other-name"]
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="x" * 500)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=3
        )
    assert refused.value.param == "logprobs"


def test_openais_client_that_leaves_a_stream_frees_its_blocks(server: Running, client: openai.OpenAI) -> None:
    """`close` in mid-stream."""
    stream = client.completions.create(
        model=NAME, prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_empty()


def test_openais_client_asks_from_many_tasks_at_once(server: Running) -> None:
    """Forty chats at once through the asynchronous client: all answered, all told apart by their ids."""
    import asyncio

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as made:
            return await asyncio.gather(
                *(
                    made.chat.completions.create(
                        model=NAME, messages=[{"role": "user", "content": f"number {n}"}], max_tokens=5, seed=n
                    )
                    for n in range(40)
                )
            )

    answers = asyncio.run(ask())
    assert len({answer.id for answer in answers}) == 40


def test_metrics_are_what_the_engine_did() -> None:
    """Three requests worked by hand: counters, histograms and gauges of vLLM's names, and nothing that is not measured."""
    with engine_server() as running:
        for _ in range(2):
            running.complete([5] * 10, max_tokens=4, ignore_eos=True)
        running.complete([6] * 3, max_tokens=1, ignore_eos=True)
        page = {
            "vllm:prompt_tokens_total": 23,
            "vllm:generation_tokens_total": 9,
            "vllm:prefix_cache_queries_total": 23,
            "vllm:prefix_cache_hits_total": 8,
            "vllm:prompt_tokens_cached_total": 8,
            "vllm:num_preemptions_total": 0,
            "vllm:time_to_first_token_seconds_count": 3,
            "vllm:inter_token_latency_seconds_count": 6,
            "vllm:request_time_per_output_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 3,
            "vllm:request_queue_time_seconds_count": 3,
            "vllm:request_prefill_time_seconds_count": 3,
            "vllm:request_decode_time_seconds_count": 3,
            "vllm:request_inference_time_seconds_count": 3,
            "vllm:request_prompt_tokens_sum": 23,
            "vllm:request_generation_tokens_sum": 9,
            "vllm:request_params_max_tokens_sum": 9,
            "vllm:request_prefill_kv_computed_tokens_sum": 15,
            "vllm:iteration_tokens_total_sum": 15 + 9,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            # Ten tokens fill two blocks of 4, thirteen three; the second request's are there already.
            "kvscope_engine_kv_blocks_stored_total": 3,
        }
        assert {name: running.metric(name) for name in page} == page
        assert running.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 15
        assert running.metric("vllm:request_success_total", finished_reason="length") == 3
        text = running.client.get("/metrics").text
        assert 'num_gpu_blocks="65"' in text
        assert 'block_size="4"' in text
        for absent in ("external_prefix", "spec_decode", "mm_cache", "lora", "kv_block_reuse_gap"):
            assert f"vllm:{absent}" not in text


def test_every_name_of_vllms_on_the_page_is_one_that_its_adapter_knows(server: Running) -> None:
    """No name is made up: each series is vLLM's own by kvscope's table of its names, with vLLM's labels."""
    page = parse_page(server.client.get("/metrics").text)
    told = {series.name for series, _, _ in page.samples if series.name.startswith("vllm:")}
    wires = {wire for family in HISTOGRAMS.values() for wire in family}
    unmapped = {
        "vllm:cache_config_info",
        "vllm:num_requests_waiting_by_reason",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
    }
    for name in told:
        base = name.removeprefix("vllm:")
        for suffix in ("_bucket", "_sum", "_count", "_created"):
            base = base.removesuffix(suffix)
        is_known = base in wires or f"vllm:{base}" in unmapped or NAMES.bare(name) is not None
        assert is_known, name
    assert all("model_name" in s.labels for s, _, _ in page.samples if s.name.startswith("vllm:num_"))


def test_attach_reads_its_page_and_its_kv_events() -> None:
    """`kvscope attach vllm URL`: facts, counters and blocks equal the engine's; nothing is unseen."""
    with engine_server(served_model(num_blocks=24), PUBLISHED) as running:
        publisher = running.assembled.publisher
        assert publisher is not None
        with Attached(running, worker="w0") as attached:  # type: ignore[arg-type]
            attached.until(lambda: bool(attached.sink.rows("worker")))
            for number in range(12):
                running.complete([number] * 20, max_tokens=4, ignore_eos=True)
            attached.until(lambda: attached.values("output_tokens_total")[-1:] == [48.0])
            stored = publisher.num_stored
            attached.until(lambda: len([r for r in attached.sink.rows("block") if r["change"] == "stored"]) == stored)
            running.client.post("/reset_prefix_cache")
            attached.until(lambda: "cache_reset" in attached.marks())
        assert attached.error is None
        attached.valid()
        (worker, *_) = attached.sink.rows("worker")
        assert worker["engine"] == "kvscope"
        assert (worker["block_size"], worker["num_blocks"], worker["prefix_caching"]) == (4, 24, True)
        assert (worker["model"], worker["max_context"], worker["engine_version"][-8:]) == (NAME, 96, "+kvscope")
        evicted = [row for row in attached.sink.rows("block") if row["change"] == "evicted"]
        assert len(evicted) == publisher.num_removed == running.metric("kvscope_engine_kv_block_evictions_total") > 0
        assert attached.values("prefix_queries_tokens_total")[-1] == 240
        assert attached.values("requests_finished_total")[-1] == 12
        assert "gap" not in attached.marks()


def test_doctor_says_what_is_visible(server: Running) -> None:
    """`kvscope doctor URL` knows the page, and says what would show more."""
    ended = subprocess.run(
        [sys.executable, "-m", "collector.cli", "doctor", server.url, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = json.loads(ended.stdout)["checks"]
    (engine,) = [check for check in checks if check["subject"] == server.url]
    assert engine["state"] == "ok"
    assert engine["facts"]["num_blocks"] == 64


class Followed:
    """Our own reader of KV events at a publisher, in place before the first message."""

    def __init__(self, running: Running, *, subscribes: bool = True) -> None:
        (source,) = running.client.get("/kv_event_sources").json().values()
        self.decoder = KvEventDecoder(b"salt")
        endpoint = KvEndpoint(source["endpoint"], bind=False, replay=source["replay_endpoint"], topic=source["topic"])
        if not subscribes:  # nobody publishes under this topic: everything has to be asked for again
            endpoint = KvEndpoint(source["endpoint"], bind=False, replay=source["replay_endpoint"], topic="nothing")
        self.reader = KvReader("w0", [endpoint], self.decoder, lambda tables: None)
        self.reader.start()


def test_kv_events_count_what_the_engine_stored_and_gave_up() -> None:
    """Stored, removed, cleared and the sequence of messages, as our reader takes them; chains are whole."""
    with engine_server(served_model(num_blocks=24), PUBLISHED) as running:
        publisher = running.assembled.publisher
        assert publisher is not None
        followed = Followed(running)
        for number in range(30):
            running.complete([number % 9] * (5 + number), max_tokens=8, ignore_eos=True)
        running.client.post("/reset_prefix_cache")
        running.wait_until_empty()
        running.wait_until(lambda: followed.decoder.counts.cleared == 1)
        followed.reader.stop()
        counts = followed.decoder.counts
        stored = running.metric("kvscope_engine_kv_blocks_stored_total")
        removed = running.metric("kvscope_engine_kv_block_evictions_total")
        assert counts.stored == publisher.num_stored == stored > 0
        assert counts.removed == publisher.num_removed == removed > 0
        assert (counts.lost_messages, counts.unknown_parents, counts.unknown_removed, counts.unaligned_blocks) == (
            0,
        ) * 4
        assert followed.reader.refused == 0


def test_kv_events_that_were_missed_are_replayed() -> None:
    """A reader that subscribes to nothing gets all of it from the replay endpoint."""
    with engine_server(options=PUBLISHED) as running:
        publisher = running.assembled.publisher
        assert publisher is not None
        for number in range(5):
            running.complete([number] * 9, max_tokens=1)
        running.wait_until_empty()
        followed = Followed(running, subscribes=False)
        running.wait_until(lambda: followed.decoder.counts.stored == publisher.num_stored)
        followed.reader.stop()
        assert followed.reader.replayed == followed.decoder.counts.messages > 0


def test_garbage_at_the_replay_endpoint_harms_nobody() -> None:
    """Too few frames, too many, a number of another size: no answer to them, and the next good request is answered."""
    with engine_server(options=PUBLISHED) as running:
        running.complete([1] * 9, max_tokens=1)
        (source,) = running.client.get("/kv_event_sources").json().values()
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(source["replay_endpoint"])
            for frames in ([b""], [b"x"], [b"", b"1"], [b"", b"x" * 8, b"y"], [b"", b"x" * 100]):
                dealer.send_multipart(frames)
            dealer.send_multipart([b"", bytes(8)])
            assert dealer.poll(10_000)
            assert len(dealer.recv_multipart()) == 4
            while (last := dealer.recv_multipart())[-2] != b"\xff" * 8:
                assert len(last) == 4
            dealer.close()
        finally:
            context.term()


def test_kv_messages_are_bytes_as_vllm_writes_them() -> None:
    """Three frames; an array of time, events and rank; a stored event is a map with vLLM's fields and no nil beyond them."""
    with engine_server(options=PUBLISHED) as running:
        (source,) = running.client.get("/kv_event_sources").json().values()
        context = zmq.Context()
        try:
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.LINGER, 0)
            sub.subscribe(b"kv@")
            sub.connect(source["endpoint"])
            frames: list[bytes] = []

            def first() -> bool:
                running.complete([len(frames)] * 9, max_tokens=1, cache_salt="mine")
                if sub.poll(50):
                    frames.extend(sub.recv_multipart())
                return bool(frames)

            running.wait_until(first)
            sub.close()
        finally:
            context.term()
        topic, seq, payload = frames[:3]
        assert topic == b"kv@w0@tiny"
        assert len(seq) == 8
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert rank == 0
        (stored,) = events
        assert stored.pop("block_hashes")
        assert stored == {
            "type": "BlockStored",
            "parent_block_hash": None,
            "token_ids": [0] * 8,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["mine"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


def test_recorded_rows_and_kv_events_tell_of_the_same_blocks() -> None:
    """The engine's own block rows and its published events, by count of each change."""
    with engine_server(served_model(num_blocks=24), PUBLISHED) as running:
        for number in range(12):
            running.complete([number] * 20, max_tokens=4, ignore_eos=True)
        publisher = running.assembled.publisher
    assert publisher is not None
    changes = running.sink.table("block").column("change").to_pylist()
    assert changes.count("stored") == publisher.num_stored
    assert changes.count("evicted") == publisher.num_removed > 0


_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs; the command itself asks for a distribution of vLLM's name, which its CPU build has not."""


def bench_serve(
    python: Path, out: Path, url: str, name: str, tokenizer: Path, backend: str, *words: str
) -> dict[str, Any]:
    """What `vllm bench serve` found."""
    from tests import live_vllm

    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    ended = subprocess.run(
        [
            *(str(python), "-c", _BENCH_SERVE, "--backend", backend),
            *("--base-url", url, "--endpoint", endpoint, "--model", name, "--tokenizer", str(tokenizer)),
            *("--dataset-name", "random", "--ignore-eos", "--disable-tqdm", *words),
            *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
        ],
        env={
            **{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")},
            **live_vllm.ENVIRONMENT,
        },
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.server
@pytest.mark.timeout(600)
def test_vllms_own_load_generator_drives_it(tmp_path: Path) -> None:
    """`vllm bench serve` against a model folder, completions and chat: every request done, its counts are ours."""
    python = require("vllm")
    from engine_probe.engine.server.model import load_model
    from engine_probe.engine.torch_executor.executor import TorchOptions
    from tests import live_vllm

    folder = live_vllm.model_folder()
    model = load_model(
        folder,
        TorchOptions(device="cpu", dtype="float32", num_blocks=400, block_size=4, max_context=1024),
        names=(NAME,),
    )
    words = ("--random-input-len", "60", "--random-output-len", "12", "--num-prompts", "20", "--request-rate", "50")
    with engine_server(model) as running:
        for backend in ("openai", "openai-chat"):
            made = running.metric("vllm:generation_tokens_total")
            result = bench_serve(python, tmp_path / f"{backend}.json", running.url, NAME, folder, backend, *words)
            assert (result["completed"], result["failed"]) == (20, 0)
            assert result["total_output_tokens"] == 20 * 12
            assert running.metric("vllm:generation_tokens_total") - made >= 20 * 12
        assert running.metric("vllm:request_success_total", finished_reason="length") >= 40
        assert threading.active_count() < 60


@pytest.mark.server
@pytest.mark.timeout(600)
def test_vllms_own_load_generator_drives_a_real_model(tmp_path: Path) -> None:
    """SmolLM2 with its own tokenizer and chat template: the load generator, which reads them with other code, counts as we do."""
    python = require("vllm")
    require("llama-server")  # the model lies beside it
    from engine_probe.engine.server.model import load_model
    from engine_probe.engine.torch_executor.executor import TorchOptions
    from tests.gguf_model import convert
    from tests.servers import llama_model

    folder = convert(llama_model(), tmp_path / "smollm2")
    model = load_model(
        folder, TorchOptions(device="cpu", num_blocks=400, block_size=4, max_context=1024), names=(NAME,)
    )
    words = ("--random-input-len", "24", "--random-output-len", "5", "--num-prompts", "6", "--request-rate", "inf")
    with engine_server(model) as running:
        for backend in ("openai", "openai-chat"):
            asked = running.metric("vllm:prompt_tokens_total")
            result = bench_serve(python, tmp_path / f"{backend}.json", running.url, NAME, folder, backend, *words)
            assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
            assert running.metric("vllm:prompt_tokens_total") - asked == result["total_input_tokens"]
        answer = running.client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 12,
                "temperature": 0,
            },
        ).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
