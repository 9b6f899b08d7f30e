"""`gemmsmith signing`: this installation's signing key, and the keys that it trusts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, Packs, load_settings
from service.cli.output import MisuseError, emit, note, say, table

if TYPE_CHECKING:
    from pathlib import Path

    from gemmsmith.signing import PublicKey
    from service.settings import Settings

_AGAIN = "services and workers that run already know it when they are started again"


def show(as_json: AsJson = False) -> None:
    """Print this installation's public key, which others need to trust its signatures.

    Creates the key if there is none.
    """
    from service import identity

    key = identity.signer(load_settings()).public
    if as_json:
        emit({"id": key.id, "key": key.line})
        return
    say(key.line)
    note(
        f"its identifier is {key.id}; to trust it on another machine: gemmsmith signing trust FILE,"
    )
    note("or without the application: python -m gemmsmith trust FILE, with this line in FILE")


def trust(
    source: Annotated[
        str, typer.Argument(metavar="URL|KEY.pub", help="A service, or a key in a file.")
    ],
    identifier: Annotated[
        str | None,
        typer.Option(
            "--id",
            help="The identifier that the key must have; skips the confirmation.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Trust any key without confirmation.")] = False,
) -> None:
    """Trust the key of a service, or a key in a file."""
    from gemmsmith.http.trusting import trust as add_trust

    def confirm(text: str) -> bool:
        note(text)
        return yes or typer.confirm("Believe it from now on?", err=True)

    try:
        path = add_trust(source, load_settings().trusted, identifier=identifier, confirm=confirm)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    say(str(path))
    note(_AGAIN)


def list_(as_json: AsJson = False) -> None:
    """List the keys that are trusted here, and for what."""
    from service import identity

    settings = load_settings()
    trusted = identity.trusted(settings)
    listed = [
        {"id": key.id, "for": sorted(trusted.purposes[key.id]), "file": str(path)}
        for path, key in _trusted(settings)
    ]
    if as_json:
        emit({"keys": listed})
        return
    rows = [(key["id"], ", ".join(key["for"]), key["file"]) for key in listed]
    table("", ("key", "for", "file"), rows, left=3)


def revoke(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="See `gemmsmith signing list`.")],
) -> None:
    """Stop trusting a key. Nothing that it has signed is used any more."""
    from service import identity

    settings = load_settings()
    paths = [path for path, key in _trusted(settings) if key.id == identifier]
    if not paths:
        raise MisuseError(f"no key {identifier!r:.40} is trusted; see `gemmsmith signing list`")
    if identifier == identity.signer(settings).public.id:
        raise MisuseError(
            f"{identifier} is this installation's own: move {settings.signing_key} away first, and "
            "the next command makes another"
        )
    for path in paths:
        path.unlink()
        say(f"{path} is removed")
    note(_AGAIN)


def packs(folder: Packs = None) -> None:
    """Sign the unsigned packs here, which an older gemmsmith compiled.

    Do this only if all of them were compiled on your machines: everyone who trusts this
    installation will run them.
    """
    from service import identity
    from tuner.compile import ArtifactStore

    settings = load_settings(packs=folder)
    number = ArtifactStore(settings.packs).sign(identity.signer(settings))
    say(f"{settings.packs}: {number} packs signed")


def _trusted(settings: Settings) -> list[tuple[Path, PublicKey]]:
    from gemmsmith.signing import keys_in

    try:
        return [*keys_in(settings.shipped_keys), *keys_in(settings.trusted)]
    except ValueError as error:
        raise MisuseError(str(error)) from error
