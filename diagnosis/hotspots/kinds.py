"""Why a worker became a hotspot: read off what the router believed and did in the intervals in which it was one.

    straggler              its steps take longer than those of the others; the router goes on sending
    dead_signal            the load that the router reads of every worker, or of this one, is one constant, while requests queue there
    tie_breaking           among equal best scores it takes the same place of the list again and again
    affinity               it goes where a prefix (or a tenant, or a session's key) went before, and that is too much for one
    stale_index            what its index believes of the worker differs from what is found there
    unreachable_threshold  its index knows who holds the prompt, and its choices do not follow it
    None                   too much goes there, and why cannot be seen

Each rule needs MIN_CHOICES decisions. Their order is that of this list: a counter that is dead makes ties, ties make affinity.
A dead signal that sends too much to several workers at once leaves none that stands out; then it is the fleet's (`dead`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.facts import I64, Bool
from diagnosis.hotspots.detection import Detected
from diagnosis.hotspots.harm import MIN_HARM
from diagnosis.hotspots.observed import F32, Observed
from diagnosis.hotspots.regret import Regret

KINDS: Final = ("straggler", "dead_signal", "tie_breaking", "affinity", "stale_index", "unreachable_threshold")
LOOKED_AT = 256
"""Decisions that are looked at first for a load that moves."""
MIN_CHOICES = 10
"""Decisions in which a rule has to show: of fewer, one in five goes one way by chance alone."""
LOOK_AT_NOTHING: Final = frozenset(("round_robin", "random"))
"""Policies that read no load: a constant one costs them nothing."""
SAME_PLACE_P = 0.001
"""Chance that ties broken at random would all have fallen so, below which they were not."""
KEY_STAYS = 0.9
"""Share of a prefix's requests that one worker gets, from which on the router keeps it there."""
KEY_SHARE = 0.3
"""Share of a worker's decisions that one prefix (or longest matches, held by no more than half of those who could be chosen) must be to be the reason."""
SIGMAS, FOLLOWS = 3.0, 0.1
"""A router goes by prefix where it did so more often than chance would: by standard errors, or by a tenth of the decisions that could."""
MIN_CHANCES = 30
"""Decisions that could go by prefix, before a router that does not is told of: standard errors of a share need as many."""
CHANCE_TOKENS, CHANCE_RATIO = 64, 0.3
"""A decision could go by prefix where one worker was believed to hold so many tokens, and this share of the prompt, more than another."""


@dataclass(frozen=True, slots=True)
class Named:
    """A kind, and the numbers that it rests on. key_kind: prefix | tenant | match (the longest one) | session, where it goes by a key."""

    kind: str | None
    numbers: dict[str, float]
    key_kind: str | None = None
    key: int | None = None


def name_load(seen: Observed, regret: Regret, rows: I64, worker: int) -> Named:
    """Why `worker` got so much in the decisions `rows`."""
    for rule in (_dead, _frozen, _tied, _pinned) if seen.has_routes else (_dead, _frozen):
        named = rule(seen, regret, rows, worker)
        if named is not None:
            return named
    return Named(None, {})


def _dead(seen: Observed, regret: Regret, rows: I64, worker: int) -> Named | None:
    load = seen.decisions.load[rows]
    told = load[np.isfinite(load)]
    waiting = regret.waiting[rows]
    if len(rows) < MIN_CHOICES or len(told) < MIN_CHOICES or not np.isfinite(waiting).any():
        return None
    # a round of one load each (all idle) is no evidence: somebody must have queued
    real = np.nan_to_num(waiting)
    if float(np.ptp(told)) > 0.0 or real.max() < 1 or float((real.max(axis=1) > 0).sum()) < MIN_CHOICES:
        return None
    return Named("dead_signal", {"load": float(told[0]), "max_waiting": float(real.max())})


def _frozen(seen: Observed, regret: Regret, rows: I64, worker: int) -> Named | None:
    """The load of this worker alone stands still, while requests wait there and the others' loads move."""
    if seen.policies and set(seen.policies) <= LOOK_AT_NOTHING:
        return None
    load = seen.decisions.load[rows]
    mine, others = load[:, worker], np.delete(load, worker, axis=1)
    told, waiting = np.isfinite(mine), np.nan_to_num(regret.waiting[rows, worker])
    if told.sum() < MIN_CHOICES or float((told & (waiting > 0)).sum()) < MIN_CHOICES:
        return None
    alive = np.isfinite(others)
    if float(np.ptp(mine[told])) > 0.0 or not alive.any() or float(np.ptp(others[alive])) == 0.0:
        return None
    return Named("dead_signal", {"load": float(mine[told][0]), "max_waiting": float(waiting.max()), "of_one": 1.0})


def dead(seen: Observed, regret: Regret, detected: Detected) -> Bool:
    """[I] intervals in which every load that the router read was one constant, while requests queued and that cost."""
    none = np.zeros(detected.num, dtype=np.bool_)
    if seen.policies and set(seen.policies) <= LOOK_AT_NOTHING:
        return none
    load, num, of = seen.decisions.load, detected.num, detected.of
    alive = np.isfinite(load)
    told = np.asarray(
        alive.all(axis=1) if seen.decisions.there is None else (alive | ~seen.decisions.there).all(axis=1)
    )
    told &= alive.any(axis=1)
    # most loads move, and of those that do a part tells it
    some = load[:LOOKED_AT][alive[:LOOKED_AT] & told[:LOOKED_AT, None]]
    if (len(some) and float(np.ptp(some)) > 0.0) or not told.any() or float(np.ptp(load[told][alive[told]])) > 0.0:
        return none
    queued = told & (np.nan_to_num(regret.waiting).max(axis=1) > 0) & np.isfinite(regret.seconds)
    rows = np.flatnonzero(queued)
    lost = np.bincount(of[queued], regret.seconds[queued], num)
    cost = np.bincount(of[queued], regret.cost_at(rows, np.maximum(regret.best[rows], 0)), num)
    return (np.bincount(of[queued], minlength=num) >= MIN_CHOICES) & (lost >= MIN_HARM * cost) & (lost > 0)


def _tied(seen: Observed, regret: Regret, rows: I64, worker: int) -> Named | None:
    """All ties in which the worker took part went to it, or all in which it stands first, and chance would not do that.

    Where no score is told, a router that goes by load has the load for one.
    """
    decisions = seen.decisions
    score, chosen = decisions.score[rows], decisions.chosen[rows]
    by_load = not np.isfinite(score).any()
    if by_load:
        score = np.where(decisions.goes_by_load[rows][:, None], -decisions.load[rows], np.nan)
    lowest = np.where(np.isfinite(score), score, -np.inf)
    top = lowest.max(axis=1, keepdims=True)
    among = (lowest == top) & np.isfinite(top)
    size = among.sum(axis=1)
    every = among[:, worker] & (size > 1)
    for first, mine in enumerate((every, every & (among.argmax(axis=1) == worker))):
        took = mine & (chosen == worker)
        if took.sum() < MIN_CHOICES or took.sum() < KEY_SHARE * max((chosen == worker).sum(), 1):
            continue
        # the router may look at the load next: then ties go to the least of it, and not to one place
        chance = float(np.log(size[took]).sum() - _log_ways(int(mine.sum()), int(took.sum())))
        if took.sum() >= KEY_STAYS * mine.sum() and chance >= -math.log(SAME_PLACE_P):
            numbers = {"ties": float(mine.sum()), "to_it": float(took.sum())}
            return Named("tie_breaking", numbers | {"by_load": float(by_load), "as_first": float(first)})
    return None


def _log_ways(of: int, take: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(take + 1) - math.lgamma(of - take + 1)


def _pinned(seen: Observed, regret: Regret, rows: I64, worker: int) -> Named | None:
    """A prefix or a tenant that stays at the worker, else the longest match that leads there."""
    decisions = seen.decisions
    chosen = decisions.chosen[rows]
    here = chosen == worker
    best: Named | None = None
    for kind, codes in (("prefix", decisions.prefix[rows]), ("tenant", decisions.tenant[rows])):
        known = codes >= 0
        if not known.any():
            continue
        size = int(codes.max()) + 1
        every, mine = np.bincount(codes[known], minlength=size), np.bincount(codes[known & here], minlength=size)
        stays = (mine >= KEY_STAYS * every) & (mine >= MIN_CHOICES)
        if not stays.any() or _goes_there_anyway(here, stays[np.maximum(codes, 0)] & known, every):
            continue
        key = int(np.where(stays, mine, -1).argmax())
        kept = float(mine[stays].sum()) / max(int(here.sum()), 1)
        if kept >= KEY_SHARE and (best is None or kept > best.numbers["share_of_worker"]):
            numbers = {"share_of_worker": kept, "requests": float(mine[key]), "of": float(every[key])}
            best = Named("affinity", numbers, kind, key)
    if best is not None:
        return best
    options = decisions.options(rows)
    holders, longest = _holders(options, decisions.matched[rows])
    few = (longest > 0) & (2 * holders.sum(axis=1) <= options.sum(axis=1))
    led = here & few & holders[:, worker]
    share = float(led.sum()) / max(int(here.sum()), 1)
    if led.sum() < MIN_CHOICES or share < KEY_SHARE or not _follows(holders, longest, few, options, chosen, worker):
        return _kept(seen, rows, worker)
    shared = _commonest(decisions.prefix[rows][led])
    numbers = {"share_of_worker": share, "requests": float(led.sum()), "of": float(here.sum())}
    return Named(
        "affinity", numbers | {"holders": float(np.ceil(np.median(holders[led].sum(axis=1))))}, "match", shared
    )


def _holders(options: Bool, matched: F32) -> tuple[Bool, F32]:
    """([n, K] who of the options was believed to hold the longest match, [n] that match in tokens)."""
    told = np.where(options, np.nan_to_num(matched), np.float32(0.0))
    longest = told.max(axis=1)
    return options & (told == longest[:, None]), longest


def _goes_there_anyway(here: Bool, keeps: Bool, every: I64) -> bool:
    """What has none of the keys that stay at the worker goes there just as well: then no key is why. `every`: decisions of each key."""
    rest = ~keeps
    if not rest.any():
        return int((every > 0).sum()) > 1  # of one key alone nobody can tell what would become of another
    return float(here[rest].mean()) >= KEY_STAYS


def _follows(holders: Bool, longest: F32, few: Bool, options: Bool, chosen: I64, worker: int) -> bool:
    """Choices go where the longest match is more often than the workers' shares of all explain; what nobody holds goes elsewhere too.

    The shares are those among the options of each decision: of two that were drawn the one that gets most is chosen anyway.
    """
    free = longest <= 0
    if free.sum() >= MIN_CHOICES and float((chosen[free] == worker).mean()) >= KEY_STAYS:
        return False
    shares = np.bincount(chosen, minlength=options.shape[1]) / len(chosen)
    chance = float(((holders[few] @ shares) / np.maximum(options[few] @ shares, 1e-12)).mean())
    num = int(few.sum())
    error = math.sqrt(chance * max(1 - chance, 0.0) / num)
    return chance >= 1.0 or float(holders[few, chosen[few]].mean()) - chance > SIGMAS * error


def _kept(seen: Observed, rows: I64, worker: int) -> Named | None:
    """Conversations stay where they were: a turn goes where the one before it went, more often than chance would send it there."""
    decisions = seen.decisions
    if decisions.session is None:
        return None
    order = np.argsort(decisions.session, kind="stable")  # by session, then by time
    session, chosen = decisions.session[order], decisions.chosen[order]
    before = np.full(len(order), -1, dtype=np.int64)
    same = (session[1:] == session[:-1]) & (session[1:] >= 0)
    before[order[1:][same]] = chosen[:-1][same]
    later = rows[before[rows] >= 0]
    stayed = decisions.chosen[later] == before[later]
    here = decisions.chosen[rows] == worker
    led = int((stayed & (decisions.chosen[later] == worker)).sum())
    share = led / max(int(here.sum()), 1)
    if led < MIN_CHOICES or share < KEY_SHARE or stayed.mean() < KEY_STAYS:
        return None
    # a router that sends next to all to one worker keeps conversations there without looking at them
    shares = np.bincount(decisions.chosen[rows], minlength=seen.num_workers) / len(rows)
    chance = float(shares[before[later]].mean())
    error = math.sqrt(chance * (1 - chance) / len(later))
    if float(stayed.mean()) - chance < max(SIGMAS * error, FOLLOWS):
        return None
    numbers = {"share_of_worker": share, "requests": float(led), "of": float(here.sum())}
    return Named("affinity", numbers, "session")


def _commonest(codes: I64) -> int | None:
    known = codes[codes >= 0]
    return int(np.bincount(known).argmax()) if len(known) else None


Chances = tuple[Bool, Bool, np.ndarray]


def chances(seen: Observed) -> Chances:
    """([N] the decision could go by prefix, [N] it did, [N] probability that it would by chance)."""
    decisions, served = seen.decisions, seen.served
    num = len(decisions)
    if num == 0 or not np.isfinite(decisions.matched).any():
        return np.zeros(num, dtype=np.bool_), np.zeros(num, dtype=np.bool_), np.zeros(num)
    matched = np.fmax(decisions.matched, 0.0)
    options = None if decisions.there is None and decisions.listed is None else decisions.options()
    among: Bool | bool = True if options is None else options
    longest, shortest = matched.max(axis=1, where=among, initial=0.0), matched.min(axis=1, where=among, initial=np.inf)
    prompt = served.prompt_tokens[np.maximum(decisions.request, 0)] if len(served) else np.full(num, np.nan)
    prompt = np.where(decisions.request >= 0, np.nan_to_num(prompt), 0.0)
    enough = np.maximum(CHANCE_TOKENS, CHANCE_RATIO * prompt)
    could = ~decisions.goes_by_load & (longest - shortest >= enough)
    holders = matched >= longest[:, None] - CHANCE_TOKENS
    holders = holders if options is None else holders & options
    did = could & holders[np.arange(num), decisions.chosen]
    size = np.full(num, matched.shape[1]) if options is None else options.sum(axis=1)
    return could, did, np.count_nonzero(holders, axis=1) / np.maximum(size, 1)


def ignored(regret: Regret, detected: Detected, found: Chances) -> Bool:
    """[I] intervals in which the router's choices did not follow its own index, though that cost."""
    could, did, by_chance = found
    could = could & np.isfinite(regret.seconds)
    num, of = detected.num, detected.of
    n = np.bincount(of[could], minlength=num)
    went = np.bincount(of[could & did], minlength=num)
    expected = np.bincount(of[could], by_chance[could], num)
    variance = np.bincount(of[could], (by_chance * (1 - by_chance))[could], num)
    lost = np.bincount(of[could], regret.seconds[could], num)
    rows = np.flatnonzero(could)
    cost = np.bincount(of[could], regret.cost_at(rows, np.maximum(regret.best[rows], 0)), num)
    follows = (went - expected > SIGMAS * np.sqrt(variance)) | (went - expected > FOLLOWS * n)
    return (n >= MIN_CHANCES) & ~follows & (lost >= MIN_HARM * cost) & (lost > 0)
