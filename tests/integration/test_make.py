"""Commands of the Makefile that are typed at once in a fresh clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.docs import ROOT

# Stands for Python and for pip: writes when a command begins and ends.
_SLOW = """#!/bin/sh
echo "begin $*" >> calls
sleep 0.3
mkdir -p .venv/bin
touch .venv/bin/python && chmod +x .venv/bin/python
echo end >> calls
"""


def test_run_and_test_install_one_after_the_other(tmp_path: Path) -> None:
    for folder in ("requirements", "client/gemmsmith/ops/below"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "client/pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "client/gemmsmith/ops/below/dispatch.cpp").touch()
    slow = tmp_path / "slow"
    slow.write_text(_SLOW)
    slow.chmod(0o755)
    command = ["make", f"PYTHON={slow}", f"PIP={slow}"]
    both = [
        subprocess.Popen([*command, target], cwd=tmp_path)
        for target in (".venv/.run", ".venv/.test")
    ]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    calls = (tmp_path / "calls").read_text().split("\n")[:-1]
    assert [line.split()[0] for line in calls] == ["begin", "end"] * (len(calls) // 2)
    assert sum("-m venv" in line for line in calls) == 1
