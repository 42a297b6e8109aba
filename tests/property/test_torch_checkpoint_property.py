"""Whatever a config or a weight file holds, it is read or refused by name; nothing else comes out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine_probe.engine.torch_executor.checkpoint import SafetensorsFolder
from engine_probe.engine.torch_executor.model_config import UNDERSTOOD, ModelConfig, read_config
from engine_probe.engine.torch_executor.weights import SeededTensors, expected_shapes
from engine_probe.errors import ModelUnreadable
from tests.torch_models import CONFIG_JSON, TINY

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama3", "linear"])
)
values = st.recursive(
    scalars | st.integers(-2, 2**70) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)
fields = st.dictionaries(st.sampled_from(sorted(UNDERSTOOD)), values, max_size=4)


@settings(max_examples=300)
@given(fields, st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
def test_any_config_is_understood_or_refused(changes: dict[str, Any], family: str) -> None:
    """Numbers that are none, lists for objects, layers beyond counting: ModelUnreadable, or a config that can be built."""
    try:
        config = read_config({**CONFIG_JSON, "model_type": family, "head_dim": 8, **changes})
    except ModelUnreadable:
        return
    assert isinstance(config, ModelConfig)
    assert config.num_layers * config.num_parameters > 0
    assert config.num_layers <= 4096


@pytest.fixture(scope="module")
def whole() -> bytes:
    """A file of TINY's weights."""
    with tempfile.TemporaryDirectory() as folder:
        source = SeededTensors(0)
        path = Path(folder) / "model.safetensors"
        save_file({name: source.get(name, shape) for name, shape in expected_shapes(TINY).items()}, path)
        return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@settings(max_examples=150)
@given(st.data())
def test_any_damage_to_a_file_is_refused_or_harmless(whole: bytes, folder: Path, data: st.DataObject) -> None:
    """Cut anywhere, or with bytes of its header changed: every tensor is read in its shape, or ModelUnreadable."""
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        source = SafetensorsFolder(folder, TINY)
        for name, shape in expected_shapes(TINY).items():
            found = source.get(name, shape)
            assert tuple(found.shape) == shape
            assert found.dtype in (torch.float32, torch.bfloat16, torch.float16)
    except ModelUnreadable:
        return


@given(values)
def test_any_index_is_followed_or_refused(whole: bytes, folder: Path, said: Any) -> None:
    """An index that is a number, a list, or leads to nothing."""
    (folder / "model.safetensors").write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    try:
        index.write_text(json.dumps({"weight_map": said}))
        SafetensorsFolder(folder, TINY).get("model.norm.weight", (32,))
    except ModelUnreadable:
        pass
    finally:
        index.unlink()
