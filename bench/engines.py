"""The embedded engine beside vLLM's CPU build and llama-server: the same weights, prompts and machine, one thread each.

Run from a source tree in which the servers are set up (.ci/setup-vllm, .ci/setup-llama): kvscope bench engines [--json]. All
three serve SmolLM2-135M over HTTP; they take turns in one run and stand idle otherwise. llama-server computes with the 4-bit file
as it is published; the others with the same numbers unpacked to bfloat16. TTFT is of one request at a time with a prompt that
was not seen before; throughput is of 8 requests at once, prompts of 64 tokens, answers of 64. Best of the rounds. Not a gate: the
embedded engine is there to be read and instrumented, and how much slower it is should be known.
"""

from __future__ import annotations

import contextlib
import http.client
import json as codec
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
ROUNDS: Final = 3
SHORT, LONG = 64, 512
ANSWER, AT_ONCE = 64, 8
WORDS: Final = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
]


def run(json: bool, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure; the same keys whatever `json` is (the verb prints them).

    by engine: ttft_short_s, ttft_long_s (prompts of about 64 and 512 words), tpot_s of a request alone,
    output_tokens_per_s of 8 at once; ratio: each over the embedded engine's
    """
    with tempfile.TemporaryDirectory(prefix="kvscope-engines-") as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            tell("starting three servers")
            servers = {
                "kvscope": stack.enter_context(_kvscope(folder)),
                "vllm": stack.enter_context(_vllm(folder)),
                "llama-server": stack.enter_context(_llama()),
            }
            best: dict[str, dict[str, float]] = {engine: {} for engine in servers}
            for number in range(ROUNDS):
                for engine, (url, model) in servers.items():
                    tell(f"round {number + 1} of {ROUNDS}: {engine}")
                    for key, value in _measure(url, model, number).items():
                        better = max if key == "output_tokens_per_s" else min
                        best[engine][key] = better(best[engine].get(key, value), value)
    ours = best["kvscope"]
    ratios = {
        engine: {key: value / ours[key] for key, value in figures.items()}
        for engine, figures in best.items()
        if engine != "kvscope"
    }
    return {**best, "ratio_to_kvscope": ratios}


def _measure(url: str, model: str, seed: int) -> dict[str, float]:
    short = _ask(url, model, _prompt(SHORT, 10 * seed), ANSWER)
    long = _ask(url, model, _prompt(LONG, 10 * seed + 1), 2)
    tokens: list[int] = []
    threads = [
        threading.Thread(
            target=lambda i=i: tokens.append(len(_ask(url, model, _prompt(SHORT, 1000 + 10 * seed + i), ANSWER)))
        )
        for i in range(AT_ONCE)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "ttft_short_s": short[0],
        "ttft_long_s": long[0],
        "tpot_s": (short[-1] - short[0]) / (len(short) - 1),
        "output_tokens_per_s": sum(tokens) / (time.monotonic() - began),
    }


def _prompt(words: int, seed: int) -> str:
    """Text that no other prompt begins with."""
    return " ".join([f"{seed}:", *(WORDS[(seed * 7 + i * i) % len(WORDS)] for i in range(words))])


def _ask(url: str, model: str, prompt: str, max_tokens: int) -> list[float]:
    """Instants (s from the request) of the chunks of a streamed completion."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    began = time.monotonic()
    connection.request("POST", "/v1/completions", codec.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{url} answered {answer.status}: {answer.read()[:300]!r}")
    instants = []
    for line in answer:
        if line.startswith(b"data: {"):
            chunk = codec.loads(line[6:])
            if chunk.get("choices") and chunk["choices"][0].get("text") is not None:
                instants.append(time.monotonic() - began)
    connection.close()
    return instants


@contextlib.contextmanager
def _kvscope(folder: Path) -> Iterator[tuple[str, str]]:
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.gguf_model import convert
    from tests.servers import answers, free_port, llama_model, running, wait_for

    model = convert(llama_model(), folder / "smollm2", torch.bfloat16)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "collector.cli",
        "engine",
        "serve",
        "--model",
        model,
        "--port",
        port,
        "--threads",
        1,
    ]
    command += ["--num-blocks", 512, "--max-num-seqs", 8]
    with running(command, folder / "kvscope.log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(f"{url}/health"), "kvscope engine serve", process, folder / "kvscope.log", 120)
        yield url, "smollm2"


@contextlib.contextmanager
def _vllm(folder: Path) -> Iterator[tuple[str, str]]:
    from tests.live_vllm import VllmServer

    server = VllmServer(folder / "vllm.log", num_blocks=256)
    server.flags = ("--model", str(folder / "smollm2"), "--served-model-name", "smollm2")
    try:
        server.start()
        yield server.url, "smollm2"
    finally:
        server.stop()


@contextlib.contextmanager
def _llama() -> Iterator[tuple[str, str]]:
    from tests.servers import running_llama_server

    with running_llama_server(ctx_size=8192, num_slots=AT_ONCE) as url:
        yield url, "smollm2"
