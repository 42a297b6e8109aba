"""Transfer and tiers: hand-overs between workers, loads from slower tiers, and whether they pay."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.parts import RATIO, REQUESTS_S, SECONDS, SECONDS_S, TOKENS_S, Query, lines
from dashboards.promql import mean, quantile, rate, ratio
from store import metric_catalogue as names

_SPEED: Final = ratio(
    rate(names.TRANSFER_BYTES, "worker"), rate(names.TRANSFER_WIRE, "worker", series=names.TRANSFER_WIRE.sum)
)
_FAILED: Final = ratio(rate(names.TRANSFERS, outcome="retried|fell_back|failed|refused"), rate(names.TRANSFERS))

BOARD: Final = Board(
    "transfer",
    "transfer and tiers",
    "KV on the move: from another worker, from host memory or disk.",
    (
        (
            "Transfers",
            (
                lines(
                    "Transfers by outcome",
                    "Hand-overs and tier loads.",
                    REQUESTS_S,
                    Query(rate(names.TRANSFERS, "outcome"), "{{outcome}}"),
                    stacked=True,
                ),
                lines(
                    "Not plainly ok",
                    "Share that was retried, fell back, failed or was refused.",
                    RATIO,
                    Query(_FAILED, "share"),
                ),
                lines(
                    "On the wire",
                    "By the worker that received.",
                    SECONDS,
                    Query(quantile("0.5", names.TRANSFER_WIRE, "worker"), "{{worker}} P50"),
                    Query(quantile("0.99", names.TRANSFER_WIRE, "worker"), "{{worker}} P99"),
                    log=True,
                ),
                lines(
                    "Orchestration",
                    "Before and around the wire.",
                    SECONDS,
                    Query(quantile("0.5", names.TRANSFER_WAIT, "worker"), "{{worker}} P50"),
                    Query(quantile("0.99", names.TRANSFER_WAIT, "worker"), "{{worker}} P99"),
                    log=True,
                ),
                lines(
                    "Bytes moved",
                    "By the worker that received.",
                    "Bps",
                    Query(rate(names.TRANSFER_BYTES, "worker"), "{{worker}}"),
                ),
                lines("Speed of the wire", "Bytes over the seconds on the wire.", "Bps", Query(_SPEED, "{{worker}}")),
            ),
        ),
        (
            "What requests wait for",
            (
                lines(
                    "Load from a tier",
                    "Of requests that loaded.",
                    SECONDS,
                    Query(mean(names.KV_LOAD, "worker"), "{{worker}} mean"),
                    Query(quantile("0.99", names.KV_LOAD, "worker"), "{{worker}} P99"),
                ),
                lines(
                    "Transfer",
                    "Of requests whose KV came from another worker.",
                    SECONDS,
                    Query(mean(names.KV_TRANSFER, "worker"), "{{worker}} mean"),
                    Query(quantile("0.99", names.KV_TRANSFER, "worker"), "{{worker}} P99"),
                ),
                lines(
                    "Hit tokens by tier",
                    "What the tiers are good for.",
                    TOKENS_S,
                    Query(rate(names.TIER_HIT_TOKENS, "tier"), "{{tier}}"),
                    stacked=True,
                ),
                lines(
                    "Blocks into and out of tiers",
                    "Offloaded, loaded, evicted, by tier.",
                    "blocks/s",
                    Query(rate(names.BLOCK_CHANGES, "change", "tier", tier="host|disk|remote"), "{{tier}} {{change}}"),
                ),
                lines(
                    "Steps that loaded",
                    "Time of steps spent on loading KV.",
                    SECONDS_S,
                    Query(rate(names.STEP_PART, "worker", part="kv_load"), "{{worker}}"),
                ),
                lines(
                    "Marks",
                    "Changes people should see: deployments, configuration, faults.",
                    "ops",
                    Query(rate(names.MARKS, "mark"), "{{mark}}"),
                ),
            ),
        ),
    ),
)
