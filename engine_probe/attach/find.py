"""Find out which engine answers at an address: its metrics page first, then what only one engine has.

Invariant: either an adapter and its page, or an error that says what was found instead and what to do; nothing that an
engine would notice is asked (GETs of pages that are cheap and drain nothing).
"""

from __future__ import annotations

from engine_probe.adapters.adapter import Adapter
from engine_probe.adapters.prometheus import Page, PageParser
from engine_probe.adapters.registry import adapters
from engine_probe.attach.fetch import EngineClient
from engine_probe.errors import UnknownFormat


def find_engine(client: EngineClient) -> tuple[Adapter, Page]:
    """The adapter of what answers at `client.url`, and its page.

    Raises EngineUnreachable (nobody answers), UsageError (it wants a key), UnknownFormat (it is nothing that shows
    itself: what was found, and what to do).
    """
    pages: dict[str, Page | UnknownFormat] = {}
    for one in adapters():
        if one.metrics_path not in pages:
            pages[one.metrics_path] = _page(client, one.metrics_path)
        page = pages[one.metrics_path]
        if isinstance(page, Page) and one.recognises(page):
            return one, page
    raise UnknownFormat(_why(client, pages), url=client.url)


def _page(client: EngineClient, path: str) -> Page | UnknownFormat:
    try:
        body, content_type = client.metrics(path)
        return PageParser().parse(body, content_type)
    except UnknownFormat as error:
        return error


def _why(client: EngineClient, pages: dict[str, Page | UnknownFormat]) -> str:
    """What answers there instead, from what only one kind of server has."""
    url = client.url
    if isinstance(props := client.json("/props"), dict) and "default_generation_settings" in props:
        return f"{url} is llama-server, but shows no metrics. Start it with --metrics (and --slots)."
    for path in ("/server_info", "/get_server_info"):
        if isinstance(info := client.json(path), dict) and ("mem_fraction_static" in info or "page_size" in info):
            return f"{url} is SGLang, but shows no metrics. Start it with --enable-metrics."
    if isinstance(client.json("/version"), dict) and isinstance(client.json("/v1/models"), dict):
        return f"{url} looks like vLLM without its statistics. Start it without --disable-log-stats."
    if isinstance(client.json("/v1/models"), dict):
        return (
            f"{url} speaks the OpenAI API, but shows no metrics that kvscope knows. Put `kvscope proxy --upstream {url}` "
            "before it: its requests can be judged from there."
        )
    page = pages.get("/metrics")
    if isinstance(page, Page):
        some = ", ".join(sorted(page.names())[:3])
        if not some:
            return f"{url}/metrics is empty: it has no series. The engine may be starting, or its statistics are off."
        if any(name.startswith("gen_ai_") for name in page.names()):
            return (
                f"{url}/metrics has OpenTelemetry's GenAI metrics, of no engine that kvscope knows. Have them sent to the "
                "collector's /v1/metrics, or follow the Prometheus server that scrapes them: kvscope attach prometheus."
            )
        return f"{url}/metrics is a Prometheus page of something that kvscope does not know (it has {some}, ...)."
    return page.message if page is not None else f"{url} has no metrics page."
