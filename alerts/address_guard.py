"""Where a webhook may go: public addresses, and the networks that somebody allowed. Never a name: what a name means may change.

A name is resolved once, every address that it has is checked, and the connection goes to a checked address (`post.py`), so a name
that answers differently the second time (DNS rebinding) gains nothing. Metadata services of clouds give out credentials: they are
allowed as their single address alone, not as a part of a network. Source: RFC 6890 special-purpose registries; OWASP SSRF cheat sheet.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine_probe.errors import AddressRefused, AlertMisuse, DeliveryFailed

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]
Resolve = Callable[[str, int], Sequence[str]]

METADATA: Final = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, GCP, Azure, OCI, DigitalOcean
        "169.254.170.2",  # AWS ECS task credentials
        "169.254.170.23",  # AWS EKS pod identity
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's wire server: a public address
        "192.0.0.192",  # Oracle classic
        "fd00:ec2::254",  # AWS
        "fd00:ec2::23",  # AWS EKS pod identity
        "fd20:ce::254",  # GCP
    )
)
_EMBEDDING: Final = (
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("64:ff9b:1::/48"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
)
_NEVER_GLOBAL: Final = (
    ipaddress.IPv4Network("192.88.99.0/24"),  # 6to4 relays
    ipaddress.IPv6Network("fec0::/10"),  # site-local, deprecated
    ipaddress.IPv6Network("3fff::/20"),  # documentation, RFC 9637
)


def parse_networks(texts: Iterable[str]) -> Networks:
    """Networks in CIDR notation. Raises AlertMisuse."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text.strip()))
        except ValueError as error:
            raise AlertMisuse(
                f"{text[:100]!r} is no network; write 10.0.0.0/8 or 127.0.0.1/32", network=text
            ) from error
    return tuple(found)


def checked_addresses(host: str, port: int, allowed: Networks, resolve: Resolve | None = None) -> list[str]:
    """The addresses of `host`, all of them allowed. Raises AddressRefused where one is not, DeliveryFailed where there is none."""
    try:
        texts = list((resolve or resolve_name)(host, port))
    except (OSError, ValueError) as error:  # of which what no name can hold is a kind
        raise DeliveryFailed(f"the name {host} has no address: {error}", host=host, is_final=False) from error
    if not texts:
        raise DeliveryFailed(f"the name {host} has no address", host=host, is_final=False)
    for text in texts:
        address = ipaddress.ip_address(text.partition("%")[0])
        if not is_allowed(address, allowed):
            raise AddressRefused(
                f"{host} is {address}, which is {_what(address)}: not sent. If it is meant, put {address}/"
                f"{address.max_prefixlen} into allow_networks of this receiver",
                host=host,
                address=str(address),
            )
    return texts


def is_allowed(address: Address, allowed: Networks) -> bool:
    """Public, or inside a network that is allowed; in all the forms in which an address may hide in another."""
    hidden = _inner(address)
    if hidden is not None:
        return is_allowed(hidden, allowed)
    inside = [network for network in allowed if network.version == address.version and address in network]
    if address in METADATA:
        return any(network.prefixlen == network.max_prefixlen for network in inside)
    return bool(inside) or _is_public(address)


def resolve_name(host: str, port: int) -> list[str]:
    """Addresses by the system's resolver, in its order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_public(address: Address) -> bool:
    special = any(network.version == address.version and address in network for network in _NEVER_GLOBAL)
    return address.is_global and not address.is_multicast and not address.is_reserved and not special


def _inner(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.teredo is not None:
        return address.teredo[1]
    for network, shift in _EMBEDDING:
        if address in network and int(address) > 1:
            return ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
    return None


def _what(address: Address) -> str:
    if (_inner(address) or address) in METADATA:
        return "the metadata service of a cloud"
    return "no public address"
