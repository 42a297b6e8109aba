"""How each API's documents are read: one module an API, each with `chunk` (one event of a stream) and `whole` (an answer).

`read_event` and `read_whole` find out which API speaks by what the document holds, not by the path it came from: gateways
put APIs anywhere.
"""

from __future__ import annotations

from engine_probe.proxy.dialects import chat, messages, native, responses
from engine_probe.proxy.reading import Reading
from engine_probe.proxy.shapes import holds, read

__all__ = ["read_event", "read_whole"]


def read_event(reading: Reading, name: bytes, data: bytes, now_ns: int) -> None:
    """Take in one event of a stream."""
    if data == b"[DONE]":
        reading.has_end = True
        return
    document = read(data)
    if document is None:
        reading.num_unreadable += bool(data.strip())
        return
    if document.choices is not None:
        chat.chunk(reading, document, data, now_ns)
    elif document.type is not None:
        if document.type.startswith("response."):
            responses.chunk(reading, document, now_ns)
        else:
            messages.chunk(reading, document, now_ns)
    else:
        native.chunk(reading, document, now_ns)
    if holds(document.error):
        reading.fail(document.error)
    elif name == b"error":
        reading.fail(data)


def read_whole(reading: Reading, data: bytes) -> None:
    """Take in an answer that is one document."""
    document = read(data)
    if document is None:
        reading.num_unreadable += 1
        return
    if document.choices is not None:
        chat.whole(reading, document)
    elif document.object == "response":
        responses.whole(reading, document)
    elif document.type == "message":
        messages.whole(reading, document)
    else:
        native.whole(reading, document)
    if holds(document.error):
        reading.fail(document.error)
