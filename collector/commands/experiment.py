"""`kvscope experiment run|sweep`: what a change does with everything else held fixed, and how much load is too much.

Both run on the embedded engine in virtual time, or against any OpenAI endpoint. Every row of every run stays in --out.
"""

from __future__ import annotations

import typer

from collector.experiments.run_verb import run
from collector.experiments.sweep_verb import sweep


def register(app: typer.Typer) -> None:
    """Add the group `experiment`."""
    group = typer.Typer(
        help="Compare arms on the same calls, or raise the load to its knee: embedded engine or any OpenAI endpoint.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("run")(run)
    group.command("sweep")(sweep)
    app.add_typer(group, name="experiment")
