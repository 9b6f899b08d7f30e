"""Where the tests of training run: a GPU with CUTLASS kernels, or the host with stand-ins.

Every problem that a kernel of the ground takes has a winner, whichever is fastest: these tests are
about what is computed, not about how long it takes. Of several kernels the problem's own hash picks
one, so that all of them get their turn and every process picks alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch

import gemmsmith
from gemmsmith import Snapshot, Use
from gemmsmith.answers.snapshot import Choice, Row
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.ops.engine.in_use import current, install
from tests.gpu import selection
from tests.gpu.support.building import build
from tests.gpu.support.counting import launches
from tests.support.processes import serving
from tests.support.replacing import replace
from tests.support.serving import new_settings, own_signer, promote, winner
from tuner.backends import Level, kernels, refusal
from tuner.compile import ArtifactStore

SAVING_US = 1000.0
"""More than adding a bias costs, so that layers with one run kernels too."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What differs between the places.

    Attributes:
        device: of all tensors.
        model: whose winners they are.
        types: element types with kernels.
        sizes: M, N and K that kernels take in every order.
        largest: extent of random problems.
        kernels: those that take a problem.
        store: their packs.
        compilers: arguments of `torch.compile`.
    """

    device: torch.device
    model: DeviceModel
    types: tuple[DType, ...]
    sizes: tuple[int, int, int]
    largest: int
    kernels: Callable[[Problem], Sequence[Kernel]]
    store: ArtifactStore
    compilers: tuple[dict[str, str], ...]

    @classmethod
    def of(
        cls,
        model: DeviceModel,
        chosen: Sequence[Kernel],
        types: tuple[DType, ...] = (DType.BF16,),
        sizes: tuple[int, int, int] = (528, 784, 1056),
        compilers: tuple[dict[str, str], ...] = ({}, {"mode": "reduce-overhead"}),
    ) -> Ground:
        """The GPU with these kernels, which are built."""
        return cls(
            device=torch.device("cuda:0"),
            model=model,
            types=types,
            sizes=sizes,
            largest=4096,
            kernels=lambda problem: [k for k in chosen if refusal(k, problem) is None],
            store=build(chosen)[0],
            compilers=compilers,
        )

    def config(self, problem: Problem) -> Config | None:
        """The winner; None where no kernel takes the problem."""
        found = self.kernels(problem)
        if not found:
            return None
        kernel = found[zlib.crc32(str(problem).encode()) % len(found)]
        pack = self.store.find(kernel)
        assert pack is not None, f"{kernel.name} is in no pack of {self.store.root}"
        return Config(kernel=kernel, launch=selection.plain_launch(kernel, problem), pack=pack.hash)

    def snapshot(self, problems: Iterable[Problem]) -> Snapshot:
        """Winners of these problems and no others."""
        rows = []
        for problem in problems:
            config = self.config(problem)
            assert config is not None, f"no kernel takes {problem}"
            rows.append(
                Row(
                    problem=problem,
                    use=Use.CUTLASS,
                    config=config,
                    deterministic=_fixed_order(config),
                    saving_us=SAVING_US,
                )
            )
        return Snapshot.of(self.model.slug, rows, own_signer())

    @contextmanager
    def serving(
        self, folder: Path, problems: Iterable[Problem]
    ) -> Iterator[tuple[Popen[str], str]]:
        """A service with winners of these problems, in a process of its own; its URL."""
        settings = new_settings(folder)
        for row in self.snapshot(problems).rows:
            assert row.config is not None
            candidate = Candidate(kernel=row.config.kernel, launch=row.config.launch)
            # A tenth less than cuBLAS takes.
            found = winner(row.problem, device=self.model, us=10 * SAVING_US)
            promote(settings, replace(found, candidate=candidate, pack=row.config.pack))
        environment = {
            "GEMMSMITH_DATABASE": settings.database,
            "GEMMSMITH_PACKS": str(self.store.root),
        }
        with serving(folder, **environment) as (process, banner):
            url = next(word for word in banner.split() if word.startswith("http://"))
            yield process, url.rstrip(".,")


class Everything:
    """A lookup with a winner for all that kernels take. Remembers what it was asked."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.asked: list[Problem] = []

    def lookup(
        self, dtype: DType, layout: Layout, m: int, n: int, k: int, batch: int = 1
    ) -> Choice | None:
        problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
        self.asked.append(problem)
        config = self._ground.config(problem)
        if config is None:
            return None
        return Choice(
            config=config,
            measured=problem,
            distance=0.0,
            deterministic=_fixed_order(config),
            saving_us=SAVING_US,
        )


class Files:
    """The packs of a store, where they lie."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    def path(self, pack_hash: str) -> Path:
        pack = self._store.get(pack_hash)
        assert pack is not None, pack_hash
        return pack.path


@contextmanager
def tuned(ground: Ground, source: Any = None, **options: Any) -> Iterator[Callable[[], int]]:
    """`gemmsmith.use(source)`, by default with a winner for everything; then as before.

    Gives a function: how many kernels were launched from Python since it was last called.
    """
    if source is None:
        source = (Everything(ground), Files(ground.store))
    before = current()
    with launches() as found:

        def since() -> int:
            count = len(found)
            found.clear()
            return count

        try:
            gemmsmith.use(source, **options)
            yield since
        finally:
            install(before)
            torch._dynamo.reset()


def first_kernels(problems: Iterable[Problem], count: int = 3) -> list[Kernel]:
    """The first kernels of each problem's space."""
    return [each for problem in problems for each in kernels(problem, level=Level.CORE)[:count]]


def gpu_kernels(failures: Iterable[str]) -> Callable[[Problem], Sequence[Kernel]]:
    """Those of tests/gpu that take a problem, without those that do not compile."""
    broken = frozenset(failures)

    def legal(problem: Problem) -> Sequence[Kernel]:
        if problem.operation.is_fused:  # theirs are built by their own tests
            return []
        return [kernel for kernel in selection.legal(problem, 3) if kernel.name not in broken]

    return legal


@cache  # a look at the folder each
def _pack(store: ArtifactStore, kernel: Kernel) -> str:
    pack = store.find(kernel)
    assert pack is not None, f"{kernel.name} is in no pack of {store.root}"
    return pack.hash


def _fixed_order(config: Config) -> bool:
    return Candidate(kernel=config.kernel, launch=config.launch).has_fixed_order
