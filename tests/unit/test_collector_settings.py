"""Settings: arguments over variables over defaults, and a table that cannot disagree with them."""

from __future__ import annotations

import pytest

from collector.settings import MIB, Settings, load_settings, render_table
from engine_probe.errors import UsageError


def test_defaults_listen_on_loopback_only() -> None:
    """Nobody else's machine reaches a collector that was just started."""
    settings = load_settings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8321)
    assert settings.store_url == "./kvscope.duckdb"
    assert settings.server.token is None


def test_variable_overrides_default_and_argument_overrides_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested variables are joined with two underscores; an argument that is None was not given."""
    monkeypatch.setenv("KVSCOPE_SERVER__PORT", "9000")
    monkeypatch.setenv("KVSCOPE_INGEST__MAX_BODY_BYTES", "1000")
    monkeypatch.setenv("KVSCOPE_RETENTION__MAX_AGE_S", "none")
    assert load_settings(server={"port": None}).server.port == 9000
    assert load_settings(server={"port": 9001}).server.port == 9001
    assert load_settings(server={"port": 9001}).ingest.max_body_bytes == 1000
    assert load_settings().retention.max_age_s is None


def test_names_of_hosts_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list in a variable needs no JSON."""
    monkeypatch.setenv("KVSCOPE_SERVER__ALLOWED_HOSTS", "a.example, b.example,")
    assert load_settings().server.allowed_hosts == ("a.example", "b.example")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVSCOPE_SERVER__PORT", "70000", "server.port"),
        ("KVSCOPE_SERVER__PORT", "web", "server.port"),
        ("KVSCOPE_SQL__TIMEOUT_S", "inf", "sql.timeout_s"),
        ("KVSCOPE_SERVER__DRAIN_TIMEOUT_S", "nan", "server.drain_timeout_s"),
        ("KVSCOPE_SERVER__PROT", "1", "server.prot"),
        ("KVSCOPE_INGEST__MAX_BATCHES", "0", "ingest.max_batches"),
        ("KVSCOPE_LOG__LEVEL", "loud", "log.level"),
        ("KVSCOPE_SERVER", "{", "server"),
    ],
)
def test_setting_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """A typing error in a name is an error too, not a default that nobody asked for."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert said in caught.value.message


def test_every_setting_has_unit_and_description_and_a_row_in_the_table() -> None:
    """The table names each leaf once, with a default, a unit and a text."""
    rows = [line.split(" | ") for line in render_table().splitlines()[2:]]
    names = [row[0].strip("| `") for row in rows]
    assert len(set(names)) == len(names) == _leaves(Settings)
    assert all(len(row) == 4 and all(cell.strip(" |") for cell in row) for row in rows)
    table = dict(zip(names, rows, strict=True))
    assert table["KVSCOPE_INGEST__MAX_BODY_BYTES"][1] == "64 MiB"
    assert Settings.model_fields["ingest"].default_factory().max_body_bytes == 64 * MIB  # type: ignore[misc,call-arg,union-attr]


def test_token_is_not_shown_when_settings_are_printed() -> None:
    """A secret in a log line is no secret."""
    assert "hush" not in repr(load_settings(server={"token": "hush"}))


def _leaves(model: type) -> int:
    from pydantic import BaseModel

    fields = model.model_fields.values()  # type: ignore[attr-defined]
    return sum(
        _leaves(field.annotation)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        else 1
        for field in fields
    )


def test_slo_rules_come_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment; a limit of 0 or an unknown preset is said to make no sense."""
    rule = '[{"name": "gold", "tenant": "acme", "ttft_s": 0.5}, {"name": "slow", "workload": "batch", "e2e_s": 900}]'
    monkeypatch.setenv("KVSCOPE_SLO__RULES", rule)
    monkeypatch.setenv("KVSCOPE_SLO__DEFAULT", "code")
    slo = load_settings().slo
    assert [(one.name, one.tenant, one.workload, one.ttft_s, one.e2e_s) for one in slo.rules] == [
        ("gold", "acme", None, 0.5, None),
        ("slow", None, "batch", None, 900),
    ]
    assert slo.default == "code"
    for wrong in ('[{"name": "Gold!"}]', '[{"name": "g", "ttft_s": 0}]', "no JSON", '[{"nam": "g"}]'):
        monkeypatch.setenv("KVSCOPE_SLO__RULES", wrong)
        with pytest.raises(UsageError, match=r"slo"):
            load_settings()
