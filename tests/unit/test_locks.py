"""requirements/*.lock: all that the project names is there, pinned, with hashes that pip checks."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
# What each lock is for, by extras; torch is in `gpu` and, of `test`, in `cpu`.
LOCKS = {
    "gpu": {"fleet", "gpu", "parquet", "postgresql"},
    "run": {"parquet", "postgresql"},
    "test": {"test", "report"},
}
ENTRY = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[\w.+]+)(?: ; (?P<marker>[^\\\n]+?))?"
    r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+"
)
PROJECTS = {
    project["name"]: project
    for path in ("pyproject.toml", "client/pyproject.toml")
    for project in [tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]]
}


def entries(lock: str) -> dict[str, str]:
    """Version by name; all of the file but comments and `--only-binary` must be such entries."""
    text = (FOLDER / f"{lock}.lock").read_text(encoding="utf-8")
    options, _, rest = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).partition("\n")
    assert options == "--only-binary :all:"
    assert re.sub(r"\s", "", ENTRY.sub("", rest)) == ""
    found = [(match["name"], match["version"]) for match in ENTRY.finditer(rest)]
    assert len(found) == len(dict(found)), "each name has one version"
    return dict(found)


def named(extras: set[str]) -> list[Requirement]:
    """What pyproject.toml, and the client's, name for these extras, and what builds the project."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    todo = [*build["requires"], *PROJECTS["gemmsmith-service"]["dependencies"]]
    optional = PROJECTS["gemmsmith-service"]["optional-dependencies"]
    todo += [text for extra in extras for text in optional[extra]]
    wanted = []
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name == "gemmsmith":
            todo += PROJECTS["gemmsmith"]["dependencies"]
        elif requirement.name == "gemmsmith-service":
            todo += [text for extra in requirement.extras for text in optional[extra]]
        else:
            wanted.append(requirement)
    return wanted


def test_each_extra_is_locked_but_the_proprietary_one() -> None:
    assert {path.stem for path in FOLDER.glob("*.lock")} == {*LOCKS, "cpu"}
    reached = {"heuristics", "docs", "compiler"} | {
        extra for lock in LOCKS for extra in LOCKS[lock]
    }
    assert reached == PROJECTS["gemmsmith-service"]["optional-dependencies"].keys()


@pytest.mark.parametrize("lock", LOCKS)
def test_all_that_the_project_names_is_locked_within_its_range(lock: str) -> None:
    locked = entries(lock) if lock != "test" else entries("cpu") | entries("test")
    wanted = named(LOCKS[lock])
    assert wanted
    for requirement in wanted:
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_locks_agree_on_versions_and_only_one_brings_cuda_libraries() -> None:
    locked = {lock: entries(lock) for lock in LOCKS}
    for name, version in locked["run"].items():
        assert locked["gpu"][name] == version
    shared = locked["gpu"].keys() & locked["test"].keys()
    assert {locked["gpu"][name] == locked["test"][name] for name in shared} == {True}
    assert entries("cpu") == {"torch": locked["gpu"]["torch"] + "+cpu"}
    assert {lock for lock in LOCKS if "cuda-toolkit" in locked[lock]} == {"gpu"}


def test_what_is_locked_installs_on_the_oldest_python_that_the_project_takes() -> None:
    """Debian 12 has 3.11.2: a release that needs 3.11.5 would stop `make test` there."""
    asked = {SpecifierSet(project["requires-python"]) for project in PROJECTS.values()}
    assert asked == {SpecifierSet(">=3.11")}
    locked = entries("run") | entries("test") | entries("cpu")
    installed = [dist for dist in distributions() if canonicalize_name(dist.name) in locked]
    assert len(installed) > 50
    newer = [
        f"{dist.name} {dist.version} needs Python {needed}"
        for dist in installed
        if (needed := dist.metadata["Requires-Python"])
        and not SpecifierSet(needed).contains("3.11.0")
    ]
    assert newer == []


@pytest.mark.parametrize("tampered", [False, True])
def test_pip_refuses_a_file_whose_hash_is_another(tmp_path: Path, tampered: bool) -> None:
    wheel = tmp_path / "locked-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "locked-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: locked\nVersion: 1\n"
        )
        archive.writestr("locked-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("locked-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes() + b"x" * tampered).hexdigest()
    lock = tmp_path / "any.lock"
    lock.write_text(f"--only-binary :all:\nlocked==1 \\\n    --hash=sha256:{digest}\n")
    offline = ["--no-index", f"--find-links={tmp_path}", f"--target={tmp_path / 'site'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--no-deps", "-r", str(lock)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) is tampered
    assert ("DO NOT MATCH THE HASHES" in done.stderr) is tampered
