"""Labels that a sender could fill with inventions, held to a number: first come, or the heaviest.

First come (`Names`): workers, models, policies; what comes later is `other`. The heaviest (`Tops`): tenants and prefixes, of
which there may be 100,000 and new ones every minute. Their weights are a Misra-Gries summary, merged a batch at a time
(Agarwal et al. 2012, Mergeable summaries): of n counted, every value heavier than n / CANDIDATES is in it. Old weight decays.

So is the length of a value (`label`): a name of a megabyte would stand on the page a thousand times, once a bucket.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

OTHER: Final = "other"
CANDIDATES: Final = 512
HALF_LIFE_S: Final = 600.0
CLEARLY: Final = 2.0
"""A newcomer takes the place of a shown value that weighs less than half: a series that comes and goes tells nothing."""
_RIPE: Final = 8.0
"""The least weight with which a newcomer may push another out."""


LONGEST: Final = 200


def label(text: str) -> str:
    """The text as the value of a label: what is longer than LONGEST characters is cut, and told apart by a hash of all of it."""
    if len(text) <= LONGEST:
        return text
    mark = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[: LONGEST - 9]}~{mark}"


class Names:
    """Words up to a number; what comes later is `other`. Safe from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        value = label(value)
        with self._lock:
            if value in self._known or len(self._known) < self._most:
                self._known.add(value)
                return value
        return OTHER


class Tops:
    """The `most` heaviest values by recent weight. Its caller sees to it that one thread at a time comes in.

    A value that is shown stays until another clearly outweighs it; its series then end, and what follows is `other`. No count
    moves between series, so rates and their sum hold at every instant.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._weights: dict[Any, float] = {}
        self._decayed_ns: int | None = None
        self.shown: dict[Any, None] = {}

    def offer(self, values: list[Any], counts: npt.NDArray[Any], now_ns: int) -> list[Any]:
        """Weigh different values of a batch; answers those that are not shown any more."""
        self._decay(now_ns)
        if len(values) > CANDIDATES:
            heaviest = np.argpartition(counts, -CANDIDATES - 1)[-CANDIDATES - 1 :]
            least = float(counts[heaviest[0]])
            batch = [(values[number], float(counts[number]) - least) for number in heaviest[1:].tolist()]
        else:
            batch = list(zip(values, counts.tolist(), strict=True))
        for value, count in batch:
            self._weights[value] = self._weights.get(value, 0.0) + count
        self._prune()
        return self._choose()

    def _decay(self, now_ns: int) -> None:
        if self._decayed_ns is None:
            self._decayed_ns = now_ns
        passed_s = (now_ns - self._decayed_ns) / 1e9
        if passed_s > HALF_LIFE_S / 20:
            factor = 0.5 ** (passed_s / HALF_LIFE_S)
            self._weights = {value: weight * factor for value, weight in self._weights.items()}
            self._decayed_ns = now_ns

    def _prune(self) -> None:
        """Take the weight of the first value too many from all."""
        if len(self._weights) > CANDIDATES:
            least = sorted(self._weights.values(), reverse=True)[CANDIDATES]
            self._weights = {value: weight - least for value, weight in self._weights.items() if weight > least}

    def _choose(self) -> list[Any]:
        waiting = sorted(
            ((weight, value) for value, weight in self._weights.items() if value not in self.shown),
            key=lambda pair: -pair[0],
        )[: self._most]
        gone = []
        for weight, value in waiting:
            if len(self.shown) < self._most:
                self.shown[value] = None
                continue
            weakest = min(self.shown, key=lambda one: self._weights.get(one, 0.0))
            if weight < max(_RIPE, CLEARLY * self._weights.get(weakest, 0.0)):
                break
            del self.shown[weakest]
            gone.append(weakest)
            self.shown[value] = None
        return gone
