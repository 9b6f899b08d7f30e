"""Winners that are algorithms of another cuBLASLt than this machine's count nowhere as usable."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.launch import Algorithm, Launch
from gemmsmith.core.problem import Problem
from gemmsmith.runtime import cublaslt
from service.settings import Settings
from tests.support.commands import run, use
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner.backends.cublaslt.algorithms import kernel_of

HERE, OTHER = 130101, 130100
PLAIN = Problem(m=4096, n=4096, k=4096)
MINE, OTHERS = (Problem(m=m, n=4096, k=4096) for m in (256, 512))
WHEEL = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that comes before all others."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    cublaslt.installed.cache_clear()
    yield folder
    cublaslt.installed.cache_clear()


def install(packages: Path, version: str, name: str = "nvidia-cublas") -> None:
    information = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(WHEEL.format(name=name, version=version))
    cublaslt.installed.cache_clear()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    settings = use(new_settings(tmp_path), monkeypatch)
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    kernel = kernel_of(PLAIN.operation, "sm90")
    assert kernel is not None
    algorithms = [
        replace(
            winner(problem, use=Use.CUBLASLT),
            candidate=Candidate(
                kernel=kernel, launch=Launch(algorithm=Algorithm(library=library, code="0a" * 64))
            ),
        )
        for problem, library in ((MINE, HERE), (OTHERS, OTHER))
    ]
    promote(settings, winner(PLAIN), *algorithms)
    return settings


@pytest.mark.parametrize(
    ("release", "number"),
    [("13.1.1.3", 130101), ("13.1.0.3", 130100), ("12.9.1.4", 120901), ("13.10", 131000)],
)
def test_a_release_is_the_number_that_the_library_says(release: str, number: int) -> None:
    assert cublaslt.number(release) == number
    assert release.startswith(cublaslt.text(number)[: len(release)])


def test_the_wheel_for_cuda_13_goes_before_that_for_cuda_12(packages: Path) -> None:
    install(packages, "12.9.1.4", "nvidia-cublas-cu12")
    install(packages, "13.1.1.3")
    assert cublaslt.installed() == HERE


def checked() -> str:
    """The line of `gemmsmith doctor` about the database, and the line after it."""
    lines = run("doctor").stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if " database " in line)
    return "\n".join(lines[place : place + 2])


def shown(settings: Settings) -> str:
    with running(settings) as service:
        page = service.get("/ui", headers={"accept": "text/html"})
    return re.sub(r"\s+", " ", html.unescape(page.text))


def looked_up(problem: Problem) -> str:
    return run("best", problem.m, problem.n, problem.k, "--device", H200.slug).stdout


def test_it_is_said_wherever_winners_are_counted(settings: Settings, packages: Path) -> None:
    install(packages, "13.1.1.3")
    why = "torch loads cuBLASLt 13.1.1, not 13.1.0 (1)"
    said = checked()
    assert said.startswith("warning")
    assert f"3 winners, 2 of 3 usable here: {why}" in said
    assert "tune these problems again" in said
    assert f"2 of 3 winners are usable on this machine: {why}." in shown(settings)
    text = looked_up(OTHERS)
    assert "  not here   an algorithm of cuBLASLt 13.1.0; torch loads 13.1.1" in text
    assert "tuned again: gemmsmith tune 512 4096 4096" in text
    for problem in (MINE, PLAIN):
        assert "not here" not in looked_up(problem)


def test_nothing_is_said_if_all_can_run(settings: Settings, packages: Path) -> None:
    install(packages, "13.1.0.3")
    said = checked()
    assert "2 of 3 usable here: torch loads cuBLASLt 13.1.0, not 13.1.1 (1)" in said
    assert "not here" not in looked_up(OTHERS)


def test_nothing_is_said_if_the_version_is_not_known(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "installed", lambda: None)
    said = checked()
    assert said.startswith("ok")
    assert "3 winners" in said
    assert "usable" not in said
    assert "usable on this machine" not in shown(settings)
    assert "not here" not in looked_up(OTHERS)
