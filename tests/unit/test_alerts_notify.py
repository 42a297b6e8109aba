"""Who is told what and when: grouping, waiting, deduplication, silences, inhibition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alerts.matchers import fingerprint, match_all, parse_matcher, parse_matchers
from alerts.muting import Muted, muting
from alerts.notify import MOST_ALERTS, NS, Message, Plan, plan
from alerts.receivers import Receiver
from engine_probe.errors import AlertMisuse
from store.alert_rows import Alert, Group, Silence

BOX = Receiver(name="box", kind="webhook", url="https://box.example/", group_wait_s=10, group_interval_s=60)
START = 1_000 * NS


def _alert(alert_id: str, state: Any = "firing", **labels: str) -> Alert:
    named = {"alertname": "Slow", **labels}
    ends = None if state == "firing" else START
    return Alert(alert_id, fingerprint(named), "evaluator", state, named, {}, START, START, START, START, ends_ns=ends)


class Told:
    """Plans one after the other, each with what the receivers knew after the one before."""

    def __init__(self, receiver: Receiver = BOX) -> None:
        self.receiver = receiver
        self.groups: dict[tuple[str, str], Group] = {}

    def at(self, seconds: float, *alerts: Alert, muted: dict[str, Muted] | None = None) -> list[list[str]]:
        """Messages `seconds` after START: each a list of `state alert_id`."""
        found = {alert.alert_id: Muted() for alert in alerts} | (muted or {})
        made: Plan = plan([self.receiver], alerts, found, self.groups.values(), START + round(seconds * NS))
        self.groups |= {(group.receiver, group.group_key): group for group in made.groups}
        for key in made.forgotten:
            del self.groups[key]
        self.last: Sequence[Message] = made.messages
        return [[f"{alert.state} {alert.alert_id}" for alert in message.alerts] for message in made.messages]


def test_the_first_message_waits_for_company_and_is_one() -> None:
    """Two alerts 5 s apart, group_wait 10 s: one message with both; nothing more while nothing changes."""
    told = Told()
    one, two = _alert("a"), _alert("b", cause="x")
    assert told.at(0, one) == []
    assert told.at(5, one, two) == []
    assert told.at(10, one, two) == [["firing a", "firing b"]]
    assert told.at(100, one, two) == []


def test_what_comes_later_waits_for_the_group_interval() -> None:
    """A third alert 20 s after the first message is told 60 s after it, with the two that fire still."""
    told = Told()
    told.at(0, _alert("a"))
    told.at(10, _alert("a"))
    assert told.at(30, _alert("a"), _alert("c", cause="x")) == []
    assert told.at(70, _alert("a"), _alert("c", cause="x")) == [["firing a", "firing c"]]


def test_the_same_is_told_again_after_the_repeat_interval() -> None:
    """Four hours by default, under another delivery id: it is another message."""
    told = Told()
    told.at(0, _alert("a"))
    told.at(10, _alert("a"))
    first = told.last[0].delivery_id
    assert told.at(10 + 14_399, _alert("a")) == []
    assert told.at(10 + 14_400, _alert("a")) == [["firing a"]]
    assert told.last[0].delivery_id != first


def test_an_end_is_told_once_and_the_group_forgotten() -> None:
    """Resolved in the next message; then nothing of the group is left."""
    told = Told()
    told.at(0, _alert("a"))
    told.at(10, _alert("a"))
    assert told.at(80, _alert("a", "resolved")) == [["resolved a"]]
    assert told.last[0].status == "resolved"
    assert told.groups == {}
    assert told.at(200, _alert("a", "resolved")) == []


def test_an_alert_that_ended_before_anybody_was_told_is_not_told() -> None:
    """It came and went within group_wait."""
    told = Told()
    told.at(0, _alert("a"))
    assert told.at(10, _alert("a", "resolved")) == []
    assert told.groups == {}


def test_a_worse_severity_is_news() -> None:
    """warning, then critical: told after the group interval, not after the repeat interval."""
    told = Told()
    told.at(0, _alert("a", severity="warning"))
    told.at(10, _alert("a", severity="warning"))
    assert told.at(80, _alert("a", severity="critical")) == [["firing a"]]
    assert told.at(160, _alert("a", severity="critical")) == []


def test_a_muted_alert_is_not_told_but_its_end_is_if_its_beginning_was() -> None:
    """Silenced from the start: nothing. Silenced after it was told: no repeat, but the end, or an incident stays open for ever."""
    told = Told()
    silenced = {"a": Muted(("s",))}
    assert told.at(0, _alert("a"), muted=silenced) == []
    assert told.at(10, _alert("a"), muted=silenced) == []
    told.at(20, _alert("a"))
    assert told.at(30, _alert("a")) == [["firing a"]]
    assert told.at(30 + 14_400, _alert("a"), muted=silenced) == []
    assert told.at(15_000, _alert("a", "resolved"), muted=silenced) == [["resolved a"]]


def test_groups_are_by_the_labels_asked_for_and_receivers_choose_by_matchers() -> None:
    """Two workers are two messages; one that does not match is none."""
    told = Told(
        Receiver(name="box", kind="webhook", url="https://b.example/", group_wait_s=0, match=('severity="critical"',))
    )
    found = [
        _alert(name, severity=severity, worker=worker)
        for name, severity, worker in (("a", "critical", "w1"), ("b", "critical", "w2"), ("c", "warning", "w3"))
    ]
    assert sorted(told.at(0, *found)) == [["firing a"], ["firing b"]]
    assert {message.group_labels["worker"] for message in told.last} == {"w1", "w2"}


def test_a_receiver_hears_of_the_origins_it_asked_for() -> None:
    """What Alertmanager sent goes to nobody by default: it is told by Alertmanager already."""
    told = Told(replace_receiver(group_wait_s=0))
    assert told.at(0, replace(_alert("a"), origin="alertmanager")) == []
    told = Told(replace_receiver(group_wait_s=0, origins=("alertmanager",)))
    assert told.at(0, replace(_alert("a"), origin="alertmanager"), _alert("b")) == [["firing a"]]


def replace_receiver(**fields: Any) -> Receiver:
    return Receiver(**{"name": "box", "kind": "webhook", "url": "https://box.example/", **fields})


def test_ends_that_nobody_wants_are_forgotten() -> None:
    """send_resolved off: no message, and nothing is kept of it."""
    told = Told(replace_receiver(group_wait_s=0, send_resolved=False))
    assert told.at(0, _alert("a")) == [["firing a"]]
    assert told.at(400, _alert("a", "resolved")) == []
    assert told.groups == {}


def test_a_receiver_that_is_gone_is_forgotten() -> None:
    """Its groups leave the book when it leaves the file."""
    gone = Group("old", "{}", {}, START)
    assert plan([BOX], [], {}, [gone], START).forgotten == (("old", "{}"),)


def test_a_flood_is_one_message_of_a_hundred_and_a_count() -> None:
    """130 alerts: 100 shown, 30 counted."""
    told = Told(replace_receiver(group_wait_s=0))
    told.at(0, *(_alert(f"a{n:03}") for n in range(130)))
    (message,) = told.last
    assert (len(message.alerts), message.truncated) == (MOST_ALERTS, 30)


def test_what_did_not_fit_is_told_next_and_ended_ones_first() -> None:
    """130 alerts at 100 a message: the other 30 are news after the group interval, and so is every end."""
    told = Told(replace_receiver(group_wait_s=0, group_interval_s=60))
    flood = [_alert(f"a{n:03}") for n in range(130)]
    (first,) = told.at(0, *flood)
    (second,) = told.at(60, *flood)
    assert {f"firing a{n:03}" for n in range(130)} == {*first, *second}
    gone = [replace(alert, state="resolved", ends_ns=START) for alert in flood]
    (third,) = told.at(120, *gone)
    (fourth,) = told.at(180, *gone)
    assert sorted([*third, *fourth]) == [f"resolved a{n:03}" for n in range(130)]
    assert told.groups == {}


def test_who_gets_a_message_an_alert_gets_all_of_them() -> None:
    """PagerDuty: nothing is counted instead of told."""
    told = Told(replace_receiver(group_wait_s=0, kind="pagerduty", routing_key="k"))
    told.at(0, *(_alert(f"a{n:03}") for n in range(130)))
    (message,) = told.last
    assert (len(message.alerts), message.truncated) == (130, 0)


def test_an_end_is_told_though_the_severity_fell_below_what_is_asked_for() -> None:
    """A receiver of critical alone opened an incident; the alert became a warning, which is not repeated, and ended."""
    told = Told(replace_receiver(group_wait_s=0, group_interval_s=0, match=('severity="critical"',)))
    assert told.at(0, _alert("a", severity="critical")) == [["firing a"]]
    assert told.at(20_000, _alert("a", severity="warning")) == []
    assert told.at(20_100, _alert("a", "resolved", severity="warning")) == [["resolved a"]]
    assert told.groups == {}


def test_an_alert_stays_in_the_group_in_which_it_was_told() -> None:
    """Most slow requests were at several workers, then at w1, whose hotspot silences the symptom: the end is told all the same."""
    told = Told(replace_receiver(group_wait_s=0, group_interval_s=0))
    assert told.at(0, _alert("a", worker="several")) == [["firing a"]]
    assert told.at(60, _alert("a", worker="w1"), muted={"a": Muted((), ("h",))}) == []
    assert told.at(120, _alert("a", "resolved", worker="w1"), muted={"a": Muted((), ("h",))}) == [["resolved a"]]
    assert told.groups == {}


def test_a_clock_that_is_set_back_keeps_nobody_waiting() -> None:
    """Told by a clock that was a day ahead; what is new an hour later is told then, not tomorrow."""
    told = Told()
    told.at(86_400, _alert("a"))
    told.at(86_410, _alert("a"))
    assert told.at(3_600, _alert("a"), _alert("b", cause="x")) == [["firing a", "firing b"]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["firing", "resolved", "muted"])), max_size=40))
def test_every_beginning_that_was_told_gets_its_end_and_no_end_comes_alone(story: list[tuple[str, str]]) -> None:
    """Over any story of three alerts: of each, told beginnings and ends alternate, and an end told means a beginning was."""
    told = Told(replace_receiver(group_wait_s=0, group_interval_s=0))
    now: dict[str, str] = {}
    open_: set[str] = set()
    for step, (name, word) in enumerate(story):
        now[name] = word
        alerts = [_alert(n, "resolved" if w == "resolved" else "firing") for n, w in now.items()]
        muted = {n: Muted(("s",)) for n, w in now.items() if w == "muted"}
        for message in told.at(step + 1, *alerts, muted=muted):
            for line in message:
                state, alert_id = line.split()
                if state == "firing":
                    open_.add(alert_id)
                else:
                    assert alert_id in open_
                    open_.discard(alert_id)
    assert {a for group in told.groups.values() for a in group.told} == open_


def test_matchers_are_alertmanagers() -> None:
    """All four operators, quotes or none, anchored regular expressions, and an absent label is empty."""
    labels = {"worker": "w1", "cause": "hotspot_affinity", "text": 'say "hi"\n'}
    for text in (
        'worker="w1"',
        "worker=w1",
        'cause=~"hotspot_.*"',
        'worker!="w2"',
        'cause!~"hot"',
        'tenant=""',
        r'text="say \"hi\"\n"',
    ):
        assert parse_matcher(text).matches(labels), text
    for text in ('worker="w"', 'cause=~"hotspot"', 'tenant!=""', 'worker=~"w"'):
        assert not parse_matcher(text).matches(labels), text
    assert match_all(parse_matchers(["worker=w1", 'cause=~"hot.*"']), labels)


@pytest.mark.parametrize("text", ["", "worker", "=x", 'w="', 'a=~"("', "a b=c", "x" * 600 + "=1", '1a="b"'])
def test_a_matcher_that_is_none_is_refused(text: str) -> None:
    """With what it should look like."""
    with pytest.raises(AlertMisuse, match=r"no matcher|no regular expression"):
        parse_matcher(text)


@given(st.text(max_size=50))
def test_a_matcher_survives_being_written(value: str) -> None:
    """Whatever its value holds."""
    written = str(parse_matcher('a="b"').__class__("name", "=", value))
    assert parse_matcher(written).value == value


def test_a_regular_expression_costs_the_same_whatever_it_says() -> None:
    """The pattern that takes a backtracking engine 2^5000 steps."""
    assert not parse_matcher('a=~"(x+x+)+y"').matches({"a": "x" * 5000})


def test_a_silence_holds_for_its_time_alone() -> None:
    """From 10 until 20, for what matches all its matchers."""
    silence = Silence("s", ('worker="w1"', 'alertname="Slow"'), 10, 20, "ann", "")
    mine, other = _alert("a", worker="w1"), _alert("b", worker="w2")
    assert [muting([mine, other], [silence], now)["a"].silenced_by for now in (9, 10, 19, 20)] == [
        (),
        ("s",),
        ("s",),
        (),
    ]
    assert muting([mine, other], [silence], 10)["b"] == Muted()


def test_a_hotspot_silences_its_own_symptom_and_no_other() -> None:
    """The latency of w1 is told as the hotspot at w1; that of w2, and that of several workers, is told still."""
    hotspot = _alert("h", role="hotspot", worker="w1")
    symptoms = [_alert(f"s{where}", role="symptom", metric="ttft", worker=where) for where in ("w1", "w2", "several")]
    found = muting([hotspot, *symptoms], [], START)
    assert found["sw1"].inhibited_by == ("h",)
    assert "hotspot" in (found["sw1"].why or "")
    assert not any(found[name].is_muted for name in ("h", "sw2", "sseveral"))


def test_a_hotspot_of_the_whole_fleet_silences_the_cause_of_its_name_alone() -> None:
    """A stale index is told once, as the hotspot; that blocks are short, and a symptom of several workers, is told still."""
    spot = _alert("h", role="hotspot", cause="hotspot_stale_index")
    same = _alert("c", role="cause", cause="hotspot_stale_index", metric="tpot")
    other = _alert("o", role="cause", cause="admission_blocked_on_blocks", metric="ttft")
    symptom = _alert("s", role="symptom", metric="ttft", worker="several")
    found = muting([spot, same, other, symptom], [], START)
    assert [name for name, muted in found.items() if muted.is_muted] == ["c"]


def test_only_a_hotspot_that_fires_silences() -> None:
    """One that is pending or over does not."""
    symptom = _alert("s", role="symptom", worker="w1")
    for state in ("pending", "resolved"):
        assert not muting([_alert("h", state, role="hotspot", worker="w1"), symptom], [], START)["s"].is_muted


def test_a_cause_silences_the_symptom_only_when_it_explains_most() -> None:
    """A cause that owns 12 % leaves 88 % that somebody must hear of; how much it owns is no part of its identity."""
    symptom = _alert("s", role="symptom", metric="ttft", worker="several")
    cause = _alert("c", role="cause", metric="ttft", cause="premature_eviction")
    part, most = (replace(cause, annotations={"explains": word}) for word in ("part", "most"))
    assert not muting([part, symptom], [], START)["s"].is_muted
    assert muting([most, symptom], [], START)["s"].inhibited_by == ("c",)
    other = replace(symptom, labels={**symptom.labels, "metric": "tpot"})
    assert not muting([most, other], [], START)["s"].is_muted


def test_two_of_a_kind_do_not_silence_each_other() -> None:
    """Critical silences warning of the same; equals stay both."""
    warning, critical = _alert("w", severity="warning"), _alert("c", severity="critical")
    found = muting([warning, critical], [], START)
    assert (found["w"].inhibited_by, found["c"].inhibited_by) == (("c",), ())
