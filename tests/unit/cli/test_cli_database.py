"""`gemmsmith db backup` and `restore`, beside a running service too."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from service.cli import checks
from tests.support.commands import run
from tests.support.processes import serving
from tests.support.serving import new_settings, promote, trial, winner
from tuner.compile import ArtifactStore, Toolchain
from tuner.store import Store, head

PROBLEM = Problem(m=4096, n=4096, k=4096)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_DATABASE", f"sqlite:///{tmp_path}/state/gemmsmith.db")
    monkeypatch.setenv("GEMMSMITH_PACKS", f"{tmp_path}/state/packs")


def test_a_service_is_backed_up_while_it_runs_and_restored_when_it_does_not(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    settings = new_settings(state)
    promote(settings, winner(PROBLEM))
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"\x7fELF not really")
    kernel = trial(PROBLEM).candidate.kernel
    toolchain = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels")
    pack = ArtifactStore(settings.packs).publish(compiled, [kernel], toolchain)
    saved = tmp_path / "saved.db"
    with serving(tmp_path):
        done = run("db", "backup", saved, "--packs", "--json")
        said = json.loads(done.stdout)
        assert (said["schema"], said["packs"]) == (head(), 1)
        assert said["bytes"] == saved.stat().st_size
        refused = run("db", "restore", saved, "--force", code=1)
        assert "stop the service" in refused.stderr
    pack.path.unlink()
    promote(settings, winner(PROBLEM, us=5.0))
    refused = run("db", "restore", saved, code=1)
    assert "2 winners" in refused.stderr
    run("db", "restore", saved, "--force", "--packs")
    with Store.open(settings.database) as store:
        assert len(store.history(PROBLEM, winner(PROBLEM).device.slug)) == 1
    assert pack.path.read_bytes() == compiled.read_bytes()


def test_what_cannot_be_done_is_one_line(tmp_path: Path) -> None:
    new_settings(tmp_path / "state")
    missing = run("db", "restore", tmp_path / "none.db", code=2)
    assert missing.stderr.startswith("error: there is no file")
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"not a database" * 1000)
    refused = run("db", "restore", broken, code=1)
    assert "is no usable backup" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_damaged_archive_of_packs_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    settings = new_settings(tmp_path / "state")
    saved = tmp_path / "saved.db"
    run("db", "backup", saved, "--packs")
    promote(settings, winner(PROBLEM))
    (tmp_path / "saved.db.packs.tar").write_bytes(b"no tar" * 1000)
    done = run("db", "restore", saved, "--packs", "--force", code=1)
    assert "not a complete archive of packs" in done.stderr
    assert not list(settings.packs.glob("*.so"))
    with Store.open(settings.database) as store:
        assert store.counts()["winners"] == 1


def test_a_backup_that_was_meddled_with_is_one_line(tmp_path: Path) -> None:
    new_settings(tmp_path / "state")
    saved, archived = tmp_path / "saved.db", tmp_path / "saved.db.packs.tar"
    run("db", "backup", saved, "--packs")
    whole = archived.read_bytes()
    with tarfile.open(archived, "w") as tar:
        link = tarfile.TarInfo("0" * 64 + ".so")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    refused = run("db", "restore", saved, "--packs", "--force", code=1)
    assert refused.stderr.count("\n") == 1
    assert "is not a plain file" in refused.stderr
    archived.write_bytes(whole)
    with closing(sqlite3.connect(saved)) as connection:
        connection.execute("INSERT INTO alembic_version VALUES ('0001')")
        connection.commit()
    refused = run("db", "restore", saved, "--packs", "--force", code=1)
    assert refused.stderr.count("\n") == 1
    assert f"names as schema 0001, {head()}" in refused.stderr


def test_what_to_do_about_a_newer_database_works(tmp_path: Path) -> None:
    settings = new_settings(tmp_path / "state")
    promote(settings, winner(PROBLEM))
    saved = tmp_path / "saved.db"
    run("db", "backup", saved)
    with closing(sqlite3.connect(tmp_path / "state" / "gemmsmith.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    told = run("db", "current", code=1)
    assert "db upgrade" not in told.stdout  # which would refuse it
    advice = re.search(r"gemmsmith (db restore FILE --force --database \S+)", told.stdout)
    assert advice, told.stdout
    run(*advice[1].replace("FILE", str(saved)).split())
    run("db", "current")
    with Store.open(settings.database) as store:
        assert store.counts()["winners"] == 1


def test_an_older_database_is_upgraded_as_told(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    told = run("db", "current", code=1)
    advice = re.search(r"gemmsmith (db upgrade --database \S+)", told.stdout)
    assert advice, told.stdout
    run(*advice[1].split())
    run("db", "current")


def test_the_database_and_its_copies_are_the_owners_only(tmp_path: Path) -> None:
    database = tmp_path / "new" / "state" / "gemmsmith.db"
    url = f"sqlite:///{database}"
    old = os.umask(0o022)
    try:
        run("db", "upgrade", "--database", url)
        with Store.open(url) as store:
            store.promote(winner(PROBLEM))
            modes = {path.name: mode(path) for path in database.parent.iterdir()}
        copied = tmp_path / "b.db"
        run("db", "backup", copied, "--database", url)
        other = tmp_path / "other" / "restored.db"
        run("db", "restore", copied, "--database", f"sqlite:///{other}")
        settings = new_settings(tmp_path / "made")
        assert settings.packs.parent == tmp_path / "made"
    finally:
        os.umask(old)
    names = {"gemmsmith.db", "gemmsmith.db-wal", "gemmsmith.db-shm"}
    assert modes == dict.fromkeys(names, 0o600)
    assert {mode(database.parent), mode(database.parent.parent), mode(other.parent)} == {0o700}
    assert {mode(tmp_path / "b.db"), mode(other)} == {0o600}
    assert mode(tmp_path / "made") == 0o700


def test_doctor_tells_of_a_database_that_others_can_read(tmp_path: Path) -> None:
    """One from before, say: its mode is left to its owner."""
    settings = new_settings(tmp_path / "state")
    database = tmp_path / "state" / "gemmsmith.db"
    database.chmod(0o644)
    [told] = [check for check in checks.run(settings, None) if check.name == "database"]
    assert told.status is checks.CheckStatus.WARNING
    assert told.fix == f"chmod 600 {database}*"
    database.chmod(0o600)
    [told] = [check for check in checks.run(settings, None) if check.name == "database"]
    assert told.status is checks.CheckStatus.OK


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
