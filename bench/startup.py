"""What starting costs beside a bare Python: `kvscope --help` (budget 0.3 s), `import engine_probe` (budget 50 ms).

Run: .venv/bin/python bench/startup.py [--rounds N] [--json]. Commands take turns, so a busy machine slows all alike;
the median of each and its ratio to `python -c pass` are printed, and the part of the import above a bare start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

BUDGET_S = {"kvscope --help": 0.3}
IMPORT_BUDGET_S = 0.05


def commands() -> dict[str, list[str]]:
    """Name -> command, in this Python's environment."""
    kvscope = shutil.which("kvscope", path=str(Path(sys.executable).parent))
    if kvscope is None:
        raise SystemExit("kvscope is not installed beside this Python: make test, or pip install -e .[service]")
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import engine_probe'": [sys.executable, "-c", "import engine_probe"],
        "kvscope --help": [kvscope, "--help"],
    }


def measure(rounds: int) -> dict[str, float]:
    """Median wall seconds of each command, run in turns; one round before that fills the file caches."""
    times: dict[str, list[float]] = {name: [] for name in commands()}
    for turn in range(rounds + 1):
        for name, command in commands().items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    seconds = measure(max(arguments.rounds, 1))
    bare = seconds["python -c pass"]
    rows = [
        {"command": name, "median_s": value, "ratio_to_bare_python": value / bare} for name, value in seconds.items()
    ]
    import_s = seconds["python -c 'import engine_probe'"] - bare
    if arguments.json:
        print(json.dumps({"rows": rows, "import_engine_probe_s": import_s, "import_budget_s": IMPORT_BUDGET_S}))
        return
    for row in rows:
        budget = BUDGET_S.get(str(row["command"]))
        note = f"   budget {budget * 1000:.0f} ms" if budget else ""
        print(f"{row['command']:<34} {row['median_s'] * 1000:7.1f} ms   {row['ratio_to_bare_python']:5.2f} x{note}")
    print(f"{'import engine_probe alone':<34} {import_s * 1000:7.1f} ms   budget {IMPORT_BUDGET_S * 1000:.0f} ms")


if __name__ == "__main__":
    main()
