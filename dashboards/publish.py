"""Bring a Grafana to what is wanted: folder, data sources, dashboards, annotations. What is already so is left alone.

Idea: every step first looks and then acts, so a second run does nothing, and a dry run is the same without acting. Annotations carry a
tag of their own (`key_of`), by which they are known again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dashboards.frame import API, COLLECTOR, METRICS, TAG
from dashboards.infinity import PLUGIN
from engine_probe.errors import SourceMissing

FOLDER_UID: Final = "kvscope"
MOST_ANNOTATIONS: Final = 5_000
EXEMPLARS: Final = "exemplarTraceIdDestinations"


class Server(Protocol):
    """What publishing needs of a Grafana (`dashboards.grafana.Grafana`)."""

    url: str

    def require(self) -> None: ...
    def has_plugin(self, plugin: str) -> bool | None: ...
    def folder(self, uid: str) -> dict[str, Any] | None: ...
    def create_folder(self, uid: str, title: str) -> None: ...
    def data_source(self, name: str) -> dict[str, Any] | None: ...
    def create_data_source(self, settings: dict[str, Any]) -> str: ...
    def update_data_source(self, number: int, settings: dict[str, Any]) -> None: ...
    def dashboard(self, uid: str) -> dict[str, Any] | None: ...
    def save_dashboard(self, document: dict[str, Any], folder_uid: str, message: str) -> None: ...
    def annotations(self, tag: str, limit: int) -> list[dict[str, Any]]: ...
    def annotate(self, start_ms: int, end_ms: int | None, tags: list[str], text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A data source by name. url None: it has to be there; else it is made, or brought to this address.

    token   a secret that the server keeps and never shows again
    """

    name: str
    type: str
    url: str | None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Something on the time axis: a mark, or a finding."""

    kind: str
    start_ns: int
    end_ns: int | None
    text: str
    tags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The tag by which it is known again."""
        told = f"{self.kind}|{self.start_ns}|{self.end_ns}|{self.text}"
        return f"kvscope-{self.kind}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be there. documents: name -> JSON of `build()`; collector_url: where links lead."""

    documents: Mapping[str, str]
    metrics: Source
    api: Source
    collector_url: str
    folder_title: str = "kvscope"
    notes: Sequence[Note] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One thing and what was (in a dry run: would be) done about it: created | changed | unchanged."""

    what: str
    name: str
    did: str


def publish(server: Server, wanted: Wanted, *, dry_run: bool = False) -> Iterator[Step]:
    """Do it, telling each step once it is done.

    Raises SourceMissing, and what the border raises (ServerUnreachable, AccessRefused, PublishError); what was done before stays.
    """
    server.require()
    _require_plugin(server)
    uids = {}
    for variable, source in ((METRICS, wanted.metrics), (API, wanted.api)):
        did, uids[variable] = _source(server, source, wanted.collector_url, dry_run)
        yield Step("data source", source.name, did)
    did = "unchanged"
    if server.folder(FOLDER_UID) is None:
        did = "created"
        if not dry_run:
            server.create_folder(FOLDER_UID, wanted.folder_title)
    yield Step("folder", wanted.folder_title, did)
    for text in wanted.documents.values():
        document = _chosen(json.loads(text), wanted, uids)
        yield Step("dashboard", document["title"], _dashboard(server, document, dry_run))
    if wanted.notes:
        yield from _annotations(server, wanted.notes, dry_run)


def _require_plugin(server: Server) -> None:
    if server.has_plugin(PLUGIN) is False:
        raise SourceMissing(
            f"Grafana at {server.url} has no Infinity plugin, which tables of raw events are read through; install it "
            f"(grafana cli plugins install {PLUGIN}, or GF_INSTALL_PLUGINS={PLUGIN}) and publish again",
            url=server.url,
            plugin=PLUGIN,
        )


def _source(server: Server, source: Source, collector_url: str, dry_run: bool) -> tuple[str, str]:
    """(what was done, uid)."""
    found = server.data_source(source.name)
    if found is None and source.url is None:
        raise SourceMissing(
            f"Grafana at {server.url} has no data source {source.name!r}; name one that it has, or say where it is to "
            "lead and it will be made (--prometheus URL)",
            url=server.url,
            name=source.name,
        )
    if found is None:
        return "created", "" if dry_run else server.create_data_source(_settings(source, collector_url))
    if found.get("type") != source.type:
        raise SourceMissing(
            f"the data source {source.name!r} of Grafana at {server.url} is of type {found.get('type')!r}, not "
            f"{source.type!r}; name another",
            url=server.url,
            name=source.name,
        )
    uid = str(found["uid"])
    if source.url is None:
        return "unchanged", uid
    settings, held = _settings(source, collector_url), found.get("jsonData") or {}
    has_token = bool((found.get("secureJsonFields") or {}).get("bearerToken"))
    same = found.get("url") == source.url and (source.token is None or has_token)
    if same and all(held.get(name) == value for name, value in settings["jsonData"].items()):
        return "unchanged", uid
    if not dry_run:
        server.update_data_source(
            int(found["id"]), {**settings, "jsonData": {**held, **settings["jsonData"]}, "uid": uid}
        )
    return "changed", uid


def _settings(source: Source, collector_url: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "name": source.name,
        "type": source.type,
        "access": "proxy",
        "url": source.url,
        "jsonData": {"allowedHosts": [source.url]}
        if source.type == PLUGIN
        else {EXEMPLARS: [_timeline(collector_url)]},
    }
    if source.token is not None:
        settings["jsonData"] |= {"auth_method": "bearerToken"}
        settings["secureJsonData"] = {"bearerToken": source.token}
    return settings


def _timeline(collector_url: str) -> dict[str, str]:
    """Where the exemplar of a bucket leads: a request's page."""
    return {
        "name": "request_id",
        "url": f"{collector_url}/requests/${{__value.raw}}",
        "urlDisplayLabel": "timeline",
    }


def _chosen(document: dict[str, Any], wanted: Wanted, uids: Mapping[str, str]) -> dict[str, Any]:
    """The dashboard with its data sources chosen and its links leading to the collector."""
    names = {METRICS: wanted.metrics.name, API: wanted.api.name}
    for variable in document["templating"]["list"]:
        if variable["name"] in uids:
            variable["current"] = {"text": names[variable["name"]], "value": uids[variable["name"]]}
        elif variable["name"] == COLLECTOR:
            variable["query"] = wanted.collector_url
    return document


def _dashboard(server: Server, document: dict[str, Any], dry_run: bool) -> str:
    held = server.dashboard(document["uid"])
    if held is not None:
        same = all(held["dashboard"].get(name) == value for name, value in document.items() if name != "id")
        if same and held.get("meta", {}).get("folderUid") == FOLDER_UID:
            return "unchanged"
    if not dry_run:
        server.save_dashboard({**document, "id": None}, FOLDER_UID, "kvscope dashboards publish")
    return "created" if held is None else "changed"


def _annotations(server: Server, notes: Sequence[Note], dry_run: bool) -> Iterator[Step]:
    held = {tag for one in server.annotations(TAG, MOST_ANNOTATIONS) for tag in one.get("tags") or ()}
    for note in notes:
        if note.key in held:
            yield Step("annotation", note.text, "unchanged")
            continue
        held.add(note.key)
        if not dry_run:
            end_ms = None if note.end_ns is None else note.end_ns // 1_000_000
            server.annotate(note.start_ns // 1_000_000, end_ms, [TAG, note.key, note.kind, *note.tags], note.text)
        yield Step("annotation", note.text, "created")
