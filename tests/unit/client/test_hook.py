"""What `gemmsmith.pth` does when Python starts: nothing, until torch is imported as well."""

from __future__ import annotations

import site
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from tests.support import unchanged

PLAIN = "import sys; print(*(name for name in sys.modules if name.startswith('gemmsmith')))"


def test_an_unset_variable_costs_a_fraction_of_a_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GEMMSMITH", raising=False)
    monkeypatch.delenv("GEMMSMITH_CAPTURE", raising=False)
    folder = str(unchanged.PTH.parent)
    seconds = timeit.repeat(
        lambda: site.addpackage(folder, unchanged.PTH.name, set()), number=10, repeat=20
    )
    assert min(seconds) / 10 < 0.001
    assert unchanged.PTH.read_text().count("\n") == 1  # a `.pth` runs single lines only


@pytest.mark.parametrize(
    ("value", "loaded"), [("", ""), ("auto", "gemmsmith gemmsmith.variables gemmsmith.hook")]
)
def test_nothing_is_imported_without_torch(tmp_path: Path, value: str, loaded: str) -> None:
    environment = unchanged.environment(tmp_path, GEMMSMITH=value)
    done = unchanged.run(["python", "-c", PLAIN], tmp_path, environment)
    assert (done.stdout.strip(), done.stderr) == (loaded, "")


def test_a_fake_torch_is_imported_as_ever_and_then_begun_with(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("loaded = __spec__.loader\n")
    code = (
        "import gemmsmith.hook as hook, sys\n"
        "def begin(): began.append(hasattr(sys.modules['torch'], 'loaded'))\n"
        "began, hook._begin = [], begin\n"
        "import torch\n"
        "hook.install()\n"  # once more: nothing
        "assert torch.__spec__.loader is torch.loaded and 'exec_module' not in vars(torch.loaded)\n"
        "assert not any(type(one).__name__ == '_Waiting' for one in sys.meta_path)\n"
        "import importlib; importlib.reload(torch)\n"
        "print(began)"
    )
    environment = unchanged.environment(tmp_path, GEMMSMITH="auto")
    done = unchanged.run(["python", "-c", code], tmp_path, environment)
    assert (done.stdout.strip(), done.stderr) == ("[True]", "")


def test_a_file_that_is_not_there_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    environment = unchanged.environment(tmp_path, GEMMSMITH="winners.gspack")
    done = unchanged.run(["python", "-c", "import torch; print('on')"], tmp_path, environment)
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert done.stderr == (
        "GEMMSMITH is ignored: it must be a service's URL, a "
        f"bundle's path or auto, and there is no file {tmp_path}/winners.gspack\n"
    )


def test_a_launcher_warns_for_what_it_starts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = "import torch, subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'])"
    environment = unchanged.environment(tmp_path, GEMMSMITH="winners.gspack")
    done = unchanged.run(["python", "-c", code], tmp_path, environment)
    assert len(done.stderr.splitlines()) == 1


def test_a_torch_that_cannot_be_imported_raises_what_it_raises(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('no such library')\n")
    done = unchanged.run(
        ["python", "-c", "import torch"],
        tmp_path,
        unchanged.environment(tmp_path, GEMMSMITH="auto"),
    )
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: no such library\n")


def test_the_line_survives_a_library_that_is_gone(tmp_path: Path) -> None:
    """As after a removal by hand: Python says so, and starts."""
    (tmp_path / unchanged.PTH.name).write_text(unchanged.PTH.read_text())
    code = (
        "import site, sys; sys.modules['gemmsmith'] = None;"
        f"site.addpackage({str(tmp_path)!r}, {unchanged.PTH.name!r}, set()); print('on')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env={"GEMMSMITH": "auto"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "on\n")
