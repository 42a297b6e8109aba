"""`kvscope proxy`: stand before an engine or an API, pass everything on, record what passes."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from collector.terminal.output import DEFAULT_STORE, JsonOption, emit, emit_json, say
from collector.terminal.sink_options import DurationOption, SaltOption, SpoolOption, StoreOption, TokenOption, ToOption
from engine_probe.digits import whole_number
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.proxy.session import ProxyOptions, Summary
    from engine_probe.proxy.upstreams import Policy

DEFAULT_LISTEN = "127.0.0.1:8322"


def register(app: typer.Typer) -> None:
    """Add the verb `proxy`."""
    app.command("proxy")(proxy)


def proxy(
    upstream: Annotated[
        list[str],
        typer.Option(
            "--upstream",
            help="Engine or API behind it: URL, or NAME=URL to name the worker as elsewhere. Repeatable.",
            show_default=False,
        ),
    ],
    listen: Annotated[str, typer.Option(help="Address for clients, HOST:PORT; port 0 takes a free one.")] = (
        DEFAULT_LISTEN
    ),
    to: ToOption = None,
    store: StoreOption = None,
    token: TokenOption = None,
    spool: SpoolOption = None,
    policy: Annotated[
        str, typer.Option(help="Choice among several upstreams: least_outstanding or round_robin.")
    ] = "least_outstanding",
    repeat_posts: Annotated[
        bool,
        typer.Option(
            "--repeat-posts",
            help="Send a POST again where its upstream broke off before a byte of an answer (it may have worked on it).",
        ),
    ] = False,
    tag: Annotated[
        list[str] | None,
        typer.Option(help="Read a tag from a header: tenant=X-Tenant-Id. X-Kvscope-<Tag> is always read. Repeatable."),
    ] = None,
    vantage: Annotated[
        str, typer.Option(help="client; router where clients or another proxy record the same requests.")
    ] = "client",
    engine: Annotated[
        str | None, typer.Option(help="Engine behind it (vllm, sglang, ...); else only where it says so itself.")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of requests that are recorded, by request id.")] = 1.0,
    tokenize: Annotated[
        bool,
        typer.Option("--tokenize", help="Name the blocks of prompts by asking the engine to tokenize them."),
    ] = False,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block for --tokenize. Default: the engine's own, else 16.")
    ] = None,
    salt_file: SaltOption = None,
    ca: Annotated[Path | None, typer.Option(help="Certificate authority of the upstreams' TLS.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the upstreams' certificates.")] = False,
    connect_timeout: Annotated[str, typer.Option(help="Longest wait for a connection to an upstream.")] = "5s",
    drain: Annotated[str, typer.Option(help="Longest wait for open answers when it stops.")] = "30s",
    max_open: Annotated[
        int | None, typer.Option(min=1, help="Most connections of clients. Default: what open files allow.")
    ] = None,
    duration: DurationOption = None,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote", help="Listen beyond this machine: whoever reaches this address reaches the upstreams."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pass requests on to engines or APIs, byte for byte, and record them: instants, tokens, ends; never content."""
    from collector import logs
    from collector.terminal.sinks import exit_code_of, open_sink, seconds_of, stop_on_signals, undelivered
    from engine_probe.attach.fetch import trust
    from engine_probe.attach.funnel_sink import FunnelSink
    from engine_probe.attach.names import source_name
    from engine_probe.attach.salt import default_path, read_salt
    from engine_probe.proxy.session import ProxyOptions, ProxySession

    host, port = _address(listen, allow_remote=allow_remote)
    if block_size is not None and not tokenize:
        raise UsageError("--block-size is for --tokenize.")
    options = ProxyOptions(
        upstreams=upstream,
        host=host,
        port=port,
        policy=cast("Policy", policy),
        vantage=vantage,
        engine=engine,
        tags=tag or (),
        sample=sample,
        tokenize_salt=read_salt(salt_file or default_path()) if tokenize else None,
        block_size=block_size,
        repeats_posts=repeat_posts,
        connect_timeout_s=seconds_of("--connect-timeout", connect_timeout),
        drain_s=seconds_of("--drain", drain),
        duration_s=None if duration is None else seconds_of("--duration", duration),
        max_open=max_open,
        verify=trust(ca, insecure=insecure),
    )
    session = ProxySession(options)
    logs.configure("warning")
    sink = open_sink(to, store, source_name("proxy", listen), token, spool)
    target = to or store or DEFAULT_STORE
    summary = session.run(
        FunnelSink(sink, "kvscope proxy"),
        stop_on_signals(),
        lambda url: say("\n".join(_welcome(url, options, target))),
    )
    left = undelivered(sink, spool)
    if as_json:
        emit_json(asdict(summary) | {"undelivered": left})
    else:
        emit("\n".join([*_lines(summary, target), *([left] if left else [])]))
    raise typer.Exit(exit_code_of(sink, spool, summary.lost_rows))


def _address(text: str, *, allow_remote: bool) -> tuple[str, int]:
    """`HOST:PORT`, `[::1]:PORT`, `PORT` -> host and port. Raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    number = whole_number(port, 65_535)
    if number is None:
        raise UsageError(f"--listen is {text!r}; expected HOST:PORT, such as {DEFAULT_LISTEN}.")
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if not is_here and not allow_remote:
        raise UsageError(
            f"--listen {text} lets other machines reach the upstreams through this proxy; say --allow-remote if that is "
            "wanted. Keys are checked by the upstreams alone."
        )
    return host, number


def _welcome(url: str, options: ProxyOptions, target: str) -> list[str]:
    return [
        f"kvscope proxy at {url}: point clients there instead of at {', '.join(options.upstreams)}",
        f"  rows     {target}, vantage {options.vantage}"
        + (f", {options.sample:.3%} of the requests" if options.sample < 1 else ""),
        "  content  is passed on and forgotten; with --tokenize the prompt's blocks are named by salted hashes",
        "  stop     Ctrl+C (open answers are waited for)",
    ]


def _lines(summary: Summary, target: str) -> list[str]:
    states = ", ".join(f"{count:,} {state}" for state, count in summary.states.items()) or "none"
    lines = [
        f"Passed on {summary.requests:,} requests in {summary.seconds:.0f} s; recorded {summary.recorded:,} in {target} "
        f"({states})."
    ]
    if summary.left_out_by_sampling:
        lines.append(f"Left out by sampling: {summary.left_out_by_sampling:,} requests.")
    if summary.misplaced:
        lines.append(f"Misplaced: {summary.misplaced:,} answers held pieces that were not theirs, or out of order.")
    if summary.refused:
        lines.append(f"Refused: {summary.refused:,} connections whose request could not be passed on.")
    if summary.broken_off:
        lines.append(f"Broken off: {summary.broken_off:,} answers that did not end in time.")
    if summary.unobserved:
        lines.append(f"Not observed: {summary.unobserved:,} times looking at an answer failed (it was passed on).")
    for reason, count in sorted(summary.not_named.items()):
        lines.append(f"Not named: {count:,} prompts ({reason}).")
    for kind, count in sorted(summary.lost_rows.items()):
        lines.append(f"Lost: {count:,} {kind} rows could not be written.")
    return lines
