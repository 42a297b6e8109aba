"""Queueing that nobody claims follows from whoever put more work, or more waiting, into the same steps.

Idea: near saturation a little more work for each step makes everybody wait longer behind ordinary work. If no more requests came
and they were not longer, that growth is no cause of its own: it follows from what made the steps longer. Paired runs of the lab show
it: of a probe that owns 26 % of a P99 by its own seconds, 100 % goes when it is taken out.

Whoever limits what a step takes in (seats, a token budget), fills it, or sends requests elsewhere reshapes the steps for all: some wait
longer and others less, and what it did is the sum of both. So is what a fuller batch costs: the line between a sequence's own decoding and
what others add to it is a fit, and what one row has too much the other has too little: but of no more than half of both, for beyond that own decoding
got longer, which makes batches fuller. And who gives up and asks again waits less in the attempt
that is served than one who would have stayed: that is part of what asking again did.

Own work that grew among requests of equal length, and that nobody claims, fills steps too: some of it is the steps that they share with longer
ones, but where it is nearly all, what waits follows from what nobody names, and not from lengths. Where prompts that nobody disturbs take
longer at every worker, no router made them so: then own work follows from none of its faults, and what waits only where the fault has
more seconds. Where more requests came, waiting and own work follow from those, and from whoever asks again, but from nobody else.

Rows go whole, to one cause (a second is blamed once): to the one that has most seconds of its own among those that fill steps,
where it has LEADS of them or more; where nobody has, they stay unexplained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diagnosis.attribution.shapley import Row
from diagnosis.attribution.traffic import ROWS as TRAFFIC
from diagnosis.ledger.rows import HOTSPOTS, OVERHEADS, PASSED_ON

FILLS_STEPS = frozenset(
    (
        *PASSED_ON,
        *OVERHEADS,
        *HOTSPOTS,
        *TRAFFIC,
        "slow_steps",
        "admission_blocked_on_blocks",
        "reuse_lost",
        "client_retries",
        "speculation_collapse",
    )
)
"""Rows whose seconds keep others waiting: work in the steps, slower steps, more work a request, blocks that are held,
requests that are asked again, answers that hold their place for longer."""
QUEUES = ("queue_load", "queue_seats", "queue_budget", "shared_prefill", "decode_bandwidth")
"""Rows that grow with what the steps have to do. A row that a claim owns (a load step's, a smaller budget's) is not among what follows."""
RESHAPES = frozenset(("queue_budget", "queue_seats"))
"""Rows of those who decide how much a step takes in; what got shorter by that is theirs too."""
OF_ROUTER = frozenset((*HOTSPOTS, "hotspot_stale_index", "hotspot_unreachable_threshold"))
"""Rows of a router's faults, each of its own name."""
SENDS_ELSEWHERE = frozenset(("decode_queue", "decode_bandwidth", *OF_ROUTER))
"""Rows of those who decide where requests go, or how full batches are; what got shorter is theirs where hardly anybody else is named."""
GIVES_UP = frozenset(("client_retries",))
"""Rows of those who end a wait that is long: the attempt that is served waits no longer than they bear."""
ASKS_MORE = frozenset((*QUEUES, *GIVES_UP, *TRAFFIC))
"""Rows of those who have more requests come, or more asked of each: what waits follows from them where more came."""
UNSEEN = "ttft_unobserved"
"""Queues and own work that nobody sees: what got shorter of them is theirs, where hardly anybody else is named; what grew may be anybody's."""
OWN_WORK = ("own_prefill", "own_decode")
"""They follow too where requests are of the same kind: the same prompt and answer take longer in steps that they share with more."""
LEADS = 0.5
"""Share of what fills steps that the one must have who is told to have passed it on: the larger half."""
ALONE = 0.8
"""Share of it from which on hardly anybody else is named: a fifth may be another's, who may be why something got shorter."""


def follows(
    owned_s: Mapping[str, float],
    rows_of: Mapping[str, Sequence[str]],
    taken: Collection[str],
    rows: Sequence[Row],
    *,
    by_mean: bool,
    same_kind: bool,
    more_came: bool = False,
    slower_everywhere: bool = False,
) -> tuple[str, list[str]] | None:
    """(the cause, the rows that follow from it); None where nobody leads or nothing follows.

    owned_s    seconds of each named cause, of the mean or of the quantile
    taken      rows that some claim owns
    same_kind  both windows are known to have the same mix of requests, their lengths among it
    more_came  more requests came a worker and second; slower_everywhere: undisturbed prompts take longer at every worker
    """
    reach = FILLS_STEPS | RESHAPES | SENDS_ELSEWHERE
    fills = {name: abs(s) for name, s in owned_s.items() if reach.intersection(rows_of[name])}
    if not fills:
        return None
    leader = max(fills, key=lambda name: (fills[name], name))
    sign = 1.0 if owned_s[leader] >= 0 else -1.0
    by_router = slower_everywhere and bool(OF_ROUTER.intersection(rows_of[leader]))
    by_batch = not (FILLS_STEPS | RESHAPES | OF_ROUTER).intersection(rows_of[leader])
    nobodys = 0.0
    if by_router or by_batch or set(TRAFFIC) & set(rows_of[leader]):
        own = [
            row.mean_s if by_mean else row.quantile_s for row in rows if row.name in OWN_WORK and row.name not in taken
        ]
        nobodys = max(sign * sum(own), 0.0)
    least = LEADS if by_router or by_batch else 1.0 - ALONE
    if fills[leader] < LEADS * sum(fills.values()) or fills[leader] < least * (fills[leader] + nobodys):
        return None
    wanted = {*QUEUES, *OWN_WORK} if same_kind and not by_router else set(QUEUES)
    if more_came and not ASKS_MORE.intersection(rows_of[leader]):
        wanted = set()
    alone = fills[leader] >= ALONE * sum(fills.values())
    if reshapes := bool((RESHAPES | SENDS_ELSEWHERE if alone else RESHAPES).intersection(rows_of[leader])):
        wanted.add("slow_steps")
    shortened: set[str] = set()
    if alone and GIVES_UP.intersection(rows_of[leader]):
        shortened = {*QUEUES, UNSEEN} if same_kind else set(QUEUES)
    found = []
    for row in rows:
        toward = sign * (row.mean_s if by_mean else row.quantile_s)
        if row.name in taken:
            continue
        if (row.name in wanted and (reshapes or toward > 0)) or (row.name in shortened and toward < 0):
            found.append(row.name)
    return (leader, found) if found else None
