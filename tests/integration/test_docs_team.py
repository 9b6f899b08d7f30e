"""docs/team.md, played by two users: each has a home, a signing key and trusted keys of their own.

Only what needs a GPU is prepared: Anna's winners, whose kernels are stand-ins in C, so that Ben's
programs run them on the host.
"""

from __future__ import annotations

import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.launch import Launch
from service.settings import Settings
from tests.support import fake_nvcc, stand_in, unchanged
from tests.support.docs import ROOT, Session, Step
from tests.support.processes import address
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, packs_of, promote, winner
from tests.support.shipped import DEVICE, SWEEPS
from tests.unit.ops.test_unchanged import SCRIPT, STEP

PAGE = ROOT / "docs" / "team.md"
SHOWN_IDS = {"anna": "0123456789abcdef", "ben": "fedcba9876543210"}
SHOWN_KEY, SHOWN_URL = "gsk_njzinwXYZ", "http://HOST:8000"
KERNELS = 3 * len(STEP)
"""Launches in the three steps of the script."""
COMMAND = re.compile(r"^(anna|ben)\$ (.*)\n((?:(?!anna\$ |ben\$ |```).*\n)*)", re.MULTILINE)


def played() -> Iterator[tuple[str, Step]]:
    """Who types which command, in the order of the page."""
    for who, command, shown in COMMAND.findall(PAGE.read_text(encoding="utf-8")):
        yield who, Step(where=PAGE.name, language="console", text=command, shown=shown)


def user(folder: Path, name: str) -> tuple[Session, Settings]:
    home = folder / name
    home.mkdir()
    settings = new_settings(
        home, signing_key=home / "signing.key", trusted=home / "trusted", sweeps=SWEEPS,
        device=DEVICE,
    )  # fmt: skip
    stands_in = name == "ben"
    own = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), **settings.environment()}
    session = Session(folder, unchanged.environment(home / "site", stand_in=stands_in, **own), {})
    for variable in ("XDG_CONFIG_HOME", "GEMMSMITH_CACHE_DIR"):
        session.environment[variable] = str(home / variable)
    return session, settings


def tuned(settings: Settings, pack: Path) -> None:
    """What Anna's GPU would have measured and compiled."""
    packs = packs_of(settings)
    compiled = packs.publish(
        pack, stand_in.KERNELS, fake_nvcc.toolchain(settings.packs.parent / "toolchain")
    )
    for problem in STEP:
        name = stand_in.name_of(problem.operation)
        kernel = next(kernel for kernel in stand_in.KERNELS if kernel.name == name)
        candidate = Candidate(kernel=kernel, launch=Launch())
        measured = winner(problem, device=H200, us=1000.0)
        promote(settings, replace(measured, candidate=candidate, pack=compiled.hash))


@contextmanager
def serving(session: Session, step: Step) -> Iterator[str]:
    """What Anna starts in a terminal of its own; its URL."""
    command = session.put(step.text).replace("--host 0.0.0.0", "--require-keys --port 0")
    with (
        (session.folder / "served").open("w") as log,
        subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=session.folder, env=session.environment,
            stdout=subprocess.PIPE, stderr=log, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        try:
            banner = ""
            while "/events" not in banner:
                line = process.stdout.readline()
                assert line, (session.folder / "served").read_text()
                banner += line
            yield address(banner)
        finally:
            process.send_signal(signal.SIGINT)


@pytest.mark.long
def test_two_users_play_it(tmp_path: Path) -> None:
    (anna, settings), (ben, his) = user(tmp_path, "anna"), user(tmp_path, "ben")
    tuned(settings, stand_in.build(tmp_path))
    assert settings.signing_key.exists()
    assert not his.trusted.exists()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "shared").mkdir()
    said = []
    with ExitStack() as services:
        for who, step in played():
            session = {"anna": anna, "ben": ben}[who]
            words = step.text.split()
            if step.text.startswith("python -m gemmsmith trust"):
                ben.instead[SHOWN_IDS["anna"]] = identifier(anna)
                he_refuses(ben, step)
            if step.text.startswith("gemmsmith signing trust"):
                anna.instead[SHOWN_IDS["ben"]] = identifier(ben)
            if words[:2] == ["gemmsmith", "serve"]:
                url = services.enter_context(serving(session, step))
                ben.instead[SHOWN_URL] = url
                assert httpx.get(f"{url}/winners").status_code == 401
            else:
                said.append(session.run(step))
            if words[:3] == ["gemmsmith", "keys", "create"]:
                ben.instead[SHOWN_KEY] = said[-1].strip()
            if step.text.startswith("GEMMSMITH="):
                assert len(launched(ben)) == KERNELS
    assert settings.signing_key.read_bytes() != his.signing_key.read_bytes()
    assert (tmp_path / "shared" / "winners.gspack").stat().st_mode & stat.S_IROTH


def identifier(session: Session) -> str:
    """What Anna sends to Ben by another way than the shared folder."""
    done = session.ask("gemmsmith signing show")
    match = re.search(r"identifier is (\w{16});", done.stderr)
    assert match is not None, done.stderr
    return match[1]


def he_refuses(ben: Session, step: Step) -> None:
    """Before Ben trusts the key, and if it is not the key whose identifier he was sent."""
    done = ben.ask("GEMMSMITH=shared/winners.gspack python train.py")
    assert done.returncode == 0
    assert "GEMMSMITH is ignored: the kernels of snapshot" in done.stderr
    assert launched(ben) == []
    done = ben.ask(step.text.replace(SHOWN_IDS["anna"], "f" * 16))
    assert done.returncode == 1
    assert "nothing was changed" in done.stderr


def launched(session: Session) -> list[str]:
    return unchanged.launched(Path(session.environment["HOME"]) / "site")
