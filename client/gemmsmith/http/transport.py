"""What both HTTP clients set up alike: URL, API key, time-outs, headers, how failures read.

The key is in the header that goes to the service, and nowhere else: in no message, log or `repr`.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from gemmsmith.answers.cache import AnswerCache, Cache, NoCache, PackCache, default_cache_dir
from gemmsmith.bounds import GZIP, BoundedBody, Bounds
from gemmsmith.http.replies import NoAnswer, Reply
from gemmsmith.http.requests import RUNS, Request
from gemmsmith.http.retry import RetryPolicy
from gemmsmith.http.session import Session
from gemmsmith.kernel import Backend

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
URL = "GEMMSMITH_URL"
"""The environment variable that has the service's URL where none is passed."""
API_KEY = "GEMMSMITH_API_KEY"
"""The environment variable that has the key where none is passed."""

_KEY = re.compile(r"[!-~]{1,500}")

CacheDir = Path | str | None | Literal["default"]


class Setup:
    """The checked arguments of a client."""

    def __init__(
        self,
        url: str | None,
        api_key: str | None,
        timeout: float,
        retries: int,
        cache_dir: CacheDir,
        bounds: Bounds,
    ) -> None:
        if url is None:
            url = os.environ.get(URL, "").strip() or DEFAULT_URL
        self.url = checked_url(url)
        self._authorization = _authorization(api_key)
        if timeout <= 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        if retries < 0:
            raise ValueError(f"retries must be 0 or more, got {retries}")
        self.timeout = httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.cache_dir = default_cache_dir() if cache_dir == "default" else cache_dir
        cache: Cache = NoCache()
        if self.cache_dir is not None:
            cache = AnswerCache(Path(self.cache_dir), self.url)
        self.session = Session(
            url=self.url, retry=RetryPolicy(retries=retries), cache=cache, bounds=bounds
        )
        # An event stream is waited on for minutes: it outlives a restart of the service.
        self.stream_retry = RetryPolicy(retries=retries * 3)

    def packs(self) -> PackCache:
        """Where packs go; without a cache folder, a temporary one until the client is closed."""
        if self.cache_dir is not None:
            return PackCache(Path(self.cache_dir))
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="gemmsmith-")
        return PackCache(Path(self._temporary.name))

    def cleanup(self) -> None:
        """Remove the temporary folder if there is one."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def options(self) -> dict[str, Any]:
        """Arguments of the httpx client."""
        return {
            "base_url": self.url,
            "timeout": self.timeout,
            "headers": {
                "user-agent": "gemmsmith-client",
                "accept": "application/json",
                "accept-encoding": GZIP,
                RUNS: " ".join(Backend),
                **self._authorization,
            },
        }

    def arguments(self, request: Request) -> dict[str, Any]:
        """Arguments of httpx's `request` and `stream`."""
        found: dict[str, Any] = {
            "method": request.method,
            "url": request.path,
            "params": list(request.params),
            "headers": list(request.headers),
            "content": request.body,
        }
        if request.read_timeout is not None:
            connect = self.timeout.connect
            found["timeout"] = httpx.Timeout(request.read_timeout, connect=connect)
        return found


def checked_url(url: str) -> str:
    """The service's base URL without a trailing slash.

    Raises:
        ValueError: not an http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the service's URL must be like {DEFAULT_URL}, got {url!r}")
    return url.rstrip("/")


def _authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries the key, if there is one.

    Raises:
        ValueError: it cannot be one; the message does not show it.
    """
    where = "api_key"
    if api_key is None:
        api_key, where = os.environ.get(API_KEY, "").strip(), API_KEY
        if not api_key:
            return {}
    if not _KEY.fullmatch(api_key):
        raise ValueError(
            f"{where} is no API key: it takes 1 … 500 printable ASCII characters without spaces, "
            "such as `gemmsmith keys create` prints"
        )
    return {"authorization": f"Bearer {api_key}"}


def received(response: httpx.Response, request: Request, bounds: Bounds) -> Reply:
    """The reply to the request, of whose body no more is read than is taken."""
    body = _body(response, request, bounds)
    if response.is_stream_consumed:
        body.take(response.content)
        return body.reply()
    for piece in response.iter_raw():
        if not body.take(piece):
            break
    return body.reply()


async def awaited(response: httpx.Response, request: Request, bounds: Bounds) -> Reply:
    """As `received`."""
    body = _body(response, request, bounds)
    if response.is_stream_consumed:
        body.take(response.content)
        return body.reply()
    async for piece in response.aiter_raw():
        if not body.take(piece):
            break
    return body.reply()


def _body(found: httpx.Response, request: Request, bounds: Bounds) -> BoundedBody:
    headers = {name.lower(): value for name, value in found.headers.items()}
    if found.is_stream_consumed:  # of a transport that is no network: whole, and unpacked
        headers.pop("content-encoding", None)
    return BoundedBody(found.status_code, headers, request.bound, bounds)


def is_plain(found: httpx.Response) -> bool:
    """Whether the body is to be read as it comes."""
    return str(found.headers.get("content-encoding", "identity")).lower() == "identity"


def no_answer(error: httpx.RequestError) -> NoAnswer:
    """What to tell people about a failed exchange."""
    text = str(error)
    name = type(error).__name__
    return NoAnswer(reason=f"{name}: {text}" if text else name)
