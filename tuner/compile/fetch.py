"""Takes kernel packs from a service, so that a machine need not compile what another one has.

A pack is looked for by what its kernels compile from, never by their names alone. It is published
here only when somebody who is believed has signed what it holds, its bytes have the SHA-256 that
was signed, and the names of its kernels are in them; and only for the kernels asked for, under the
signature that it came with. It is still a program of whoever signed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.errors import PackCorrupt, Rejected, ServiceFault, Untrusted
from gemmsmith.http.client import Client
from gemmsmith.signing import UNSIGNED_VARIABLE, Trusted
from tuner.backends.unit import kernel_digest
from tuner.compile.artifacts import ArtifactStore
from tuner.compile.manifest import Manifest, Pack, check_names

_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What became of a kernel that was missing here.

    Attributes:
        pack: the pack that holds it now; None: the service has none that can be used.
        refused: why a pack that the service named was not taken; empty where none was refused.
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
    """Take every pack that holds one of the kernels that are missing here, the newest of each.

    Gives one result per missing kernel. What is here already costs no request.

    Args:
        client: of the service, made without a cache folder: what it downloads is moved to the
            store.
        store: where the packs go.
        kernels: those wanted.
        toolchain: digest of the only toolchain whose packs will do; None takes any.
        trusted: whose packs are taken; None: anybody's, signed or not.

    Raises:
        ServiceUnavailable, ServiceError: the service is away, refuses or cannot be understood;
            packs that are here by then are whole, and stay.
        DiskFull: no space for a pack.
    """
    missing = [kernel for kernel in kernels if store.find(kernel, toolchain=toolchain) is None]
    if not missing:
        return
    offers = _offers(client, missing, toolchain)
    asked = {kernel_digest(kernel) for kernel in missing}
    taken: dict[str, Pack | None] = {}
    for kernel in missing:
        refused: list[str] = []
        # Of one toolchain's packs any will do: it may have come with another kernel's.
        pack = None if toolchain is None else store.find(kernel, toolchain=toolchain)
        for offer in offers[kernel.name, kernel_digest(kernel)]:
            if pack is not None:
                break
            if offer.hash not in taken:
                try:
                    taken[offer.hash] = _take(client, store, offer, asked, trusted)
                except (PackCorrupt, Untrusted) as error:
                    taken[offer.hash] = None
                    refused.append(f"pack {offer.hash}: {error}")
            found = taken[offer.hash]
            pack = found if found is not None and kernel.name in found.kernels else None
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
        return _Offer(msgspec.convert(row.get("hash"), _Sha256), manifest)
    except msgspec.ValidationError as error:
        raise ServiceFault(200, "Unreadable answer", f"an entry of GET /packs: {error}") from error


def _take(
    client: Client, store: ArtifactStore, offer: _Offer, asked: set[str], trusted: Trusted | None
) -> Pack | None:
    """Take a pack over for the kernels asked for; None: it went between the listing and now.

    Raises:
        Untrusted: its manifest is not signed by anybody who is believed.
        PackCorrupt: it is not the pack that the manifest is of.
    """
    if trusted is not None:
        try:
            offer.manifest.check(offer.hash, trusted)
        except Untrusted as error:
            raise Untrusted(
                f"{error}. To trust that service: gemmsmith signing trust {client.url}; "
                f"{UNSIGNED_VARIABLE}=1 accepts unsigned packs"
            ) from error
    here = store.get(offer.hash)  # for other kernels, perhaps
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
        path.unlink(missing_ok=True)  # a base set is gigabytes: they are not kept twice
    manifest = offer.manifest
    check_names(offer.hash, manifest, content)
    wanted = sorted(asked.intersection(manifest.digests))
    return store.adopt(offer.hash, content, msgspec.structs.replace(manifest, taken=wanted))
