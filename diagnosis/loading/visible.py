"""What a window was seen of, as the names that causes ask for in `needs`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diagnosis.facts import BlockTotals, LineageFacts, RequestFacts, StepFacts

NOTHING = np.array(None, dtype=object)


def visible_names(
    requests: RequestFacts,
    steps: StepFacts | None,
    samples: Mapping[str, float],
    lineage: LineageFacts | None,
    blocks: BlockTotals | None,
) -> frozenset[str]:
    """Of these facts; what else tells something is for the caller to add."""
    seen = {f"request.{name}" for name, values in requests.numbers.items() if np.isfinite(values).any()}
    if requests.gaps is not None:
        seen.add("request.token_ns")
    words = {"request.tenant": requests.tenant, "request.workload": requests.workload}
    seen |= {name for name, column in words.items() if (column != NOTHING).any()}
    if requests.model is not None:
        seen.add("request.model")
    if steps is not None:
        seen.add("step")
        seen |= {f"step.{name}" for name, values in steps.numbers.items() if np.isfinite(values).any()}
    if blocks is not None:
        seen.add("block.evicted")
        seen |= {"block.offloaded"} if blocks.tier_taken else set()
    if lineage is not None:
        seen.add("request.prompt_blocks")
    return frozenset(seen | {f"sample.{name.split(':')[0]}" for name in samples})
