"""Words of the command line: arms, settings, loads, lengths; and every way in which they make no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from collector.experiments.arm_settings import known_keys, parse_arm, parse_settings, virtual_arm
from collector.experiments.folder import claim, fresh
from collector.experiments.options import Shared, lengths, loads, one_load, slo_of
from collector.experiments.scenarios import PLAIN, SCENARIOS, find_scenario
from collector.experiments.setting_up import arms_of, runner_of
from collector.experiments.workload import Workload
from engine_probe.errors import UsageError
from tests.conftest import Ended


def test_an_arm_is_a_name_and_settings() -> None:
    """`start=cold` is no setting of the engine, but how it begins."""
    arm = parse_arm("canary:max-num-seqs=64,version=1.1,start=cold")
    assert (arm.name, dict(arm.settings), arm.is_warm) == ("canary", {"max_num_seqs": "64", "version": "1.1"}, False)
    assert parse_arm("control:").is_warm


def test_settings_reach_the_part_that_they_are_of() -> None:
    """Engine, scheduler, router, fleet, bookkeeping, and the names that engines use for them."""
    arm = virtual_arm(
        {
            "cache": "off",
            "max_num_seqs": "8",
            "routing": "sticky",
            "policy": "shortest",
            "workers": "3",
            "num_gpu_blocks": "4_000",
            "lookup_s": "0.01",
            "ttl_s": "5",
        },
        "--set",
    )
    assert not arm.fleet.engine.prefix_caching
    assert arm.fleet.engine.scheduler.max_num_seqs == 8
    assert arm.fleet.engine.scheduler.policy == "shortest"
    assert arm.fleet.router.policy == "sticky"
    assert (arm.fleet.num_workers, arm.fleet.num_blocks) == (3, 4000)
    assert arm.costs.lookup_s == 0.01
    assert arm.fleet.engine.ttl_s == 5.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cash": "off"}, "did you mean cache"),
        ({"zzz": "1"}, "known: "),
        ({"cache": "maybe"}, "cache is 'maybe'; expected on or off"),
        ({"max_num_seqs": "many"}, "expected a whole number"),
        ({"max_num_seqs": "0"}, "expected 1 or more"),
        ({"lookup_s": "nan"}, "expected a number"),
        ({"lookup_s": "-1"}, "expected 0 or more"),
        ({"workers": "0"}, "serves nobody"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"hardware": "abacus"}, "abacus"),
        ({"ttl_s": "0"}, "expected above 0"),
        ({"preemption": "prayer"}, "prayer"),
    ],
)
def test_a_setting_that_makes_no_sense_names_its_arm(settings: dict[str, str], words: str) -> None:
    """And says what would."""
    with pytest.raises(UsageError, match="arm D: ") as told:
        virtual_arm(settings, "arm D")
    assert words in told.value.message


@pytest.mark.parametrize(
    "text", ["", "canary", ":cache=on", "x:cache", "x:=on", "x:cache=", "x:cache=on,cache=off", "x:start=hot"]
)
def test_an_arm_that_is_none_is_refused(text: str) -> None:
    """Each says what was expected."""
    with pytest.raises(UsageError):
        parse_arm(text)


def test_known_keys_are_told_once() -> None:
    """What the error lists is what is taken."""
    keys = known_keys()
    assert len(keys) == len(set(keys))
    assert {"cache", "routing", "max_num_seqs", "num_blocks", "lookup_s", "model", "version"} <= set(keys)


def test_set_is_twice_the_same_key() -> None:
    """A typo that would silently win."""
    with pytest.raises(UsageError, match="says blocks twice"):
        parse_settings(["blocks=1", "blocks=2"], "--set")


def test_the_factorial_is_over_the_scenarios_settings() -> None:
    """Of the founding case B routes in turn without a cache, D by prefix with one; both have eight workers."""
    arms = {arm.name: arm for arm in arms_of(SCENARIOS["founding"], [], ["tp=2"], None, is_virtual=True)}
    assert arms["B"].settings["routing"] == "round_robin"
    assert arms["D"].settings["routing"] == "prefix_affinity"
    assert arms["D"].settings["workers"] == arms["B"].settings["workers"] == "8"
    assert arms["A"].settings["tp"] == "2"


def test_arms_of_ones_own_begin_with_the_cache_on_and_override_it_by_any_name() -> None:
    """`prefix_caching=off` is `cache=off`."""
    control, other = arms_of(
        SCENARIOS["founding"], ["control:", "off:prefix_caching=off,routing=random"], [], None, is_virtual=True
    )
    assert control.settings["cache"] == "on"
    assert control.settings["routing"] == "prefix_affinity"
    assert other.settings["cache"] == "off"
    assert other.settings["routing"] == "random"


def test_one_arm_alone_is_refused() -> None:
    """It has nothing to be compared with."""
    with pytest.raises(UsageError, match="two or more"):
        arms_of(PLAIN, ["canary:"], [], None, is_virtual=True)


def test_an_unknown_scenario_names_the_known_ones() -> None:
    """Both built-in cases."""
    with pytest.raises(UsageError, match="founding, founding-capacity"):
        find_scenario("fonding")


@pytest.mark.parametrize(
    ("asked", "load"),
    [
        (Shared(), {"rate": 1.0, "concurrency": 2}),
        (Shared(speed=2.0), {}),
        (Shared(trace=Path("/no/such/trace")), {}),
        (Shared(requests=0), {}),
        (Shared(warmup=-1), {}),
        (Shared(), {"concurrency": 0}),
        (Shared(arrivals="never"), {}),
        (Shared(groups=0), {}),
        (Shared(shared_tokens=-1), {}),
        (Shared(shared_ratio=1.5), {}),
        (Shared(own_tokens="9-3"), {}),
        (Shared(own_tokens="few"), {}),
        (Shared(output_tokens="0"), {}),
        (Shared(), {"rate": -1.0}),
    ],
)
def test_what_is_asked_makes_sense(asked: Shared, load: dict[str, Any]) -> None:
    """Each option on its own, and those that exclude each other."""
    with pytest.raises(UsageError):
        asked.over(Workload(), **load)


def test_both_verbs_take_what_they_share(kvscope: Callable[..., Ended]) -> None:
    """Every field of `Shared` is an option of both, under the help of one."""
    for verb in ("run", "sweep"):
        told = kvscope("experiment", verb, "--help").out
        for name in fields(Shared):
            option = "--" + {"settings": "set"}.get(name.name, name.name).replace("_", "-")
            assert option in told, (verb, option)


def test_a_trace_has_its_own_arrivals(tmp_path: Path) -> None:
    """Options that would make up others are refused by name."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    with pytest.raises(UsageError, match="leave --own-tokens, --rate out"):
        Shared(trace=trace, own_tokens="64").over(Workload(), rate=3.0)


def test_loads_are_numbers_above_zero() -> None:
    """Sorted, each once; whole where they count requests."""
    assert loads("4,1,2,2", "--rate", whole=False) == [1.0, 2.0, 4.0]
    assert loads(None, "--rate", whole=False) is None
    for text in ("", "0", "-1", "inf", "nan", "1,,2", "x"):
        with pytest.raises(UsageError, match="--rate"):
            loads(text, "--rate", whole=False)
    with pytest.raises(UsageError, match="whole numbers"):
        loads("1.5", "--concurrency", whole=True)
    with pytest.raises(UsageError, match="experiment sweep"):
        one_load("1,2", "--rate", whole=False)


def test_lengths_are_one_number_or_two() -> None:
    """`64` is fixed."""
    assert (lengths("64", "--own-tokens").low, lengths("64-512", "--own-tokens").high) == (64, 512)


def test_limits_are_those_given_else_of_interactive_traffic() -> None:
    """Zero and less are refused."""
    assert slo_of(None, None).ttft_s == 1.0
    assert slo_of(0.5, None).tpot_s is None
    with pytest.raises(UsageError, match="--slo-tpot"):
        slo_of(None, 0.0)


def test_options_of_an_endpoint_without_one_are_refused() -> None:
    """They would be left out silently."""
    with pytest.raises(UsageError, match="--endpoint-off belongs"):
        runner_of(Shared(), endpoint_off="http://x")
    with pytest.raises(UsageError, match="--prompt belongs"):
        runner_of(Shared(prompt="chat"))
    with pytest.raises(UsageError, match="--insecure belongs"):
        runner_of(Shared(insecure=True))
    with pytest.raises(UsageError, match="--jobs"):
        runner_of(Shared(jobs=0))


@pytest.mark.parametrize(
    ("url", "prompt", "vocab", "timeout", "words"),
    [
        ("ftp://x", "words", 1000, 1.0, "HTTP address"),
        ("http://x:99999", "words", 1000, 1.0, "99999"),
        ("http://x", "poems", 1000, 1.0, "known: words"),
        ("http://x", "tokens", 50, 1.0, "--vocab"),
        ("http://x", "words", 1000, 0.0, "--timeout"),
    ],
)
def test_an_endpoint_that_makes_no_sense_is_refused_before_it_is_asked(
    url: str, prompt: str, vocab: int, timeout: float, words: str
) -> None:
    """Address, prompts and time."""
    with pytest.raises(UsageError) as told:
        runner_of(Shared(endpoint=url, prompt=prompt, vocab=vocab, timeout=timeout))
    assert words in told.value.message


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    """Nothing is removed but what an earlier experiment listed; a list that leads out of the folder is not followed."""
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"mine\.txt"):
        fresh(tmp_path)
    assert (tmp_path / "mine.txt").exists()
    out = tmp_path / "out"
    claim(fresh(out), ["A", "../mine.txt", ".", ".."])
    (out / "A" / "1").mkdir(parents=True)
    fresh(out)
    assert list(out.iterdir()) == []
    assert (tmp_path / "mine.txt").exists()


def test_an_experiments_list_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """And the folder stays as it is."""
    (tmp_path / "experiment.json").write_text("{")
    with pytest.raises(UsageError, match="another --out"):
        fresh(tmp_path)
