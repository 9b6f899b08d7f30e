"""Whom to believe: public keys, put into a folder by those who run what they sign.

A key is worth as much as the way that it came by. Over a network, compare its identifier with what
`gemmsmith signing show` prints where the key is.
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
    """Believe the key of a service's URL, or of a file that holds one; its file in `folder`.

    Args:
        source: URL or path.
        folder: of the believed keys; made where it is missing.
        identifier: the only key that will do; None: whichever it is, if `confirm` says so.
        confirm: is shown what the key is.

    Raises:
        Untrusted: it is another key, or `confirm` said no.
        ServiceError, ServiceUnavailable: the service has no key to show, or is away.
        ValueError: not a URL, the file holds no public key, or others may write to the folder.
        OSError: the file cannot be read, or the folder not be written to.
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
    # Its own comment is the stranger's to choose, and would be printed.
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
