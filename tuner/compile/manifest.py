"""What a pack is said to hold, and who says so.

Whoever compiles a pack signs its manifest: hash, kernels, what they compile from, and compiler. A
pack from elsewhere keeps the signature that it came with, and holds only what it was taken for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gemmsmith.errors import PackCorrupt
from gemmsmith.signing import PublicKey, Purpose, Signature, Signer, Trusted


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A compiled shared object; a kernel's index in it is its position in `kernels`.

    None stands there for a kernel that the pack was not taken for. `toolchain` is the digest of
    what built it.
    """

    hash: str
    path: Path
    kernels: tuple[str | None, ...]
    toolchain: str = field(compare=False)  # several may make the same bytes


class Manifest(msgspec.Struct, frozen=True):
    """What `<hash>.json` holds; `digests` are kernel digests in the order of `kernels`.

    Attributes:
        signature: of whoever compiled the pack; None in manifests from before there were any.
        taken: of a pack from elsewhere, digests of the kernels that it was taken for: the only ones
            that it is asked for. None: compiled here.
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
        """Refuse a manifest that was put together wrongly; decoding reports it as damaged."""
        if len(self.kernels) != len(self.digests):
            raise ValueError(f"{len(self.kernels)} kernels, but {len(self.digests)} digests")

    @property
    def found_for(self) -> list[str]:
        """Digests of the kernels that the pack is found for."""
        return self.digests if self.taken is None else self.taken

    @property
    def held(self) -> tuple[str | None, ...]:
        """Names of the kernels by index; None: it was not taken for that one."""
        named = zip(self.kernels, self.digests, strict=True)
        return tuple(name if digest in self.found_for else None for name, digest in named)

    def signed(self, pack_hash: str, signer: Signer) -> Manifest:
        """The same, said by `signer`."""
        signature = signer.sign(Purpose.PACK, self.statement(pack_hash))
        return msgspec.structs.replace(self, signature=signature)

    def check(self, pack_hash: str, trusted: Trusted) -> PublicKey:
        """Who says that the pack of this hash holds these kernels.

        Raises:
            Untrusted: nobody who is believed.
        """
        return trusted.check(Purpose.PACK, self.statement(pack_hash), self.signature)

    def statement(self, pack_hash: str) -> dict[str, Any]:
        """What is signed: all that does not depend on whose disk the manifest lies on."""
        said = msgspec.to_builtins(self)
        for own in ("signature", "taken", "format"):
            del said[own]
        return {"pack": pack_hash, **said}

    def joined(self, other: Manifest) -> Manifest:
        """The same, taken for what `other` was taken for as well; both say the same otherwise."""
        taken = None
        if self.taken is not None and other.taken is not None:
            taken = sorted({*self.taken, *other.taken})
        signature = self.signature or other.signature
        return msgspec.structs.replace(self, taken=taken, signature=signature)


def check_names(pack_hash: str, manifest: Manifest, content: bytes) -> None:
    """Look for the names of a manifest's kernels in its pack's bytes.

    Raises:
        PackCorrupt: one is not there.
    """
    lacking = [name for name in manifest.kernels if name.encode() + b"\0" not in content]
    if lacking:
        raise PackCorrupt(f"pack {pack_hash} is refused: nothing in it is named {lacking[0]}")
