"""vLLM's start-up lines -> slow facts of a worker: geometry of the KV cache, version, settings by the engine's own
names.

Lines carry prefixes that change from release to release (`(EngineCore_DP0 pid=7) INFO 11-29 13:20:26 [core.py:133]`),
so each fact is searched, never anchored. Forms by version: `# GPU blocks: N` (0.8 V0); `GPU KV cache size: N tokens`
and `Maximum concurrency for L tokens per request: X` on two lines up to 0.27, on one since 0.28, with the device's
name (`CPU KV cache size`) off CUDA; settings as `args: Namespace(...)` (0.8) or `non-default args: {...}` after.
Invariant: a line that is not understood says nothing; no line raises. Source: reference 4.8, 18.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable
from typing import Any, Final

MAX_LINE_CHARS: Final = 65_536

_VERSION = re.compile(r"(?:LLM engine \(v|API server version |\bversion )(\d+\.\d+[\w.+]*)")
_ARGS = re.compile(r"(?:non-default args: (?P<map>\{.*\})|\bargs: (?P<namespace>Namespace\(.*\)))\s*$")
_SIZE = re.compile(r"\b(?P<device>[A-Z]+) KV cache size: (?P<tokens>\d[\d,]{0,17}) tokens")
_CONCURRENCY = re.compile(
    r"Maximum concurrency for (?P<context>\d[\d,]{0,17}) tokens per request: (?P<times>\d+(?:\.\d+)?)x"
)
_BLOCKS = re.compile(r"# \w+ blocks: (?P<blocks>\d[\d,]{0,17})")
_OVERRIDE = re.compile(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(?P<blocks>\d{1,18})")
_AVAILABLE = re.compile(r"Available KV cache memory: (?P<gib>\d{1,9}(?:\.\d+)?) GiB")
_WEIGHTS = re.compile(r"[Mm]odel (?:loading|weights) (?:took|take) (?P<gib>\d{1,9}(?:\.\d+)?) ?Gi?B")
_CONTEXT = re.compile(r"Using max model len (?P<context>\d{1,18})")
_BACKEND = re.compile(r"Using (?P<backend>[\w-]+(?: Attention)?) (?:attention )?backend")
_CONFIG_PAIR = re.compile(
    r"\b(?P<key>dtype|max_seq_len|tensor_parallel_size|pipeline_parallel_size|data_parallel_size|kv_cache_dtype"
    r"|enable_prefix_caching|enable_chunked_prefill|quantization|enforce_eager|served_model_name)=(?P<value>[\w.+/-]+)"
)
_GIB: Final = 1 << 30

SAFE_FLAGS: Final = frozenset(
    (
        "block_size",
        "num_gpu_blocks_override",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "long_prefill_token_threshold",
        "max_model_len",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "dtype",
        "quantization",
        "enforce_eager",
        "scheduling_policy",
        "async_scheduling",
        "swap_space",
        "cpu_offload_gb",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "enable_prompt_tokens_details",
        "enable_per_request_metrics",
        "enable_request_id_headers",
        "disable_log_stats",
        "prefix_caching_hash_algo",
        "num_speculative_tokens",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "calculate_kv_scales",
        "disable_hybrid_kv_cache_manager",
        "kv_offloading_size",
        "kv_offloading_backend",
        "enable_logging_iteration_details",
        "served_model_name",
        "distributed_executor_backend",
        "attention_backend",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "api_server_count",
        "enable_mfu_metrics",
        "preemption_mode",
        "num_scheduler_steps",
    )
)
"""Settings that are kept. Others (paths, addresses, keys, templates) may hold secrets and never leave the log."""


class StartupLog:
    """Collects facts line by line; `facts` has the columns of a `worker` row that were told (others are absent)."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"engine": "vllm"}
        self.flags: dict[str, str] = {}

    def feed(self, line: str) -> dict[str, list[dict[str, Any]]]:
        """Take in one line of the engine's output. It tells settings only: no rows come of it."""
        if len(line) > MAX_LINE_CHARS:
            line = line[:MAX_LINE_CHARS]
        facts, flags = self.facts, self.flags
        if (match := _ARGS.search(line)) is not None:
            self._settings(match["map"] or match["namespace"])
        if "LLM engine" in line:
            for pair in _CONFIG_PAIR.finditer(line):
                self._config(pair["key"], pair["value"])
        if (match := _VERSION.search(line)) is not None:
            facts["engine_version"] = match[1]
        if (match := _SIZE.search(line)) is not None:
            flags["kv_cache_size_tokens"] = match["tokens"].replace(",", "")
        if (match := _CONCURRENCY.search(line)) is not None:
            facts["max_context"] = int(match["context"].replace(",", ""))
            flags["kv_cache_max_concurrency"] = match["times"]
        if (match := _OVERRIDE.search(line)) is not None:
            self._blocks(int(match["blocks"]))
        elif (match := _BLOCKS.search(line)) is not None:
            self._blocks(int(match["blocks"].replace(",", "")))
        if (match := _CONTEXT.search(line)) is not None:
            facts["max_context"] = int(match["context"])
        if (match := _AVAILABLE.search(line)) is not None:
            flags["available_kv_cache_memory_bytes"] = str(round(float(match["gib"]) * _GIB))
        if (match := _WEIGHTS.search(line)) is not None:
            facts["weights_bytes"] = round(float(match["gib"]) * _GIB)
        if (match := _BACKEND.search(line)) is not None and "ttention" in line:
            flags["attention_backend"] = match["backend"]
        return {}

    def worker_facts(self) -> dict[str, Any]:
        """Columns of a `worker` row; `flags` in the engine's own names. Unknown ones are absent."""
        facts = dict(self.facts)
        size, tokens = facts.get("block_size"), self.flags.get("kv_cache_size_tokens")
        if "num_blocks" not in facts and size and tokens:
            facts["num_blocks"] = int(tokens) // size - 1
        return facts | {"flags": dict(self.flags)}

    def _blocks(self, num_gpu_blocks: int) -> None:
        self.flags["num_gpu_blocks"] = str(num_gpu_blocks)
        self.facts["num_blocks"] = max(num_gpu_blocks - 1, 0)  # one is the null block

    def _settings(self, text: str) -> None:
        for key, value in literal_pairs(text):
            if key in SAFE_FLAGS and value is not None:
                self.flags[key] = value if isinstance(value, str) else _flag_text(value)
                self._fact(key, value)

    def _fact(self, key: str, value: Any) -> None:
        if key == "block_size" and type(value) is int and 0 < value < 1 << 31:
            self.facts["block_size"] = value
        elif key == "max_model_len" and type(value) is int and 0 < value < 1 << 31:
            self.facts["max_context"] = value
        elif key == "enable_prefix_caching" and isinstance(value, bool):
            self.facts["prefix_caching"] = value
        elif key == "served_model_name":
            self.facts["model"] = _flag_text(value)

    def _config(self, key: str, text: str) -> None:
        text = text.rstrip(",")
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        facts = self.facts
        sizes = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}
        if key in sizes and is_number:
            facts[sizes[key]] = int(text)
        elif key == "max_seq_len" and is_number:
            facts["max_context"] = int(text)
        elif key == "dtype":
            facts["dtype"] = text.removeprefix("torch.")
        elif key == "kv_cache_dtype" and text != "auto":
            facts["kv_dtype"] = text
        elif key == "enable_prefix_caching" and text in ("True", "False"):
            facts["prefix_caching"] = text == "True"
        elif key == "served_model_name" and "/" not in text:
            facts["model"] = text
        if key in SAFE_FLAGS and text != "None" and "/" not in text:
            self.flags.setdefault(key, text)


def startup_facts(lines: Iterable[str]) -> dict[str, Any]:
    """`worker` columns told by an engine's start-up output."""
    log = StartupLog()
    for line in lines:
        log.feed(line)
    return log.worker_facts()


def literal_pairs(text: str) -> list[tuple[str, Any]]:
    """Key-value pairs of `{...}`, `Namespace(...)` or `ServerArgs(...)`; values that are no plain literal are left out."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # One unreadable value (a repr like <Mode.NONE: 0>) must not hide the others.
        pattern = re.compile(r"'?(\w+)'?[:=] ?('[^']*'|True|False|-?\d+(?:\.\d+)?)(?=[,})])")
        found = []
        for key, value in pattern.findall(text):
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):  # a cut or broken line
                found.append((key, ast.literal_eval(value)))
        return found
    items: list[tuple[Any, ast.expr]] = []
    if isinstance(node, ast.Dict):
        items = [
            (key.value, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        ]
    elif isinstance(node, ast.Call):
        items = [(keyword.arg, keyword.value) for keyword in node.keywords]
    pairs = []
    for key, value in items:
        try:
            pairs.append((str(key), ast.literal_eval(value)))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return pairs


def _flag_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
