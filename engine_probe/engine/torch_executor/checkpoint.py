"""A folder with a model as it is published: config.json, safetensors in one file or in shards, tokenizer files.

Every way in which such a folder can be broken ends in ModelUnreadable with the file and the tensor; errors of the
safetensors library are translated here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine_probe.engine.torch_executor.json_file import read_json
from engine_probe.engine.torch_executor.model_config import ModelConfig, read_config, token_ids
from engine_probe.engine.torch_executor.weights import expected_shapes
from engine_probe.errors import ModelUnreadable

INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def read_folder_config(folder: Path) -> ModelConfig:
    """config.json, with the end tokens of generation_config.json where that names any."""
    if not folder.is_dir():
        raise ModelUnreadable(f"there is no model folder {folder}", path=str(folder))
    config = read_config(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.exists():
        said = read_json(generation)
        ends = token_ids(said.get("eos_token_id"), "eos_token_id") if isinstance(said, dict) else frozenset()
        config = replace(config, eos_token_ids=config.eos_token_ids | ends)
    return config


class SafetensorsFolder:
    """The tensors of a folder, mapped into memory. Raises ModelUnreadable where they are not those of `config`."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ModelUnreadable("reading weights needs the package safetensors; install kvscope[engine]") from error
        self._open = safe_open
        self._files: dict[Path, Any] = {}
        self._where = self._locate(folder)
        self._refuse_unasked(config)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        path = self._where.get(name)
        if path is None:
            raise ModelUnreadable(f"tensor '{name}' is in none of the weight files", tensor=name)
        found = self._read(path, name)
        if tuple(found.shape) != shape:
            raise ModelUnreadable(
                f"tensor '{name}' of {path.name} has shape {list(found.shape)}; the config asks for {list(shape)}",
                tensor=name,
            )
        if found.dtype not in FLOATS:
            raise ModelUnreadable(
                f"tensor '{name}' of {path.name} is {str(found.dtype).removeprefix('torch.')}; only float32, bfloat16 "
                "and float16 weights are read here",
                tensor=name,
            )
        return found

    def _locate(self, folder: Path) -> dict[str, Path]:
        """Which file has which tensor: from the index where there is one, else from the files themselves."""
        index = folder / INDEX
        if not index.exists():
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise ModelUnreadable(f"there is no .safetensors file in {folder}", path=str(folder))
            return {name: path for path in files for name in self._names(path)}
        said = read_json(index)
        shards = said.get("weight_map") if isinstance(said, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
            raise ModelUnreadable(f"{index} has no weight_map of tensor names to file names", path=str(index))
        for file in sorted(set(shards.values())):
            if Path(file).name != file:
                raise ModelUnreadable(f"{index} names '{file}', which is no file beside it", path=str(index))
            held = set(self._names(folder / file))
            if absent := sorted(name for name, shard in shards.items() if shard == file and name not in held):
                raise ModelUnreadable(
                    f"{file} has no tensor '{absent[0]}', which {INDEX} says it has", tensor=absent[0], path=file
                )
        return {name: folder / file for name, file in shards.items()}

    def _names(self, path: Path) -> Iterable[str]:
        if not path.exists():
            raise ModelUnreadable(f"weight file {path.name} is missing in {path.parent}", path=str(path))
        if path not in self._files:
            try:
                self._files[path] = self._open(path, framework="pt")
            except Exception as error:  # safetensors raises its own type, OSError, or what its header parser raises
                raise ModelUnreadable(f"{path} is no whole safetensors file: {error}", path=str(path)) from error
        names: list[str] = list(self._files[path].keys())
        return names

    def _read(self, path: Path, name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = self._files[path].get_tensor(name)
        except Exception as error:
            raise ModelUnreadable(f"tensor '{name}' of {path} cannot be read: {error}", tensor=name) from error
        return found

    def _refuse_unasked(self, config: ModelConfig) -> None:
        asked = expected_shapes(config)
        unasked = [name for name in self._where if name not in asked and not name.endswith("rotary_emb.inv_freq")]
        unasked = [name for name in unasked if not (config.tied and name == "lm_head.weight")]
        if unasked:
            raise ModelUnreadable(
                f"the weights hold '{sorted(unasked)[0]}' ({len(unasked)} such), which a {config.model_type} of this "
                "config does not use: another model than config.json says",
                tensor=sorted(unasked)[0],
            )
