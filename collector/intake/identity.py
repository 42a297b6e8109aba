"""Who sent a batch and as which one: from the headers, from the body's own header, or from an `Idempotency-Key`.

Invariant: a batch has a whole identity (source, epoch, seq) or none; half of one is an error of the sender, and saying
so is kinder than storing its batches twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import Headers

from engine_probe.errors import BadRequest
from engine_probe.wire.codec import Decoded
from engine_probe.wire.validate_scalars import MIN_INSTANT_NS, looks_like
from store.interface import KEY_EPOCH, BatchId

ANONYMOUS = "anonymous"
MAX_NAME = 200
_MAX_INT = 2**63 - 1

T = TypeVar("T", str, int)


@dataclass(frozen=True, slots=True)
class Sender:
    """source: who; identity: None where a resend cannot be recognised; sent_ns: the sender's clock when it sent."""

    source: str
    identity: BatchId | None
    sent_ns: int | None


@dataclass(frozen=True, slots=True)
class Claim:
    """What the headers `Kvscope-Source`, `-Epoch`, `-Seq`, `-Sent-Ns` and `Idempotency-Key` say; None where absent."""

    source: str | None
    epoch: str | None
    seq: int | None
    sent_ns: int | None
    idempotency_key: str | None

    @classmethod
    def of(cls, headers: Headers) -> Claim:
        """Raises BadRequest where a header cannot be what it should, or says two different things."""
        return cls(
            _ascii(single(headers, "Kvscope-Source"), "Kvscope-Source"),
            _ascii(single(headers, "Kvscope-Epoch"), "Kvscope-Epoch"),
            _number(single(headers, "Kvscope-Seq"), "Kvscope-Seq"),
            _number(single(headers, "Kvscope-Sent-Ns"), "Kvscope-Sent-Ns"),
            _ascii(single(headers, "Idempotency-Key"), "Idempotency-Key"),
        )

    def with_body(self, decoded: Decoded) -> Sender:
        """The sender, from headers and body together. Raises BadRequest where they disagree or tell half."""
        source = _one("source", self.source, _name(decoded.source, "source"))
        epoch = _one("epoch", self.epoch, _name(decoded.epoch, "epoch"))
        seq = _one("seq", self.seq, decoded.seq)
        sent_ns = _one("sent_ns", self.sent_ns, decoded.sent_ns)
        for name, value in (("seq", seq), ("sent_ns", sent_ns)):
            if value is not None and not 0 <= value <= _MAX_INT:
                raise BadRequest(f"{name} is {value}; it is a whole number from 0 that fits 63 bits", value=value)
        if sent_ns is not None and sent_ns < MIN_INSTANT_NS:
            raise BadRequest(
                f"sent_ns is {sent_ns}, {looks_like(sent_ns)}; it is the sender's clock in ns since 1970-01-01 UTC",
                value=sent_ns,
            )
        if epoch is None and seq is None:
            return self._anonymous(source or ANONYMOUS, sent_ns)
        if source is None or epoch is None or seq is None:
            missing = [name for name, value in (("source", source), ("epoch", epoch), ("seq", seq)) if value is None]
            raise BadRequest(
                f"the batch's identity lacks {' and '.join(missing)}; send source, epoch and seq together, or none of "
                "epoch and seq",
                missing=missing,
            )
        if epoch.startswith(KEY_EPOCH):
            raise BadRequest(
                f"an epoch that begins with {KEY_EPOCH!r} stands for an Idempotency-Key, and is forgotten as those are; "
                "give the spool another random id",
                name="epoch",
            )
        return Sender(source, BatchId(source, epoch, seq), sent_ns)

    def _anonymous(self, source: str, sent_ns: int | None) -> Sender:
        if self.idempotency_key is None:
            return Sender(source, None, sent_ns)
        return Sender(source, BatchId(source, f"{KEY_EPOCH}{self.idempotency_key}", 0), sent_ns)


def single(headers: Headers, name: str) -> str | None:
    """The value of a header; None where it is absent. BadRequest where it comes twice with different values."""
    values = set(headers.getlist(name))
    if len(values) > 1:
        raise BadRequest(f"{name} comes {len(values)} times with different values; send it once", name=name)
    return next(iter(values), None)


def _one(name: str, header: T | None, body: T | None) -> T | None:
    if header is not None and body is not None and header != body:
        raise BadRequest(f"{name} is {header!r} in the headers and {body!r} in the body; send it once", name=name)
    return header if body is None else body


def _name(text: str | None, what: str) -> str | None:
    if text is None:
        return None
    if not text.strip() or len(text) > MAX_NAME or not text.isprintable():
        raise BadRequest(f"{what} must be 1 to {MAX_NAME} printable characters, not {text[:60]!r}", name=what)
    return text


def _ascii(text: str | None, what: str) -> str | None:
    """A name in a header. Headers have no encoding: another one than the sender's would make another name of it."""
    if text is not None and not text.isascii():
        raise BadRequest(f"the header {what} must be ASCII; a JSON body says source and epoch in any script", name=what)
    return _name(text, what)


def _number(text: str | None, what: str) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _MAX_INT:
        raise BadRequest(f"{what} must be a whole number from 0 that fits 63 bits, not {text[:60]!r}", name=what)
    return int(text)
