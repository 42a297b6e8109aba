"""Start-up lines of every release: geometry, version and settings; nothing secret is kept."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from engine_probe.adapters.geometry import startup_facts

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"


def test_one_line_since_0_28_and_two_before_say_the_same() -> None:
    """438,272 tokens of 16 a block are 27,392 blocks, one of them the null block."""
    args = "INFO non-default args: {'block_size': 16}"
    one = "INFO GPU KV cache size: 438,272 tokens, Maximum concurrency for 131,072 tokens per request: 3.34x"
    two = [
        "(EngineCore_DP0 pid=7) INFO 11-29 [kv_cache_utils.py:1] GPU KV cache size: 438,272 tokens",
        "(EngineCore_DP0 pid=7) INFO 11-29 [x.py:2] Maximum concurrency for 131,072 tokens per request: 3.34x",
    ]
    facts = startup_facts([args, one])
    assert facts == startup_facts([args, *two])
    assert (facts["num_blocks"], facts["max_context"]) == (27_391, 131_072)
    assert facts["flags"] == {
        "block_size": "16",
        "kv_cache_size_tokens": "438272",
        "kv_cache_max_concurrency": "3.34",
    }


def test_v0_tells_blocks_directly() -> None:
    """0.8 V0: blocks by device."""
    facts = startup_facts(["INFO executor_base.py:112] # cuda blocks: 27,392, # CPU blocks: 2048"])
    assert facts["num_blocks"] == 27_391


def test_an_override_wins_over_what_was_found() -> None:
    """The pool is as large as it was told to be."""
    facts = startup_facts(["INFO Overriding num_gpu_blocks=10922 with num_gpu_blocks_override=112"])
    assert (facts["num_blocks"], facts["flags"]["num_gpu_blocks"]) == (111, "112")


def test_memory_is_bytes() -> None:
    """Available KV cache memory and the weights, GiB on the line."""
    facts = startup_facts(["Available KV cache memory: 53.5 GiB", "Model loading took 15.0 GiB and 2.1 seconds"])
    assert facts["flags"]["available_kv_cache_memory_bytes"] == str(53 * 2**30 + 2**29)
    assert facts["weights_bytes"] == 15 * 2**30


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("INFO api_server.py:1] vLLM API server version 0.8.5.post1", "0.8.5.post1"),
        ("INFO core.py:58] Initializing a V1 LLM engine (v0.11.0) with config: model='m'", "0.11.0"),
        ("INFO api_utils.py:347]   version 0.32.0", "0.32.0"),
    ],
)
def test_the_version_is_found_in_each_form(line: str, version: str) -> None:
    """Banner, API server and engine lines."""
    assert startup_facts([line])["engine_version"] == version


def test_parallel_sizes_types_and_caching_come_from_the_config_line() -> None:
    """The engine's own config, whatever the defaults were."""
    facts = startup_facts(
        [
            "Initializing a V1 LLM engine (v0.32.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=2048, "
            "tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=4, quantization=None, "
            "kv_cache_dtype=fp8_e4m3, served_model_name=tiny, enable_prefix_caching=False, "
        ]
    )
    assert {key: facts[key] for key in ("tp", "pp", "dp", "dtype", "kv_dtype", "max_context", "prefix_caching")} == {
        "tp": 2,
        "pp": 1,
        "dp": 4,
        "dtype": "bfloat16",
        "kv_dtype": "fp8_e4m3",
        "max_context": 2048,
        "prefix_caching": False,
    }
    assert facts["model"] == "tiny"
    assert "quantization" not in facts["flags"]


def test_settings_of_both_forms_are_read_and_secrets_are_not_kept() -> None:
    """`non-default args` and the Namespace of 0.8; keys, paths and addresses stay in the log."""
    new = "non-default args: {'api_key': ['hush'], 'model': '/models/m', 'max_num_seqs': 16, 'block_size': 32, "
    new += "'kv_events_config': KVEventsConfig(topic='t'), 'enable_prefix_caching': True}"
    old = (
        "args: Namespace(subparser='serve', api_key='hush', max_num_seqs=16, block_size=32, enable_prefix_caching=True)"
    )
    for line in (new, old):
        facts = startup_facts([line])
        assert facts["flags"] == {"max_num_seqs": "16", "block_size": "32", "enable_prefix_caching": "True"}
        assert (facts["block_size"], facts["prefix_caching"]) == (32, True)


def test_one_unreadable_value_does_not_hide_the_others() -> None:
    """`<Mode.NONE: 0>` is no literal."""
    facts = startup_facts(
        ["non-default args: {'mode': <CompilationMode.NONE: 0>, 'max_num_seqs': 16, 'dtype': 'half'}"]
    )
    assert facts["flags"] == {"max_num_seqs": "16", "dtype": "half"}


@pytest.mark.parametrize(
    "line",
    ["", "x" * 200_000, "non-default args: {" + "[" * 5000 + "}", "args: Namespace(", "GPU KV cache size: , tokens"],
)
def test_a_line_that_is_not_understood_says_nothing(line: str) -> None:
    """No line raises."""
    assert startup_facts([line]) == {"engine": "vllm", "flags": {}}


def test_the_log_of_the_recording_tells_its_geometry() -> None:
    """vLLM 0.32.0 with 112 blocks of 32."""
    with gzip.open(RECORDINGS / "vllm-0.32.0-squeezed" / "engine-worker-0.log.gz", "rt") as stream:
        facts = startup_facts(stream)
    expected = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "model": "tiny",
        "dtype": "bfloat16",
        "block_size": 32,
        "num_blocks": 111,
        "max_context": 2048,
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "prefix_caching": True,
    }
    assert {key: facts[key] for key in expected} == expected
    assert facts["flags"]["max_num_batched_tokens"] == "2048"
    assert facts["flags"]["kv_cache_size_tokens"] == "3584"
    assert not [value for value in facts["flags"].values() if "127.0.0.1" in value or "<path>" in value]
