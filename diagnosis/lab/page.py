"""The published page, `docs/confusion-matrix.md`: made from the results alone, so that anybody can make it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.lab.fault import WORDS
from diagnosis.lab.plan import NULLS, NULLS_PER_SEED, PUBLISHED, TUNED_UP_TO, published
from diagnosis.lab.reliability import FEWEST
from diagnosis.lab.render import MET, NO_FILE, found, percent
from diagnosis.lab.results import NOTHING, Result

BAR = 25


def page(document: Mapping[str, Any], results: Sequence[Result], data: str, chart: str) -> str:
    """The page. data, chart: names of the results' file and of the reliability diagram beside it."""
    return "\n".join(
        [
            "# Confusion matrix",
            "",
            "<!-- Made by `kvscope lab matrix`; change nothing here by hand. -->",
            "",
            *_opening(document, data),
            *_versions(results),
            *_targets(document),
            *_faults(document),
            *_matrix(results),
            *_opponent(document),
            *_nulls(document),
            *_pairs(document),
            *_marks(document),
            *_observed(document),
            *_reliability(document, chart),
            *_failures(document),
        ]
    )


def _opening(document: Mapping[str, Any], data: str) -> list[str]:
    seeds = document["seeds"]
    told = f"{seeds[0]} to {seeds[-1]}" if seeds else "none"
    tuned = (
        f"Thresholds and confidence were tuned on seeds up to {TUNED_UP_TO} alone, so nothing was tuned on these."
        if seeds and seeds[0] > TUNED_UP_TO
        else f"**Seeds up to {TUNED_UP_TO} are those that thresholds were tuned on: these figures are no proof.**"
    )
    whole = len(published(PUBLISHED, 1))
    unfinished = (
        [
            f"**{document['runs']:,} of the {whole:,} runs of a whole matrix are in: it shows which way it goes, not yet how often.**",
            "",
        ]
        if document["runs"] < whole
        else []
    )
    requests = " and ".join(f"{n:,}" for n in document["requests"])
    return [
        f"One known fault at a time is injected into a fleet in virtual time ([lab.md](lab.md)), and the diagnosis is asked. {document['runs']:,} runs, "
        f"{requests} requests a window, seeds {told}. {tuned}",
        "",
        *unfinished,
        f"Every figure is computed from [{data}]({data}), a line a run: `kvscope lab matrix --from docs/{data}` makes this page from it, "
        f"`kvscope lab matrix --seeds {seeds[0] if seeds else 101}:{seeds[-1] if seeds else 120}` plays the runs again.",
        "",
    ]


def _versions(results: Sequence[Result]) -> list[str]:
    """Nothing where one version of the code made all of it."""
    counts = Counter(r.code for r in results)
    if len(counts) < 2:
        return []
    by_size = sorted(counts.items(), key=lambda item: (-item[1], not item[0], item[0] or ""))
    told = ", ".join(f"{n:,} by {code or 'a version that is not known'}" for code, n in by_size)
    return [
        f"**These runs are not of one version of the code ({told}): no version reaches these figures for certain.**",
        "",
    ]


def _targets(document: Mapping[str, Any]) -> list[str]:
    lines = ["## What is promised", "", "| figure | wanted | found | of | |", "|---|---|---|---|---|"]
    for row in document["targets"]:
        lines.append(f"| {row['target']} | {row['wanted']} | {found(row)} | {row['n']:,} | {MET[row['met']]} |")
    told = document["attribution"]
    note = (
        f"Claims are measured in P99 where it carries the verdict, else in the mean; in the mean alone they are off by {percent(told['error_mean'])}, in P99 alone "
        f"by {percent(told['error_p99'])} (medians). Where a fault hit one worker or tenant, that one was named in {percent(told['subject_right'])}."
    )
    exact = f"The fault's own name, and no acceptable other, stood first in {percent(document['exact'])}."
    return [*lines, "", exact, note, ""]


def _faults(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Fault by fault",
        "",
        "Right, of so many, at each severity; what stood in the first place, over all severities; the share of the true seconds that was claimed "
        "and of the change that nobody owned (medians, strong). A fault that moved neither mean nor P99 by a tenth is held against silence.",
        "",
        "| fault | mild | typical | strong | first verdict | claimed | unexplained |",
        "|---|---|---|---|---|---|---|",
    ]
    by_fault: dict[str, list[Mapping[str, Any]]] = {}
    for cell in document["cells"]:
        by_fault.setdefault(cell["fault"], []).append(cell)
    for name in sorted(by_fault, key=lambda name: (by_fault[name][0]["family"], name)):
        cells = {cell["severity"]: cell for cell in by_fault[name]}
        strongest = cells.get("strong") or cells.get("typical") or next(iter(cells.values()))
        named: dict[str, int] = {}
        for cell in by_fault[name]:
            for cause, count in cell["named_first"].items():
                named[cause] = named.get(cause, 0) + count
        said = ", ".join(
            f"{cause} {count}" for cause, count in sorted(named.items(), key=lambda item: (-item[1], item[0]))
        )
        scores = [f"{cells[word]['right']}/{cells[word]['n']}" if word in cells else "" for word in WORDS]
        title = name if strongest["has_cause"] else f"{name} ({NO_FILE})"
        lines.append(
            f"| {title} | {' | '.join(scores)} | {said} | {percent(strongest['claimed'])} | {percent(strongest['unexplained'])} |"
        )
    return [*lines, ""]


def _matrix(results: Sequence[Result]) -> list[str]:
    """Rows the injected fault, columns the first verdict, typical and strong together; a dot is none."""
    counts: dict[str, dict[str, int]] = {}
    for r in results:
        if r.observe == "full" and not r.marked and (r.severity != "mild"):
            row = counts.setdefault(r.fault, {})
            name = NOTHING if r.outcome != "failed" and not r.causes else r.first
            name = f"({name})" if r.outcome == "cannot_tell" and r.causes else name
            row[name] = row.get(name, 0) + 1
    rows = sorted(counts)
    said = {name for row in counts.values() for name in row}
    columns = [
        *(name for name in rows if name in said),
        *sorted(said - set(rows) - {NOTHING}),
        *([NOTHING] if NOTHING in said else []),
    ]
    width = max((len(name) for name in rows), default=0)
    cells = max((len(str(n)) for row in counts.values() for n in row.values()), default=1) + 1
    cells = max(cells, 3)
    head = " " * (width + 5) + "".join(str(index + 1).rjust(cells) for index in range(len(columns)))
    lines = [
        f"{name.ljust(width)}     "
        + "".join((str(counts[name][c]) if c in counts[name] else ".").rjust(cells) for c in columns)
        for name in rows
    ]
    legend = [f"{index + 1:>3}  {name}" for index, name in enumerate(columns)]
    return [
        "## The matrix",
        "",
        "Rows are the injected fault, columns the first verdict, typical and strong together. A name in brackets was named tentatively: the verdict "
        "says that it cannot tell.",
        "",
        "```text",
        head.rstrip(),
        *(line.rstrip() for line in lines),
        "",
        *legend,
        "```",
        "",
    ]


def _opponent(document: Mapping[str, Any]) -> list[str]:
    told = document["baseline"]
    margin = "-" if told["margin"] is None else f"{100 * told['margin']:+.0f} points"
    lines = [
        "## Against thresholds on gauges",
        "",
        "The opponent judges as dashboards do: from a dozen gauges a window (KV usage, queue, running, imbalance, preemptions, hit rate, rate, "
        "lengths, TTFT, TPOT), by an ordered list of thresholds. Which rules it has, in which order, with which threshold, and which cause of its "
        f"family each names was searched for on {told['tuned_on']:,} of these runs, those of the first half of the seeds, against the labels that the "
        "diagnosis is graded by; its figures are those of the other half.",
        "",
        f"| on the same {told['n']:,} runs, typical and strong | right |",
        "|---|---|",
        f"| kvscope | {percent(told['diagnosis'])} |",
        f"| thresholds | {percent(told['accuracy'])} |",
        f"| thresholds, right where the cause is anywhere in the family of the rule | {percent(told['accuracy_of_family'])} |",
        f"| margin | {margin} |",
        "",
        f"Of {told['nulls']:,} runs in which nothing was wrong it accuses somebody in {percent(told['false_cause_rate'])}.",
        "",
    ]
    rules = told["rules"]
    if rules:
        lines += ["Its rules, in order:", ""]
        lines += [
            f"{index}. {rule['rule']} (above {rule['above']:.3g}): `{rule['names']}`"
            for index, rule in enumerate(rules, 1)
        ]
        lines.append("")
    return lines


def _nulls(document: Mapping[str, Any]) -> list[str]:
    told = document["nulls"]
    named = ", ".join(f"{name} {count}" for name, count in told["named"].items())
    return [
        "## Nothing wrong",
        "",
        f"Two draws of the same traffic ({', '.join(NULLS)}; {NULLS_PER_SEED} for each published seed): in {told['false']} of {told['n']:,} runs somebody "
        f"was accused{f' ({named})' if named else ''}, in {told['false_high']} with high confidence.",
        "",
    ]


def _pairs(document: Mapping[str, Any]) -> list[str]:
    told = document["pairs"]
    if not told["n"]:
        return []
    lines = ["## Two at once", "", "| pair | runs | both in the first three |", "|---|---|---|"]
    lines += [f"| {name} | {row['n']} | {row['both']} |" for name, row in told["by_pair"].items()]
    return [*lines, ""]


def _marks(document: Mapping[str, Any]) -> list[str]:
    told = document["marks"]
    if not told["n"]:
        return []
    which = f": {'; '.join(told['which'])}" if told["which"] else ""
    return [
        "## An innocent mark at the same instant",
        "",
        f"{told['n']:,} runs were judged again with a deployment marked at the instant at which the fault began: {told['changed']} verdicts changed{which}.",
        "",
    ]


def _observed(document: Mapping[str, Any]) -> list[str]:
    told = document["observed"]
    if not told["all"]["n"]:
        return []
    lines = [
        "## With less to see",
        "",
        "The same faults, typical severity, seen through spans and scraped metrics alone (otlp), by their callers alone (client), or with one batch of "
        "a hundred lost (lossy).",
        "",
        "| seen | runs | right | wrong | cannot tell | wrong with high confidence |",
        "|---|---|---|---|---|---|",
    ]
    for mode, row in told.items():
        shares = [percent(row[name] / row["n"]) if row["n"] else "-" for name in ("right", "wrong", "cannot_tell")]
        lines.append(f"| {mode} | {row['n']:,} | {' | '.join(shares)} | {row['wrong_high']} |")
    return [*lines, ""]


def _reliability(document: Mapping[str, Any], chart: str) -> list[str]:
    lines = [
        "## Does confidence mean what it says?",
        "",
        "Of the causes in the first place, over all runs with everything to see, those in which nothing was wrong among them:",
        "",
        f"![stated confidence against the share that was right]({chart})",
        "",
        "| stated | runs | mean | right | 95 % interval | apart |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["reliability"]:
        if not row["n"]:
            continue
        low, high = row["interval_95"]
        few = "" if row["n"] >= FEWEST else f" (fewer than {FEWEST} runs)"
        lines.append(
            f"| {row['from']:.1f} to {row['to']:.1f} | {row['n']:,}{few} | {row['stated']:.2f} | {row['observed']:.2f} | {low:.2f} to {high:.2f} | "
            f"{100 * row['apart']:+.0f} points |"
        )
    for row in document["held_down"]:
        if row["n"]:
            lines.append(f"| held at {row['at']} | {row['n']:,} | {row['at']} | {row['observed']:.2f} | | by rule |")
    lines += [
        "",
        "Held by rule: 0.79 at most where too few independent requests carry P99, 0.49 where the change itself is not established "
        "([diagnosis.md](diagnosis.md)). They are surer than they say, on purpose, and are left out of the bins.",
        "",
        "```text",
    ]
    for row in document["reliability"]:
        if row["n"]:
            stated, observed = (round(BAR * row[name]) for name in ("stated", "observed"))
            lines += [
                f"{row['from']:.1f} to {row['to']:.1f}  stated  {'-' * stated}",
                f"{'':10}  right   {'#' * observed}",
            ]
    return [*lines, "```", ""]


def _failures(document: Mapping[str, Any]) -> list[str]:
    """What is not right in a fifth or more of a cell."""
    weak = [cell for cell in document["cells"] if cell["right"] < 0.8 * cell["n"]]
    if not weak:
        return ["## What it gets wrong", "", "No cell has fewer than 16 of 20 right.", ""]
    lines = ["## What it gets wrong", "", "Cells with fewer than 16 of 20 right:", ""]
    for cell in weak:
        named = ", ".join(f"{name} {count}" for name, count in cell["named_first"].items())
        lines.append(
            f"- {cell['fault']}, {cell['severity']}: {cell['right']} right, {cell['wrong']} wrong, {cell['cannot_tell']} cannot tell of {cell['n']}; first: {named}"
        )
    return [*lines, ""]
