"""`make kernels`: the wheel `gemmsmith-kernels-sm90`, of compiled and signed packs.

It has the kernels of the shipped winners, and the base (`gemmsmith compile --base`). Compiling
takes hours on two cores, and five minutes on sixteen. Packs are kept in `.kernels/`, so that the
command may be stopped and started again. They are signed with the key of this installation
(`GEMMSMITH_SIGNING_KEY`). Its public key is written beside the wheel; a release's key comes with
gemmsmith.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.signing import SUFFIX
from gemmsmith.version import VERSION
from gemmsmith.winners.installed import NAMESPACE
from service import database, identity
from service.settings import Settings
from service.worker.builder import open_builder
from tuner import places
from tuner.backends import compiles
from tuner.compile import Pack
from tuner.search.base import base_kernels
from tuner.store import Store

ARCH = "sm90"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, sign and build the wheel; return the exit status."""
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__)
    parser.add_argument("--limit", type=int, help="most kernels, those of winners first")
    parser.add_argument("--workers", type=int, help="compilers at once")
    parser.add_argument("--work", type=Path, default=ROOT / ".kernels", help="folder of the packs")
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "dist", help="the wheel's folder"
    )
    options = parser.parse_args(arguments)
    work: Path = options.work.resolve()
    settings = Settings.load(
        database=f"sqlite:///{work}/gemmsmith.db",
        packs=work / "packs",
        winners=places.shipped("configs/winners"),
    )
    settings.create_folders()
    with database.open_store(settings) as store:
        chosen = kernels(settings, store)[: options.limit]
        packs = compiled(settings, store, chosen, options.workers)
    if packs is None:
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    key = identity.signer(settings).public
    (options.output / f"gemmsmith-{key.id}{SUFFIX}").write_text(f"{key.line}\n")
    path = wheel(packs, options.output.resolve())
    size = path.stat().st_size / 1e6
    print(f"{path}: {len(chosen)} kernels in {len(packs)} packs, {size:.1f} MB, key {key.id}")
    return 0


def kernels(settings: Settings, store: Store) -> list[AnyKernel]:
    """Return the winners' kernels of all device models of the architecture, then the base's."""
    model = next(device for device in store.devices() if device.slug == settings.default_model)
    winners = [winner for winner in store.winners() if winner.device.arch == ARCH]
    won = (winner.candidate.kernel for winner in winners if winner.candidate is not None)
    of_model = [winner for winner in winners if winner.device.slug == model.slug]
    by_name = {kernel.name: kernel for kernel in (*won, *base_kernels(model, winners=of_model))}
    return [kernel for kernel in by_name.values() if compiles(kernel)]


def compiled(
    settings: Settings, store: Store, chosen: Sequence[AnyKernel], workers: int | None
) -> list[Pack] | None:
    """Compile the kernels, and return their packs by hash; None if a kernel does not compile."""
    packs: dict[str, Pack] = {}
    failed = 0
    builder = open_builder(settings, store, workers)
    for number, built in enumerate(builder.build(chosen), 1):
        if built.pack is None:
            failed += 1
            print(f"{built.kernel.name}: {built.failure}", file=sys.stderr)
        else:
            packs[built.pack.hash] = built.pack
        print(f"{number} of {len(chosen)}", end="\r", file=sys.stderr, flush=True)
    return None if failed else [packs[pack_hash] for pack_hash in sorted(packs)]


def wheel(packs: Sequence[Pack], output: Path) -> Path:
    """Build the wheel with these packs and their manifests by pip, and return its path."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        inside = source / NAMESPACE / ARCH
        inside.mkdir(parents=True)
        for path in (HERE / "pyproject.toml", HERE / "README.md", ROOT / "client" / "building.py"):
            shutil.copy(path, source)
        (source / "VERSION").write_text(VERSION)
        for pack in packs:
            shutil.copy(pack.path, inside)
            shutil.copy(pack.path.with_suffix(".json"), inside)
        built = source / "built"
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index")
        subprocess.run([*pip, "--no-build-isolation", "-w", built, source], check=True)
        (path,) = built.iterdir()
        return Path(shutil.move(path, output / path.name))


if __name__ == "__main__":
    raise SystemExit(main())
