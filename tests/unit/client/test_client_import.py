"""`import gemmsmith` is cheap, and every exported name exists."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gemmsmith

HEAVY = ("torch", "numpy", "fastapi", "sqlalchemy", "cuda", "httpx", "msgspec", "pydantic")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_loads_nothing_heavy() -> None:
    loaded = loaded_after("import gemmsmith")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("gemmsmith")} == {
        "gemmsmith",
        "gemmsmith.moved",
    }


def test_the_client_needs_neither_torch_nor_the_service() -> None:
    loaded = loaded_after("from gemmsmith import Client, AsyncClient, Problem, Answer; Client()")
    assert not loaded & {"torch", "numpy", "fastapi", "sqlalchemy", "cuda", "pydantic", "tuner"}
    assert "httpx" in loaded


def test_choosing_in_memory_needs_no_torch() -> None:
    loaded = loaded_after(
        "from gemmsmith import Bundle, Lookup, Packs, Snapshot, distributed; "
        "distributed.shared_snapshot; Lookup(Snapshot.of('x', [])).lookup('bf16', 'tn', 1, 1, 1)"
    )
    assert not loaded & {"torch", "numpy", "fastapi", "sqlalchemy", "cuda", "pydantic", "tuner"}
    assert "cryptography" not in loaded  # loaded only to sign or check something


def test_every_export_exists_and_type_checkers_see_it() -> None:
    tree = ast.parse(Path(str(gemmsmith.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    homes = {name: f"gemmsmith.{module}" for name, module in gemmsmith._HOME.items()}
    assert seen == homes | {"distributed": "gemmsmith", "runtime": "gemmsmith"}
    for name in gemmsmith.__all__:
        assert getattr(gemmsmith, name).__name__ == name
    assert set(gemmsmith.__all__) <= set(dir(gemmsmith))
    assert gemmsmith.__version__.count(".") >= 1


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("gemmsmith.problem", "gemmsmith.core.problem", "Problem"),
        ("gemmsmith.jobs", "gemmsmith.http.jobs", "JobStatus"),
        ("gemmsmith.packs", "gemmsmith.winners.packs", "Packs"),
        ("gemmsmith.answers.lookup", "gemmsmith.winners.lookup", "Lookup"),
        ("gemmsmith.answers.answer", "gemmsmith.answers.answer", "Config"),
    ],
)
def test_modules_keep_the_names_of_release_0_1(old: str, new: str, name: str) -> None:
    code = (
        f"import importlib, sys\nold = importlib.import_module({old!r})\n"
        f"new = importlib.import_module({new!r})\n"
        f"print(old is new, new.__spec__.name, hasattr(old, {name!r}))"
    )
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", new, "True"]
    assert (f"DeprecationWarning: {old} is {new} now" in done.stderr) is (old != new)
