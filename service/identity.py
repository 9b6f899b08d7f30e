"""What this installation signs with, and whom it believes."""

from __future__ import annotations

import socket

from gemmsmith.files import publish
from gemmsmith.signing import SUFFIX, Signer, Trusted
from service.settings import Settings, SettingsError


def signer(settings: Settings) -> Signer:
    """The installation's private key, made when it is first needed.

    Its public half is put among the keys that this user believes, so that programs of the same
    user on this machine run what the installation compiles.

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
        public = settings.trusted / f"gemmsmith-{found.public.id}{SUFFIX}"
        if not public.exists():
            publish(public, f"{found.public.line}\n".encode(), shared=True)
    except (OSError, ValueError) as error:
        raise SettingsError(f"signing_key (or GEMMSMITH_SIGNING_KEY): {error}") from error
    return found


def trusted_packs(settings: Settings) -> Trusted | None:
    """Whose packs are found and handed on; None: anybody's.

    Raises:
        SettingsError: as `trusted`.
    """
    return None if settings.unsigned else trusted(settings)


def trusted(settings: Settings) -> Trusted:
    """Whom this installation believes: the shipped keys, and those of its own folder.

    Raises:
        SettingsError: a file there holds no public key.
    """
    try:
        return Trusted.load(settings.shipped_keys, settings.trusted)
    except (OSError, ValueError) as error:
        raise SettingsError(f"trusted (or GEMMSMITH_TRUSTED): {error}") from error
