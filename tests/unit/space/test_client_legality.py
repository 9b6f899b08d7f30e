"""The client's own judgement of neighbours against the tuner's: never more generous."""

from __future__ import annotations

import random
from collections import Counter

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.core.legality import launch_refusal, refusal
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import MAX_EXTENT, DType, Layout, Problem
from tests.support.replacing import replace
from tests.support.serving import H200
from tests.support.types import FLOATS
from tuner import backends
from tuner.backends import launches

EXTENTS = (1, 2, 3, 7, 8, 12, 16, 24, 48, 63, 64, 65, 100, 128, 250, 257, 512, 1000, 1024, 1536)
EXTENTS += (3584, 4096, 4100, 5120, 50257, 2**20, 2**22, MAX_EXTENT)
KINDS = [
    (dtype, layout)
    for dtype in FLOATS
    for layout in Layout
    if not Operation.of(dtype).is_narrow_float
]
KINDS += [(dtype, Layout.TN) for dtype in FLOATS if Operation.of(dtype).is_narrow_float]


def legal(config: Config, problem: Problem) -> bool:
    return (
        backends.refusal(config.kernel, problem) is None
        and launch_refusal(config.kernel, config.launch, problem) is None
    )


def configs(dice: random.Random, dtype: DType, layout: Layout) -> list[Config]:
    """Kernels of every family with launches that were found for some problem."""
    found: dict[str, Config] = {}
    for m, n, k in ((4096, 4096, 4096), (64, 7168, 7168), (64, 64, 8192), (4096, 4098, 4100)):
        for n_odd in (0, 1):
            problem = Problem(m=m, n=n + n_odd, k=k + n_odd, dtype=dtype, layout=layout)
            for kernel in backends.offered(problem, H200):
                for launch in launches(kernel, problem, H200):
                    config = Config(kernel=kernel, launch=launch)
                    found[f"{kernel.name}@{launch.key}"] = config
    splitting = [c for c in found.values() if c.launch.splits > 1]
    return dice.sample(list(found.values()), 60) + dice.sample(splitting, min(20, len(splitting)))


def test_the_client_never_takes_what_the_tuner_refuses() -> None:
    dice = random.Random(20261121)
    seen: Counter[tuple[bool, bool]] = Counter()
    schedulers = set()
    for dtype, layout in KINDS:
        for config in configs(dice, dtype, layout):
            schedulers.add(config.kernel.scheduler)
            for _ in range(40):
                m, n, k = (dice.choice(EXTENTS) for _ in "mnk")
                batch = dice.choice((1, 1, 1, 2, 7, 65535, 65536))
                problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
                taken, right = refusal(config, problem) is None, legal(config, problem)
                assert right or not taken, (config, problem)
                seen[taken, right] += 1
    assert schedulers == set(TileScheduler) - {TileScheduler.GROUPS}
    assert seen[True, True] > 2000
    assert seen[False, False] > 2000


def test_on_ordinary_sizes_it_takes_what_the_tuner_takes() -> None:
    dice = random.Random(20261121)
    for dtype, layout in KINDS:
        for config in configs(dice, dtype, layout):
            for _ in range(40):
                m, n, k = (dice.choice(EXTENTS[:-3]) for _ in "mnk")
                batch = dice.choice((1, 1, 4))
                problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
                assert (refusal(config, problem) is None) == legal(config, problem), problem


def test_other_types_and_layouts_are_refused() -> None:
    problem = Problem(m=64, n=64, k=64)
    config = Config(
        kernel=backends.kernels(problem)[0],
        launch=launches(backends.kernels(problem)[0], problem, H200)[0],
    )
    assert refusal(config, problem) is None
    assert "built for" in str(refusal(config, replace(problem, dtype=DType.FP16)))
    assert "built for" in str(refusal(config, replace(problem, layout=Layout.NN)))
