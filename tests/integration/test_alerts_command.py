"""`kvscope alerts`: files built and checked; alerts, silences and dead letters, from the store and from a collector that holds it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alerts import files
from store.alert_book import AlertBook
from store.alert_rows import Alert, Changes, Delivery
from store.open import open_store
from tests import servers
from tests.alert_receiver import mailbox
from tests.conftest import Ended
from tests.integration.collector_harness import running

Kvscope = Callable[..., Ended]
NOW = time.time_ns()
ALERT = Alert(
    "a1",
    "f1",
    "evaluator",
    "firing",
    {"alertname": "KvscopeHotspotFound", "role": "hotspot", "worker": "w1"},
    {"summary": "w1 is a hotspot", "report": "http://k/report"},
    starts_ns=NOW,
    claimed_until_ns=NOW,
    last_seen_ns=NOW,
    updated_ns=NOW,
)
SYMPTOM = replace(
    ALERT, alert_id="a2", fingerprint="f2", labels={"alertname": "Slow", "role": "symptom", "worker": "w1"}
)
DEAD = Delivery("m1", "chat", "{}", "dead", "application/json", "{}", NOW, NOW, attempts=9, message="404: gone")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a hotspot that fires, its symptom, and two dead letters."""
    made = tmp_path / "kvscope.duckdb"
    with open_store(str(made)) as store:
        AlertBook(store).save(
            Changes(alerts=(ALERT, SYMPTOM), deliveries=(DEAD, replace(DEAD, delivery_id="m2", receiver="gone")))
        )
    return made


def test_build_writes_what_check_finds_right(kvscope: Kvscope, tmp_path: Path) -> None:
    """Into a folder of one's own, with links of one's own; a file that was edited is named."""
    folder, links = tmp_path / "rules", "https://kv.example"
    built = kvscope("alerts", "build", "--dir", folder, "--links-to", links, "--json")
    assert built.code == 0
    assert [Path(name).name for name in json.loads(built.out)["files"]] == list(files.render())
    (folder / files.RULES_FILE).write_text("groups: []\n")
    edited = kvscope("alerts", "check", "--dir", folder, "--links-to", links)
    assert edited.code == 1
    assert f"kvscope.rules.yml: run `kvscope alerts build --dir {folder}`" in edited.out


@pytest.mark.server
def test_check_and_test_prove_the_rules(kvscope: Kvscope, tmp_path: Path) -> None:
    """promtool, and every expression on a live Prometheus; exit 0 and one document."""
    servers.require("prometheus")
    with servers.running_prometheus("{}\n") as url:
        checked = kvscope("alerts", "check", "--prometheus", url, "--json")
    document = json.loads(checked.out)
    assert (checked.code, document["right"]) == (0, True), document
    assert len(document["checks"]) > 30
    tested = kvscope("alerts", "test", "--json")
    assert (tested.code, json.loads(tested.out)["right"]) == (0, True)


@pytest.mark.server
def test_check_says_where_receivers_lead(kvscope: Kvscope, tmp_path: Path) -> None:
    """A receiver on this machine that is not allowed is wrong, with what to write; one that is allowed is right."""
    servers.require("prometheus")
    here = {"kind": "webhook", "url": "http://127.0.0.1:9/"}
    found = [{"name": "no", **here}, {"name": "yes", **here, "allow_networks": ["127.0.0.1/32"]}]
    (tmp_path / "r.yml").write_text(json.dumps({"receivers": found}))
    ended = kvscope("alerts", "check", "--receivers", tmp_path / "r.yml", "--json")
    no, yes = json.loads(ended.out)["checks"][-2:]
    assert (ended.code, no["is_right"], yes["is_right"]) == (1, False, True)
    assert "put 127.0.0.1/32 into allow_networks" in no["said"]


def test_without_promtool_it_is_said(kvscope: Kvscope, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit 3 and where it comes from; nothing passes as proved."""
    monkeypatch.setenv("PATH", str(tmp_path))
    tested = kvscope("alerts", "test")
    assert tested.code == 3
    assert "promtool is not installed here" in tested.err


def test_a_prometheus_that_does_not_answer_is_exit_3(
    kvscope: Kvscope, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its address."""
    servers.require("prometheus")
    ended = kvscope("alerts", "check", "--prometheus", f"http://127.0.0.1:{servers.free_port()}")
    assert ended.code == 3
    assert "no Prometheus answers" in ended.err


def test_list_says_what_fires_and_why_nobody_is_told(kvscope: Kvscope, path: Path) -> None:
    """Exit 1: a finding. The symptom is muted by the hotspot."""
    told = kvscope("alerts", "list", "--store", path)
    assert told.code == 1
    assert "w1 is a hotspot, since" in told.out
    assert "nobody is told: the hotspot at this worker is told already" in told.out
    document = json.loads(kvscope("alerts", "list", "--store", path, "--json").out)
    assert {alert["alert_id"]: alert["inhibited_by"] for alert in document["alerts"]} == {"a1": [], "a2": ["a1"]}
    assert kvscope("alerts", "list", "--store", path, "--state", "resolved").out == "no alerts\n"


@pytest.mark.parametrize("served", [False, True], ids=["store", "collector"])
def test_silence_and_replay_do_the_same_from_the_store_and_through_a_collector(
    kvscope: Kvscope, path: Path, served: bool
) -> None:
    """A silence is made, shown and ended; dead letters are listed, and go out again under their ids."""

    def story(*where: str) -> None:
        made = json.loads(
            kvscope("alerts", "silence", 'worker="w1"', "--for", "1h", "--by", "ann", *where, "--json").out
        )
        assert made["matchers"] == ['worker="w1"']
        assert made["ends_ns"] - made["starts_ns"] == 3_600_000_000_000
        shown = kvscope("alerts", "list", "--silences", *where)
        assert made["silence_id"] in shown.out
        muted = json.loads(kvscope("alerts", "list", *where, "--json").out)["alerts"]
        assert all(alert["silenced_by"] == [made["silence_id"]] for alert in muted)
        assert kvscope("alerts", "silence", "--end", made["silence_id"], *where).code == 0
        assert kvscope("alerts", "list", "--silences", *where).out == "no silences\n"
        assert kvscope("alerts", "silence", "--end", "nothing", *where).code == 2
        dead = kvscope("alerts", "list", "--deliveries", "dead", *where)
        assert "m1  chat  attempts 9  404: gone" in dead.out
        forgotten = kvscope("alerts", "discard", "m2", *where)
        assert (forgotten.code, forgotten.out) == (0, "1 dead letter forgotten\n")
        assert kvscope("alerts", "discard", "m2", *where).code == 2
        again: Any = json.loads(kvscope("alerts", "replay", "--all", *where, "--json").out)
        assert again == {"replayed": ["m1"]}
        missing = kvscope("alerts", "replay", "m9", *where)
        assert (missing.code, "no dead letter m9" in missing.err) == (2, True)

    if served:
        with running(path, alerts={"enabled": False}) as collector:
            story("--url", collector.url)
    else:
        story("--store", str(path))


@pytest.mark.parametrize(
    "words",
    [
        ["silence"],
        ["silence", "worker"],
        ["silence", "a=b", "--end", "x"],
        ["silence", "a=b", "--for", "soon"],
        ["replay"],
        ["replay", "m1", "--all"],
        ["discard"],
        ["discard", "m1", "--all"],
    ],
)
def test_words_that_make_no_sense_are_misuse(kvscope: Kvscope, path: Path, words: list[str]) -> None:
    """Exit 2, with what is expected."""
    assert kvscope("alerts", *words, "--store", path).code == 2


def test_a_receiver_can_be_tried(kvscope: Kvscope, tmp_path: Path) -> None:
    """An example message arrives, signed; a receiver that refuses is exit 3, a name that is none exit 2."""
    with mailbox() as box:
        config = {"name": "box", "kind": "webhook", "url": box.url, "allow_networks": ["127.0.0.0/8"], "secret": "s"}
        (tmp_path / "r.yml").write_text(json.dumps({"receivers": [config]}))
        sent = kvscope("alerts", "test", "--send", "box", "--receivers", tmp_path / "r.yml", "--json")
        assert sent.code == 0, sent.err
        assert json.loads(sent.out)["delivery_id"] == box.arrived[0].headers["webhook-id"]
        assert box.arrived[0].document["alerts"][0]["labels"]["alertname"] == "KvscopeExample"
        assert kvscope("alerts", "test", "--send", "nobody", "--receivers", tmp_path / "r.yml").code == 2
    gone = kvscope("alerts", "test", "--send", "box", "--receivers", tmp_path / "r.yml")
    assert (gone.code, "Delivery failed" in gone.err) == (3, True)


def test_alerts_are_narrowed_by_their_labels(path: Path) -> None:
    """A pattern chooses by a label; what is about no single worker stays."""
    with open_store(str(path)) as store:
        other = replace(ALERT, alert_id="a3", fingerprint="f3", labels={**ALERT.labels, "worker": "w2"})
        several = replace(ALERT, alert_id="a4", fingerprint="f4", labels={"alertname": "Slow", "worker": "several"})
        fleet = replace(ALERT, alert_id="a5", fingerprint="f5", labels={"alertname": "Late", "model": "m"})
        AlertBook(store).save(Changes(alerts=(other, several, fleet)))
    with running(path, alerts={"enabled": False}) as collector:

        def found(**params: str) -> set[str]:
            answer = collector.client.get("/api/v1/alerts", params=params)
            answer.raise_for_status()
            return {alert["alert_id"] for alert in answer.json()["alerts"]}

        assert found(worker_matches=".*") == found() == {"a1", "a2", "a3", "a4", "a5"}
        assert found(worker_matches="w1") == {"a1", "a2", "a4", "a5"}
        assert found(worker_matches="w2", model_matches="other") == {"a3", "a4"}
        assert collector.client.get("/api/v1/alerts", params={"worker_matches": "("}).status_code == 400


def test_the_goal_is_one_setting_of_rules_and_dashboards(
    tmp_path: Path, kvscope: Kvscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option, else the collector's own variable; files of another goal are not those of this one; nonsense is misuse."""
    rules, boards = tmp_path / "rules", tmp_path / "boards"
    kvscope("alerts", "build", "--dir", rules, "--slo-goal", "0.999")
    text = (rules / files.RULES_FILE).read_text()
    assert "the goal of 99.9 % allows" in text
    monkeypatch.setenv("KVSCOPE_SLO__GOAL", "0.995")
    kvscope("alerts", "build", "--dir", rules)
    assert "the goal of 99.5 % allows" in (rules / files.RULES_FILE).read_text()
    kvscope("dashboards", "build", "--out", boards)
    assert "99.5 % should meet it" in (boards / "kvscope-overview.json").read_text()
    assert files.outdated(rules) == [files.RULES_FILE, files.TESTS_FILE]
    assert files.outdated(rules, slo_goal=0.995) == []
    refused = kvscope("alerts", "build", "--dir", rules, "--slo-goal", "0.5")
    assert (refused.code, "slo.goal" in refused.err) == (2, True)
