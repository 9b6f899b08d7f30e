"""`gemmsmith capture`: the script runs as it would without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuner.suites import load

SCRIPT = """
import sys, torch, helper
if __name__ == "__main__":
    print(sys.argv)
    torch.ones(4, 16, dtype=torch.bfloat16) @ torch.ones(16, 8, dtype=torch.bfloat16)
    {end}
"""


def capture(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.cli", "capture", "-o", "s.toml", *arguments]
    root = Path(__file__).parents[3]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(root)}
    )


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("pass", 0, ""),
        pytest.param("sys.exit(7)", 7, "", marks=pytest.mark.long),
        pytest.param("sys.exit('no data')", 1, "no data", marks=pytest.mark.long),
        pytest.param("raise ValueError('broken')", 1, "ValueError: broken", marks=pytest.mark.long),
    ],
)
def test_status_arguments_and_suite(tmp_path: Path, end: str, status: int, says: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("")
    (tmp_path / "code" / "train.py").write_text(SCRIPT.format(end=end))
    done = capture(tmp_path, "--", "python", "code/train.py", "--steps", "1", "-o", "x")
    assert done.returncode == status, done.stderr
    assert done.stdout.strip() == "['code/train.py', '--steps', '1', '-o', 'x']"
    assert says in done.stderr
    (entry,) = load(tmp_path / "s.toml").entries
    assert (entry.m, entry.n, entry.k, entry.layout) == (4, 8, 16, "tt")


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "train.py").write_text(SCRIPT.format(end="pass"))
    done = capture(tmp_path, "--", "python3", "-m", "train", "a")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "s.toml").entries


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("python",), "must be `python SCRIPT …`"),
        (("python", "-O", "x.py"), "without other options of Python"),
        (("nothing.py",), "no script nothing.py"),
    ],
)
def test_wrong_commands(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = capture(tmp_path, "--", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
