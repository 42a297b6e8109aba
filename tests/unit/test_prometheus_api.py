"""Asking a Prometheus server for raw samples: nothing twice, nothing lost, and every refusal as a sentence."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.attach.fetch import split_auth
from engine_probe.attach.prometheus_api import PrometheusApi, selectors_of
from engine_probe.errors import EngineUnreachable, KvscopeError, UnknownFormat, UsageError
from tests.prometheus_script import ScriptedPrometheus

S = 1_000_000_000
NAME = frozenset({("__name__", "x"), ("job", "a")})


@pytest.fixture
def server() -> Iterator[ScriptedPrometheus]:
    server = ScriptedPrometheus().start()
    yield server
    server.stop()


def points(server: ScriptedPrometheus, start_s: int, end_s: int, **options: str) -> list[tuple[float, float]]:
    """Samples of the series x as (s, value)."""
    api = PrometheusApi(server.url, key=options.get("key"))
    found = api.raw(['{job="a"}'], start_s * S, end_s * S)
    api.close()
    return [(at_ns / S, value) for at_ns, value in found.series.get(NAME, [])]


@pytest.mark.parametrize("left_open", [True, False])
def test_both_edges_belong_to_the_stretch(server: ScriptedPrometheus, left_open: bool) -> None:
    """Prometheus 2 includes a range's left edge and Prometheus 3 does not: the samples are the same."""
    server.left_open = left_open
    for at_s in (99, 100, 105, 110, 111):
        server.add(at_s, "x", at_s, job="a")
    assert points(server, 100, 110) == [(100, 100), (105, 105), (110, 110)]


def test_what_is_too_much_is_asked_for_in_halves(server: ScriptedPrometheus) -> None:
    """A server that takes 10 s at a time: 80 s come whole, each sample once, in order."""
    server.max_span_ms = 10_001
    for at_s in range(81):
        server.add(at_s + 0.25, "x", at_s, job="a")
    assert points(server, 0, 80) == [(at_s + 0.25, at_s) for at_s in range(80)]
    assert min(span for _, span in server.queries) > 5_000


def test_a_second_that_is_too_much_ends_in_a_sentence(server: ScriptedPrometheus) -> None:
    """No endless halving."""
    server.max_span_ms = 0
    with pytest.raises(UsageError, match=r"even for a second .*too many samples.*Narrow the selector"):
        points(server, 0, 8)


def test_numbers_that_json_cannot_write_arrive(server: ScriptedPrometheus) -> None:
    """+Inf and NaN are texts in the API."""
    server.samples = [({"__name__": "x", "job": "a"}, 1.0, float("inf")), ({"__name__": "x", "job": "a"}, 2.0, 1e-300)]
    assert points(server, 0, 8) == [(1.0, float("inf")), (2.0, 1e-300)]


def test_warnings_are_handed_on_and_native_histograms_counted(server: ScriptedPrometheus) -> None:
    """A partial answer of Thanos is said; a series without plain samples is left out and counted."""
    server.add(1, "x", 1, job="a")
    server.warnings = ["store a: connection refused, partial answer"]
    server.native = [{"__name__": "latency", "job": "a"}]
    api = PrometheusApi(server.url)
    found = api.raw(['{job="a"}'], 0, 8 * S)
    assert found.warnings == ["store a: connection refused, partial answer"]
    assert (found.num_native_histograms, len(found.series)) == (1, 1)
    api.close()


def test_a_token_a_user_and_a_header_are_sent_and_no_password_is_shown(server: ScriptedPrometheus) -> None:
    """Bearer, basic from the address, and a tenant; the address in messages has no user in it."""
    points(server, 0, 1, key="secret")
    assert server.headers["authorization"] == "Bearer secret"
    api = PrometheusApi(f"http://me:p%40ss@127.0.0.1:{server.port}", headers={"X-Scope-OrgID": "team"})
    api.raw(['{job="a"}'], 0, S)
    assert base64.b64decode(server.headers["authorization"].removeprefix("Basic ")) == b"me:p@ss"
    assert server.headers["x-scope-orgid"] == "team"
    assert api.url == server.url
    assert api.version() == "3.5.0"
    api.close()


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((200, "text/html", "<html>Grafana</html>"), UnknownFormat, "not in Prometheus' JSON"),
        ((200, "application/json", '{"status":"succ'), UnknownFormat, "not in Prometheus' JSON"),
        ((200, "application/json", "[]"), UnknownFormat, "not in Prometheus' JSON"),
        ((401, "text/plain", ""), UsageError, "--engine-key"),
        ((403, "text/plain", ""), UsageError, "--engine-key"),
        ((404, "text/plain", "not found"), UnknownFormat, "has no /api/v1/query"),
        ((302, "text/plain", ""), UnknownFormat, "redirects to http://elsewhere/"),
        ((500, "text/plain", "oops"), UnknownFormat, "answers 500"),
        ((400, "application/json", '{"status":"error","errorType":"bad_data","error":"no"}'), UsageError, "refuses"),
        (
            (200, "application/json", '{"status":"success","data":{"resultType":"vector","result":[]}}'),
            UsageError,
            "gives no series",
        ),
        (
            (200, "application/json", '{"status":"success","data":{"resultType":"matrix","result":[{"metric":1}]}}'),
            UnknownFormat,
            "not known",
        ),
    ],
)
def test_every_other_answer_is_a_sentence(
    server: ScriptedPrometheus, answer: tuple[int, str, str], kind: type[KvscopeError], said: str
) -> None:
    """HTML, half an answer, no key, no API, a redirect, trouble, a selector that is none."""
    server.answer = answer
    with pytest.raises(kind) as caught:
        points(server, 0, 1)
    assert said in caught.value.message


def test_nobody_there_is_unreachable(server: ScriptedPrometheus) -> None:
    """A closed port, and no version either."""
    server.stop()
    with pytest.raises(EngineUnreachable, match="Nothing answers"):
        points(server, 0, 1)
    api = PrometheusApi(server.url)
    assert api.version() is None
    api.close()


@pytest.mark.parametrize("matches", [[], [""], ["{}"], ['{__name__=~".+"}']])
def test_everything_is_no_selector(matches: list[str]) -> None:
    """Nothing at all, or the whole server: neither is meant."""
    with pytest.raises(UsageError):
        selectors_of(matches)


def test_addresses_lose_their_user() -> None:
    """Basic auth in an address is taken out of it; another scheme is refused."""
    assert split_auth("https://a:b%3A@h:9090/prometheus") == ("https://h:9090/prometheus", ("a", "b:"))
    assert split_auth("http://h:9090") == ("http://h:9090", None)
    with pytest.raises(UsageError):
        split_auth("ftp://h")


@given(st.lists(st.integers(0, 400), unique=True, max_size=40), st.integers(1, 120), st.booleans())
def test_halving_loses_and_doubles_nothing(instants: list[int], limit_s: int, left_open: bool) -> None:
    """Whatever the server's limit: the samples of the stretch, each once, ascending."""
    server = ScriptedPrometheus()
    server.max_span_ms, server.left_open = limit_s * 1000 + 1, left_open
    for at_s in instants:
        server.add(at_s, "x", at_s, job="a")

    class Api(PrometheusApi):
        def _ask(self, path: str, form: object) -> tuple[int, bytes]:
            import json

            assert isinstance(form, dict)
            status, document = server.reply(form["query"], float(form["time"]))
            return status, json.dumps(document).encode()

    api = Api("http://127.0.0.1:1")
    found = api.raw(['{job="a"}'], 50 * S, 350 * S).series.get(NAME, [])
    api.close()
    assert found == [(at_s * S, at_s) for at_s in sorted(instants) if 50 <= at_s <= 350]


class Canned(PrometheusApi):
    """Answers every question alike."""

    body = b""

    def _ask(self, path: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, self.body


@pytest.mark.parametrize(
    ("values", "found"),
    [(b'[[5, "2"]]', [(5 * S, 2.0)]), (b'[[1e300, "2"]]', []), (b'[[-5, "2"]]', []), (b'[[5, "many"]]', None)],
)
def test_answers_that_no_server_gives(values: bytes, found: list[tuple[int, float]] | None) -> None:
    """An instant beyond all time is passed over, a text where a number stands is said."""
    api = Canned("http://127.0.0.1:9", verify=False)
    api.body = b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"__name__":"x","job":"a"},'
    api.body += b'"values":' + values + b"}]}}"
    try:
        if found is None:
            with pytest.raises(UnknownFormat, match="'many' where a number stands"):
                api.raw(['{job="a"}'], 0, 10 * S)
        else:
            assert api.raw(['{job="a"}'], 0, 10 * S).series.get(NAME, []) == found
    finally:
        api.close()
