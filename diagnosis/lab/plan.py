"""What a published matrix is made of: which runs, and which figure each serves.

    singles    every fault at every severity that it has, every seed
    pairs      two faults at once, every seed
    nulls      two draws of the same traffic, NULLS_PER_SEED for each seed, numbered from NULL_SEEDS on; in the base scene, with
               a mark in it, and in the settings in which the faults are injected
    marked     every fault again with an innocent mark at the same instant, SPARSE seeds
    observed   every fault again with less to see, each way of observing, SPARSE seeds

Seed by seed, so that an unfinished matrix has some of everything. Seeds up to TUNED_UP_TO are those on which thresholds and confidence
were tuned (`kvscope lab calibrate`); a published matrix has others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diagnosis.lab.catalogue import AA_IN, PAIRS, all_faults, find_fault
from diagnosis.lab.fault import WORDS, Fault
from diagnosis.lab.observed import MODES, check_mode
from diagnosis.lab.run import Order
from engine_probe.errors import UsageError

TUNED_UP_TO = 100
PUBLISHED = range(101, 121)
NULL_SEEDS = 1000
NULLS_PER_SEED = 50
NULLS_TO_TUNE = 5
"""Null runs a seed of `kvscope lab calibrate`: twenty seeds have the hundred that 99 of 100 can be told of."""
NULL_SEEDS_TO_TUNE = 100_000
NULLS = ("aa", "innocent_mark")
"""Nothing was done, and the traffic is another draw; and `aa@FAULT`, the same in that fault's setting."""
TUNED_EVERY = 3
"""One fault in so many is run a seed: certainty is worth the same whatever the fault, so all of them by turns are enough."""
SPARSE = 5
"""One seed in so many is run again with a mark, and with less to see."""
LESS = tuple(mode for mode in MODES if mode != "full")


def published(seeds: Sequence[int], requests: int) -> list[Order]:
    """Every run of the published matrix for these seeds."""
    found: list[Order] = []
    for index, seed in enumerate(seeds):
        for name, fault in all_faults().items():
            found += [Order(name, severity, seed, requests) for severity in severities(fault)]
            if index % SPARSE == 0:
                found.append(Order(name, "typical", seed, requests, marked=True))
                found += [Order(name, "typical", seed, requests, observe=mode) for mode in LESS]
        found += [Order(name, "typical", seed, requests) for name in PAIRS]
        found += nulls(range(NULL_SEEDS + NULLS_PER_SEED * index, NULL_SEEDS + NULLS_PER_SEED * (index + 1)), requests)
    return found


def chosen(names: Sequence[str] | None, levels: Sequence[str], seeds: Sequence[int], template: Order) -> list[Order]:
    """Runs of these faults (None: all, and PAIRS) at these severities, seed by seed; the rest as in the template.

    Raises UsageError for a fault that is not known, a severity that not all of them know, or an unknown way of observing.
    """
    check_mode(template.observe)
    if not seeds:
        raise UsageError("a matrix needs one seed or more")
    wanted = list(dict.fromkeys(names)) if names else [*all_faults(), *PAIRS]
    told: dict[str, list[str]] = {}
    for name in wanted:
        fault = find_fault(name)
        for level in levels:
            fault.severity.at(level)
        told[name] = severities(fault) if tuple(levels) == WORDS else list(levels)
    return [
        replace(template, fault=name, severity=level, seed=seed)
        for seed in dict.fromkeys(seeds)
        for name in wanted
        for level in told[name]
    ]


def tuning(seeds: Sequence[int], requests: int) -> list[Order]:
    """Runs of `kvscope lab calibrate`: each seed NULLS_TO_TUNE null runs, one fault in TUNED_EVERY at one severity by turns, and a pair.

    Null runs by turns in every setting in which a fault is injected, for most thresholds are asked in one of them alone; one of each seed's in
    the base scene. A setting with few requests of its own is left out: chance reaches farther there, and such windows are not judged.
    """
    found: list[Order] = []
    faults = all_faults()
    settings = [name for name, fault in faults.items() if fault.has_setting and fault.requests is None]
    turn = 0
    for index, seed in enumerate(seeds):
        for number in range(NULLS_TO_TUNE):
            name = f"{AA_IN}{settings[turn % len(settings)]}" if number else NULLS[index % len(NULLS)]
            turn += bool(number)
            found.append(Order(name, "typical", NULL_SEEDS_TO_TUNE + NULLS_TO_TUNE * seed + number, requests))
        for place, (name, fault) in enumerate(faults.items()):
            known = severities(fault)
            if (place + index) % TUNED_EVERY == 0 and not is_null(name):
                found.append(Order(name, known[index // TUNED_EVERY % len(known)], seed, requests))
        found.append(Order(PAIRS[index % len(PAIRS)], "typical", seed, requests))
    return found


def nulls(seeds: Sequence[int], requests: int) -> list[Order]:
    """A run in which nothing is wrong for each seed: of five, two in the base scene, one with a mark, two in other settings."""
    settings = [name for name, fault in all_faults().items() if fault.has_setting]
    kinds = ("innocent_mark", "aa", "", "aa", "")
    return [
        Order(kinds[seed % 5] or f"{AA_IN}{settings[seed // 2 % len(settings)]}", "typical", seed, requests)
        for seed in seeds
    ]


def is_null(name: str) -> bool:
    """Whether nothing is wrong in it but that the traffic is another draw."""
    return name in NULLS or name.startswith(AA_IN)


def severities(fault: Fault) -> list[str]:
    """Those that differ: a switch is on or off."""
    values = fault.severity
    return list(WORDS) if len({values.mild, values.typical, values.strong}) == len(WORDS) else ["typical"]
