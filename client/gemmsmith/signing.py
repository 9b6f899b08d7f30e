"""Ed25519 signatures of statements.

A statement is a dataclass or a dict of builtins. The signed bytes are its purpose, followed by its
canonical JSON, so a signature is valid for a single purpose. Each installation signs with its own
private key. The folder `GEMMSMITH_TRUSTED` holds the public keys that are trusted; they can check
signatures but not make them. A key is trusted for all purposes or for some.

`cryptography` is imported only when something is signed or checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gemmsmith.errors import Untrusted
from gemmsmith.files import private_folder, read_text, unsafe, xdg_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TRUSTED_VARIABLE = "GEMMSMITH_TRUSTED"
"""The folder of the public keys that are trusted."""

UNSIGNED_VARIABLE = "GEMMSMITH_UNSIGNED"
"""If it is 1, data without a trusted signature is accepted."""

SUFFIX = ".pub"
"""Suffix of a public key's file. The file is a single line, `ed25519 BASE64 comment`."""

_LINE = re.compile(r"ed25519 ([A-Za-z0-9+/]{43}=)(?: (.*))?")
_KEY_BYTES = 32


class Purpose(StrEnum):
    """The kind of statement that a signature confirms."""

    WINNER = "winner"  # this winner was measured
    PACK = "pack"  # this pack was compiled from these kernels
    SNAPSHOT = "snapshot"  # these are the answers, and the packs that hold their kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A signature and the identifier of the key that made it (`PublicKey.id`)."""

    key: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicKey:
    """A public key. `comment` names its owner, and is not verified."""

    raw: bytes
    comment: str = ""

    @property
    def id(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @property
    def line(self) -> str:
        return f"ed25519 {base64.b64encode(self.raw).decode()} {self.comment}".rstrip()

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Parse the content of a key's file.

        Raises:
            ValueError: not a public key.
        """
        match = _LINE.fullmatch(text.strip())
        if match is None:
            raise ValueError("not a public key: a line `ed25519 BASE64 comment` is expected")
        return cls(raw=base64.b64decode(match[1]), comment=match[2] or "")


class Signer:
    """A private key, in a file that only its owner may read."""

    def __init__(self, key: Ed25519PrivateKey, comment: str = "") -> None:
        self._key = key
        self.public = PublicKey(raw=key.public_key().public_bytes_raw(), comment=comment)

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Read a file that `create` wrote.

        Raises:
            ValueError: not a private key, or other users may read, change or own it.
            OSError: there is no such file, or it cannot be read.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if path.stat().st_mode & 0o077:
            raise ValueError(f"{path} may be read by others than its owner: chmod 600 {path}")
        if reason := unsafe(path):
            raise ValueError(reason)
        try:
            kind, _, rest = read_text(path).strip().partition(" ")
            text, _, comment = rest.partition(" ")
            raw = base64.b64decode(text, validate=True)
        except ValueError:
            kind, raw, comment = "", b"", ""
        if kind != "ed25519-private" or len(raw) != _KEY_BYTES:
            raise ValueError(f"{path} holds no private key; `gemmsmith signing create` makes one")
        return cls(Ed25519PrivateKey.from_private_bytes(raw), comment)

    @classmethod
    def create(cls, path: Path, comment: str = "") -> Signer:
        """Make a key and write it to a new file, which only its owner can read.

        Raises:
            FileExistsError: the file exists already.
            OSError: it cannot be written.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        text = base64.b64encode(key.private_bytes_raw()).decode()
        private_folder(path.parent)
        # A complete file is linked to `path`, so that no reader sees a part of it. Unlike a rename,
        # a link never replaces another key.
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"ed25519-private {text} {comment}".rstrip() + "\n")
                file.flush()
                os.fsync(file.fileno())
            path.hardlink_to(aside)
        finally:
            aside.unlink()
        return cls(key, comment)

    def sign(self, purpose: Purpose, statement: Any) -> Signature:
        """Sign a statement. Takes about 50 µs."""
        value = self._key.sign(_signed(purpose, statement))
        return Signature(key=self.public.id, value=base64.b64encode(value).decode())


class Trusted:
    """The public keys that are trusted.

    Attributes:
        keys: the keys, by identifier.
        purposes: the purposes that each key is trusted for, by identifier.
    """

    def __init__(
        self, keys: Iterable[PublicKey] = (), purposes: Collection[Purpose] = tuple(Purpose)
    ) -> None:
        self.keys: Mapping[str, PublicKey] = {key.id: key for key in keys}
        self.purposes = dict.fromkeys(self.keys, frozenset(purposes))

    @classmethod
    def load(cls, *folders: Path) -> Trusted:
        """The keys of all `*.pub` files in these folders. Missing folders are skipped.

        Raises:
            ValueError: a file holds no public key, or others may change it; names the file.
            OSError: a file cannot be read.
        """
        keys = []
        for folder in folders:
            for path, key in keys_in(folder):
                if reason := unsafe(folder) or unsafe(path):
                    raise ValueError(reason)
                keys.append(key)
        return cls(keys)

    def __or__(self, other: Trusted) -> Trusted:
        """The keys of both, each trusted for the purposes of both."""
        both = Trusted({**self.keys, **other.keys}.values(), ())
        for trusted in (self, other):
            for key, purposes in trusted.purposes.items():
                both.purposes[key] |= purposes
        return both

    def check(self, purpose: Purpose, statement: Any, signature: Signature | None) -> PublicKey:
        """Check a statement's signature. Returns the key that signed it.

        Raises:
            Untrusted: there is no signature, its key is not trusted or not for this purpose, or
                another statement was signed.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if signature is None:
            raise Untrusted("it is not signed")
        key = self.keys.get(signature.key)
        if key is None:
            raise Untrusted(
                f"it is signed with the key {signature.key[:16]!r}, which is not among the "
                f"{len(self.keys)} that are trusted here"
            )
        if purpose not in self.purposes[key.id]:
            known = ", ".join(sorted(f"{trusted}s" for trusted in self.purposes[key.id]))
            raise Untrusted(
                f"it is a {purpose}, signed with the key {key.id}, which is trusted for {known} "
                "only"
            )
        try:
            value = base64.b64decode(signature.value, validate=True)
            Ed25519PublicKey.from_public_bytes(key.raw).verify(value, _signed(purpose, statement))
        except (binascii.Error, ValueError, InvalidSignature):
            raise Untrusted(
                f"its signature with the key {key.id} is of another {purpose.value}: it was altered"
            ) from None
        return key


def keys_in(folder: Path) -> list[tuple[Path, PublicKey]]:
    """The keys of a folder and their files; empty if there is no such folder.

    Raises:
        ValueError: a file holds no public key; names the file.
        OSError: a file cannot be read.
    """
    # A broken link is skipped: an installation has a link to its own key, which may be deleted.
    return [(path, key_in(path)) for path in sorted(folder.glob(f"*{SUFFIX}")) if path.exists()]


def key_in(path: Path) -> PublicKey:
    """The key of a file; raises the errors of `keys_in`."""
    try:
        return PublicKey.parse(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def trusted_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of this user's trusted keys: `GEMMSMITH_TRUSTED`, else a folder of XDG's."""
    values = os.environ if environ is None else environ
    if folder := values.get(TRUSTED_VARIABLE):
        return Path(folder)
    return xdg_folder("XDG_CONFIG_HOME", ".config", environ) / "gemmsmith" / "trusted"


def unsigned_allowed(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `GEMMSMITH_UNSIGNED` accepts data without a trusted signature.

    Raises:
        ValueError: the variable is neither 0 nor 1, nor a word for these.
    """
    values = os.environ if environ is None else environ
    text = values.get(UNSIGNED_VARIABLE, "").lower()
    if text not in ("", "0", "1", "false", "true", "no", "yes"):
        raise ValueError(f"{UNSIGNED_VARIABLE} takes 0 or 1, got {text!r}")
    return text in ("1", "true", "yes")


def _signed(purpose: Purpose, statement: Any) -> bytes:
    content = msgspec.json.encode(statement, order="sorted")
    return b"gemmsmith " + purpose.value.encode() + b"\n" + content
