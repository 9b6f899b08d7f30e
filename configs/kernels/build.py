"""`make kernels`: the wheel `gemmsmith-kernels-sm90`, of compiled and signed packs.

It holds the kernels of the shipped winners, and the base (`gemmsmith compile --base`): hours of two
cores, five minutes of sixteen. What is compiled is kept, in `.kernels/`, so that it may be stopped
and started again. It is signed with the key of this installation (`GEMMSMITH_SIGNING_KEY`), whose
public half lies beside the wheel: of a release its key, which comes with gemmsmith.
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
    """Compile, sign and pack; the exit status."""
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__)
    parser.add_argument("--limit", type=int, help="at most so many kernels, winners' first")
    parser.add_argument("--workers", type=int, help="compilers at once")
    parser.add_argument("--work", type=Path, default=ROOT / ".kernels", help="what is kept")
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "dist", help="the wheel's folder"
    )
    given = parser.parse_args(arguments)
    work: Path = given.work.resolve()
    settings = Settings.load(
        database=f"sqlite:///{work}/gemmsmith.db",
        packs=work / "packs",
        winners=places.shipped("configs/winners"),
    )
    settings.create_folders()
    with database.open_store(settings) as store:
        chosen = kernels(settings, store)[: given.limit]
        packs = compiled(settings, store, chosen, given.workers)
    if packs is None:
        return 1
    given.output.mkdir(parents=True, exist_ok=True)
    key = identity.signer(settings).public
    (given.output / f"gemmsmith-{key.id}{SUFFIX}").write_text(f"{key.line}\n")
    made = wheel(packs, given.output.resolve())
    size = made.stat().st_size / 1e6
    print(f"{made}: {len(chosen)} kernels in {len(packs)} packs, {size:.1f} MB, key {key.id}")
    return 0


def kernels(settings: Settings, store: Store) -> list[AnyKernel]:
    """The winners' kernels, of every device model of the architecture, and then the base's."""
    model = next(each for each in store.devices() if each.slug == settings.default_model)
    winners = [each for each in store.winners() if each.device.arch == ARCH]
    won = (each.candidate.kernel for each in winners if each.candidate is not None)
    mine = [each for each in winners if each.device.slug == model.slug]
    found = {kernel.name: kernel for kernel in (*won, *base_kernels(model, winners=mine))}
    return [kernel for kernel in found.values() if compiles(kernel)]


def compiled(
    settings: Settings, store: Store, chosen: Sequence[AnyKernel], workers: int | None
) -> list[Pack] | None:
    """The packs that hold the kernels, each once, by hash; None where one does not compile."""
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
    return None if failed else [packs[each] for each in sorted(packs)]


def wheel(packs: Sequence[Pack], output: Path) -> Path:
    """The wheel with these packs and their manifests, as pip builds it."""
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
        made = source / "made"
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index")
        subprocess.run([*pip, "--no-build-isolation", "-w", made, source], check=True)
        (found,) = made.iterdir()
        return Path(shutil.move(found, output / found.name))


if __name__ == "__main__":
    raise SystemExit(main())
