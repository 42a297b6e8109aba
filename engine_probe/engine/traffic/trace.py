"""A trace of real traffic as calls: Mooncake's format, whose ids name 512 tokens each, cut into an engine's blocks.

An id stands for the prefix up to and including its 512 tokens, so the engine's blocks inside it are named by (id, position).
The last, partial id's tokens count only as far as the prompt goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine_probe.engine.traffic.call import Call, made_up_blocks
from engine_probe.errors import UnknownFormat, UsageError
from engine_probe.readers.lines import json_lines
from engine_probe.readers.mooncake import BLOCK_TOKENS, REQUIRED, check_line


def trace_calls(path: Path, block_size: int, *, speed: float = 1.0, limit: int | None = None) -> Iterator[Call]:
    """Calls in the trace's order. speed: 2 makes them come twice as fast. Raises UnknownFormat naming the line."""
    if BLOCK_TOKENS % block_size and block_size % BLOCK_TOKENS:
        raise UsageError(f"blocks of {block_size} tokens do not fit the trace's blocks of {BLOCK_TOKENS}")
    if not 0 < speed < float("inf"):
        raise UsageError(f"speed is {speed}; expected above 0")
    per_id = max(1, BLOCK_TOKENS // block_size)
    ids_per_block = max(1, block_size // BLOCK_TOKENS)
    known: dict[int, list[int]] = {}
    for number, line in json_lines(path, REQUIRED):
        if limit is not None and number > limit:
            return
        check_line(line, number, path.name)
        prompt, output = line["input_length"], line["output_length"]
        at_ns = round(line["timestamp"] * 1e6 / speed)
        ids = line.get("hash_ids") or ()
        if prompt < 1:
            raise UnknownFormat(
                f"{path.name}, line {number}: a request of {prompt} prompt and {output} output tokens", line=number
            )
        blocks: list[int] = []
        for name in ids[ids_per_block - 1 :: ids_per_block]:
            if name not in known:
                known[name] = made_up_blocks(name, per_id)
            blocks += known[name]
        yield Call(f"t{number:06d}", at_ns, prompt, max(1, output), blocks[: prompt // block_size])
