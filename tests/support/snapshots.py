"""Invented snapshots, for tests that need no service."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.config import Config, Use
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signer, trusted_folder
from tests.support.candidates import KERNEL
from tests.support.replacing import replace

H200 = "nvidia-h200-132sm"
CONTENT = b"\x7fELF the bytes of a pack"
PACK = hashlib.sha256(CONTENT).hexdigest()
CONFIG = Config(kernel=KERNEL, launch=Launch(), pack=PACK)
BIG = Problem(m=4096, n=4096, k=4096)


def row(problem: Problem, **fields: object) -> Row:
    made = Row(problem=problem, use=Use.CUTLASS, config=CONFIG, deterministic=True)
    return replace(made, **fields)


def document(*rows: dict[str, Any]) -> bytes:
    """A snapshot with any rows, in the format of a service."""
    winners = msgspec.json.encode(rows)
    revision = hashlib.sha256(H200.encode() + b"\n" + winners).hexdigest()[:32]
    return msgspec.json.encode(
        {"format": 1, "device": H200, "revision": revision, "winners": msgspec.Raw(winners)}
    )


def snapshot(*rows: Row, signer: Signer | None = None) -> Snapshot:
    return Snapshot.of(H200, rows, signer)


def trusted_signer(folder: Path, *, name: str = "signer") -> Signer:
    """A new key that this process trusts. Remove its file `<name>.pub` to revoke it."""
    made = Signer.create(folder / f"{name}.key")
    trusted_folder().mkdir(parents=True, exist_ok=True)
    (trusted_folder() / f"{name}.pub").write_text(made.public.line)
    return made
