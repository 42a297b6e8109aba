"""How a router chooses a worker: seven policies over what it believes of each.

Each is given, per candidate, how much of the prompt's prefix it is believed to hold, its load and its queue, and answers
the chosen one and a score for each; the highest score wins. Beliefs may be stale or dead, which is not a policy's business
(`prefix_index.py`, lab). Invariant: the choice depends on the arguments, the earlier calls and the seed alone.

    round_robin          the next one
    random               any
    least_loaded         the least load
    power_of_two         the less loaded of two drawn at random (Mitzenmacher 2001)
    prefix_affinity      the longest matched prefix; below `min_match_ratio` of the prompt, the least load (SGLang's cache threshold)
    affinity_with_load   matched share of the prompt minus load_weight * load / mean load
    sticky               the worker that had this key before; a new key goes to the least load

Pure affinity pins whatever is shared by all to one worker; the load term is what spreads it (ground truth, section 2).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_probe.errors import UsageError

MAX_KEYS = 1_000_000
"""Keys that `sticky` remembers; the one unused for longest is forgotten first."""
STICKY_TOKENS = 1024
"""A prompt's beginning up to here is what it is known by. The very first tokens are often shared by all (a system prompt), and
would pin everything to one worker."""
TIES = ("lowest", "random")
"""Among equals: the first candidate, or any. `lowest` sends every tie to one worker: the fault `hotspot_tie_breaking`."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the router believes of each worker, in one order: parallel lists, at least one candidate.

    matched   of the prompt's prefix, in blocks or tokens; `prompt` is the whole prompt in the same unit
    load      work assigned and not done, in any unit; queue: requests that wait there
    key       what `sticky` sticks to: session or tenant; None: a key of its own
    """

    matched: Sequence[float]
    load: Sequence[float]
    queue: Sequence[float]
    prompt: float
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Choice:
    """index of the chosen candidate; scores of each, None where it was not looked at."""

    index: int
    scores: list[float | None]


class Policy(Protocol):
    """Chooses among candidates."""

    name: str

    def choose(self, candidates: Candidates) -> Choice:
        """One of them."""


def prefix_key(hashes: Sequence[int], block_size: int) -> Hashable:
    """What `sticky` sticks to where a request names neither session nor tenant: its beginning of STICKY_TOKENS, or all of it.

    hashes   chain hashes of its blocks: one names everything before it
    """
    depth = max(1, -(-STICKY_TOKENS // block_size))
    return hashes[min(depth, len(hashes)) - 1] if hashes else None


class RoundRobin:
    """The next one. A candidate more or fewer does not disturb the turn of the others."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, candidates: Candidates) -> Choice:
        self._turn = (self._turn + 1) % len(candidates.load)
        return _only(self._turn, candidates)


class Random:
    """Any."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates) -> Choice:
        return _only(self._random.randrange(len(candidates.load)), candidates)


class LeastLoaded:
    """The least load; of several the shortest queue."""

    name = "least_loaded"

    def __init__(self, *, ties: str = "random", seed: int = 0) -> None:
        self._tie = _Tie(ties, seed)

    def choose(self, candidates: Candidates) -> Choice:
        return self._tie.least(candidates)


class PowerOfTwo:
    """Two drawn at random, of which the less loaded; of equals the one drawn first."""

    name = "power_of_two"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates) -> Choice:
        load = candidates.load
        drawn = self._random.sample(range(len(load)), min(2, len(load)))
        scores: list[float | None] = [None] * len(load)
        for index in drawn:
            scores[index] = -load[index]
        return Choice(min(drawn, key=lambda index: load[index]), scores)


class PrefixAffinity:
    """The longest match; of several the less loaded, or with ties `lowest` the first.

    Where the longest is below `min_match_ratio` of the prompt, the least load.
    """

    name = "prefix_affinity"

    def __init__(self, *, min_match_ratio: float = 0.0, ties: str = "random", seed: int = 0) -> None:
        if not min_match_ratio >= 0.0:
            raise UsageError(f"min_match_ratio is {min_match_ratio}; expected 0 or more (above 1 it is never reached)")
        self._min_match = min_match_ratio
        self._goes_by_load = ties != "lowest"
        self._tie = _Tie(ties, seed)

    def choose(self, candidates: Candidates) -> Choice:
        prompt = candidates.prompt or 1.0
        scores = [matched / prompt for matched in candidates.matched]
        if max(scores) < self._min_match:
            return self._tie.least(candidates)
        return self._tie.best(scores, candidates.load if self._goes_by_load else None)


class AffinityWithLoad:
    """Matched share of the prompt minus load_weight * load / mean load; of equal scores the less loaded.

    Where nobody has load, the match alone counts.
    """

    name = "affinity_with_load"

    def __init__(self, *, load_weight: float = 1.0, ties: str = "random", seed: int = 0) -> None:
        if not 0.0 <= load_weight < float("inf"):
            raise UsageError(f"load_weight is {load_weight}; expected 0 or more")
        self._weight = load_weight
        self._tie = _Tie(ties, seed)

    def choose(self, candidates: Candidates) -> Choice:
        load, prompt = candidates.load, candidates.prompt or 1.0
        mean = sum(load) / len(load)
        per_load = self._weight / mean if mean > 0 else 0.0
        scores = [
            matched / prompt - per_load * of_worker for matched, of_worker in zip(candidates.matched, load, strict=True)
        ]
        return self._tie.best(scores, load)


class Sticky:
    """The worker that had this key before, while there is one; a new key goes to the least load.

    A request without a key is a new key every time. A worker that left the candidates' end gives its keys up.
    """

    name = "sticky"

    def __init__(self, *, ties: str = "random", seed: int = 0, max_keys: int = MAX_KEYS) -> None:
        self._tie = _Tie(ties, seed)
        self._max_keys = max_keys
        self._worker_of: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, candidates: Candidates) -> Choice:
        key = candidates.key
        if key is None:
            return self._tie.least(candidates)
        index = self._worker_of.get(key)
        if index is None or index >= len(candidates.load):
            choice = self._tie.least(candidates)
            self._worker_of[key] = choice.index
            if len(self._worker_of) > self._max_keys:
                self._worker_of.popitem(last=False)
            return choice
        self._worker_of.move_to_end(key)
        return _only(index, candidates)


POLICIES: tuple[str, ...] = (
    RoundRobin.name,
    Random.name,
    LeastLoaded.name,
    PowerOfTwo.name,
    PrefixAffinity.name,
    AffinityWithLoad.name,
    Sticky.name,
)


def make_policy(
    name: str, *, seed: int = 0, ties: str = "random", min_match_ratio: float = 0.0, load_weight: float = 1.0
) -> Policy:
    """The policy called `name`; what it has no use for is ignored. UsageError names the known ones."""
    made: dict[str, Policy] = {
        RoundRobin.name: RoundRobin(),
        Random.name: Random(seed),
        LeastLoaded.name: LeastLoaded(ties=ties, seed=seed),
        PowerOfTwo.name: PowerOfTwo(seed),
        PrefixAffinity.name: PrefixAffinity(min_match_ratio=min_match_ratio, ties=ties, seed=seed),
        AffinityWithLoad.name: AffinityWithLoad(load_weight=load_weight, ties=ties, seed=seed),
        Sticky.name: Sticky(ties=ties, seed=seed),
    }
    if name not in made:
        raise UsageError(f"no routing policy '{name}' here; known: {', '.join(POLICIES)}", policy=name)
    return made[name]


class _Tie:
    """Chooses among equals."""

    def __init__(self, ties: str, seed: int) -> None:
        if ties not in TIES:
            raise UsageError(f"ties are broken by {' or '.join(TIES)}, not '{ties}'", ties=ties)
        self._random = random.Random(seed) if ties == "random" else None

    def best(self, scores: Sequence[float], load: Sequence[float] | None = None) -> Choice:
        """The highest score; of several the least load, where that is given."""
        highest = max(scores)
        equal = [index for index, score in enumerate(scores) if score == highest]
        if len(equal) > 1 and load is not None:
            least = min(load[index] for index in equal)
            equal = [index for index in equal if load[index] == least]
        return Choice(self._one_of(equal), list(scores))

    def least(self, candidates: Candidates) -> Choice:
        """The least load; of several the shortest queue."""
        load, queue = candidates.load, candidates.queue
        lowest = min(load)
        equal = [index for index, of_worker in enumerate(load) if of_worker == lowest]
        if len(equal) > 1:
            shortest = min(queue[index] for index in equal)
            equal = [index for index in equal if queue[index] == shortest]
        return Choice(self._one_of(equal), [-of_worker for of_worker in load])

    def _one_of(self, equal: list[int]) -> int:
        if len(equal) == 1 or self._random is None:
            return equal[0]
        return equal[self._random.randrange(len(equal))]


def _only(index: int, candidates: Candidates) -> Choice:
    """Chosen without a look at the candidates: 1 for it, 0 for the others."""
    scores: list[float | None] = [0.0] * len(candidates.load)
    scores[index] = 1.0
    return Choice(index, scores)
