"""Requests as OpenTelemetry traces, for any backend that takes OTLP/HTTP: a span a request and vantage, a child a phase."""
