"""The rules for Prometheus: generated and committed, each with a runbook and with scenarios that promtool plays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from alerts import files
from alerts.muting import INHIBITIONS
from alerts.proving import check_rules, play_scenarios
from alerts.rules import alerting_rules, groups
from alerts.rules.rule import Alerting, grew, rate, select
from alerts.rules.scenario import Firing, shown
from alerts.rules.scenarios import scenarios
from alerts.runbooks import names, render, runbook
from engine_probe.errors import AlertMisuse
from store.metric_catalogue import HOTSPOTS, INGEST_COMMIT, TTFT, family_of
from tests import servers

ROOT = Path(__file__).parents[2]
RULES = alerting_rules()
NAMES = sorted({rule.name for rule in RULES})


def test_the_committed_files_are_what_is_made_today() -> None:
    """`kvscope alerts build` would change nothing."""
    assert files.outdated() == []


def test_the_page_of_runbooks_is_what_is_made_today() -> None:
    """docs/runbooks.md is what `python -m alerts.runbooks` prints."""
    assert (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8") == render()


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_scenario_in_which_it_fires_one_in_which_it_ends_and_one_that_is_quiet(name: str) -> None:
    """Fires, resolves, quiet: a rule that cannot fire and one that cannot be quiet are both noticed."""
    found = [scenario for scenario in scenarios() if scenario.alert == name]
    assert any(not scenario.fires for scenario in found)
    ends = [list(scenario.at.values()) for scenario in found if scenario.fires]
    assert ends
    assert all(states[0] == () and states[-1] == () for states in ends)


def test_no_scenario_is_of_an_alert_that_does_not_exist() -> None:
    """And every severity of an alert of several severities fires in some scenario."""
    assert {scenario.alert for scenario in scenarios()} == set(NAMES)
    fired = {
        (scenario.alert, firing.labels.get("severity"))
        for scenario in scenarios()
        for fires in scenario.at.values()
        for firing in fires
    }
    for rule in RULES:
        assert (rule.name, rule.severity) in fired or (rule.name, None) in fired, rule.name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.labels.get('window', rule.severity)}")
def test_every_rule_says_what_it_means_and_what_to_do(rule: Alerting) -> None:
    """Its runbook exists, says something to do, and its texts are sentences about the labels that it has."""
    text = runbook(rule.runbook)
    assert "\n- " in text
    assert rule.severity in ("critical", "warning", "info")
    assert rule.description.endswith((".", ".)"))
    assert not rule.summary.endswith(".")
    assert rule.todo or rule.cause


def test_every_metric_of_every_expression_is_in_the_catalogue() -> None:
    """Or is recorded by a rule of ours."""
    recorded = {rule.name for rules in groups().values() for rule in rules if not isinstance(rule, Alerting)}
    for rules in groups().values():
        for rule in rules:
            for name in re.findall(r"\b(?:[a-z_]+:)?kvscope_[a-z_]+(?::[a-z0-9_]+)?", rule.expr):
                if name not in recorded:
                    family_of(name)


def test_a_metric_or_a_label_that_does_not_exist_cannot_be_asked_for() -> None:
    """A misspelt label is an error when the rule is written, and no silence in production."""
    with pytest.raises(ValueError, match="no label wrker"):
        select(HOTSPOTS, wrker="w1")
    with pytest.raises(ValueError, match="no label tenant"):
        rate(HOTSPOTS, "5m", "tenant")
    with pytest.raises(ValueError, match="no part"):
        select(INGEST_COMMIT, TTFT.count)
    assert select(HOTSPOTS, worker="!~w.*", kind="!") == 'kvscope_hotspots{worker!~"w.*", kind!=""}'
    assert "unless" in grew(HOTSPOTS, "5m")


def test_texts_of_scenarios_are_filled_in_as_prometheus_does() -> None:
    """Labels and the value; a scenario that does not say the value of a text that shows it is refused."""
    rule = Alerting("A", "x", "{{ $labels.worker }}", "{{ $value | humanizePercentage }} at {{ $labels.worker }}.")
    assert shown(rule, rule.description, Firing({"worker": "w1"}, "12%")) == "12% at w1."
    with pytest.raises(ValueError, match="must say"):
        shown(rule, rule.description, Firing({"worker": "w1"}))


def test_links_lead_where_people_reach_the_collector() -> None:
    """`--links-to` is in every runbook link, and in Alertmanager's webhook."""
    made = files.render("https://kv.example")
    assert made[files.RULES_FILE].count("https://kv.example/runbooks/") == len(RULES)
    assert "https://kv.example/api/v1/alerts/webhook" in made[files.ALERTMANAGER_FILE]


def test_runbooks_of_everything_that_is_raised_exist() -> None:
    """Causes, rules, and what the evaluator raises; another name is refused with those that exist."""
    assert {"premature_eviction", "KvscopeHotspot", "KvscopeCause", "KvscopeContradiction"} <= set(names())
    assert all(runbook(name).startswith("##") for name in names())
    with pytest.raises(AlertMisuse, match="there is no runbook 'x'"):
        runbook("x")


def test_alertmanager_gets_the_inhibitions_that_labels_can_say() -> None:
    """The same data as the evaluator's; one that needs an annotation stays here."""
    rules = yaml.safe_load(files.render()[files.ALERTMANAGER_FILE])["inhibit_rules"]
    assert len(rules) == sum(rule.by_labels for rule in INHIBITIONS) == 4
    assert not any("explains" in matcher for rule in rules for matcher in rule["source_matchers"])
    assert rules[0] == {
        "source_matchers": ['role="hotspot"'],
        "target_matchers": ['role="symptom"'],
        "equal": ["worker"],
    }


@pytest.mark.server
def test_promtool_reads_the_rules_and_plays_every_scenario() -> None:
    """With Prometheus' own program: fires, quiet, resolves, with labels and texts."""
    servers.require("prometheus")
    for proof in [*check_rules(files.FOLDER), play_scenarios(files.FOLDER)]:
        assert proof.is_right, proof.said


def test_budgets_follow_the_goal() -> None:
    """At 99.9 % a tenth as much may be missed: 14.4 * 0.001 in an hour; the text says which goal it is."""
    of_goal = {
        rule.labels.get("window"): rule for rule in alerting_rules(0.999) if rule.name == "KvscopeErrorBudgetBurn"
    }
    assert "rate1h > 0.0144 and" in of_goal["1h"].expr
    assert "the goal of 99.9 % allows" in of_goal["1h"].description
    (usual,) = (rule for rule in RULES if rule.labels.get("window") == "1h")
    assert "rate1h > 0.144 and" in usual.expr


@pytest.mark.server
@pytest.mark.parametrize("slo_goal", [0.95, 0.999])
def test_promtool_plays_the_scenarios_of_another_goal(tmp_path: Path, slo_goal: float) -> None:
    """What fires at 20 times the budget and is quiet at half of it is worked out of the goal."""
    servers.require("prometheus")
    files.write(tmp_path, slo_goal=slo_goal)
    proof = play_scenarios(tmp_path)
    assert proof.is_right, proof.said


@pytest.mark.server
@pytest.mark.parametrize(
    ("right", "wrong"), [('kvscope_hotspots{kind!=""} > 0', 'kvscope_hotspots{kind!=""} > 9'), ("for: 2m", "for: 30m")]
)
def test_a_rule_that_is_wrong_fails_its_scenario(tmp_path: Path, right: str, wrong: str) -> None:
    """A threshold or a time that is changed in the file is noticed."""
    servers.require("prometheus")
    files.write(tmp_path)
    rules = tmp_path / files.RULES_FILE
    rules.write_text(rules.read_text().replace(right, wrong))
    assert rules.read_text().count(wrong)
    assert not play_scenarios(tmp_path).is_right


@pytest.mark.server
def test_the_real_servers_take_the_files() -> None:
    """Prometheus loads the rules, Alertmanager its configuration."""
    made = files.render()
    with servers.running_prometheus("rule_files: [r.yml]\n", {"r.yml": made[files.RULES_FILE]}) as url:
        assert servers.answers(f"{url}/api/v1/rules")
    with servers.running_alertmanager(made[files.ALERTMANAGER_FILE]) as url:
        assert servers.answers(f"{url}/api/v2/receivers")
