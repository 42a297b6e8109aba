"""What to change about a hotspot, and from where on that pays, computed from measured rates.

recompute_s = tokens found of the prefix (median) x seconds a token at the other workers (median)
wait_each_s = tokens that a request of the worker had to compute (mean) x its own seconds a token
spill_above = floor(recompute_s / wait_each_s): with more waiting than that, computing the prefix elsewhere is sooner done
replicas    = share of the fleet's decisions that the key is x workers, rounded up, at least 2, at most all
"""

from __future__ import annotations

import math

import numpy as np

from diagnosis.facts import F64, I64
from diagnosis.hotspots.finding import Advice
from diagnosis.hotspots.kinds import Named
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret
from diagnosis.telling.wording import seconds

MEND = (
    "Mend the load signal first: the router's counter does not move, so nothing holds it back. Count a request when it is sent and "
    "when it ends, or poll running + waiting from the engines."
)


def advise(seen: Observed, regret: Regret, rows: I64, worker: int | None, named: Named, subject: str) -> Advice:
    """For the decisions `rows` (the whole fleet's of the interval), of which those to `worker` are the hotspot's.

    Of a threshold that is not reached: those that could have gone by prefix.
    """
    if named.kind == "dead_signal" and worker is None:
        return Advice(MEND)
    if worker is None:
        return _index(seen, rows, named)
    if named.kind == "straggler":
        return Advice(
            f"Take {subject} out of the rotation or lower its weight until its steps are as fast as the others'; compare its "
            "clocks, power, temperature, neighbours on the host and engine version with theirs. A router that counts "
            "outstanding tokens over each worker's measured rate, not requests, would have sent it less. Where it is other hardware by "
            f"design, {_weight(named):.2f} of the others' weight is its due."
        )
    recompute_s, wait_each_s = break_even(seen, regret, rows, worker)
    spill = _spill(recompute_s, wait_each_s)
    even = ""
    if spill is not None and recompute_s is not None and wait_each_s is not None:
        when = f"while more than {spill} wait" if spill else "as soon as one waits"
        even = (
            f"Spill to the least loaded worker {when} at {subject}: computing the prefix elsewhere takes "
            f"{seconds(recompute_s)}, and each one that waits adds {seconds(wait_each_s)}."
        )
    if named.kind == "dead_signal":
        return Advice(f"{MEND} {even}".strip(), None, spill, recompute_s, wait_each_s)
    if named.kind == "tie_breaking":
        text = f"Break ties at random or by the least load, not by the place in the list. {even}"
        return Advice(text.strip(), None, spill, recompute_s, wait_each_s)
    if named.kind == "affinity":
        if named.key_kind == "session":
            text = f"Let a conversation move when its worker queues (or add the load to the score), and place new ones by load. {even}"
            return Advice(text.strip(), None, spill, recompute_s, wait_each_s)
        replicas = _replicas(seen, rows, worker, named)
        text = (
            f"Let {replicas} workers hold what is pinned to {subject} (replicate the prefix, or add the load to the score so "
            f"that it spreads). {even}"
        )
        return Advice(text.strip(), replicas, spill, recompute_s, wait_each_s)
    text = (
        "Record the router's decisions (route rows with their candidates): then the reason can be told. Until then, "
        + (
            even[:1].lower() + even[1:]
            if even
            else f"cap what waits at {subject} and spill the rest to the least loaded worker."
        )
    )
    return Advice(text, None, spill, recompute_s, wait_each_s)


def _weight(named: Named) -> float:
    """What a straggler serves in the time in which another serves 1."""
    return 1.0 / max(named.numbers["slowness"], 1.0)


def break_even(seen: Observed, regret: Regret, rows: I64, worker: int) -> tuple[float | None, float | None]:
    """(seconds in which another worker computes what this one holds, seconds that each waiting request adds here)."""
    mine = rows[seen.decisions.chosen[rows] == worker]
    joined = seen.decisions.request[mine]
    joined = joined[joined >= 0]
    pool = seen.pool_of()
    others = np.delete(regret.token_s, worker)[np.delete(pool == pool[worker], worker)]
    found, computed = seen.served.cached_tokens[joined], seen.served.computed_tokens[joined]
    there, here = _middle(others), float(regret.token_s[worker])
    held, each = _middle(found[found > 0]), _mean(computed)
    recompute_s = (
        None if there is None else (0.0 if held is None and len(joined) else None if held is None else held * there)
    )
    wait_each_s = None if each is None or not math.isfinite(here) else each * here
    return recompute_s, wait_each_s


def _spill(recompute_s: float | None, wait_each_s: float | None) -> int | None:
    if recompute_s is None or wait_each_s is None or wait_each_s <= 0.0:
        return None
    return math.floor(recompute_s / wait_each_s + 1e-9)


def _replicas(seen: Observed, rows: I64, worker: int, named: Named) -> int:
    decisions = seen.decisions
    if named.key is not None and named.key_kind in ("prefix", "tenant"):
        codes = decisions.prefix if named.key_kind == "prefix" else decisions.tenant
        share = float(np.mean(codes[rows] == named.key))
    else:
        share = float(np.mean(decisions.chosen[rows] == worker))
    # as many as hold it already are too few
    least = 1 + int(named.numbers.get("holders", 1.0))
    return max(min(least, seen.num_workers), min(seen.num_workers, math.ceil(share * seen.num_workers - 1e-9)))


def _index(seen: Observed, rows: I64, named: Named) -> Advice:
    if named.kind == "stale_index":
        return Advice(
            "Bring the router's prefix index up to date: shorten the path of block events, resynchronise after gaps (a lost "
            "event stays lost), and let evictions travel first. Where that cannot be, trust a match less the older it is."
        )
    prompt = seen.served.prompt_tokens[np.maximum(seen.decisions.request[rows], 0)]
    rows, prompt = rows[prompt > 0], prompt[prompt > 0]
    ratio = _middle(np.fmax(seen.decisions.matched[rows], 0.0).max(axis=1, initial=0.0) / prompt)
    at = "" if ratio is None else f" below {ratio:.2f}, the median of what prompts really match"
    return Advice(
        f"Lower the match that the router asks for{at} (SGLang: cache_threshold; others: minimum prefix match): as it is, the "
        "rule that goes by prefix never comes into play, and each worker computes every prefix anew.",
        threshold_ratio=ratio,
    )


def _middle(values: F64) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _mean(values: F64) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
