"""kvscope inside vLLM: a stat-logger plugin that turns vLLM's own statistics into `step`, `request` and `worker` rows.

vLLM finds it by its entry point (group `vllm.stat_logger_plugins`) and calls `record` on the API server's event loop
once an engine step. Invariant: the engine is never hurt. `record` builds rows and appends them to a bounded buffer; a
thread sends them; whatever goes wrong is swallowed, counted and logged once; a full buffer drops steps before requests
and says so with a `gap` mark. Without KVSCOPE_URL, or with KVSCOPE_OFF=1, it does nothing at all.

    KVSCOPE_URL        collector (http://host:8321), or file:///folder to write Parquet there
    KVSCOPE_TOKEN      token of the collector
    KVSCOPE_WORKER     name of this engine; the same name must be given to `kvscope attach` (which reads it by itself)
    KVSCOPE_SPOOL_DIR  folder that keeps rows while the collector is away
    KVSCOPE_SAMPLE     share of the requests whose rows are kept, such as 0.1 (chosen by id, as every other probe chooses)
    KVSCOPE_OFF        1 switches the plugin off

Source: vLLM 0.32.0 `v1/metrics/loggers.py`; reference 4.7 for the other releases.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from engine_probe.adapters.vllm import worker_name
from engine_probe.attach.names import folder_name, source_name, spool_folder
from engine_probe.errors import ProbeError, UsageError
from engine_probe.sampling import Sampling
from engine_probe.sending.outbox import Outbox
from engine_probe.vllm.facts import Geometry, attribute, geometry_of, read, worker_row
from engine_probe.vllm.stats import FirstTokens, StepRows, cache_was_reset, request_rows

if TYPE_CHECKING:
    from engine_probe.sending.sink import Sink

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except ImportError as _missing:
    StatLoggerBase = object
    _import_error: ImportError | None = _missing
else:
    _import_error = None

# A child of vLLM's logger: our few lines appear in the engine's log, in its format.
log = logging.getLogger("vllm.kvscope")


class KvscopeStatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """What vLLM instantiates, once for each data-parallel engine. Raises ProbeError only where vLLM is absent."""

    def __init__(self, vllm_config: Any, engine_index: int = 0, *_: Any, **__: Any) -> None:
        if _import_error is not None:
            raise ProbeError(
                "The plugin runs inside vLLM, and vLLM cannot be imported in this environment "
                f"({_import_error}). Install kvscope into the environment that runs vLLM."
            ) from _import_error
        self._tap: EngineTap | None = None
        try:
            self._tap = open_tap(vllm_config, engine_index, os.environ)
        except Exception:
            log.exception("kvscope could not start and records nothing; the engine is not affected")

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        """Take one engine step's statistics. Never raises, never blocks."""
        if self._tap is not None:
            self._tap.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """The KV cache has its size now: tell version and geometry."""
        if self._tap is not None:
            self._tap.engine_initialized()

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """The engine was put to sleep or woken (vLLM passes sleep=1 on going to sleep and when partly awake)."""
        if self._tap is not None:
            self._tap.sleep_state(is_awake, level)


def open_tap(vllm_config: Any, engine_index: int, env: Mapping[str, str]) -> EngineTap | None:
    """The tap that the environment asks for, or None where it is off or has nowhere to send to."""
    if env.get("KVSCOPE_OFF", "").lower() in ("1", "true", "yes", "on"):
        log.info("kvscope is switched off (KVSCOPE_OFF)")
        return None
    url = env.get("KVSCOPE_URL", "").strip()
    if not url:
        log.info("kvscope is installed but records nothing: set KVSCOPE_URL to the collector (http://host:8321)")
        return None
    base = env.get("KVSCOPE_WORKER") or default_worker(sys.argv, socket.gethostname())
    worker = worker_name(base, engine_index)
    frontends = read(vllm_config, "parallel_config._api_process_count") or 1
    source = source_name("vllm", worker)
    if frontends != 1:  # each API server process is a sender of its own
        source = source_name("vllm", worker, f"frontend{read(vllm_config, 'parallel_config._api_process_rank') or 0}")
    sink = make_sink(url, source, env.get("KVSCOPE_TOKEN"), env.get("KVSCOPE_SPOOL_DIR"))
    log.info("kvscope records worker %s to %s", worker, url)
    return EngineTap(
        vllm_config,
        worker,
        Outbox(sink, log=log),
        publish=PrometheusFacts(worker, engine_index),
        sampling=sampling_of(env.get("KVSCOPE_SAMPLE", "")),
    )


def sampling_of(text: str) -> Sampling:
    """The share that KVSCOPE_SAMPLE asks for; all where it asks for none, or for one that makes no sense."""
    try:
        return Sampling(float(text)) if text.strip() else Sampling()
    except (ValueError, UsageError):
        log.warning("KVSCOPE_SAMPLE is %r; expected a share above 0, at most 1. All requests are kept.", text[:40])
        return Sampling()


def default_worker(argv: Sequence[str], host: str) -> str:
    """`host:port` with the port of the server's command line; the host alone where it names none."""
    for position, word in enumerate(argv):
        if word == "--port" and position + 1 < len(argv):
            return f"{host}:{argv[position + 1]}"
        if word.startswith("--port="):
            return f"{host}:{word[7:]}"
    return host


def make_sink(url: str, source: str, token: str | None, spool_dir: str | None) -> Sink:
    """The sink that KVSCOPE_URL names. Raises ProbeError where it names none."""
    from engine_probe.sending.sink import FileSink, HttpSink

    parts = urlsplit(url)
    folder = spool_folder(spool_dir, source)
    if parts.scheme == "file":
        return FileSink(Path(unquote(parts.path)) / folder_name(source))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProbeError(
            f"KVSCOPE_URL is {url!r}; expected http://host:port of a collector, or file:///folder.",
            setting="KVSCOPE_URL",
        )
    return HttpSink(url, source, token=token or None, spool_dir=folder)


class EngineTap:
    """Rows of one engine: called on the engine's own thread, so every verb is quick and swallows what goes wrong."""

    def __init__(
        self,
        vllm_config: Any,
        worker: str,
        outbox: Outbox,
        *,
        clock: Callable[[], int] = time.time_ns,
        publish: PrometheusFacts | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling or Sampling()
        self._config = vllm_config
        self._worker = worker
        self._outbox = outbox
        self._clock = clock
        self._publish = publish
        self._errors: Counter[str] = Counter()
        self._first_tokens = FirstTokens()
        self._set_geometry(Geometry())

    @property
    def errors(self) -> Mapping[str, int]:
        """What was swallowed: error type -> times."""
        return self._errors

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """One engine step: a `step` row where this front end got the scheduler's statistics, and what finished."""
        try:
            stamp = attribute(iteration_stats, "iteration_timestamp")
            at_ns = round(stamp * 1e9) if isinstance(stamp, float) and stamp > 0 else self._clock()
            if iteration_stats is not None:
                self._first_tokens.note(iteration_stats)
                for row in request_rows(iteration_stats, self._worker, self._geometry, at_ns, self._first_tokens):
                    if self._sampling.keeps_request(row["request_id"]):
                        self._outbox.put("request", row | {"sample_rate": self._sampling.sample_rate})
            if scheduler_stats is not None:
                self._outbox.put("step", self._steps.row(scheduler_stats, iteration_stats, at_ns))
                if cache_was_reset(scheduler_stats):
                    self._mark("cache_reset", "the prefix cache was reset", at_ns)
        except Exception as error:
            self._swallow(error)

    def engine_initialized(self) -> None:
        """Version and geometry as a `worker` row, and a `worker_up` mark."""
        try:
            at_ns = self._clock()
            version = read(sys.modules.get("vllm"), "__version__")
            self._set_geometry(geometry_of(self._config))
            facts = worker_row(
                self._config, self._worker, self._geometry, version=version, host=socket.gethostname(), at_ns=at_ns
            )
            self._outbox.put("worker", facts)
            self._mark("worker_up", f"vLLM {version or '(version unknown)'} is ready", at_ns)
        except Exception as error:
            self._swallow(error)

    def sleep_state(self, asleep: int, level: int) -> None:
        """A mark: what runs and waits during sleep is not the load's fault."""
        try:
            text = f"the engine sleeps (level {level})" if asleep and level else "the engine is awake"
            self._mark("config_changed", text, self._clock())
        except Exception as error:
            self._swallow(error)

    def _set_geometry(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._steps = StepRows(self._worker, geometry)

    def _mark(self, mark: str, text: str, at_ns: int) -> None:
        attrs = {"seen_by": "plugin"}
        self._outbox.put(
            "mark",
            {
                "mark": mark,
                "subject": self._worker,
                "worker": self._worker,
                "at_ns": at_ns,
                "text": text,
                "attrs": attrs,
            },
        )

    def _swallow(self, error: Exception) -> None:
        name = type(error).__name__
        self._errors[name] += 1
        if self._errors[name] == 1:
            log.warning("kvscope left out statistics it could not read (said once): %s", error, exc_info=error)
        if self._publish is not None:
            self._publish.count_error()


class PrometheusFacts:
    """Our name on the engine's /metrics page, so that `kvscope attach` uses the same worker name by itself."""

    def __init__(self, worker: str, engine_index: int) -> None:
        self._errors: Any = None
        try:
            from prometheus_client import REGISTRY, Gauge
            from prometheus_client import Counter as PrometheusCounter

            known = getattr(REGISTRY, "_names_to_collectors", {})
            info = known.get("kvscope_plugin_info") or Gauge(
                "kvscope_plugin_info",
                "kvscope records this engine.",
                ["worker", "engine"],
                multiprocess_mode="mostrecent",
            )
            self._errors = known.get("kvscope_plugin_errors") or PrometheusCounter(
                "kvscope_plugin_errors", "Statistics that kvscope could not read."
            )
            info.labels(worker=worker, engine=str(engine_index)).set(1)
        except Exception as error:
            log.debug("kvscope is not shown on /metrics: %s", error)

    def count_error(self) -> None:
        if self._errors is not None:
            self._errors.inc()
