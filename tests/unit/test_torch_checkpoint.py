"""Folders of safetensors: read whole, in one file or in shards, or refused with the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_probe.engine.torch_executor.checkpoint import SafetensorsFolder, read_folder_config
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
from engine_probe.engine.torch_executor.weights import SeededTensors, expected_shapes
from engine_probe.errors import ModelUnreadable
from tests.torch_models import CONFIG_JSON, TINY, alone, tiny_executor

OPTIONS = TorchOptions(device="cpu", num_blocks=16)
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    """The weights of TINY that `tiny_executor` has."""
    source = SeededTensors(0)
    return {name: source.get(name, shape) for name, shape in expected_shapes(TINY).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """TINY in one file."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def in_shards(folder: Path) -> dict[str, str]:
    """TINY in two files and an index; the weight map."""
    held = tensors()
    names = sorted(held)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: held[name] for name in names if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink(missing_ok=True)
    return places


def test_one_file_is_the_model_that_was_saved(folder: Path) -> None:
    """Its answer is that of the weights it was written from; its name is the folder's, its size that of the weights."""
    loaded = TorchExecutor.from_folder(folder, OPTIONS)
    assert alone(loaded, [5, 6, 7], 8) == alone(tiny_executor(), [5, 6, 7], 8)
    assert loaded.name == folder.name
    assert loaded.weights_bytes == 4 * TINY.num_parameters


def test_shards_are_the_same_model(folder: Path) -> None:
    """The index says which file has which tensor."""
    in_shards(folder)
    loaded = TorchExecutor.from_folder(folder, OPTIONS)
    assert alone(loaded, [5, 6, 7], 8) == alone(tiny_executor(), [5, 6, 7], 8)


def test_half_precision_files_are_widened_or_kept(folder: Path) -> None:
    """A bfloat16 file runs as its config says, or in the type that is asked for."""
    save_file({name: tensor.bfloat16() for name, tensor in tensors().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG_JSON, "torch_dtype": "bfloat16"}))
    kept = TorchExecutor.from_folder(folder, OPTIONS)
    widened = TorchExecutor.from_folder(folder, TorchOptions(device="cpu", num_blocks=16, dtype="float32"))
    assert (kept.dtype, widened.dtype) == (torch.bfloat16, torch.float32)
    assert 2 * kept.weights_bytes == widened.weights_bytes
    assert 2 * kept.kv_bytes_per_block == widened.kv_bytes_per_block == 2 * 2 * 2 * 8 * 16 * 4


def test_end_tokens_of_the_generation_config_count(folder: Path) -> None:
    """Chat models name their end of turn there alone."""
    (folder / "config.json").write_text(json.dumps({**CONFIG_JSON, "eos_token_id": 257}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [10, 257], "temperature": 0.6}')
    assert read_folder_config(folder).eos_token_ids == {10, 257}


def test_buffers_of_old_files_are_passed_over(folder: Path) -> None:
    """Old checkpoints store the rotary frequencies, which the config says anyway."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors(), **extra}, folder / "model.safetensors")
    assert TorchExecutor.from_folder(folder, OPTIONS).num_blocks == 16


def truncate(folder: Path) -> None:
    """The download stopped in the middle."""
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def scramble(folder: Path) -> None:
    """The header is no JSON any more."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8:40] = b"\xff" * 32
    (folder / "model.safetensors").write_bytes(data)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def lengthen_header(folder: Path) -> None:
    """The header says it is longer than the file."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[:8] = (2**40).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(data)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_config_cut(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def with_config_in_latin(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xe9"}')


def without_a_tensor(folder: Path) -> None:
    held = tensors()
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, folder / "model.safetensors")


def with_another_shape(folder: Path) -> None:
    held = tensors()
    held["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)
    save_file(held, folder / "model.safetensors")


def with_integers(folder: Path) -> None:
    held = tensors()
    held["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
    save_file(held, folder / "model.safetensors")


def with_a_bias_nobody_asked_for(folder: Path) -> None:
    save_file({**tensors(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, folder / "model.safetensors")


def with_a_shard_missing(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_a_shard_that_lacks_a_tensor(folder: Path) -> None:
    places = in_shards(folder)
    shifted = dict.fromkeys(places, "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": shifted}))


def with_an_index_of_nothing(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def with_an_index_that_leads_out(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, r"model\.safetensors"),
        (scramble, r"model\.safetensors"),
        (empty, r"model\.safetensors"),
        (lengthen_header, r"model\.safetensors"),
        (without_weights, r"no \.safetensors file"),
        (without_config, r"config\.json is missing"),
        (with_config_cut, r"config\.json cannot be read as JSON"),
        (with_config_in_latin, r"config\.json cannot be read as JSON"),
        (without_a_tensor, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        (with_another_shape, r"up_proj\.weight.*\[47, 32\].*\[48, 32\]"),
        (with_integers, r"model\.norm\.weight.*int8"),
        (with_a_bias_nobody_asked_for, r"q_proj\.bias.*another model"),
        (with_a_shard_missing, r"model-00002-of-00002\.safetensors is missing"),
        (with_a_shard_that_lacks_a_tensor, r"model-00001-of-00002\.safetensors has no tensor"),
        (with_an_index_of_nothing, r"weight_map"),
        (with_an_index_that_leads_out, r"other\.safetensors"),
    ],
)
def test_broken_folder_is_refused_by_name(folder: Path, damage: Callable[[Path], None], named: str) -> None:
    """Cut, scrambled, missing, of another shape or another model: the message names the file or the tensor."""
    damage(folder)
    with pytest.raises(ModelUnreadable, match=named):
        TorchExecutor.from_folder(folder, OPTIONS)


def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """A path that leads nowhere is said to."""
    with pytest.raises(ModelUnreadable, match="no model folder"):
        read_folder_config(tmp_path / "absent")


def test_only_weights_that_are_asked_for_are_read(folder: Path) -> None:
    """A tensor that no file has is an error of that name."""
    source = SafetensorsFolder(folder, TINY)
    with pytest.raises(ModelUnreadable, match=r"nothing\.weight"):
        source.get("nothing.weight", (1,))
