"""From the facts of two windows to a verdict: quality, comparability, significance, ledger, causes, in that order.

Pure: no I/O, no clock; the seed is an argument. The order and the rules are those of design section 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diagnosis import ledger as ledgers
from diagnosis import quality, timeline
from diagnosis.attribution import Attribution, attribute
from diagnosis.cause import MATERIAL, Case, Cause, Claim, Excluded, all_causes, to_json
from diagnosis.comparability import Mix, common_mix
from diagnosis.composition import compose
from diagnosis.facts import F64, Facts
from diagnosis.ledger import Context, Ledger
from diagnosis.quantiles import expected_shortfall, nearest_rank
from diagnosis.rows import NEUTRAL, ROWS, UNOBSERVED
from diagnosis.side_effects import side_effects
from diagnosis.significance import Significance, compare
from diagnosis.verdict import Change, CompositionRow, LedgerRow, NamedCause, Verdict, confidence_word
from diagnosis.windows import Chosen
from diagnosis.wording import interval, listing, metric_name, percent, quantile_name, seconds, signed
from diagnosis.work_model import WorkModel, calibrate
from engine_probe.errors import BadWindow

FALLBACK = "0.95"
MIN_REQUESTS = 20
"""Below this many requests in a window nothing is said about a change."""
CAP_WHEN_FEW = 0.79
"""Most confidence a cause can have where the requested quantile has no interval: medium, whatever the evidence."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Which quantile carries the verdict, and what was found about it and about the one that was asked for."""

    quantile: str
    asked: str
    requested: Significance
    significance: Significance
    notes: list[str]

    @property
    def changed(self) -> bool:
        return self.significance.changed or self.significance.changed_mean

    @property
    def by_mean(self) -> bool:
        """The mean carries the verdict: the quantile has no interval, or did not change by itself."""
        return not self.significance.changed


def judge(base: Facts, suspect: Facts, chosen: Chosen, metric: str, quantile: str, *, seed: int = 0) -> Verdict:
    """The verdict on why `metric` differs between two windows. Raises BadWindow where a window has no such metric."""
    model = calibrate(base, suspect)
    ledger_b, ledger_s = _ledgers(base, suspect, metric, model)
    checks = [*quality.check(base), *quality.check(suspect)]
    mix = _mix(base, suspect, ledger_b, ledger_s, seed)
    judged = _significance(ledger_b, ledger_s, mix, metric, quantile, seed)
    names, parts_b, parts_s = _align(ledger_b, ledger_s)
    attribution = attribute(
        names, parts_b, parts_s, judged.quantile, w_base=_weights(mix, 0), w_suspect=_weights(mix, 1), seed=seed
    )
    at_p99 = attribution
    if judged.quantile != quantile:
        at_p99 = attribute(
            names,
            parts_b,
            parts_s,
            quantile,
            w_base=_weights(mix, 0),
            w_suspect=_weights(mix, 1),
            seed=seed,
            replicates=0,
        )
    case = Case(
        base, suspect, chosen.base, chosen.suspect, ledger_b, ledger_s, attribution, model, metric, judged.quantile
    )
    claims, excluded, unseen = _ask_causes(case)
    rows = _rows(attribution, at_p99, ledger_b, ledger_s, mix, judged.quantile, quantile)
    delta = _delta(ledger_b, ledger_s, judged, mix, quantile)
    causes, more_excluded = _rank(claims, case, judged, checks, at_p99, delta)
    status, sentence = _conclude(case, judged, causes, delta, rows)
    if status == "no_change":
        excluded += [{"cause": c.cause, "because": "the metric did not change"} for c in causes]
        causes = []
    return Verdict(
        status=status,
        verdict=sentence,
        metric=metric,
        quantile=judged.quantile,
        requested_quantile=quantile,
        vantage=base.requests.vantage,
        windows=_windows(base, suspect, chosen),
        n={"baseline": len(ledger_b.values), "suspect": len(ledger_s.values)},
        n_effective={
            "baseline": judged.significance.n_effective[0],
            "suspect": judged.significance.n_effective[1],
        },
        delta=delta,
        composition=_composition(names, parts_b, parts_s, judged.quantile, mix),
        attribution=rows,
        causes=causes,
        side_effects=side_effects(base, suspect, metric, seed),
        unexplained=_unexplained(rows, causes, delta),
        excluded=excluded + more_excluded,
        not_observable=unseen,
        quality=[{"check": c.check, "status": c.status, "statement": c.statement} for c in checks],
        notes=[chosen.why, *mix.statements, *judged.notes, *_warmup_notes(base, suspect)],
        next_experiment=_next_experiment(causes, judged),
        calibration=_calibration(model),
    )


def _ledgers(base: Facts, suspect: Facts, metric: str, model: WorkModel) -> tuple[Ledger, Ledger]:
    most = max(timeline.most_running(base), timeline.most_running(suspect))
    long_tokens = ledgers.long_prefill_tokens(base)
    prefill = base.requests.get("prefill_s")
    usual = float(np.nanmedian(prefill)) if np.isfinite(prefill).any() else 0.0
    written = []
    for facts, other, is_suspect in ((base, suspect, False), (suspect, base, True)):
        context = Context(
            model, most, long_tokens, reuse_ratio(other), quality.caching_is_off(facts)[0], usual, is_suspect
        )
        ledger = ledgers.write(facts, metric, context)
        if len(ledger.values) == 0:
            raise BadWindow(
                f"no request of window {facts.name} has a {metric_name(metric)} (all {len(facts.requests)} ended without one)",
                window=facts.name,
            )
        written.append(ledger)
    return written[0], written[1]


def reuse_ratio(facts: Facts) -> float | None:
    """Token-weighted hit rate of a window: from its requests, else from the engine's counters; None where unknown."""
    cached, prompt = facts.requests.get("cached_tokens"), facts.requests.get("prompt_tokens")
    known = np.isfinite(cached) & np.isfinite(prompt)
    total = float(prompt[known].sum())
    if total > 0:
        return float(cached[known].sum()) / total
    queries, hits = facts.samples.get("prefix_queries_tokens_total"), facts.samples.get("prefix_hits_tokens_total")
    return hits / queries if queries and hits is not None else None


def _mix(base: Facts, suspect: Facts, ledger_b: Ledger, ledger_s: Ledger, seed: int) -> Mix:
    def columns(facts: Facts, ledger: Ledger) -> dict[str, Any]:
        r = facts.requests
        return {
            "prompt_tokens": r.get("prompt_tokens")[ledger.rows],
            "output_tokens": r.get("output_tokens")[ledger.rows],
            "workload": r.workload[ledger.rows],
            "tenant": r.tenant[ledger.rows],
        }

    return common_mix(columns(base, ledger_b), columns(suspect, ledger_s), seed=seed)


def _weights(mix: Mix, side: int) -> F64 | None:
    return (mix.w_base, mix.w_suspect)[side] if mix.shifted else None


def _significance(base: Ledger, suspect: Ledger, mix: Mix, metric: str, quantile: str, seed: int) -> Judged:
    def at(q: str) -> Significance:
        return compare(base.values, suspect.values, q, w_base=_weights(mix, 0), w_suspect=_weights(mix, 1), seed=seed)

    requested = at(quantile)
    notes: list[str] = []
    if requested.enough:
        return Judged(quantile, quantile, requested, requested, notes)
    name, fallback = quantile_name(quantile), quantile_name(FALLBACK)
    need = (
        ""
        if requested.n_needed is None
        else f"; about {requested.n_needed:,} requests a window would show a change of 20 %"
    )
    notes.append(f"too few for an interval of {name} {metric_name(metric)}: {requested.reason}{need}")
    if float(quantile) > float(FALLBACK):
        lower = at(FALLBACK)
        carried = (
            f"{fallback} and the mean carry the verdict"
            if lower.enough
            else f"{fallback} has no interval either; the mean carries the verdict"
        )
        notes.append(f"{carried}; {name} is shown without an interval")
        return Judged(FALLBACK, quantile, requested, lower, notes)
    notes.append("the mean carries the verdict")
    return Judged(quantile, quantile, requested, requested, notes)


def _align(base: Ledger, suspect: Ledger) -> tuple[list[str], F64, F64]:
    names = [name for name in ROWS if name in base.names or name in suspect.names]
    stack = [np.stack([ledger.column(name) for name in names], axis=1) for ledger in (base, suspect)]
    return names, stack[0], stack[1]


def _ask_causes(case: Case) -> tuple[list[tuple[Cause, Claim]], list[dict[str, str]], list[dict[str, Any]]]:
    claims: list[tuple[Cause, Claim]] = []
    excluded: list[dict[str, str]] = []
    unseen: list[dict[str, Any]] = []
    for cause in all_causes().values():
        missing = cause.missing(case.suspect.visible)
        if missing:
            unseen.append(
                {
                    "cause": cause.name,
                    "missing": missing,
                    "because": f"not observable here: {listing(missing)} was not seen",
                }
            )
            continue
        answer = cause.judge(case)
        if isinstance(answer, Claim):
            claims.append((cause, answer))
        elif isinstance(answer, Excluded):
            excluded.append({"cause": cause.name, "because": answer.because})
        else:
            unseen.append(
                {"cause": cause.name, "missing": [], "because": "not observable here: too little was recorded to judge"}
            )
    return claims, excluded, unseen


def _rank(
    claims: Sequence[tuple[Cause, Claim]],
    case: Case,
    judged: Judged,
    checks: Sequence[quality.Check],
    at_p99: Attribution,
    delta: Change,
) -> tuple[list[NamedCause], list[dict[str, str]]]:
    """Claims that own a material part of the change in its direction, largest first; the others become exclusions."""
    change = judged_change(case, judged)
    p99 = {row.name: row for row in at_p99.rows}
    rows = {row.name: row for row in case.attribution.rows}
    ranked: list[tuple[float, Cause, Claim]] = []
    excluded: list[dict[str, str]] = []
    owner = _owners([cause for cause, _ in claims], rows)
    for cause, claim in claims:
        mine = [name for name in cause.rows if owner.get(name) == cause.name]
        owned = sum(rows[name].quantile_s for name in mine)
        owned_mean = sum(rows[name].mean_s for name in mine)
        share = owned / change[0] if change[0] else 0.0
        share_mean = owned_mean / change[1] if change[1] else 0.0
        best = share_mean if judged.by_mean else share
        if best < MATERIAL:
            size = signed(owned_mean if judged.by_mean else owned)
            because = f"it owns {size} of the change ({percent(best)}), less than {percent(MATERIAL)}"
            others = sorted({owner[name] for name in cause.rows if name in owner} - {cause.name})
            if others:
                because = f"its seconds follow from {listing(others)}; " + because
            excluded.append({"cause": cause.name, "because": because})
            continue
        ranked.append((best, cause, claim))
    ranked.sort(key=lambda item: (-item[0], item[1].name))
    support = _support(case.attribution, [cause for _, cause, _ in ranked], owner, judged)
    factor = quality.penalty(checks)
    named = []
    for position, (_, cause, claim) in enumerate(ranked):
        confidence = min(1.0, support[position]) * claim.strength * factor
        if not judged.requested.enough:
            confidence = min(confidence, CAP_WHEN_FEW)
        mine = [name for name in cause.rows if owner.get(name) == cause.name]
        tail = sum(p99[name].quantile_s for name in mine if name in p99)
        named.append(
            NamedCause(
                cause=cause.name,
                rows=mine,
                summary=cause.summary(),
                subject={"kind": claim.subject[0], "id": claim.subject[1]},
                interval=_interval_ns(claim, case.suspect),
                share_p99=tail / delta.p99_s if delta.p99_s else 0.0,
                mean_s=sum(rows[name].mean_s for name in mine),
                p99_s=tail,
                confidence=round(confidence, 4),
                confidence_word=confidence_word(confidence),
                evidence=[to_json(e) for e in claim.evidence],
                refuted_by=cause.paragraph("Refuted by"),
                remedy=cause.remedies(),
            )
        )
    return named, excluded


def _owners(causes: Sequence[Cause], rows: Mapping[str, Any]) -> dict[str, str]:
    """Which claiming cause owns each row: a second is blamed once. The cause that explains more of the rows comes first."""
    owner: dict[str, str] = {}
    for cause in sorted(causes, key=lambda c: (-len(c.rows), c.name)):
        for name in cause.rows:
            if name in rows:
                owner.setdefault(name, cause.name)
    return owner


def _support(
    attribution: Attribution, ranked: Sequence[Cause], owner: Mapping[str, str], judged: Judged
) -> list[float]:
    """Bootstrap support of each ranked cause: how often the first one ranks first, and the others are material."""
    draws = attribution.draws_mean if judged.by_mean else attribution.draws
    if not ranked or len(draws) == 0:
        return [0.0] * len(ranked)
    names = [row.name for row in attribution.rows]
    sign = np.sign(attribution.delta_mean_s if judged.by_mean else attribution.delta_quantile_s)
    owned = np.stack(
        [draws[:, [owner.get(name) == cause.name for name in names]].sum(axis=1) * sign for cause in ranked], axis=1
    )
    total = draws.sum(axis=1) * sign
    material = (owned >= MATERIAL * total[:, None]) & (owned > 0)
    first = (owned.argmax(axis=1) == 0) & material[:, 0]
    return [float(first.mean()), *(float(m) for m in material[:, 1:].mean(axis=0))]


def judged_change(case: Case, judged: Judged) -> tuple[float, float]:
    """(change of the judged quantile, change of the mean) at the common mix."""
    return case.attribution.delta_quantile_s, case.attribution.delta_mean_s


def _interval_ns(claim: Claim, facts: Facts) -> dict[str, int] | None:
    if claim.interval_s is None:
        return None
    origin = facts.requests.origin_ns
    start, end = claim.interval_s
    return {"start_ns": origin + int(start * 1e9), "end_ns": origin + int(end * 1e9)}


def _rows(
    attribution: Attribution, at_p99: Attribution, base: Ledger, suspect: Ledger, mix: Mix, judged_q: str, p99_q: str
) -> list[LedgerRow]:
    """Rows of attribution (b): they sum to the raw change of the metric, in every column, within 1e-9."""
    p99 = {row.name: row for row in [*at_p99.rows, at_p99.dependence]}
    rows = []
    for row in [*attribution.rows, attribution.dependence]:
        other = p99.get(row.name)
        rows.append(
            LedgerRow(
                row.name,
                _row_text(row.name, attribution),
                row.mean_s,
                other.quantile_s if other else 0.0,
                other.es_s if other else 0.0,
                row.quantile_s,
                row.interval_95,
            )
        )
    listed = {row.name for row in attribution.rows} | {attribution.dependence.name}
    rows += [
        LedgerRow(r.name, _row_text(r.name, at_p99), r.mean_s * 0.0, r.quantile_s, r.es_s, 0.0)
        for n, r in p99.items()
        if n not in listed
    ]
    if mix.shifted:
        name = "length_shift" if set(mix.moved) & {"prompt_tokens", "output_tokens"} else "mix_shift"
        rows.append(
            LedgerRow(
                name,
                ROWS[name],
                float(suspect.values.mean() - base.values.mean()) - attribution.delta_mean_s,
                nearest_rank(suspect.values, p99_q) - nearest_rank(base.values, p99_q) - at_p99.delta_quantile_s,
                expected_shortfall(suspect.values, p99_q) - expected_shortfall(base.values, p99_q) - at_p99.delta_es_s,
                nearest_rank(suspect.values, judged_q)
                - nearest_rank(base.values, judged_q)
                - attribution.delta_quantile_s,
            )
        )
    rows.sort(key=lambda r: (r.cause in ("dependence", "other"), -abs(r.judged_s), r.cause))
    return rows


def _row_text(name: str, attribution: Attribution) -> str:
    if name == "dependence":
        return "how the parts coincide in the same requests, beyond the parts themselves"
    if name == "other":
        return "small parts together: " + ", ".join(attribution.merged)
    return ROWS.get(name, name)


def _delta(base: Ledger, suspect: Ledger, judged: Judged, mix: Mix, p99_q: str) -> Change:
    def q(ledger: Ledger, quantile: str) -> float:
        return nearest_rank(ledger.values, quantile)

    return Change(
        mean_s=float(suspect.values.mean() - base.values.mean()),
        p99_s=q(suspect, p99_q) - q(base, p99_q),
        judged_s=q(suspect, judged.quantile) - q(base, judged.quantile),
        mean_interval_95=judged.significance.mean_interval_95,
        p99_interval_95=judged.requested.interval_95,
        interval_95=judged.significance.interval_95,
        base_p99_s=q(base, p99_q),
        suspect_p99_s=q(suspect, p99_q),
        base_mean_s=float(base.values.mean()),
        suspect_mean_s=float(suspect.values.mean()),
        base_judged_s=q(base, judged.quantile),
        suspect_judged_s=q(suspect, judged.quantile),
    )


def _conclude(
    case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change, rows: Sequence[LedgerRow]
) -> tuple[str, str]:
    metric, name = metric_name(case.metric), quantile_name(judged.quantile)
    n_b, n_s = judged.significance.n
    if min(n_b, n_s) < MIN_REQUESTS:
        return (
            "not_distinguishable",
            f"Too few requests to say anything: {n_b} in the baseline, {n_s} in the suspect window; at least {MIN_REQUESTS} each are needed, "
            f"and {judged.requested.n_needed or 368:,} for {quantile_name(case.quantile)}.",
        )
    asked = quantile_name(judged.asked)
    asked_change = f"{seconds(delta.base_p99_s)} -> {seconds(delta.suspect_p99_s)}"
    means = f"mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
    if not judged.changed:
        carrier = f"{name} {seconds(delta.base_judged_s)} -> {seconds(delta.suspect_judged_s)} ({interval(delta.interval_95)})"
        if judged.significance.enough and judged.quantile == judged.asked:
            return (
                "no_change",
                f"{asked} {metric} did not change beyond noise: {asked_change} (difference {interval(delta.interval_95)}), {means}.",
            )
        carrier = (
            f"{carrier}, {means}"
            if judged.significance.enough
            else f"{means} (difference {interval(delta.mean_interval_95)})"
        )
        return (
            "no_change",
            f"{metric} did not change beyond noise: {carrier}. {asked} went {asked_change}, but too few independent requests carry it.",
        )
    worse = delta.mean_s > 0 if judged.by_mean else delta.judged_s > 0
    direction = "rose" if worse else "fell"
    if judged.by_mean and judged.requested.enough:
        opening = (
            f"{asked} {metric} did not change beyond noise ({asked_change}), but its mean {direction} ({means[5:]})"
        )
    elif judged.by_mean:
        moved = "rose" if delta.p99_s > 0 else "fell"
        opening = (
            f"{asked} {metric} {moved} from {seconds(delta.base_p99_s)} to {seconds(delta.suspect_p99_s)}; too few independent requests for its "
            f"interval, so the mean carries the verdict ({means[5:]}, {interval(delta.mean_interval_95)})"
        )
    elif judged.quantile != judged.asked:
        opening = (
            f"{name} {metric} {direction} from {seconds(delta.base_judged_s)} to {seconds(delta.suspect_judged_s)} ({means}; {asked} {asked_change}, "
            "too few independent requests for its interval)"
        )
    else:
        opening = (
            f"{asked} {metric} {direction} from {seconds(delta.base_p99_s)} to {seconds(delta.suspect_p99_s)} ({means})"
        )
    if causes:
        parts = [f"{c.cause} owns {percent(_share(c, rows, delta, judged))}" for c in causes[:3]]
        of = "the change of the mean" if judged.by_mean else "the change"
        return "explained", f"{opening}: {listing(parts)} of {of}."
    hidden = sum(r.judged_s for r in rows if r.cause in UNOBSERVED)
    if delta.judged_s and hidden / delta.judged_s > 0.5:
        return (
            "not_observable",
            f"{opening}, and {percent(hidden / delta.judged_s)} of the change lies where this setup cannot look: "
            + listing([ROWS[r.cause] for r in rows if r.cause in UNOBSERVED and r.judged_s > 0])
            + ".",
        )
    biggest = next((r for r in rows if r.cause not in ("dependence", "other")), None)
    largest = "" if biggest is None else f"; the largest part is {biggest.text} ({signed(biggest.judged_s)})"
    return "not_distinguishable", f"{opening}, but no cause has evidence for a material part of it{largest}."


def _share(cause: NamedCause, rows: Sequence[LedgerRow], delta: Change, judged: Judged) -> float:
    owned = cause.rows
    if not judged.by_mean:
        return sum(r.judged_s for r in rows if r.cause in owned) / delta.judged_s if delta.judged_s else 0.0
    return sum(r.mean_s for r in rows if r.cause in owned) / delta.mean_s if delta.mean_s else 0.0


def _unexplained(rows: Sequence[LedgerRow], causes: Sequence[NamedCause], delta: Change) -> dict[str, float]:
    """Seconds of the change that no named cause owns, of the mean, of P99 and of the judged quantile, and their share."""
    owned = {name for c in causes for name in c.rows} | {"length_shift", "mix_shift"}
    left = [r for r in rows if r.cause not in owned]
    out = {
        "mean_s": sum(r.mean_s for r in left),
        "p99_s": sum(r.p99_s for r in left),
        "judged_s": sum(r.judged_s for r in left),
    }
    out["share_p99"] = out["p99_s"] / delta.p99_s if delta.p99_s else 0.0
    return out


def _composition(names: Sequence[str], base: F64, suspect: F64, q: str, mix: Mix) -> list[CompositionRow]:
    parts_b, smooth_b = compose(base, q, _weights(mix, 0))
    parts_s, smooth_s = compose(suspect, q, _weights(mix, 1))
    rows = [
        CompositionRow(n, ROWS.get(n, n), float(b), float(s)) for n, b, s in zip(names, parts_b, parts_s, strict=True)
    ]
    rows.sort(key=lambda r: -max(abs(r.baseline_s), abs(r.suspect_s)))
    return [*rows, CompositionRow("smoothing", "exact order statistic less the smoothed parts", smooth_b, smooth_s)]


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


def _warmup_notes(base: Facts, suspect: Facts) -> list[str]:
    total = base.num_warmup + suspect.num_warmup
    if not total:
        return []
    return [
        f"warm-up is left out: {base.num_warmup} requests of the baseline, {suspect.num_warmup} of the suspect window"
    ]


def _next_experiment(causes: Sequence[NamedCause], judged: Judged) -> dict[str, Any] | None:
    """What would separate the first two causes, or confirm the only one."""
    if not causes:
        return None
    first = all_causes()[causes[0].cause]
    second = causes[1].cause if len(causes) > 1 else None
    return {
        "separates": [first.name, second] if second else [first.name],
        "statement": first.paragraph("Experiment"),
        "requests_per_window": judged.requested.n_needed,
    }


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
