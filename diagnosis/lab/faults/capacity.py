"""Too few KV blocks, or blocks that are lost: at admission, while decoding, to one tenant, to a clock, to a leak."""

from __future__ import annotations

from dataclasses import replace

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.scene import Scene, at_rate, with_engine, with_fleet, with_scheduler, with_traffic
from engine_probe.engine.engine import Engine
from engine_probe.engine.traffic.synthetic import Lengths, Traffic

SHORT = ("admission_blocked_on_blocks", "premature_eviction", "preemption_recompute", "decode_block_shortage")
NOT_THE_LOAD = ("load_step", "length_shift", "mix_shift", "slow_steps", "prefix_caching_off")
BULK_RATE = 6.0


class LeakyEngine(Engine):
    """Whatever a request held when it was aborted is never given back: one reference to each block too many."""

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self.kv.pool.share(sequence.blocks)
        return super().abort(request_id, reason)


def _squeeze(scene: Scene, severity: float) -> Scene:
    return with_fleet(scene, num_blocks=int(severity))


def _long_answers(scene: Scene, severity: float) -> Scene:
    """Short prompts are let in, and their long answers outgrow the pool."""
    short = with_traffic(scene, own_tokens=Lengths(32, 128), shared_tokens=128, output_tokens=Lengths(256, 768))
    return at_rate(short, 20.0)


def _storm(scene: Scene, severity: float) -> Scene:
    return with_fleet(with_scheduler(scene, watermark_ratio=0.0), num_blocks=int(severity))


def _bulk(scene: Scene, documents: int) -> Scene:
    """A tenant that asks about long documents, few or many of them; each again and again."""
    scene = with_traffic(scene, rate=scene.traffic.rate - BULK_RATE)
    main = scene.traffic
    seconds = main.num_requests / main.rate
    bulk = Traffic(
        num_requests=int(BULK_RATE * seconds),
        rate=BULK_RATE,
        groups=documents,
        skew=0.0,
        shared_tokens=1792,
        shared_ratio=1.0,
        own_tokens=Lengths(32, 64),
        output_tokens=Lengths(16, 32),
        tenants=(("bulk", 1.0),),
        prefix="b",
        seed=main.seed + 7,
    )
    return replace(scene, extra=(*scene.extra, bulk))


def _few_documents(scene: Scene, severity: float) -> Scene:
    return _bulk(with_fleet(scene, num_blocks=2000), 2)


def _many_documents(scene: Scene, severity: float) -> Scene:
    bulk = scene.extra[-1]
    return replace(scene, extra=(*scene.extra[:-1], replace(bulk, groups=int(severity))))


def _ttl(scene: Scene, severity: float) -> Scene:
    return with_engine(scene, ttl_s=severity)


def _cancelling(scene: Scene, severity: float) -> Scene:
    return with_fleet(replace(scene, cancels=max(1, round(1 / severity)), cancel_s=0.15), num_blocks=2500)


def _leak(scene: Scene, severity: float) -> Scene:
    return replace(scene, engine_class=LeakyEngine)


FAULTS = (
    Fault(
        "admission_blocked_on_blocks",
        "capacity",
        "Each worker has far fewer KV blocks (capacity squeeze)",
        Severity(1000, 850, 750, "KV blocks of each worker"),
        Expected(("admission_blocked_on_blocks",), ("premature_eviction", "preemption_recompute"), NOT_THE_LOAD),
        _squeeze,
    ),
    Fault(
        "preemption_recompute",
        "capacity",
        "Long answers outgrow the pool: running requests are preempted (preemption storm)",
        Severity(710, 685, 670, "KV blocks of each worker"),
        Expected(("preemption_recompute",), ("admission_blocked_on_blocks", "premature_eviction"), NOT_THE_LOAD),
        _storm,
        _long_answers,
        metric="e2e",
    ),
    Fault(
        "premature_eviction",
        "capacity",
        "One tenant's many long documents push the others' prefixes out",
        Severity(10, 40, 80, "documents of the tenant"),
        Expected(("premature_eviction",), ("admission_blocked_on_blocks",), (*NOT_THE_LOAD, "preemption_recompute")),
        _many_documents,
        _few_documents,
        subject=("tenant", "bulk"),
    ),
    Fault(
        "ttl_expiry",
        "capacity",
        "Cached blocks are given up a little after their last use",
        Severity(3.0, 1.0, 0.3, "seconds"),
        Expected(("ttl_expiry",), ("premature_eviction",), (*NOT_THE_LOAD, "preemption_recompute")),
        _ttl,
    ),
    Fault(
        "block_leak",
        "capacity",
        "Requests whose callers go away keep their blocks for ever",
        Severity(0.04, 0.08, 0.12, "share of the callers that go away"),
        Expected(("block_leak",), SHORT, NOT_THE_LOAD),
        _leak,
        _cancelling,
    ),
)
