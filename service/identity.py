"""The key that this installation signs with, and the keys that it trusts."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

from gemmsmith.files import private_folder, publish
from gemmsmith.signing import SUFFIX, PublicKey, Purpose, Signer, Trusted, keys_in
from service.settings import Settings, SettingsError


def signer(settings: Settings) -> Signer:
    """Load the installation's private key, or create it on first use.

    Programs of the same user on this machine trust the key, and run what the installation compiles.

    Raises:
        SettingsError: the file holds no private key, or neither file can be read or written.
    """
    path = settings.signing_key
    try:
        try:
            key = Signer.load(path)
        except FileNotFoundError:
            try:
                key = Signer.create(path, socket.gethostname())
            except FileExistsError:  # another process has just created it
                key = Signer.load(path)
        _trust(key.public, path, settings.trusted)
    except (OSError, ValueError) as error:
        raise SettingsError(f"signing_key (or GEMMSMITH_SIGNING_KEY): {error}") from error
    return key


def _trust(key: PublicKey, private: Path, folder: Path) -> None:
    """Write the public key beside its private key, and link to it from the folder of trusted keys.

    It is a link so that nothing stays trusted after the program's data were removed. Dangling links
    of this host are removed.
    """
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname())  # hosts may share the folder
    link = folder / f"gemmsmith-{host}-{key.id}{SUFFIX}"
    if link.exists():  # usually, and then nothing is written
        return
    public = private.absolute().with_name(f"{private.name}.{key.id}{SUFFIX}")
    publish(public, f"{key.line}\n".encode(), shared=True)
    private_folder(folder)
    for known in folder.glob(f"gemmsmith-{host}-*{SUFFIX}"):
        if not known.exists():
            known.unlink(missing_ok=True)
    with suppress(FileExistsError):  # another process has just linked it
        link.symlink_to(public)
    (folder / f"gemmsmith-{key.id}{SUFFIX}").unlink(missing_ok=True)  # an earlier release's copy


def trusted_packs(settings: Settings) -> Trusted | None:
    """Return the keys whose packs are used and served. None means packs of any key.

    Raises:
        SettingsError: as `trusted`.
    """
    return None if settings.unsigned else trusted(settings)


def trusted(settings: Settings) -> Trusted:
    """Return the trusted keys: those of the user, and the shipped ones for winners only.

    Raises:
        SettingsError: a key file holds no public key, or other users may change it.
    """
    try:
        return shipped(settings, Purpose.WINNER) | Trusted.load(settings.trusted)
    except (OSError, ValueError) as error:
        raise SettingsError(f"trusted (or GEMMSMITH_TRUSTED): {error}") from error


def shipped(settings: Settings, *purposes: Purpose) -> Trusted:
    """Return the keys that came with the program.

    Raises:
        OSError, ValueError: as `keys_in`.
    """
    return Trusted((key for _, key in keys_in(settings.shipped_keys)), purposes)
