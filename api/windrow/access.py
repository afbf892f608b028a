"""Decide which hosts a job may reach by the network: by name before, by address after resolving.

A policy may list sources (`access.sources`). A name that is listed covers whatever private address
it resolves to; link-local addresses, where clouds serve a node's credentials, only an address or a
network covers. Without a list, hosts with public addresses may be reached, and private ones where
the job is of the policy's own namespace.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Final

_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*"
# One of: *, a name or *.domain, a bracketed IPv6 address, an IPv6 address or network, IPv4 network.
SOURCE_PATTERN: Final = (
    rf"^((\*|(\*\.)?{_NAME}(/[0-9]{{1,2}})?|\[[0-9A-Fa-f:.]+\])(:[0-9]{{1,5}})?"
    r"|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+(/[0-9]{1,3})?)$"
)

# Where clouds serve a node's credentials at other than link-local addresses: Amazon's by IPv6,
# Alibaba's, Azure's WireServer, Oracle's.
_METADATA: Final = frozenset(
    map(
        ipaddress.ip_address,
        ("fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
# IPv6 addresses that end in the IPv4 address that is meant: compatible with it, translated to it,
# by NAT64 of all and of one's own network (RFC 4291, 2765, 6052, 8215).
_ENDS_IN_IPV4: Final = tuple(
    map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)

_NUMBERS: Final = r"(0[xX][0-9A-Fa-f]*|[0-9]+)(\.(0[xX][0-9A-Fa-f]*|[0-9]+)){0,3}"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of a list of sources: a name or a network, and maybe a port."""

    name: str = ""  # lower case; "*", "*.domain" or a host
    network: Network | None = None
    port: int | None = None  # None: any

    def names(self, host: str, port: int) -> bool:
        """Return whether this entry, a name, means a host by its name."""
        if not self.name or self.port not in (None, port):
            return False
        if self.name == "*":
            return True
        if self.name.startswith("*."):
            return host.endswith(self.name[1:])
        return host == self.name

    def holds(self, address: Address, port: int) -> bool:
        """Return whether this entry, a network, holds an address."""
        if self.network is None or self.port not in (None, port):
            return False
        return address.version == self.network.version and address in self.network


def parse_source(text: str) -> Source:
    """Return an entry of a list of sources.

    Raises:
        ValueError: it is none; says what is wrong.
    """
    if not re.fullmatch(SOURCE_PATTERN, text):
        raise ValueError("is not a host, an address or a network")
    place, port = text, None
    if text.startswith("["):
        place, _, tail = text[1:].partition("]")
        port = _port(tail[1:]) if tail else None
    elif text.count(":") == 1:
        place, _, tail = text.partition(":")
        port = _port(tail)
    if _is_numeric(place):
        return Source(network=ipaddress.ip_network(place, strict=False), port=port)
    if "/" in place:
        raise ValueError("is not a network: only an address can stand before a /")
    return Source(name=_host(place), port=port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"{text!r} is not a port")
    return int(text)


def _is_numeric(place: str) -> bool:
    """Return whether `place` means an address, not a name: no name ends in a number."""
    head = place.partition("/")[0]
    return ":" in head or head.rpartition(".")[2].isdecimal()


def _host(name: str) -> str:
    return name.rstrip(".").lower()


def address_of(host: str) -> Address | None:
    """Return the address that a host is written as; None: it is a name, which is resolved."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        # What resolvers take for an address as well: 2130706433, 0x7f.1, 0177.0.0.1.
        if not re.fullmatch(_NUMBERS, host):
            return None
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    return _plain(address)


def _plain(address: Address) -> Address:
    """Return the IPv4 address within one of IPv6 that only carries it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        own = address.is_unspecified or address.is_loopback
        if inner is None and not own and any(address in each for each in _ENDS_IN_IPV4):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return inner
    return address


@dataclass(frozen=True, slots=True)
class NetworkAccess:
    """Hosts that a job may reach.

    Attributes:
        sources: entries of the policy's `access.sources`; None: it lists none.
        private: whether hosts with private addresses may be reached without a list.
    """

    sources: tuple[str, ...] | None = None
    private: bool = False

    def host_refusal(self, host: str, port: int) -> str:
        """Return why a host may not be asked at all, before its name is resolved; "": it may.

        Args:
            host: a name, or an address as it is written in a URL.
            port: that would be dialled.
        """
        address = address_of(host)
        if address is not None:
            return self.address_refusal(host, port, str(address))
        if self.sources is None or any(each.names(_host(host), port) for each in self._entries()):
            return ""
        return self._not_listed(f"host {host}")

    def address_refusal(self, host: str, port: int, address: str) -> str:
        """Return why an address that a host resolved to may not be dialled; "": it may.

        Args:
            host: as it was asked for, or as a redirect names it.
            port: that would be dialled.
            address: that the host has.
        """
        found = address_of(address)
        if found is None:
            return f"{address!r} is not an address"
        entries = self._entries()
        if any(each.holds(found, port) for each in entries):
            return ""
        what = f"host {host}" if host == address else f"host {host}, which is {found},"
        if _is_nobodys(found):
            return f"{what} is link-local or of no host. {_ASK}, as an address or a network"
        names = [each for each in entries if each.names(_host(host), port)]
        if address_of(host) is None and any(each.name != "*" for each in names):
            return ""
        if self.sources is None:
            open_ = _is_public(found) or self.private
            return "" if open_ else f"{what} has a private address. {_ASK}"
        return "" if names and _is_public(found) else self._not_listed(what)

    def _not_listed(self, what: str) -> str:
        listed = ", ".join(self.sources or ()) or "nothing"
        return f"{what} is not among the sources of the policy, which lists {listed}. {_ASK}"

    def _entries(self) -> list[Source]:
        return [parse_source(text) for text in self.sources or ()]


def _is_public(address: Address) -> bool:
    # Site-local ones are private, and were so before the ranges that Python knows as such.
    is_of_site = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not is_of_site


def _is_nobodys(address: Address) -> bool:
    """Return whether an address is of no other host: of the link, of a group, or of none."""
    local = address.is_link_local or address.is_multicast or address.is_unspecified
    return local or address in _METADATA


_ASK: Final = "Who keeps the HarvestPolicy can add it to spec.access.sources"
