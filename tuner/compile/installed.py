"""Adds the packs that were installed with pip, so that the first kernels need no compiler.

They are checked like packs from another machine: a trusted signature, bytes with the signed hash,
and the names of their kernels in the bytes. Keys that ship with gemmsmith are trusted here too,
though elsewhere they may sign winners only: the user installed this wheel just as they installed
gemmsmith. Packs of another toolchain or of other sources are never matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gemmsmith.errors import PackCorrupt, Untrusted
from gemmsmith.signing import Signer, Trusted
from tuner.compile.artifacts import ArtifactStore
from tuner.compile.manifest import Manifest, Pack, check_names


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenIn:
    """The result for an installed pack: `pack` if it is in the store now, else the `refusal`."""

    path: Path
    pack: Pack | None
    refusal: str = ""


def take(
    store: ArtifactStore,
    folders: Sequence[Path],
    *,
    trusted: Trusted | None,
    shipped: Trusted | None = None,
    signer: Signer | None = None,
) -> Iterator[TakenIn]:
    """Add the packs of these folders that the store lacks; yields one result for each of them.

    Args:
        store: where the packs go.
        folders: `gemmsmith.winners.installed.folders()`.
        trusted: keys whose packs are accepted; None accepts all packs, signed or not.
        shipped: further keys whose packs are accepted. `signer` signs these packs again, because
            the store does not accept them under a shipped key.
        signer: this installation's key.

    Raises:
        DiskFull: no space for a pack.
    """
    here = dict(store.manifests(believed=True)) if folders else {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            known = here.get(path.stem)
            if known is not None and {*manifest.digests} <= {*known.used_for}:
                continue
            if trusted is not None:
                manifest = _believed(path.stem, manifest, trusted, shipped, signer)
            content = path.with_suffix(".so").read_bytes()
            check_names(path.stem, manifest, content)
            manifest = msgspec.structs.replace(manifest, taken=sorted(manifest.digests))
            yield TakenIn(path=path, pack=store.adopt(path.stem, content, manifest))
        except (OSError, msgspec.DecodeError, PackCorrupt, Untrusted) as error:
            yield TakenIn(path=path, pack=None, refusal=str(error))


def _believed(
    pack_hash: str,
    manifest: Manifest,
    trusted: Trusted,
    shipped: Trusted | None,
    signer: Signer | None,
) -> Manifest:
    """The manifest with a signature by a key in `trusted`.

    Raises:
        Untrusted: it has no such signature, nor an acceptable one by a shipped key.
    """
    try:
        manifest.check(pack_hash, trusted)
    except Untrusted:
        if shipped is None or signer is None:
            raise
        manifest.check(pack_hash, shipped)
        return manifest.signed(pack_hash, signer)
    return manifest
