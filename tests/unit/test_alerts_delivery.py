"""Webhooks on the wire: signed, verified, kept from addresses that are not allowed, tried again, and never lost."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alerts import signature
from alerts.address_guard import checked_addresses, is_allowed, parse_networks
from alerts.courier import NS, Courier, Patience, backoff_s, deliveries_of
from alerts.post import post
from alerts.receivers import Receiver, checked, read_receivers
from engine_probe.errors import AddressRefused, AlertMisuse, DeliveryFailed, DiskFull
from store.alert_book import AlertBook
from store.alert_rows import Changes, Delivery
from store.duckdb_store import DuckDBStore
from store.open import open_store
from tests.alert_receiver import HERE, Mailbox, Say, mailbox, receiver, verify
from tests.servers import free_port

LOOPBACK = parse_networks(HERE)
NOW = 1_764_403_200 * NS


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_ns = NOW

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS)


@pytest.fixture
def store() -> Iterator[DuckDBStore]:
    with open_store(":memory:") as opened:
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _courier(store: DuckDBStore, clock: Clock, *receivers: Receiver, **options: Any) -> Courier:
    return Courier(AlertBook(store), receivers, Patience(), clock=clock, jitter=lambda: 1.0, **options)


def _put(store: DuckDBStore, to: Receiver, *ids: str, body: str = '{"a": 1}') -> None:
    rows = [row for delivery_id in ids for row in deliveries_of(to, [body], delivery_id, "{}", NOW)]
    AlertBook(store).save(Changes(deliveries=tuple(rows)))


def _states(store: DuckDBStore) -> dict[str, tuple[str, int]]:
    return {row.delivery_id: (row.state, row.attempts) for row in AlertBook(store).deliveries()}


def _send(url: str, **options: Any) -> Any:
    return post(url, b"{}", {}, **{"secret_headers": {}, "allowed": LOOPBACK, "timeout_s": 5.0, **options})


def test_a_receiver_that_dies_and_returns_gets_every_message_once_it_is_back(store: DuckDBStore, clock: Clock) -> None:
    """Away for three attempts: nothing is lost, the order is kept, and each id is the one it had from the first."""
    box = Mailbox()
    box.listen()
    to = receiver(box.url)
    box.stop()
    _put(store, to, "m1", "m2")
    courier = _courier(store, clock, to)
    waits = []
    for _ in range(3):
        wait_s = courier.run_once()
        assert wait_s is not None
        waits.append(wait_s)
        clock.sleep(wait_s)
    assert waits == [1.0, 2.0, 4.0]
    assert _states(store) == {"m1": ("waiting", 3), "m2": ("waiting", 0)}
    box.listen()
    assert courier.run_once() is None
    box.stop()
    assert [arrived.delivery_id for arrived in box.arrived] == ["m1", "m2"]
    assert _states(store) == {"m1": ("delivered", 4), "m2": ("delivered", 1)}


def test_an_answer_that_is_lost_means_the_same_message_again_under_the_same_id(
    store: DuckDBStore, clock: Clock
) -> None:
    """The receiver read it and died before it answered: at least once, and it can tell the repeat by its id."""
    with mailbox(lambda _, n: Say(hang_up=n == 0)) as box:
        to = receiver(box.url, secret="s3cret")
        _put(store, to, "m1")
        courier = _courier(store, clock, to)
        wait_s = courier.run_once()
        assert wait_s is not None
        clock.sleep(wait_s)
        courier.run_once()
    first, again = box.arrived
    assert first.delivery_id == again.delivery_id == first.headers["webhook-id"] == again.headers["webhook-id"]
    assert (first.headers["kvscope-attempt"], again.headers["kvscope-attempt"]) == ("1", "2")
    assert first.body == again.body
    assert _states(store) == {"m1": ("delivered", 2)}


def test_messages_outlive_the_process(tmp_path: Path, clock: Clock) -> None:
    """Put in by one store, sent by the next that opens the file."""
    with mailbox() as box:
        to = receiver(box.url)
        with open_store(str(tmp_path / "k.duckdb")) as store:
            _put(store, to, "m1")
        with open_store(str(tmp_path / "k.duckdb")) as store:
            _courier(store, clock, to).run_once()
            assert _states(store) == {"m1": ("delivered", 1)}
    assert [arrived.delivery_id for arrived in box.arrived] == ["m1"]


def test_a_refusal_for_good_is_a_dead_letter_at_once_and_does_not_hold_up_the_next(
    store: DuckDBStore, clock: Clock
) -> None:
    """404 will be 404 the next time; the reason is kept, the message too."""
    with mailbox(lambda arrived, _: Say(404, body=b"no such hook") if arrived.delivery_id == "m1" else Say()) as box:
        to = receiver(box.url)
        _put(store, to, "m1", "m2")
        ended: list[tuple[str, str]] = []
        assert _courier(store, clock, to, on_end=lambda *end: ended.append(end)).run_once() is None
    assert _states(store) == {"m1": ("dead", 1), "m2": ("delivered", 1)}
    (dead,) = AlertBook(store).deliveries("dead")
    assert dead.message is not None
    assert dead.message.endswith("/... answered 404: no such hook")
    assert dead.body == '{"a": 1}'
    assert ended == [("box", "dead"), ("box", "delivered")]


def test_after_a_day_of_failures_a_message_is_dead_and_can_be_sent_again(store: DuckDBStore, clock: Clock) -> None:
    """Retries end; the replay goes out under the same id."""
    with mailbox(lambda _, n: Say(500 if clock.now_ns < NOW + 90_000 * NS else 200)) as box:
        to = receiver(box.url)
        _put(store, to, "m1")
        courier = _courier(store, clock, to)
        while (wait_s := courier.run_once()) is not None:
            clock.sleep(wait_s)
        (dead,) = AlertBook(store).deliveries("dead")
        assert 86_400 <= (clock.now_ns - NOW) / NS < 86_400 + 300
        clock.sleep(3_600)
        AlertBook(store).save(Changes(deliveries=(replace(dead, state="waiting", attempts=0, next_ns=0),)))
        assert courier.run_once() is None
    assert box.arrived[-1].delivery_id == "m1"
    assert _states(store)["m1"][0] == "delivered"


def test_the_receiver_says_when_to_come_again(store: DuckDBStore, clock: Clock) -> None:
    """Retry-After in seconds, or as a date; longer than our own wait wins, and never longer than the longest."""
    later = "Sat, 29 Nov 2025 08:01:00 GMT"  # a minute after NOW
    asked = ["30", later, "100000"]
    with mailbox(lambda _, n: Say(429, (("Retry-After", asked[n]),))) as box:
        to = receiver(box.url)
        _put(store, to, "m1")
        courier = _courier(store, clock, to)
        waits = []
        for _ in asked:
            wait_s = courier.run_once() or 0.0
            waits.append(wait_s)
            clock.sleep(wait_s)
    assert waits == [30.0, 30.0, 300.0]


def test_waits_double_with_jitter_up_to_the_longest() -> None:
    """1, 2, 4 ... 300 s, each between its half and its whole."""
    assert [backoff_s(Patience(), n, 1.0) for n in (1, 2, 3, 9, 10, 5000)] == [1.0, 2.0, 4.0, 256.0, 300.0, 300.0]
    assert backoff_s(Patience(), 3, 0.0) == 2.0


def test_one_receiver_that_is_away_holds_up_no_other(store: DuckDBStore, clock: Clock) -> None:
    """The second one gets its message in the same round."""
    with mailbox() as box:
        away, here = receiver(f"http://127.0.0.1:{free_port()}/", "away"), receiver(box.url, "here")
        _put(store, away, "m1")
        _put(store, here, "m2")
        _courier(store, clock, away, here).run_once()
    assert _states(store) == {"m1": ("waiting", 1), "m2": ("delivered", 1)}


def test_a_message_to_a_receiver_that_is_gone_from_the_file_is_a_dead_letter(store: DuckDBStore, clock: Clock) -> None:
    """It says so, and waits for a replay."""
    _put(store, receiver("http://127.0.0.1:9/", "old"), "m1")
    _courier(store, clock).run_once()
    (dead,) = AlertBook(store).deliveries("dead")
    assert "no receiver 'old' any more" in (dead.message or "")


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example of the specification's reference libraries, and a message that was changed, recorded or forged is refused."""
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    made = signature.headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body)
    assert made["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert verify(secret, made, body, 1_614_265_331)
    assert not verify(secret, made, body + b" ", 1_614_265_331)
    assert not verify(secret, made, body, 1_614_265_331 + 301)
    assert not verify("another", made, body, 1_614_265_331)
    assert not verify(secret, {}, body, 1_614_265_331)


def test_what_arrives_can_be_verified(store: DuckDBStore, clock: Clock) -> None:
    """Over the wire, with the raw bytes that came."""
    with mailbox() as box:
        to = receiver(box.url, secret="s3cret")
        _put(store, to, "m1", body='{"ü": 1}')
        _courier(store, clock, to).run_once()
    (arrived,) = box.arrived
    assert arrived.document == {"ü": 1}
    assert verify("s3cret", arrived.headers, arrived.body, NOW / NS)


REFUSED = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "169.254.1.1", "0.0.0.0",
    "168.63.129.16", "100.100.100.200", "192.0.0.192", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1",
    "::1", "::", "fe80::1", "fd00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "3fff::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::7f00:1",
    "2001:0:0:0:0:0:80ff:fffe",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_no_message_goes_to_an_address_that_is_not_public(address: str) -> None:
    """Private, shared, link-local, metadata, multicast, documentation; also wrapped into IPv6 in all its ways."""
    with pytest.raises(AddressRefused, match=r"not sent"):
        checked_addresses("x.example", 443, (), lambda *_: [address])


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    """Without a word about them."""
    assert checked_addresses("x.example", 443, (), lambda *_: [address]) == [address]


def test_networks_can_be_allowed_but_metadata_only_by_its_own_address() -> None:
    """169.254.0.0/16 does not open the service that hands out credentials; 169.254.169.254/32 does."""
    import ipaddress

    metadata = ipaddress.ip_address("169.254.169.254")
    assert is_allowed(ipaddress.ip_address("10.1.2.3"), parse_networks(["10.0.0.0/8"]))
    assert not is_allowed(metadata, parse_networks(["169.254.0.0/16", "0.0.0.0/0"]))
    assert is_allowed(metadata, parse_networks(["169.254.169.254/32"]))
    with pytest.raises(AlertMisuse, match="no network"):
        parse_networks(["10.0.0.1/8"])


def test_one_bad_address_among_good_ones_is_enough() -> None:
    """A name with a public and a private address is refused: which one would be taken is the attacker's choice."""
    with pytest.raises(AddressRefused, match=r"10\.0\.0\.1"):
        checked_addresses("x.example", 443, (), lambda *_: ["1.1.1.1", "10.0.0.1"])


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """DNS rebinding: the name is asked for once, and its second answer is never heard."""
    answers = [["127.0.0.1"], ["169.254.169.254"]]
    with mailbox() as box:
        url = box.url.replace("127.0.0.1", "rebind.example")
        assert _send(url, resolve=lambda *_: answers.pop(0)).status == 200
    assert answers == [["169.254.169.254"]]
    assert box.arrived[0].headers["host"] == f"rebind.example:{box.server.port}"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_spellings_of_this_machine_are_all_refused(host: str) -> None:
    """Whatever the system's resolver makes of them, the address is what is judged."""
    with pytest.raises((AddressRefused, DeliveryFailed)) as caught:
        _send(f"http://{host}:9/", allowed=())
    assert isinstance(caught.value, AddressRefused) or "no address" in caught.value.message


def test_a_redirect_is_checked_like_the_first_address() -> None:
    """307 to the metadata service: refused, nothing was sent there."""
    with (
        mailbox(lambda *_: Say(307, (("Location", "http://169.254.169.254/latest/"),))) as box,
        pytest.raises(AddressRefused, match="metadata service"),
    ):
        _send(box.url)
    assert len(box.arrived) == 1


def test_a_redirect_that_keeps_the_message_is_followed_without_the_first_ones_secrets() -> None:
    """308 to another origin: the body arrives, the token does not; to the same origin both do."""
    with mailbox() as other:
        with mailbox(lambda *_: Say(308, (("Location", other.url),))) as box:
            _send(box.url, secret_headers={"Authorization": "Bearer t"})
        assert "authorization" not in other.arrived[0].headers
        assert other.arrived[0].body == b"{}"
    moved = lambda arrived, _: Say() if arrived.path == "/new" else Say(307, (("Location", "/new"),))  # noqa: E731
    with mailbox(moved) as box:
        _send(box.url, secret_headers={"Authorization": "Bearer t"})
    assert box.arrived[1].headers["authorization"] == "Bearer t"


@pytest.mark.parametrize(
    ("status", "location", "said"),
    [
        (302, "/new", "would lose the message"),
        (307, "file:///etc/passwd", "no http"),
        (301, None, "give the final URL"),
    ],
)
def test_other_redirects_are_final_failures(status: int, location: str | None, said: str) -> None:
    """302 makes a GET of a POST: the receiver would never see the message."""
    with (
        mailbox(lambda *_: Say(status, () if location is None else (("Location", location),))) as box,
        pytest.raises((DeliveryFailed, AddressRefused), match=said),
    ):
        _send(box.url)


def test_redirects_end() -> None:
    """A receiver that sends us round in a circle is left after three."""
    with (
        mailbox(lambda *_: Say(307, (("Location", "/hook"),))) as box,
        pytest.raises(DeliveryFailed, match="more than 3 redirects"),
    ):
        _send(box.url)
    assert len(box.arrived) == 4


def test_a_receiver_that_drips_is_cut_off() -> None:
    """One byte every 50 ms would take each read's patience, for ever; the whole has an end."""
    with (
        mailbox(lambda *_: Say(drip_s=0.05)) as box,
        pytest.raises(DeliveryFailed, match="no answer in time") as caught,
    ):
        _send(box.url, timeout_s=0.3)
    assert not caught.value.is_final


def test_the_environments_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect for us to addresses that nobody checked."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with mailbox() as box:
        assert _send(box.url).status == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of the name hook.example, which only the certificate itself vouches for."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    folder = tmp_path_factory.mktemp("tls")
    key, ca = folder / "key.pem", folder / "ca.pem"
    subject = ["-subj", "/CN=hook.example", "-addext", "subjectAltName=DNS:hook.example"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made = [openssl, "req", "-x509", *curve, "-nodes", "-keyout", str(key), "-out", str(ca), "-days", "2", *subject]
    subprocess.run(made, check=True, capture_output=True)
    return ca, key


def test_tls_is_verified_for_the_name_though_the_address_is_connected_to(certificate: tuple[Path, Path]) -> None:
    """The right name with its certificate passes; another name, and a certificate that nobody trusts, do not."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    with mailbox(tls=server) as box:
        trusting = ssl.create_default_context(cafile=str(certificate[0]))

        def url(name: str) -> str:
            return f"https://{name}:{box.server.port}/hook"

        at_home = {"resolve": lambda *_: ["127.0.0.1"]}
        assert _send(url("hook.example"), context=trusting, **at_home).status == 200
        for name, context in (("other.example", trusting), ("hook.example", None)):
            with pytest.raises(DeliveryFailed, match="not to be trusted"):
                _send(url(name), context=context, **at_home)
    assert len(box.arrived) == 1


def test_receivers_are_read_with_their_secrets_from_files(tmp_path: Path) -> None:
    """YAML; a secret's file lies beside it and is read without its line end."""
    (tmp_path / "key").write_text("r0uting\n")
    (tmp_path / "r.yml").write_text(
        "receivers:\n- {name: oncall, kind: pagerduty, routing_key_file: key, match: ['severity=\"critical\"']}\n"
        "- {name: chat, kind: slack, url: 'https://hooks.slack.example/T/B/x'}\n"
    )
    oncall, chat = read_receivers(tmp_path / "r.yml")
    assert (oncall.routing_key, oncall.target) == ("r0uting", "https://events.pagerduty.com/v2/enqueue")
    assert chat.group_by == ("alertname", "worker")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": None}, "http"),
        ({"url": "ftp://x/"}, "http"),
        ({"url": "https://user:pw@x.example/"}, "without a user"),
        ({"url": "https://x.example:99999/"}, "http"),
        ({"kind": "pagerduty"}, "routing_key"),
        ({"kind": "slack", "url": "http://x.example/"}, "plain http"),
        ({"kind": "generic"}, "template"),
        ({"template": "x"}, "template"),
        ({"kind": "generic", "template": "{{ nothing.there }}"}, "template"),
        ({"kind": "generic", "template": "{% if %}"}, "template"),
        ({"kind": "generic", "template": "{{ 1 / 0 }}"}, "template"),
        ({"kind": "generic", "template": "{{ ''.__class__.__mro__ }}"}, "template"),
        ({"match": ("x",)}, "no matcher"),
        ({"allow_networks": ("x",)}, "no network"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"bearer": "a\nb"}, "headers"),
        ({"bearer": "t0ken", "url": "http://x.example/"}, "plain http"),
        ({"secret": "x", "secret_file": "y"}, "both"),
        ({"secret_file": "nowhere"}, "cannot be read"),
        ({"secret": "whsec_###"}, "base64"),
        ({"ca_file": "nowhere"}, "ca_file"),
        ({"name": ""}, "name"),
    ],
)
def test_a_receiver_that_cannot_work_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    """At start, and not when the first alert is due."""
    with pytest.raises(AlertMisuse, match=said):
        checked(Receiver(**{"name": "box", "kind": "webhook", "url": "https://box.example/", **fields}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("receivers: [{name: a}]", "kind"),
        ("receivers: [{name: a, kind: email, url: 'https://x/'}]", "email"),
        ("receivers: [{name: a, kind: webhook, url: 'https://x.example/', secrett: x}]", "secrett"),
        (
            "receivers: [{name: a, kind: webhook, url: 'https://x.example/'}, {name: a, kind: webhook, url: 'https://x.example/'}]",
            "more than once",
        ),
        ("[", "makes no sense"),
        ("", "makes no sense"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """A typing error in a name is an error, and no default."""
    (tmp_path / "r.yml").write_text(text)
    with pytest.raises(AlertMisuse, match=said):
        read_receivers(tmp_path / "r.yml")
    with pytest.raises(AlertMisuse, match="cannot be read"):
        read_receivers(tmp_path / "none.yml")


def test_a_delivery_is_json_as_it_was_written() -> None:
    """Several bodies of one notification have numbered ids; one keeps the notification's."""
    to = receiver("http://127.0.0.1:9/")
    one, two = deliveries_of(to, ["{}", "[]"], "m", "{}", 5)
    assert (one.delivery_id, two.delivery_id, two.body) == ("m.1", "m.2", "[]")
    (alone,) = deliveries_of(to, [json.dumps({})], "m", "{}", 5)
    assert alone == Delivery("m", "box", "{}", "waiting", "application/json", "{}", 5, 5)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:abc/",
        "http://[::1",
        "http://[v1.x]/",
        "http://",
        "http:///nowhere",
        "//",
        "/\xfc\xdf",
        "http://\xff.example/",
        f"http://{'a' * 70}.example/",
        "http://a b.example/",
        "http://..example/",
        "\x01",
    ],
)
def test_wherever_a_receiver_leads_it_is_a_failed_delivery_and_no_other_error(
    store: DuckDBStore, clock: Clock, location: str
) -> None:
    """An address that is none ends one delivery; what waits for other receivers, and for this one, is sent."""
    with mailbox(lambda _, n: Say(307, (("Location", location),)) if n == 0 else Say()) as box, mailbox() as other:
        to, next_to = receiver(box.url), receiver(other.url, "other")
        _put(store, to, "m1")
        _put(store, next_to, "m2")
        courier = _courier(store, clock, to, next_to)
        for _ in range(3):
            clock.sleep(courier.run_once() or 0.0)
    found = _states(store)
    assert found["m1"][0] in ("dead", "delivered")
    assert found["m2"] == ("delivered", 1)


@pytest.mark.parametrize(
    "asked", ["soon", "-5", "1e9", "Sat, 99 Nov 2025 08:01:00 GMT", "Mon, 01 Jan 0001 00:00:00 -0000", "9" * 400]
)
def test_a_time_to_come_again_that_is_none_is_left_out(store: DuckDBStore, clock: Clock, asked: str) -> None:
    """The receiver's own words never stop the courier; the wait is ours, or the longest."""
    with mailbox(lambda *_: Say(429, (("Retry-After", asked),))) as box:
        to = receiver(box.url)
        _put(store, to, "m1")
        wait_s = _courier(store, clock, to).run_once()
    assert wait_s in (1.0, 300.0)
    assert _states(store) == {"m1": ("waiting", 1)}


def test_certificates_that_are_gone_stop_one_receiver_alone(tmp_path: Path, store: DuckDBStore, clock: Clock) -> None:
    """A ca_file that is taken away while the collector runs: that receiver waits and says why, and goes on once it is back."""
    trusted = tmp_path / "ca.pem"
    shutil.copy(Path(ssl.get_default_verify_paths().openssl_cafile or "/etc/ssl/certs/ca-certificates.crt"), trusted)
    with mailbox() as box:
        to = receiver("https://box.example/", ca_file=str(trusted))
        other = receiver(box.url, "other")
        trusted.unlink()
        _put(store, to, "m1")
        _put(store, other, "m2")
        _courier(store, clock, to, other).run_once()
    waiting, delivered = AlertBook(store).deliveries()
    assert (waiting.state, delivered.state) == ("waiting", "delivered")
    assert "ca.pem" in (waiting.message or "")


def test_a_receiver_with_a_long_queue_holds_up_no_other(store: DuckDBStore) -> None:
    """One comes back to 20 messages and takes its time; a page for another, written meanwhile, goes out at once."""
    book = AlertBook(store)

    def slowly(*_: Any) -> Say:
        time.sleep(0.2)
        return Say()

    with mailbox(slowly) as slow, mailbox() as quick:
        one, other = receiver(slow.url, "slow"), receiver(quick.url, "quick")
        _put(store, one, *(f"m{n}" for n in range(20)))
        courier = Courier(book, (one, other), Patience())
        courier.start()
        try:
            _until(lambda: bool(slow.arrived))
            _put(store, other, "page")
            courier.wake()
            _until(lambda: bool(quick.arrived))
            assert len(slow.arrived) < 10
        finally:
            courier.stop()
    assert [arrived.delivery_id for arrived in slow.arrived] == [f"m{n}" for n in range(len(slow.arrived))]


def test_a_message_is_sent_once_though_the_disk_is_full(store: DuckDBStore, clock: Clock) -> None:
    """That it arrived could not be written down: it is written down later, and nobody gets it again every second."""

    class Full(AlertBook):
        is_full = True

        def save(self, changes: Changes) -> None:
            if self.is_full:
                raise DiskFull("no space left", url="k.duckdb")
            super().save(changes)

    book = Full(store)
    with mailbox() as box:
        to = receiver(box.url)
        _put(store, to, "m1")
        courier = Courier(book, (to,), Patience(), clock=clock, jitter=lambda: 1.0)
        for _ in range(5):
            wait_s = courier.run_once()
            assert wait_s == 1.0
            clock.sleep(wait_s)
        book.is_full = False
        assert courier.run_once() is None
    assert [arrived.delivery_id for arrived in box.arrived] == ["m1"]
    assert _states(store) == {"m1": ("delivered", 1)}


def test_a_clock_that_is_set_back_holds_up_no_message(store: DuckDBStore, clock: Clock) -> None:
    """The next attempt was planned by a clock that was a day ahead."""
    with mailbox(lambda _, n: Say(500 if n == 0 else 200)) as box:
        to = receiver(box.url)
        clock.sleep(86_000)
        _put(store, to, "m1")
        courier = _courier(store, clock, to)
        courier.run_once()
        clock.now_ns = NOW
        courier.run_once()
    assert _states(store) == {"m1": ("delivered", 2)}


def test_redirects_and_addresses_share_one_patience() -> None:
    """Three hops of 0.5 s each, with patience for one second; and an address that swallows what is sent to it leaves time for the next."""

    def slowly(*_: Any) -> Say:
        time.sleep(0.5)
        return Say(307, (("Location", "/again"),))

    with mailbox(slowly) as box:
        started = time.monotonic()
        with pytest.raises(DeliveryFailed, match="in time"):
            _send(box.url, timeout_s=1.0)
        assert time.monotonic() - started < 1.4


def test_a_receiver_is_reached_though_its_first_address_swallows_everything() -> None:
    """IPv6 that leads nowhere, IPv4 that works: the second gets its share of the time."""
    with mailbox() as box, ExitStack() as waiting:
        port = box.server.port
        waiting.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(8):  # its queue is full: who comes next is not answered at all
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", port))
        started = time.monotonic()
        found = _send(f"http://two.example:{port}/", timeout_s=2.0, resolve=lambda *_: ["127.0.0.2", "127.0.0.1"])
        assert found.status == 200
        assert time.monotonic() - started < 1.8


def _until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
