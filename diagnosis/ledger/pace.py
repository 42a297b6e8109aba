"""How long a token (of a step that speculates: the step) took, and how many sequences were decoding meanwhile, as the requests' own times tell.

Single gaps between streamed chunks where they were recorded, else each request's mean. Only pure decode steps count: time
in which some prompt of the same worker was being computed is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diagnosis.facts import F64, I64, Bool, RequestFacts, StepFacts, rows_by_code
from diagnosis.sampled import beside_rate

ALIKE = 0.1
"""Two windows put their tokens into chunks alike where the mean chunk differs by no more than this share."""
MIN_QUIET_TOKENS = 4
"""Tokens outside prefills that a request needs for its mean gap to count."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds a token, sequences that decoded meanwhile, and the instant, of each gap or request, [m] each.

    request, middle_s   [m] row of the request, and the middle of the time that was looked at
    """

    step_s: F64
    running: F64
    at_s: F64
    request: I64
    middle_s: F64

    def __len__(self) -> int:
        return len(self.step_s)

    def typical_running(self) -> float | None:
        """Sequences that decoded at once, on average over tokens; None where nothing tells."""
        return float(np.mean(self.running)) if len(self.running) else None


def running_of(steps: StepFacts) -> float | None:
    """Sequences in the batch that a sequence's step had, on average; None where no step tells.

    A full batch counts for each that was in it: over steps alone, long quiet stretches hide what requests of a burst met.
    """
    running = np.nan_to_num(steps.get("num_running"))
    total = running.sum()
    return float((running * running).sum() / total) if total > 0 else None


def alike_chunks(base: RequestFacts, suspect: RequestFacts) -> tuple[RequestFacts, RequestFacts]:
    """Both windows' requests with gaps that can be compared, though several tokens came in one chunk and nobody tells in which.

    A mean over a request is free of how its tokens were put together, where that was done alike in both windows. Elsewhere fewer
    and longer gaps may be another buffer, or drafts that were accepted: they are no step times, and those gaps are left out.
    """
    gaps = (base.gaps, suspect.gaps)
    if gaps[0] is None or gaps[1] is None or not (gaps[0].is_even or gaps[1].is_even):
        return base, suspect
    chunk = [float(np.mean(each.tokens)) if len(each.tokens) else 1.0 for each in gaps if each is not None]
    is_alike = max(chunk) <= (1.0 + ALIKE) * min(chunk)
    made = [
        replace(r, gaps=replace(each, is_even=True) if is_alike else None if each.is_even else each)
        for r, each in ((base, gaps[0]), (suspect, gaps[1]))
    ]
    return made[0], made[1]


def quiet_gaps(requests: RequestFacts) -> Pace:
    """Gaps between chunks in which no request's prompt finished: pure decode steps."""
    gaps = requests.gaps
    if gaps is None or len(gaps.gap_s) == 0:
        return Pace(np.empty(0), np.empty(0), np.empty(0), np.empty(0, dtype=np.int64), np.empty(0))
    tokens = np.where(np.isfinite(gaps.tokens) & (gaps.tokens > 0), gaps.tokens, 1.0)
    per_token = gaps.gap_s / tokens
    running = np.empty(len(per_token))
    quiet = np.zeros(len(per_token), dtype=bool)
    gap_rows = rows_by_code(requests.worker[gaps.request], len(requests.worker_names))
    for mine, rows in zip(requests.by_worker(), gap_rows, strict=True):
        at, gap = gaps.at_s[rows], gaps.gap_s[rows]
        firsts = requests.first_token_s[mine]
        firsts = np.sort(firsts[np.isfinite(firsts)])
        running[rows] = decoding_at(requests, mine, at - gap / 2)
        quiet[rows] = np.searchsorted(firsts, at + 1e-3, "right") == np.searchsorted(firsts, at - gap, "right")
    decoded, accepted = requests.get("output_tokens") - 1, requests.get("accepted_tokens")
    if gaps.is_even:
        per_token = _means_of(gaps.request, per_token, quiet)
    elif np.isfinite(accepted).any():  # of a step that speculates several tokens come at once, now more and now fewer
        a_step = np.divide(decoded, decoded - accepted, out=np.ones(len(requests)), where=decoded > accepted)
        seconds, brought = (_means_of(gaps.request, each, quiet) for each in (gaps.gap_s, tokens))
        mean = np.divide(seconds, brought, out=per_token.copy(), where=brought > 0) * a_step[gaps.request]
        per_token = np.where(a_step[gaps.request] > 1.0, mean, per_token)
    at = gaps.at_s[quiet]
    return Pace(per_token[quiet], running[quiet], at, gaps.request[quiet], at - gaps.gap_s[quiet] / 2)


def _means_of(request: I64, per_token: F64, quiet: Bool) -> F64:
    """[m] the mean over its request's quiet gaps in place of each gap's own."""
    count = np.bincount(request[quiet], minlength=int(request.max()) + 1)
    total = np.bincount(request[quiet], per_token[quiet], minlength=len(count))
    return np.divide(total, count, out=np.zeros(len(count)), where=count > 0)[request]


def mean_gaps(requests: RequestFacts, without: I64 | None = None) -> Pace:
    """A request's decode without prefills, a token: where single gaps are not recorded. `at_s` is its last token.

    `without`: rows that tell nothing of the pace, for they were out for a while. Time in which some prompt of the worker was being computed is taken out, and one token for each such prompt with it.
    """
    tokens, decode = requests.get("output_tokens"), requests.get("decode_s")
    first, last = requests.engine_first_s, requests.engine_last_s
    known = (
        np.isfinite(tokens)
        & np.isfinite(decode)
        & np.isfinite(first)
        & np.isfinite(last)
        & np.isfinite(requests.scheduled_s)
    )
    running, busy, prompts = np.zeros(len(requests)), np.zeros(len(requests)), np.zeros(len(requests))
    for rows in requests.by_worker():
        mine = rows[known[rows]]
        if len(mine) == 0:
            continue
        running[mine] = decoding_at(requests, rows, (requests.first_token_s[mine] + requests.last_token_s[mine]) / 2)
        scheduled, begun, ended = np.sort(requests.scheduled_s[mine]), first[mine], last[mine]
        # of a hand-over the first token comes long after the prompt was computed
        done = np.sort(np.fmin(begun, requests.scheduled_s[mine] + requests.get("prefill_s")[mine]))
        edges = np.unique(np.concatenate([scheduled, done]))
        level = np.searchsorted(scheduled, edges[:-1], "right") - np.searchsorted(done, edges[:-1], "right")
        prefilling = np.concatenate([[0.0], np.cumsum((level > 0) * np.diff(edges))])
        busy[mine] = np.interp(ended, edges, prefilling) - np.interp(begun, edges, prefilling)
        prompts[mine] = np.searchsorted(done, ended, "right") - np.searchsorted(done, begun, "right")
    left = tokens - 1 - np.nan_to_num(requests.get("accepted_tokens")) - prompts
    quiet = decode - busy
    known &= (left >= MIN_QUIET_TOKENS) & (quiet > 0)
    if without is not None:
        known[without] = False
    middle = ((requests.first_token_s + requests.last_token_s) / 2)[known]
    return Pace(quiet[known] / left[known], running[known], requests.last_token_s[known], np.flatnonzero(known), middle)


def decoding_at(requests: RequestFacts, rows: I64, at_s: F64, *, with_itself: bool = True) -> F64:
    """How many of these requests (those of one worker) were decoding at each instant: first token seen, last not yet.

    with_itself  one of them is the request that the instant is of, which is there for sure where requests are a sample
    """
    rows = rows[np.isfinite(requests.first_token_s[rows])]
    last = requests.last_token_s[rows]
    last = np.sort(np.where(np.isfinite(last), last, requests.end_s[rows]))
    first = np.sort(requests.first_token_s[rows])
    seen = (np.searchsorted(first, at_s, "right") - np.searchsorted(last, at_s, "left")).astype(float)
    rate = beside_rate(requests)
    if rate == 1.0:
        return seen
    return 1.0 + np.maximum(seen - 1.0, 0.0) / rate if with_itself else seen / rate
