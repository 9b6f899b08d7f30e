"""`gemmsmith doctor --deep`: whether what is stored is what was put there. Changes nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gemmsmith.errors import Untrusted
from gemmsmith.signing import Trusted
from service import identity

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.store import Store

_PACK = re.compile(r"[0-9a-f]{64}")


def wrong(settings: Settings) -> list[str]:
    """Everything that is not as it should be, a line each: winners, kernels, packs.

    Raises:
        SettingsError: who is believed cannot be read.
        StoreError: the database cannot be used.
    """
    from tuner.store import Store, current

    trusted = identity.trusted(settings)
    if current(settings.database) is None:  # nothing is stored yet
        return [*_packs(settings.packs, trusted)]
    with Store.open(settings.database) as store:
        found = [*_winners(store, trusted), *_kernels(store)]
    return [*found, *_packs(settings.packs, trusted)]


def _winners(store: Store, trusted: Trusted) -> Iterator[str]:
    from tuner.store.statement import altered

    for page in store.every_revision():
        for winner in page:
            if reason := altered(winner, trusted):
                where = f"{winner.problem} on {winner.device.slug}, revision {winner.revision}"
                yield f"winner {where}: {reason}"


def _kernels(store: Store) -> Iterator[str]:
    from tuner.claims import kernel_reason

    for name, kernel in store.dictionary.described():
        if kernel is None or kernel.name != name:
            yield f"kernel {name}: its description is another's, or cannot be read"
        elif reason := kernel_reason(kernel):
            yield f"kernel {reason}"


def _packs(folder: Path, trusted: Trusted) -> Iterator[str]:
    from tuner.compile.manifest import Manifest

    for path in sorted(folder.glob("*.so")):
        if not _PACK.fullmatch(path.stem):
            continue
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != path.stem:
            yield f"pack {path}: its bytes have the SHA-256 {actual}"
            continue
        try:
            manifest = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Manifest)
            manifest.check(path.stem, trusted)
        except (OSError, msgspec.MsgspecError) as error:
            yield f"pack {path}: its manifest cannot be read: {error}"
        except Untrusted as error:
            yield f"pack {path}: {error}"
