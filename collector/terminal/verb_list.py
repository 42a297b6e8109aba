"""The list of verbs under `--help`: each with its whole first paragraph, wrapped. Typer's own list cuts it off at one line."""

from __future__ import annotations

from typing import Any

import typer.core


class VerbList(typer.core.TyperGroup):
    """A group of verbs whose help says of each all of what it does in short."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section `Commands`."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _short(verb.help)) for name, verb in verbs if verb is not None and not verb.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _short(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())
