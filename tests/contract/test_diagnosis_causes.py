"""Every cause keeps the contract: documented, observable by name, with scenarios that it passes, and found where it lies."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diagnosis.cause import Cause, all_causes
from diagnosis.contradictions import ABOUT
from diagnosis.judge import judge
from diagnosis.ledger.rows import ROWS
from diagnosis.telling.remedies import ENGINES, LAYERS
from diagnosis.telling.verdict import Verdict
from diagnosis.windows import Chosen
from engine_probe.events import CANONICAL_SAMPLES, KINDS
from store.interface import Window
from tests.caching_scenarios import CACHING
from tests.cause_scenarios import SCENARIOS as ROOM_AND_LOAD
from tests.cause_scenarios import N, Pair, fuller, more_load, more_load_on_more_workers, names, worker
from tests.cost_scenarios import COSTS, few_seats, few_seats_in_a_full_pool, small_chunks, small_chunks_of_few
from tests.moves_scenarios import MOVES
from tests.routing_scenarios import ROUTING
from tests.telemetry_scenarios import TOLD

CHOSEN = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")
SCENARIOS = ROOM_AND_LOAD | COSTS | CACHING | ROUTING | MOVES
VLLM_OPTIONS = {
    # names of vLLM 0.32's own command line (vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py)
    "--api-server-count",
    "--attention-backend",
    "--block-size",
    "--compilation-config",
    "--cudagraph-capture-sizes",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--kv-events-config",
    "--kv-offloading-size",
    "--kv-transfer-config",
    "--long-prefill-token-threshold",
    "--mamba-block-size",
    "--mamba-cache-mode",
    "--max-cpu-loras",
    "--max-cudagraph-capture-size",
    "--max-lora-rank",
    "--max-loras",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-queued-reqs",
    "--max-num-seqs",
    "--no-enable-chunked-prefill",
    "--no-enable-prefix-caching",
    "--num-gpu-blocks-override",
    "--per-request-spec-decode-metrics",
    "--prefix-caching-hash-algo",
    "--speculative-config",
}
SGLANG_OPTIONS = {
    # names of SGLang's server arguments (python/sglang/srt/server_args.py)
    "--attention-backend",
    "--disable-cuda-graph",
    "--disable-radix-cache",
    "--hicache-ratio",
    "--hicache-size",
    "--hicache-storage-backend",
    "--hicache-storage-prefetch-policy",
    "--hicache-write-policy",
    "--max-loras-per-batch",
    "--max-queued-requests",
    "--speculative-num-draft-tokens",
    "--speculative-num-steps",
}
OTHER_OPTIONS = {
    # SGLang's router (sglang_router.launch_router) and server (sglang.launch_server), Dynamo's front end (--router-mode kv)
    "--balance-abs-threshold",
    "--balance-rel-threshold",
    "--cache-threshold",
    "--chunked-prefill-size",
    "--disaggregation-bootstrap-port",
    "--disaggregation-ib-device",
    "--disaggregation-transfer-backend",
    "--max-running-requests",
    "--mem-fraction-static",
    "--no-router-kv-events",
    "--num-reserved-decode-tokens",
    "--policy",
    "--router-kv-overlap-score-credit",
    "--router-mode",
    "--router-replica-sync",
    "--router-temperature",
}
LLAMACPP_OPTIONS = {
    # names of llama-server's command line (llama.cpp, tools/server/README.md)
    "--cache-prompt",
    "--ctx-size",
    "--flash-attn",
    "--n-gpu-layers",
    "--no-cache-prompt",
    "--parallel",
    "--threads",
}
VALUES = {
    # of options that take one of a few: vllm/config/cache.py of 0.32, SGLang's server arguments and router, Dynamo's front end
    "--hicache-storage-prefetch-policy": {"best_effort", "wait_complete", "timeout"},
    "--hicache-write-policy": {"write_back", "write_through", "write_through_selective"},
    "--kv-cache-dtype": {"auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"},
    "--mamba-cache-mode": {"all", "align", "none"},
    "--policy": {"random", "round_robin", "cache_aware", "power_of_two"},
    "--prefix-caching-hash-algo": {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"},
    "--router-mode": {"round-robin", "random", "power-of-two", "kv", "direct", "least-loaded"},
}
NO_VALUES = {"and", "which"}
"""Words after such an option that go on with the sentence."""
OF_ENGINES = set(ENGINES.values()) | set(LAYERS)
OURS = {"--policy", "--blocks", "--store", "--run"}
"""Options of `kvscope capacity`, which experiments may name."""


pytestmark = pytest.mark.usefixtures("few_replicates")


causes = pytest.mark.parametrize("cause", all_causes().values(), ids=list(all_causes()))


def judged(made: Pair) -> Verdict:
    base, suspect, metric = made
    return judge(base, suspect, CHOSEN, metric, "0.99")


@causes
def test_docstring_is_a_runbook(cause: Cause) -> None:
    """One sentence, then why, what would refute it, what to do, and the experiment that would show it."""
    assert cause.summary().endswith((".", ":")) or len(cause.summary()) > 20
    for title in ("Why", "Refuted by", "Experiment"):
        assert len(cause.paragraph(title)) > 20, title
    assert cause.remedies()
    for remedy in cause.remedies():
        whom, _, what = remedy.partition(": ")
        assert whom in OF_ENGINES | {"fleet", "router", "application", "host"}, remedy
        assert what, remedy


@causes
def test_remedies_name_settings_that_exist(cause: Cause) -> None:
    """An option that is told to a person at night is one that the engine takes."""
    named = set(re.findall(r"--[a-z][a-z-]+", cause.text))
    assert named <= VLLM_OPTIONS | SGLANG_OPTIONS | LLAMACPP_OPTIONS | OTHER_OPTIONS | OURS


@causes
def test_remedies_name_values_that_exist(cause: Cause) -> None:
    """An option that takes one of a few values is told with one of them, or with none."""
    for option, told, other in re.findall(r"(--[a-z][a-z-]+) ([\w-]+)(?: or ([\w-]+))?", " ".join(cause.remedies())):
        if option in VALUES and told not in NO_VALUES:
            assert told in VALUES[option], f"{option} {told}"
            assert other == "" or other in VALUES[option], f"{option} {told} or {other}"


@causes
def test_an_option_stands_in_a_line_of_its_engine(cause: Cause) -> None:
    """A line for fleet, host or application names no engine and no option, for it is told whatever serves; each cause has such a line."""
    general = [remedy for remedy in cause.remedies() if remedy.partition(":")[0] not in OF_ENGINES]
    assert general
    for remedy in general:
        assert not re.search(r"--[a-z]", remedy), remedy
        assert not any(f"{name}:" in remedy for name in OF_ENGINES), remedy
    for remedy in cause.remedies():
        if remedy.startswith("vLLM: "):
            assert set(re.findall(r"--[a-z][a-z-]+", remedy)) <= VLLM_OPTIONS, remedy
        if remedy.startswith("llama.cpp: "):
            assert set(re.findall(r"--[a-z][a-z-]+", remedy)) <= LLAMACPP_OPTIONS, remedy


@causes
def test_needs_are_names_of_the_contract(cause: Cause) -> None:
    """What a cause asks for can be seen at all: columns of the event contract, block changes, canonical samples."""
    for need in cause.needs:
        for option in need.split("|"):
            kind, _, name = option.partition(".")
            assert kind in KINDS, option
            columns = {c.name for c in KINDS[kind]}
            fields = {f"{c.name}_{field}" for c in KINDS[kind] for field, _ in c.fields}
            changes = {choice for c in KINDS[kind] if c.name == "change" for choice in c.choices}
            known = {"sample": set(CANONICAL_SAMPLES), "block": changes}.get(kind, columns | fields)
            assert name == "" or name in known, option


@causes
def test_rows_are_rows_of_the_ledger(cause: Cause) -> None:
    """A cause claims seconds that the ledger can hold; one that is about what is told claims none."""
    assert bool(cause.rows) != (cause.name in ABOUT)
    assert set(cause.rows) <= set(ROWS)


def test_every_cause_has_scenarios() -> None:
    """A new cause comes with its four pairs."""
    assert set(SCENARIOS) | set(TOLD) == set(all_causes())


@pytest.mark.parametrize("name", SCENARIOS)
def test_fires(name: str) -> None:
    """Alone in the windows, it is the first cause, and owns the share of the change that was worked by hand."""
    verdict = judged(SCENARIOS[name].fires())
    assert verdict.status == "explained", verdict.verdict
    assert names(verdict.causes)[0] == name, verdict.verdict
    assert verdict.causes[0].evidence
    owned = sum(row.mean_s for row in verdict.attribution if row.cause in verdict.causes[0].rows)
    assert owned / verdict.delta.mean_s == pytest.approx(SCENARIOS[name].share, abs=0.06)


@pytest.mark.parametrize("name", TOLD)
def test_what_is_told_wrong_is_named_though_no_latency_moved(name: str) -> None:
    """It is the only cause, owns no seconds, and the sentence says it; the verdict on the latency is as it would be."""
    verdict = judged(TOLD[name].fires())
    assert verdict.status == "no_change"
    assert names(verdict.causes) == [name]
    (cause,) = verdict.causes
    assert (cause.share_p99, cause.mean_s, list(cause.rows)) == (None, 0.0, [])
    assert cause.confidence_word == "high"
    assert cause.evidence[0]["value"] is not None
    assert "What is told contradicts itself: suspect: " in verdict.verdict


@pytest.mark.parametrize("name", SCENARIOS | TOLD)
def test_quiet_with_a_number(name: str) -> None:
    """Where it is not present it says so with a number, and is not named."""
    verdict = judged((SCENARIOS | TOLD)[name].quiet())
    assert name not in names(verdict.causes)
    because = next(row["because"] for row in verdict.excluded if row["cause"] == name)
    assert re.search(r"\d", because), because


@pytest.mark.parametrize("name", SCENARIOS | TOLD)
def test_edge_is_not_blamed(name: str) -> None:
    """Close to firing, but something else is the reason: not named, and excluded or said to be unobservable."""
    verdict = judged((SCENARIOS | TOLD)[name].edge())
    assert name not in names(verdict.causes), verdict.verdict
    assert name in names(verdict.excluded) or name in names(verdict.not_observable)


def test_load_is_what_each_worker_gets() -> None:
    """Twice the arrivals on twice the workers are no more load; as many arrivals on half the workers are."""
    base, suspect, metric = more_load_on_more_workers()
    verdict = judged((base, suspect, metric))
    assert "load_step" not in names(verdict.causes)
    because = next(row["because"] for row in verdict.excluded if row["cause"] == "load_step")
    assert "0.503 requests/s arrived at each worker in the suspect window" in because
    assert "2 and 1 workers served" in because
    fewer = judged((suspect, more_load()[1], metric))
    assert "load_step" not in names(fewer.causes), "the queue is as long in both"
    busy, calm = (
        more_load()[1],
        replace(base, requests=replace(base.requests, worker=np.arange(N) % 2, worker_names=("w0", "w1"))),
    )
    assert names(judged((calm, busy, metric)).causes)[0] == "load_step"


def test_few_seats_that_requests_wait_for_began() -> None:
    """60 requests wait for one of 8 seats, none for one of 32: no two draws of one traffic differ so."""
    assert [cause.began for cause in judged(few_seats()).causes if cause.cause == "small_batch"] == [True]


@pytest.mark.parametrize(("before", "now", "began"), [(2, 8, True), (8, 8, False), (None, None, False)])
def test_batches_fuller_than_there_were_seats_began(before: int | None, now: int | None, began: bool) -> None:
    """Two at once and then five, each of 60 requests: with two seats before none could be as full; with eight chance might fill them."""
    base, suspect, metric = fuller()
    if before is not None and now is not None:
        base, suspect = replace(base, workers=[worker(seats=before)]), replace(suspect, workers=[worker(seats=now)])
    named = judged((base, suspect, metric)).causes[0]
    assert (named.cause, named.began) == ("decode_bandwidth", began)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({"max_num_batched_tokens": "2048"}, {"max_num_batched_tokens": "512"}, True),
        ({"max_num_batched_tokens": "512"}, {"max_num_batched_tokens": "512"}, False),
        (
            {"max_num_batched_tokens": "512", "long_prefill_token_threshold": "256"},
            {"max_num_batched_tokens": "512", "long_prefill_token_threshold": "64"},
            True,
        ),
        ({}, {}, True),
    ],
)
def test_a_budget_that_is_as_large_is_filled_by_something_else(
    before: dict[str, str], now: dict[str, str], named: bool
) -> None:
    """160 tokens in 4 steps in place of 1: by a lower budget or threshold, or nobody tells; at the same settings fuller steps cut prompts too."""
    base, suspect, metric = small_chunks()
    base, suspect = (
        replace(each, workers=[replace(each.workers[0], flags=flags)])
        for each, flags in ((base, before), (suspect, now))
    )
    assert ("chunk_budget" in names(judged((base, suspect, metric)).causes)) is named


@pytest.mark.parametrize(("before", "now", "named"), [(2048.0, 512.0, True), (512.0, 512.0, False)])
def test_the_largest_step_tells_a_budget_that_nobody_tells(before: float, now: float, named: bool) -> None:
    """160 tokens in 4 steps in place of 1, while the largest step of 60 computed as many tokens as before, or a quarter."""
    base, suspect, metric = small_chunks()
    sized = []
    for each, largest in ((base, before), (suspect, now)):
        assert each.steps is not None
        tokens = {"prefill_tokens": np.full(N, largest - 8.0), "decode_tokens": np.full(N, 8.0)}
        sized.append(replace(each, steps=replace(each.steps, numbers={**each.steps.numbers, **tokens})))
    assert ("chunk_budget" in names(judged((sized[0], sized[1], metric)).causes)) is named


def test_chunks_are_told_by_the_prompts_that_take_several() -> None:
    """On average a step computed 464 tokens and now 273, a ratio of 1.7; of the long prompts it is 3,200 and 400: the budget cuts those."""
    named = next(cause for cause in judged(small_chunks_of_few()).causes if cause.cause == "chunk_budget")
    assert any("400 tokens at a time (3,200)" in evidence["statement"] for evidence in named.evidence)


def test_few_seats_are_not_blamed_where_there_was_no_room_for_more() -> None:
    """95 % of the blocks were in use while requests waited for a seat: the number is said."""
    verdict = judged(few_seats_in_a_full_pool())
    because = next(row["because"] for row in verdict.excluded if row["cause"] == "small_batch")
    assert "95 % of the blocks were in use" in because


@pytest.mark.parametrize("name", [name for name, made in SCENARIOS.items() if made.blind is not None])
def test_not_observable_is_said(name: str) -> None:
    """Where its needs were not seen it says which, and claims nothing."""
    blind = SCENARIOS[name].blind
    assert blind is not None  # those without are left out above
    verdict = judged(blind())
    assert name not in names(verdict.causes)
    row = next(row for row in verdict.not_observable if row["cause"] == name)
    assert "not observable here" in row["because"]


def test_a_cause_dropped_into_the_folder_is_found(tmp_path: Path) -> None:
    """One file is all it takes: discovery walks the folder."""
    (tmp_path / "solar_flare.py").write_text(
        "from diagnosis.cause import cause\n\n\n"
        '@cause("solar_flare", needs=("sample.gpu_util",), rows=("unexplained",))\n'
        "def solar_flare(case):\n"
        '    """The sun did it.\n\n    Why: bits flip.\n\n    Refuted by: night.\n\n    Remedy:\n    - fleet: wait\n    """\n'
    )
    script = (
        f"import diagnosis.causes as c; c.__path__.append({str(tmp_path)!r})\n"
        "from diagnosis.cause import all_causes\n"
        "found = all_causes()['solar_flare']\n"
        "print(found.summary(), found.paragraph('Why'), found.remedies(), found.missing(frozenset()), 'slow_steps' in all_causes())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "The sun did it. bits flip. ['fleet: wait'] ['sample.gpu_util'] True"
