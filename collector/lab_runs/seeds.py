"""Which seeds a command is asked for."""

from __future__ import annotations

from engine_probe.errors import UsageError

MOST_SEEDS = 10_000


def seed_list(text: str) -> list[int]:
    """`3`: 1 to 3; `1,5,9`; `101:120` or `101-120`; mixed. Raises UsageError."""
    found: list[int] = []
    try:
        if not any(mark in text for mark in ",:-"):
            found = list(range(1, min(int(text), MOST_SEEDS + 1) + 1))
        else:
            for part in text.replace(":", "-").split(","):
                first, _, last = part.partition("-")
                named = range(int(first), int(last or first) + 1)
                found += named[: MOST_SEEDS + 1]
    except ValueError as error:
        raise UsageError(
            f"--seeds {text!r} is neither a number, nor a list like 1,5,9, nor a range like 101:120"
        ) from error
    if not 0 < len(found) <= MOST_SEEDS:
        told = f"more than {MOST_SEEDS:,}" if found else "no"
        raise UsageError(f"--seeds {text!r} names {told} seeds; give 1 to {MOST_SEEDS:,}")
    return found
