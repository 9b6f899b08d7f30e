"""configs/deploy: what can be held about units and images without systemd and without a builder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from service.cli.main import app
from service.http.connections import HEALTH_RESERVE, OTHER_FILES
from service.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "configs" / "deploy"
UNITS = sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.timer")])
INSTALLED = "/opt/gemmsmith/.venv/bin/gemmsmith"
ENVIRONMENT = dict(
    line.split("=", 1)
    for line in (DEPLOY / "gemmsmith.env").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
CONTAINERFILE = re.sub(
    r"\\\n", " ", (DEPLOY / "Containerfile").read_text(encoding="utf-8")
).splitlines()
INSTRUCTIONS = [
    (line.split()[0], line.split(maxsplit=1)[1])
    for line in CONTAINERFILE
    if re.match(r"[A-Z]+ ", line)
]
OPERATION = (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")
# How the project is installed, wherever that is said: dependencies by their hashes, then itself.
INSTALL = re.compile(
    r"\.venv/bin/pip install --no-deps -r requirements/(\w+)\.lock(?: &&)?\s+"
    r"\.venv/bin/pip install --no-deps --no-build-isolation -e client -e \.(?=\s|$)"
)
FLEET = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")


def of(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def parses(arguments: list[str]) -> bool:
    """Whether the command line takes these arguments; `--help` stops it before it does anything."""
    return CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root folder with the units, and the programs that they start, where the docs put them."""
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, folder)
    for program in (INSTALLED, "/bin/sh", "/usr/bin/find"):
        path = tmp_path / program[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return tmp_path


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is missing: apt-get install systemd"
)
def test_systemd_takes_the_units_and_confines_them(machine: Path) -> None:
    names = [unit.name.replace("@.", "@0.") for unit in UNITS]
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={machine}"]
        + [f"/etc/systemd/system/{name}" for name in names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    worst = {
        "gemmsmith.service": 20,
        "gemmsmith-worker@0.service": 40,
        "gemmsmith-backup.service": 40,
    }
    assert worst.keys() == {name for name in names if name.endswith(".service")}
    for name, tenths in worst.items():
        offline = ["--offline=true", f"--root={machine}", f"--threshold={tenths}"]
        done = subprocess.run(
            ["systemd-analyze", "security", "--no-pager", *offline, name],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_what_the_units_start_parses() -> None:
    started = []
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(rf"{INSTALLED}[^\n']*", text):
            words = shlex.split(command.replace("$(date +%%Y%%m%%d-%%H%%M%%S)", "now"))
            started.append(words[1])
            assert parses(words[1:]), command
    assert sorted(started) == ["db", "serve", "worker"]


def test_the_environment_file_holds_settings_alone_and_paths_that_are_there() -> None:
    settings = Settings.load(ENVIRONMENT)
    assert ENVIRONMENT.keys() <= {PREFIX + field.upper() for field in Settings.model_fields}
    assert not settings.keys_required
    for field in ("winners", "sweeps"):
        folder = getattr(settings, field)
        assert (ROOT / folder.relative_to("/opt/gemmsmith")).is_dir()
    assert {str(folder) for folder in settings.volumes().values()} == {
        "/var/lib/gemmsmith",
        "/var/lib/gemmsmith/packs",
    }


def test_units_wait_longer_than_the_service_takes_to_stop() -> None:
    patience = 2 * Settings.model_fields["stop_timeout_s"].default
    for name in ("gemmsmith.service", "gemmsmith-worker@.service"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
        assert int(limit) > patience
        assert "KillMode=mixed" in text
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        assert int(service["stop_grace_period"].removesuffix("s")) > patience


def test_units_may_open_the_files_that_all_connections_need() -> None:
    needed = Settings.model_fields["connections"].default + OTHER_FILES + HEALTH_RESERVE
    for name in ("gemmsmith.service", "gemmsmith-worker@.service"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        (limit,) = re.findall(r"^LimitNOFILE=(\d+)$", text, re.MULTILINE)
        assert int(limit) >= needed
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert compose["services"]["service"]["ulimits"]["nofile"] >= needed


def test_the_wrapper_is_a_shell_script() -> None:
    wrapper = DEPLOY / "gemmsmith"
    assert wrapper.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(wrapper)], check=True)
    text = wrapper.read_text(encoding="utf-8")
    assert ". /etc/gemmsmith.env" in text
    assert f'exec {INSTALLED} "$@"' in text


def test_images_are_made_of_what_is_there_and_installed_as_make_does() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {word for rest in of("COPY") for word in rest.split()[:-1]}
    assert copied == sent
    for name in copied:
        assert (ROOT / name).exists(), name
    locks = [
        INSTALL.findall(re.sub(r"\s+", " ", run.replace(" --no-cache-dir", "")))
        for run in of("RUN")
    ]
    assert [lock for lock in locks if lock] == [["gpu"], ["run"]]


def test_images_start_commands_that_exist_as_somebody_else_than_root() -> None:
    assert of("ENTRYPOINT") == ['["gemmsmith"]']
    commands = [json.loads(rest) for rest in of("CMD")]
    assert commands == [["worker"], ["serve"]]
    assert all(parses(command) for command in commands)
    assert of("USER") == ["gemmsmith", "gemmsmith"]
    environment = dict(pair.split("=", 1) for pair in of("ENV")[0].split())
    path = environment.pop("PATH")
    assert path.startswith("/opt/gemmsmith/.venv/bin:")
    settings = Settings.load(environment)
    assert settings.keys_required
    assert settings.log_json
    for folder in settings.volumes().values():
        assert folder.is_relative_to(of("VOLUME")[0])
    (check,) = of("HEALTHCHECK")
    port = Settings.model_fields["port"].default
    assert f"http://127.0.0.1:{port}/readyz" in check
    assert of("EXPOSE") == [str(port)]


def test_the_docs_install_what_there_is() -> None:
    named = set(re.findall(r"configs/deploy/([\w.@*-]+)", OPERATION + FLEET))
    for pattern in named:
        assert list(DEPLOY.glob(pattern)), pattern
    files = {path.name for path in DEPLOY.iterdir()}
    covered = {path.name for pattern in named for path in DEPLOY.glob(pattern)}
    assert files - covered <= {"alerts.yml", "grafana.json"}
    for name in files - covered:
        assert f"`{name}`" in OPERATION
    assert INSTALL.findall(OPERATION) == ["run", "run"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pip = dict(re.findall(r"^(PIP|install) = (.+)", makefile, re.MULTILINE))
    made = (
        pip["install"]
        .replace("$(PIP)", pip["PIP"])
        .replace("--quiet --disable-pip-version-check ", "")
    )
    assert INSTALL.findall(made.replace("$(1)", "any")) == ["any"]
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name in re.findall(r"^gemmsmith ([a-z]+)", OPERATION, re.MULTILINE):
        assert name in commands
