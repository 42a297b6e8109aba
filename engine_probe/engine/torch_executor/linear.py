"""One linear layer, in the form that its device multiplies fastest.

On a CPU the weight is laid out once for oneDNN (the operators that torch.compile itself uses): a fifth to a half of the
time of `F.linear` for the few rows of a decode. Where this build of torch has no such operator, `F.linear` it is.
"""

from __future__ import annotations

from typing import Any

import torch

_ROWS_HINT = 16


class Linear:
    """y = x W^T + b for x [num_tokens, in]; W [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, packed: bool | None = None) -> None:
        """packed: lay out for oneDNN; None: where it is possible and helps (bfloat16 and float32 on a CPU)."""
        self.out_features = weight.shape[0]
        self._bias = bias
        wanted = can_pack(weight) if packed is None else packed
        self._packed: Any = _pack(weight) if wanted else None
        self._weight = None if wanted else weight

    @property
    def is_packed(self) -> bool:
        """True where it holds a laid-out copy of its weight."""
        return self._packed is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return found
        assert self._weight is not None
        return torch.nn.functional.linear(x, self._weight, self._bias)


def can_pack(weight: torch.Tensor) -> bool:
    """True where oneDNN multiplies this type on this CPU without falling back to something slower."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _pack(weight: torch.Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
