"""From the facts of two windows to a verdict: quality, comparability, significance, ledger, causes, in that order.

Pure: no I/O, no clock; the seed is an argument. The order and the rules are those of design section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from diagnosis import quality, sampled
from diagnosis.attribution.ranking import ask_causes, rank
from diagnosis.attribution.shapley import attribute
from diagnosis.attribution.shared_load import growth_by_mix, share_of_mix, with_traffic_apart
from diagnosis.attribution.tables import attribution_rows, change, composition, unexplained
from diagnosis.attribution.traffic import traffic
from diagnosis.cause import Case
from diagnosis.contradictions import answers, of_engine
from diagnosis.contradictions import sentence as contradiction
from diagnosis.facts import F64, Facts
from diagnosis.ledger import ledger as ledgers
from diagnosis.ledger import pair, timeline
from diagnosis.ledger.ledger import Ledger
from diagnosis.ledger.reuse_by_times import reuse_by_times
from diagnosis.ledger.rows import NEUTRAL, ROWS
from diagnosis.ledger.spent import Context, long_prefill_tokens
from diagnosis.ledger.step_reasons import with_step_extras
from diagnosis.ledger.tiers import found_here_too
from diagnosis.ledger.usual_reuse import found_by_counters
from diagnosis.ledger.values import Counted, count, metric_values
from diagnosis.ledger.work_model import WorkModel, calibrate
from diagnosis.loading.sight import equal_sight
from diagnosis.models import other_models, tentative
from diagnosis.next_experiment import next_experiment
from diagnosis.parallel import beside
from diagnosis.statistics.censored import Waits, stand_in, waits
from diagnosis.statistics.comparability import Mix, common_mix
from diagnosis.statistics.judged import Judged, Repeats, carry, under, weights
from diagnosis.telling.conclude import WHY_NOT, conclude
from diagnosis.telling.movement import fell, seems_to_fall, traffic_fell
from diagnosis.telling.remedies import engines_of, of_engines
from diagnosis.telling.side import opening, side_of
from diagnosis.telling.side_effects import side_effects
from diagnosis.telling.verdict import Verdict
from diagnosis.telling.wording import listing, metric_name
from diagnosis.windows import Chosen
from engine_probe.errors import BadWindow


def judge(base: Facts, suspect: Facts, chosen: Chosen, metric: str, quantile: str, *, seed: int = 0) -> Verdict:
    """The verdict on why `metric` differs between two windows. Raises BadWindow where a window has no such metric."""
    checks = [*quality.check(base), *quality.check(suspect), *quality.between(base, suspect)]
    base, suspect, unequal = equal_sight(base, suspect)
    base, suspect = with_step_extras(base, suspect)
    counted = (_counted(base, metric), _counted(suspect, metric))
    with beside() as pool:  # what needs no ledger goes on beside the ledgers
        weighed = pool.submit(_weigh, base, suspect, counted, metric, quantile, seed)
        effects = pool.submit(side_effects, base, suspect, metric, seed)
        is_worse = float(counted[1].values.mean()) >= float(counted[0].values.mean())
        model = calibrate(base, suspect, suspect_is_worse=is_worse)
        ledger_b, ledger_s = _ledgers(base, suspect, metric, model)
        mix, apart, judged = weighed.result()
    names, parts_b, parts_s = _align(ledger_b, ledger_s)
    repeats = under(mix, _repeats(base, suspect, counted))
    attribution = attribute(
        names,
        parts_b,
        parts_s,
        judged.quantile,
        w_base=weights(mix, 0),
        w_suspect=weights(mix, 1),
        seed=seed,
        repeat_base=repeats[0],
        repeat_suspect=repeats[1],
    )
    at_p99 = attribution
    if judged.quantile != quantile:
        at_p99 = attribute(
            names,
            parts_b,
            parts_s,
            quantile,
            w_base=weights(mix, 0),
            w_suspect=weights(mix, 1),
            seed=seed,
            replicates=0,
        )
    of_mix = ((base, suspect), (counted[0].rows, counted[1].rows), mix, model)
    both, growth = share_of_mix(*of_mix), growth_by_mix(*of_mix)
    attribution, at_p99 = with_traffic_apart(attribution, both), with_traffic_apart(at_p99, both)
    case = Case(
        base,
        suspect,
        chosen.base,
        chosen.suspect,
        ledger_b,
        ledger_s,
        attribution,
        model,
        metric,
        judged.quantile,
        mix,
        traffic(mix, attribution, ledger_b, ledger_s, judged, growth),
        checks=checks,
        apart=apart,
    )
    waiting = tuple(waits(facts, metric, metric_values(facts, metric)) for facts in (base, suspect))
    delta = change(ledger_b, ledger_s, judged, (waiting[0], waiting[1]), quantile)
    case = replace(case, traffic_fell=traffic_fell(case, judged))
    if fell(case, judged) or seems_to_fall(case, judged, delta):
        case = case.exchanged()
    claims, excluded, unseen = ask_causes(case)
    rows = attribution_rows(attribution, at_p99, ledger_b, ledger_s, mix, judged.quantile, quantile)
    causes, more_excluded = rank(of_engine(claims), case, judged, checks, rows, delta)
    concluded = conclude(case, judged, causes, delta, rows)
    if not concluded.named:
        excluded += [{"cause": c.cause, "because": WHY_NOT[concluded.status]} for c in causes]
        causes = []
    if other_models(base, suspect) is not None:
        causes = tentative(causes)
    told, untold = answers(claims, causes, case)
    causes, excluded = [*causes, *told], excluded + untold
    engines = engines_of(base, suspect)
    causes = [replace(each, remedy=of_engines(each.remedy, engines)) for each in causes]
    side = side_of(case, judged, effects.result())
    return Verdict(
        status=concluded.status,
        verdict=opening(side, concluded.status, established=_is_established(case, judged))
        + concluded.sentence
        + contradiction(told, checks),
        metric=metric,
        quantile=judged.quantile,
        requested_quantile=quantile,
        carried_by="mean" if judged.by_mean and (judged.changed or not judged.significance.enough) else "quantile",
        vantage=base.requests.vantage,
        windows=_windows(base, suspect, chosen),
        n={"baseline": len(ledger_b.values), "suspect": len(ledger_s.values)},
        n_effective={
            "baseline": judged.significance.n_effective[0],
            "suspect": judged.significance.n_effective[1],
        },
        delta=delta,
        composition=composition(names, parts_b, parts_s, judged.quantile, mix),
        attribution=rows,
        causes=causes,
        side=asdict(side),
        side_effects=effects.result(),
        unexplained=unexplained(rows, causes, delta),
        excluded=excluded + more_excluded,
        not_observable=unseen,
        quality=[{"check": c.check, "status": c.status, "statement": c.statement} for c in checks],
        notes=[
            chosen.why,
            *unequal,
            *mix.statements,
            *judged.notes,
            *_range_notes(base, suspect, waiting, metric, judged, quantile),
            *_warmup_notes(base, suspect),
            *sampled.notes((base, suspect)),
            *_repeat_notes(repeats),
        ],
        next_experiment=next_experiment(causes, case, judged),
        calibration=_calibration(model),
    )


def _is_established(case: Case, judged: Judged) -> bool:
    """Whether the metric changed beyond noise, at the common mix or in the raw numbers."""
    return judged.changed or (case.traffic is not None and case.traffic.changed)


def _counted(facts: Facts, metric: str) -> Counted:
    found = count(facts, metric)
    if len(found.values) == 0:
        raise BadWindow(
            f"no request of window {facts.name} has a known {metric_name(metric)}: {_why_none(facts, metric)}",
            window=facts.name,
        )
    return found


def _weigh(
    base: Facts, suspect: Facts, counted: tuple[Counted, Counted], metric: str, quantile: str, seed: int
) -> tuple[Mix, tuple[str, ...], Judged]:
    """The common mix, what moved where the windows have no kind of request in common (else nothing), and the change at it."""
    mix = _mix(base, suspect, counted, seed)
    apart: tuple[str, ...] = ()
    if mix.shifted and not (mix.w_base.any() and mix.w_suspect.any()):
        apart = mix.moved or tuple(mix.dimension_shift)
        mix = replace(
            mix, w_base=np.ones_like(mix.w_base), w_suspect=np.ones_like(mix.w_suspect), shifted=False, moved=()
        )
    return mix, apart, carry(*counted, mix, metric, quantile, seed, _repeats(base, suspect, counted))


def _repeats(base: Facts, suspect: Facts, counted: tuple[Counted, Counted]) -> Repeats:
    """Which repeat of an experiment's arm each counted request is of: then whole repeats are resampled."""
    base_of, suspect_of = (
        None if facts.requests.repeat is None else facts.requests.repeat[found.rows]
        for facts, found in zip((base, suspect), counted, strict=True)
    )
    return base_of, suspect_of


def _repeat_notes(repeats: Repeats) -> list[str]:
    told = [
        f"{len(np.unique(of))} of the {word}"
        for of, word in zip(repeats, ("baseline", "suspect window"), strict=True)
        if of is not None
    ]
    return [f"whole repeats are resampled, for requests of one share its queues: {listing(told)}"] if told else []


def _ledgers(base: Facts, suspect: Facts, metric: str, model: WorkModel) -> tuple[Ledger, Ledger]:
    most = max(timeline.most_running(base), timeline.most_running(suspect))
    long_tokens = long_prefill_tokens(base)
    prefill = base.requests.get("prefill_s")
    usual = float(np.nanmedian(prefill)) if np.isfinite(prefill).any() else 0.0

    told = pair.compare(base, suspect)

    def write(facts: Facts, other: Facts, *, is_suspect: bool) -> Ledger:
        off = quality.caching_is_off(facts)[0]
        ratio, each = reuse_ratio(other, facts), found_each(other, facts)
        if ratio is None:
            slow = model.slow_factor or 1.0
            ratio = reuse_by_times(facts, other, slow if is_suspect else 1.0 / slow)
        context = Context(model, most, long_tokens, ratio, off, usual, is_suspect, each, told[is_suspect])
        return ledgers.write(facts, metric, context)

    return write(base, suspect, is_suspect=False), write(suspect, base, is_suspect=True)


def _why_none(facts: Facts, metric: str) -> str:
    """What became of a window's requests, none of which has the metric."""
    r = facts.requests
    early = int((metric_values(facts, metric) < 0).sum())
    parts = [
        f"{len(r)} requests",
        f"{int((~r.finished).sum())} of them unfinished",
        f"{int(np.isfinite(r.first_token_s).sum())} with a first token",
        f"{int(np.isfinite(r.last_token_s).sum())} with a last one",
    ]
    if early:
        parts.append(f"{early} with instants in the wrong order")
    if metric != "e2e" and not np.isfinite(r.first_token_s).any() and np.isfinite(r.last_token_s).any():
        parts.append("none of them streamed, as it seems: judge whole answers with --metric e2e")
    if metric == "tpot":
        parts.append(f"{int((r.get('output_tokens') > 1).sum())} known to have two tokens or more")
    return ", ".join(parts)


def reuse_ratio(facts: Facts, other: Facts) -> float | None:
    """Token-weighted hit rate of a window that the other one could have too: from its requests, else from the engine's counters; None
    where unknown."""
    cached, prompt = found_here_too(facts, other), facts.requests.get("prompt_tokens")
    known = np.isfinite(cached) & np.isfinite(prompt)
    total = float(prompt[known].sum())
    if total > 0:
        return float(cached[known].sum()) / total
    queries, hits = facts.samples.get("prefix_queries_tokens_total"), facts.samples.get("prefix_hits_tokens_total")
    return hits / queries if queries and hits is not None else None


def found_each(facts: Facts, other: Facts) -> float | None:
    """Prompt tokens that a request of a window found on average, and could in the other one too: by the requests, else by the engine's
    counter; None where neither tells."""
    cached = found_here_too(facts, other)
    known = cached[np.isfinite(cached)]
    if len(known):
        return float(known.mean())
    counted = found_by_counters(facts)
    return None if counted is None else counted / sampled.num_requests(facts.requests)


def _mix(base: Facts, suspect: Facts, counted: tuple[Counted, Counted], seed: int) -> Mix:
    def columns(facts: Facts, found: Counted) -> dict[str, Any]:
        r = facts.requests
        return {
            "prompt_tokens": stand_in(r.get("prompt_tokens")[found.rows], found.censored),
            "output_tokens": stand_in(r.get("output_tokens")[found.rows], found.censored),
            "workload": r.workload[found.rows],
            "tenant": r.tenant[found.rows],
        }

    return common_mix(columns(base, counted[0]), columns(suspect, counted[1]), seed=seed)


def _align(base: Ledger, suspect: Ledger) -> tuple[list[str], F64, F64]:
    names = [name for name in ROWS if name in base.names or name in suspect.names]
    stack = [np.stack([ledger.column(name) for name in names], axis=1) for ledger in (base, suspect)]
    return names, stack[0], stack[1]


def _windows(base: Facts, suspect: Facts, chosen: Chosen) -> dict[str, Any]:
    def one(facts: Facts, window: Any) -> dict[str, Any]:
        origin = facts.requests.origin_ns
        return {
            "run": window.run_id,
            "start_ns": origin + int(facts.start_s * 1e9),
            "end_ns": origin + int(facts.end_s * 1e9),
            "requests": len(facts.requests),
            "warmup_left_out": facts.num_warmup,
            "workers": [w for w in facts.requests.worker_names if w is not None],
        }

    return {"baseline": one(base, chosen.base), "suspect": one(suspect, chosen.suspect), "why": chosen.why}


def _range_notes(
    base: Facts, suspect: Facts, waiting: Sequence[Waits], metric: str, judged: Judged, asked: str
) -> list[str]:
    """What first tokens that never came leave open, of the quantile asked for and of the one judged."""
    quantiles = dict.fromkeys((asked, judged.quantile))
    said = [
        found.statement(facts.name, metric_name(metric), q)
        for facts, found in zip((base, suspect), waiting, strict=True)
        for q in quantiles
    ]
    return [sentence for sentence in said if sentence is not None]


def _warmup_notes(base: Facts, suspect: Facts) -> list[str]:
    total = base.num_warmup + suspect.num_warmup
    if not total:
        return []
    return [
        f"warm-up is left out: {base.num_warmup} requests of the baseline, {suspect.num_warmup} of the suspect window"
    ]


def _calibration(model: WorkModel) -> dict[str, Any]:
    return {
        "prefill_s_per_token": model.prefill_s_per_token,
        "decode_s_per_sequence": model.decode_s_per_seq,
        "slow_factor": model.slow_raw,
        "slow_factor_noise": model.slow_noise,
        "compared": model.num_compared,
        "source": model.source,
    }


assert set(NEUTRAL) - {"other"} <= set(ROWS)
