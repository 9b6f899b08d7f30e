"""Every line that installs something works in an empty environment, and takes ours from files.

Our names are on no package index, where strangers could register them. So pip finds none here:
what we need from other projects is a folder of empty wheels, by the versions that we ask for.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import tree
from tests.support.docs import ROOT
from tests.support.present import present
from tuner import extras, places

OURS = ("gemmsmith", "gemmsmith-service")
_LINE = re.compile(r"pip install ([^`#\n]+)")
_NAME = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?([^;]*)")
_BY_NAME = re.compile(r"pip install (?:[^`\n#]*[ '\"])?gemmsmith(?:-[a-z0-9-]+)?(?=[\s'\"`\[]|$)")


def lines() -> dict[str, str]:
    """The arguments of every documented `pip install`, and where the first such line stands."""
    found: dict[str, str] = {}
    for name in tree.files():
        if name.endswith(".md") or name.startswith("examples/"):
            for line in _LINE.finditer((ROOT / name).read_text(encoding="utf-8")):
                found.setdefault(line[1].strip(), name)
    found[extras.pip_install("fleet").removeprefix("pip install ")] = "advice"
    return found


LINES = lines()
LOCKED = [line for line in LINES if "requirements/" in line]


def requirements() -> Iterator[str]:
    for name in OURS:
        yield from importlib.metadata.requires(name) or ()
    # What examples take, and nothing of ours asks for.
    yield "transformers==5.17"
    yield "triton>=3.5"


def wheel(folder: Path, name: str, version: str, metadata: str = "") -> None:
    """A wheel without contents."""
    stem = f"{name.replace('-', '_')}-{version}"
    written = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{stem}.dist-info/METADATA", written)
        file.writestr(f"{stem}.dist-info/WHEEL", kind)
        file.writestr(f"{stem}.dist-info/RECORD", "")


@dataclass(frozen=True, kw_only=True)
class Empty:
    """A checkout, and an environment with setuptools and nothing else, in which pip changes
    nothing.
    """

    checkout: Path
    variables: dict[str, str]

    def run(self, command: str, **variables: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.checkout,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def installs(self, line: str) -> dict[str, str]:
        """What `pip install` would install, each with where it comes from."""
        report = self.checkout.parent / "report.json"
        self.run(f"pip install {line}", PIP_DRY_RUN="1", PIP_REPORT=str(report))
        return {
            one["metadata"]["name"]: one["download_info"]["url"]
            for one in json.loads(report.read_text())["install"]
        }


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Empty:
    folder = tmp_path_factory.mktemp("install")
    environment = folder / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for part in Path(sysconfig.get_path("purelib")).glob("*"):
        if re.match(r"(setuptools\b|_distutils_hack|distutils-precedence)", part.name):
            (packages / part.name).symlink_to(part)
    command = environment / "bin" / "pip"
    # What `pip --python` starts. To import pip would take distutils from setuptools.
    runner = importlib.metadata.distribution("pip").locate_file("pip/__pip-runner__.py")
    command.write_text(f'#!/bin/sh\nexec {environment}/bin/python {runner} "$@"\n')
    command.chmod(0o755)
    index = folder / "index"
    index.mkdir()
    for requirement in requirements():
        named = present(_NAME.match(requirement))
        if named[1] not in OURS:
            version = re.search(r"[>=]=([0-9.]+)", named[2])
            wheel(index, named[1], version[1] if version else "1.0")
    checkout = tree.copy(folder / "checkout")
    (checkout / ".venv").symlink_to(environment)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    return Empty(
        checkout=checkout,
        variables=kept
        | {
            "PATH": f"{environment}/bin:{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_FIND_LINKS": str(index),
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_NO_INDEX": "1",
        },
    )


@pytest.fixture(scope="module")
def wheels(empty: Empty) -> None:
    """Wheels of ours as `pip wheel` names them, with their metadata alone."""
    (empty.checkout / "wheels").mkdir(exist_ok=True)
    for name in OURS:
        distribution = importlib.metadata.distribution(name)
        text = present(distribution.read_text("METADATA"))
        wheel(empty.checkout / "wheels", name, distribution.version, text)


def test_there_are_lines_to_test() -> None:
    assert {"-e './client[torch]' -e '.[gpu]'", "./client", "wheels/*.whl"} <= LINES.keys()
    assert any("ray" in line for line in LINES)
    assert len(LINES) >= 10


@pytest.mark.parametrize("line", [line for line in LINES if line not in LOCKED])
def test_a_line_installs_ours_from_files_alone(empty: Empty, wheels: None, line: str) -> None:
    found = empty.installs(line)
    for name in OURS:
        if name in found:
            assert found[name].startswith(empty.checkout.as_uri()), f"{LINES[line]}: {line}"
    if "gemmsmith-service" in found:
        assert "gemmsmith" in found
    if re.search(r"\bclient\b|\bwheels/|-e \.", line):
        assert "gemmsmith" in found
    for extra, package in (("gpu", "nvidia-cuda-nvcc"), ("torch", "torch"), ("fleet", "ray")):
        assert (package in found) or f"[{extra}]" not in line


def test_advice_names_the_library_by_its_files(
    empty: Empty, wheels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CHECKOUT", empty.checkout)
    assert empty.installs(extras.library())["gemmsmith"] == (empty.checkout / "client").as_uri()
    monkeypatch.setattr(places, "CHECKOUT", None)
    (file,) = (empty.checkout / "wheels").glob("gemmsmith-*.whl")

    class Installed:
        def read_text(self, _name: str) -> str | None:
            return json.dumps({"url": file.as_uri(), "archive_info": {}})

    monkeypatch.setattr(extras.metadata, "distribution", lambda _: Installed())
    assert empty.installs(extras.library())["gemmsmith"] == file.as_uri()
    monkeypatch.setattr(Installed, "read_text", lambda *_: None)  # from somebody's own index
    assert extras.library().strip("'").endswith(".whl")


def test_no_text_installs_ours_by_its_name() -> None:
    wrong = ("pip install gemmsmith", "pip install 'gemmsmith[torch]'", "pip install x gemmsmith-y")
    assert all(_BY_NAME.search(text) for text in wrong)
    kinds = (".md", ".py", ".toml", ".html", ".sh", ".yaml", ".yml", ".ipynb", "file")
    for name in tree.files():
        if name.endswith(kinds) and not name.startswith("tests/"):
            match = _BY_NAME.search((ROOT / name).read_text(encoding="utf-8"))
            assert match is None, f"{name}: {match[0]}"


def test_advice_names_packages_of_others_alone() -> None:
    metadata = importlib.metadata.metadata("gemmsmith-service")
    for extra in metadata.get_all("Provides-Extra") or ():
        command = extras.pip_install(extra)
        assert command.startswith("pip install ")
        assert len(shlex.split(command)) > 2
        assert not any(name in command for name in OURS)
    gpu, compiler = (set(shlex.split(extras.pip_install(name))) for name in ("gpu", "compiler"))
    assert compiler < gpu
    assert "torch>=2.11" in gpu


def test_locks_name_nothing_of_ours_and_pin_everything() -> None:
    for path in (ROOT / "requirements").glob("*.lock"):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in filter(None, map(str.strip, text.splitlines())):
            if not line.startswith(("#", "-")):
                assert re.match(r"[a-z0-9._-]+(\[[a-z0-9,_-]+\])?==\S+", line), line
                assert "--hash=sha256:" in line, line
                assert not line.startswith("gemmsmith"), line


@pytest.mark.long
def test_the_wheels_that_are_built_are_those_that_are_installed(empty: Empty) -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    (building,) = re.findall(r"^pip wheel .*$", page, re.MULTILINE)
    folder = empty.checkout / "wheels"
    for file in folder.glob("*.whl"):
        file.unlink()
    empty.run(building)
    assert len(list(folder.glob("*.whl"))) == 2
    for line in LINES:
        if "wheels/" in line:
            found = empty.installs(line)
            assert found["gemmsmith"].startswith(folder.as_uri())


@pytest.mark.long
@pytest.mark.parametrize("line", LOCKED)
def test_a_locked_line_finds_everything(empty: Empty, line: str, tmp_path: Path) -> None:
    """From the index of this machine: all that is downloaded has the hash that is written down."""
    if "PIP_NO_INDEX" in os.environ:
        pytest.skip("pip may ask no index here")
    theirs = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    clean = {name: text for name, text in empty.variables.items() if not name.startswith("PIP_")}
    where = Empty(checkout=empty.checkout, variables=clean | theirs)
    assert where.installs(line)
