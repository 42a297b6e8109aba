"""What some engines do beside the plain step, in virtual time: speculate, swap LoRA adapters in, compile for a new shape.

Modelled, not measured. Speculation: a small model drafts `draft_tokens` for each decoding sequence, one step verifies them all
(as that many more tokens, Leviathan et al. 2023), and each draft is accepted until the first that is not. Adapters: a prompt whose
adapter holds no slot waits for its weights, and so does everybody in the step; what decodes goes on with the adapter that it
has. Shapes: a step whose number of tokens falls into a class that was not met before takes the time to compile.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from engine_probe.engine.executor import StepPlan, StepResult
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.sequence import Sequence
from engine_probe.errors import UsageError


@dataclass(frozen=True, slots=True)
class Speculation:
    """draft_tokens of each sequence in a step, accepted each with `acceptance`; draft_ratio: time of a draft over a decode step."""

    draft_tokens: int = 4
    acceptance: float = 0.8
    draft_ratio: float = 0.05

    def __post_init__(self) -> None:
        if self.draft_tokens < 1 or not 0.0 <= self.acceptance < 1.0 or not 0.0 <= self.draft_ratio < math.inf:
            raise UsageError(
                "speculation drafts 1 token or more, accepted with 0 or more and below 1, at a ratio of 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Adapters:
    """slots for LoRA adapters on the device; swap_s: seconds until one that has none is there."""

    slots: int = 8
    swap_s: float = 0.1

    def __post_init__(self) -> None:
        if self.slots < 1 or not 0.0 <= self.swap_s < math.inf:
            raise UsageError("there is 1 adapter slot or more, and a swap takes 0 s or more")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Steps of up to so many tokens more are of one class; compile_s: seconds of the first of a class."""

    class_tokens: int = 128
    compile_s: float = 0.0

    def __post_init__(self) -> None:
        if self.class_tokens < 1 or not 0.0 <= self.compile_s < math.inf:
            raise UsageError("a class holds 1 token or more, and compiling takes 0 s or more")


@dataclass(frozen=True, slots=True)
class Extras:
    """None: the engine does no such thing."""

    speculation: Speculation | None = None
    adapters: Adapters | None = None
    shapes: Shapes | None = None


class ExtendedExecutor(RooflineExecutor):
    """A roofline executor with extras; `extras` may be set while it runs."""

    extras: Extras = Extras()
    _compiled: set[int]
    _resident: OrderedDict[str, None]

    def extend(self, extras: Extras, seed: int) -> ExtendedExecutor:
        """With these from now on; drafts are accepted by seed."""
        self.extras = extras
        self._compiled, self._resident = set(), OrderedDict()
        self._random = random.Random(f"extras/{seed}")
        return self

    def forget_shapes(self) -> None:
        """Nothing is compiled any more (another build, a cache that was lost)."""
        self._compiled.clear()

    def foresee(self, decodes: Items[Sequence], most: int) -> tuple[list[int], list[float]] | None:
        """Not where drafts decide how far a step comes, nor of a shape that is yet to be compiled."""
        shapes = self.extras.shapes
        if self.extras.speculation is not None or (
            shapes is not None and self._class(len(decodes)) not in self._compiled
        ):
            return None
        return super().foresee(decodes, most)

    def execute(self, plan: StepPlan) -> StepResult:
        """The plain step after what its extras take."""
        speculates = self.extras.speculation if plan.decodes else None
        extra_s = self._compiling_s(plan) + self._swapping_s(plan)
        if speculates is not None:
            extra_s += self._speculating_s(plan, speculates)
        self.clock.advance(extra_s * self.slow_factor)
        result = super().execute(plan)
        if speculates is None:
            return result
        accepted = [self._accepted(speculates) for _ in plan.decodes]
        return replace(result, num_drafted=speculates.draft_tokens, accepted=accepted)

    def _compiling_s(self, plan: StepPlan) -> float:
        shapes = self.extras.shapes
        if shapes is None:
            return 0.0
        shape = self._class(_prompt_tokens(plan) + len(plan.decodes))
        if shape in self._compiled:
            return 0.0
        self._compiled.add(shape)
        return shapes.compile_s

    def _class(self, tokens: int) -> int:
        assert self.extras.shapes is not None
        return -(-tokens // self.extras.shapes.class_tokens)

    def _swapping_s(self, plan: StepPlan) -> float:
        adapters, seconds = self.extras.adapters, 0.0
        if adapters is None:
            return seconds
        for chunk in plan.prefills:
            name = chunk.sequence.columns.get("model")
            if name is None:
                continue
            if name not in self._resident:
                seconds += adapters.swap_s
            self._resident[name] = None
            self._resident.move_to_end(name)
            while len(self._resident) > adapters.slots:
                self._resident.popitem(last=False)
        return seconds

    def _speculating_s(self, plan: StepPlan, speculation: Speculation) -> float:
        """Drafting, and verifying so many tokens more than a plain step decodes."""
        batch = len(plan.decodes)
        tokens, drafts = batch + _prompt_tokens(plan), batch * speculation.draft_tokens
        plain_s = self.times.parts(batch, batch).total_s
        with_s = self.times.parts(tokens + drafts, batch + drafts).total_s
        return (
            speculation.draft_tokens * speculation.draft_ratio * plain_s
            + with_s
            - self.times.parts(tokens, batch).total_s
        )

    def _accepted(self, speculation: Speculation) -> int:
        """Drafts up to the first that is refused."""
        if speculation.acceptance == 0.0:
            return 0
        draw = 1.0 - self._random.random()
        return min(int(math.log(draw) / math.log(speculation.acceptance)), speculation.draft_tokens)


def _prompt_tokens(plan: StepPlan) -> int:
    chunks: Items[int] = [chunk.num_tokens for chunk in plan.prefills]
    return sum(chunks)
