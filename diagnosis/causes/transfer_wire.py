"""KV took long on its way to the decode worker."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.handover import BY_TRANSFERS, bytes_each, bytes_per_s, cost, quiet, spent, transfer_sql
from diagnosis.telling.wording import number, seconds

ROW = "transfer_wire"


@cause(ROW, needs=("transfer.wire_s",), rows=(ROW,))
def transfer_wire(case: Case) -> Claim | Excluded | None:
    """KV was long on the wire between prefill and decode workers, or waited for the link behind other KV.

    Why: a hand-over moves the prompt's whole KV. Over a slower link (TCP where RDMA was meant, a shared NIC, another rack) it takes
    longer, and hand-overs into one worker queue for it. Larger prompts, or hits that the decode worker no longer has, move more.

    Refuted by: as many bytes a second as in the baseline; seconds in which nothing moved (then it is orchestration, or room).

    Remedy:
    - vLLM: check that --kv-transfer-config's connector really uses RDMA (NIXL with UCX: UCX_TLS, UCX_NET_DEVICES), not TCP
    - SGLang: --disaggregation-transfer-backend and --disaggregation-ib-device name the fast device of each host
    - vLLM: smaller KV moves faster: --kv-cache-dtype fp8 on both sides
    - fleet: prefill and decode workers in one rack or node; more decode workers share the load of links
    - application: shorter prompts; prefixes that the decode worker holds are not moved again

    Experiment: move one hand-over's size between the two hosts with the transport's own benchmark; it must reach the link's rate.
    """
    found = spent(case, ROW)
    if found is None:
        return None
    if not found.grew:
        return Excluded(quiet(case, found, "bytes on the wire, with the wait for the link,"))
    now, base = case.suspect.handover, case.base.handover
    assert now is not None, "seconds of a hand-over come from hand-overs"
    evidence = [
        cost(case, ROW, "the wire, with the wait for the link,", found),
        Evidence(
            f"of that {seconds(float(now.link_s.sum()) / max(found.num, 1))} a hand-over was the wait behind other KV",
            float(now.link_s.sum()) / max(found.num, 1),
            "s",
            computed_by=BY_TRANSFERS,
        ),
    ]
    rate, before = bytes_per_s(now), bytes_per_s(base)
    if rate is not None:
        told = "" if before is None else f" ({number(before / 1e9)} GB/s in the {case.base_word})"
        evidence.insert(
            1,
            Evidence(
                f"while KV moved it moved at {number(rate / 1e9)} GB/s{told}",
                rate,
                "bytes/s",
                transfer_sql(
                    case,
                    case.suspect,
                    "sum(num_bytes) / sum(wire_s) AS bytes_per_s",
                    "num_bytes IS NOT NULL AND wire_s > 0 AND coalesce(outcome, 'ok') NOT IN ('fell_back', 'failed', 'refused')",
                ),
            ),
        )
    size, size_before = bytes_each(now), bytes_each(base)
    if size is not None and size_before is not None:
        evidence.append(
            Evidence(
                f"a hand-over moved {number(size / 1e6)} MB on average ({number(size_before / 1e6)} MB in the {case.base_word})",
                size,
                "bytes",
                transfer_sql(case, case.suspect, "avg(num_bytes) AS bytes"),
            )
        )
    return Claim(evidence, case.worker_subject(ROW), case.when(ROW))
