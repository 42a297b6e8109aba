"""The option `--slo-goal` of verbs that write rules and dashboards: the collector's own setting, unless another is given."""

from __future__ import annotations

from typing import Annotated

import typer

SloGoalOption = Annotated[
    float | None,
    typer.Option(
        "--slo-goal",
        help="Share of the requests that should meet their SLO: 0.95 to 0.9999.",
        show_default="KVSCOPE_SLO__GOAL, else 0.99",
    ),
]


def slo_goal_of(given: float | None) -> float:
    """The goal, from the option over the variable over the default. Raises UsageError for one out of range."""
    from collector.settings import load_settings

    return load_settings(slo={"goal": given}).slo.goal
