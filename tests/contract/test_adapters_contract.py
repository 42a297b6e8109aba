"""What adapters declare is what real recordings fill, and the docs table is generated from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_probe.adapters import vllm, vllm_provides
from engine_probe.adapters.geometry import startup_facts
from engine_probe.adapters.provides import all_names, declared, names, visible
from engine_probe.events import CANONICAL_SAMPLES, KINDS
from engine_probe.readers.detect import open_source
from engine_probe.readers.lines import text_lines
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.vllm.stats import Geometry, StepRows, request_rows

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "data" / "recordings"
AT = 1_795_958_453_000_000_000


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, dict[str, Any]]]:
    """(kind, row) of every vLLM cut."""
    found = []
    for name in ("squeezed", "two-workers", "cache-off"):
        for tables in open_source(RECORDINGS / f"vllm-0.32.0-{name}").chunks(ReadOptions(), Notes()):
            found += [(kind, row) for kind, table in tables.items() for row in table.to_pylist()]
    return found


def filled(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> set[str]:
    """Names that these rows fill."""
    seen = set()
    for kind, row in rows:
        seen |= {f"{kind}.{column}" for column, value in row.items() if value is not None}
        if kind == "block":
            seen.add(f"block.{row['change']}")
        if kind == "sample" and row["name"] in CANONICAL_SAMPLES:
            seen.add(f"sample.{row['name']}")
    return seen - {"block.change"}


def test_every_declared_name_is_of_the_contract() -> None:
    """A renamed column cannot leave a declaration behind."""
    for one in declared():
        assert one.names <= set(all_names()), one.source
        assert set(one.caveats) <= one.names, one.source


def test_every_column_of_the_contract_can_be_asked_for() -> None:
    """The list of names is complete: each column, each change, each canonical sample, once."""
    everything = all_names()
    assert len(set(everything)) == len(everything)
    columns = {f"{kind}.{column.name}" for kind, columns in KINDS.items() for column in columns} - {"block.change"}
    assert columns <= set(everything)
    assert {f"sample.{name}" for name in CANONICAL_SAMPLES} <= set(everything)


@pytest.mark.parametrize(
    ("source", "rare"),
    [
        # What the recorded engine did not do: an error, a model name in a span, an offload, a report of reuse.
        (vllm_provides.CLIENT, "request: error"),
        (vllm_provides.OTLP, "request: error"),
        (
            vllm_provides.KV_EVENTS,
            "block: hit cleared offloaded reason reuse_count mark: worker at_ns mark subject text attrs",
        ),
    ],
)
def test_a_source_fills_what_it_declares(rows: list[tuple[str, dict[str, Any]]], source: Any, rare: str) -> None:
    """Exactly the declared columns are filled by real telemetry; rare ones are named here one by one."""
    kinds = {"client": "request", "otlp": "request", "kv_events": "block"}
    vantage = {"client": "client", "otlp": "engine"}.get(source.source)
    mine = [(kind, row) for kind, row in rows if kind == kinds[source.source] and row.get("vantage") == vantage]
    assert filled(mine) == source.names - names(rare)


def test_the_metrics_page_fills_what_it_declares(rows: list[tuple[str, dict[str, Any]]]) -> None:
    """All canonical samples but those of an offloading connector and of speculation; host shares come from elsewhere."""
    mine = [(kind, row) for kind, row in rows if kind == "sample" and not row["name"].startswith("cpu_util")]
    seen = filled(mine)
    declared_samples = {name for name in vllm_provides.METRICS.names if name.startswith("sample.")}
    assert seen == declared_samples - names(
        "sample: tier_read_bytes_total tier_written_bytes_total draft_tokens_total accepted_tokens_total"
    )


def test_the_start_up_log_fills_what_it_declares() -> None:
    """Columns of `worker` from the log alone; the CPU build prints no weights and was given no KV type."""
    log = RECORDINGS / "vllm-0.32.0-squeezed" / "engine-worker-0.log.gz"
    facts = startup_facts(line.decode("utf-8", "replace") for _, line in text_lines(log))
    told = {f"worker.{column}" for column in facts} | {"worker.worker", "worker.at_ns"}
    assert told == vllm_provides.LOG.names - names("worker: weights_bytes kv_dtype")


def test_the_plugin_fills_what_it_declares() -> None:
    """Request and step rows built from statistics as vLLM hands them over."""
    geometry = Geometry(100, 4096, True, model="m", policy="fcfs")
    finished = SimpleNamespace(
        finish_reason="stop", request_id="cmpl-a-0", e2e_latency=2.0, num_prompt_tokens=64, num_preemptions=0
    )
    finished.__dict__.update({"num_generation_tokens": 8, "queued_time": 0.5, "prefill_time": 0.25, "decode_time": 1.0})
    finished.__dict__.update({"num_cached_tokens": 32})
    stats = SimpleNamespace(iteration_timestamp=AT / 1e9, finished_requests=[finished], num_generation_tokens=3)
    stats.__dict__.update({"num_preempted_reqs": 1, "prompt_token_stats": SimpleNamespace(computed=32)})
    cache = SimpleNamespace(preempted_queries=64, preempted_hits=32)
    details = SimpleNamespace(elapsed_ms=5.0, num_ctx_tokens=32, num_ctx_requests=1, num_generation_requests=2)
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=0, kv_cache_usage=0.5)
    scheduler.__dict__.update({"prefix_cache_stats": cache, "iteration_details": details})
    mine: list[tuple[str, Mapping[str, Any]]] = [("request", row) for row in request_rows(stats, "w", geometry, AT)]
    mine.append(("step", StepRows("w", geometry).row(scheduler, stats, AT)))
    declared_names = {name for name in vllm_provides.PLUGIN.names if name.startswith(("request.", "step."))}
    assert filled(mine) == declared_names


def test_sources_together_show_what_each_shows() -> None:
    """A cause asks by engine and sources; an undeclared source is an error, not silence."""
    both = visible("vllm", ["otlp", "kv_events"])
    assert {"request.queue_s", "block.evicted"} <= both
    assert "step.step" not in both
    with pytest.raises(KeyError):
        visible("vllm", ["telepathy"])


def test_the_guide_names_every_mapped_series() -> None:
    """docs/vllm.md lists each contract name with each wire name it stands for."""
    guide = (ROOT / "docs" / "vllm.md").read_text().replace("\\|", "|")
    for table in (vllm.CANONICAL, vllm.HISTOGRAMS):
        for canonical, wires in table.items():
            assert f"| `{canonical}` | " + ", ".join(f"`{wire}`" for wire in wires) + " |" in guide
