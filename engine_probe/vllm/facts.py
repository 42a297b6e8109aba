"""vLLM's config object -> the slow facts of a `worker` row, and what rows of steps and requests need to know of it.

Everything is read defensively: what a release does not have is null. Nothing here imports vLLM or torch.
Source: vLLM 0.32.0 `config/*.py`; reference 4.3, 17.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

ENGINE: Final = "vllm"
SHOWN_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "scheduler_config": (
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "max_num_partial_prefills"),
        *("long_prefill_token_threshold", "policy", "async_scheduling", "stream_interval", "watermark"),
    ),
    "cache_config": (
        *("gpu_memory_utilization", "num_gpu_blocks_override", "enable_prefix_caching", "prefix_caching_hash_algo"),
        *("cache_dtype", "kv_cache_memory_bytes", "kv_offloading_size", "kv_offloading_backend", "num_gpu_blocks"),
        *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
    ),
    "model_config": ("enforce_eager", "quantization", "max_model_len"),
    "kv_transfer_config": ("kv_connector", "kv_role"),
    "speculative_config": ("method", "num_speculative_tokens"),
    "observability_config": ("kv_cache_metrics", "kv_cache_metrics_sample", "enable_logging_iteration_details"),
    "parallel_config": ("distributed_executor_backend", "data_parallel_size", "_api_process_count"),
}
"""Settings kept in `worker.flags`, by vLLM's own names; paths, tokens and host names are not among them."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a step row needs to know of the KV cache. None is unknown.

    num_blocks            usable blocks of this engine (vLLM keeps one of its blocks as the null block)
    kv_bytes_per_block    bytes of one block over all layers and ranks
    prefix_caching        on or off
    has_connector         a KV connector (offload, transfer) may serve cached tokens from elsewhere than the device
    num_frontends         API-server processes: above 1 each sees only its own requests' tokens
    """

    num_blocks: int | None = None
    kv_bytes_per_block: int | None = None
    prefix_caching: bool | None = None
    has_connector: bool = False
    num_frontends: int = 1
    policy: str | None = None
    model: str | None = None


def geometry_of(config: Any) -> Geometry:
    """Geometry from vLLM's config object, after the KV cache was sized."""
    return Geometry(
        num_blocks=_usable_blocks(config),
        kv_bytes_per_block=_bytes_per_block(config),
        prefix_caching=_flag(read(config, "cache_config.enable_prefix_caching")),
        has_connector=read(config, "kv_transfer_config.kv_connector") is not None
        or read(config, "cache_config.kv_offloading_size") is not None,
        num_frontends=whole(read(config, "parallel_config._api_process_count")) or 1,
        policy=word(read(config, "scheduler_config.policy")),
        model=_served_name(config),
    )


def worker_row(
    config: Any, worker: str, geometry: Geometry, *, version: str | None, host: str, at_ns: int
) -> dict[str, Any]:
    """The `worker` row: version, geometry, parallelism and the settings that matter, in vLLM's own names."""
    flags = {}
    for part, names in SHOWN_FLAGS.items():
        for name in names:
            value = read(config, f"{part}.{name}")
            if isinstance(value, (str, int, float, bool)):
                flags[name.lstrip("_")] = str(value)
    kv_role = str(read(config, "kv_transfer_config.kv_role"))
    return {
        "worker": worker,
        "at_ns": at_ns,
        "host": host,
        "role": {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role, "mixed"),
        "engine": ENGINE,
        "engine_version": version,
        "model": geometry.model,
        "dtype": _dtype(read(config, "model_config.dtype")),
        "kv_dtype": _kv_dtype(config),
        "block_size": whole(read(config, "cache_config.block_size")),
        "num_blocks": geometry.num_blocks,
        "kv_bytes_per_block": geometry.kv_bytes_per_block,
        "max_context": whole(read(config, "model_config.max_model_len")),
        "tp": whole(read(config, "parallel_config.tensor_parallel_size")),
        "pp": whole(read(config, "parallel_config.pipeline_parallel_size")),
        "dp": whole(read(config, "parallel_config.data_parallel_size")),
        "flags": flags,
        "prefix_caching": geometry.prefix_caching,
    }


def _usable_blocks(config: Any) -> int | None:
    """Usable blocks of one engine. vLLM sums the blocks of all data-parallel engines that a front end manages."""
    total = whole(read(config, "cache_config.num_gpu_blocks"))
    engines = whole(read(config, "parallel_config.data_parallel_size")) or 1
    if read(config, "parallel_config.data_parallel_external_lb") is True:
        engines = 1
    elif read(config, "parallel_config.data_parallel_hybrid_lb") is True:
        engines = whole(read(config, "parallel_config.data_parallel_size_local")) or engines
    if not total or total % engines:
        return None
    return total // engines - 1


def _bytes_per_block(config: Any) -> int | None:
    """2 * layers * KV heads * head size * bytes * block size, for plain attention in every layer; else null."""
    model, parallel = read(config, "model_config"), read(config, "parallel_config")
    if any(read(model, name) is not False for name in ("use_mla", "is_hybrid", "is_attention_free")):
        return None
    layer_types = read(model, "hf_text_config.layer_types")
    if (layer_types and set(layer_types) != {"full_attention"}) or _call(model, "get_sliding_window") is not None:
        return None
    element = _element_bytes(config)
    layers, block_size = _call(model, "get_total_num_hidden_layers"), whole(read(config, "cache_config.block_size"))
    if layers is None:
        layers = read(model, "hf_text_config.num_hidden_layers")
    heads, head_size = _call(model, "get_num_kv_heads", parallel), _call(model, "get_head_size")
    ranks = whole(read(parallel, "tensor_parallel_size")) or 1
    numbers = [whole(n) for n in (layers, heads, head_size, element, block_size)]
    if any(not n for n in numbers):
        return None
    product = 2 * ranks
    for number in numbers:
        assert number is not None
        product *= number
    return product


def _element_bytes(config: Any) -> int | None:
    cache = str(read(config, "cache_config.cache_dtype") or "auto")
    if cache == "auto":
        return whole(read(config, "model_config.dtype.itemsize"))
    if cache.startswith("fp8") or cache == "int8":
        return 1
    return {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4}.get(cache)


def _kv_dtype(config: Any) -> str | None:
    cache = word(read(config, "cache_config.cache_dtype"))
    return _dtype(read(config, "model_config.dtype")) if cache in (None, "auto") else cache


def _dtype(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _served_name(config: Any) -> str | None:
    name = read(config, "model_config.served_model_name")
    if isinstance(name, (list, tuple)):
        name = name[0] if name else None
    return word(name)


def _call(target: Any, method: str, *arguments: Any) -> Any:
    function: Callable[..., Any] | None = read(target, method)
    try:
        return None if function is None else function(*arguments)
    except Exception:  # a foreign method that changed its arguments
        return None


def word(value: Any) -> str | None:
    """A text that says something, or None."""
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def read(source: Any, path: str) -> Any:
    """`source.a.b` for path "a.b"; None where anything on the way is absent or raises."""
    for name in path.split("."):
        source = attribute(source, name)
        if source is None:
            return None
    return source


def attribute(source: Any, name: str) -> Any:
    """`source.name`, or None where it is absent or raises. The way for every step: `read` splits its path."""
    try:
        return getattr(source, name, None)
    except Exception:  # properties of foreign objects may raise anything
        return None


def whole(value: Any) -> int | None:
    """A count as int: 3 and 3.0 are 3; bools, negatives (vLLM's "unknown"), NaN and other types are None."""
    if type(value) is int:
        return value if value >= 0 else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value >= 0 and value == value and value != float("inf") else None


def seconds(value: Any) -> float | None:
    """A duration; None where negative: vLLM subtracts from stamps that were never set (a request that never ran)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0.0 <= value < 1e9 else None
