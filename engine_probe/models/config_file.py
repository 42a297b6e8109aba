"""A model as people name it: a config.json, the folder it is in, or a well-known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine_probe.errors import UsageError
from engine_probe.models.catalogue import SOURCE, find_model


def read_config(config: str) -> tuple[str, str, dict[str, Any]]:
    """Name, where the values come from, and the fields. Raises UsageError saying what is not there or cannot be read."""
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if path.suffix == ".json" or len(path.parts) > 2:
            raise UsageError(f"there is no file {path}; give a model's config.json, its folder, or a well-known name")
        name, fields = find_model(config)
        return name, SOURCE, fields
    fields = read_object(path, "model's config.json")
    return str(fields.get("_name_or_path") or fields.get("model_type") or path.parent.name), str(path), fields


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file that should be a `what`. Raises UsageError where there is none."""
    try:
        fields = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{path} holds no JSON object, so it is no {what}")
    return fields
