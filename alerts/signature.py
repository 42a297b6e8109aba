"""Signatures of messages, as Standard Webhooks has them (specification 1.0), so that receivers verify with a library they have.

Headers: `webhook-id` (the delivery; the same over retries, so a receiver can tell a repeat), `webhook-timestamp` (Unix time of
this attempt), `webhook-signature: v1,BASE64` = HMAC-SHA256 over `id.timestamp.body`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

from engine_probe.errors import AlertMisuse

PREFIX: Final = "whsec_"


def headers(secret: str, delivery_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The three headers."""
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": f"v1,{_sign(secret, delivery_id, timestamp_s, body)}",
    }


def key_of(secret: str) -> bytes:
    """`whsec_` and base64, as the specification has it, or the text itself. Raises AlertMisuse."""
    if not secret.startswith(PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise AlertMisuse("a secret that begins with whsec_ must go on in base64") from error


def _sign(secret: str, delivery_id: str, timestamp_s: int, body: bytes) -> str:
    signed = f"{delivery_id}.{timestamp_s}.".encode() + body
    return base64.b64encode(hmac.digest(key_of(secret), signed, hashlib.sha256)).decode()
