"""gemmsmith's winners for a device model, and their compiled packs."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from tuner.exchange import read_winners
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parents[2]


def add_packs(parser: argparse.ArgumentParser) -> None:
    """Add `--packs`: the folder of compiled packs, by default the checkout's."""
    default = Path(os.environ.get("GEMMSMITH_PACKS", ROOT / ".state" / "packs"))
    parser.add_argument("--packs", type=Path, default=default)


def find_winners(
    files: Sequence[Path], database: str | None, device: DeviceModel | None
) -> dict[Problem, Winner]:
    """Return winners by problem, of this device model only, or of all models for None.

    Later files replace earlier ones, and the database, which is this machine's own, replaces all.
    """
    winners = [winner for path in files for winner in read_winners(path)]
    if database is not None:
        from tuner.store import Store

        with Store.open(database) as store:
            winners += store.winners(device=None if device is None else device.slug)
    return {
        winner.problem: winner
        for winner in winners
        if device is None or winner.device.slug == device.slug
    }


def find_packs(
    kernels: Sequence[AnyKernel], folder: Path, deadline: float
) -> tuple[dict[str, Path], dict[str, str]]:
    """Return packs by kernel name, from the store or built now, and why others have no pack."""
    from tuner.compile import ArtifactStore, Builder, find_toolchain
    from tuner.errors import TunerError

    store = ArtifactStore(folder)
    packs: dict[str, Path] = {}
    absent = []
    for kernel in kernels:
        pack = store.find(kernel)
        if pack is None:
            absent.append(kernel)
        else:
            packs[kernel.name] = pack.path
    reasons = {kernel.name: "not compiled within the time limit" for kernel in absent}
    if not absent:
        return packs, reasons
    try:
        for built in Builder(store, find_toolchain()).build(absent):
            if built.pack is not None:
                packs[built.kernel.name] = built.pack.path
                del reasons[built.kernel.name]
            elif built.failure is not None:
                reasons[built.kernel.name] = f"does not compile: {built.failure.message}"
            if time.monotonic() > deadline:
                break
    except TunerError as error:
        reasons |= {name: str(error) for name in reasons}
    return packs, reasons
