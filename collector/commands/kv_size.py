"""`kvscope kv-size`: bytes of KV cache a request takes, from a model's config.json or its name, and how many fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.output import JsonOption, emit, emit_json
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from diagnosis.capacity.kv_size import Fit, KvSize
    from engine_probe.models.kv_geometry import KvGeometry

KvDtypeOption = Annotated[
    str,
    typer.Option(
        "--kv-dtype", "--dtype", help="auto (the model's), bfloat16, float16, float32, fp8, int8, fp8_ds_mla."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb `kv-size`."""
    app.command("kv-size")(kv_size)


def kv_size(
    config: Annotated[str, typer.Option(help="A config.json, its folder, or a well-known name such as llama-3-8b.")],
    tokens: Annotated[int, typer.Option(help="Tokens of one request, prompt and output together.")],
    requests: Annotated[int, typer.Option(help="Requests of that length, for the total.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    kv_dtype: KvDtypeOption = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size; memory is then that of one GPU.")] = 1,
    memory_gib: Annotated[float | None, typer.Option(help="GiB for KV on one GPU: how many requests fit.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Usable KV blocks: how many requests fit.")] = None,
    json: JsonOption = False,
) -> None:
    """How much KV cache a request takes: exact bytes, blocks, what rounding wastes, and how many fit."""
    from diagnosis.capacity.kv_size import GIB, fit_blocks, fit_memory
    from diagnosis.capacity.kv_size import kv_size as size_of
    from engine_probe.models.config_file import read_config
    from engine_probe.models.kv_geometry import geometry

    if memory_gib is not None and num_blocks is not None:
        raise UsageError("give --memory-gib or --num-blocks, not both")
    name, source, fields = read_config(config)
    model = geometry(fields, kv_dtype)
    size = size_of(model, tokens, requests=requests, block_size=block_size, tp=tp)
    fit = None
    if memory_gib is not None:
        fit = fit_memory(size, memory_gib * GIB)
    elif num_blocks is not None:
        fit = fit_blocks(size, num_blocks)
    if json:
        emit_json(_document(name, source, model, size, fit))
    else:
        emit(_text(name, source, model, size, fit))


def _document(name: str, source: str, model: KvGeometry, size: KvSize, fit: Fit | None) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "model": name,
        "source": source,
        "attention": model.attention,
        "kv_dtype": model.dtype,
        **asdict(size),
        "fits": None if fit is None else asdict(fit),
        "layers": [asdict(group) for group in model.groups],
        "notes": list(model.notes),
    }


def _text(name: str, source: str, model: KvGeometry, size: KvSize, fit: Fit | None) -> str:
    each = "" if size.requests == 1 else f", {size.requests:,} of them {_exactly(size.total_bytes)}"
    lines = [
        f"{name}: a request of {size.tokens:,} tokens takes {_exactly(size.request_bytes)} of KV cache{each}.",
        "",
        f"  per token        {size.bytes_per_token:,} bytes ({model.attention}, {model.dtype})",
    ]
    for group in model.groups:
        limit = "every token" if group.window is None else f"the last {group.window:,} tokens"
        what = (
            f"{group.token_bytes:,} bytes a token, {limit}"
            if group.token_bytes
            else f"{group.state_bytes:,} bytes a request"
        )
        lines.append(f"    {group.num_layers:>4} layers     {what}")
    if size.constant_bytes:
        lines.append(f"  constant         {_bytes(size.constant_bytes)} a request: full windows and recurrent states")
    lines += [
        f"  blocks           {size.blocks:,} of {size.block_size} tokens, {_bytes(size.block_bytes)} each",
        f"  allocated        {_bytes(size.allocated_bytes)}, of which {_bytes(size.waste_bytes)} wasted by rounding up",
    ]
    if size.tp > 1:
        of_rank = f"{_bytes(size.rank_allocated_bytes)}, {_bytes(size.rank_block_bytes)} a block"
        lines.append(f"  on each GPU      {of_rank} (tensor parallel over {size.tp})")
    if fit is not None:
        lines.append(
            f"  fit              {fit.requests:,} ({fit.concurrency:.2f}) such requests in {fit.num_blocks:,} blocks"
        )
    lines.append(f"  source           {source}")
    lines += [f"  note             {note}" for note in model.notes]
    return "\n".join(lines)


def _exactly(count: int) -> str:
    return f"{_bytes(count)} ({count:,} bytes)"


def _bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps at least 1, and exactly where it is small."""
    for unit, step in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= step:
            return f"{count / step:,.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{count:,} bytes"
