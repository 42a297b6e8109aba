"""The page `docs/events.md`, written from `events.py`: `python -m engine_probe.docs_page docs/events.md`.

Invariant: the page is a function of the contract alone; a test builds it again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine_probe.events import (
    CANONICAL_SAMPLES,
    COMMON,
    CONTRACT_VERSION,
    DROP_ORDER,
    HOST_SAMPLES,
    KIND_DOC,
    KINDS,
    PHASES,
    Column,
)

_HEAD = f"""# Events

*Written from `engine_probe/events.py` by `python -m engine_probe.docs_page docs/events.md`; change it there.*

Contract version {CONTRACT_VERSION}. Nine kinds of rows say all that kvscope observes. Instants (`*_ns`) are UTC in int64
nanoseconds since 1970, durations (`*_s`) seconds, sizes bytes, lengths tokens or blocks, ratios lie within 0 and 1,
hashes are uint64. **Unknown is null (or the column is left out), never zero.** Unless a column says that it may be
negative, a number below zero is refused, and so are NaN and infinity, instants before 1973 (they are in another unit)
and instants more than a day ahead of the collector's clock.

Rows arrive at `POST /v1/events`, in one of three forms:

- Arrow (`application/vnd.apache.arrow.stream`): complete IPC streams one after another, one kind a stream, with
  `kvscope.kind` and `kvscope.contract` in the schema's metadata; buffers plain, lz4 or zstd; identity in the headers
  `Kvscope-Source`, `Kvscope-Epoch`, `Kvscope-Seq`, `Kvscope-Sent-Ns`. Columns may be left out and come in any order;
  other types are taken where every value fits (int32, large_string, dictionaries of strings, timestamps for `*_ns`).
- JSON: `{{"source", "epoch", "seq", "sent_ns", "events": {{"request": [row, ...], "step": [...], ...}}}}`.
- NDJSON: an optional first line with `source`, `epoch`, `seq`, `sent_ns`, then a row a line with its `kind`.

Columns that the receiver does not know are ignored and counted. A body with one bad row is refused whole, with kind,
row, column, value and what was expected.
"""

_WORDS = {
    "string": "text",
    "int64": "int64",
    "uint64": "uint64",
    "float64": "float64",
    "bool": "true, false",
    "map<string,string>": "map of texts",
    "list<string>": "list of texts",
}


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD, "## Columns of every kind\n", _table(COMMON)]
    for kind, columns in KINDS.items():
        parts += [f"## `{kind}`\n", f"One row is {KIND_DOC[kind]}.\n", _table(columns[len(COMMON) :])]
    parts += [
        "## Phases\n",
        "In this order: "
        + ", ".join(f"`{phase}`" for phase in PHASES)
        + ". At the engine's vantage those up to `first_sample`, stalls before the first token and `unexplained` are "
        "disjoint and sum to `first_token_ns - arrival_ns`; where two overlap, the moment belongs to the earlier one of "
        "the list. Work after the first token that gives no token (a prompt computed again after a preemption) is "
        "`stalled`.\n",
        "## Names of samples\n",
        "Canonical, whatever the engine: "
        + ", ".join(f"`{name}`" for name in CANONICAL_SAMPLES if name not in HOST_SAMPLES)
        + ". Histograms are `name_bucket`, `name_sum`, `name_count`. Anything else keeps the name it has on the wire; "
        "a name that was mapped keeps its old one in the label `wire`.\n",
        "Of hosts and GPUs:\n",
        "\n".join(
            ["| name | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in HOST_SAMPLES.items()), ""]
        ),
        "## What overload drops\n",
        "First to last: "
        + ", ".join(f"`{kind}`" for kind in DROP_ORDER)
        + ". What was dropped is counted, and a `mark` of `gap` says how many rows of which kind, in which batches and "
        "over which time.\n",
    ]
    return "\n".join(parts)


def _table(columns: tuple[Column, ...]) -> str:
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{c.name}` | {_type(c)} | {c.unit or ''} | {_meaning(c)} |" for c in columns]
    return "\n".join(lines) + "\n"


def _type(column: Column) -> str:
    if column.fields:
        fields = ", ".join(f"`{name}` {type_}" for name, type_ in column.fields)
        words = f"list of {{{fields}}}" if column.type == "list<struct>" else f"{{{fields}}}"
    elif column.type.startswith("list<") and column.type not in _WORDS:
        words = f"list of {column.type[5:-1]}"
    else:
        words = _WORDS[column.type]
    return f"{words}, required" if column.required else words


def _meaning(column: Column) -> str:
    words = column.doc.replace("|", "\\|")
    if column.choices:
        words += ": " + ", ".join(f"`{choice}`" for choice in column.choices)
    return words + ("; may be negative" if column.signed else "")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m engine_probe.docs_page docs/events.md")
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
