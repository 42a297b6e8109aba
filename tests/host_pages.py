"""Pages of host exporters for tests: the samples, and the same page a while later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_probe.adapters.metric_names import Row, SampleMapper
from engine_probe.adapters.prometheus import PageParser
from engine_probe.adapters.registry import adapter

SAMPLES = Path(__file__).parent / "data" / "samples"
FILES = {
    "dcgm": "dcgm_metrics.synthetic.prom",
    "node": "node_exporter-1.5.0.prom",
    "cadvisor": "cadvisor_metrics.synthetic.prom",
    "nvidia-smi": "nvidia_smi_metrics.synthetic.prom",
}
S = 1_000_000_000


def sample_text(engine: str) -> str:
    """The sample page of an exporter."""
    return (SAMPLES / FILES[engine]).read_text()


def with_values(text: str, changes: Mapping[str, float | str]) -> str:
    """The page with other numbers: the start of a line -> its new number."""
    lines = text.splitlines()
    for start, value in changes.items():
        found = [number for number, line in enumerate(lines) if line.startswith(start)]
        assert found, f"no line starts with {start}"
        for number in found:
            end = lines[number].rfind("}") + 1 or lines[number].index(" ")
            _, *rest = lines[number][end:].split()
            lines[number] = " ".join([lines[number][:end], str(value), *rest])
    return "\n".join(lines) + "\n"


def mapped(engine: str, *pages: str, worker: str | None = None, every_s: int = 10, **options: Any) -> list[list[Row]]:
    """Rows of each of these pages, one `every_s` seconds after the other, from 1,000 s on."""
    parser = PageParser()
    mapper = SampleMapper(worker, adapter(engine).tables, **options)
    return [mapper.rows(parser.parse(page), (1_000 + number * every_s) * S) for number, page in enumerate(pages)]


def values(rows: list[Row], name: str, **labels: str) -> list[float]:
    """Numbers of the rows of this name with these labels."""
    return [row[4] for row in rows if row[2] == name and labels.items() <= dict(row[3]).items()]
