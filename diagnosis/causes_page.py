"""The page of causes, from their docstrings: `python -m diagnosis.causes_page > docs/causes.md`; a test compares.

Invariant: nothing about a cause is typed twice. A file in `diagnosis/causes/` is the runbook, the judge, and this page.
"""

from __future__ import annotations

from diagnosis.cause import MATERIAL, Cause, all_causes
from diagnosis.ledger.rows import ROWS
from diagnosis.telling.wording import listing, percent

HEAD = f"""# Causes

Generated from the docstrings in `diagnosis/causes/` (`python -m diagnosis.causes_page > docs/causes.md`); do not edit.

A cause is named when it owns at least {percent(MATERIAL)} of the change and shows evidence; else it stands among what was
excluded, with the number that excluded it, or among what cannot be seen here. How to read a verdict: [diagnosis.md](diagnosis.md).
What each engine and probe lets us see: [observability.md](observability.md).
"""


def render() -> str:
    """Markdown of the whole page."""
    causes = list(all_causes().values())
    table = ["| cause | what it is |", "| --- | --- |"]
    table += [f"| [`{cause.name}`](#{cause.name}) | {cause.summary()} |" for cause in causes]
    return HEAD + "\n" + "\n".join(table) + "\n\n" + "\n".join(map(section, causes))


def section(cause: Cause) -> str:
    """One cause: what it is, why, what it needs, what would refute it, what to do."""
    rows = "\n".join(f"- `{row}`: {ROWS[row]}" for row in cause.rows)
    remedies = "\n".join(f"- {remedy}" for remedy in cause.remedies())
    return (
        f"## {cause.name}\n\n{cause.summary()}\n\n**Why.** {sentence(cause.paragraph('Why'))}\n\n"
        f"**Refuted by.** {sentence(cause.paragraph('Refuted by'))}\n\n**What to do.**\n\n{remedies}\n\n"
        f"**Experiment.** {sentence(cause.paragraph('Experiment'))}\n\n**Seconds it may own.**\n\n{rows}\n\n**Needs.** {needs(cause)}\n"
    )


def sentence(words: str) -> str:
    """With a capital, as it stands alone here."""
    return words[:1].upper() + words[1:]


def needs(cause: Cause) -> str:
    """What has to be seen before the cause can be judged, in words."""
    if not cause.needs:
        return "Nothing beyond arrivals and first tokens."
    parts = []
    for need in cause.needs:
        options = [f"`{option}`" for option in need.split("|")]
        parts.append(options[0] if len(options) == 1 else ", ".join(options[:-1]) + f" or {options[-1]}")
    said = listing(parts) if len(parts) > 1 else parts[0]
    return f"{said}. Where that was not seen, the answer is `not observable here`."


if __name__ == "__main__":
    print(render(), end="")
