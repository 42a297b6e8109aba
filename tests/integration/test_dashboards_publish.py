"""Publishing, against a stand-in for Grafana's HTTP API: what is wanted comes to be, a second run does nothing, errors are clear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from collector import cli
from dashboards.build import stored
from dashboards.grafana import Grafana
from dashboards.infinity import PLUGIN
from dashboards.publish import Note, Source, Step, Wanted, publish
from engine_probe.errors import AccessRefused, PublishError, ServerUnreachable, SourceMissing, UsageError
from tests.grafana_double import TOKEN, Double, running_double
from tests.integration.collector_harness import NOW_NS, running
from tests.loopback import Loopback

WANTED = Wanted(
    stored(),
    Source("kvscope Prometheus", "prometheus", "http://127.0.0.1:9090"),
    Source("kvscope API", PLUGIN, "http://127.0.0.1:8321", "the collector's secret"),
    "http://kvscope.example",
    notes=(
        Note("mark", 5_000_000_000, None, "deployed v2", ("deployed",)),
        Note("finding", 9_000_000_000, None, "EXPLAINED: ..."),
    ),
)


@pytest.fixture
def double() -> Iterator[Double]:
    with running_double() as made:
        yield made


def brought(double: Double, wanted: Wanted = WANTED, token: str = TOKEN, *, dry_run: bool = False) -> list[Step]:
    return list(publish(Grafana(double.url, token), wanted, dry_run=dry_run))


def test_everything_comes_to_be_and_a_second_run_changes_nothing(double: Double) -> None:
    """Two data sources, a folder, every dashboard, two annotations; then no write at all."""
    steps = brought(double)
    assert {step.did for step in steps} == {"created"}
    assert len(steps) == 2 + 1 + len(WANTED.documents) + 2
    assert set(double.dashboards) == {json.loads(text)["uid"] for text in WANTED.documents.values()}
    assert {held["meta"]["folderUid"] for held in double.dashboards.values()} == {"kvscope"}
    writes = list(double.writes)
    again = brought(double)
    assert {step.did for step in again} == {"unchanged"}
    assert double.writes == writes


def test_dashboards_are_led_to_the_data_sources_and_the_collector(double: Double) -> None:
    """By the uids that Grafana gave; the secret goes in and never comes out."""
    brought(double)
    document = double.dashboards["kvscope-overview"]["dashboard"]
    variables = {one["name"]: one for one in document["templating"]["list"]}
    assert variables["metrics"]["current"] == {"text": "kvscope Prometheus", "value": "source-1"}
    assert variables["api"]["current"] == {"text": "kvscope API", "value": "source-2"}
    assert variables["collector"]["query"] == "http://kvscope.example"
    (link,) = double.sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["url"] == "http://kvscope.example/requests/${__value.raw}", "an exemplar leads to its request"
    assert double.sources[1]["secureJsonFields"] == {"bearerToken": True}
    assert "the collector's secret" not in json.dumps(double.dashboards)


def test_annotations_are_known_again_by_their_tag(double: Double) -> None:
    """A new mark beside two old ones: one write, in milliseconds."""
    brought(double)
    steps = brought(double, replace(WANTED, notes=(*WANTED.notes, Note("mark", 7_000_000_000, None, "fault"))))
    assert [step.did for step in steps if step.what == "annotation"] == ["unchanged", "unchanged", "created"]
    assert [one["time"] for one in double.annotations] == [5_000, 9_000, 7_000]
    assert all("kvscope" in one["tags"] for one in double.annotations)


def test_what_was_changed_by_hand_is_brought_back(double: Double) -> None:
    """A dashboard with another title, a data source that leads elsewhere."""
    brought(double)
    double.dashboards["kvscope-latency"]["dashboard"]["title"] = "mine"
    double.sources[0]["url"] = "http://elsewhere"
    double.sources[0]["jsonData"]["timeInterval"] = "15s"
    changed = [(step.what, step.name) for step in brought(double) if step.did == "changed"]
    assert changed == [
        ("data source", "kvscope Prometheus"),
        ("dashboard", "kvscope: latency by phase and hit class"),
    ]
    assert double.sources[0]["url"] == "http://127.0.0.1:9090"
    assert double.sources[0]["jsonData"]["timeInterval"] == "15s", "what we have no opinion on stays"


def test_a_dry_run_says_the_same_and_writes_nothing(double: Double) -> None:
    """What would be done is what is done."""
    told = brought(double, dry_run=True)
    assert double.writes == []
    assert told == brought(double)


def test_a_wrong_token_is_said_to_be_one(double: Double) -> None:
    """What to make, and how to give it."""
    with pytest.raises(AccessRefused, match=r"does not know this token.*service account token.*--token-file"):
        brought(double, token="glsa_wrong")
    assert double.writes == []


def test_a_token_that_may_not_is_told_which_role_it_lacks(double: Double) -> None:
    """403 on the first write."""
    double.refuse = 403
    with pytest.raises(AccessRefused, match=r"does not allow it to this token.*role Editor.*Admin"):
        brought(double)


def test_a_missing_data_source_is_named(double: Double) -> None:
    """Without --prometheus it has to be there; of another type it is none."""
    wanted = replace(WANTED, metrics=Source("ours", "prometheus", None))
    with pytest.raises(SourceMissing, match=r"no data source 'ours'.*--prometheus"):
        brought(double, wanted)
    double.keep_source({"name": "ours", "type": "loki", "url": "http://loki"})
    with pytest.raises(SourceMissing, match=r"'ours'.*is of type 'loki', not 'prometheus'"):
        brought(double, wanted)


def test_a_missing_plugin_is_told_before_anything_is_written(double: Double) -> None:
    """With how to install it."""
    double.plugins.clear()
    with pytest.raises(SourceMissing, match=r"no Infinity plugin.*GF_INSTALL_PLUGINS"):
        brought(double)
    assert double.writes == []


def test_what_does_not_answer_is_said_to_be_unreachable(double: Double) -> None:
    """A closed port; something that is no Grafana; an address that is none."""
    with pytest.raises(ServerUnreachable, match=r"no Grafana answers at http://127.0.0.1:1"):
        list(publish(Grafana("http://127.0.0.1:1", TOKEN), WANTED))
    double.is_no_grafana = True
    with pytest.raises(ServerUnreachable, match=r"is no Grafana: its answer is no JSON"):
        brought(double)
    for url in ("grafana", "ftp://x", "http://x:port"):
        with pytest.raises(UsageError):
            Grafana(url, TOKEN)


def test_what_knows_no_path_is_no_grafana_in_which_all_is_missing() -> None:
    """A Prometheus, the collector itself, a proxy: 404 to everything. Nobody installs a plugin there."""

    class Unknown(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = Loopback()
    server.listen(Unknown)
    try:
        with pytest.raises(ServerUnreachable, match=r"is no Grafana.*check the address"):
            list(publish(Grafana(server.url, TOKEN), WANTED))
    finally:
        server.stop()


def test_a_server_error_is_told_with_its_words(double: Double) -> None:
    """500 with a message."""
    double.refuse = 500
    with pytest.raises(PublishError, match=r"could not be made: Grafana at .* says 500, You'll need"):
        brought(double)


def test_verb_publishes_marks_of_a_collector(
    double: Double, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: a mark of the collector becomes an annotation; JSON on stdout; exit codes of errors."""
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    with running(tmp_path / "kvscope.duckdb") as collector:
        collector.post({"mark": [{"mark": "deployed", "at_ns": NOW_NS, "text": "v2"}]}).raise_for_status()
        command = ["dashboards", "publish", "--grafana", double.url, "--token-file", str(token_file)]
        command += ["--collector", collector.url, "--since", "2025-11-28", "--prometheus", "http://p:9090", "--json"]
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        document = json.loads(capsys.readouterr().out)
        assert ended.value.code in (None, 0)
        assert {step["did"] for step in document["steps"]} == {"created"}
        assert [one["text"] for one in double.annotations] == ["deployed v2"]
        token_file.write_text("glsa_wrong")
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 3
        assert json.loads(capsys.readouterr().out)["type"] == "urn:kvscope:error:access-refused"
