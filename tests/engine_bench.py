"""An embedded engine for tests: virtual time, steps of a known length, a sink that keeps the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine, Output
from engine_probe.engine.executor import StepPlan, StepResult
from engine_probe.engine.host_costs import HostCosts
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import MemorySink

STEP_S = 0.010


class FixedSteps:
    """Every step takes 10 ms; tokens are counted only."""

    eos_token_ids: frozenset[int] = frozenset()
    worker_facts: Mapping[str, object] = {"model": "fixed"}

    def __init__(self, clock: VirtualClock, num_blocks: int, max_context: int) -> None:
        self.clock = clock
        self.num_blocks = num_blocks
        self.max_context = max_context
        self.plans: list[StepPlan] = []

    def refusal(self, num_tokens: int, context: int) -> str | None:
        return None

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.clock.advance(STEP_S)
        return StepResult(None, forward_s=STEP_S)

    def foresee(self, decodes: Items[Sequence], most: int) -> tuple[list[int], list[float]]:
        return [round(STEP_S * 1e9)] * most, [STEP_S] * most

    def close(self) -> None: ...


class EngineBench:
    """`scheduler`: fields of SchedulerConfig; costs_of: what bookkeeping costs, by the clock; everything else: fields of EngineConfig."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_context: int = 1 << 20,
        scheduler: dict[str, Any] | None = None,
        costs_of: Callable[[VirtualClock], HostCosts] | None = None,
        **config: Any,
    ) -> None:
        config.setdefault("block_size", 4)
        self.sink = MemorySink()
        self.clock = VirtualClock()
        self.recorder = Recorder(self.sink, worker="w0", clock=self.clock, flush_s=0)
        self.executor = FixedSteps(self.clock, num_blocks, max_context)
        settings = EngineConfig(scheduler=SchedulerConfig(**(scheduler or {})), **config)
        costs = None if costs_of is None else costs_of(self.clock)
        self.engine = Engine(settings, self.executor, self.recorder, costs=costs)

    def request(self, name: str, prompt: int | list[int], max_tokens: int = 4, **fields: Any) -> Sequence:
        """Submit a request; a prompt is token ids, or a length whose blocks are its own alone."""
        ids = prompt if isinstance(prompt, list) else []
        length = len(ids) if ids else int(prompt)  # type: ignore[call-overload]
        size = self.engine.config.block_size
        own = [hash((name, index)) & ((1 << 63) - 1) for index in range(length // size)]
        sequence = Sequence(
            name,
            length,
            SamplingParams(max_tokens=max_tokens),
            fields.pop("arrival_ns", self.clock.now),
            token_ids=list(ids),
            prompt_hashes=fields.pop("hashes", () if ids else own),
            **fields,
        )
        self.engine.submit(sequence)
        return sequence

    def siblings(self, names: list[str], prompt: list[int], max_tokens: int = 4) -> list[Sequence]:
        """Submit several answers to one prompt."""
        made = [
            Sequence(name, len(prompt), SamplingParams(max_tokens=max_tokens), self.clock.now, token_ids=list(prompt))
            for name in names
        ]
        self.engine.submit_siblings(made)
        return made

    def run(self, steps: int = 10_000) -> list[Output]:
        """Step until nothing is left to do."""
        outputs: list[Output] = []
        while self.engine.has_work and steps:
            outputs += self.engine.step() or []
            self.engine.check_integrity()
            steps -= 1
        return outputs

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of a kind so far."""
        self.recorder.flush()
        return [{k: v for k, v in row.items() if v is not None} for row in self.sink.table(kind).to_pylist()]

    def requests(self) -> dict[str, dict[str, Any]]:
        """Request rows by id."""
        return {row["request_id"]: row for row in self.rows("request")}


__all__ = ["STEP_S", "EngineBench", "FixedSteps", "replace"]
