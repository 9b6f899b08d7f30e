"""What a winner states: all that was measured, and nothing that changes afterwards.

Its revision, date and job, and what the store says of it (`stale`, `pinned`, `origin`) are left
out; so is the pack, which each machine compiles for itself: a signature names the one that was
measured. The digest of a statement tells equal winners, and whether a stored one was altered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemmsmith.errors import Untrusted
from gemmsmith.signing import Purpose, Signer, Trusted
from tuner.store.codec import digest, from_json, to_json
from tuner.trial import Winner, WinnerSignature

_LEFT_OUT = (
    *("revision", "promoted_at", "job", "pack"),
    *("stale", "pinned", "origin", "digest", "signature"),
)
_ALWAYS_THERE = {"revision": 0, "promoted_at": "", "pack": None, "job": None}
"""As statements had them from the start: their digests are known by it."""


def canonical(winner: Winner) -> Winner:
    # Integers in fields of floats become floats.
    return from_json(Winner, to_json(winner))


def statement(winner: Winner) -> dict[str, Any]:
    """What is measured, as builtins; of a canonical winner the same on every machine."""
    fields: dict[str, Any] = to_json(winner)
    for name in _LEFT_OUT:
        del fields[name]
    # As it was before there were such fields.
    if not winner.baseline_kernels:
        del fields["baseline_kernels"]
    penalty = fields.pop("power_penalty")
    if penalty is not None:
        fields["price"] = penalty
    for field in ("regimes", "rivals", "spreads"):
        if not fields[field]:
            del fields[field]
    return fields | _ALWAYS_THERE


def fingerprint(winner: Winner) -> str:
    """A hash of what was measured: winners with equal hashes are one revision."""
    return digest(statement(winner))


def is_intact(winner: Winner) -> bool:
    """Whether a winner that the store gave is what was put into it; takes about 0.1 ms."""
    # Rows from before schema 0005 have no digest and count as intact.
    return not winner.digest or fingerprint(winner) == winner.digest


def signed(winner: Winner, signer: Signer | None) -> Winner:
    """The winner with a signature of its statement and of the pack that was measured.

    Without a signer it stays as it is.
    """
    if signer is None:
        return winner
    kept = canonical(winner)
    made = signer.sign(Purpose.WINNER, _packed(kept, kept.pack))
    return replace(kept, signature=WinnerSignature(key=made.key, value=made.value, pack=kept.pack))


def is_believed(winner: Winner, trusted: Trusted) -> bool:
    """Whether a trusted key signed it; takes about 0.4 ms.

    Raises:
        Untrusted: a trusted key signed another statement: this one was altered.
    """
    signature = winner.signature
    if signature is None or signature.key not in trusted.keys:
        return False
    trusted.check(Purpose.WINNER, _packed(winner, signature.pack), signature)
    return True


def altered(winner: Winner, trusted: Trusted) -> str | None:
    """Why what the store gave is not what was put into it; None where nothing says so."""
    if not is_intact(winner):
        return "it was altered in the database"
    try:
        is_believed(winner, trusted)
    except Untrusted as error:
        return str(error)
    return None


def _packed(winner: Winner, pack: str | None) -> dict[str, Any]:
    return statement(winner) | {"pack": pack}
