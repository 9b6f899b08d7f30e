"""Where files lie, in a checkout and without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.settings import Settings
from tuner import places
from tuner.measure import ceilings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As installed from a wheel, by a user whose data are in this folder."""
    monkeypatch.setattr(places, "CHECKOUT", None)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_a_checkout_has_its_own_state_and_files() -> None:
    assert places.CHECKOUT == ROOT
    assert places.state({"XDG_DATA_HOME": "/elsewhere"}) == ROOT / ".state"
    assert places.shipped("configs/winners") == ROOT / "configs" / "winners"


def test_a_wheel_keeps_everything_among_the_users_data(wheel: Path) -> None:
    settings = Settings.load({})
    assert settings.database == f"sqlite:///{wheel}/gemmsmith/gemmsmith.db"
    assert settings.packs == wheel / "gemmsmith" / "packs"
    assert settings.signing_key == wheel / "gemmsmith" / "signing.key"
    inside = Path(places.__file__).parent / "files" / "configs"
    assert (settings.winners, settings.sweeps) == (inside / "winners", inside / "sweeps")


@pytest.mark.parametrize("given", [{}, {"XDG_DATA_HOME": ""}, {"XDG_DATA_HOME": "relative"}])
def test_only_an_absolute_folder_counts(wheel: Path, given: dict[str, str]) -> None:
    assert places.state(given) == Path.home() / ".local" / "share" / "gemmsmith"


def test_own_ceilings_come_before_the_shipped_ones(wheel: Path) -> None:
    shipped = places.shipped("configs/ceilings") / "gpu.json"
    assert ceilings.path_for("gpu") == shipped
    own = ceilings.path_for("gpu", ceilings.own_folder())
    assert own == wheel / "gemmsmith" / "ceilings" / "gpu.json"
    own.parent.mkdir(parents=True)
    own.touch()
    assert ceilings.path_for("gpu") == own
