"""Hand-made pairs of windows, as in `cause_scenarios.py`, for KV that moves from a worker that prefills to one that decodes.

Each request gives its first token at the prefill worker and nine more at the decode worker w9, in 0.9 s; what its hand-over took lies
between them. Judged is TPOT, of which one part in nine of such a second is seen. The arithmetic stands beside each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from diagnosis.facts import Facts, HandoverFacts, StepFacts
from diagnosis.ledger.rows import HANDOVER
from tests.cause_scenarios import N, Pair, Scenarios, bare_pair, more_load, pair, plain, worker
from tests.factories import facts

SEES = frozenset(("transfer.wait_s", "transfer.wire_s", "transfer.outcome", "step.blocks_used"))


def handover(*, broke: int = 0, num_bytes: float = 1e8, **parts: float) -> HandoverFacts:
    """One hand-over a request, each with these seconds by row; the first `broke` of them broke."""
    spread = {name: np.full(N, parts.get(name, 0.0)) for name in HANDOVER}
    wire = spread["transfer_wire"] + spread["transfer_failures"] + 0.002
    return HandoverFacts(
        parts=spread,
        moved=np.ones(N, dtype=bool),
        worker_names=("w9",),
        worker=np.zeros(N, dtype=np.int64),
        first_s=np.full(N, np.nan),
        last_s=np.full(N, np.nan),
        output_tokens=np.full(N, 9.0),
        again={},
        before_first=np.zeros(N, dtype=bool),
        num_bytes=np.full(N, num_bytes),
        wire_s=wire,
        wait_s=spread["transfer_orchestration"] + spread["decode_block_shortage"],
        link_s=np.zeros(N),
        broke=np.arange(N) < broke,
        of=np.arange(N),
        sees_room=True,
        sees_seats=True,
    )


def handed_over(found: HandoverFacts, decode: float = 0.9, steps: StepFacts | None = None, **phases: Any) -> Facts:
    """Requests whose decode takes `decode` s and the hand-over's seconds beside; `phases` as those of `plain`."""
    spent = sum(float(part[0]) for part in found.parts.values())
    made = facts(plain(decode=decode + spent, **phases), workers=[worker(500)], steps=steps)
    return replace(made, handover=found, visible=made.visible | SEES)


def longer(row: str, seconds: float = 0.45, **more: Any) -> Callable[[], Pair]:
    """The part takes 0.45 s more of 0.9 s of decoding: all of the change."""

    def made() -> Pair:
        return pair(handed_over(handover()), handed_over(handover(**{row: seconds}, **more)), "tpot")

    return made


def as_long(row: str, **more: Any) -> Callable[[], Pair]:
    """The part takes 0.1 s in both windows."""

    def made() -> Pair:
        return pair(handed_over(handover(**{row: 0.1})), handed_over(handover(**{row: 0.1}, **more)), "tpot")

    return made


def a_little_longer(row: str, **more: Any) -> Callable[[], Pair]:
    """The part takes 5 ms more, decoding 450 ms: 1 % of the change."""

    def made() -> Pair:
        return pair(handed_over(handover()), handed_over(handover(**{row: 0.005}, **more), decode=1.35), "tpot")

    return made


def of_part(row: str, **more: Any) -> Scenarios:
    return Scenarios(longer(row, **more), as_long(row), a_little_longer(row, **more), bare_pair)


# prefill_backlog: prompts wait for each other at the prefill worker; the decode worker takes them at once


def _split(made: Facts) -> Facts:
    return replace(made, handover=handover(), visible=made.visible | SEES)


def prompts_wait() -> Pair:
    """As in `more_load`, on as many arrivals: the baseline has them on two prefill workers, the suspect window on one."""
    _, busy, metric = more_load()
    shared = replace(busy.requests, worker=np.arange(N) % 2, worker_names=("w0", "w1"))
    quick = replace(
        shared,
        numbers={**shared.numbers, "queue_s": np.zeros(N)},
        scheduled_s=shared.engine_arrival_s,
        first_token_s=shared.first_token_s - shared.get("queue_s"),
        engine_first_s=shared.engine_first_s - shared.get("queue_s"),
    )
    return pair(_split(replace(busy, requests=quick)), _split(busy), metric)


def prompts_do_not_wait() -> Pair:
    """Nobody queues in either window."""
    return pair(handed_over(handover()), handed_over(handover()), "ttft")


def more_arrive() -> Pair:
    """The queue grew, but more requests arrived in all: it is the load."""
    calm, busy, metric = more_load()
    return pair(_split(calm), _split(busy), metric)


MOVES: dict[str, Scenarios] = {
    "transfer_wire": of_part("transfer_wire"),
    "transfer_orchestration": of_part("transfer_orchestration"),
    "transfer_failures": of_part("transfer_failures", broke=6),
    "decode_block_shortage": of_part("decode_block_shortage"),
    "decode_backlog": of_part("decode_queue"),
    "prefill_backlog": Scenarios(prompts_wait, prompts_do_not_wait, more_arrive, bare_pair),
}
