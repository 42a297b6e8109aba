"""What a run of the embedded engine came to, as one document and as one screen.

Beside what the engines gave stands what caches alone would give (`diagnosis/capacity/routing_replay.py`): there nothing runs, so
nothing holds blocks; the distance is what running requests cost the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_probe.engine.fleet.run_summary import Served
    from engine_probe.engine.fleet.virtual_fleet import Tally
    from engine_probe.engine.traffic.call import Call


def run_document(
    served: Served, tally: Tally, names: Sequence[str], policy: str, real_s: float, facts: dict[str, Any]
) -> dict[str, Any]:
    """names: of the workers; facts: what else is to be told (num_blocks, block_size, model, ...). Unknown is None."""
    import numpy as np

    worker = np.array([name or "" for name in served.worker])
    computed = [float(np.nansum(served.numbers["computed_tokens"][worker == name])) for name in names]
    mean = sum(computed) / len(computed)
    return {
        "hit_rate": _hit_rate(served, np.ones(len(worker), dtype=bool)),
        "max_over_mean_load": max(computed) / mean if mean else None,
        "ttft": _ttft(served.ttft_s),
        "requests": len(served.state),
        "policy": policy,
        "speed": tally.virtual_s / real_s if real_s else None,
        "workers": [
            {
                "worker": name,
                "requests": int((worker == name).sum()),
                "hit_rate": _hit_rate(served, worker == name),
                "computed_tokens": tokens,
                "preemptions": int(np.nansum(served.numbers["num_preemptions"][worker == name])),
                **{f"ttft_{key}": value for key, value in _ttft(served.ttft_s[worker == name]).items()},
            }
            for name, tokens in zip(names, computed, strict=True)
        ],
        "tally": asdict(tally),
        **facts,
    }


def cache_only(
    calls: Sequence[Call], policy: str, num_workers: int, num_blocks: int, block_size: int, seed: int
) -> dict[str, Any]:
    """The same calls over caches in which nothing runs, in the engines' unit: tokens found, of all prompt tokens.

    The tail of a prompt that fills no block counts as asked for, and can be found nowhere.
    """
    from diagnosis.capacity.block_cache import block_trace
    from diagnosis.capacity.routing_replay import replay_routing

    replay = replay_routing(
        block_trace([call.blocks for call in calls]),
        policy,
        num_workers,
        num_blocks,
        seed=seed,
        block_tokens=block_size,
    )
    prompt_tokens = sum(call.prompt_tokens for call in calls)
    in_blocks = sum(len(call.blocks) for call in calls) * block_size / prompt_tokens

    def of_tokens(of_blocks: float | None) -> float | None:
        return None if of_blocks is None else of_blocks * in_blocks

    return {
        "hit_rate": of_tokens(replay.hit_rate),
        "max_over_mean_load": replay.max_over_mean_load,
        "pooled_hit_rate": of_tokens(replay.pooled_hit_rate),
    }


def render(document: dict[str, Any]) -> str:
    """What a person reads: one sentence, the fleet beside the caches alone, a row a worker."""
    tally, ttft = document["tally"], document["ttft"]
    lines = [
        f"{tally['finished']:,} of {document['requests']:,} requests finished in {_span(tally['virtual_s'])}"
        f"{_pace(document)}: TTFT mean {_span(ttft['mean_s'])}, P99 {_span(ttft['p99_s'])}."
    ]
    ended = {"aborted": tally["aborted"], "rejected": tally["rejected"], "never served": tally["stuck"]}
    lines += [f"{count:,} {what}." for what, count in ended.items() if count]
    lines += [
        "",
        f"{document['policy']} over {len(document['workers'])} workers of {document['num_blocks']:,} blocks",
        "",
    ]
    lines.append(f"  {'':28} {'hit rate':>9}  {'max/mean load':>13}")
    lines.append(_figures("engines (requests hold blocks)", document))
    if document["cache_only"] is not None:
        lines.append(_figures("caches alone", document["cache_only"]))
    lines += ["", f"  {'worker':8} {'requests':>9} {'hit rate':>9} {'TTFT mean':>10} {'P99':>9} {'preemptions':>12}"]
    lines += [
        f"  {worker['worker']:8} {worker['requests']:>9,} {_share(worker['hit_rate']):>9} {_span(worker['ttft_mean_s']):>10} "
        f"{_span(worker['ttft_p99_s']):>9} {worker['preemptions']:>12,}"
        for worker in document["workers"]
    ]
    lines += ["", "Hit rate: prompt tokens found in the cache, of all. Load: prompt tokens computed."]
    return "\n".join(lines)


def _hit_rate(served: Served, chosen: Any) -> float | None:
    import numpy as np

    prompt = np.where(np.isnan(served.numbers["cached_tokens"]), np.nan, served.numbers["prompt_tokens"])[chosen]
    total = float(np.nansum(prompt))
    return float(np.nansum(served.numbers["cached_tokens"][chosen])) / total if total else None


def _ttft(values: Any) -> dict[str, float | None]:
    import numpy as np

    from diagnosis.statistics.quantiles import nearest_rank

    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(("mean_s", "p50_s", "p95_s", "p99_s"))
    ranks = {f"p{q[2:]}_s": nearest_rank(known, q) for q in ("0.50", "0.95", "0.99")}
    return {"mean_s": float(known.mean()), **ranks}


def _pace(document: dict[str, Any]) -> str:
    return f" of virtual time ({document['speed']:,.0f} x real time)" if document["is_virtual"] else " of real time"


def _figures(title: str, figures: dict[str, Any]) -> str:
    ratio = figures["max_over_mean_load"]
    return f"  {title:30} {_share(figures['hit_rate']):>7}  {'-' if ratio is None else f'{ratio:.2f}':>13}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
