"""`kvscope alerts`: build and prove the rules for Prometheus; see what is wrong, silence it, send again what did not arrive."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from collector.terminal.asking import TokenOption, UrlOption, ask
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json, printable, say
from collector.terminal.slo_goal import SloGoalOption, slo_goal_of
from engine_probe.errors import EXIT_FINDING, AlertMisuse

if TYPE_CHECKING:
    from alerts.receivers import Receiver
    from collector.terminal.client import CollectorClient
    from store.alert_book import AlertBook

FolderOption = Annotated[
    Path | None, typer.Option("--dir", help="Folder of the files.", show_default="where kvscope keeps its own")
]
LinksOption = Annotated[
    str,
    typer.Option("--links-to", help="Where people reach the collector, for links to runbooks and for Alertmanager."),
]
DEFAULT_LINKS = "http://127.0.0.1:8321"


def register(app: typer.Typer) -> None:
    """Add the verb `alerts` with its own verbs."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Rules for Prometheus, and the alerts of the collector: build, check, test, list, silence, replay, discard.",
    )
    for name, verb in (
        ("build", build),
        ("check", check),
        ("test", prove),
        ("list", list_),
        ("silence", silence),
        ("replay", replay),
        ("discard", discard),
    ):
        group.command(name)(verb)
    app.add_typer(group, name="alerts")


def build(
    folder: FolderOption = None,
    links_to: LinksOption = DEFAULT_LINKS,
    slo_goal: SloGoalOption = None,
    json: JsonOption = False,
) -> None:
    """Write the rules for Prometheus, their scenarios for promtool and a configuration for Alertmanager.

    The same release writes the same bytes.
    """
    from alerts.files import FOLDER, write

    goal = slo_goal_of(slo_goal)
    written = [str(path) for path in write(folder or FOLDER, links_to.rstrip("/"), goal)]
    if json:
        emit_json({"files": written})
    else:
        for path in written:
            emit(path)


def check(
    folder: FolderOption = None,
    links_to: LinksOption = DEFAULT_LINKS,
    slo_goal: SloGoalOption = None,
    prometheus: Annotated[
        str | None, typer.Option(help="URL of a Prometheus that evaluates every expression.", show_default=False)
    ] = None,
    receivers: Annotated[
        Path | None,
        typer.Option(help="Also read this file of receivers, and see where their names lead.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Are the files those of this release, does promtool read them, does a live Prometheus evaluate them?

    Exit 1 where something is wrong.
    """
    from alerts.files import FOLDER, outdated
    from alerts.proving import Proof, ask_prometheus, check_rules

    place = folder or FOLDER
    old = outdated(place, links_to.rstrip("/"), slo_goal_of(slo_goal))
    made = "kvscope alerts build" if folder is None else f"kvscope alerts build --dir {folder}"
    proofs = [
        Proof("files are those of this release", not old, f"{', '.join(old)}: run `{made}`" if old else str(place))
    ]
    if not old:
        proofs += check_rules(place)
    if prometheus is not None:
        proofs += ask_prometheus(lambda expr: _query(prometheus, expr))
    if receivers is not None:
        from alerts.receivers import read_receivers

        proofs += [_reachable(receiver) for receiver in read_receivers(receivers)]
    _tell(proofs, json)


def prove(
    folder: FolderOption = None,
    send: Annotated[
        str | None, typer.Option(help="Send an example message to this receiver in place of it.", show_default=False)
    ] = None,
    receivers: Annotated[
        Path | None,
        typer.Option(
            envvar="KVSCOPE_ALERTS__RECEIVERS_FILE", help="File of receivers, for --send.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Play the rules' scenarios (fires, quiet, resolves) with promtool; or send an example message to a receiver.

    Exit 1 where a scenario fails, 3 where promtool is not installed or the receiver did not take the message.
    """
    if send is not None:
        _send_example(send, receivers, json)
        return
    from alerts.files import FOLDER
    from alerts.proving import play_scenarios
    from alerts.rules.scenarios import scenarios

    if folder is None:
        found = scenarios()
        say(f"{len(found)} scenarios of {len({scenario.alert for scenario in found})} alerts")
    _tell([play_scenarios(folder or FOLDER)], json)


def list_(
    state: Annotated[
        Literal["open", "pending", "firing", "resolved", "dismissed", "all"],
        typer.Option(help="open: pending or firing."),
    ] = "open",
    silences: Annotated[bool, typer.Option("--silences", help="Silences instead.")] = False,
    deliveries: Annotated[
        Literal["waiting", "delivered", "dead"] | None,
        typer.Option(help="Messages of this state instead; dead: the dead letters.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """What is wrong now and who was told; or silences, or messages. Exit 1 where an alert fires."""
    from collector.alerting.answers import alert_rows, delivery_rows, silence_rows

    def from_store() -> dict[str, Any]:
        now_ns = time.time_ns()
        with _book(store, read_only=True) as book:
            if silences:
                return silence_rows(book, now_ns)
            if deliveries is not None:
                return delivery_rows(book, deliveries, limit)
            return alert_rows(book, state, None, limit, now_ns)

    def from_collector(client: CollectorClient) -> dict[str, Any]:
        if silences:
            return cast(dict[str, Any], client.get("/api/v1/alerts/silences", {}))
        if deliveries is not None:
            return cast(dict[str, Any], client.get("/api/v1/alerts/deliveries", {"state": deliveries, "limit": limit}))
        return cast(dict[str, Any], client.get("/api/v1/alerts", {"state": state, "limit": limit}))

    document = ask(store, url, token, from_store, from_collector)
    if json:
        emit_json(document)
    else:
        for line in _lines(document):
            emit(line)
    if any(alert["state"] == "firing" for alert in document.get("alerts", ())):
        raise typer.Exit(EXIT_FINDING)


def silence(
    matchers: Annotated[
        list[str] | None,
        typer.Argument(help="Matchers that an alert must meet, such as 'worker=\"w1\"'.", show_default=False),
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="How long: 30m, 2h, 1d.")] = "2h",
    by: Annotated[str, typer.Option(envvar="USER", help="Who silences.")] = "somebody",
    comment: Annotated[str, typer.Option(help="Why.")] = "",
    end: Annotated[str | None, typer.Option(help="End this silence instead.", show_default=False)] = None,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Tell nobody of alerts that match, for a while. They go on, and are shown."""
    from collector.alerting.answers import end_silence
    from collector.alerting.answers import silence as make

    if (end is None) == (not matchers):
        raise AlertMisuse("give matchers to silence, or --end ID")
    asked = {"matchers": matchers, "duration_s": _seconds(for_), "created_by": by, "comment": comment}

    def from_store() -> dict[str, Any]:
        now_ns = time.time_ns()
        with _book(store) as book:
            if end is not None:
                return end_silence(book, end, now_ns)
            return make(book, matchers or [], now_ns, _seconds(for_), created_by=by, comment=comment)

    def from_collector(client: CollectorClient) -> dict[str, Any]:
        if end is not None:
            return cast(dict[str, Any], client.delete(client.path("/api/v1/alerts/silences", end)))
        return _posted(client, "/api/v1/alerts/silences", asked)

    document = ask(store, url, token, from_store, from_collector)
    if json:
        emit_json(document)
    else:
        emit(f"{document['silence_id']}  {' '.join(document['matchers'])}  until {_instant(document['ends_ns'])}")


def replay(
    ids: Annotated[list[str] | None, typer.Argument(help="Dead letters by id.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Send dead letters again, under the ids that they had. Without a running collector they go out when one starts."""
    from collector.alerting.answers import replay as again

    which = {"ids": ids or [], "all": every}
    document = ask(
        store,
        url,
        token,
        lambda: {"replayed": _in_book(store, lambda book: again(book, ids or [], every=every, now_ns=time.time_ns()))},
        lambda client: _posted(client, "/api/v1/alerts/deliveries/replay", which),
    )
    _tell_how_many(document, "replayed", "message", "sent again", json)


def discard(
    ids: Annotated[list[str] | None, typer.Argument(help="Dead letters by id.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Forget dead letters that nobody wants any more: of a receiver that is gone, or no news by now."""
    from collector.alerting.answers import discard as forget

    which = {"ids": ids or [], "all": every}
    document = ask(
        store,
        url,
        token,
        lambda: {"discarded": _in_book(store, lambda book: forget(book, ids or [], every=every))},
        lambda client: _posted(client, "/api/v1/alerts/deliveries/discard", which),
    )
    _tell_how_many(document, "discarded", "dead letter", "forgotten", json)


def _in_book(store: str, work: Callable[[AlertBook], list[str]]) -> list[str]:
    with _book(store) as book:
        return work(book)


def _tell_how_many(document: dict[str, Any], key: str, what: str, done: str, as_json: bool) -> None:
    num = len(document[key])
    if as_json:
        emit_json(document)
    else:
        emit(f"{num:,} {what}{'' if num == 1 else 's'} {done}")


def _tell(proofs: list[Any], as_json: bool) -> None:
    if as_json:
        emit_json({"right": all(proof.is_right for proof in proofs), "checks": proofs})
    else:
        for proof in proofs:
            said = proof.said if "\n" not in proof.said else "\n      ".join(["", *proof.said.splitlines()])
            emit(f"{'ok   ' if proof.is_right else 'WRONG'} {proof.what}: {said}")
    if not all(proof.is_right for proof in proofs):
        raise typer.Exit(EXIT_FINDING)


def _reachable(receiver: Receiver) -> Any:
    """Whether its name leads to addresses that messages may go to."""
    from urllib.parse import urlsplit

    from alerts.address_guard import checked_addresses
    from alerts.proving import Proof
    from engine_probe.errors import AlertError

    parts = urlsplit(receiver.target)
    what = f"receiver {receiver.name} ({receiver.kind})"
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = checked_addresses(parts.hostname or "", port, receiver.networks)
    except AlertError as error:
        return Proof(what, False, error.message)
    return Proof(what, True, f"{parts.hostname} is {', '.join(found)}")


def _query(url: str, expr: str) -> Any:
    import httpx

    from engine_probe.errors import AlertError

    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/query", params={"query": expr}, timeout=30, trust_env=False)
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise AlertError(f"no Prometheus answers at {url} ({error}); correct the address", url=url) from error


def _send_example(name: str, receivers: Path | None, as_json: bool) -> None:
    from alerts.courier import send
    from alerts.example import example_delivery
    from alerts.receivers import read_receivers

    if receivers is None:
        raise AlertMisuse("give the file of the receivers with --receivers")
    found = next((receiver for receiver in read_receivers(receivers) if receiver.name == name), None)
    if found is None:
        raise AlertMisuse(f"{receivers} has no receiver {name!r}")
    delivery = example_delivery(found, time.time_ns())
    send(found, delivery, time.time_ns())
    if as_json:
        emit_json({"receiver": name, "delivery_id": delivery.delivery_id})
    else:
        emit(f"{name} took the message {delivery.delivery_id}")


def _book(store: str, *, read_only: bool = False) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def opened() -> Any:
        from store.alert_book import AlertBook
        from store.open import open_store

        with open_store(store, read_only=read_only, must_exist=True) as held:
            yield AlertBook(held)

    return opened()


def _posted(client: CollectorClient, path: str, document: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.json.decode(client.post(path, document, "application/json"))
    return found


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    if not (text[:-1].isascii() and text[:-1].isdigit() and text[-1:] in units and 0 < int(text[:-1]) < 100_000):
        raise AlertMisuse(f"{text[:50]!r} is no length of time; write 30m, 2h or 1d")
    return int(text[:-1]) * units[text[-1]]


def _lines(document: dict[str, Any]) -> list[str]:
    if "silences" in document:
        rows = document["silences"]
        return [
            f"{row['silence_id']}  until {_instant(row['ends_ns'])}  {printable(' '.join(row['matchers']))}  {printable(row['comment'])}"
            for row in rows
        ] or ["no silences"]
    if "deliveries" in document:
        return [
            f"{row['state']:9}  {row['delivery_id']}  {printable(row['receiver'])}  attempts {row['attempts']}  {printable(row['message'] or '')}"
            for row in document["deliveries"]
        ] or ["no messages"]
    lines = []
    for row in document["alerts"]:
        labels = ", ".join(f"{name}={value}" for name, value in row["labels"].items() if name != "alertname")
        lines.append(f"{row['state']:9}  {printable(row['labels'].get('alertname', '?'))}  {printable(labels)}")
        lines.append(
            f"           {printable(row['annotations'].get('summary', ''))}, since {_instant(row['starts_ns'])}"
        )
        if "report" in row["annotations"]:
            lines.append(f"           {printable(row['annotations']['report'])}")
        if row["why_muted"]:
            lines.append(f"           nobody is told: {row['why_muted']}")
    return lines or ["no alerts"]


def _instant(at_ns: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
