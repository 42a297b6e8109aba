"""What receivers read: Alertmanager's JSON, Slack's blocks, PagerDuty's events, and a body of one's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alerts.notify import Message
from alerts.payloads import render
from alerts.receivers import Receiver
from engine_probe.errors import AlertMisuse
from store.alert_rows import Alert

START = 1_764_403_200_123_000_000
BASE = "http://kvscope.example:8321"
LABELS = {"alertname": "KvscopeCause", "cause": "premature_eviction", "severity": "critical", "worker": "w1"}
SAID = {
    "summary": "evicted & asked for <again>",
    "remedy": "more blocks",
    "report": f"{BASE}/api/v1/reports?suspect=1/2",
}
FIRING = Alert("ep1", "f" * 16, "evaluator", "firing", LABELS, SAID, START, START, START, START)
ENDED = Alert(
    "ep2",
    "e" * 16,
    "evaluator",
    "resolved",
    {**LABELS, "worker": "w2"},
    SAID,
    START,
    START,
    START,
    START,
    ends_ns=START + 60_000_000_000,
)
MESSAGE = Message("msg_1", "box", '{"alertname": "KvscopeCause"}', {"alertname": "KvscopeCause"}, (FIRING, ENDED), 3)


def _render(kind: str, **fields: Any) -> list[str]:
    return render(Receiver(name="box", kind=kind, url="https://x.example/", **fields), MESSAGE, BASE)  # type: ignore[arg-type]


def test_alertmanagers_document_has_its_keys_and_no_others() -> None:
    """Version 4: what Alertmanager 0.25 sends, key for key; an alert that fires ends at Go's zero time."""
    (body,) = _render("webhook")
    document = json.loads(body)
    assert list(document) == [
        "version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels", "commonLabels", "commonAnnotations",
        "externalURL", "alerts",
    ]  # fmt: skip
    assert (document["version"], document["status"], document["truncatedAlerts"]) == ("4", "firing", 3)
    assert document["commonLabels"] == {name: value for name, value in LABELS.items() if name != "worker"}
    assert document["commonAnnotations"] == SAID
    assert document["alerts"][0] == {
        "status": "firing",
        "labels": LABELS,
        "annotations": SAID,
        "startsAt": "2025-11-29T08:00:00.123Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": SAID["report"],
        "fingerprint": "f" * 16,
    }
    assert (document["alerts"][1]["status"], document["alerts"][1]["endsAt"]) == (
        "resolved",
        "2025-11-29T08:01:00.123Z",
    )


def test_slack_gets_escaped_blocks_within_its_limits() -> None:
    """A header, a section an alert, a link to the report, and how many more there are."""
    (body,) = _render("slack")
    document = json.loads(body)
    header, first, second, rest = document["blocks"]
    assert document["text"] == header["text"]["text"] == "[1 firing] KvscopeCause"
    assert first["text"]["text"].startswith("*Firing*: evicted &amp; asked for &lt;again&gt;\nTo do: more blocks\n")
    assert f"<{SAID['report']}|report>" in first["text"]["text"]
    assert second["text"]["text"].startswith("*Resolved*")
    assert rest["elements"][0]["text"] == "and 3 more"
    long = Alert("x", "x", "evaluator", "firing", LABELS, {"summary": "y" * 9_000}, START, START, START, START)
    many = Message("m", "box", "{}", {}, tuple([long] * 60))
    blocks = json.loads(render(Receiver(name="box", kind="slack", url="https://x.example/"), many, BASE)[0])["blocks"]
    assert len(blocks) <= 50
    assert max(len(block["text"]["text"]) for block in blocks if block["type"] == "section") <= 3_000
    assert blocks[-1]["elements"][0]["text"] == "and 15 more"


def test_pagerduty_opens_and_closes_under_one_key() -> None:
    """An event an alert; the key is the episode's, so a new episode is a new incident."""
    trigger, resolve = (json.loads(body) for body in _render("pagerduty", routing_key="R0"))
    assert (trigger["event_action"], trigger["dedup_key"], trigger["routing_key"]) == ("trigger", "ep1", "R0")
    payload = trigger["payload"]
    assert (payload["severity"], payload["source"], payload["class"]) == ("critical", "w1", "premature_eviction")
    assert payload["timestamp"] == "2025-11-29T08:00:00.123Z"
    assert trigger["links"] == [{"href": SAID["report"], "text": "report"}]
    assert resolve == {"routing_key": "R0", "dedup_key": "ep2", "event_action": "resolve"}


@pytest.mark.parametrize("kind", ["webhook", "slack", "pagerduty", "generic"])
def test_an_alert_without_a_report_leads_people_to_the_page_of_alerts(kind: str) -> None:
    """Of each kind of receiver: the link is that of a page, not of the API's JSON."""
    alert = Alert("ep3", "d" * 16, "alertmanager", "firing", LABELS, {"summary": "s"}, START, START, START, START)
    fields = {"pagerduty": {"routing_key": "R0"}, "generic": {"template": "{{ message.alerts[0].generatorURL }}"}}
    to = Receiver(name="box", kind=kind, url="https://x.example/", **fields.get(kind, {}))  # type: ignore[arg-type]
    (body,) = render(to, Message("m", "box", "{}", {}, (alert,)), BASE)
    assert f"{BASE}/alerts" in body
    assert "/api/" not in body


def test_a_body_of_ones_own_is_a_template_over_alertmanagers_document() -> None:
    """Values that others said are quoted by `tojson`, so the body stays JSON."""
    template = '{"n": {{ message.alerts | length }}, "what": {{ message.commonAnnotations.summary | tojson }}, "id": {{ delivery_id | tojson }}}'
    (body,) = _render("generic", template=template)
    assert json.loads(body) == {"n": 2, "what": SAID["summary"], "id": "msg_1"}


def test_a_template_that_fails_on_a_message_says_whose_it_is() -> None:
    """A label that this message does not have."""
    with pytest.raises(AlertMisuse, match="receiver 'box'"):
        _render("generic", template="{{ message.commonLabels.tenant }}")
