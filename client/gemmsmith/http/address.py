"""The address of a service: its URL, its origin, its credentials, and the proxy to reach it."""

from __future__ import annotations

import ipaddress
import urllib.request
from dataclasses import dataclass, field

import httpx

from gemmsmith.errors import ServiceUnavailable
from gemmsmith.showing import address

DEFAULT_URL = "http://127.0.0.1:8000"

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A service's URL and its parts.

    Attributes:
        url: the URL without user and password, and without a trailing slash.
        origin: scheme, host and port. They identify the server.
        auth: user and password, which are sent only to this server.
    """

    url: str
    origin: tuple[str, str, int]
    auth: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse a URL with httpx's parser, because httpx connects to it.

        Raises:
            ValueError: not an http or https URL, or its port is invalid.
        """
        shown = address(text)
        try:
            url = httpx.URL(text)
            host, default = url.host, _PORTS.get(url.scheme)
        except (ValueError, httpx.InvalidURL):
            host, default = "", None
        if not host or default is None or url.query or url.fragment:
            raise ValueError(f"the service's URL must be like {DEFAULT_URL}, got {shown!r}")
        port = default if url.port is None else url.port
        if not 0 < port < 2**16:
            raise ValueError(f"a port must be in 1 … 65535, got {port} in {shown!r}")
        clean = str(url.copy_with(username=None, password=None)).rstrip("/")
        auth = (url.username, url.password) if url.userinfo else None
        return cls(url=clean, origin=(url.scheme, host, port), auth=auth)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.origin[1])

    def proxy(self) -> httpx.Proxy | None:
        """The environment's proxy for this service. A service on this machine has no proxy.

        Raises:
            ServiceUnavailable: the proxy's URL is invalid.
        """
        scheme, host, port = self.origin
        proxies = urllib.request.getproxies()
        url = proxies.get(scheme) or proxies.get("all")
        if not url or self.is_loopback or urllib.request.proxy_bypass(f"{host}:{port}"):
            return None
        try:
            return httpx.Proxy(url if "://" in url else f"http://{url}")
        except (ValueError, httpx.InvalidURL) as error:
            raise no_way(url, str(error)) from None


def no_way(proxy: str, reason: str) -> ServiceUnavailable:
    """The error for a proxy that cannot be used."""
    return ServiceUnavailable(
        f"the proxy {proxy} cannot be used: {reason}. Correct the variables HTTP_PROXY, "
        "HTTPS_PROXY and ALL_PROXY, or name the service's host in NO_PROXY"
    )


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is a loopback address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
