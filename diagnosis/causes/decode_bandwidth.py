"""Fuller batches made every decode step longer."""

from __future__ import annotations

from diagnosis.calibration import threshold
from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.bound_wait import lowered
from diagnosis.claims.evidence_sql import event_where
from diagnosis.claims.onset import more_than_ever
from diagnosis.ledger.pace import running_of
from diagnosis.telling.wording import number, seconds

FULLER = threshold(
    "decode_bandwidth.fuller",
    least=0.10,
    unit="relative",
    says="growth of the sequences in a sequence's step",
    why="a batch that is a tenth fuller makes a step longer by less than that",
)


@cause("decode_bandwidth", needs=("request.token_ns|step.decode_tokens|request.decode_s",), rows=("decode_bandwidth",))
def decode_bandwidth(case: Case) -> Claim | Excluded | None:
    """Fuller batches made every decode step longer: each step reads the KV of more sequences.

    Why: decoding is bound by memory bandwidth; step time grows with the sequences (and their context) in the batch. The
    machine is as fast as before at equal batch size.

    Refuted by: steps that are longer at the same number of running sequences (then it is `slow_steps`); the same batch as before.

    Remedy:
    - vLLM: lower --max-num-seqs where TPOT matters more than throughput; --kv-cache-dtype fp8 halves the bytes read
    - fleet: more workers for the same traffic
    - application: shorter contexts and answers; move batch work to other hours

    Experiment: compare TPOT at --max-num-seqs N and N/2 under the same arrivals.
    """
    running_b, running_s = case.model.decoding
    if running_b is None or running_s is None:
        return None
    if not FULLER.is_reached(running_s / max(running_b, 1e-9) - 1.0):
        return Excluded(
            f"batches were not fuller: a sequence's step had {number(running_s)} of them on average ({number(running_b)} in the {case.base_word})"
        )
    per_seq = case.model.decode_s_per_seq
    if not per_seq:
        return Excluded("a step gets 0 ms longer with each more sequence it serves")
    kind, worker = case.worker_subject("decode_bandwidth")
    raised = lowered(case.suspect, case.base, "max_num_seqs", worker if kind == "worker" else None)
    return Claim(
        [
            Evidence(
                f"a sequence's step had {number(running_s)} of them on average ({number(running_b)} in the {case.base_word}); "
                f"each adds {seconds(per_seq)} to a step",
                running_s,
                "sequences",
                f"SELECT sum(num_running * num_running) / sum(num_running) AS running FROM step WHERE {event_where(case, case.suspect)}"
                if case.suspect.steps is not None and running_of(case.suspect.steps) is not None
                else None,
                case.worst_requests("decode_bandwidth"),
                BY_CALIBRATION,
            ),
            *([] if raised is None else [_seats(case, *raised)]),
        ],
        (kind, worker),
        case.when("decode_bandwidth"),
        # no batch can be fuller than there are seats
        began=raised is not None and more_than_ever(case, "decode_bandwidth"),
    )


def _seats(case: Case, before: int, now: int) -> Evidence:
    return Evidence(
        f"a worker has {number(now)} seats ({number(before)} in the {case.base_word}), so batches may be fuller",
        float(now),
        "seats",
        computed_by="the workers' own settings",
    )
