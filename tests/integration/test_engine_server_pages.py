"""Pages of other sites: those whose origin was named may use the engine as a browser asks it, others may not."""

from __future__ import annotations

from typing import Any

import pytest

from engine_probe.engine.server.assembly import ServerOptions
from engine_probe.engine.server.cross_origin import checked_origins
from engine_probe.errors import UsageError
from tests.engine_server import engine_server

PAGE = "http://localhost:3000"
ASKED = {"prompt": "x", "max_tokens": 2}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_a_page_that_was_named_asks_as_a_browser_does() -> None:
    """First OPTIONS without the token, then the call with it; also a refusal can be read, or the page could not show it."""
    with engine_server(options=ServerOptions(token="secret", origins=frozenset({PAGE}))) as running:
        first = running.client.options("/v1/completions", headers=PREFLIGHT)
        assert first.status_code == 204
        assert first.headers["access-control-allow-origin"] == PAGE
        assert first.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in first.headers["access-control-allow-methods"]
        refused = running.client.post("/v1/completions", json=ASKED, headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        sent = {"Origin": PAGE, "Authorization": "Bearer secret", "Sec-Fetch-Site": "cross-site"}
        for body in (ASKED, {**ASKED, "stream": True}):
            answer = running.client.post("/v1/completions", json=body, headers=sent)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3001", "https://localhost:3000", "null", f"{PAGE}.evil.example"],
)
def test_others_are_told_nothing(origin: str) -> None:
    """Another scheme, port or name is another site: no answer names it, and its calls are refused before anything is done."""
    with engine_server(options=ServerOptions(origins=frozenset({PAGE}))) as running:
        asked = running.client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        called = running.client.post("/v1/completions", json=ASKED, headers={"Origin": origin})
        for answer in (asked, called):
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        assert "--allow-origin" in called.json()["error"]["message"]
        assert running.metric("vllm:generation_tokens_total") == 0


def test_a_named_page_does_not_open_the_host_check() -> None:
    """A name that was bent to this machine stays refused, whatever the origin says."""
    with engine_server(options=ServerOptions(origins=frozenset({"*"}))) as running:
        headers = {**PREFLIGHT, "Host": "evil.example"}
        assert running.client.options("/v1/completions", headers=headers).status_code == 403
        assert running.client.post("/v1/completions", json=ASKED, headers=headers).status_code == 403


def test_without_a_named_page_nothing_is_said_of_origins() -> None:
    """As before: a program, and a page of the server's own, are answered without a word of CORS."""
    with engine_server() as running:
        answer = running.client.post("/v1/completions", json=ASKED, headers={"Origin": running.url})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "word", ["localhost:3000", "http://a/b", "http://", "http://a:b", "http://u@a", "", "http://\u00e4"]
)
def test_what_is_no_origin_is_refused(word: str) -> None:
    """Scheme, name and port, and nothing else."""
    with pytest.raises(UsageError, match="expected an origin"):
        checked_origins([word], has_token=False, allow_unauthenticated=False)


@pytest.mark.parametrize(
    ("given", "is_fine"),
    [({}, False), ({"has_token": True}, True), ({"allow_unauthenticated": True}, True)],
    ids=str,
)
def test_every_page_at_all_needs_a_token_or_a_word(given: dict[str, Any], is_fine: bool) -> None:
    """`*` without either lets any page that somebody opens use the engine."""
    options = {"has_token": False, "allow_unauthenticated": False, **given}
    if is_fine:
        assert checked_origins(["*", "HTTP://A:1"], **options) == {"*", "http://a:1"}
    else:
        with pytest.raises(UsageError, match="every page"):
            checked_origins(["*"], **options)
