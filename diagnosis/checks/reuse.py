"""How many prompt tokens came from the cache, by everybody who can tell: do they say the same, and if not, who stands alone?

Idea: a hit counter that reads 0 is true where nothing was reused, and a lie where requests, steps or the times say otherwise; the
counter itself looks the same. So each witness is asked apart, and where they part grossly, those who agree outvote the one
who does not. What was found outside the engine's own cache (by a connector, in a slower tier) its hit counter may leave out and be true.
A contradiction is a witness that saw (nearly) nothing beside one that saw much; smaller differences are warnings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.checks.check import NUMBERS_OF_REUSE, RARE, TOLERANCE, Check, differ, is_rare
from diagnosis.checks.counters import leave_out, rise
from diagnosis.checks.delivery import handed_over, lost_share, missing_share
from diagnosis.facts import Facts
from diagnosis.sampled import margin, rate_of, total
from diagnosis.telling.wording import listing, number, percent

NONE_OF, MUCH_OF = 0.01, 0.10
"""Shares of the prompt tokens: up to the one nothing was reused, from the other on much was."""
FEWEST_TOKENS = 1000
"""Reused tokens below which nobody is held to account."""
COUNTERS = ("prefix_hits_tokens_total", "prefix_queries_tokens_total")
OUTSIDE = "external_hits_tokens_total"
CONNECTORS = frozenset({"kv_connector", "kv_offloading_size"})
"""Flags of an engine whose requests may find what they ask for in another cache than its own."""

MOST_MISSING = 0.5
"""Share of the steps that may be missing before the others tell what they computed."""
READ = 0.5
"""Share of the window between the first and the last reading of a counter, from which on its rise is that of the window."""


def was_read(facts: Facts, name: str = COUNTERS[0]) -> bool:
    """Whether the counter was read over most of the window, and of all who served: of a single reading no rise tells anything."""
    return not leave_out(facts) and facts.samples.get(f"{name}:span_s", np.inf) >= READ * facts.duration_s


def says_off(facts: Facts) -> bool:
    """Whether all workers that tell say that prefix caching is off."""
    told = [worker.prefix_caching for worker in facts.workers if worker.prefix_caching is not None]
    return bool(told) and not any(told)


def found_outside(facts: Facts) -> float:
    """Most prompt tokens that were found in other caches than the engine's own; infinite where there are some and nobody tells, else 0."""
    tiers = [total(facts.requests, f"cached_tokens_{tier}") for tier in ("host", "remote")]
    counted = rise(facts, OUTSIDE)
    if counted is not None or any(tier is not None for tier in tiers):
        return max(counted or 0.0, sum(tier or 0.0 for tier in tiers))
    has_others = any(CONNECTORS & set(worker.flags) for worker in facts.workers) or facts.samples.get(
        "tier_read_bytes_total"
    )
    return np.inf if has_others else 0.0


@dataclass(frozen=True, slots=True)
class Witness:
    """Who says how many prompt tokens were reused. `kind`: counter | requests | steps."""

    kind: str
    words: str
    tokens: float


def cached_tokens(facts: Facts) -> Check | None:
    """Requests' cached tokens beside the engine's hit counter; the others decide who is right where the two part."""
    counted, cached = facts.samples.get(COUNTERS[0]), facts.requests.get("cached_tokens")
    if counted is None or not np.isfinite(cached).any() or not was_read(facts):
        return None
    told, error = total(facts.requests, "cached_tokens") or 0.0, margin(facts.requests, "cached_tokens")
    own, own_error = total(facts.requests, "self_hit_tokens") or 0.0, margin(facts.requests, "self_hit_tokens")
    if own and abs(told + own - counted) < abs(told - counted):
        return _self_hits(facts, told, own, counted, error + own_error)
    if max(told, counted) < FEWEST_TOKENS:
        return Check("cached_tokens", "ok", f"{facts.name}: requests and counter agree: almost nothing was cached")
    outside = found_outside(facts)
    # requests may count what they found outside, or leave it out as the counter does
    meant = min(max(told, counted), counted + outside)
    off = abs(told - meant) / max(told, meant)
    statement = (
        f"{facts.name}: cached tokens by request {number(told)}, by the engine's hit counter {number(counted)}{_beside(outside)} "
        f"({percent(off)} apart)"
    )
    if meant == 0 or (told == 0 and rate_of(facts.requests, "cached_tokens") == 1.0 and not handed_over(facts)):
        silent = "counter" if meant == 0 else "requests"
        return _between_two(facts, statement, silent, counted if told == 0 else told)
    twice = handed_over(facts)
    if twice and counted > told:
        told_by_both = f"{statement}; of {percent(twice)} of the requests a second worker counts what it found too"
        return Check("cached_tokens", "ok", told_by_both, "telemetry")
    agree = not differ(told, meant, least=0.0, error=error)
    unit = 0 if agree else in_blocks(facts, counted, told, error)
    if unit:
        return Check(
            "cached_tokens",
            "contradiction",
            f"{statement}: the counter counts blocks of {unit} tokens, not tokens",
            "telemetry",
            NUMBERS_OF_REUSE["counter"],
            counted,
            "blocks",
        )
    touched = None if agree else NUMBERS_OF_REUSE["counter"] | NUMBERS_OF_REUSE["requests"]
    return Check("cached_tokens", "ok" if agree else "warning", statement, "telemetry", touched)


def in_blocks(facts: Facts, counted: float, told: float, error: float = 0.0) -> int:
    """Tokens of a block, where the counter is as much smaller than `told` tokens as one that counts blocks would be; else 0."""
    size = facts.block_size() or 0
    return size if size > 1 and counted > 0 and not differ(told, counted * size, least=0.0, error=error) else 0


def hit_counter(facts: Facts) -> Check | None:
    """The hit counter beside the steps and the other counters, where no request says what it found."""
    counted, asked = (facts.samples.get(name) for name in COUNTERS)
    if counted is None or not asked or np.isfinite(facts.requests.get("cached_tokens")).any() or not was_read(facts):
        return None
    others = [witness for witness in witnesses(facts) if witness.kind != "requests"]
    if not others:
        return None
    said = listing([f"{number(witness.tokens)} by {witness.words}" for witness in others])
    outside = found_outside(facts)
    statement = (
        f"{facts.name}: {number(counted)} of {number(asked)} looked-up tokens were hits by the engine's counter{_beside(outside)}; reused "
        f"were {said}"
    )
    most, least = max(w.tokens for w in others), min(w.tokens for w in others)
    unit = in_blocks(facts, counted, most)
    if unit and _is_much(most - outside, asked):
        return Check(
            "hit_counter",
            "contradiction",
            statement + f": the counter counts blocks of {unit} tokens, not tokens",
            "telemetry",
            NUMBERS_OF_REUSE["counter"],
            counted,
            "blocks",
        )
    if counted <= NONE_OF * asked and _is_much(most - outside, asked):
        return Check(
            "hit_counter",
            "contradiction",
            statement + ": the counter is not telling the truth",
            "telemetry",
            NUMBERS_OF_REUSE["counter"],
            counted,
            "tokens",
        )
    if _is_much(counted, asked) and least <= NONE_OF * asked:
        return Check(
            "hit_counter",
            "contradiction",
            statement + ": one of them is not telling the truth",
            "telemetry",
            NUMBERS_OF_REUSE["counter"] | NUMBERS_OF_REUSE["steps"],
            counted,
            "tokens",
        )
    return Check("hit_counter", "ok", statement)


def unsaid_reuse(facts: Facts) -> Check | None:
    """Requests that say nothing was found, beside steps that computed far less than the prompts, where no hit counter says otherwise."""
    told, prompt, by_steps = (
        total(facts.requests, "cached_tokens"),
        total(facts.requests, "prompt_tokens"),
        _by_steps(facts),
    )
    if told is None or not prompt or by_steps is None or handed_over(facts):
        return None
    counted, asked = (facts.samples.get(name) for name in COUNTERS)
    is_silent = counted is not None and counted <= NONE_OF * (asked or 0.0) and was_read(facts)
    if (counted is not None and not is_silent) or rate_of(facts.requests, "cached_tokens") < 1.0:
        return None  # the two are held against each other, and the steps beside them
    if told > NONE_OF * prompt or not _is_much(by_steps - told, prompt):
        return None
    who = "requests and hit counter say" if is_silent else "requests say"
    return Check(
        "unsaid_reuse",
        "contradiction",
        f"{facts.name}: {who} that {number(told)} of {number(prompt)} prompt tokens were found cached, and the steps computed "
        f"{number(by_steps)} fewer than there are: what is said of reuse is not true",
        "telemetry",
        NUMBERS_OF_REUSE["requests"] | (NUMBERS_OF_REUSE["counter"] if is_silent else frozenset()),
        by_steps,
        "tokens",
    )


def caching_flag(facts: Facts) -> Check | None:
    """Workers that say that caching is off, and tokens from their own cache all the same."""
    told = [worker.prefix_caching for worker in facts.workers if worker.prefix_caching is not None]
    by_requests = total(facts.requests, "cached_tokens") or 0.0
    inside = by_requests - found_outside(facts)
    found = max(inside if _is_much(inside, by_requests) else 0.0, facts.samples.get(COUNTERS[0], 0.0))
    if not says_off(facts) or found < FEWEST_TOKENS:
        return None
    say = "worker says" if len(told) == 1 else "workers say"
    return Check(
        "caching_flag",
        "contradiction",
        f"{facts.name}: {number(len(told))} {say} that prefix caching is off, and {number(found)} tokens came from a cache",
        "telemetry",
        # whether the cache was on is then what nobody knows, whoever says it
        frozenset({"worker.prefix_caching", "sample.prefix_queries_tokens_total"})
        | NUMBERS_OF_REUSE["counter"]
        | NUMBERS_OF_REUSE["requests"],
        found,
        "tokens",
    )


def lookups(facts: Facts) -> Check | None:
    """Nobody finds more than was looked up."""
    counted, asked = (facts.samples.get(name) for name in COUNTERS)
    if counted is None or asked is None or counted <= asked * (1 + TOLERANCE.value) + FEWEST_TOKENS:
        return None
    return Check(
        "lookups",
        "contradiction",
        f"{facts.name}: the engine counts {number(counted)} tokens as hits and only {number(asked)} as looked up",
        "telemetry",
        NUMBERS_OF_REUSE["counter"],
        counted,
        "tokens",
    )


def token_sums(facts: Facts) -> Check | None:
    """What was cached and what was computed are parts of the prompt: together no more than it, each no less than nothing."""
    r = facts.requests
    prompt, cached = r.get("prompt_tokens"), r.get("cached_tokens")
    known = np.isfinite(prompt) & np.isfinite(cached)
    if not known.any():
        return None
    again = np.nan_to_num(r.get("recomputed_tokens"))
    once = np.clip(np.nan_to_num(r.get("computed_tokens")) - again, 0.0, None)
    slack = prompt * TOLERANCE.value + (facts.block_size() or 1)
    wrong = known & ((cached > prompt + slack) | ((again == 0) & (cached + once > prompt + slack)))
    share = float(wrong.sum() / known.sum())
    if not wrong.any():
        return None
    return Check(
        "token_sums",
        "warning" if is_rare(share) else "contradiction",
        f"{facts.name}: in {percent(share)} of requests cached and computed tokens are more than the prompt has",
        "telemetry",
        NUMBERS_OF_REUSE["requests"],
        share,
        "ratio",
    )


def client_tokens(facts: Facts) -> Check | None:
    """What callers were told of their own requests beside what the engine says of them: cached and output tokens."""
    r = facts.requests
    for column, word in (("cached_tokens", "cached tokens"), ("output_tokens", "output tokens")):
        mine, theirs = r.get(column), r.get(f"engine_{column}")
        both = np.isfinite(mine) & np.isfinite(theirs) & r.finished
        if not both.any():
            continue
        slack = 1.0 + TOLERANCE.value * np.maximum(mine[both], theirs[both])
        more = float(np.mean(mine[both] > theirs[both] + slack))
        fewer = float(np.mean(mine[both] < theirs[both] - slack))
        if is_rare(max(more, fewer), lost_share(facts)):
            continue
        told = (
            f"{number(float(mine[both].sum()))} by the {r.vantage}, {number(float(theirs[both].sum()))} by the engine"
        )
        # who counts chunks counts fewer tokens than there are; nobody can count more
        counted = column == "output_tokens" and more <= RARE.value
        return Check(
            "client_tokens",
            "warning" if counted else "contradiction",
            f"{facts.name}: {word} of the same requests differ in {percent(max(more, fewer))} of them: {told}"
            + ("; lost on the way, or counted by chunks" if counted else ""),
            "telemetry",
            frozenset({f"request.{column}"}),
            max(more, fewer),
            "ratio",
        )
    return None


def witnesses(facts: Facts) -> list[Witness]:
    """Everybody who can tell how many prompt tokens were reused, but the hit counter itself."""
    found = []
    cached = total(facts.requests, "cached_tokens")
    if cached is not None:
        found.append(Witness("requests", "what requests say", cached))
    prompt, computed = (facts.samples.get(f"prompt_tokens_{word}total") for word in ("", "computed_"))
    if prompt and computed is not None:
        found.append(Witness("steps", "prompt tokens less those computed, both counted", max(prompt - computed, 0.0)))
    by_steps = _by_steps(facts)
    if by_steps is not None:
        found.append(Witness("steps", "prompt tokens less those that the steps computed", by_steps))
    counter = facts.samples.get("prompt_tokens_cached_total")
    if counter is not None:
        found.append(Witness("steps", "another counter of cached tokens", counter))
    if facts.hit_tokens >= FEWEST_TOKENS:  # no engine tells of more hits than there were, and few tell of all
        found.append(Witness("steps", "the hit blocks' own events", facts.hit_tokens))
    return found


def _by_steps(facts: Facts) -> float | None:
    """Prompt tokens that no step computed; None where steps or prompts are not all known.

    What never came to be computed was not reused: prompts of requests that ended without a first token are left out. Steps that are
    missing computed as much as the others.
    """
    prompt = facts.samples.get("prompt_tokens_total")
    if prompt is None and not facts.num_warmup and facts.requests.sample_rate is None:
        prompt = total(facts.requests, "prompt_tokens")
    lost = missing_share(facts)
    if facts.steps is None or prompt is None or lost > MOST_MISSING:
        return None
    r = facts.requests
    unserved = ~r.finished & ~np.isfinite(r.first_token_s)
    prompt -= float(np.nansum(r.get("prompt_tokens")[unserved])) / rate_of(r, "prompt_tokens")
    computed = facts.steps.get("prefill_tokens")
    if not np.isfinite(computed).any() or set(facts.requests.worker_names) - set(facts.steps.worker_names):
        return None
    again = float(np.nansum(facts.steps.get("recomputed_tokens")))
    return max(prompt - (float(np.nansum(computed)) - again) / (1.0 - lost), 0.0)


def _beside(outside: float) -> str:
    """What stands beside the hit counter; empty where there is no other cache."""
    if not outside:
        return ""
    return f", in other caches {number(outside)}" if np.isfinite(outside) else ", in other caches nobody tells how many"


def _is_much(tokens: float, of: float) -> bool:
    return tokens >= max(MUCH_OF * of, FEWEST_TOKENS)


def _between_two(facts: Facts, statement: str, silent: str, told: float) -> Check:
    """One of requests and counter says nothing was found, the other says `told` tokens: whom do the others bear out?"""
    others = [witness for witness in witnesses(facts) if witness.kind == "steps"]
    for_much = [witness for witness in others if witness.tokens >= told / 2]
    for_none = [witness for witness in others if witness.tokens <= NONE_OF * told]
    who = {"counter": "the counter is", "requests": "the requests are"}
    other = "requests" if silent == "counter" else "counter"
    if for_much and not for_none:
        said = (
            f": {who[silent]} not telling the truth, by {for_much[0].words}, {number(for_much[0].tokens)} were reused"
        )
        touched = NUMBERS_OF_REUSE[silent]
    elif for_none and not for_much:
        said = f": {who[other]} not telling the truth, by {for_none[0].words}, {number(for_none[0].tokens)} were reused"
        touched = NUMBERS_OF_REUSE[other]
    else:
        said = ": one of the two is not telling the truth"
        touched = NUMBERS_OF_REUSE["counter"] | NUMBERS_OF_REUSE["requests"]
    return Check("cached_tokens", "contradiction", statement + said, "telemetry", touched, told, "tokens")


def _self_hits(facts: Facts, told: float, own: float, counted: float, error: float) -> Check:
    """Some engines count what a preempted request finds of its own as hits: no reuse across requests, whatever their rate says."""
    asked, prompt = facts.samples.get(COUNTERS[1]), total(facts.requests, "prompt_tokens")
    rate = f" ({percent(counted / asked)} of its lookups)" if asked else ""
    reuse = f" ({percent(told / prompt)} of the prompts)" if prompt else ""
    statement = (
        f"{facts.name}: of the {number(counted)} tokens that the engine counts as hits{rate} {number(own)} are self hits: preempted "
        f"requests found their own blocks again; reuse across requests is {number(told)} tokens{reuse}"
    )
    if differ(told + own, counted, least=0.0, error=error):
        statement += "; the two do not add up to what the engine counts"
    return Check("cached_tokens", "warning", statement, touches=NUMBERS_OF_REUSE["counter"])
