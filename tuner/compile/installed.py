"""Takes in the packs that were installed with pip, so that a first answer waits for no compiler.

They come as those of another machine do: signed with a trusted key, under the hash that was signed,
and with the names of their kernels in them. Keys that came with gemmsmith itself count here too,
though from elsewhere they sign winners only: the wheel was installed, as gemmsmith was. Packs of
another toolchain or of other sources are not used.
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
    """What became of an installed pack: it is in the store now, or why it is not."""

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
    """Take every pack of these folders in that is not in the store; one result for each of those.

    Args:
        store: where they go.
        folders: `gemmsmith.winners.installed.folders()`.
        trusted: whose packs are taken; None: anybody's, signed or not.
        shipped: whose packs are taken as well. `signer` signs them, so that they are found.
        signer: this installation's.

    Raises:
        DiskFull: no space for a pack.
    """
    here = store.believed() if folders else {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            known = here.get(path.stem)
            if known is not None and {*manifest.digests} <= {*known.found_for}:
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
    """The manifest with a signature that is trusted; raises Untrusted if it has none."""
    try:
        manifest.check(pack_hash, trusted)
    except Untrusted:
        if shipped is None or signer is None:
            raise
        manifest.check(pack_hash, shipped)
        return manifest.signed(pack_hash, signer)
    return manifest
