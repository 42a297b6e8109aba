"""The seconds from the first token to the last: stalls, hand-overs, what its steps did for others, fuller batches, the rest.

Where neither gaps nor the time in decode were observed nothing is split but stalls: the rest stands in `decode_unobserved`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diagnosis.facts import Facts
from diagnosis.ledger.handover import carve_handover, prefilled_beside
from diagnosis.ledger.others import mean_others, shared_with
from diagnosis.ledger.sheet import Sheet, known_or_0
from diagnosis.ledger.spent import Context, token_s
from diagnosis.ledger.stalls import stalls
from diagnosis.ledger.step_work import AGAIN
from diagnosis.ledger.timeline import Spent, Timeline
from diagnosis.ledger.values import metric_values


def write_decode(sheet: Sheet, facts: Facts, spent: Spent, lines: Mapping[int, Timeline], context: Context) -> None:
    """Give away the seconds between first and last token, as far as both are known.

    lines: the timelines of those workers that have one, by the worker's position.
    """
    r = facts.requests
    decode = known_or_0(metric_values(facts, "decode"))
    preempted = facts.samples.get("preemptions_total", 0.0) > 0 or bool(np.nansum(r.get("num_preemptions")) > 0)
    stalled = stalls(facts, lines, preempted=preempted)
    left = decode - np.minimum(stalled, decode)
    sheet.add("preemption_recompute" if preempted else "decode_stall", decode - left)
    if r.gaps is None and not r.has("decode_s"):
        sheet.add("decode_unobserved", left)
        return
    slow = context.model.slow_share(suspect=context.suspect)
    left = carve_handover(sheet, facts, left, before_first=False)
    if facts.routing is not None:
        left = sheet.carve(left, "hotspot_straggler", facts.routing.slow * left)
    sheet.add("slow_steps", left * slow)
    left = left * (1.0 - slow)
    engine_last = np.where(np.isfinite(r.engine_last_s), r.engine_last_s, np.nan)
    shared = shared_with(facts, spent, lines, r.engine_first_s, engine_last, own=False)
    # what steps did during its own stalls (its own computing again among it) is in the stalls already
    going = np.divide(decode - np.minimum(stalled, decode), decode, out=np.ones(len(r)), where=decode > 0)
    for name, seconds in shared.items():
        mine = known_or_0(r.get("recomputed_tokens")) * (token_s(context) or 0.0) if name == AGAIN else 0.0
        left = sheet.carve(left, name, np.clip(seconds - mine, 0.0, None) * going * (1.0 - slow))
    for name, seconds in prefilled_beside(facts, token_s(context)).items():
        left = sheet.carve(left, name, seconds)
    left = sheet.carve(left, "speculation_collapse", left * context.pair.refused_share)
    tokens = r.get("output_tokens")
    per_seq = context.model.decode_s_per_seq
    if per_seq is not None:
        others = mean_others(facts)
        left = sheet.carve(left, "decode_bandwidth", known_or_0(tokens - 1) * per_seq * np.maximum(others, 0.0))
    sheet.add("own_decode", left)
