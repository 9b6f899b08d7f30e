"""`gemmsmith signing`: the installation's key, and whom it believes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import Result

from gemmsmith.core.problem import Problem
from gemmsmith.signing import PublicKey, Signer
from service import identity
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.commands import run, use
from tests.support.serving import new_settings, running
from tuner.backends import kernels
from tuner.compile import ArtifactStore


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = new_settings(
        tmp_path,
        signing_key=tmp_path / "signing.key",
        trusted=tmp_path / "trusted",
        shipped_keys=tmp_path / "shipped",
    )
    return use(made, monkeypatch)


def signing(*arguments: object, code: int = 0, answer: str = "") -> Result:
    return run("signing", *arguments, code=code, answer=answer)


def believed() -> set[str]:
    return {key["id"] for key in json.loads(signing("list", "--json").stdout)["keys"]}


def test_its_own_key_is_shown_and_kept(settings: Settings) -> None:
    shown = PublicKey.parse(signing("show").stdout)
    assert shown == identity.signer(settings).public
    assert json.loads(signing("show", "--json").stdout)["id"] == shown.id
    assert re.search(f"{shown.id} +pack, snapshot, winner", signing("list").stdout)
    said = signing("revoke", shown.id, code=2).stderr
    assert f"move {settings.signing_key} away first" in said


def test_the_list_says_what_each_key_is_trusted_for(settings: Settings, tmp_path: Path) -> None:
    release = Signer.create(tmp_path / "release.key").public
    settings.shipped_keys.mkdir()
    (settings.shipped_keys / "release.pub").write_text(release.line)
    [row] = json.loads(signing("list", "--json").stdout)["keys"]
    assert (row["id"], row["for"]) == (release.id, ["winner"])


def test_a_service_s_key_is_believed_and_revoked(settings: Settings, tmp_path: Path) -> None:
    other = new_settings(
        tmp_path / "other", signing_key=tmp_path / "other.key", trusted=tmp_path / "theirs"
    )
    theirs = identity.signer(other).public.id
    with running(other) as http:
        url = str(http.base_url)
        signing("trust", url, answer="n\n", code=1)
        assert believed() == set()
        assert theirs in signing("trust", url, answer="y\n").stderr
        signing("trust", url, "--id", "0" * 16, code=1)
    assert believed() == {theirs}
    assert theirs in identity.trusted(settings).keys
    signing("revoke", theirs)
    assert believed() == {identity.signer(settings).public.id}
    assert "see `gemmsmith signing list`" in signing("revoke", theirs, code=2).stderr


def test_rotating_keys_leaves_the_old_one_believed(settings: Settings) -> None:
    old = identity.signer(settings).public.id
    settings.signing_key.rename(settings.signing_key.with_suffix(".old"))
    new = PublicKey.parse(signing("show").stdout).id
    assert believed() == {old, new}
    signing("revoke", old)
    assert believed() == {new}


def test_packs_of_an_older_release_are_signed_once(settings: Settings, tmp_path: Path) -> None:
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"\x7fELF")
    [kernel] = kernels(Problem(m=64, n=64, k=64))[:1]
    toolchain = fake_nvcc.toolchain(tmp_path / "toolchain")
    ArtifactStore(settings.packs).publish(compiled, [kernel], toolchain)
    signer = identity.signer(settings)
    watching = ArtifactStore(settings.packs, trusted=identity.trusted(settings))
    assert watching.find(kernel) is None
    assert signing("packs").stdout == f"{settings.packs}: 1 packs signed\n"
    assert watching.find(kernel) is not None
    [(pack_hash, manifest)] = watching.manifests()
    assert manifest.check(pack_hash, identity.trusted(settings)) == signer.public
    assert signing("packs").stdout == f"{settings.packs}: 0 packs signed\n"


def test_keys_that_cannot_be_used_are_one_line(settings: Settings, tmp_path: Path) -> None:
    Signer.create(tmp_path / "key")
    settings.signing_key.write_text("odd")
    settings.signing_key.chmod(0o600)
    assert signing("show", code=2).stderr.startswith("error: signing_key (or GEMMSMITH_SIGN")
    settings.trusted.mkdir()
    (settings.trusted / "odd.pub").write_text("odd")
    assert "odd.pub: not a public key" in signing("list", code=2).stderr
