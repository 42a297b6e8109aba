"""Write the generated parts of README.md: the demo's output, the verbs, the engines, the settings. `make docs` runs it.

Each part stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; tests render the parts anew and compare.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FOUNDING = "demo-out/founding"
MADE = {"store": "demo-out/kvscope.duckdb", "report": "demo-out/report.md", "program": ".venv/bin/kvscope"}
"""What `make demo` calls its files, and how it calls the command."""


def part(text: str, name: str) -> str:
    """What stands in `text` between the markers of `name`. ValueError where they are not there exactly once."""
    found = re.findall(rf"<!-- {re.escape(name)}: begin -->\n(.*?)<!-- {re.escape(name)}: end -->", text, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"README.md has {len(found)} parts named '{name}', expected one")
    return str(found[0])


def with_part(text: str, name: str, content: str) -> str:
    """`text` with that part replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    return text.replace(begin + part(text, name) + end, begin + content.rstrip("\n") + "\n" + end)


def settings() -> str:
    """The table of settings, from their definitions."""
    from collector.settings import render_table

    return render_table()


def verbs() -> str:
    """The table of verbs, from the command line itself."""
    from typer.main import get_command

    from collector.cli import build

    rows = ["| verb | what it does |", "| --- | --- |"]
    commands = get_command(build()).commands  # type: ignore[attr-defined]  # typer's own app is a group
    for name in sorted(commands):
        sentence = (commands[name].help or "").split("\n\n")[0].replace("\n", " ").strip()
        rows.append(f"| `kvscope {name}` | {sentence} |")
    return "\n".join(rows)


def engines() -> str:
    """What `attach` knows, its sources, and the page with the exact settings: from the adapters."""
    from engine_probe.adapters.registry import adapters

    rows = ["| `kvscope attach` | what it is | what can be seen, by source | settings |", "| --- | --- | --- | --- |"]
    for one in sorted(adapters(), key=lambda one: one.engine):
        sources = ", ".join(source.source for source in one.provides)
        page = one.guide.rsplit("/", 1)[-1]
        rows.append(f"| `{one.engine}` | {one.title} | {sources} | [{page}]({one.guide}) |")
    return "\n".join(rows)


def demo() -> str:
    """What `make demo` prints: run in a folder that goes away, shown with the paths it has there."""
    from collector.commands.demo import render, render_founding

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "collector.cli", "demo", "--no-live", "--json", "--dir", folder]
        ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    document = json.loads(ended.stdout)
    founding = render_founding(document["founding"] | {"folder": FOUNDING})
    return f"```text\n{founding}\n\n{render(document | MADE).rstrip()}\n```"


def main() -> None:
    text = README.read_text()
    for name, render in (("settings", settings), ("verbs", verbs), ("engines", engines), ("demo output", demo)):
        text = with_part(text, name, render())
    README.write_text(text)
    print(f"{README.name}: written")


if __name__ == "__main__":
    main()
