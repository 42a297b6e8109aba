"""`kvscope kv-size`: its JSON, its text, and its answers to bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Ended


def test_a_config_file_its_folder_and_a_name_give_the_same_answer(
    tmp_path: Path, kvscope: Callable[..., Ended]
) -> None:
    """Llama-3-8B's config.json, the folder that holds it, and its name: 131,072 bytes a token, 1 GiB at 8,192."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers = []
    for where in (tmp_path / "config.json", tmp_path, "llama-3-8b"):
        ended = kvscope("kv-size", "--config", where, "--tokens", "8192", "--json")
        assert (ended.code, ended.err) == (0, "")
        answers.append({k: v for k, v in json.loads(ended.out).items() if k not in ("model", "source")})
    assert answers[0] == answers[1] == answers[2]
    assert (answers[0]["bytes_per_token"], answers[0]["request_bytes"], answers[0]["fits"]) == (131_072, 1 << 30, None)


def test_how_many_fit_is_part_of_the_answer(kvscope: Callable[..., Ended]) -> None:
    """In 1,000 blocks, requests of 100 tokens (7 blocks) fit 142 times."""
    ended = kvscope("kv-size", "--config", "llama-3-8b", "--tokens", 100, "--num-blocks", 1000, "--json")
    assert json.loads(ended.out)["fits"] == {"num_blocks": 1000, "requests": 142, "concurrency": 1000 / 7}


def test_the_text_says_bytes_blocks_waste_and_fit(kvscope: Callable[..., Ended]) -> None:
    """One sentence first; then what it is made of."""
    ended = kvscope("kv-size", "--config", "llama-3-8b", "--tokens", 100, "--memory-gib", 2)
    lines = ended.out.splitlines()
    assert lines[0] == "llama-3-8b: a request of 100 tokens takes 12.5 MiB (13,107,200 bytes) of KV cache."
    assert "  blocks           7 of 16 tokens, 2 MiB each" in lines
    assert "  allocated        14 MiB, of which 1.5 MiB wasted by rounding up" in lines
    assert "  fit              146 (146.29) such requests in 1,024 blocks" in lines


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--config", "llama-3-8b", "--tokens", "0"), "--tokens is 0"),
        (("--config", "llama-3-8b", "--tokens", "-5"), "--tokens is -5"),
        (("--config", "llama-3-8b", "--tokens", "many"), "'--tokens': Input should be a valid integer"),
        (("--config", "llama-3-8b"), "--tokens"),
        (("--config", "llama-9-8b", "--tokens", "1"), "close to it: llama-3-8b"),
        (("--config", "no/such/config.json", "--tokens", "1"), "there is no file no/such/config.json"),
        (("--config", "llama-3-8b", "--tokens", "1", "--kv-dtype", "fp3"), "known: auto"),
        (("--config", "llama-3-8b", "--tokens", "1", "--kv-dtype", "fp8_ds_mla"), "no kv_lora_rank"),
        (("--config", "llama-3-8b", "--tokens", "1", "--block-size", "0"), "--block-size is 0"),
        (("--config", "llama-3-8b", "--tokens", "1", "--tp", "0"), "--tp is 0"),
        (("--config", "llama-3-8b", "--tokens", "1", "--num-blocks", "0"), "--num-blocks is 0"),
        (("--config", "llama-3-8b", "--tokens", "1", "--memory-gib", "-1"), "--memory-gib is -1"),
        (("--config", "llama-3-8b", "--tokens", "1", "--memory-gib", "nan"), "--memory-gib is nan"),
        (("--config", "llama-3-8b", "--tokens", "1", "--memory-gib", "1", "--num-blocks", "1"), "not both"),
    ],
)
def test_bad_input_is_named(args: tuple[object, ...], words: str, kvscope: Callable[..., Ended]) -> None:
    """Exit code 2; the message says what was given and what would be right; nothing is on stdout."""
    ended = kvscope("kv-size", *args)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("content", "words"), [("{", "cannot be read as JSON"), ("[1]", "no JSON object"), ("", "JSON")]
)
def test_a_file_that_is_no_config_is_named(
    content: str, words: str, tmp_path: Path, kvscope: Callable[..., Ended]
) -> None:
    """Half a file, a list and an empty file are refused by name."""
    path = tmp_path / "config.json"
    path.write_text(content)
    ended = kvscope("kv-size", "--config", path, "--tokens", "1")
    assert ended.code == 2
    assert words in ended.err
    assert str(path) in ended.err
