"""What this installation signs with, and whom it believes."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

from gemmsmith.files import private_folder, publish
from gemmsmith.signing import SUFFIX, PublicKey, Purpose, Signer, Trusted, keys_in
from service.settings import Settings, SettingsError


def signer(settings: Settings) -> Signer:
    """The installation's private key, made when it is first needed.

    Programs of the same user on this machine believe it, and run what the installation compiles.

    Raises:
        SettingsError: the file holds no private key, or neither file can be read or written.
    """
    path = settings.signing_key
    try:
        try:
            found = Signer.load(path)
        except FileNotFoundError:
            try:
                found = Signer.create(path, socket.gethostname())
            except FileExistsError:  # by another process, this moment
                found = Signer.load(path)
        _believe(found.public, path, settings.trusted)
    except (OSError, ValueError) as error:
        raise SettingsError(f"signing_key (or GEMMSMITH_SIGNING_KEY): {error}") from error
    return found


def _believe(key: PublicKey, private: Path, folder: Path) -> None:
    """Link to a public key, which lies beside its private half, from the folder of trusted keys.

    So the key is trusted for as long as it is there: where the program's data are removed, nothing
    of it stays trusted. Links that lead nowhere by now are removed.
    """
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname())  # several may share the folder
    link = folder / f"gemmsmith-{host}-{key.id}{SUFFIX}"
    if link.exists():
        return
    public = private.absolute().with_name(f"{private.name}.{key.id}{SUFFIX}")
    publish(public, f"{key.line}\n".encode(), shared=True)
    private_folder(folder)
    for known in folder.glob(f"gemmsmith-{host}-*{SUFFIX}"):
        if not known.exists():
            known.unlink(missing_ok=True)
    with suppress(FileExistsError):  # by another process, this moment
        link.symlink_to(public)
    (folder / f"gemmsmith-{key.id}{SUFFIX}").unlink(missing_ok=True)  # an earlier release's copy


def trusted_packs(settings: Settings) -> Trusted | None:
    """Whose packs are found and handed on; None: anybody's.

    Raises:
        SettingsError: as `trusted`.
    """
    return None if settings.unsigned else trusted(settings)


def trusted(settings: Settings) -> Trusted:
    """Whom this installation believes: its user's keys, and for winners the shipped ones too.

    Raises:
        SettingsError: a file there holds no public key, or others may change it.
    """
    try:
        return shipped(settings, Purpose.WINNER) | Trusted.load(settings.trusted)
    except (OSError, ValueError) as error:
        raise SettingsError(f"trusted (or GEMMSMITH_TRUSTED): {error}") from error


def shipped(settings: Settings, *purposes: Purpose) -> Trusted:
    """The keys that came with the program, which may be changed by those who may change it.

    Raises:
        OSError, ValueError: as `keys_in`.
    """
    return Trusted((key for _, key in keys_in(settings.shipped_keys)), purposes)
