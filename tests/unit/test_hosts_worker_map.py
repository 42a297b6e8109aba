"""Rules that say whose a series is."""

from __future__ import annotations

import pytest

from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.errors import UsageError


def test_the_first_rule_that_fits_wins() -> None:
    """Exact values, wildcards, and a name made of labels."""
    rules = WorkerMap.parse(["gpu:0=a", "pod:vllm-*={namespace}/{pod}", "gpu:*=rest"])
    assert rules.worker({"gpu": "0", "pod": "vllm-1", "namespace": "n"}) == "a"
    assert rules.worker({"gpu": "1", "pod": "vllm-1", "namespace": "n"}) == "n/vllm-1"
    assert rules.worker({"gpu": "1", "pod": "other"}) == "rest"
    assert rules.worker({"pod": "other"}) is None


def test_an_exporters_own_label_goes_before_the_servers() -> None:
    """Prometheus renames a label that it has itself to exported_*: `pod` is the exporter's pod then."""
    labels = {"pod": "dcgm-exporter-abc", "exported_pod": "vllm-1"}
    assert WorkerMap.parse(["pod:*={pod}"]).worker(labels) == "vllm-1"


def test_values_may_hold_colons_and_equal_signs() -> None:
    """An instance is an address; the worker is what stands behind the last sign."""
    assert WorkerMap.parse(["instance:10.0.0.1:8000=a"]).worker({"instance": "10.0.0.1:8000"}) == "a"
    assert WorkerMap.parse(["id:x=y=a"]).worker({"id": "x=y"}) == "a"


@pytest.mark.parametrize("text", ["", "gpu0=a", "gpu:0", "gpu:0=", "gpu:=a", ":0=a", "g pu:0=a"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    """The message shows how a rule looks."""
    with pytest.raises(UsageError, match="gpu:0=worker-a"):
        WorkerMap.parse([text])
