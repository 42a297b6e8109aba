"""The one tree of errors. Each error keeps its facts as attributes and says what to do next.

    KvscopeError
    +-- ProbeError            engine_probe: speaking to an engine or a collector
    |   +-- EngineUnreachable    nothing answers at the address
    |   +-- UnknownFormat        it answers, but not in a format we know
    |   +-- InvalidRows          rows that break the event contract
    |   +-- TooLarge             more bytes than the receiver takes, as sent or after decompression
    +-- EngineError           engine_probe.engine: the embedded engine
    |   +-- PromptRefused        a request that can never run here: no tokens, too long, parameters out of range
    |   +-- ModelUnreadable      weights, config or tokenizer cannot be read as what they say they are
    |   +-- DeviceMissing        the device asked for is not there, or too small
    |   +-- EngineNotReady       draining before it stops, or dead after a failure
    |   +-- UnknownModel         a request for another model than the one that is served
    |   +-- RequestTimedOut      a request that was older than the engine allows
    +-- StoreError            store: remembering
    |   +-- StoreMisuse          a place, kind, column or run that was named is none, or the verb is not for this store
    |   +-- StoreDamaged         what is on disk cannot be read any more
    |   +-- SchemaTooNew         the database was written by a newer kvscope
    |   +-- BatchRejected        the batch cannot be stored as it is
    |   +-- StoreBusy            the queue is full, or another process holds the file
    |   +-- OutOfMemory          the database's memory does not do for it, at least not now
    |   +-- DiskFull             no space is left, or the disk budget is used up
    |   +-- QueryRefused         the SQL is not allowed
    |   +-- QueryKilled          the SQL ran past its time or memory
    +-- DiagnosisError        diagnosis: judging
    |   +-- BadWindow            the window is empty, unknown, or makes no sense
    +-- AlertError            alerts
    |   +-- AlertMisuse          a matcher, a silence, a rule or a receiver that makes no sense
    |   +-- AddressRefused       a webhook leads to an address that is not allowed
    |   +-- DeliveryFailed       a receiver could not be reached, or did not take the message
    +-- PublishError          dashboards
    |   +-- ServerUnreachable    no Grafana or Prometheus answers at the address
    |   +-- AccessRefused        Grafana does not let this token in, or not do this
    |   +-- SourceMissing        Grafana has no such data source, or not the plugin that it needs
    |   +-- BoardsMissing        generated dashboards are missing, or are not what the sources make
    +-- UsageError            collector: a command or a setting that makes no sense
    +-- CollectorError        collector: the border of the service
        +-- BadRequest           the request cannot be read as what it says it is
        +-- Unauthorized         no token, or the wrong one
        +-- WrongHost            the Host or Origin is not one of ours
        +-- NotFound             no such thing is stored
        +-- BodyTimeout          the client stopped sending in mid-body
        +-- TooManyBatches       the ingest queue or its memory is full
        +-- TooManyQueries       enough read queries run and wait
        +-- TooManyReaders       enough readers follow the overview live
        +-- NotReady             starting, or draining before it stops
        +-- CollectorUnreachable no collector answers at the address
        +-- CannotListen         the address is in use, or not allowed
        +-- BackendUnreachable   no OTLP backend takes spans at the address
        +-- BackendRefused       an OTLP backend answers that it will not take them

`http_status` and `exit_code` say how the border shows an error (problem+json, process exit); `title` is its short
constant name. No error exits with 1: that is the word of a verb that did its work and found something. An error is 2
where another command, argument, setting or row would do, and 3 where the other side (engine, collector, store, disk)
could not be reached or could not do it.
"""

from __future__ import annotations

from typing import Any, ClassVar

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_MISUSE = 2
EXIT_UNREACHABLE = 3
EXIT_DEFECT = 70
"""A defect of kvscope itself, told with its traceback (EX_SOFTWARE of sysexits.h)."""
EXIT_STOPPED = 130
"""Ended by Ctrl+C before its work was done, as shells say it."""


class KvscopeError(Exception):
    """Base of all errors that kvscope raises on purpose."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_UNREACHABLE
    title: ClassVar[str] = "kvscope error"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)


class ProbeError(KvscopeError):
    http_status = 502
    title = "Probe failed"


class EngineUnreachable(ProbeError):
    exit_code = EXIT_UNREACHABLE
    title = "Engine not reachable"


class UnknownFormat(ProbeError):
    http_status = 415
    exit_code = EXIT_MISUSE
    title = "Format not known"


class InvalidRows(ProbeError):
    """Rows that break the contract. Facts: kind, row, column, value, expected."""

    http_status = 422
    exit_code = EXIT_MISUSE
    title = "Rows do not match the event contract"


class TooLarge(ProbeError):
    """A body larger than allowed, as sent or after decompression. Facts: limit_bytes."""

    http_status = 413
    exit_code = EXIT_MISUSE
    title = "Too large"


class EngineError(KvscopeError):
    title = "Engine failed"


class PromptRefused(EngineError):
    http_status = 400
    exit_code = EXIT_MISUSE
    title = "Request refused by the engine"


class ModelUnreadable(EngineError):
    http_status = 422
    exit_code = EXIT_MISUSE
    title = "Model cannot be read"


class DeviceMissing(EngineError):
    http_status = 503
    title = "Device is not there"


class EngineNotReady(EngineError):
    http_status = 503
    title = "Engine is not ready"


class UnknownModel(EngineError):
    http_status = 404
    exit_code = EXIT_MISUSE
    title = "No such model"


class RequestTimedOut(EngineError):
    http_status = 504
    title = "Request ran out of time"


class StoreError(KvscopeError):
    title = "Store failed"


class StoreMisuse(StoreError):
    http_status = 400
    exit_code = EXIT_MISUSE
    title = "Not possible with this store"


class StoreDamaged(StoreError):
    title = "Store is damaged"


class SchemaTooNew(StoreError):
    http_status = 503
    exit_code = EXIT_MISUSE
    title = "Database is newer than this kvscope"


class BatchRejected(StoreError):
    http_status = 422
    exit_code = EXIT_MISUSE
    title = "Batch rejected"


class StoreBusy(StoreError):
    http_status = 429
    exit_code = EXIT_UNREACHABLE
    title = "Store is busy"


class OutOfMemory(StoreError):
    """The database's memory limit was reached. Facts: retry_after_s."""

    http_status = 503
    exit_code = EXIT_UNREACHABLE
    title = "Memory is short"


class DiskFull(StoreError):
    http_status = 507
    title = "Disk is full"


class QueryRefused(StoreError):
    http_status = 400
    exit_code = EXIT_MISUSE
    title = "Query refused"


class QueryKilled(StoreError):
    http_status = 408
    exit_code = EXIT_MISUSE
    title = "Query stopped"


class DiagnosisError(KvscopeError):
    http_status = 422
    exit_code = EXIT_MISUSE
    title = "Diagnosis failed"


class BadWindow(DiagnosisError):
    http_status = 400
    title = "Window makes no sense"


class AlertError(KvscopeError):
    title = "Alert failed"


class AlertMisuse(AlertError):
    http_status = 400
    exit_code = EXIT_MISUSE
    title = "Alerting makes no sense"


class AddressRefused(AlertError):
    http_status = 403
    exit_code = EXIT_MISUSE
    title = "Address refused"


class DeliveryFailed(AlertError):
    """Facts: status (HTTP, None where nothing answered), is_final (no sense in trying again), retry_after_s."""

    http_status = 502
    title = "Delivery failed"


class PublishError(KvscopeError):
    http_status = 502
    exit_code = EXIT_UNREACHABLE
    title = "Publishing failed"


class ServerUnreachable(PublishError):
    title = "Server cannot be reached"


class AccessRefused(PublishError):
    """Facts: status."""

    title = "Grafana refuses access"


class SourceMissing(PublishError):
    http_status = 404
    exit_code = EXIT_MISUSE
    title = "Data source missing"


class BoardsMissing(PublishError):
    http_status = 500
    exit_code = EXIT_MISUSE
    title = "Dashboards missing"


class UsageError(KvscopeError):
    http_status = 400
    exit_code = EXIT_MISUSE
    title = "Usage makes no sense"


class CollectorError(KvscopeError):
    title = "Collector failed"


class BadRequest(CollectorError):
    http_status = 400
    exit_code = EXIT_MISUSE
    title = "Request cannot be read"


class Unauthorized(CollectorError):
    http_status = 401
    exit_code = EXIT_MISUSE
    title = "Token missing or wrong"


class WrongHost(CollectorError):
    http_status = 403
    exit_code = EXIT_MISUSE
    title = "Host or origin not allowed"


class NotFound(CollectorError):
    http_status = 404
    exit_code = EXIT_MISUSE
    title = "Not found"


class BodyTimeout(CollectorError):
    http_status = 408
    exit_code = EXIT_UNREACHABLE
    title = "Body did not arrive in time"


class TooManyBatches(CollectorError):
    """Facts: retry_after_s."""

    http_status = 429
    exit_code = EXIT_UNREACHABLE
    title = "Collector is busy"


class TooManyQueries(CollectorError):
    """Facts: retry_after_s."""

    http_status = 429
    exit_code = EXIT_UNREACHABLE
    title = "Too many queries"


class TooManyReaders(CollectorError):
    """Facts: retry_after_s, limit."""

    http_status = 503
    exit_code = EXIT_UNREACHABLE
    title = "Too many readers"


class NotReady(CollectorError):
    http_status = 503
    exit_code = EXIT_UNREACHABLE
    title = "Collector is not ready"


class CollectorUnreachable(CollectorError):
    http_status = 502
    exit_code = EXIT_UNREACHABLE
    title = "Collector not reachable"


class CannotListen(CollectorError):
    exit_code = EXIT_UNREACHABLE
    title = "Cannot listen"


class BackendUnreachable(CollectorError):
    http_status = 502
    exit_code = EXIT_UNREACHABLE
    title = "OTLP backend not reachable"


class BackendRefused(CollectorError):
    """The backend answered, and will not take the spans. Facts: url, status."""

    http_status = 502
    exit_code = EXIT_UNREACHABLE
    title = "OTLP backend refuses"
