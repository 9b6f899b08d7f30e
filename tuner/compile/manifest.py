"""A pack's manifest: which kernels the pack holds, and whose signature vouches for that.

The installation that compiles a pack signs its manifest: hash, kernels, digests of their source
text, and compiler. A pack from elsewhere keeps the signature that it came with, and is used only
for the kernels that it was taken for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gemmsmith.errors import PackCorrupt
from gemmsmith.signing import PublicKey, Purpose, Signature, Signer, Trusted

Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""The hash of a pack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A compiled shared object. A kernel's index in it is its position in `kernels`.

    An entry is None if the pack was not taken for that kernel. `toolchain` is the digest of the
    toolchain that built the pack.
    """

    hash: str
    path: Path
    kernels: tuple[str | None, ...]
    toolchain: str = field(compare=False)  # several may make the same bytes


class Manifest(msgspec.Struct, frozen=True):
    """The content of `<hash>.json`; `digests` are kernel digests in the order of `kernels`.

    Attributes:
        signature: by the installation that compiled the pack; None in manifests that are older than
            signatures.
        taken: of a pack from elsewhere, digests of the kernels that it is used for; None if the
            pack was compiled here, and is used for all its kernels.
    """

    kernels: list[str]
    digests: list[str]
    toolchain: str
    nvcc: str
    cutlass: str
    bytes: int
    created_at: str
    signature: Signature | None = None
    taken: list[str] | None = None
    format: int = 1

    def __post_init__(self) -> None:
        # msgspec turns this into a ValidationError, so a wrong manifest counts as damaged.
        if len(self.kernels) != len(self.digests):
            raise ValueError(f"{len(self.kernels)} kernels, but {len(self.digests)} digests")

    @property
    def used_for(self) -> list[str]:
        return self.digests if self.taken is None else self.taken

    @property
    def held(self) -> tuple[str | None, ...]:
        """Names of the kernels by index; None for a kernel that the pack is not used for."""
        named = zip(self.kernels, self.digests, strict=True)
        return tuple(name if digest in self.used_for else None for name, digest in named)

    def signed(self, pack_hash: str, signer: Signer) -> Manifest:
        signature = signer.sign(Purpose.PACK, self.statement(pack_hash))
        return msgspec.structs.replace(self, signature=signature)

    def check(self, pack_hash: str, trusted: Trusted) -> PublicKey:
        """The key that signed the manifest for the pack of this hash.

        Raises:
            Untrusted: there is no signature by a trusted key.
        """
        return trusted.check(Purpose.PACK, self.statement(pack_hash), self.signature)

    def statement(self, pack_hash: str) -> dict[str, Any]:
        """The signed content: everything that is the same wherever the manifest is stored."""
        content = msgspec.to_builtins(self)
        for local in ("signature", "taken", "format"):
            del content[local]
        return {"pack": pack_hash, **content}

    def joined(self, other: Manifest) -> Manifest:
        """This manifest, taken for the kernels of `other` as well. Their statements are equal."""
        taken = None
        if self.taken is not None and other.taken is not None:
            taken = sorted({*self.taken, *other.taken})
        signature = self.signature or other.signature
        return msgspec.structs.replace(self, taken=taken, signature=signature)


def check_names(pack_hash: str, manifest: Manifest, content: bytes) -> None:
    """Check that the names of a manifest's kernels are in its pack's bytes.

    Raises:
        PackCorrupt: a name is missing.
    """
    missing = [name for name in manifest.kernels if name.encode() + b"\0" not in content]
    if missing:
        raise PackCorrupt(f"pack {pack_hash} is refused: it does not contain {missing[0]}")
