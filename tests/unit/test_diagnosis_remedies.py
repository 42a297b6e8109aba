"""Which lines of a runbook are told, by the engines that served; and what flags of engines say of prefix caching."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.facts import WorkerFacts
from diagnosis.loading.caching_flags import caching_by_flags
from diagnosis.telling.remedies import engines_of, of_engines
from tests.factories import facts, request_facts

LINES = ["host: a", "vLLM: b", "SGLang: c", "llama.cpp: d", "Dynamo: e", "SGLang router: f", "router: g", "nothing: h"]


@pytest.mark.parametrize(
    ("engines", "left"),
    [
        ((), "abcdefgh"),
        (("kvscope",), "abcdefgh"),
        (("vllm",), "abefgh"),
        (("sglang", "kvscope"), "acefgh"),
        (("vllm", "dynamo"), "abegh"),
        (("llamacpp",), "adgh"),
        (("tgi",), "agh"),
        (("vllm", "llamacpp"), "abdefgh"),
    ],
)
def test_lines_of_other_engines_are_left_out(engines: tuple[str, ...], left: str) -> None:
    """What stands before an engine stays where it can; where no engine is known, all do."""
    assert "".join(line[-1] for line in of_engines(LINES, frozenset(engines))) == left


def test_engines_are_those_that_workers_of_both_windows_tell() -> None:
    """One that Dynamo serves tells that too; one that tells nothing is none."""
    bare = facts(request_facts(np.arange(2) * 1.0))
    base = replace(bare, workers=[WorkerFacts("w0", "vllm", flags={"served_by": "dynamo"}), WorkerFacts("w1")])
    assert engines_of(base, replace(bare, workers=[WorkerFacts("w0", "sglang")])) == {"vllm", "dynamo", "sglang"}
    assert engines_of(replace(bare, workers=[])) == frozenset()


@pytest.mark.parametrize(
    ("flag", "value", "is_on"),
    [
        ("--no-cache-prompt", "true", False),
        ("cache_prompt", "false", False),
        ("--cache-prompt", "1", True),
        ("enable_block_reuse", "True", True),
        ("disable_radix_cache", "true", False),
        ("total_slots", "4", None),
        ("no_cache_prompt", "often", None),
    ],
)
def test_flags_of_each_engine_tell_whether_caching_is_on(flag: str, value: str, is_on: bool | None) -> None:
    """A command line's spelling counts as well as the setting's own."""
    assert caching_by_flags({flag: value}) is is_on
