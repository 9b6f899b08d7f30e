"""The installation's key: made once, whoever asks, and believed by the same user's programs."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gemmsmith.errors import Untrusted
from gemmsmith.signing import PublicKey, Purpose, Signer
from service import identity
from service.settings import Settings, SettingsError


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        database=f"sqlite:///{tmp_path}/state/gemmsmith.db",
        packs=tmp_path / "packs",
        signing_key=tmp_path / "state" / "signing.key",
        trusted=tmp_path / "trusted",
        shipped_keys=tmp_path / "shipped",
    )


def test_it_is_made_when_first_needed_and_believed(settings: Settings) -> None:
    made = identity.signer(settings).public
    assert identity.signer(settings).public == made
    assert identity.trusted(settings).keys == {made.id: made}


def test_many_at_once_make_one(settings: Settings) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = {one.public.id for one in pool.map(identity.signer, [settings] * 16)}
    assert len(made) == 1


def test_files_that_are_no_keys_are_named(settings: Settings) -> None:
    settings.trusted.mkdir()
    (settings.trusted / "odd.pub").write_text("odd")
    with pytest.raises(SettingsError, match=r"odd\.pub"):
        identity.trusted(settings)
    settings.signing_key.parent.mkdir()
    settings.signing_key.write_text("odd")
    settings.signing_key.chmod(0o600)
    with pytest.raises(SettingsError, match="GEMMSMITH_SIGNING_KEY"):
        identity.signer(settings)


def named(settings: Settings) -> set[str]:
    return set(identity.trusted(settings).keys)


def test_a_key_is_trusted_for_as_long_as_it_is_there(settings: Settings) -> None:
    """`make clean`, or a new state folder, leaves nothing behind that is trusted."""
    for _ in range(3):
        mine = identity.signer(settings).public.id
        assert named(settings) == {mine}
        assert len(list(settings.trusted.iterdir())) == 1
        shutil.rmtree(settings.signing_key.parent)
        assert named(settings) == set()


def test_other_installations_of_the_user_are_trusted_too(
    settings: Settings, tmp_path: Path
) -> None:
    other = settings.model_copy(update={"signing_key": tmp_path / "other" / "signing.key"})
    mine, theirs = (identity.signer(each).public.id for each in (settings, other))
    assert named(settings) == named(other) == {mine, theirs}
    shutil.rmtree(other.signing_key.parent)
    assert named(settings) == {mine}


def test_the_copy_of_an_earlier_release_becomes_a_link(settings: Settings) -> None:
    key = Signer.create(settings.signing_key).public
    settings.trusted.mkdir()
    (settings.trusted / f"gemmsmith-{key.id}.pub").write_text(f"{key.line}\n")
    identity.signer(settings)
    (link,) = settings.trusted.iterdir()
    assert link.is_symlink()
    assert named(settings) == {key.id}


def test_what_it_makes_is_its_owners_whatever_the_umask(settings: Settings) -> None:
    before = os.umask(0o002)
    try:
        identity.signer(settings)
        settings.create_folders()
    finally:
        os.umask(before)
    for folder in (settings.trusted, settings.signing_key.parent, settings.packs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    identity.trusted(settings)


def test_folders_that_others_may_write_to_are_refused(settings: Settings) -> None:
    identity.signer(settings)
    settings.create_folders()
    settings.trusted.chmod(0o775)
    with pytest.raises(SettingsError, match=r"trusted \(or GEMMSMITH_TRUSTED\).*chmod go-w"):
        identity.trusted(settings)
    settings.packs.chmod(0o775)
    with pytest.raises(SettingsError, match=r"packs \(or GEMMSMITH_PACKS\).*chmod go-w"):
        settings.create_folders()


@pytest.mark.parametrize("purpose", Purpose)
def test_shipped_keys_stand_for_winners_only(
    purpose: Purpose, settings: Settings, tmp_path: Path
) -> None:
    release = Signer.create(tmp_path / "release.key")
    shipped(settings, release.public)
    signature = release.sign(purpose, {"any": 1})
    trusted = identity.trusted(settings)
    if purpose is Purpose.WINNER:
        assert trusted.check(purpose, {"any": 1}, signature) == release.public
        return
    with pytest.raises(Untrusted, match=f"it is a {purpose}, signed with.*for winners only"):
        trusted.check(purpose, {"any": 1}, signature)
    # The user may trust it for everything.
    settings.trusted.mkdir()
    (settings.trusted / "release.pub").write_text(release.public.line)
    assert identity.trusted(settings).check(purpose, {"any": 1}, signature) == release.public


def shipped(settings: Settings, key: PublicKey) -> None:
    settings.shipped_keys.mkdir()
    (settings.shipped_keys / "release.pub").write_text(key.line)


def test_an_empty_variable_makes_no_path_the_working_folder() -> None:
    paths = {name: f for name, f in Settings.model_fields.items() if f.annotation is Path}
    assert len(paths) == 6
    empty = {f"GEMMSMITH_{name.upper()}": "" for name in Settings.model_fields}
    assert Settings.load(empty) == Settings.load({})
