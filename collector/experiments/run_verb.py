"""`kvscope experiment run`: arms on the same calls, read side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from collector.experiments import options as o
from collector.output import JsonOption, columns, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING

OUT = Path("experiment-out")
WORSE = ("capacity", "locality", "lookup", "fixed_extra", "worse", "mixed", "too_few", "not_distinguishable")
"""Readings of the first pair that end with exit code 1: worse, or not to be told."""


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
    settings: o.SetOption = None,
    repeats: o.RepeatsOption = None,
    requests: o.RequestsOption = None,
    warmup: o.WarmupOption = None,
    rate: o.RateOption = None,
    concurrency: o.ConcurrencyOption = None,
    arrivals: o.ArrivalsOption = None,
    groups: o.GroupsOption = None,
    skew: o.SkewOption = None,
    shared_tokens: o.SharedTokensOption = None,
    shared_ratio: o.SharedRatioOption = None,
    own_tokens: o.OwnTokensOption = None,
    output_tokens: o.OutputTokensOption = None,
    trace: o.TraceOption = None,
    speed: o.SpeedOption = 1.0,
    seed: o.SeedOption = 0,
    slo_ttft: o.SloTtftOption = None,
    slo_tpot: o.SloTpotOption = None,
    out: o.OutOption = OUT,
    blocks: o.BlocksOption = True,
    jobs: o.JobsOption = None,
    endpoint: o.EndpointOption = None,
    endpoint_off: o.OffOption = None,
    model: o.ModelOption = None,
    key: o.KeyOption = None,
    ca: o.CaOption = None,
    insecure: o.InsecureOption = False,
    prompt: o.PromptOption = "words",
    vocab: o.VocabOption = 1000,
    timeout: o.TimeoutOption = 300.0,
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
    asking = o.Asking(
        requests, warmup, one_rate, None if clients is None else int(clients), arrivals, groups, skew, shared_tokens,
        shared_ratio, own_tokens, output_tokens, trace, speed, seed,
    )  # fmt: skip
    workload, slo = asking.over(chosen.workload), o.slo_of(slo_ttft, slo_tpot)
    arms = arms_of(chosen, arm or [], settings or [], model, is_virtual=endpoint is None)
    name = "own arms" if arm and scenario is None else chosen.name
    plan = Plan(name, arms, workload, chosen.repeats if repeats is None else repeats, seed, slo, out)
    trials = schedule(arms, plan.repeats, seed)
    runner = runner_of(
        endpoint, endpoint_off, model, key, ca, insecure, prompt, vocab, timeout, seed, blocks, jobs
    )  # fmt: skip
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
