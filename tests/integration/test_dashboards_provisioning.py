"""The provisioning files: what they mount is there, they agree with each other, and the real Prometheus takes them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from collector.settings import load_settings
from dashboards.build import FOLDER
from dashboards.infinity import PLUGIN
from tests.servers import require

PLACE = Path(__file__).parents[2] / "examples" / "monitoring"


def read(name: str) -> Any:
    return yaml.safe_load((PLACE / name).read_text())


def test_what_the_containers_mount_is_there() -> None:
    """Files and folders beside the compose file; every command names a file that is mounted."""
    services = read("compose.yaml")["services"]
    assert set(services) == {"prometheus", "alertmanager", "grafana"}
    mounted = set()
    for service in services.values():
        for volume in service["volumes"]:
            source, inside, *_ = volume.split(":")
            if source.startswith("."):
                assert (PLACE / source).resolve().exists(), source
                mounted.add(inside)
        for word in service.get("command", ()):
            if word.startswith("--config.file="):
                assert word.partition("=")[2] in mounted
    provider = read("grafana/dashboards/kvscope.yaml")["providers"][0]
    assert provider["options"]["path"] in mounted
    assert "../../dashboards/generated" in " ".join(services["grafana"]["volumes"])
    assert list(FOLDER.glob("*.json"))
    assert services["grafana"]["environment"]["GF_INSTALL_PLUGINS"] == PLUGIN


def test_files_lead_to_the_collector_where_it_listens() -> None:
    """Data sources, scrape target and exemplar links: the address that `kvscope serve` has by default."""
    server = load_settings().server
    url = f"http://{server.host}:{server.port}"
    metrics, api = read("grafana/datasources/kvscope.yaml")["datasources"]
    assert (metrics["type"], api["type"]) == ("prometheus", PLUGIN)
    assert api["url"] == url
    (link,) = metrics["jsonData"]["exemplarTraceIdDestinations"]
    assert link["url"].startswith(f"{url}/requests/")
    (job,) = read("prometheus.yml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{server.host}:{server.port}"]


def test_prometheus_takes_its_configuration_with_the_rules(tmp_path: Path) -> None:
    """`promtool check config`, with the generated rules where the configuration has them."""
    promtool = require("prometheus").with_name("promtool")
    rules = PLACE.parents[1] / "alerts" / "prometheus" / "kvscope.rules.yml"
    (tmp_path / "kvscope.rules.yml").write_text(rules.read_text())
    (tmp_path / "prometheus.yml").write_text((PLACE / "prometheus.yml").read_text())
    ended = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
