"""OTLP metrics (protobuf and JSON) -> points: one number, or one histogram, of one series at one instant.

Both wire forms become the same `Point`; what they mean for a store of cumulative samples is `otlp_series`' business.
Durations are brought to seconds and sizes to bytes, so that a name's unit is always the base unit. Invariant: hostile
bytes raise UnknownFormat, never anything else; a point that has no recorded value is left out. Source: OTLP 1.x
`metrics.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import msgspec

from engine_probe.errors import UnknownFormat

PROTOBUF_TYPES: Final = ("application/x-protobuf", "application/protobuf", "application/octet-stream")
MAX_ATTRIBUTES: Final = 64
MAX_VALUE_CHARS: Final = 1_024
MIN_INSTANT_NS: Final = 10**17
DAY_NS: Final = 86_400 * 10**9
_DELTA: Final = 1  # AGGREGATION_TEMPORALITY_DELTA
_NO_VALUE: Final = 1  # DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_TO_BASE: Final = {
    "ns": (1e-9, "s"),
    "us": (1e-6, "s"),
    "ms": (1e-3, "s"),
    "min": (60.0, "s"),
    "h": (3600.0, "s"),
    "KiBy": (1024.0, "By"),
    "MiBy": (1024.0**2, "By"),
    "GiBy": (1024.0**3, "By"),
}
_INT64_MAX: Final = (1 << 63) - 1

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Exponential:
    """Buckets of an exponential histogram: `counts[i]` lies in (base^(offset+i), base^(offset+i+1)], base 2^(2^-scale)."""

    scale: int
    zero_count: float
    zero_threshold: float
    offset: int
    counts: Sequence[float]
    num_negative: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """One data point.

    kind      gauge | sum (not monotonic) | counter | histogram | exponential | summary
    value     of a gauge, sum or counter
    count, total, bounds, counts   of a histogram: counts[i] lies in (bounds[i-1], bounds[i]], the last one above all
    quantiles of a summary: (quantile, value)
    """

    name: str
    unit: str
    kind: str
    is_delta: bool
    at_ns: int
    labels: Labels
    value: float = 0.0
    count: float = 0.0
    total: float | None = None
    bounds: Sequence[float] = ()
    counts: Sequence[float] = ()
    exponential: Exponential | None = None
    quantiles: Sequence[tuple[float, float]] = field(default=())


@dataclass(frozen=True, slots=True)
class Metrics:
    """Points of one resource; `resource` is its attributes as text, `refused` says why points were left out."""

    resource: Mapping[str, str]
    points: Sequence[Point]
    refused: Sequence[str] = ()


def decode_points(body: bytes, content_type: str, received_ns: int) -> list[Metrics]:
    """Decode one ExportMetricsServiceRequest (already decompressed). Raises UnknownFormat.

    received_ns  stands in where a point has no usable instant, and bounds those that have one (0: neither)
    """
    kind = content_type.split(";")[0].strip().lower()
    if kind == "application/json":
        return _json(body, received_ns)
    if kind in PROTOBUF_TYPES:
        return _protobuf(body, received_ns)
    raise UnknownFormat(
        f"Metrics came as {content_type!r}; send application/x-protobuf or application/json (OTLP/HTTP).",
        content_type=content_type,
    )


# --- protobuf


def _protobuf(body: bytes, received_ns: int) -> list[Metrics]:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, RecursionError, ValueError) as error:
        raise UnknownFormat(f"The metrics body ({len(body)} bytes) is not an OTLP protobuf message: {error}") from error
    found = []
    for of_resource in request.resource_metrics:
        points: list[Point] = []
        refused: list[str] = []
        for scope in of_resource.scope_metrics:
            for metric in scope.metrics:
                which = metric.WhichOneof("data")
                if which is None:
                    continue
                data = getattr(metric, which)
                is_delta = getattr(data, "aggregation_temporality", 0) == _DELTA
                is_monotonic = getattr(data, "is_monotonic", False)
                for point in data.data_points:
                    if not point.flags & _NO_VALUE:
                        labels = _labels((pair.key, _protobuf_value(pair.value)) for pair in point.attributes)
                        told = _Told(
                            metric.name, metric.unit, which, is_monotonic, is_delta, point.time_unix_nano, labels
                        )
                        try:
                            points.append(_protobuf_point(told, point, received_ns))
                        except UnknownFormat as error:
                            refused.append(error.message)
        resource = dict(_labels((pair.key, _protobuf_value(pair.value)) for pair in of_resource.resource.attributes))
        found.append(Metrics(resource, points, refused))
    return found


def _protobuf_value(value: Any) -> Any:
    which = value.WhichOneof("value")
    return getattr(value, which) if which in ("string_value", "bool_value", "int_value", "double_value") else None


def _protobuf_point(told: _Told, point: Any, received_ns: int) -> Point:
    if told.which in ("gauge", "sum"):
        which = point.WhichOneof("value")
        return told.number(0.0 if which is None else getattr(point, which), received_ns)
    if told.which == "histogram":
        total = point.sum if point.HasField("sum") else None
        return told.histogram(point.count, total, point.explicit_bounds, point.bucket_counts, received_ns)
    if told.which == "exponential_histogram":
        shape = Exponential(
            point.scale,
            point.zero_count,
            point.zero_threshold,
            point.positive.offset,
            list(point.positive.bucket_counts),
            sum(point.negative.bucket_counts),
        )
        return told.exponential(point.count, point.sum if point.HasField("sum") else None, shape, received_ns)
    pairs = [(quantile.quantile, quantile.value) for quantile in point.quantile_values]
    return told.summary(point.count, point.sum, pairs, received_ns)


# --- both forms


@dataclass(frozen=True, slots=True)
class _Told:
    """What a point's metric says of it; makes the `Point`, in base units."""

    name: str
    unit: str
    which: str
    is_monotonic: bool
    is_delta: bool
    at_ns: int
    labels: Labels

    def _base(self, kind: str, received_ns: int) -> tuple[dict[str, Any], float]:
        factor, unit = _TO_BASE.get(self.unit, (1.0, self.unit))
        at_ns = self.at_ns if 0 < self.at_ns <= _INT64_MAX else received_ns
        if at_ns < MIN_INSTANT_NS or (received_ns and at_ns > received_ns + DAY_NS):
            raise UnknownFormat(
                f"{self.name}: a point has the instant {at_ns} ns, expected ns since 1970, not in the future."
            )
        shared = {"name": self.name, "unit": unit, "kind": kind, "is_delta": self.is_delta, "at_ns": at_ns}
        return shared | {"labels": self.labels}, factor

    def number(self, value: float, received_ns: int) -> Point:
        kind = "gauge" if self.which == "gauge" else "counter" if self.is_monotonic else "sum"
        shared, factor = self._base(kind, received_ns)
        return Point(**shared, value=float(value) * factor)

    def histogram(
        self, count: float, total: float | None, bounds: Sequence[float], counts: Sequence[float], received_ns: int
    ) -> Point:
        if counts and len(counts) != len(bounds) + 1:
            raise UnknownFormat(f"{self.name}: {len(counts)} buckets for {len(bounds)} bounds, expected one more.")
        if any(not low < high for low, high in pairwise(bounds)):
            raise UnknownFormat(f"{self.name}: the bounds of its buckets do not ascend.")
        shared, factor = self._base("histogram", received_ns)
        return Point(
            **shared,
            count=float(count),
            total=None if total is None else total * factor,
            bounds=[bound * factor for bound in bounds],
            counts=[float(number) for number in counts],
        )

    def exponential(self, count: float, total: float | None, shape: Exponential, received_ns: int) -> Point:
        shared, factor = self._base("exponential", received_ns)
        shape = Exponential(
            shape.scale, float(shape.zero_count), shape.zero_threshold * factor, shape.offset, shape.counts,
            float(shape.num_negative), factor,
        )  # fmt: skip
        scaled = None if total is None else total * factor
        return Point(**shared, count=float(count), total=scaled, exponential=shape)

    def summary(self, count: float, total: float, quantiles: Sequence[tuple[float, float]], received_ns: int) -> Point:
        shared, factor = self._base("summary", received_ns)
        pairs = [(quantile, value * factor) for quantile, value in quantiles]
        return Point(**shared, count=float(count), total=total * factor, quantiles=pairs)


def _labels(pairs: Iterable[tuple[str, Any]]) -> Labels:
    """Attributes as text, sorted by key; lists, maps and bytes are left out."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if isinstance(value, bool):
            found[key] = str(value).lower()
        elif isinstance(value, str | int | float) and len(found) < MAX_ATTRIBUTES:
            found[key] = str(value)[:MAX_VALUE_CHARS]
    return tuple(sorted(found.items()))


# --- JSON

_Number = int | float | str


class _Json(msgspec.Struct, rename="camel"):
    """lowerCamelCase keys, unknown ones ignored; 64-bit integers and special doubles come as text or number."""


class _Value(_Json):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: _Number | None = None
    double_value: _Number | None = None


class _Pair(_Json):
    key: str = ""
    value: _Value | None = None


class _Buckets(_Json):
    offset: int = 0
    bucket_counts: list[_Number] = []


class _Quantile(_Json):
    quantile: _Number = 0.0
    value: _Number = 0.0


class _JsonPoint(_Json):
    attributes: list[_Pair] = []
    time_unix_nano: int | str = 0
    flags: int = 0
    as_double: _Number | None = None
    as_int: _Number | None = None
    count: _Number = 0
    sum: _Number | None = None
    bucket_counts: list[_Number] = []
    explicit_bounds: list[_Number] = []
    scale: int = 0
    zero_count: _Number = 0
    zero_threshold: _Number = 0.0
    positive: _Buckets | None = None
    negative: _Buckets | None = None
    quantile_values: list[_Quantile] = []


class _Data(_Json):
    data_points: list[_JsonPoint] = []
    aggregation_temporality: int | str = 0
    is_monotonic: bool = False


class _Metric(_Json):
    name: str = ""
    unit: str = ""
    gauge: _Data | None = None
    sum: _Data | None = None
    histogram: _Data | None = None
    exponential_histogram: _Data | None = None
    summary: _Data | None = None


class _Scope(_Json):
    metrics: list[_Metric] = []


class _Resource(_Json):
    attributes: list[_Pair] = []


class _ResourceMetrics(_Json):
    resource: _Resource | None = None
    scope_metrics: list[_Scope] = []


class _Request(_Json):
    resource_metrics: list[_ResourceMetrics] | msgspec.UnsetType | None = msgspec.UNSET


_DECODER: Final = msgspec.json.Decoder(_Request)
_KINDS: Final = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


def _json(body: bytes, received_ns: int) -> list[Metrics]:
    try:
        found = []
        told = _DECODER.decode(body).resource_metrics
        if told is msgspec.UNSET and msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
            raise ValueError("it has no `resourceMetrics`")  # an empty message is an export of nothing
        for of_resource in told or ():
            pairs = of_resource.resource.attributes if of_resource.resource is not None else []
            refused: list[str] = []
            points = [
                point
                for scope in of_resource.scope_metrics
                for metric in scope.metrics
                for point in _json_points(metric, received_ns, refused)
            ]
            found.append(Metrics(dict(_labels(_json_pairs(pairs))), points, refused))
        return found
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise UnknownFormat(
            f"The metrics body ({len(body)} bytes) is not an ExportMetricsServiceRequest in OTLP JSON: {error}"
        ) from error


def _json_points(metric: _Metric, received_ns: int, refused: list[str]) -> Iterator[Point]:
    for which in _KINDS:
        data: _Data | None = getattr(metric, which)
        for point in [] if data is None else data.data_points:
            if data is None or point.flags & _NO_VALUE:
                continue
            is_delta = data.aggregation_temporality in (_DELTA, "AGGREGATION_TEMPORALITY_DELTA")
            labels = _labels(_json_pairs(point.attributes))
            at_ns = int(point.time_unix_nano)
            told = _Told(metric.name, metric.unit, which, data.is_monotonic, is_delta, at_ns, labels)
            try:
                yield _json_point(told, point, received_ns)
            except UnknownFormat as error:
                refused.append(error.message)


def _json_point(told: _Told, point: _JsonPoint, received_ns: int) -> Point:
    total = None if point.sum is None else float(point.sum)
    if told.which in ("gauge", "sum"):
        value = point.as_int if point.as_double is None else point.as_double
        return told.number(float(value or 0.0), received_ns)
    if told.which == "histogram":
        bounds, counts = map(float, point.explicit_bounds), map(float, point.bucket_counts)
        return told.histogram(float(point.count), total, list(bounds), list(counts), received_ns)
    if told.which == "exponential_histogram":
        positive, negative = point.positive or _Buckets(), point.negative or _Buckets()
        shape = Exponential(
            point.scale,
            float(point.zero_count),
            float(point.zero_threshold),
            positive.offset,
            [float(count) for count in positive.bucket_counts],
            sum(float(count) for count in negative.bucket_counts),
        )
        return told.exponential(float(point.count), total, shape, received_ns)
    pairs = [(float(quantile.quantile), float(quantile.value)) for quantile in point.quantile_values]
    return told.summary(float(point.count), total or 0.0, pairs, received_ns)


def _json_pairs(pairs: list[_Pair]) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        value = pair.value
        if value is None:
            continue
        if value.string_value is not None:
            yield pair.key, value.string_value
        elif value.bool_value is not None:
            yield pair.key, value.bool_value
        elif value.int_value is not None:
            yield pair.key, int(value.int_value)
        elif value.double_value is not None:
            yield pair.key, float(value.double_value)
