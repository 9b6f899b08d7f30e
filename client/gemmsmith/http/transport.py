"""The set-up of both HTTP clients: URL, API key, proxy, time-outs, headers and caches.

The key is sent in a header to the service, and appears in no message, log or `repr`. The
environment's key is sent only to the environment's service.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cached_property
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import httpx

from gemmsmith.answers.cache import AnswerCache, Cache, PackCache, default_cache_dir
from gemmsmith.answers.snapshot import Shelf
from gemmsmith.core.bounds import Bounds
from gemmsmith.core.kernel import Backend
from gemmsmith.http.address import DEFAULT_URL, Address, no_way
from gemmsmith.http.bodies import GZIP
from gemmsmith.http.requests import RUNS, Request

DEFAULT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
URL = "GEMMSMITH_URL"
"""The environment variable with the default URL of a service."""
API_KEY = "GEMMSMITH_API_KEY"
"""The environment variable with the default key, for the service of `URL` only."""

_KEY = re.compile(r"[!-~]{1,500}")

CacheDir = Path | str | None | Literal["default"]
ApiKey = str | Literal[False] | None

T = TypeVar("T")


class OfProcess(Generic[T]):
    """An object that each process makes for itself at its first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None

    def __call__(self) -> T:
        # A forked child must not use its parent's connections: parent and child would get each
        # other's answers. It must not close them either, because that would close them for both.
        if self._made is None or self._made[0] != os.getpid():
            self._made = (os.getpid(), self._make())
        return self._made[1]


class Setup:
    """The checked arguments of a client."""

    def __init__(
        self,
        url: str | None,
        api_key: ApiKey,
        timeout: float,
        retries: int,
        cache_dir: CacheDir,
        bounds: Bounds,
    ) -> None:
        self._address = Address.parse(_environments_url() if url is None else url)
        self._authorization = _authorization(api_key, self._address)
        if timeout <= 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        if retries < 0:
            raise ValueError(f"retries must be 0 or more, got {retries}")
        self.url = self._address.url
        self.retries = retries
        self.bounds = bounds
        self._timeout = timeout
        self._folder = OfProcess(self._temporary_folder)
        self._remove: Callable[[], object] = lambda: None
        self._cache_dir = default_cache_dir() if cache_dir == "default" else cache_dir
        self.cache = Cache()
        if self._cache_dir is not None:
            self.cache = AnswerCache(Path(self._cache_dir), self.url)

    def packs(self) -> PackCache:
        """The cache of packs. Without a cache folder, it is temporary, until the client closes."""
        return PackCache(self._folder() if self._cache_dir is None else Path(self._cache_dir))

    def shelf(self, device: str | None, arch: str | None) -> Shelf:
        return Shelf(self._cache_dir, self.url, device, arch, self.bounds.snapshot_bytes)

    def _temporary_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="gemmsmith-"))
        self._remove = weakref.finalize(self, _remove, folder, os.getpid())
        return folder

    def cleanup(self) -> None:
        self._remove()
        self._folder = OfProcess(self._temporary_folder)

    @cached_property
    def _proxy(self) -> httpx.Proxy | None:
        # Cached, because a forked child must not read the proxy settings of macOS.
        return self._address.proxy()

    def transport(self, kind: Callable[..., T]) -> T:
        """An httpx transport of this kind, with the proxy for the service.

        Raises:
            ServiceUnavailable: the environment's proxy cannot be used.
        """
        proxy = self._proxy
        try:
            return kind(proxy=proxy)
        except ImportError as error:  # the optional package for SOCKS is missing
            raise no_way(
                str(proxy and proxy.url), "install what SOCKS needs: pip install 'httpx[socks]'"
            ) from error

    def options(self) -> dict[str, Any]:
        """Arguments of the httpx client."""
        return {
            "auth": self._address.auth,
            "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # rejects all cookies
            "headers": {
                "user-agent": "gemmsmith-client",
                "accept": "application/json",
                "accept-encoding": GZIP,
                RUNS: " ".join(Backend),
                **self._authorization,
            },
        }

    def arguments(self, request: Request) -> dict[str, Any]:
        """Arguments of httpx's `build_request`."""
        seconds = self.seconds(request)
        # Connecting has its own time-out: httpcore leaves a cancelled handshake open.
        connect = min(seconds / 2, CONNECT_TIMEOUT_S)
        return {
            "method": request.method,
            "url": self.url + request.path,
            "params": list(request.params),
            "headers": [(name.encode(), value.encode()) for name, value in request.headers],
            "content": request.body,
            "timeout": httpx.Timeout(seconds, connect=connect),
        }

    def seconds(self, request: Request) -> float:
        """Seconds that an attempt may take until its answer is complete or its stream begins."""
        return self._timeout if request.read_timeout is None else request.read_timeout


def _remove(folder: Path, process: int) -> None:
    # A forked child inherits the finalizer, but not the folder.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _environments_url() -> str:
    return os.environ.get(URL, "").strip() or DEFAULT_URL


def _authorization(api_key: ApiKey, address: Address) -> dict[str, str]:
    """The header with the key, if this service gets a key.

    Raises:
        ValueError: the key is invalid; the message does not show it.
    """
    if api_key is False:
        return {}
    where = "api_key"
    if api_key is None:
        api_key, where = os.environ.get(API_KEY, "").strip(), API_KEY
        if not api_key or not _is_environments(address):
            return {}
    if not _KEY.fullmatch(api_key):
        raise ValueError(
            f"{where} is no API key: it takes 1 … 500 printable ASCII characters without spaces, "
            "such as `gemmsmith keys create` prints"
        )
    return {"authorization": f"Bearer {api_key}"}


def exposes_key(url: str) -> bool:
    """Whether the environment's key would be sent to this service without encryption.

    Raises:
        ValueError: not a URL, or the environment's key is invalid.
    """
    address = Address.parse(url)
    plain = address.origin[0] == "http" and not address.is_loopback
    return plain and bool(_authorization(None, address))


def _is_environments(address: Address) -> bool:
    """Whether this is the server of `GEMMSMITH_URL`, for which the environment's key is meant."""
    try:
        return Address.parse(_environments_url()).origin == address.origin
    except ValueError:
        return False
