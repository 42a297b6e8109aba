"""Compile the Triton kernels for a GPU that need not be there; run by a test in a process of its own, prints their names."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine_probe.engine.torch_executor.kernels import chunked_prefill, kv_write, paged_decode

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = {"BLOCK_SIZE": 16, "GROUP": 4, "HEAD_DIM": 64, "HEAD_DIM_PADDED": 64, "WIDEN": False}
INTEGERS = ("block_tables", "context_lens", "query_starts", "listed")
FLOATS = ("partial", "sums", "maxima")


def compile_for_gpu(kernel: triton.JITFunction, dtype: str, constants: dict[str, object]) -> str:
    """Machine code for compute capability 9.0; the kernel's name."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in INTEGERS or name in FLOATS:
            types[name] = "*i32" if name in INTEGERS else "*fp32"
        elif name in ("queries", "keys", "values", "key_cache", "value_cache", "out"):
            types[name] = f"*{dtype}"
        else:
            types[name] = {"slots": "*i64", "scale": "fp32"}.get(name, "i32")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, types, constexprs=places), target=HOPPER)
    assert compiled.asm["cubin"]
    return str(kernel.__name__)


if __name__ == "__main__":
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        options = chunked_prefill.tile_options(torch_dtype)
        more = {**SHARED, **{name: value for name, value in options.items() if name.isupper()}}
        print(
            compile_for_gpu(kv_write._write_kv, dtype, {"WIDTH": 256, "WIDTH_PADDED": 256}),
            compile_for_gpu(paged_decode._paged_decode, dtype, {**more, "GROUP_PADDED": 16, "PART": 512}),
            compile_for_gpu(chunked_prefill._chunked_prefill, dtype, {**more, "ROWS": 64}),
        )
