"""What was seen of a fleet's routing in one window, as aligned arrays. Times are seconds after the window's first decision.

N decisions, R requests, S steps, K workers. Unknown is NaN, a code of -1 or None. Without route rows each request is taken for
a decision of which nothing but the outcome is known (`has_routes` False): what the router believed is then NaN everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.facts import F64, I64, Bool
from store.interface import Window

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What requests [R] tell of their answers, unknown NaN."""

    last_token_s: F64
    decode_s: F64
    output_tokens: F64


@dataclass(frozen=True, slots=True)
class Served:
    """Requests [R] as the engines (or else the clients) saw them, in order of arrival."""

    ids: list[str]
    worker: I64
    arrival_s: F64
    first_scheduled_s: F64
    first_token_s: F64
    prompt_tokens: F64
    cached_tokens: F64
    computed_tokens: F64
    prefill_s: F64
    decoded: Decoded | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Decisions:
    """Choices [N] in order of time; `matched`, `load`, `score` [N, K] are what the router believed of each worker.

    request           row of `Served` that came of it, -1 unknown
    prefix, tenant    codes into the names of `Observed`, -1 unknown
    session           code of the conversation that it is a turn of, -1 unknown; None where nobody tells
    goes_by_load      the policy's name says that it looks at no prefix
    there             [N, K] the worker could be chosen (`reachable`); None: everybody could, every time
    listed            [N, K] it stood in the list of the decision, where lists are shorter than that: drawn from those who were there
    """

    ids: list[str]
    at_s: F64
    chosen: I64
    request: I64
    prefix: I64
    tenant: I64
    goes_by_load: npt.NDArray[np.bool_]
    matched: F32
    load: F32
    score: F32
    session: I64 | None = None
    there: Bool | None = None
    listed: Bool | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def options(self, rows: I64 | slice = slice(None)) -> Bool:
        """[len(rows), K] whom the router looked at in these decisions: their lists, else all who could be chosen."""
        told = self.there if self.listed is None else self.listed
        return np.ones(self.matched[rows].shape, dtype=np.bool_) if told is None else told[rows]


@dataclass(frozen=True, slots=True)
class Steps:
    """Scheduler steps [S], ordered by worker and time; `at_s` is a step's end."""

    worker: I64
    at_s: F64
    duration_s: F64
    prefill_tokens: F64
    decode_tokens: F64
    waiting: F64
    running: F64


@dataclass(frozen=True, slots=True)
class Observed:
    """One window. end_s: where it ends; prefixes, tenants: names of the codes; policies: names that route rows tell."""

    window: Window
    origin_ns: int
    end_s: float
    workers: tuple[str, ...]
    prefixes: tuple[str, ...]
    tenants: tuple[str, ...]
    policies: tuple[str, ...]
    decisions: Decisions
    served: Served
    steps: Steps | None
    has_routes: bool
    vantage: str
    """That of the request rows."""
    gauges: Steps | None = None
    """Where no step was recorded, what was scraped of queues: only how many waited and ran is known."""
    loads_scraped: bool = False
    """The loads of the decisions are the router's load gauge, and not what its decisions tell."""
    held: F64 | None = None
    """[N] tokens of the prompt that the chosen worker held at the decision's instant, by the life of its blocks; NaN unknown."""
    pools: I64 | None = None
    """[K] code of the pool of each worker: who serves another model, or another part of the work, is compared with none of these. None: one pool."""

    def found_there(self) -> F64:
        """[N] tokens that the chosen worker held when it was chosen; where no block tells, what the request found in its turn."""
        row = np.maximum(self.decisions.request, 0)
        found = np.where(self.decisions.request >= 0, self.served.cached_tokens[row], np.nan)
        return found if self.held is None else np.where(np.isfinite(self.held), self.held, found)

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    def pool_of(self) -> I64:
        """[K] code of each worker's pool."""
        return np.zeros(self.num_workers, dtype=np.int64) if self.pools is None else self.pools
