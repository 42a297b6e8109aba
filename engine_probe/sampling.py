"""Which rows are kept when not all can be: decided by a hash, so that every kind and every process decides alike.

A request that is kept is kept at the router, at each worker and at the client, with its route and transfer rows; by
prefix, all requests that share a prefix are kept or left out together. A block is kept or left out for its whole life.
Invariant: at a higher rate everything is kept that is kept at a lower one; the rate is stored with the rows.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal

from engine_probe.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SPAN: Final = 1 << 64


class Sampling:
    """Keep a share `rate` (0 < rate <= 1) of the requests, and of the blocks.

    by     request: each request for itself; prefix: requests with the same `prefix_hash` together (those without one
           by their id)
    salt   another salt chooses other rows; all processes of a deployment must use the same
    Raises UsageError for a rate outside (0, 1].
    """

    def __init__(
        self, rate: float = 1.0, by: Literal["request", "prefix"] = "request", salt: bytes = b"kvscope"
    ) -> None:
        if not 0.0 < rate <= 1.0:
            raise UsageError(f"the sampling rate is {rate}; expected above 0, at most 1", rate=rate)
        if by not in ("request", "prefix"):
            raise UsageError(f"sampling is by request or by prefix, not by {by!r}", by=by)
        self.rate = rate
        self._by = by
        self._salt = salt
        self._bound = min(int(rate * _SPAN), _SPAN - 1)

    @property
    def sample_rate(self) -> float | None:
        """What goes into the rows' `sample_rate`: None where all are kept."""
        return None if self.rate == 1.0 else self.rate

    def keeps_request(self, request_id: str, prefix_hash: int | None = None) -> bool:
        """Whether rows of this request are kept."""
        if self.rate == 1.0:
            return True
        if self._by == "prefix" and prefix_hash is not None:
            return self._draw(prefix_hash.to_bytes(8, "little"), b"prefix") <= self._bound
        return self._draw(request_id.encode("utf-8", "surrogatepass"), b"request") <= self._bound

    def keeps_blocks(self, block_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Whether rows of these blocks are kept, [n] bool. Block hashes are mixed again: ours are uniform, others' not."""
        import numpy as np

        if self.rate == 1.0:
            return np.ones(len(block_hashes), dtype=bool)
        seed = np.uint64(self._draw(b"", b"block"))
        mixed = (block_hashes ^ seed) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        kept: np.ndarray[Any, np.dtype[np.bool_]] = (mixed ^ (mixed >> np.uint64(32))) <= np.uint64(self._bound)
        return kept

    def _draw(self, content: bytes, purpose: bytes) -> int:
        digest = blake2b(content, digest_size=8, key=self._salt[:64], person=purpose)
        return int.from_bytes(digest.digest(), "little")
