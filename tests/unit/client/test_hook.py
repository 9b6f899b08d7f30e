"""`gemmsmith.pth`, which does nothing at Python's start until torch is imported."""

from __future__ import annotations

import site
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from tests.support import unchanged

PLAIN = "import sys; print(*(name for name in sys.modules if name.startswith('gemmsmith')))"


def run(folder: Path, value: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code with GEMMSMITH set to a value."""
    environment = unchanged.environment(folder, GEMMSMITH=value)
    return unchanged.run(["python", "-c", code], folder, environment)


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
    ("value", "loaded"),
    [
        ("", ""),
        (
            "auto",
            "gemmsmith.moved gemmsmith gemmsmith.startup gemmsmith.program "
            "gemmsmith.program.variables gemmsmith.startup.hook",
        ),
    ],
)
def test_nothing_is_imported_without_torch(tmp_path: Path, value: str, loaded: str) -> None:
    done = run(tmp_path, value, PLAIN)
    assert (done.stdout.strip(), done.stderr) == (loaded, "")


def test_a_fake_torch_is_imported_as_ever_and_then_begun_with(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("loaded = __spec__.loader\n")
    code = (
        "import gemmsmith.startup.hook as hook, sys\n"
        "def begin(): began.append(hasattr(sys.modules['torch'], 'loaded'))\n"
        "began, hook._begin = [], begin\n"
        "import torch\n"
        "hook.install()\n"  # a second call has no effect
        "assert torch.__spec__.loader is torch.loaded and 'exec_module' not in vars(torch.loaded)\n"
        "assert not any(type(one).__name__ == '_Waiting' for one in sys.meta_path)\n"
        "import importlib; importlib.reload(torch)\n"
        "print(began)"
    )
    done = run(tmp_path, "auto", code)
    assert (done.stdout.strip(), done.stderr) == ("[True]", "")


TORCH = "loaded = __spec__.loader, __loader__\n"

ASKING = {
    "asks where it is": "assert importlib.util.find_spec('torch').origin",
    "asks twice": "[importlib.util.find_spec('torch') for _ in range(2)]",
    "asks what there is": "assert 'torch' in {one.name for one in pkgutil.iter_modules()}",
    "asks its loader": (
        "loader = importlib.util.find_spec('torch').loader\n"
        "assert loader.get_filename('torch') and loader.get_source('torch') == text"
    ),
    "looks in all places": (
        "for finder in sys.meta_path:\n  getattr(finder, 'find_spec', print)('torch', None)"
    ),
    "copies what it was given": "copy.copy(importlib.util.find_spec('torch').loader)",
}
"""Look-ups of torch by programs and libraries before they import it, or without an import."""

IMPORTING = {
    "import": "import torch",
    "by name": "importlib.import_module('torch')",
    "by its spec": (
        "spec = importlib.util.find_spec('torch')\n"
        "module = sys.modules['torch'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)"
    ),
    "lazily": (
        "spec = importlib.util.find_spec('torch')\n"
        "spec.loader = importlib.util.LazyLoader(spec.loader)\n"
        "module = sys.modules['torch'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert began == []\n"
        "module.loaded"
    ),
    "in a thread": (
        "thread = threading.Thread(target=importlib.import_module, args=('torch',))\n"
        "thread.start(); thread.join()"
    ),
    "after a failure": (
        "os.environ['FAILS'] = '1'\n"
        "for _ in range(2):\n"
        "  try:\n    import torch\n"
        "  except OSError: assert began == []\n"
        "del os.environ['FAILS']\n"
        "import torch"
    ),
    "below other finders": (
        "class Wrapped:\n"
        "  def find_spec(self, name, *_):\n"
        "    sys.meta_path.remove(self)\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    sys.meta_path.insert(0, self)\n"
        "    return spec\n"
        "sys.meta_path.insert(0, Wrapped())\n"
        "import torch"
    ),
    "in an archive": (
        "import zipfile\n"
        "zipfile.ZipFile('all.zip', 'w').writestr('torch.py', text)\n"
        "zipfile.ZipFile('all.zip', 'a').writestr('other.py', 'early = list(began)')\n"
        "sys.path.insert(0, 'all.zip')\n"
        "importlib.invalidate_caches()\n"
        "importlib.util.find_spec('torch')\n"
        "import builtins; builtins.began = began; import other; assert other.early == []\n"
        "import torch; assert 'all.zip' in torch.__file__"
    ),
}
"""Ways to import torch after that."""

PROGRAM = """
import copy, importlib, importlib.util, os, pkgutil, sys, threading
import gemmsmith.startup.hook as hook
began, hook._begin = [], lambda: began.append(sys.modules["torch"].loaded)
text = open("torch.py").read()
{asking}
{importing}
torch = sys.modules["torch"]
loader = torch.loaded[0]
assert began == [(loader, loader)], began
assert torch.__spec__.loader is torch.__loader__ is loader and "gemmsmith" not in str(loader)
assert not any(type(one) is hook._Waiting for one in sys.meta_path)
importlib.reload(torch)
hook.install()
print(len(began))
"""


@pytest.mark.parametrize(
    ("asking", "importing"),
    [("", "import"), *((asking, "import") for asking in ASKING)]
    + [("asks where it is", importing) for importing in IMPORTING if importing != "import"],
)
def test_it_begins_once_torch_is_executed(tmp_path: Path, asking: str, importing: str) -> None:
    """All look-ups before the import, and all ways to import torch."""
    (tmp_path / "torch.py").write_text(
        f"import os\nif os.environ.get('FAILS'): raise OSError\n{TORCH}"
    )
    code = PROGRAM.format(asking=ASKING.get(asking, ""), importing=IMPORTING[importing])
    environment = unchanged.environment(tmp_path / "site", GEMMSMITH="auto")
    environment["PYTHONPATH"] += f":{tmp_path}"
    done = unchanged.run(["python", "-c", code], tmp_path, environment)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_a_torch_that_is_only_asked_for_begins_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError")
    code = "import importlib.util as u, sys; u.find_spec('torch'); print('torch' in sys.modules)"
    done = run(tmp_path, "auto", code)
    assert (done.stdout, done.stderr) == ("False\n", "")


LIBRARIES = ("transformers", "accelerate", "pytorch_lightning", "torch")
REAL = """
import gemmsmith.startup.hook as hook, importlib, importlib.util, sys
began, hook._begin = [], lambda: began.append(1)
assert importlib.util.find_spec("torch")
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        importlib.import_module(name)
from transformers import PreTrainedModel
print(began)
"""


@pytest.mark.long
@pytest.mark.parametrize("first", range(len(LIBRARIES)))
def test_libraries_that_ask_for_torch_first(tmp_path: Path, first: int) -> None:
    names = LIBRARIES[first:] + LIBRARIES[:first]
    environment = unchanged.environment(tmp_path, GEMMSMITH="auto")
    done = unchanged.run(["python", "-W", "ignore", "-c", REAL, *names], tmp_path, environment)
    assert done.stdout == "[1]\n", done.stderr


def test_a_missing_file_is_a_single_warning(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    done = run(tmp_path, "winners.gspack", "import torch; print('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert done.stderr == (
        "GEMMSMITH is ignored: it must be a service's URL, a "
        f"bundle's path or auto, and there is no file {tmp_path}/winners.gspack\n"
    )


def test_a_launcher_warns_for_its_child_processes(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = "import torch, subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'])"
    done = run(tmp_path, "winners.gspack", code)
    assert len(done.stderr.splitlines()) == 1


def test_the_error_of_a_broken_torch_is_raised(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('no such library')\n")
    done = run(tmp_path, "auto", "import torch")
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: no such library\n")


def test_the_line_survives_a_removed_library(tmp_path: Path) -> None:
    """After a removal by hand, Python prints an error and starts."""
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
