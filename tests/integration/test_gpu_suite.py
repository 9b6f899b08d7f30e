"""The GPU tests on a machine without one: all of them are found, and skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_gpu_test_can_be_imported() -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " tests collected" in done.stdout
