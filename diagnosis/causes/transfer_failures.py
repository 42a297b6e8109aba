"""Hand-overs broke."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.handover import cost, quiet, spent, transfer_sql
from diagnosis.facts import HandoverFacts
from diagnosis.telling.wording import number, percent, seconds

ROW = "transfer_failures"


@cause(ROW, needs=("transfer.outcome",), rows=(ROW,))
def transfer_failures(case: Case) -> Claim | Excluded | None:
    """Hand-overs broke: the time until that was noticed is lost, and the decode worker computed the prompt again.

    Why: a peer that restarted, a connection that timed out, memory that was no longer registered, a prefill worker that gave its blocks
    back before they were fetched. A long timeout hides it: every broken hand-over costs the whole of it.

    Refuted by: as many transfers that ended well as in the baseline; a decode worker that computed no prompt.

    Remedy:
    - vLLM: look for the connector's errors in both logs; VLLM_NIXL_ABORT_REQUEST_TIMEOUT must be longer than the slowest fetch
    - vLLM: kv_load_failure_policy in --kv-transfer-config says whether a broken load is computed again or fails
    - SGLang: SGLANG_DISAGGREGATION_WAITING_TIMEOUT and SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT bound what a broken one costs
    - fleet: take the peer that breaks out; compare firmware, MTU and GID of its NIC with the others'
    - router: a timeout of a few usual hand-overs, not of seconds, and another decode worker at the second try

    Experiment: hand over a hundred prompts between each pair of workers; the pair that breaks names the host.
    """
    found = spent(case, ROW)
    now, base = case.suspect.handover, case.base.handover
    if found is None or now is None:
        return None
    share, before = _share(now), 0.0 if base is None else _share(base)
    if share <= before or not found.grew:
        return Excluded(
            f"{percent(share)} of {number(len(now.broke))} transfers broke ({percent(before)} in the {case.base_word}); "
            + quiet(case, found, "broken ones")
        )
    among = "coalesce(outcome, 'ok') IN ('fell_back', 'failed', 'refused')"
    evidence = [
        Evidence(
            f"{percent(share)} of {number(len(now.broke))} transfers broke ({percent(before)} in the {case.base_word})",
            share,
            "ratio",
            transfer_sql(case, case.suspect, f"count(*) FILTER ({among}) / count(*) AS share"),
            [str(rid) for rid in case.suspect.requests.request_id[now.of[now.broke]][:5]],
        ),
        Evidence(
            f"one that broke cost {seconds(float(now.parts[ROW].sum()) / int(now.broke.sum()))} until that was noticed and the prompt computed "
            f"again, {seconds(float(now.wire_s[now.broke].mean()))} of it on the wire",
            float(now.wire_s[now.broke].mean()),
            "s",
            transfer_sql(case, case.suspect, "avg(coalesce(wire_s, 0)) AS wire_s", among),
        ),
        cost(case, ROW, "broken transfers and computing again what they should have brought", found),
    ]
    return Claim(evidence, case.worker_subject(ROW), case.when(ROW))


def _share(moves: HandoverFacts) -> float:
    return float(moves.broke.mean()) if len(moves.broke) else 0.0
