"""Dependencies point one way: service → tuner → gemmsmith, and the library stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
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


def test_the_rooms_of_torch_operators_stand_on_each_other() -> None:
    """A room imports from those before it; `models` and `graphs` do not know each other."""
    rooms = ("engine", "below", "products", "models", "graphs")
    folder = FOLDERS["gemmsmith"] / "ops"
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == set(rooms)
    for number, room in enumerate(rooms):
        for path in (folder / room).rglob("*.py"):
            used = set(re.findall(r"from gemmsmith\.ops\.(\w+)", path.read_text(encoding="utf-8")))
            assert used <= {*rooms[:number], room}, path
            assert room != "graphs" or "models" not in used, path


def test_answers_stand_below_http() -> None:
    """Lookups know nothing of what serves them."""
    for path in sorted((FOLDERS["service"] / "lookup").glob("*.py")):
        assert "service.http" not in path.read_text(encoding="utf-8"), path


def test_only_the_store_and_jobs_know_sqlalchemy() -> None:
    allowed = {ROOT / "tuner" / "store", ROOT / "tuner" / "jobs"}
    for folder in (FOLDERS["tuner"], FOLDERS["service"]):
        for path in folder.rglob("*.py"):
            if not allowed & set(path.parents):
                assert "sqlalchemy" not in imported(path), path


def test_only_the_fleet_knows_ray_and_only_the_command_line_the_fleet() -> None:
    fleet = ROOT / "service" / "fleet"
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            if fleet in path.parents:
                continue
            assert "ray" not in imported(path), path
            if (ROOT / "service" / "cli") not in path.parents:
                assert "service.fleet" not in path.read_text(encoding="utf-8"), path


def test_workers_and_services_load_no_ray() -> None:
    code = (
        "import sys, service.cli.main, service.cli.running, service.worker.process, "
        "service.http.app; print(sorted({'ray', 'service.fleet'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_one_module_knows_where_cutlass_lies() -> None:
    users = {
        path.relative_to(FOLDERS["tuner"]).parts[:-1]
        for path in FOLDERS["tuner"].rglob("*.py")
        if "cutlass_library" in imported(path)
    }
    folders = ("cutlass", "cutlass2x", "cutlass3x", "cute")
    assert users <= {("backends", folder) for folder in folders}


def modules() -> dict[str, Path]:
    """The project's modules and packages by dotted name."""
    found = {}
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def family(name: str) -> set[str]:
    """A module's name and those of the packages it lies in."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """However indirectly, also inside functions or for types alone."""
    known = modules()
    imports = {}
    for module, path in known.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        # Importing a module runs its packages first; a module's own are running already.
        wanted = set().union(*map(family, named)) if named else set()
        imports[module] = wanted & known.keys() - family(module)
    try:
        assert list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


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
