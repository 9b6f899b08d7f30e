"""Downloads kernel packs from a service instead of compiling the kernels here.

A pack is matched by the digests of its kernels' source text, never by names alone. It is published
here only if its manifest has a trusted signature, its bytes have the signed SHA-256, and the names
of its kernels are in them; and only for the requested kernels, with the signature that it came
with. A pack remains a program of its signer: none of these checks says what it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.errors import PackCorrupt, Rejected, ServiceFault, Untrusted
from gemmsmith.http.client import Client
from gemmsmith.signing import UNSIGNED_VARIABLE, Trusted
from tuner.backends.unit import kernel_digest
from tuner.compile.artifacts import ArtifactStore
from tuner.compile.manifest import Manifest, Pack, Sha256, check_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The result for a kernel that was missing here.

    Attributes:
        pack: the pack that holds it now; None if the service has no usable pack.
        refused: the reasons why packs that the service offered were not taken.
    """

    kernel: AnyKernel
    pack: Pack | None
    refused: tuple[str, ...] = ()


class _Offer(NamedTuple):
    """A pack that the service has."""

    hash: str
    manifest: Manifest


def fetch(
    client: Client,
    store: ArtifactStore,
    kernels: Sequence[AnyKernel],
    *,
    toolchain: str | None,
    trusted: Trusted | None,
) -> Iterator[Fetched]:
    """Download the newest pack of every kernel that is missing in the store.

    Yields one result per missing kernel. If none is missing, no request is made.

    Args:
        client: the service's client, made without a cache folder: downloads are moved to the store.
        store: where the packs go.
        kernels: the kernels that the store is to hold.
        toolchain: digest of the only toolchain to accept; None accepts any.
        trusted: keys whose packs are accepted; None accepts all packs, signed or not.

    Raises:
        ServiceUnavailable, ServiceError: the service is away, refuses or gives an unreadable
            answer; packs that were downloaded before are whole, and stay.
        DiskFull: no space for a pack.
    """
    missing = [kernel for kernel in kernels if store.find(kernel, toolchain=toolchain) is None]
    if not missing:
        return
    offers = _offers(client, missing, toolchain)
    digests = {kernel_digest(kernel) for kernel in missing}
    taken: dict[str, Pack | None] = {}
    for kernel in missing:
        refused: list[str] = []
        # A pack that was downloaded for another kernel may hold this one too. With any toolchain
        # allowed that does not count: the newest pack of this kernel may be a different one.
        pack = None if toolchain is None else store.find(kernel, toolchain=toolchain)
        for offer in offers[kernel.name, kernel_digest(kernel)]:
            if pack is not None:
                break
            if offer.hash not in taken:
                try:
                    taken[offer.hash] = _take(client, store, offer, digests, trusted)
                except (PackCorrupt, Untrusted) as error:
                    taken[offer.hash] = None
                    refused.append(f"pack {offer.hash}: {error}")
            offered = taken[offer.hash]
            pack = offered if offered is not None and kernel.name in offered.kernels else None
        yield Fetched(kernel=kernel, pack=pack, refused=tuple(refused))


def _offers(
    client: Client, kernels: Sequence[AnyKernel], toolchain: str | None
) -> dict[tuple[str, str], list[_Offer]]:
    """The service's packs with these kernels, by name and digest, the newest first."""
    offers: dict[tuple[str, str], list[_Offer]] = {
        (kernel.name, kernel_digest(kernel)): [] for kernel in kernels
    }
    listed = [_offer(row) for row in client.packs(toolchain=toolchain)]
    for offer in sorted(listed, key=lambda offer: offer.manifest.created_at, reverse=True):
        manifest = offer.manifest
        if toolchain in (None, manifest.toolchain):
            for kernel in zip(manifest.kernels, manifest.digests, strict=True):
                if kernel in offers:
                    offers[kernel].append(offer)
    return offers


def _offer(row: dict[str, Any]) -> _Offer:
    try:
        manifest = msgspec.convert(row, Manifest)
        return _Offer(msgspec.convert(row.get("hash"), Sha256), manifest)
    except msgspec.ValidationError as error:
        raise ServiceFault(200, "Unreadable answer", f"an entry of GET /packs: {error}") from error


def _take(
    client: Client, store: ArtifactStore, offer: _Offer, digests: set[str], trusted: Trusted | None
) -> Pack | None:
    """Put a pack into the store for the kernels with these digests.

    Returns None if the service has removed the pack since it was listed.

    Raises:
        Untrusted: its manifest has no trusted signature.
        PackCorrupt: its bytes are not those that the manifest describes.
    """
    if trusted is not None:
        try:
            offer.manifest.check(offer.hash, trusted)
        except Untrusted as error:
            raise Untrusted(
                f"{error}. To trust that service: gemmsmith signing trust {client.url}; "
                f"{UNSIGNED_VARIABLE}=1 accepts unsigned packs"
            ) from error
    here = store.get(offer.hash)  # it may have been taken for other kernels
    if here is not None:
        content = here.path.read_bytes()
    else:
        try:
            path = client.pack(offer.hash)
        except Rejected as error:
            if error.status == 404:
                return None
            raise
        content = path.read_bytes()
        path.unlink(missing_ok=True)  # packs can be gigabytes: they are not kept twice
    manifest = offer.manifest
    check_names(offer.hash, manifest, content)
    taken = sorted(digests.intersection(manifest.digests))
    return store.adopt(offer.hash, content, msgspec.structs.replace(manifest, taken=taken))
