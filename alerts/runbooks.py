"""Runbooks: what an alert means and what to do. A cause's is its docstring, a rule's stands beside its expression: `docs/runbooks.md`.

Run: python -m alerts.runbooks > docs/runbooks.md. The collector shows each at `/runbooks/NAME`, so links in messages
work offline, and gives programs the text at `/api/v1/runbooks/NAME`.
"""

from __future__ import annotations

from typing import Final

from alerts.rules import Alerting, alerting_rules
from diagnosis.cause import all_causes
from diagnosis.causes_page import section
from engine_probe.errors import AlertMisuse

HEAD: Final = """# Runbooks

Generated (`python -m alerts.runbooks > docs/runbooks.md`); do not edit. What each alert of kvscope means, and what to do. Rules for
Prometheus are in `alerts/prometheus/`; those that name a cause send to its runbook in [causes.md](causes.md). How alerting
works: [alerts.md](alerts.md).
"""

EVALUATOR: Final = {
    "KvscopeLatencyRegression": (
        "A latency rose by a fifth or more, beyond noise, and a second window confirmed it.",
        ("open the report of the alert: it ranks the causes, with evidence and what was ruled out",),
    ),
    "KvscopeCause": (
        "A cause owns at least a quarter of a rise of latency. The label `cause` says which: its own runbook says what to do.",
        (
            "the remedies are in the alert; the cheapest experiment that would separate it from the next is in the report",
        ),
    ),
    "KvscopeHotspotFound": (
        "A worker gets more than it can serve, or serves slower than its like, and requests lose time there.",
        ("kvscope hotspots over the window of the alert: prefix or tenant, seconds lost, break-even",),
    ),
    "KvscopeContradiction": (
        "Counters, events, client and engine do not agree. Verdicts of these minutes have less confidence.",
        ("the statement names both numbers and the check; docs/diagnosis.md says what each check compares",),
    ),
}
"""Alerts that the collector's evaluator raises: what they mean, what to do."""


def names() -> list[str]:
    """Every runbook there is."""
    return sorted({*all_causes(), *EVALUATOR, *(rule.name for rule in alerting_rules())})


def runbook(name: str) -> str:
    """One runbook as Markdown. Raises AlertMisuse for a name that is none."""
    causes = all_causes()
    if name in causes:
        return section(causes[name])
    if name in EVALUATOR:
        return _evaluator(name)
    rules = [rule for rule in alerting_rules() if rule.name == name]
    if not rules:
        raise AlertMisuse(f"there is no runbook {name[:100]!r}; there are {', '.join(names())}", name=name[:100])
    return _rules(rules)


def render() -> str:
    """The page."""
    told = list(dict.fromkeys(rule.name for rule in alerting_rules()))
    parts = [HEAD, "## What the evaluator raises\n", *map(_evaluator, EVALUATOR), "## What Prometheus raises\n"]
    return "\n".join([*parts, *(runbook(name) for name in told)])


def _evaluator(name: str) -> str:
    meaning, todo = EVALUATOR[name]
    return f"### {name}\n\n{meaning}\n\n" + "".join(f"- {line}\n" for line in todo)


def _rules(rules: list[Alerting]) -> str:
    first = rules[0]
    lines = [f"### {first.name}\n", f"{_plain(first)}\n"]
    for rule in rules:
        held = f", for {rule.wait}" if rule.wait != "0m" else ""
        lines.append(f"{rule.severity.capitalize()}{held}:\n\n```promql\n{rule.expr}\n```\n")
    if first.cause is not None:
        lines.append(f"The cause and what to do about it: [{first.cause}](causes.md#{first.cause}).\n")
    lines += [f"- {line}" for line in first.todo]
    return "\n".join(lines).rstrip() + "\n"


def _plain(rule: Alerting) -> str:
    """The description without its templates."""
    text = rule.description
    for name in ("humanizePercentage", "humanizeDuration", "humanize"):
        text = text.replace(f"{{{{ $value | {name} }}}}", "(value)")
    text = text.replace("{{ $value }}", "(value)")
    while "{{ $labels." in text:
        before, _, rest = text.partition("{{ $labels.")
        label, _, after = rest.partition(" }}")
        text = f"{before}*{label}*{after}"
    return text


if __name__ == "__main__":
    print(render(), end="")
