"""Prometheus pages: both dialects, escapes, bounds, and errors that name the line."""

from __future__ import annotations

import math

import pytest

from engine_probe.adapters.prometheus import PageParser, parse_page
from engine_probe.errors import UnknownFormat


def test_a_page_gives_names_labels_values_and_declared_types() -> None:
    """HELP and TYPE are kept by family, samples in page order, other comments are tolerated."""
    page = parse_page(
        "# a comment that is neither HELP nor TYPE\n"
        "# HELP vllm:num_requests_running Requests in execution.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        "\n"
        "process_open_fds 34\n"
    )
    assert [(s.series.name, dict(s.series.labels), s.value, s.at_ns) for s in page.samples] == [
        ("vllm:num_requests_running", {"engine": "0", "model_name": "m"}, 3.0, None),
        ("process_open_fds", {}, 34.0, None),
    ]
    assert page.types == {"vllm:num_requests_running": "gauge"}
    assert page.helps == {"vllm:num_requests_running": "Requests in execution."}
    assert not page.is_openmetrics


def test_escapes_in_labels_are_undone_once() -> None:
    r"""\\, \" and \n are escapes; a backslash before anything else stays, and braces in quotes are text."""
    (sample,) = parse_page('x{a="C:\\\\dir",b="say \\"hi\\"",c="two\\nlines",d="\\d",e="} 7 {"} 1\n').samples
    assert dict(sample.series.labels) == {
        "a": "C:\\dir",
        "b": 'say "hi"',
        "c": "two\nlines",
        "d": "\\d",
        "e": "} 7 {",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("+Inf", math.inf), ("-Inf", -math.inf), ("1.5e+06", 1_500_000.0), ("0", 0.0), ("-2", -2.0)],
)
def test_numbers_are_read_as_prometheus_writes_them(text: str, value: float) -> None:
    """Infinities, exponents and signs are numbers."""
    (sample,) = parse_page(f"x {text}\n").samples
    assert sample.value == value


def test_not_a_number_is_a_number() -> None:
    """NaN is what a summary without observations shows."""
    (sample,) = parse_page("x NaN\n").samples
    assert math.isnan(sample.value)


def test_timestamps_are_milliseconds_in_text_and_seconds_in_openmetrics() -> None:
    """1795958453461 ms and 1795958453.461 s are the same instant, exactly."""
    (text,) = parse_page("x 1 1795958453461\n").samples
    (openmetrics,) = parse_page("# TYPE x gauge\nx 1 1795958453.461\n# EOF\n").samples
    assert text.at_ns == openmetrics.at_ns == 1_795_958_453_461_000_000


def test_exemplars_are_checked_and_left_out() -> None:
    """An OpenMetrics bucket with an exemplar gives its own value; braces in the exemplar do not confuse."""
    page = parse_page(
        'x_bucket{le="0.5"} 17 # {trace_id="a}b"} 0.43 1795958453.1\nx_bucket{le="+Inf"} 20\n# EOF\n',
        "application/openmetrics-text; version=1.0.0",
    )
    assert [(s.series.labels["le"], s.value) for s in page.samples] == [("0.5", 17.0), ("+Inf", 20.0)]
    assert page.is_openmetrics


def test_openmetrics_that_was_cut_off_is_refused() -> None:
    """Without '# EOF' the end of an OpenMetrics page is not its end."""
    with pytest.raises(UnknownFormat, match="cut off"):
        parse_page("x 1\n", "application/openmetrics-text")


def test_a_series_is_the_same_object_in_every_page_of_a_parser() -> None:
    """Adapters key their caches on it."""
    parser = PageParser()
    first = parser.parse('x{a="1"} 1\n').samples[0].series
    second = parser.parse('x{a="1"} 2\n').samples[0]
    assert second.series is first
    assert second.value == 2.0


def test_a_remembered_series_with_a_timestamp_is_not_mistaken() -> None:
    """A line whose last word is a timestamp has another head than the series, and is read anew."""
    parser = PageParser()
    parser.parse("x 1\n")
    (sample,) = parser.parse("x 1 2000\n").samples
    assert (sample.value, sample.at_ns) == (1.0, 2_000_000_000)


def test_quoted_names_of_prometheus_3_are_read() -> None:
    """A name may stand quoted within the braces."""
    (sample,) = parse_page('{"vllm:x",engine="0"} 4\n').samples
    assert (sample.series.name, dict(sample.series.labels)) == ("vllm:x", {"engine": "0"})


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("a 1\nb{\n", 2),
        ("a 1\nb 1\nc one\n", 3),
        ('a{x="1",x="2"} 1\n', 1),
        ('a{x="1"y="2"} 1\n', 1),
        ("a{x} 1\n", 1),
        ("a 1 2 3\n", 1),
        ("a\n", 1),
        ("1a 1\n", 1),
        ("# TYPE a thing\n", 1),
        ("a 1_000\n", 1),
        ("a 1\n# EOF\nb 2\n# EOF\n", 3),
        (b"a 1\nb \xff\n", 2),
        ("a 1 99999999999999999999999\n", 1),
        ('{"a","b"} 1\n', 1),
    ],
)
def test_a_wrong_line_is_named(page: str | bytes, line: int) -> None:
    """The error says which line, so that a person finds it."""
    with pytest.raises(UnknownFormat) as caught:
        parse_page(page)
    assert caught.value.facts["line"] == line
    assert str(line) in caught.value.message


@pytest.mark.parametrize(
    ("page", "hint"),
    [('[{"iter": 1}]', "kvscope attach trtllm"), ('{"error": {}}', "JSON"), ("<html>", "HTML")],
)
def test_another_format_is_told_apart(page: str, hint: str) -> None:
    """JSON (trtllm-serve, an engine with metrics off) and HTML get a sentence of their own."""
    with pytest.raises(UnknownFormat, match=hint):
        parse_page(page)


def test_pages_are_bounded() -> None:
    """A page beyond the limits is refused, not read."""
    with pytest.raises(UnknownFormat, match="more than 2 samples"):
        PageParser(max_samples=2).parse("a 1\nb 1\nc 1\n")
    with pytest.raises(UnknownFormat, match="larger than 10 bytes"):
        PageParser(max_bytes=10).parse("abcdefgh 1234\n")
