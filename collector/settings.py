"""Every setting of the collector in one place: unit, default and description, read from `KVSCOPE_*` variables.

Idea: other layers receive plain values as arguments; only the composition root reads this. README's table is rendered
from these fields (`python -m collector.settings`), so the two cannot disagree. Nested fields are joined with `__`:
`KVSCOPE_SERVER__PORT=9000`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from engine_probe.errors import UsageError
from store.metrics import SLO_GOAL

MIB = 1 << 20
GIB = 1 << 30
_SIZES = ((GIB, "GiB"), (MIB, "MiB"), (1_000_000_000, "GB"))


def _f(default: Any, unit: str, description: str, **limits: Any) -> Any:
    if isinstance(default, float):
        limits["allow_inf_nan"] = False
    return Field(default=default, description=description, json_schema_extra={"unit": unit}, **limits)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Section):
    """Where the collector listens, and to whom it answers."""

    host: str = _f("127.0.0.1", "address", "address to listen on; anything but loopback needs a token")
    port: int = _f(8321, "port", "TCP port to listen on; 0 takes a free one", ge=0, le=65535)
    token: SecretStr | None = _f(None, "secret", "bearer token that every request but the health checks must carry")
    token_file: Path | None = _f(None, "path", "file whose first line is the token (better than the variable)")
    allow_unauthenticated: bool = _f(False, "flag", "listen on other addresses than loopback without a token")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = _f(
        (), "names", "names, separated by commas, accepted in the Host header besides the loopback ones"
    )
    header_timeout_s: float = _f(10.0, "s", "longest time a connection may take to send a request's headers", gt=0)
    body_idle_timeout_s: float = _f(10.0, "s", "longest pause inside a request's body", gt=0)
    body_timeout_s: float = _f(120.0, "s", "longest time for a whole body", gt=0)
    drain_timeout_s: float = _f(15.0, "s", "longest time to finish accepted batches after SIGTERM", gt=0)
    max_connections: int = _f(1024, "connections", "open connections and running requests; above, 503", ge=1)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value


class IngestSettings(_Section):
    """What one batch may be, and how many may be on their way to disk."""

    max_body_bytes: int = _f(64 * MIB, "bytes", "largest body as sent; above, 413", ge=1)
    max_decoded_bytes: int = _f(256 * MIB, "bytes", "largest body once decompressed; above, 413", ge=1)
    max_text_bytes: int = _f(16 * MIB, "bytes", "largest JSON, NDJSON or OTLP body once decompressed; above, 413", ge=1)
    memory_bytes: int = _f(512 * MIB, "bytes", "bodies in flight together, decompressed; above, 429", ge=1)
    max_batches: int = _f(64, "batches", "batches in flight together; above, 429", ge=1)
    decode_threads: int = _f(2, "threads", "batches decoded and validated at the same time", ge=1)
    commit_timeout_s: float = _f(30.0, "s", "longest wait for the store to commit a batch; above, 429", gt=0)
    retry_after_s: int = _f(1, "s", "Retry-After of a 429 or 503", ge=1)


class ReadSettings(_Section):
    """Limits of the read API."""

    max_concurrent: int = _f(2, "queries", "read queries running at the same time; others wait", ge=1)
    max_waiting: int = _f(64, "queries", "read queries waiting for their turn; above, 429", ge=0)
    page_rows: int = _f(100, "rows", "rows of a page where the caller names no limit", ge=1)
    max_page_rows: int = _f(5_000, "rows", "most rows of a page", ge=1)
    max_points: int = _f(5_000, "points", "most points of one time series", ge=1)
    keep_findings: int = _f(100, "verdicts", "verdicts kept for /api/v1/findings", ge=1)
    open_requests: int = _f(20_000, "requests", "open requests followed in the live table", ge=1)
    open_expiry_s: float = _f(3_600.0, "s", "an open request unheard of for so long leaves the live table", gt=0)


class SqlSettings(_Section):
    """Limits of SQL for people, which runs in a child process."""

    timeout_s: float = _f(30.0, "s", "a query is killed after so long", gt=0)
    memory_bytes: int = _f(
        GIB, "bytes", "memory of the child process; as much again for rows in no sealed file", ge=64 * MIB
    )
    max_rows: int = _f(1_000_000, "rows", "most rows of an answer", ge=1)
    max_children: int = _f(2, "processes", "queries running at the same time; others get 429", ge=1)


class RetentionSettings(_Section):
    """How long and how much is kept; named runs stay. `none` lifts a limit."""

    interval_s: float = _f(60.0, "s", "time between two passes of upkeep (sealing, deleting, checkpoint)", gt=0)
    seal_after_s: float | None = _f(
        300.0, "s", "rows older than this are sealed into Parquet beside the database", gt=0
    )
    seal_min_rows: int = _f(200_000, "rows", "fewer such rows of a kind wait for more, an hour at most", ge=0)
    max_age_s: float | None = _f(48 * 3600.0, "s", "age up to which live rows stay in the database", gt=0)
    max_bytes: int | None = _f(50_000_000_000, "bytes", "most data in the database; the oldest goes first", gt=0)
    parquet_max_age_s: float | None = _f(14 * 86400.0, "s", "age up to which Parquet files of live rows stay", gt=0)
    disk_budget_bytes: int | None = _f(None, "bytes", "database and Parquet together; above, batches get 507", gt=0)
    key_age_s: float | None = _f(7 * 86400.0, "s", "an Idempotency-Key is remembered for so long", gt=0)


class MetricsSettings(_Section):
    """Size of `/metrics`."""

    max_series: int = _f(100, "series", "worker and model pairs with own histograms; later ones share `other`", ge=1)
    max_sources: int = _f(200, "sources", "senders with their own series; later ones share `other`", ge=1)
    top_tenants: int = _f(20, "tenants", "the largest tenants with own series; the rest is `other`", ge=1)
    top_prefixes: int = _f(20, "prefixes", "the prefixes most asked for with own series; the rest is `other`", ge=1)
    ledger_interval_s: float | None = _f(
        30.0,
        "s",
        "time between two passes of the live ledger (cause-seconds, regret, hotspots); `none` turns it off",
        gt=0,
    )
    ledger_lookback_s: float = _f(
        300.0, "s", "newest requests that a pass reads; longer ones are counted as skipped", gt=0
    )
    ledger_max_busy_ratio: float = _f(
        0.2, "ratio", "share of the time that passes may take; slow ones come more seldom", gt=0, le=1
    )


class SloSetting(_Section):
    """One rule: which requests it is for (unset: any), and the limits that they must meet (unset: none)."""

    name: str = Field(pattern="^[a-z0-9_]+$")
    model: str | None = None
    workload: str | None = None
    tenant: str | None = None
    ttft_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    e2e_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class SloSettings(_Section):
    """What requests are held to: the first rule that fits, else the preset of their workload, else the default."""

    default: Literal["interactive", "code", "batch"] = _f(
        "interactive", "preset", "preset of requests without a workload of a preset"
    )
    rules: tuple[SloSetting, ...] = _f(
        (), "JSON", 'first that fits wins: `[{"name": "gold", "tenant": "acme", "ttft_s": 0.5, "tpot_s": 0.05}]`'
    )
    goal: float = _f(
        SLO_GOAL,
        "ratio",
        "share of the requests that should meet their SLO: error budgets of rules and dashboards are what is left",
        ge=0.95,
        le=0.9999,
    )


class AlertSettings(_Section):
    """What the evaluator looks for in live rows, and who is told."""

    enabled: bool = _f(True, "flag", "look at live rows again and again, and raise alerts")
    receivers_file: Path | None = _f(None, "path", "YAML or JSON file of who is told (docs/alerts.md)")
    public_url: str | None = _f(
        None, "URL", "under which people reach this collector, for links in messages; default its address and port"
    )
    interval_s: float = _f(60.0, "s", "time between two looks", gt=0)
    window_s: float = _f(300.0, "s", "length of the window that is looked at", gt=0)
    settle_s: float = _f(30.0, "s", "the window ends so long before now: rows come when requests end", ge=0)
    hold_s: float = _f(300.0, "s", "length of the second window, which has to show it before an alert fires", gt=0)
    cool_down_s: float = _f(300.0, "s", "quiet for so long before an alert is resolved", ge=0)
    lost_s: float = _f(3_600.0, "s", "resolved when for so long nothing could tell whether it goes on", gt=0)
    metrics: Annotated[tuple[Literal["ttft", "tpot", "e2e"], ...], NoDecode] = _f(
        ("ttft", "tpot"), "names", "latencies whose rise is looked for, separated by commas"
    )
    min_change_ratio: float = _f(0.2, "ratio", "a smaller rise of latency is nobody's page", ge=0)
    min_regret_s: float = _f(0.05, "s", "a hotspot that lost less time a request is nobody's page", ge=0)
    max_busy_ratio: float = _f(
        0.2, "ratio", "share of the time that looking may take; slow looks come more seldom", gt=0, le=1
    )
    retry_first_s: float = _f(1.0, "s", "wait before the first retry of a message; doubles with each", gt=0)
    retry_limit_s: float = _f(300.0, "s", "longest wait between two retries", gt=0)
    give_up_s: float = _f(86_400.0, "s", "a message that could not be delivered for so long is a dead letter", gt=0)

    @field_validator("metrics", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value


class LogSettings(_Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = _f("info", "level", "least severity that is logged")
    format: Literal["auto", "text", "json"] = _f("auto", "format", "auto: text on a terminal, JSON elsewhere")


class Settings(BaseSettings):
    """Settings of `kvscope serve`; arguments win over variables, variables over defaults."""

    model_config = SettingsConfigDict(
        env_prefix="KVSCOPE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        env_parse_none_str="none",
    )

    store_url: str = _f("./kvscope.duckdb", "path or URL", "the store: path of a DuckDB file, or a store URL")
    store_memory_bytes: int = _f(
        512 * MIB, "bytes", "memory of the database; what does not fit goes to disk", ge=64 * MIB
    )
    server: ServerSettings = Field(default_factory=ServerSettings)
    ingest: IngestSettings = Field(default_factory=IngestSettings)
    read: ReadSettings = Field(default_factory=ReadSettings)
    sql: SqlSettings = Field(default_factory=SqlSettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    slo: SloSettings = Field(default_factory=SloSettings)
    alerts: AlertSettings = Field(default_factory=AlertSettings)
    log: LogSettings = Field(default_factory=LogSettings)


def load_settings(**given: Any) -> Settings:
    """Settings from arguments over variables over defaults; a None inside means not given. Raises UsageError."""
    try:
        return Settings(**_without_none(given))
    except ValidationError as error:
        wrong = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise UsageError(f"settings make no sense: {'; '.join(wrong)}", invalid=wrong) from error
    except SettingsError as error:
        raise UsageError(f"settings make no sense: {error}") from error


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_none(value) if isinstance(value, dict) else value for key, value in given.items()}
    return {key: value for key, value in kept.items() if value is not None}


def render_table() -> str:
    """Markdown table of every setting, for README: variable, default, unit, what it is."""
    lines = ["| Variable | Default | Unit | What it is |", "| --- | --- | --- | --- |"]
    for variable, default, unit, description in _walk(Settings, "KVSCOPE_"):
        lines.append(f"| `{variable}` | {default} | {unit} | {description} |")
    return "\n".join(lines) + "\n"


def _walk(model: type[BaseModel], prefix: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, field in model.model_fields.items():
        variable = prefix + name.upper()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += _walk(field.annotation, variable + "__")
            continue
        extra = field.json_schema_extra
        unit = str(extra["unit"]) if isinstance(extra, dict) else ""
        rows.append((variable, _shown(field.default, unit), unit, str(field.description)))
    return rows


def _shown(value: Any, unit: str) -> str:
    if value is None or value == ():
        return "none"
    if unit == "bytes":
        unit_bytes, name = next((size for size in _SIZES if value % size[0] == 0), (1, "B"))
        return f"{value // unit_bytes} {name}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(render_table(), end="")
