"""Arguments, error lines and exit statuses; nothing here touches a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli.options import dtypes_of
from service.cli.output import MisuseError
from tests.support.commands import invoke as run
from tuner.store import upgrade

COMMANDS = (
    "serve", "worker", "tune", "best", "enumerate", "compile", "record", "results", "export",
    "import", "doctor", "db", "bake", "keys", "audit",
)  # fmt: skip
OF_GROUPS = ("keys create", "keys list")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty database."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/g.db"
    monkeypatch.setenv("GEMMSMITH_DATABASE", url)
    upgrade(url)
    return url


def used() -> float:
    """Processor seconds of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_names_every_command_and_is_quick() -> None:
    times = []
    for _ in range(3):
        began = used()
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", "--help"], capture_output=True, text=True
        )
        times.append(used() - began)
        assert done.returncode == 0
        assert all(f" {command} " in done.stdout for command in COMMANDS)
    assert min(times) < 1.5  # CPU seconds: other tests run beside this one


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, service.cli.main; "
        "print({'torch', 'fastapi', 'sqlalchemy', 'cutlass_library', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("command", [*COMMANDS, *OF_GROUPS])
def test_every_command_explains_itself(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    if command not in ("serve", "worker", "db", "keys"):
        assert "--json" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best", 0, 1, 1), "m must be in 1 … 2147483647, got 0"),
        (("best", 1, -1, 1), "in 1 … 2147483647, got -1"),
        (("best", 1, 1, 2**31), "k must be in 1 … 2147483647"),
        (("best", 1, 1.5, 1), "integers in 1 … 2147483647, got '1.5'"),
        (("best", "x", 1, 1), "got 'x'"),
        (
            ("best", 1, 1, 1, "--dtype", "int4"),
            "bf16, fp16, fp8_e4m3, fp8_e5m2, int8, tf32, got 'int4'",
        ),
        (("best", 1, 1, 1, "--layout", "tx"), "tn, tt, nt, nn, got 'tx'"),
        (("best", 1, 1, 1, "--batch", 0), "batch must be in 1"),
        (("best", 1, 1, 1, "--dtype", "fp8_e4m3", "--layout", "nn"), "needs layout tn"),
        (("best", 1, 1, 1, "--url", "localhost"), "must be like http://127.0.0.1:8000"),
        (("enumerate", 1, 1, 1, "--level", "big"), "level must be one of core, full"),
        (("enumerate", 1, 1, 1, "--arch", "sm70"), "arch must be one of sm80, sm89, sm90, sm100"),
        (("enumerate", 1, 1, 1, "--arch", "sm80", "--device", "x"), "not both"),
        (("tune",), "three sizes M N K are needed, got 0"),
        (("tune", 1, 2), "three sizes M N K are needed, got 2"),
        (("tune", 1, 2, 3, "--effort", "max"), "quick, default, exhaustive, recheck, got 'max'"),
        (("tune", 1, 2, 3, "--dtype", "bf16,int4"), "fp8_e5m2, int8, tf32, got 'int4'"),
        (("tune", 1, 2, 3, "--calls", -1), "calls must be an integer in 0 … 1000000000000000"),
        (("tune", 1, 2, 3, "--calls", 10**15 + 1), "calls must be an integer in 0"),
        (("tune", "--suite", "no-such-file.toml"), "no suite file no-such-file.toml"),
        (("tune", 1, 2, 3, "--suite", "x.toml"), "not both"),
        (("compile", 1, 2, 3, "--winners"), "one of them"),
        (("compile", 1, 2, 3, "--base"), "--winners or --base, one of them"),
        (("compile", "--base", "--winners"), "--winners or --base, one of them"),
        (("compile", "--base", "--suite", "x.toml"), "--winners or --base, one of them"),
        (("compile", "--base", "--numerics", "invariant"), "does not go with --base"),
        (("compile", "--winners", "--numerics", "x"), "numerics must be one of invariant"),
        (("best", 1, 2, 3, "--numerics", "x"), "numerics must be one of invariant, got 'x'"),
        (("best", 1, 2, 3, "--numerics", "invariant", "--dtype", "int8"), "leave out numerics"),
        (("compile", "--base", "--dtype", "bf16,int4"), "fp8_e5m2, int8, tf32, got 'int4'"),
        (("record", 1, 2, 3, "-o", "sweep.json"), "NAME.jsonl.zst"),
        (("results", "--phase", "last"), "screen, final, got 'last'"),
        (("results", "--winners", "--job", "j"), "--winners goes with"),
        (("serve", "--host", "0.0.0.0", "--port", 0), "gemmsmith keys create NAME --scope admin"),
        (("serve", "--port", 70000), "port (or GEMMSMITH_PORT)"),
        (("serve", "--host", "192.0.2.1"), "Choose an address of this machine with --host"),
        (("serve", "--packs", __file__), f"cannot make the folder {__file__}: File exists"),
        (("capture", "-o", f"{__file__}/x.toml", "--", "true"), f"{__file__} is a file, not a fol"),
        (("export", f"{__file__}/x.jsonl"), f"{__file__} is a file, not a folder"),
        (("db", "backup", f"{__file__}/x"), f"{__file__} is a file, not a folder"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(database, arguments, message) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_dtypes_are_those_of_every_operation() -> None:
    names = ["bf16.out_f32.accumulate, int8", "bf16.group_depth", "int8"]
    assert dtypes_of(names) == ["bf16.out_f32.accumulate", "int8", "bf16.group_depth"]
    with pytest.raises(MisuseError, match=r"is spelt 'int8\.out_bf16\.scale_row'"):
        dtypes_of(["int8.scale_row.out_bf16"])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("[[problem]]\nname='x'\nm=0\nn=1\nk=1", "m must be in 1"),
        ("[[problem]]\nname='x'\nm=1\nn=1\nk=1\ncalls=-1", "problem 2: calls must be an integer"),
        ("[[problem]]\nname='x'\nm=1\nn=1\nk=1\ncalls='9'", "in 0 … 1000000000000000, got '9'"),
        (
            "[[layer]]\nmodel='a'\nname='x'\nout=8\nin=8\ntokens=[1]\ncalls=9",
            "layer 1: calls goes with one product: list it as a [[problem]] too",
        ),
    ],
)
def test_a_suite_that_makes_no_sense(database: str, tmp_path: Path, entry: str, says: str) -> None:
    first = "[[problem]]\nname = 'fine'\nm = 1\nn = 2\nk = 3\ncalls = 0\n"
    (tmp_path / "bad.toml").write_text(first + entry)
    result = run("tune", "--suite", tmp_path / "bad.toml")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"not a database at all, but long enough", b""])
def test_a_broken_database_is_one_line_and_status_1(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.db").write_bytes(content)
    result = run("results", "--database", f"sqlite:///{tmp_path}/bad.db")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_missing_database_says_how_to_make_one(tmp_path: Path) -> None:
    result = run("results", "--database", f"sqlite:///{tmp_path}/none.db")
    assert result.exit_code == 1
    assert "gemmsmith db upgrade --database" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    arguments = ["results", "--database", f"sqlite:///{tmp_path}/none.db"]
    for given in (["--debug", *arguments], [*arguments, "--debug"]):
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", *given], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "SchemaOutdated" in done.stderr


def test_an_option_beats_the_environment_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMSMITH_DATABASE", raising=False)
    assert json.loads(run("db", "current", "--json").stdout)["database"].endswith(
        ".state/gemmsmith.db"
    )
    monkeypatch.setenv("GEMMSMITH_DATABASE", "sqlite:///env.db")
    assert "env.db" in run("db", "current", "--json").stdout
    result = run("db", "current", "--json", "--database", "sqlite:///option.db")
    assert "option.db" in result.stdout
    assert "env.db" not in result.stdout


def test_db_upgrade_is_safe_to_repeat(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    assert run("db", "current", "--database", url).exit_code == 1
    first = json.loads(run("db", "upgrade", "--database", url, "--json").stdout)
    assert first["before"] is None
    second = json.loads(run("db", "upgrade", "--database", url, "--json").stdout)
    assert second["before"] == second["after"] == first["after"]
    assert run("db", "current", "--database", url).exit_code == 0


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@127.0.0.1:9/db",
        "postgresql+psycopg://me:secret@127.0.0.1:9/db",
        "postgresql://me:secret@127.0.0.1:99999/db",
        "postgresql://me:secret@127.0.0.1:port/db",
        "postgresql://me:secret@127.0.0.1:9/db?bogus=1",
        "postgresql://127.0.0.1:9/db?user=me&password=secret",
        "postgresql+bogus://me:secret@127.0.0.1/db",
        "mysql://me:secret@127.0.0.1/db",
        "me:secret@127.0.0.1/db",
        "://me:secret@127.0.0.1/db",
    ],
)
@pytest.mark.parametrize("command", [("db", "current"), ("db", "upgrade"), ("jobs", "list")])
def test_a_database_url_that_leads_nowhere_is_a_line_without_its_password(
    url: str, command: tuple[str, ...]
) -> None:
    result = run(*command, "--database", url)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "secret" not in result.output


def test_doctor_prints_no_passwords() -> None:
    for form in ((), ("--json",)):
        result = run(
            *("doctor", "--database", "postgresql://me:secret@127.0.0.1:9/db"),
            *("--url", "http://me:secret@127.0.0.1:9", *form),
        )
        assert "postgresql://me:***@127.0.0.1:9/db" in result.stdout.replace("+psycopg", "")
        assert "http://me:***@127.0.0.1:9" in result.stdout
        assert "secret" not in result.output
