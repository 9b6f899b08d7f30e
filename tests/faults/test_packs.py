"""Packs that are damaged on disk: never served, never used, built again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from gemmsmith import Client
from gemmsmith.errors import ServiceError
from tests.support.fleet import Fleet
from tests.support.ledger import verify
from tests.support.orders import accepted, distinct_orders, lookup
from tests.support.processes import until
from tests.support.records import imported
from tests.support.shipped import recorded_problems, shipped_winners
from tuner.store import Store
from tuner.trial import Phase


def flip(path: Path) -> None:
    """One bit; the file's size and time stay, as when a disk spoils it."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_manifest(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


HARMS: tuple[Callable[[Path], None], ...] = (flip, truncate, Path.unlink, lose_manifest)


def test_what_is_served_has_its_hash_or_is_not_served(
    store: Store, store_url: str, tmp_path: Path
) -> None:
    imported(store, shipped_winners()[0])
    problem = recorded_problems()[0]
    order = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
    with Fleet(store_url, tmp_path, GEMMSMITH_TEST_NVCC=str(tmp_path / "nvcc")) as fleet:
        fleet.serve(worker=True)
        fleet.wait_until_up()
        jobs = [accepted(fleet.client, order, "first")]
        fleet.wait_until_idle()
        with Client(fleet.url, cache_dir=None) as client:
            for turn, harm in enumerate(HARMS):
                pack = fleet.client.get(lookup(problem)).json()["config"]["pack"]
                assert sha256(client.pack(pack)) == pack
                harm(fleet.packs / f"{pack}.so")
                assert fleet.client.get(f"/packs/{pack}").status_code == 404, harm
                with pytest.raises(ServiceError, match=pack):
                    client.pack_bytes(pack)
                jobs.append(accepted(fleet.client, order, f"after-{turn}"))
                fleet.wait_until_idle()
            pack = fleet.client.get(lookup(problem)).json()["config"]["pack"]
            assert sha256(client.pack(pack)) == pack
        fleet.kill(fleet.processes())
    assert verify(store_url, jobs) == {"done": len(jobs)}


@pytest.mark.long
def test_what_comes_to_harm_between_compiler_and_use_is_built_again(
    store: Store, store_url: str, tmp_path: Path, random: Random
) -> None:
    imported(store, shipped_winners()[0])
    environ = {"GEMMSMITH_TEST_NVCC": str(tmp_path / "nvcc"), "GEMMSMITH_TEST_PAUSE_S": "0.1"}
    jobs = []
    with Fleet(store_url, tmp_path, **environ) as fleet:
        fleet.serve(worker=True)
        fleet.wait_until_up()
        for number, order in enumerate(distinct_orders(2, random)):
            job = accepted(fleet.client, order, str(number))
            until(lambda job=job: bool(store.trials(job=job)), "nothing is measured")  # type: ignore[misc]
            for path in sorted(fleet.packs.glob("*.so")):
                with suppress(FileNotFoundError):  # the worker has found it out already
                    random.choice(HARMS)(path)
            fleet.wait_until_idle()
            winners = [winner for winner in store.winners() if winner.job == job and winner.pack]
            for winner in winners:
                assert sha256(fleet.packs / f"{winner.pack}.so") == winner.pack
            jobs.append(job)
        fleet.kill(fleet.processes())
    assert verify(store_url, jobs) == {"done": len(jobs)}
    blamed = [
        stored.trial.failure.message
        for job in jobs
        for stored in store.trials(job=job, phase=Phase.SCREEN)
        if stored.trial.failure is not None
    ]
    assert "the pack is not whole" not in blamed
