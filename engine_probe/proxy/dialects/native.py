"""Engines' own APIs (llama.cpp /completion, SGLang /generate, TGI /generate_stream), and answers without tokens (embeddings,
scores) of which only usage and model are read.
"""

from __future__ import annotations

from engine_probe.proxy.reading import Reading
from engine_probe.proxy.shapes import Document, count, holds, small, small_dict


def chunk(reading: Reading, document: Document, now_ns: int) -> None:
    """One event of a stream."""
    if holds(document.meta_info):
        _sglang(reading, document, now_ns)
    elif holds(document.token):
        _tgi(reading, document, now_ns)
    elif holds(document.stop) and document.content:
        _llama(reading, document, now_ns)
    elif holds(document.usage) or holds(document.timings):
        _plain(reading, document)


def whole(reading: Reading, document: Document) -> None:
    """An answer that is one document."""
    if holds(document.meta_info):
        _sglang(reading, document, None)
    elif holds(document.stop) and document.content:
        _llama(reading, document, None)
    elif holds(document.details) and document.generated_text:
        reading.recognise("generate")
        _tgi_details(reading, document)
    else:
        _plain(reading, document)


def _llama(reading: Reading, document: Document, now_ns: int | None) -> None:
    """llama.cpp: `stop` ends it, with `timings`; ids of tokens where they were asked for."""
    reading.recognise("completion")
    reading.name_model(document.model)
    index = count(small(document.index)) or 0
    gained = reading.gained("native", index, small(document.tokens_predicted))
    if now_ns is not None and (holds(document.content) or holds(document.tokens)):
        ids = small(document.tokens)
        reading.token(now_ns, index, len(ids) if isinstance(ids, list) and ids else gained or None)
    if small(document.stop) is True:
        reading.has_end = True
        prompt, output = count(small(document.tokens_evaluated)), count(small(document.tokens_predicted))
        found = {"prompt_tokens": prompt, "output_tokens": output}
        reading.columns.update({name: value for name, value in found.items() if value is not None})
        reading.time(document.timings)
        reading.finish(small(document.stop_type))


def _sglang(reading: Reading, document: Document, now_ns: int | None) -> None:
    """SGLang: each event holds all the text so far, and counts in `meta_info`."""
    reading.recognise("generate")
    told = small_dict(document.meta_info)
    reading.order.see_id(told["id"] if isinstance(told.get("id"), str) else None, has_tokens=True)
    reading.use(document.meta_info)
    index = count(small(document.index)) or 0
    gained = reading.gained("native", index, told.get("completion_tokens"))
    if now_ns is not None and gained:
        reading.token(now_ns, index, gained)
    if told.get("finish_reason") is not None:
        reading.finish(told["finish_reason"])


def _tgi(reading: Reading, document: Document, now_ns: int) -> None:
    """TGI: an event a token, `details` with the last."""
    reading.recognise("generate")
    reading.token(now_ns, 0, 1)
    if holds(document.details):
        _tgi_details(reading, document)
        reading.has_end = True


def _tgi_details(reading: Reading, document: Document) -> None:
    details = small_dict(document.details)
    reading.finish(details.get("finish_reason"))
    output = count(details.get("generated_tokens"))
    if output is not None:
        reading.columns["output_tokens"] = output


def _plain(reading: Reading, document: Document) -> None:
    if holds(document.usage):
        reading.recognise("embeddings" if document.object == "list" else "other")
    reading.name_model(document.model)
    reading.order.see_id(document.id, has_tokens=False)
    reading.use(document.usage)
    reading.time(document.timings)
