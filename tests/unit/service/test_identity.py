"""The installation's key: made once, whoever asks, and believed by the same user's programs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service import identity
from service.settings import Settings, SettingsError


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
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
