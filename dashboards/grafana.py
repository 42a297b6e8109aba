"""The border to Grafana's HTTP API: the few calls that publishing makes, by grafana-api, with its errors as ours.

Source: grafana-api 1.0.3 (folders, data sources, dashboards, annotations) and Grafana 11.6's HTTP API reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import (
    GrafanaBadInputError,
    GrafanaClientError,
    GrafanaException,
    GrafanaServerError,
    GrafanaUnauthorizedError,
)
from grafana_api.grafana_face import GrafanaFace

from engine_probe.errors import AccessRefused, PublishError, ServerUnreachable, UsageError

TIMEOUT_S: Final = 15.0
NOT_FOUND: Final = 404
FORBIDDEN: Final = 403

T = TypeVar("T")


class Grafana:
    """One server. Raises ServerUnreachable, AccessRefused, PublishError; UsageError for an address that is none."""

    def __init__(self, url: str, token: str, *, verify: bool = True) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url!r} has no sound port: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a Grafana; give one like http://127.0.0.1:3000")
        self.url = url.rstrip("/")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        prefix = parts.path.strip("/")
        self._face = GrafanaFace(
            auth=token,
            host=host,
            port=port,
            url_path_prefix=f"{prefix}/" if prefix else "",
            protocol=parts.scheme,
            verify=verify,
            timeout=TIMEOUT_S,
        )
        # A proxy of the environment would be asked for addresses of this machine too.
        self._face.api.s.trust_env = False

    def require(self) -> None:
        """See that it is a Grafana at all. Raises ServerUnreachable: a Prometheus or a proxy answers 404 to everything, as if all were missing."""
        found = self._found(lambda: self._face.api.GET("/health"))
        if found is None or "database" not in found:
            raise ServerUnreachable(
                f"what answers at {self.url} is no Grafana (it has no /api/health); check the address, its port and its path",
                url=self.url,
            )

    def has_plugin(self, plugin: str) -> bool | None:
        """Whether a plugin is installed; None where this token may not ask."""
        try:
            return self._found(lambda: self._face.api.GET(f"/plugins/{plugin}/settings")) is not None
        except AccessRefused as error:
            if error.facts.get("status") == FORBIDDEN:
                return None
            raise

    def folder(self, uid: str) -> dict[str, Any] | None:
        """The folder, None where there is none."""
        return self._found(lambda: self._face.folder.get_folder(uid))

    def create_folder(self, uid: str, title: str) -> None:
        """Make it."""
        self._call(lambda: self._face.folder.create_folder(title, uid), f"the folder {title!r} could not be made")

    def data_source(self, name: str) -> dict[str, Any] | None:
        """The data source of this name, None where there is none."""
        return self._found(lambda: self._face.datasource.get_datasource_by_name(name))

    def create_data_source(self, settings: dict[str, Any]) -> str:
        """Make it; its uid."""
        made = self._call(
            lambda: self._face.datasource.create_datasource(settings),
            f"the data source {settings['name']!r} could not be made",
        )
        return str(made["datasource"]["uid"])

    def update_data_source(self, number: int, settings: dict[str, Any]) -> None:
        """Give it these settings."""
        self._call(
            lambda: self._face.datasource.update_datasource(number, settings),
            f"the data source {settings['name']!r} could not be changed",
        )

    def dashboard(self, uid: str) -> dict[str, Any] | None:
        """What Grafana holds (`dashboard` and `meta`), None where there is none."""
        return self._found(lambda: self._face.dashboard.get_dashboard(uid))

    def save_dashboard(self, document: dict[str, Any], folder_uid: str, message: str) -> None:
        """Write it over what is there."""
        body = {"dashboard": document, "folderUid": folder_uid, "overwrite": True, "message": message}
        self._call(
            lambda: self._face.dashboard.update_dashboard(body), f"the dashboard {document['uid']!r} was not taken"
        )

    def annotations(self, tag: str, limit: int) -> list[dict[str, Any]]:
        """The newest annotations with a tag."""
        found = self._call(
            lambda: self._face.annotations.get_annotation(tags=[tag], limit=limit), "annotations could not be read"
        )
        return list(found)

    def annotate(self, start_ms: int, end_ms: int | None, tags: list[str], text: str) -> None:
        """Write one annotation of all dashboards."""
        self._call(
            lambda: self._face.annotations.add_annotation(time_from=start_ms, time_to=end_ms, tags=tags, text=text),
            "an annotation was not taken",
        )

    def _found(self, call: Callable[[], Any]) -> dict[str, Any] | None:
        try:
            return dict(self._call(call, "Grafana does not answer"))
        except PublishError as error:
            if error.facts.get("status") == NOT_FOUND:
                return None
            raise

    def _call(self, call: Callable[[], T], what: str) -> T:
        """Foreign errors are translated here, once."""
        try:
            return call()
        except GrafanaUnauthorizedError as error:
            raise AccessRefused(
                f"Grafana at {self.url} does not know this token; make a service account token with the role Editor "
                "(Admin, where data sources are to be made) and give its file with --token-file",
                url=self.url,
                status=401,
            ) from error
        except GrafanaBadInputError as error:
            raise PublishError(f"{what}: {_said(error)}", url=self.url, status=400) from error
        except (GrafanaClientError, GrafanaServerError) as error:
            status = int(error.status_code)
            if status == FORBIDDEN:
                raise AccessRefused(
                    f"{what}: Grafana at {self.url} does not allow it to this token ({_said(error)}); dashboards and "
                    "annotations need the role Editor, data sources Admin",
                    url=self.url,
                    status=status,
                ) from error
            raise PublishError(
                f"{what}: Grafana at {self.url} says {status}, {_said(error)}", url=self.url, status=status
            ) from error
        except requests.exceptions.SSLError as error:
            raise ServerUnreachable(
                f"the certificate of {self.url} is not trusted: {error}; trust its authority on this machine, or say "
                "--insecure",
                url=self.url,
            ) from error
        except (
            requests.exceptions.JSONDecodeError,
            ValueError,
            TypeError,
        ) as error:  # an answer that is no JSON: a login page, a proxy
            raise ServerUnreachable(
                f"what answers at {self.url} is no Grafana: its answer is no JSON ({error}); check the address and its path",
                url=self.url,
            ) from error
        except (requests.exceptions.RequestException, GrafanaException) as error:
            raise ServerUnreachable(
                f"no Grafana answers at {self.url}: {_why(error)}; start it, or name another with --grafana",
                url=self.url,
            ) from error


def _why(error: Exception) -> str:
    """The innermost reason: the library wraps it into two sentences of its own."""
    inner = getattr(error.args[0], "reason", error) if error.args else error
    return str(inner).rpartition(": ")[2] or str(error)


def _said(error: Any) -> str:
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "message" in response:
        return str(response["message"])
    return str(getattr(error, "message", error))
