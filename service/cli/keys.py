"""`gemmsmith keys`, `audit` and `signing`: API keys, the log of changes, and keys that sign."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.choices import member
from service.cli.options import (
    Database,
    Limit,
    Packs,
    complete_actions,
    complete_scopes,
    load_settings,
)
from service.cli.output import MisuseError, Result, note, say, table
from service.cli.session import existing_store, made_store

if TYPE_CHECKING:
    from gemmsmith.signing import PublicKey
    from service.settings import Settings
    from tuner.store.keys import ApiKey


_LIFE = re.compile(r"([0-9]{1,9})([mhdw])", re.ASCII)
_HEAD = re.compile(r"[0-9a-f]{64}", re.ASCII)
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def create(
    name: Annotated[str, typer.Argument(help="Name of the key, shown in the audit log.")],
    scope: Annotated[
        str,
        typer.Option(
            help="read: look up and watch; tune: also request jobs; admin: also pin winners and "
            "manage keys.",
            autocompletion=complete_scopes,
        ),
    ] = "read",
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it expires: 12h, 90d, 8w …; default: never."),
    ] = None,
    job_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Limit of waiting and running jobs; default: the service's "
            "GEMMSMITH_KEY_JOB_LIMIT.",
        ),
    ] = None,
    database: Database = None,
) -> Result:
    """Create a key and print it once; only its hash is stored.

    A running service accepts it at once.
    """
    from tuner.store.keys import MOST_JOBS, NAME_RULE, Scope, is_name

    if not is_name(name):
        raise MisuseError(f"NAME must be {NAME_RULE}; got {name!r:.80}")
    checked = member("scope", Scope, scope)
    if job_limit is not None and not 1 <= job_limit <= MOST_JOBS:
        raise MisuseError(f"job-limit must be in 1 … {MOST_JOBS}, got {job_limit}")
    life = None if expires is None else _seconds(expires)
    with made_store(load_settings(database=database)) as store:
        key, secret = store.keys.create(name, checked, expires_in_s=life, job_limit=job_limit)
    notes = [
        f"the key of {name}, scope {scope}; it is not shown again. Clients take it from",
        "GEMMSMITH_API_KEY, for the service of GEMMSMITH_URL, or send it as",
        "`Authorization: Bearer gsk_…`.",
    ]
    return Result({"key": secret, **_document(key)}, secret, notes)


def list_(
    inactive: Annotated[bool, typer.Option("--all", help="Also revoked and expired ones.")] = False,
    database: Database = None,
) -> Result:
    """List the active keys, newest first."""
    with existing_store(database) as store:
        keys = store.keys.list(inactive=inactive)
    columns = ("name", "key", "scope", "job limit", "created", "expires", "last used", "revoked")
    rows = [
        (
            key.name,
            f"{key.prefix}…",
            key.scope.value,
            key.job_limit,
            *map(_time, (key.created_at, key.expires_at, key.last_used_at, key.revoked_at)),
        )
        for key in keys
    ]
    document = {"keys": [_document(key) for key in keys]}
    return Result(document, lambda: table("", columns, rows, left=3))


def revoke(
    name: Annotated[str, typer.Argument(help="The key's name, see `gemmsmith keys list`.")],
    database: Database = None,
) -> Result:
    """Revoke a key. Running services refuse it within two seconds."""
    from tuner.errors import KeyNotFound

    with existing_store(database) as store:
        try:
            key = store.keys.revoke(name)
        except KeyNotFound as error:
            raise MisuseError(f"{error}; see `gemmsmith keys list`") from error
    return Result(_document(key), f"{key.name} ({key.prefix}…) is revoked")


def audit(
    action: Annotated[
        str | None,
        typer.Option(help="Only this action, such as pinned.", autocompletion=complete_actions),
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Only what this key or worker did.")] = None,
    limit: Limit = 50,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no entry was changed or removed.")
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HASH", help="With --verify: check that this earlier head is still in the log."
        ),
    ] = None,
    database: Database = None,
) -> Result:
    """Print the audit log: who changed winners or API keys, newest first.

    Entries that were changed, or whose predecessor is missing, are marked. With --verify, the
    status is 1 if there are any.
    """
    import msgspec

    from tuner.store.audit import Action

    if head is not None and not verify:
        raise MisuseError("--head goes with --verify")
    if head is not None and not _HEAD.fullmatch(head):
        raise MisuseError(
            "--head takes the 64 hexadecimal digits that an earlier `audit --verify` printed, got "
            f"{head!r:.80}"
        )
    if verify:
        return _verified(database, head)
    only = None if action is None else member("action", Action, action)
    with existing_store(database) as store:
        entries = store.audit.entries(action=only, actor=actor, limit=limit)
    document = {"entries": [{**msgspec.to_builtins(e), "at": _time(e.at)} for e in entries]}
    rows = [
        (
            _time(e.at),
            e.actor,
            e.action,
            e.subject,
            " ".join(f"{name}={value}" for name, value in e.detail.items() if value is not None)
            + ("" if e.intact else " CHANGED, or entries before it are gone"),
        )
        for e in entries
    ]
    columns = ("at", "actor", "action", "subject", "detail")
    return Result(document, lambda: table("", columns, rows, left=5))


def _verified(database: str | None, head: str | None) -> Result:
    with existing_store(database) as store:
        chain = store.audit.verify(head)
    intact = f"{chain.entries} entries, none changed or removed; head {chain.head or 'none'}"
    text = f"the audit log was altered: {chain.fault}" if chain.fault else intact
    document = {"entries": chain.entries, "head": chain.head, "fault": chain.fault}
    return Result(document, text, failed=chain.fault is not None)


def _seconds(text: str) -> int:
    from tuner.store.keys import LONGEST_LIFE_S

    life = _LIFE.fullmatch(text)
    seconds = int(life[1]) * _UNITS[life[2]] if life else 0
    if not 1 <= seconds <= LONGEST_LIFE_S:
        raise MisuseError(
            f"expires must be a number of m, h, d or w, such as 90d, up to "
            f"{LONGEST_LIFE_S // 86_400}d, got {text!r:.80}"
        )
    return seconds


def _document(key: ApiKey) -> dict[str, object]:
    import msgspec

    times = ("created_at", "expires_at", "last_used_at", "revoked_at")
    return {**msgspec.to_builtins(key), **{name: _time(getattr(key, name)) for name in times}}


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


_AGAIN = "services and workers that run already know it when they are started again"


def show_signing_key() -> Result:
    """Print this installation's public key, which others need to trust its signatures.

    Creates the key if it does not exist.
    """
    from service import identity

    key = identity.signer(load_settings()).public
    notes = [
        f"its identifier is {key.id}; to trust it on another machine: gemmsmith signing trust "
        "FILE,",
        "or without the application: python -m gemmsmith trust FILE, with this line in FILE",
    ]
    return Result({"id": key.id, "key": key.line}, key.line, notes)


def trust(
    source: Annotated[
        str, typer.Argument(metavar="URL|KEY.pub", help="A service, or a key in a file.")
    ],
    identifier: Annotated[
        str | None,
        typer.Option("--id", help="The identifier that the key must have; skips the confirmation."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Trust any key without confirmation.")] = False,
) -> None:
    """Trust the key of a service, or a key in a file."""
    from gemmsmith.http.trusting import trust as add_trust

    def confirm(text: str) -> bool:
        note(text)
        return yes or typer.confirm("Trust it from now on?", err=True)

    try:
        path = add_trust(source, load_settings().trusted, identifier=identifier, confirm=confirm)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    say(str(path))
    note(_AGAIN)


def list_trusted() -> Result:
    """List the keys that are trusted here, and for what."""
    from service import identity

    settings = load_settings()
    trusted = identity.trusted(settings)
    listed = [
        {"id": key.id, "for": sorted(trusted.purposes[key.id]), "file": str(path)}
        for path, key in _trusted(settings)
    ]
    rows = [(key["id"], ", ".join(key["for"]), key["file"]) for key in listed]
    return Result({"keys": listed}, lambda: table("", ("key", "for", "file"), rows, left=3))


def revoke_trust(
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


def sign_packs(folder: Packs = None) -> None:
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


def sign_winners(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Winners files.")],
    key: Annotated[
        Path | None, typer.Option(help="File of the private key; default: this installation's own.")
    ] = None,
) -> Result:
    """Sign the winners of files, replacing earlier signatures.

    Releases are signed with their own key. Exported winners have the signature of the installation
    that measured them.
    """
    from gemmsmith.signing import Signer
    from service import identity
    from tuner.exchange import ExchangeError
    from tuner.exchange import sign_winners as sign

    try:
        signer = Signer.load(key) if key else identity.signer(load_settings())
    except ValueError as error:
        raise MisuseError(str(error)) from error
    counts: list[dict[str, object]] = []
    lines: list[str] = []
    for path in paths:
        try:
            count = sign(path, signer)
        except ExchangeError as error:
            for line in lines:  # these stay signed
                note(line)
            raise MisuseError(str(error)) from error
        counts.append({"file": str(path), "winners": count})
        lines.append(f"{path}: {count} winners signed with {signer.public.id}")
    return Result({"files": counts, "key": signer.public.id}, lines)
