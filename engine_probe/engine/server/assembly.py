"""Puts the server together from a model, settings and a sink: the one place where its parts meet."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp

from engine_probe.clock import Clock
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.flight import ENGINE
from engine_probe.engine.kv_manager import KvListener
from engine_probe.engine.server.app import create_app
from engine_probe.engine.server.cross_origin import CrossOrigin
from engine_probe.engine.server.engine_thread import EngineThread
from engine_probe.engine.server.front_end import FrontEnd
from engine_probe.engine.server.guard import Guard
from engine_probe.engine.server.kv_publisher import KvPublisher
from engine_probe.engine.server.metrics_page import MetricsPage
from engine_probe.engine.server.model import ServedModel
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import Sink


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """kv_events, kv_replay: endpoints (`kv_publisher.py`); None: not published.

    token         what clients must bring; None: nothing
    checks_host   answer to names of this machine alone
    origins       of pages of other sites that may use it, or `*`
    records       the sink keeps rows: whoever follows this engine from outside is told that they are there already
    """

    kv_events: str | None = None
    kv_replay: str | None = None
    kv_topic: str = ""
    token: str | None = None
    checks_host: bool = True
    origins: frozenset[str] = frozenset()
    records: bool = False


@dataclass(frozen=True, slots=True)
class Assembled:
    """A server that is ready to be started."""

    app: ASGIApp
    front: FrontEnd
    engine: Engine
    thread: EngineThread
    page: MetricsPage
    recorder: Recorder
    publisher: KvPublisher | None

    def close(self) -> None:
        """End the engine, then what listens to it; rows are with the sink afterwards."""
        self.thread.close()
        if self.publisher is not None:
            self.publisher.close()
        self.recorder.close()


def assemble(
    model: ServedModel,
    config: EngineConfig,
    sink: Sink,
    options: ServerOptions | None = None,
    clock: Clock | None = None,
) -> Assembled:
    """The parts, wired. Nothing runs yet but the recorder's flush and the publisher. Raises UsageError, CannotListen."""
    options = options or ServerOptions()
    clock = clock or Clock()
    config = replace(config, identity=model.identity)
    name = model.names[0]
    publisher = None
    if options.kv_events is not None:
        publisher = KvPublisher(
            config.block_size,
            options.kv_events,
            lambda: clock.now_ns() / 1e9,
            replay=options.kv_replay,
            topic=options.kv_topic,
        )
    constants: dict[str, dict[str, Any]] = {
        "request": {"engine": ENGINE, "model": name, "vantage": "engine"},
        "step": {"policy": config.scheduler.policy, "attention_backend": model.executor.attention.name},
        "worker": {"chat_template_version": model.template.version, "host": platform.node() or None},
    }
    recorder = Recorder(sink, worker=config.worker, constants=constants, clock=clock)
    facts = {"worker": config.worker, "model": name, "device": str(model.executor.device), **config.flags()}
    page = MetricsPage(name, config, model.executor, facts, recorder, is_recorded=options.records)
    listeners: list[KvListener] = [page] if publisher is None else [page, publisher]
    engine = Engine(config, model.executor, recorder, listeners=listeners)
    thread = EngineThread(engine, page, publisher)
    front = FrontEnd(model, engine, thread, page)
    app = Guard(
        create_app(front, page, publisher),
        token=options.token,
        checks_host=options.checks_host,
        pages=CrossOrigin(options.origins),
    )
    return Assembled(app, front, engine, thread, page, recorder, publisher)
