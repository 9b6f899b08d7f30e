"""A user's program under `mypy --strict`, with the library from its wheel and from a checkout.

What it depends on is this interpreter's, as in test_wheels.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support import tree
from tests.support.docs import ROOT

PROGRAM = ROOT / "tests" / "support" / "typed_program.py"
MISTAKES = """
import gemmsmith
gemmsmith.use(5)
gemmsmith.uses("http://127.0.0.1:8000")
gemmsmith.Problem(1, 2, 3, 4)
gemmsmith.Client().best(1, 2, "3")
job = gemmsmith.AsyncClient().tune(1, 2, "3")
job.status
"""
OFFLINE = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy's, kept between the two: most of the time goes into torch."""
    return tmp_path_factory.mktemp("mypy")


def checked(program: Path, python: Path, cache: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}",
         f"--python-executable={python}", program.name],
        cwd=program.parent, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", [(), ("--editable",)])
def test_programs_are_typed(how: tuple[str, ...], tmp_path: Path, cache: Path) -> None:
    environment, source = tmp_path / "environment", tree.copy(tmp_path / "source")
    venv.create(environment, symlinks=True, with_pip=False)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", *OFFLINE)
    subprocess.run([*pip, *how, source / "client"], check=True, env={"PATH": "/usr/bin:/bin"})

    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text())
    assert checked(program, python, cache) == (0, "Success: no issues found in 1 source file\n")
    program.write_text(MISTAKES)
    status, told = checked(program, python, cache)
    assert status == 1
    wrong = [line.split(":")[1] for line in told.splitlines() if ": error:" in line]
    assert wrong == ["3", "4", "5", "6", "7", "8"], told
