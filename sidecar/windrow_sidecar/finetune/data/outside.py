"""Make all clients of a process take the same way outside: one set of authorities, one proxy.

A worker has clients of several libraries, which read decode's variables in different ways. requests
reads `REQUESTS_CA_BUNDLE`, botocore that and `AWS_CA_BUNDLE`, httpx and aiohttp `SSL_CERT_FILE`. Of
these requests alone knows ranges of addresses in `NO_PROXY`, as curl and programs in Go do.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

# In this order one counts where several are set.
_AUTHORITIES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE",
)
_NO_PROXY: Final = ("no_proxy", "NO_PROXY")
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")


def agree_on_authorities(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give all clients the file of authorities that one of them is given.

    A variable that is set stays. Where directories alone are named, nothing changes.
    """
    named = [value for name in _AUTHORITIES if (value := environment.get(name))]
    if chosen := next((value for value in named if os.path.isfile(value)), ""):
        for name in _AUTHORITIES:
            if not environment.get(name):
                environment[name] = chosen


def spare_of_proxy(url: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Add the host of a URL to `NO_PROXY` where it is an address in a range that is there.

    An address of loopback is added to any, as programs in Go have it.
    """
    host = urlsplit(url).hostname or ""
    if not any(name.lower() in _PROXIES and value for name, value in environment.items()):
        return
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    for name in _NO_PROXY:
        parts = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        spared = address.is_loopback or any(_is_within(address, part) for part in parts)
        if spared and host not in parts:
            environment[name] = ",".join((*parts, host))


def _is_within(address: ipaddress.IPv4Address | ipaddress.IPv6Address, part: str) -> bool:
    with suppress(ValueError):
        return "/" in part and address in ipaddress.ip_network(part, strict=False)
    return False
