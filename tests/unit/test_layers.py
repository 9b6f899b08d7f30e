"""Dependencies point one way: service → tuner → gemmsmith, and the library stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "gemmsmith": ROOT / "client" / "gemmsmith",
    "tuner": ROOT / "tuner",
    "service": ROOT / "service",
}
FORBIDDEN = {
    "gemmsmith": {"tuner", "service", "fastapi", "sqlalchemy", "cutlass_library", "pydantic"},
    "tuner": {"service", "fastapi", "typer", "rich", "pydantic"},
    "service": set(),
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_imports_nothing_above_it(package: str) -> None:
    files = sorted(FOLDERS[package].rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & FORBIDDEN[package], path


def test_only_the_store_and_jobs_know_sqlalchemy() -> None:
    allowed = {ROOT / "tuner" / "store", ROOT / "tuner" / "jobs"}
    for folder in (FOLDERS["tuner"], FOLDERS["service"]):
        for path in folder.rglob("*.py"):
            if not allowed & set(path.parents):
                assert "sqlalchemy" not in imported(path), path


def test_only_one_module_knows_where_cutlass_lies() -> None:
    users = {
        path.relative_to(FOLDERS["tuner"]).parts[:-1]
        for path in FOLDERS["tuner"].rglob("*.py")
        if "cutlass_library" in imported(path)
    }
    folders = ("cutlass", "cutlass2x", "cutlass3x", "cute")
    assert users <= {("backends", folder) for folder in folders}


def test_importing_the_library_is_light() -> None:
    code = (
        "import sys, gemmsmith; "
        "heavy = {'torch', 'fastapi', 'sqlalchemy', 'cuda', 'numpy', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_is_a_warehouse() -> None:
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
