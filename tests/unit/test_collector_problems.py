"""Problem documents: every error of ours has one, with its facts, and no foreign text leaks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from collector import problems
from engine_probe import errors
from engine_probe.errors import InvalidRows, KvscopeError, StoreBusy, TooManyBatches, Unauthorized


def all_errors(kind: type[KvscopeError] = KvscopeError) -> Iterator[type[KvscopeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from all_errors(child)


@pytest.mark.parametrize("kind", sorted(set(all_errors()), key=lambda kind: kind.__name__))
def test_every_error_has_status_exit_code_title_and_a_problem_document(kind: type[KvscopeError]) -> None:
    """Whoever adds an error gets its HTTP answer and its exit code with it."""
    assert 400 <= kind.http_status < 600
    assert kind.exit_code in (errors.EXIT_MISUSE, errors.EXIT_UNREACHABLE)
    assert kind.title
    document = problems.document(kind("something happened", place="here"))
    assert document["status"] == kind.http_status
    assert document["detail"] == "something happened"
    assert document["place"] == "here"
    assert document["type"].startswith("urn:kvscope:error:")


def test_slugs_are_distinct() -> None:
    """`type` tells errors apart."""
    kinds = set(all_errors())
    assert len({problems.slug(kind) for kind in kinds}) == len(kinds)


def test_facts_do_not_replace_the_standard_members() -> None:
    """A fact called `status` or `type` is not taken for the answer's own."""
    document = problems.document(InvalidRows("bad", status="finished", type="row", detail="x", title="y"))
    assert document["status"] == 422
    assert document["type"] == "urn:kvscope:error:invalid-rows"
    assert (document["title"], document["detail"]) == (InvalidRows.title, "bad")


def test_facts_that_json_cannot_say_are_said_in_words() -> None:
    """NaN keeps its name (JSON would make it null), long text is cut, bytes and sets are text, and so is what UTF-8 or
    64 bits cannot hold."""
    document = problems.document(
        InvalidRows("bad \udcff", value=float("nan"), text="x" * 9999, raw=b"\x00", deep={"a": {1}}, huge=10**30)
    )
    assert (document["huge"], document["detail"]) == ("1" + "0" * 30, "bad \\udcff")
    assert document["value"] == "nan"
    assert len(document["text"]) < 600
    assert document["raw"] == "b'\\x00'"
    assert document["deep"] == {"a": [1]}
    msgspec.json.encode(document)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (StoreBusy("full", retry_after_s=2.2), "3"),
        (TooManyBatches("full", retry_after_s=1), "1"),
        (StoreBusy("full"), "1"),
    ],
)
def test_busy_answers_say_when_to_come_again(error: KvscopeError, seconds: str) -> None:
    """429 always carries Retry-After, in whole seconds, rounded up."""
    assert problems.response(error).headers["retry-after"] == seconds


def test_missing_token_says_how_to_send_one() -> None:
    """401 carries WWW-Authenticate, so that a browser asks for the token."""
    assert "Bearer" in problems.response(Unauthorized("who are you?")).headers["www-authenticate"]


def test_errors_of_the_same_status_are_documented_together() -> None:
    """OpenAPI has one answer a status, with one example an error."""
    documented = problems.responses(StoreBusy, TooManyBatches, InvalidRows)
    assert list(documented) == [422, 429]
    examples = documented[429]["content"]["application/problem+json"]["examples"]
    assert list(examples) == ["store-busy", "too-many-batches"]
