"""`kvscope experiment run`: arms on the same calls, read side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from collector.experiments import options as o
from collector.terminal.output import JsonOption, columns, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING

OUT = Path("experiment-out")
WORSE = ("capacity", "locality", "lookup", "fixed_extra", "worse", "mixed", "too_few", "not_distinguishable")
"""Readings of the first pair that end with exit code 1: worse, or not to be told."""


@o.sharing
def run(
    scenario: o.ScenarioArgument = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="NAME:KEY=VALUE,... in place of A to D, the first is the control. Repeatable.",
            show_default=False,
        ),
    ] = None,
    rate: o.RateOption = None,
    concurrency: o.ConcurrencyOption = None,
    out: o.OutOption = OUT,
    blocks: o.BlocksOption = True,
    endpoint_off: o.OffOption = None,
    *,
    shared: o.Shared,
    json: JsonOption = False,
) -> None:
    """Compare arms on the same calls: prefix cache off/on and cold/warm (A, B, C, D), or settings, versions, endpoints.

    A is off/cold, B off/warm, C on/cold, D on/warm. `founding` is the built-in case in which the mean falls and P99
    rises. Exit code 1: the first pair got worse somewhere, or there is too little to tell.
    """
    from collector.experiments.folder import claim, finish, fresh
    from collector.experiments.running import Plan, run_experiment
    from collector.experiments.scenarios import find_scenario
    from collector.experiments.setting_up import arms_of, runner_of
    from diagnosis.experiments.design import schedule
    from diagnosis.experiments.text import render, render_markdown

    chosen = find_scenario(scenario)
    one_rate, clients = o.one_load(rate, "--rate", whole=False), o.one_load(concurrency, "--concurrency", whole=True)
    workload = shared.over(chosen.workload, rate=one_rate, concurrency=None if clients is None else int(clients))
    arms = arms_of(chosen, arm or [], shared.settings or [], shared.model, is_virtual=shared.endpoint is None)
    name = "own arms" if arm and scenario is None else chosen.name
    repeats = chosen.repeats if shared.repeats is None else shared.repeats
    plan = Plan(name, arms, workload, repeats, shared.seed, shared.slo, out)
    trials = schedule(arms, plan.repeats, plan.seed)
    runner = runner_of(shared, endpoint_off=endpoint_off, blocks=blocks)
    runner.check(arms)
    folders = [each.name for each in arms]
    claim(fresh(out), folders)
    say(f"{len(trials)} runs of {workload.num_warmup} warm-up and {workload.num_requests} counted calls each")
    document = run_experiment(plan, runner, say)
    finish(out, folders, document, render_markdown(document, o.release()))
    if json:
        emit_json({**document, "folder": str(out)})
    else:
        emit(render(document, columns()))
        say(_next(out, document))
    if any(reading["kind"] in WORSE for reading in document["contrasts"][0]["reading"]):
        raise typer.Exit(EXIT_FINDING)


def _next(out: Path, document: dict[str, Any]) -> str:
    """What can be done with the rows."""
    pair = [document["contrasts"][0][side] for side in ("baseline", "suspect")]
    return "\n".join(
        [
            f"\nThe report is {out / 'report.md'}, the rows of every run lie beside it. Every cause, looked at one by one:",
            *(f"  kvscope import {out / name} --run {name}" for name in pair),
            f"  kvscope diagnose --baseline {pair[0]} --suspect {pair[1]}",
        ]
    )
