"""Both wheels, built from this tree and installed into an environment of their own, without it.

Nothing is downloaded: what the project depends on is this interpreter's, found by a `.pth` file,
which reads no other `.pth` and so no editable install. The programs run in an empty folder, for a
user whose home has nothing in it, and may open no file of the checkout.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from gemmsmith.version import VERSION
from service.settings import PREFIX
from tests.support import tree
from tests.support.docs import ROOT
from tests.support.processes import address, commands

PIP = (sys.executable, "-m", "pip")
OFFLINE = ("--quiet", "--no-deps", "--no-index")

RECORDED = "replay:nvidia-h200-132sm"

GUARD = """
import os, sys

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        inside = [(path + os.sep).startswith(f + os.sep) for f in ({checkout!r}, {packages!r})]
        if inside == [True, False]:
            os.write(2, f"opened {{path}} of the checkout\\n".encode())
            os._exit(99)

sys.addaudithook(refuse)
"""
"""Ends a program that opens a file of the checkout; an environment's packages may lie in there."""

SUITE = """
name = "one"
[[problem]]
name = "projection"
m = 4096
n = 6144
k = 1024
"""

OPENED = """
import json, sys
import gemmsmith
from gemmsmith import Bundle, Lookup
bundle = Bundle.open(sys.argv[1])
choice = Lookup(bundle.snapshot).lookup("bf16", "tn", 4096, 6144, 1024)
pack = bundle.packs.path(choice.config.pack)
print(json.dumps([gemmsmith.__file__, choice.distance, pack.read_bytes()[:4].hex()]))
"""

LOADED = (
    "gemmsmith gemmsmith.moved gemmsmith.program gemmsmith.program.variables "
    "gemmsmith.startup gemmsmith.startup.hook"
)
"""The modules of gemmsmith in a program without torch, once `GEMMSMITH` is set."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with the wheels, a user's home, and an empty folder to work in."""

    environment: Path
    home: Path
    work: Path

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.environment)}))

    @property
    def variables(self) -> dict[str, str]:
        """No setting of gemmsmith's, no path of Python's, nothing of this user's."""
        ours = (PREFIX, "PYTHON", "XDG_", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        scripts = self.environment / "bin"
        return kept | {
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "PATH": f"{scripts}:{os.environ['PATH']}",
        }

    def run(self, *words: object, within_s: float = 120) -> str:
        """What a program of the environment prints."""
        name, *arguments = map(str, words)
        done = subprocess.run(
            [self.environment / "bin" / name, *arguments],
            cwd=self.work,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self) -> Iterator[str]:
        """`gemmsmith serve --worker` on a free port: its banner."""
        log = self.home / "serve.log"
        settings = {"GEMMSMITH_PORT": "0", "GEMMSMITH_DEVICE": RECORDED}
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [self.environment / "bin" / "gemmsmith", "serve", "--worker"],
                cwd=self.work,
                env=self.variables | settings,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                banner = ""
                while "/events" not in banner:
                    line = process.stdout.readline()
                    assert line, log.read_text()
                    banner += line
                yield banner
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text()
            finally:
                process.kill()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, by the name of the distribution, built as pip builds them."""
    source = tree.copy(tmp_path_factory.mktemp("source"))
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run(
        [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", folder, ".", "./client"],
        cwd=source,
        check=True,
    )
    found = {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}
    assert found.keys() == {"gemmsmith", "gemmsmith_service"}
    return found


@pytest.fixture
def installed(wheels: dict[str, Path], tmp_path: Path) -> Installed:
    made = Installed(
        environment=tmp_path / "environment", home=tmp_path / "home", work=tmp_path / "work"
    )
    made.home.mkdir()
    made.work.mkdir()
    venv.create(made.environment, symlinks=True, with_pip=False)
    python = made.environment / "bin" / "python"
    subprocess.run(
        [*PIP, "--python", python, "install", *OFFLINE, *wheels.values()],
        check=True,
        cwd=made.work,
        env=made.variables,
    )
    theirs = sysconfig.get_path("purelib")
    (made.packages / "dependencies.pth").write_text(f"{theirs}\n")
    (made.packages / "guard.py").write_text(GUARD.format(checkout=str(ROOT), packages=theirs))
    (made.packages / "guard.pth").write_text("import guard\n")
    return made


@pytest.mark.long
def test_the_wheels_hold_what_is_needed_at_run_time(wheels: dict[str, Path]) -> None:
    listed = tree.files()
    service = set(zipfile.ZipFile(wheels["gemmsmith_service"]).namelist())
    assert {name for name in listed if name.startswith(("service/", "tuner/"))} <= service
    needed = {
        f"tuner/files/{name}"
        for name in listed
        if name.startswith(("configs/", "migrations/"))
        if not name.startswith("configs/deploy/")
        if name not in ("configs/wheel.py", "migrations/script.py.mako")  # for developers
    }
    assert {name for name in service if name.startswith("tuner/files/")} == needed
    client = set(zipfile.ZipFile(wheels["gemmsmith"]).namelist())
    library = {name for name in listed if name.startswith("client/gemmsmith/")}
    assert {name.removeprefix("client/") for name in library} <= client
    assert "gemmsmith/py.typed" in client
    # Installed beside each other, neither overwrites or shadows anything.
    tops = {PurePosixPath(name).parts[0] for name in service | client}
    assert {top for top in tops if ".dist-info" not in top} == {
        "gemmsmith", "gemmsmith.pth", "service", "tuner",
    }  # fmt: skip


@pytest.mark.long
def test_python_looks_at_the_variable_wherever_the_library_is_installed(
    installed: Installed, tmp_path: Path
) -> None:
    """By the wheel, and by an editable install of its sources."""
    program = "import sys; print(*sorted(one for one in sys.modules if one[:9] == 'gemmsmith'))"

    def loaded(environment: Path, **variables: str) -> str:
        command = [environment / "bin" / "python", "-c", program]
        given = installed.variables | variables
        return subprocess.check_output(command, env=given, cwd=installed.work, text=True).strip()

    assert loaded(installed.environment) == ""
    assert loaded(installed.environment, GEMMSMITH="auto") == LOADED
    other = tmp_path / "other"
    venv.create(other, symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(other)}))
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    source = tree.copy(tmp_path / "checkout") / "client"
    editable = ("install", *OFFLINE, "--no-build-isolation", "-e", str(source))
    subprocess.run(
        [*PIP, "--python", other / "bin" / "python", *editable],
        check=True, cwd=installed.work, env=installed.variables,
    )  # fmt: skip
    assert (packages / "gemmsmith.pth").is_file()
    assert loaded(other) == ""
    assert loaded(other, GEMMSMITH="auto") == LOADED


@pytest.mark.long
def test_the_library_is_for_every_python_and_for_whoever_has_torch(
    wheels: dict[str, Path],
) -> None:
    found = wheels["gemmsmith"]
    tags = f"cp311-abi3-manylinux_2_28_{platform.machine()}"
    assert found.name == f"gemmsmith-{VERSION}-{tags}.whl"
    assert "gemmsmith/ops/below/_dispatch.abi3.so" in zipfile.ZipFile(found).namelist()
    words = [sys.executable, "-m", "auditwheel", "show", found]
    told = " ".join(subprocess.check_output(words, text=True).split())
    oldest = re.findall(r'platform tag: "manylinux_2_(\d+)_', told)
    assert oldest, told
    assert int(oldest[0]) <= 28


@pytest.mark.long
def test_without_a_compiler_the_library_is_pure(tmp_path: Path) -> None:
    source = tree.copy(tmp_path / "source") / "client"
    subprocess.run(
        [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", tmp_path, source],
        check=True, env=os.environ | {"CC": "/bin/false", "CXX": "/bin/false"},
    )  # fmt: skip
    (found,) = tmp_path.glob("*.whl")
    assert found.name == f"gemmsmith-{VERSION}-py3-none-any.whl"
    names = zipfile.ZipFile(found).namelist()
    assert "gemmsmith/ops/below/dispatch.cpp" in names  # compiled on first use
    assert not any(name.endswith(".so") or ".data/" in name for name in names)


@pytest.mark.long
@pytest.mark.compiles
def test_the_main_job_is_done_with_no_checkout(installed: Installed, tmp_path: Path) -> None:
    state = installed.home / "data" / "gemmsmith"
    program = "import gemmsmith, service, tuner; print(gemmsmith.__path__, service.__path__)"
    assert installed.run("python", "-c", program).count(str(installed.packages)) == 2

    reading = [installed.environment / "bin" / "python", "-c", f"open({str(ROOT / 'Makefile')!r})"]
    assert subprocess.run(reading, env=installed.variables, check=False).returncode == 99

    told = json.loads(installed.run("gemmsmith", "doctor", "--json"))
    checks = {check["name"]: check for check in told["checks"]}
    assert str(installed.packages / "tuner" / "files") in checks["files"]["detail"]
    assert str(state) in checks["files"]["detail"]
    assert str(state) in checks["database"]["detail"]
    assert "nvidia-h200-132sm.bf16.jsonl.zst" in checks["recordings"]["detail"]
    assert told["can"]["serve"]
    assert told["can"]["replay"]
    assert not state.exists()  # it changes nothing

    answer = json.loads(installed.run("gemmsmith", "best", 4096, 6144, 1024, "--json"))
    assert (answer["match"], answer["use"], answer["replayed"]) == ("exact", "cutlass", False)
    assert (state / "gemmsmith.db").is_file()

    tuned = installed.run("gemmsmith", "tune", 1024, 6144, 1024, "--device", RECORDED)
    assert "1024×6144×1024 bf16 tn" in tuned
    answer = json.loads(installed.run("gemmsmith", "best", 1024, 6144, 1024, "--json"))
    assert (answer["match"], answer["replayed"]) == ("exact", True)
    suite = installed.run("gemmsmith", "tune", "--suite", "stable", "--device", RECORDED)
    assert "512×512×8192 bf16 tn" in suite

    with installed.serving() as banner:
        lookup, tune, events = commands(banner)
        assert json.loads(subprocess.check_output(lookup))["match"] == "exact"
        assert json.loads(subprocess.check_output(tune))["state"] == "waiting"
        stream = subprocess.check_output(events, text=True, timeout=60)
        assert re.findall(r"^event: (\w+)$", stream, re.MULTILINE)[-1] == "finished"
        url = address(banner)
        page = subprocess.check_output(["curl", "-sL", "--fail", f"{url}/ui"], text=True)
        style = re.findall(r'href="([^"]+pages[^"]*\.css[^"]*)"', page)[0]
        assert subprocess.check_output(["curl", "-s", "--fail", f"{url}{style}"])

    one, bundle = tmp_path / "one.toml", tmp_path / "winners.gspack"
    one.write_text(SUITE)
    baking = ("bake", "--suite", one, "--dtype", "bf16", "-o", bundle)
    installed.run("gemmsmith", *baking, within_s=400)  # compiles a kernel
    opened = json.loads(installed.run("python", "-c", OPENED, bundle))
    assert opened == [
        str(installed.packages / "gemmsmith" / "__init__.py"), 0.0, b"\x7fELF".hex(),
    ]  # fmt: skip
    assert list(installed.work.iterdir()) == []
    assert {path.name for path in state.iterdir()} >= {"gemmsmith.db", "packs", "signing.key"}
