"""Other calls than before, or calls whose prompts cannot be found again."""

from __future__ import annotations

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.scene import Scene, at_rate, with_engine, with_hook, with_traffic
from engine_probe.engine.fleet.virtual_fleet import VirtualFleet
from engine_probe.engine.traffic.synthetic import Lengths, Traffic

NOT_THE_POOL = ("admission_blocked_on_blocks", "preemption_recompute", "prefix_caching_off", "slow_steps")
HEAVY = "reports"


def _longer(scene: Scene, severity: float) -> Scene:
    own = scene.traffic.own_tokens
    return with_traffic(scene, own_tokens=Lengths(round(own.low * severity), round(own.high * severity)))


def _two_kinds(scene: Scene, severity: float) -> Scene:
    return _mixed(scene, 0.02)


def _other_mix(scene: Scene, severity: float) -> Scene:
    light, heavy = scene.traffic, scene.extra[-1]
    total = light.rate + heavy.rate
    seconds = light.num_requests / light.rate
    return _kinds(scene, light, heavy, total, severity, seconds)


def _mixed(scene: Scene, share: float) -> Scene:
    """A second tenant whose calls are long reports; both keep their lengths whatever their shares."""
    main = scene.traffic
    seconds = main.num_requests / main.rate
    heavy = Traffic(
        shared_tokens=0,
        shared_ratio=0.0,
        groups=1,
        own_tokens=Lengths(3000, 3600),
        output_tokens=Lengths(16, 64),
        tenants=((HEAVY, 1.0),),
        workload="report",
        prefix="h",
        seed=main.seed + 13,
    )
    return _kinds(scene, with_traffic(scene, workload="chat").traffic, heavy, main.rate * 0.8, share, seconds)


def _kinds(scene: Scene, light: Traffic, heavy: Traffic, total: float, share: float, seconds: float) -> Scene:
    from dataclasses import replace

    rates = (total * (1 - share), total * share)
    main, more = (
        replace(one, rate=rate, num_requests=max(1, round(rate * seconds)))
        for one, rate in zip((light, heavy), rates, strict=True)
    )
    return replace(scene, traffic=main, extra=(more,))


def _new_heads(scene: Scene, severity: float) -> Scene:
    return with_traffic(scene, uncacheable=True)


def _large_unit(scene: Scene, severity: float) -> Scene:
    return with_engine(scene, min_reuse_tokens=2 * scene.traffic.shared_tokens)


def _many_prefixes(scene: Scene, severity: float) -> Scene:
    """Long ones, and enough of them that filling the caches takes a while, in a window that is longer than that."""
    long = with_traffic(scene, groups=50, skew=0.4, shared_ratio=0.95, shared_tokens=2048, own_tokens=Lengths(32, 256))
    return at_rate(long, 20.0)


def _restart(scene: Scene, severity: float) -> Scene:
    """Every cache is lost so many times in the window."""

    def reset(fleet: VirtualFleet, at_ns: int) -> None:
        for engine in fleet.engines:
            engine.kv.clear(at_ns)

    times = int(severity)
    for turn in range(times):
        scene = with_hook(scene, (turn + 0.05) / times * scene.measured_s, reset)
    return scene


FAULTS = (
    Fault(
        "length_shift",
        "traffic shape",
        "The part of the prompt that is each caller's own gets longer",
        Severity(1.3, 1.7, 2.2, "times its tokens"),
        Expected(("length_shift",), ("long_prefill_interference",), (*NOT_THE_POOL, "mix_shift")),
        _longer,
    ),
    Fault(
        "mix_shift",
        "traffic shape",
        "Long reports become a larger share of the same number of calls",
        Severity(0.06, 0.10, 0.14, "share of the calls, 0.02 before"),
        Expected(("mix_shift",), ("length_shift", "long_prefill_interference"), NOT_THE_POOL),
        _other_mix,
        _two_kinds,
        subject=("tenant", HEAVY),
    ),
    Fault(
        "prompt_uncacheable",
        "traffic shape",
        "Something new stands before every shared prefix: nothing is found any more",
        Severity(24, 32, 40, "requests a second in both runs"),
        Expected(("prompt_uncacheable",), (), (*NOT_THE_POOL, "load_step", "premature_eviction")),
        _new_heads,
        at_rate,
    ),
    Fault(
        "reuse_below_unit",
        "traffic shape",
        "The smallest reusable unit is longer than the shared prefixes",
        Severity(24, 32, 40, "requests a second in both runs"),
        Expected(("reuse_below_unit",), (), (*NOT_THE_POOL, "load_step", "premature_eviction")),
        _large_unit,
        at_rate,
    ),
    Fault(
        "cold_start",
        "traffic shape",
        "The caches are lost, and what was shared is computed again by whoever comes first",
        Severity(1, 2, 3, "times in the window"),
        Expected(("cold_start",), (), (*NOT_THE_POOL, "load_step", "length_shift", "mix_shift")),
        _restart,
        _many_prefixes,
    ),
)
