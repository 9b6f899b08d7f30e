"""Adds a public key to the folder of trusted keys.

A key that was fetched over a network is only as trustworthy as the network. Compare its identifier
with the output of `gemmsmith signing show` on the service's machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from gemmsmith.errors import GemmsmithError, ServiceError, Untrusted
from gemmsmith.files import publish, unsafe
from gemmsmith.signing import SUFFIX, PublicKey, key_in

_ODD = re.compile(r"[^A-Za-z0-9.-]+")


def trust(
    source: str, folder: Path, *, identifier: str | None, confirm: Callable[[str], bool]
) -> Path:
    """Trust the key of a service, or the key in a file. Returns the key's new file in `folder`.

    Args:
        source: the service's URL, or the path of the file.
        folder: the folder of the trusted keys. It is made if it is missing.
        identifier: the expected identifier of the key. None: `confirm` decides.
        confirm: called with a description of the key; returns whether to trust it.

    Raises:
        Untrusted: it is another key, or `confirm` returned False.
        ServiceError, ServiceUnavailable: the service has no key, or cannot be reached.
        ValueError: not a URL, the file holds no public key, or others may write to the folder.
        OSError: the file cannot be read, or the folder cannot be written to.
    """
    if folder.exists() and (reason := unsafe(folder)):
        raise ValueError(reason)
    url = source if source.startswith(("http://", "https://")) else ""
    key = _of_service(url) if url else key_in(Path(source))
    if identifier is not None and identifier != key.id:
        raise Untrusted(f"{source} has the key {key.id}, not {identifier}: nothing was changed")
    if identifier is None and not confirm(
        f"{source} signs with the key {key.id}. Whoever has it can run programs here. Compare it "
        "with what `gemmsmith signing show` prints there."
    ):
        raise Untrusted(f"the key {key.id} is not trusted: nothing was changed")
    name = _ODD.sub("-", urlsplit(url).hostname or "" if url else Path(source).stem)
    name = name.removesuffix(f"-{key.id}")
    path = folder / f"{name}-{key.id}{SUFFIX}"
    # The key's own comment is not kept: it is untrusted text, which would be printed.
    publish(path, f"{PublicKey(raw=key.raw, comment=name).line}\n".encode(), shared=True)
    return path


def _of_service(url: str) -> PublicKey:
    from gemmsmith.http.client import Client

    # The service is not trusted yet, so the environment's key stays here.
    with Client(url, api_key=False, cache_dir=None) as client:
        try:
            return client.signing_key()
        except ServiceError as error:
            if error.status == 401:
                raise GemmsmithError(
                    f"{url} answers 401 Unauthorized, and to trust a service no API key is sent: "
                    "upgrade it, or trust a file with the line that `gemmsmith signing show` prints"
                ) from error
            if error.status != 404:
                raise
            raise GemmsmithError(f"{url} is of a release that signs nothing: upgrade it") from error
