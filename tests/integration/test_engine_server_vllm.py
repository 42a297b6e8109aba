"""The embedded engine's server held against a real vLLM: the same weights, the same questions, the same answers and shapes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_probe.chain_hash import ROOT
from engine_probe.engine.server.assembly import ServerOptions
from engine_probe.engine.server.kv_messages import AllBlocksCleared, BlockRemoved, EventBatch
from engine_probe.engine.server.model import load_model
from engine_probe.engine.torch_executor.executor import TorchOptions
from tests import live_vllm
from tests.engine_server import BLOCK, Running, engine_server
from tests.live_vllm import MODEL_NAME, VllmServer
from tests.servers import require

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PROMPTS = ([7, 8, 9, 10, 11] * 8, [100, 200, 300], [3 + (i * 37) % 500 for i in range(90)])
EXTRA = frozenset(("refusal",))
"""OpenAI's own, which vLLM's answers have too, or leave out by release."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """In float32, so that rounding decides no token."""
    require("vllm")
    server = VllmServer(
        tmp_path_factory.mktemp("vllm") / "log", flags=("--dtype", "float32"), env={"VLLM_SERVER_DEV_MODE": "1"}
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def ours(vllm: VllmServer) -> Iterator[Running]:
    """The same folder."""
    options = TorchOptions(device="cpu", dtype="float32", num_blocks=400, block_size=BLOCK, max_context=1024)
    with engine_server(load_model(live_vllm.model_folder(), options, names=(MODEL_NAME,))) as running:
        yield running


def both(vllm: VllmServer, ours: Running, path: str, body: dict[str, Any]) -> list[httpx.Response]:
    """The same question to each."""
    return [
        httpx.post(f"{url}{path}", json={"model": MODEL_NAME, **body}, timeout=120, trust_env=False)
        for url in (vllm.url, ours.url)
    ]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_answers_are_the_same_text(vllm: VllmServer, ours: Running, prompt: list[int]) -> None:
    """Forty tokens of the same weights: same text, same counts, same reason."""
    theirs, own = (
        answer.json()
        for answer in both(
            vllm, ours, "/v1/completions", {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        )
    )
    assert own["choices"][0]["text"] == theirs["choices"][0]["text"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert own["usage"][name] == theirs["usage"][name]
    assert own["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"]


def test_a_stop_string_ends_both_at_the_same_place(vllm: VllmServer, ours: Running) -> None:
    """Three characters out of the middle of the answer."""
    body = {"prompt": PROMPTS[2], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = both(vllm, ours, "/v1/completions", body)[0].json()["choices"][0]["text"]
    stop = next(text[at : at + 3] for at in range(8, len(text)) if "\ufffd" not in text[at : at + 3])
    theirs, own = (answer.json() for answer in both(vllm, ours, "/v1/completions", {**body, "stop": [stop]}))
    assert own["choices"][0]["text"] == theirs["choices"][0]["text"]
    assert own["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"] == "stop"
    assert own["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]


def test_small_endpoints_say_the_same(vllm: VllmServer, ours: Running) -> None:
    """Token ids both ways; cards of models have the same fields."""
    for path, body in (
        ("/tokenize", {"prompt": "Grüße, world"}),
        ("/detokenize", {"tokens": [40, 50, 60]}),
    ):
        theirs, own = (answer.json() for answer in both(vllm, ours, path, body))
        shared = set(theirs) & set(own) - {"max_model_len"}
        assert shared
        assert {name: own[name] for name in shared} == {name: theirs[name] for name in shared}
    cards = [httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0] for url in (vllm.url, ours.url)]
    assert set(cards[1]) <= set(cards[0])


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_no_field_that_vllms_have_not(vllm: VllmServer, ours: Running, stream: bool) -> None:
    """A reader of vLLM's answers finds what it looks for: names of fields at every level, whole and streamed."""
    body = {
        "prompt": PROMPTS[1],
        "max_tokens": 5,
        "temperature": 0,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    found = []
    for answer in both(vllm, ours, "/v1/completions", body):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        documents = [json.loads(line) for line in lines] if stream else [answer.json()]
        found.append(frozenset().union(*(names(document) for document in documents)))
    assert found[1] - found[0] - EXTRA == set()
    assert {"choices[].text", "choices[].finish_reason", "usage.prompt_tokens"} <= found[1]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [3] * 2000},
        {"prompt": [3] * 1000, "max_tokens": 100},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "top_p": 2},
        {"prompt": "x", "model": "other"},
        {"prompt": 5},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_what_vllm_refuses_is_refused_with_the_same_status(
    vllm: VllmServer, ours: Running, body: dict[str, Any]
) -> None:
    """4xx for 4xx, and 200 where an answer is only cut short by the context."""
    theirs, own = both(vllm, ours, "/v1/completions", body)
    assert own.status_code == theirs.status_code
    assert ("error" in own.json()) == (own.status_code >= 400)


def test_every_series_of_ours_is_on_vllms_page(vllm: VllmServer, ours: Running) -> None:
    """Names and labels; only what says where its value comes from may have other values."""
    assert httpx.get(f"{vllm.url}/health", trust_env=False).status_code == 200
    residency = ("vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds")  # with --kv-cache-metrics
    pages = [series(httpx.get(f"{url}/metrics", trust_env=False).text) for url in (vllm.url, ours.url)]
    assert {name for name in pages[1] if name not in pages[0] and not name.startswith(residency)} == set()
    for name, labels in pages[1].items():
        if name in pages[0] and name != "vllm:cache_config_info":
            assert labels == pages[0][name], name


def test_vllms_own_classes_read_our_kv_events(tmp_path: Path) -> None:
    """Its decoder, from its package, takes our bytes: stored, removed, cleared."""
    python = require("vllm")
    import msgspec

    from tests.unit.test_engine_server_parts import sequence

    with engine_server(options=ServerOptions(kv_events="0")) as running:
        publisher = running.assembled.publisher
        assert publisher is not None
        stored = publisher._chain(sequence(8, [11, 12]), [11, 12], ROOT, 0)
    batch = EventBatch(12.5, [stored, BlockRemoved([11], "GPU", 0), AllBlocksCleared()], 0)
    (tmp_path / "batch").write_bytes(msgspec.msgpack.encode(batch))
    script = (
        "import sys, msgspec\n"
        "from vllm.distributed.kv_events import KVEventBatch, BlockStored, BlockRemoved, AllBlocksCleared\n"
        "batch = msgspec.msgpack.Decoder(KVEventBatch).decode(open(sys.argv[1], 'rb').read())\n"
        "stored, removed, cleared = batch.events\n"
        "assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)\n"
        "assert isinstance(cleared, AllBlocksCleared)\n"
        "assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)\n"
        "assert (stored.block_hashes, stored.parent_block_hash) == ([11, 12], None)\n"
        "assert (stored.token_ids, stored.block_size, stored.medium) == (list(range(8)), 4, 'GPU')\n"
        "assert removed.block_hashes == [11]\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        [str(python), "-c", script, str(tmp_path / "batch")],
        env=env | live_vllm.ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def names(document: Any, at: str = "") -> frozenset[str]:
    """Paths of all fields."""
    if isinstance(document, dict):
        own = {f"{at}{'.' if at else ''}{name}" for name in document}
        below = [names(value, f"{at}{'.' if at else ''}{name}") for name, value in document.items()]
        return frozenset(own).union(*below)
    if isinstance(document, list):
        return frozenset().union(*(names(value, f"{at}[]") for value in document))
    return frozenset()


def series(text: str) -> dict[str, frozenset[str]]:
    """Names of vLLM's series -> names of their labels."""
    found: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, rest = line.partition("{")
            labels = frozenset(part.partition("=")[0] for part in rest.partition("}")[0].split(",") if "=" in part)
            found[name.partition(" ")[0]] = labels
    return found
