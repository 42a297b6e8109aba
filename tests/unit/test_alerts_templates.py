"""Templates of one's own are tried at start on what may come, and not only on what usually comes."""

from __future__ import annotations

import pytest

from alerts.receivers import Receiver, checked
from engine_probe.errors import AlertMisuse


def _checked(template: str, **fields: object) -> Receiver:
    given = {"name": "tickets", "kind": "generic", "url": "https://tickets.example/", "template": template, **fields}
    return checked(Receiver(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    [
        "{{ message.commonLabels.severity }}",
        "{{ message.commonAnnotations.summary }}",
    ],
)
def test_a_template_of_what_only_most_messages_have_is_refused_at_start(template: str) -> None:
    """A group with a warning and something critical in it has no severity in common: that message would be a dead letter."""
    with pytest.raises(AlertMisuse, match="template"):
        _checked(template)


def test_what_a_group_has_in_common_may_be_taken() -> None:
    """By `group_by`; a label that is no part of it may not."""
    assert _checked("{{ message.commonLabels.alertname }}").template
    with pytest.raises(AlertMisuse, match="in common"):
        _checked("{{ message.commonLabels.alertname }}", group_by=("worker",))
    assert _checked("{% for a in message.alerts %}{{ a.annotations.description }}{% endfor %}").template
    assert _checked("{{ message.commonLabels.get('severity', '') }}", group_by=()).template
