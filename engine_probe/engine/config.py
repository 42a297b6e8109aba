"""Everything that shapes one embedded engine, by the names that the field's engines use."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_probe.engine.kv_identity import KvIdentity
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.errors import UsageError

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine.

    role               what it does for a request: mixed | prefill | decode
    block_size         tokens in a KV block
    prefix_caching     finished prompts' blocks may be found by later requests
    eviction           lru | lfu | fifo | length
    ttl_s              a cached block unused for longer is given up (None: never)
    min_reuse_tokens   a shorter match is not used
    swap_blocks        host blocks for preemption by swap
    salt               of the chain hashes: the deployment's secret, at most 64 bytes
    timeout_s          a request older than this is aborted (None: never)
    """

    worker: str = "w0"
    role: str = "mixed"
    block_size: int = BLOCK_SIZE
    prefix_caching: bool = True
    eviction: str = "lru"
    ttl_s: float | None = None
    min_reuse_tokens: int = 0
    swap_blocks: int = 0
    salt: bytes = b""
    timeout_s: float | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    identity: KvIdentity = field(default_factory=KvIdentity)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UsageError(f"block_size is {self.block_size}; expected 1 or more")
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise UsageError(f"ttl_s is {self.ttl_s}; expected above 0, or none")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"timeout_s is {self.timeout_s}; expected above 0, or none")
        if len(self.salt) > 64:
            raise UsageError(f"the salt has {len(self.salt)} bytes; expected at most 64")

    def flags(self) -> dict[str, str]:
        """The settings by name, as a `worker` row tells them."""
        s = self.scheduler
        named = {
            "max_num_seqs": s.max_num_seqs,
            "max_num_batched_tokens": s.max_num_batched_tokens,
            "max_chunk_tokens": s.max_chunk_tokens,
            "enable_chunked_prefill": s.chunked_prefill,
            "scheduling_policy": s.policy,
            "preemption_mode": s.preemption,
            "watermark": s.watermark_ratio,
            "max_wait_s": s.max_wait_s,
            "enable_prefix_caching": self.prefix_caching,
            "eviction_policy": self.eviction,
            "ttl_s": self.ttl_s,
            "min_reuse_tokens": self.min_reuse_tokens,
            "swap_blocks": self.swap_blocks,
            "timeout_s": self.timeout_s,
        }
        return {name: str(value).lower() for name, value in named.items() if value is not None}
