"""Fixtures that several integration tests share."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from service import identity
from tests.support import compiled
from tests.support.kernels_files import build
from tests.support.machines import MEMBERS, Machine, machine
from tests.support.replacing import replace
from tests.support.serving import promote, running, winner


@pytest.fixture(scope="session")
def compiled_packs(request: pytest.FixtureRequest) -> compiled.CompiledPacks:
    """Real kernels, those that the chosen tests want: two minutes on two cores, if all are new.

    Of processes that run tests in parallel one compiles, and the others wait for it.
    """
    long = any(item.get_closest_marker("long") for item in request.session.items)
    root = compiled.kept()
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compiled.build(root, compiled.KERNELS if long else compiled.QUICK)


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    """The machine that the service runs on."""
    return machine(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path, there: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine of the command; its winners are MEMBERS 0 … 3, and nothing is compiled.

    It believes the other one.
    """
    made = machine(tmp_path / "here")
    made.settings.trusted.mkdir()
    there_key = identity.signer(there.settings).public
    (made.settings.trusted / "there.pub").write_text(there_key.line)
    for name, value in made.settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: made.toolchain)
    monkeypatch.setattr("gemmsmith.http.retry.RetryPolicy.delay", lambda *_: None)
    for i, member in enumerate(MEMBERS[:4]):
        problem = Problem(m=64 << i, n=64, k=64)
        candidate = Candidate(kernel=member, launch=Launch())
        promote(made.settings, replace(winner(problem), candidate=candidate))
    return made


@pytest.fixture
def url(there: Machine) -> Iterator[str]:
    with running(there.settings) as http:
        yield str(http.base_url)


@pytest.fixture
def file(there: Machine) -> Path:
    """A file of two packs, with the kernels of all winners of `here`."""
    return build(there, there.publish(0, 1), there.publish(2, 3))
