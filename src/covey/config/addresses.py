"""Addresses of servers that a config names."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit

from covey.config.common import ConfigError
from covey.config.files import shortened

ENDPOINT = "/chat/completions"


def parse_address(address: str, where: str) -> tuple[SplitResult, int | None]:
    """The parts of an address, and its port if it names one.

    Args:
        where: beginning of the message, which names the field.

    Raises:
        ConfigError: for text that is not an address, and for port 0.
    """
    try:
        parts = urlsplit(address)
        port = parts.port  # raises ValueError too
        if port == 0:
            raise ValueError("the port is 0")
    except ValueError as error:
        raise ConfigError(f"{where}{shortened(address)} is not an address ({error})") from None
    return parts, port


def public_address(address: str) -> str:
    """The address without a query, which may hold secrets."""
    return urlsplit(address)._replace(query="", fragment="").geturl()


def endpoint(address: str) -> str:
    """The address of the chat completions API below a server's address."""
    bare = address.rstrip("/")
    return bare if bare.endswith(ENDPOINT) else bare + ENDPOINT


def is_this_machine(address: str) -> bool:
    """True for a loopback address of IPv4 or IPv6. Raises ValueError for a name."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def is_local(host: str) -> bool:
    """True for a loopback address and for "localhost"."""
    try:
        return is_this_machine(host)
    except ValueError:
        return host == "localhost"
