"""`kvscope experiment sweep`: how much load is too much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collector.experiments import options as o
from collector.terminal.output import JsonOption, columns, emit, emit_json, say
from engine_probe.errors import UsageError

OUT = Path("sweep-out")


@o.sharing
def sweep(
    scenario: o.ScenarioArgument = None,
    cache: Annotated[str, typer.Option(help="The scenario with its cache on or off.")] = "on",
    rate: o.RatesOption = None,
    concurrency: o.ConcurrenciesOption = None,
    by: Annotated[str, typer.Option(help="What is raised where no loads are listed: rate or concurrency.")] = "rate",
    start: Annotated[float, typer.Option(help="The lowest load, where none are listed.")] = 1.0,
    out: o.OutOption = OUT,
    blocks: o.BlocksOption = False,
    *,
    shared: o.Shared,
    json: JsonOption = False,
) -> None:
    """Raise the load to the knee, where P99 TTFT starts to break.

    P99 breaks above --slo-ttft, else above twice that of the lowest load. Where no loads are listed it doubles from --start
    until P99 breaks, then narrows the gap down.
    """
    from collector.experiments.folder import claim, finish, fresh
    from collector.experiments.running import LEVELS, Plan, run_sweep, with_load
    from collector.experiments.scenarios import find_scenario
    from collector.experiments.setting_up import arms_of, runner_of
    from diagnosis.experiments.design import MIN_REPEATS
    from diagnosis.experiments.text import render_sweep, render_sweep_markdown

    chosen = find_scenario(scenario)
    rates, clients = o.loads(rate, "--rate", whole=False), o.loads(concurrency, "--concurrency", whole=True)
    if rates is not None and clients is not None:
        raise UsageError("--rate is an open loop, --concurrency a closed one: sweep one of them")
    for option, word, known in (("--by", by, ("rate", "concurrency")), ("--cache", cache, ("on", "off"))):
        if word not in known:
            raise UsageError(f"{option} is {word!r}; expected {' or '.join(known)}")
    by_rate = rates is not None or (clients is None and by == "rate")
    if not 0 < start < float("inf") or (not by_rate and start != int(start)):
        raise UsageError(f"--start is {start:g}; expected {'a' if by_rate else 'a whole'} number above 0")
    count = MIN_REPEATS if shared.repeats is None else shared.repeats
    if count < MIN_REPEATS:
        raise UsageError(f"--repeats is {count}; expected {MIN_REPEATS} or more: fewer give no interval")
    workload = shared.over(chosen.workload)
    with_load(workload, start, by_rate=by_rate)
    arms = arms_of(chosen, [], shared.settings or [], shared.model, is_virtual=shared.endpoint is None)
    arm = next(each for each in arms if each.name == ("D" if cache == "on" else "B"))
    runner = runner_of(shared, blocks=blocks)
    runner.check([arm])
    plan = Plan(f"{chosen.name}, cache {cache}", [arm], workload, count, shared.seed, shared.slo, out)
    claim(fresh(out), [LEVELS])
    document = run_sweep(plan, runner, rates or clients, start, shared.slo_ttft, by_rate=by_rate, tell=say)
    finish(out, [LEVELS], document, render_sweep_markdown(document, o.release()))
    if json:
        emit_json({**document, "folder": str(out)})
    else:
        emit(render_sweep(document, columns()))
