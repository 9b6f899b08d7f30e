"""A fleet on a real Ray cluster and a real PostgreSQL, whose parts are killed while it works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from gemmsmith.core.problem import Problem
from tests.support import fake_nvcc, postgresql
from tests.support.cluster import LocalCluster
from tests.support.ledger import verify
from tests.support.processes import until
from tests.support.recordings import record
from tests.support.replacing import replace
from tests.support.serving import H200
from tuner.jobs import Queue
from tuner.store import Store, upgrade

JOBS = 60
PATIENCE_S = 180.0
"""Ample: seven processes import their libraries, on cores that may be busy."""
MODELS = [replace(H200, name=f"NVIDIA {name}") for name in ("H200", "H300", "H400")]
GPUS = {f"replay:{model.slug}": 1 for model in MODELS}

pytestmark = [pytest.mark.long, pytest.mark.postgresql]


@pytest.fixture
def server() -> Iterator[postgresql.Server]:
    binaries = postgresql.programs()
    if binaries is None:
        pytest.skip("PostgreSQL's server programs are missing: apt-get install postgresql")
    with postgresql.server(binaries) as found:
        yield found


def problems(count: int) -> list[Problem]:
    return [Problem(m=64 * (1 + i), n=1024, k=512) for i in range(count)]


def environment(folder: Path, url: str) -> dict[str, str]:
    """Recorded GPUs of three models that want packs, and what makes them."""
    fake_nvcc.toolchain(folder / "nvcc", each_s=0.1)
    wanted = problems(JOBS // len(MODELS))
    (folder / "sweeps").mkdir()
    for model in MODELS:
        record(folder / "sweeps", *wanted, name=model.slug, device=model)
    return {
        "GEMMSMITH_DATABASE": url,
        "GEMMSMITH_PACKS": str(folder / "packs"),
        "GEMMSMITH_SWEEPS": str(folder / "sweeps"),
        "GEMMSMITH_TEST_NVCC": str(folder / "nvcc"),
        "GEMMSMITH_TEST_PAUSE_S": "0.02",
        "GEMMSMITH_TEST_TTL_S": "3",
    }


def order(url: str) -> list[str]:
    with Store.open(url) as store:
        queue = Queue(store)
        return [
            queue.enqueue(problem, device=model.slug)[0].id
            for problem in problems(JOBS // len(MODELS))
            for model in MODELS
        ]


def test_nothing_is_lost_whatever_is_killed(
    server: postgresql.Server, tmp_path: Path, random: Random
) -> None:
    postgresql.administer(server.url, "CREATE DATABASE fleet")
    url = f"{server.url}/fleet"
    upgrade(url)
    jobs = order(url)

    def done() -> int:
        return sum(count for state, count in queue.counts().items() if state.terminal)

    def faults(cluster: LocalCluster) -> set[int]:
        victims = cluster.gpus()
        random.choice(victims).kill()
        server.restart()
        cluster.lose(random.randrange(2))
        cluster.join(cores=1, gpus=GPUS)
        kept = {process.pid for process in cluster.gpus()}
        cluster.kill_driver()
        return kept

    with Store.open(url) as store, LocalCluster(tmp_path, environment(tmp_path, url)) as cluster:
        queue = Queue(store)
        for _ in range(2):
            cluster.join(cores=1, gpus=GPUS)
        cluster.drive()
        until(lambda: done() >= JOBS // 6, "no job is done", PATIENCE_S)
        kept = faults(cluster)
        until(lambda: done() == JOBS, "not all jobs are done", PATIENCE_S)
        # The next driver has found the workers of the one that was killed, and ends them too.
        assert kept & {process.pid for process in cluster.gpus()}
        assert cluster.end_driver() == 0
        until(lambda: not cluster.gpus(), "workers are left behind")
    ended = verify(url, jobs)
    assert ended["done"] >= JOBS - 2, ended  # a kill costs an attempt, and there are 3
    assert ended.total() == JOBS
