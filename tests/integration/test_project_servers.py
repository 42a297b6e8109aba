"""The test servers themselves: each starts, answers on loopback, and is gone afterwards."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from typing import Any

import pytest

from tests import servers

pytestmark = pytest.mark.server


def _get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def test_postgres_answers_and_is_gone_after_its_context() -> None:
    """A throw-away PostgreSQL takes a database, and refuses connections once its context ended."""
    servers.require("postgres")
    import psycopg

    with servers.running_postgres() as server:
        dsn = server.create_database("one")
        with psycopg.connect(dsn) as connection:
            row = connection.execute("select current_database()").fetchone()
        assert row == ("one",)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn, connect_timeout=2)


def test_prometheus_reads_the_configuration_it_is_given() -> None:
    """Prometheus runs with our configuration and the rule file beside it."""
    rule = "groups:\n- name: g\n  rules:\n  - record: one\n    expr: vector(1)\n"
    with servers.running_prometheus("rule_files: [rules.yml]\n", {"rules.yml": rule}) as url:
        groups = _get_json(f"{url}/api/v1/rules")["data"]["groups"]
    assert [group["rules"][0]["name"] for group in groups] == ["one"]


def test_alertmanager_reads_the_configuration_it_is_given() -> None:
    """Alertmanager runs with our receiver, without gossiping to anyone."""
    config = "route: {receiver: here}\nreceivers: [{name: here}]\n"
    with servers.running_alertmanager(config) as url:
        assert _get_json(f"{url}/api/v2/receivers") == [{"name": "here"}]


def test_llama_server_counts_the_tokens_it_generates() -> None:
    """llama-server answers a completion, and its own counter says how many tokens that were."""
    with servers.running_llama_server(ctx_size=512, num_slots=1) as url:
        body = json.dumps({"prompt": "one two three", "max_tokens": 5, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 5
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
            page = response.read().decode()
    assert "\nllamacpp:tokens_predicted_total 5\n" in page


def test_chromium_renders_a_page_without_a_network() -> None:
    """Chromium runs headless here and executes a page's script."""
    page = "data:text/html,<p id=x></p><script>document.getElementById('x').textContent=6*7</script>"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    ended = subprocess.run(
        [servers.require("chromium"), *flags, page], capture_output=True, text=True, timeout=60, check=True
    )
    assert '<p id="x">42</p>' in ended.stdout
