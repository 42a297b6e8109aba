"""The same load, written as each tool would write it: files for tests of `import` and of what a verdict may say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

AT: Final = 1_764_403_200_000_000_000


@dataclass(frozen=True)
class Sent:
    """One request: seconds after AT, seconds to its first token, gaps after it, prompt and cached tokens."""

    start_s: float
    ttft_s: float
    gaps_s: Sequence[float]
    prompt: int
    cached: int

    @property
    def output(self) -> int:
        return len(self.gaps_s) + 1

    @property
    def arrival_ns(self) -> int:
        return AT + round(self.start_s * 1e9)

    @property
    def token_ns(self) -> list[int]:
        return [self.arrival_ns + round(t * 1e9) for t in np.cumsum([self.ttft_s, *self.gaps_s]).tolist()]


def load(num: int = 400, *, slower: float = 1.0, seed: int = 3) -> list[Sent]:
    """Poisson arrivals at 8 a second; TTFT has a long tail and is `slower` times as long, gaps are about 20 ms."""
    random = np.random.default_rng(seed)
    start = np.cumsum(random.exponential(1 / 8, num))
    ttft = random.lognormal(-2.0, 0.4, num) * slower
    return [
        Sent(float(start[i]), float(ttft[i]), random.uniform(0.018, 0.022, 7).tolist(), int(200 + i % 50), 96)
        for i in range(num)
    ]


def vllm(sent: Sequence[Sent], folder: Path) -> Path:
    return _write(
        folder / "vllm.json",
        {
            "date": "20251129-081000",
            "endpoint_type": "vllm",
            "backend": "vllm",
            "model_id": "m",
            "tokenizer_id": "m",
            "num_prompts": len(sent),
            "request_rate": 8.0,
            "duration": sent[-1].start_s + 1.0,
            "input_lens": [one.prompt for one in sent],
            "output_lens": [one.output for one in sent],
            "ttfts": [one.ttft_s for one in sent],
            "itls": [list(one.gaps_s) for one in sent],
            "start_times": [5000.0 + one.start_s for one in sent],
            "errors": ["" for _ in sent],
        },
    )


def sglang(sent: Sequence[Sent], folder: Path) -> Path:
    return _write(
        folder / "sglang.jsonl",
        {
            "backend": "sglang-oai",
            "dataset_name": "random",
            "request_rate": 8.0,
            "random_range_ratio": 0.0,
            "duration": sent[-1].start_s + 1.0,
            "input_lens": [one.prompt for one in sent],
            "output_lens": [one.output for one in sent],
            "ttfts": [one.ttft_s for one in sent],
            "itls": [list(one.gaps_s) for one in sent],
            "errors": ["" for _ in sent],
        },
    )


def aiperf(sent: Sequence[Sent], folder: Path) -> Path:
    def line(number: int, one: Sent) -> dict[str, Any]:
        return {
            "metadata": {
                "session_num": number,
                "x_request_id": f"a-{number}",
                "request_start_ns": one.arrival_ns,
                "request_end_ns": one.token_ns[-1] + 1_000_000,
                "worker_id": "w",
                "record_processor_id": "p",
                "benchmark_phase": "profiling",
                "was_cancelled": False,
            },
            "metrics": {
                "time_to_first_token": {"value": one.ttft_s * 1e3, "unit": "ms"},
                "inter_chunk_latency": {"value": [gap * 1e3 for gap in one.gaps_s], "unit": "ms"},
                "usage_prompt_tokens": {"value": one.prompt, "unit": "tokens"},
                "usage_completion_tokens": {"value": one.output, "unit": "tokens"},
                "usage_prompt_cache_read_tokens": {"value": one.cached, "unit": "tokens"},
            },
            "error": None,
        }

    return _write(folder / "profile_export.jsonl", *(line(*pair) for pair in enumerate(sent)))


def guidellm(sent: Sequence[Sent], folder: Path) -> Path:
    def request(number: int, one: Sent) -> dict[str, Any]:
        timings = {
            "request_start": one.arrival_ns / 1e9,
            "first_token_iteration": one.token_ns[0] / 1e9,
            "last_token_iteration": one.token_ns[-1] / 1e9,
            "request_end": one.token_ns[-1] / 1e9 + 0.001,
        }
        return {
            "request_id": f"g-{number}",
            "response_id": f"chatcmpl-g-{number}",
            "info": {"request_id": f"g-{number}", "timings": timings},
            "input_metrics": {"text_tokens": one.prompt, "cached_tokens": one.cached},
            "output_metrics": {"text_tokens": one.output},
        }

    requests = {"successful": [request(*pair) for pair in enumerate(sent)], "incomplete": [], "errored": []}
    return _write(
        folder / "guidellm.json", {"metadata": {"version": 2}, "config": {}, "benchmarks": [{"requests": requests}]}
    )


def genai_perf(sent: Sequence[Sent], folder: Path) -> Path:
    def request(one: Sent) -> dict[str, Any]:
        chunk = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        usage = {
            "prompt_tokens": one.prompt,
            "completion_tokens": one.output,
            "prompt_tokens_details": {"cached_tokens": one.cached},
        }
        last = "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n"
        return {
            "timestamp": one.arrival_ns,
            "request_inputs": {"payload": '{"model": "m"}'},
            "response_timestamps": [*one.token_ns, one.token_ns[-1] + 1_000_000],
            "response_outputs": [*({"response": chunk} for _ in one.token_ns), {"response": last}],
        }

    experiment = {"experiment": {"mode": "request_rate", "value": 8.0}, "requests": [request(one) for one in sent]}
    return _write(folder / "profile_export.json", {"experiments": [experiment], "service_kind": "openai"})


def genai_spans(sent: Sequence[Sent], folder: Path) -> Path:
    def line(number: int, one: Sent) -> dict[str, Any]:
        told: dict[str, Any] = {
            "gen_ai.operation.name": {"stringValue": "chat"},
            "gen_ai.provider.name": {"stringValue": "openai"},
            "gen_ai.request.model": {"stringValue": "m"},
            "gen_ai.request.stream": {"boolValue": True},
            "gen_ai.response.time_to_first_chunk": {"doubleValue": one.ttft_s},
            "gen_ai.usage.input_tokens": {"intValue": str(one.prompt)},
            "gen_ai.usage.output_tokens": {"intValue": str(one.output)},
        }
        span = {
            "traceId": f"{number + 1:032x}",
            "spanId": f"{number + 1:016x}",
            "name": "chat m",
            "kind": 3,
            "startTimeUnixNano": str(one.arrival_ns),
            "endTimeUnixNano": str(one.token_ns[-1]),
            "attributes": [{"key": key, "value": value} for key, value in told.items()],
        }
        return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}

    return _write(folder / "spans.jsonl", *(line(*pair) for pair in enumerate(sent)))


def nginx(sent: Sequence[Sent], folder: Path) -> Path:
    path = folder / "access.log"
    path.write_text(
        "".join(
            f'{one.token_ns[-1] / 1e9:.3f} "POST /v1/chat/completions" 200 rt={(one.token_ns[-1] - one.arrival_ns) / 1e9:.3f} '
            f"uht=0.010 urt=0.100 up=10.0.0.1:8000 id=n-{number}\n"
            for number, one in enumerate(sent)
        )
    )
    return path


WRITERS: Final[dict[str, Callable[[Sequence[Sent], Path], Path]]] = {
    "vllm-bench": vllm,
    "sglang-bench": sglang,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "genai-perf": genai_perf,
    "client-spans": genai_spans,
    "nginx": nginx,
}
"""By the source that they declare."""


def _write(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path
