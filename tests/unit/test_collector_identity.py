"""Who sent a batch: headers and body together, each thing said once."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from collector.intake.identity import Claim, Sender
from engine_probe.errors import BadRequest
from engine_probe.wire.codec import Decoded
from store.interface import BatchId

IDENTITY = (("kvscope-source", "s"), ("kvscope-epoch", "e"), ("kvscope-seq", "4"))


def claimed(*pairs: tuple[str, str], body: Decoded | None = None) -> Sender:
    """The sender that these headers (and this body) name."""
    headers = Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in pairs])
    return Claim.of(headers).with_body(body or Decoded({}))


def test_headers_name_a_batch() -> None:
    """Source, epoch and number; the number may have zeros in front."""
    assert claimed(*IDENTITY).identity == BatchId("s", "e", 4)
    assert claimed(*IDENTITY[:2], ("kvscope-seq", "0004")).identity == BatchId("s", "e", 4)


@pytest.mark.parametrize(
    "name", ["kvscope-source", "kvscope-epoch", "kvscope-seq", "kvscope-sent-ns", "idempotency-key"]
)
def test_a_header_that_says_two_things_is_refused(name: str) -> None:
    """Taking the first would store a batch under a number that may belong to another one."""
    with pytest.raises(BadRequest, match="2 times with different values; send it once"):
        claimed((name, "1"), (name, "2"))


@pytest.mark.parametrize("name", ["kvscope-source", "kvscope-epoch", "idempotency-key"])
def test_a_name_in_a_header_is_ascii(name: str) -> None:
    """Its bytes could be read in two ways, which would be two senders; a body says how it is encoded."""
    with pytest.raises(BadRequest, match="must be ASCII"):
        claimed((name, "caf\xe9"))
    assert claimed(body=Decoded({}, source="caf\xe9")).source == "caf\xe9"


def test_a_header_that_says_the_same_twice_is_one() -> None:
    """A proxy that repeats a header does no harm."""
    assert claimed(*IDENTITY, *IDENTITY).identity == BatchId("s", "e", 4)


def test_an_epoch_cannot_pass_for_an_idempotency_key() -> None:
    """Identities of keys are forgotten after a week, those of a spool never: the two have names of their own."""
    epoch = "idempotency-key:a"
    with pytest.raises(BadRequest, match="give the spool another random id"):
        claimed(body=Decoded({}, "s", epoch, 0))
    with pytest.raises(BadRequest, match="give the spool another random id"):
        claimed(("kvscope-source", "s"), ("kvscope-epoch", epoch), ("kvscope-seq", "0"))
    assert claimed(("idempotency-key", "a")).identity == BatchId("anonymous", epoch, 0)


@pytest.mark.parametrize("epoch", ["a/b/c", "é", "'; DROP TABLE request;--", "\N{GRINNING FACE}" * 200])
def test_an_epoch_is_any_printable_text(epoch: str) -> None:
    """It is a random id of the sender's and nothing is read out of it."""
    assert claimed(body=Decoded({}, "s", epoch, 0)).identity == BatchId("s", epoch, 0)


@pytest.mark.parametrize(
    ("sent_ns", "said"),
    [
        (1_764_403_200, "which looks like seconds"),
        (1_764_403_200_000, "which looks like milliseconds"),
        (1_764_403_200_000_000, "which looks like microseconds"),
        (0, "is not known"),
    ],
)
def test_a_senders_clock_in_another_unit_is_refused(sent_ns: int, said: str) -> None:
    """Else its offset would be half a century, and be believed."""
    with pytest.raises(BadRequest, match=said):
        claimed(("kvscope-sent-ns", str(sent_ns)))
    with pytest.raises(BadRequest, match=said):
        claimed(body=Decoded({}, sent_ns=sent_ns))
    assert claimed(("kvscope-sent-ns", "1764403200000000000")).sent_ns == 1_764_403_200_000_000_000


@pytest.mark.parametrize("number", ["-1", "+1", "1.0", "1e3", "0x1", " ", "", str(2**63), "\xb2"])
def test_a_number_that_is_none_is_refused(number: str) -> None:
    """Whole, from 0, within 63 bits, in plain digits."""
    with pytest.raises(BadRequest, match="must be a whole number from 0 that fits 63 bits"):
        claimed(*IDENTITY[:2], ("kvscope-seq", number))
