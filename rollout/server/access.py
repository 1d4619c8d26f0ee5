"""Who may call what: API key, control token, networks that need none, and the Host and Origin that no web page can send."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, Forbidden, Unauthorized
from .schemas import Needs

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Listening = Literal["traffic", "control"]
"""which listener a call came to"""
AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What the listeners ask of their callers."""

    host: str
    api_key: str | None = None
    control_token: str | None = None
    control_host: str | None = None
    """of a listener of its own for control routes; None: they are on the traffic's"""
    control_allow: tuple[Network, ...] = ()
    """peers that may do all the control token may, without it"""

    def loopback(self, on: Listening) -> bool:
        """Whether only this machine can reach that listener."""
        return is_loopback(self.host if on == "traffic" or self.control_host is None else self.control_host)

    def validate(self) -> None:
        """ConfigError if control would be open to other machines, or to whoever has the traffic's key."""
        if not (self.loopback("control") or self.control_token or self.control_allow):
            flag, host = ("--host", self.host) if self.control_host is None else ("--control-host", self.control_host)
            own = " or --control-port (a listener of their own on 127.0.0.1)" if self.control_host is None else ""
            raise ConfigError(
                f"{flag} {host} is reachable from other machines, so control routes need --control-token, --control-allow CIDR{own}"
            )
        if self.api_key is not None and self.api_key == self.control_token:
            raise ConfigError("--api-key and --control-token must differ: the key of traffic must not open control routes")

    def warnings(self) -> list[str]:
        """What whoever starts the server must see."""
        return [
            f"control routes are open WITHOUT A TOKEN to {network} (--control-allow): who can connect from there can replace the weights"
            for network in self.control_allow
        ]

    def allows(self, peer: str) -> bool:
        """Whether this address needs no token."""
        address = None
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(peer)
        address = getattr(address, "ipv4_mapped", None) or address
        return address is not None and any(address in network for network in self.control_allow)


def network(cidr: str) -> Network:
    """The network of "10.0.0.0/8" or "fd00::/8"; one address is a network too. ConfigError says what is wrong."""
    try:
        found = ipaddress.ip_network(cidr.strip())
    except ValueError as error:
        meant = ""
        with contextlib.suppress(ValueError):
            meant = f"; did you mean {ipaddress.ip_network(cidr.strip(), strict=False)}?"
        raise ConfigError(f"--control-allow must be a network such as 10.0.0.0/8 or fd00::/8, got {cidr!r} ({error}){meant}") from None
    if isinstance(found, ipaddress.IPv6Network) and found.subnet_of(MAPPED):  # as peers of a dual-stack listener look
        return ipaddress.IPv4Network((int(found.network_address) & 0xFFFFFFFF, found.prefixlen - 96))
    return found


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, can only mean this machine. No name is looked up."""
    host = host.strip("[]").removesuffix(".")
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def host_of(authority: str) -> str:
    """The host in "host", "host:port" or "[v6]:port"; "" if it is none of these."""
    found = AUTHORITY.fullmatch(authority)
    return (found["v6"] or found["name"]).lower() if found else ""


def host_of_origin(origin: str) -> str:
    """The host in "http://host:port"; "" for anything else, "null" among it."""
    scheme, _, authority = origin.partition("://")
    return host_of(authority) if scheme.lower() in ("http", "https") else ""


def token_of(authorization: str) -> bytes:
    """What follows "Bearer"; empty if nothing does."""
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def check(access: Access, needs: Needs, headers: dict[str, str], on: Listening = "traffic", peer: str = "") -> str:
    """By what a call of a path that needs `needs` may pass: "token", "network", "key" or "open".

    The control token, and a network that needs none, open everything. Without a token, control needs what traffic needs, which only a
    loopback listener may leave at that.

    Raises:
        Forbidden, Unauthorized: it may not.
    """
    loopback = access.loopback(on)
    if loopback:
        host = headers.get("host", "")
        if not is_loopback(host_of(host)):
            raise Forbidden(f"Host must name this machine (localhost or a loopback address), got {host!r}")
        origin = headers.get("origin")
        if origin is not None and not is_loopback(host_of_origin(origin)):
            raise Forbidden(f"Origin must be this machine, got {origin!r}")
    if needs == "control" and on == "traffic" and access.control_host is not None:
        raise Forbidden("control routes are not served on this port, but on that of --control-port")
    token = token_of(headers.get("authorization", ""))
    if access.control_token is not None and _equal(token, access.control_token):
        return "token"
    if "origin" not in headers and access.allows(peer):  # a web page in that network's browsers must not pass
        return "network"
    if needs == "control" and access.control_token is not None:
        raise Unauthorized("this route needs Authorization: Bearer <control token>")
    if needs == "control" and not loopback:
        shown = ", ".join(map(str, access.control_allow))
        raise Forbidden(f"control routes are open to {shown} (--control-allow) and not to web pages; this call came from {peer or '?'}")
    if access.api_key is None or needs == "open":
        return "open"
    if not _equal(token, access.api_key):
        raise Unauthorized("this route needs Authorization: Bearer <api key>")
    return "key"


def _equal(token: bytes, secret: str) -> bool:
    return hmac.compare_digest(token, secret.encode(errors="surrogateescape"))
