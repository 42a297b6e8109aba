"""A JSON file of a model folder: its content, or ModelUnreadable with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_probe.errors import ModelUnreadable


def read_json(path: Path) -> Any:
    """Its content. Raises ModelUnreadable where it is absent or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelUnreadable(f"{path.name} is missing in {path.parent}", path=str(path)) from error
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path} cannot be read as JSON: {error}", path=str(path)) from error
