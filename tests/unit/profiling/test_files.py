"""Files of profiles: shipped ones and own ones, and what is wrong with a file."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from tuner.profiling import files
from tuner.profiling.files import add_profiles, file_in, profile_of, read_profiles
from tuner.profiling.records import ProblemProfile

H200 = "nvidia-h200-132sm"
SHORT_K = Problem(m=1024, n=2304, k=768)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "own_folder", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def shipped() -> list[ProblemProfile]:
    return read_profiles(file_in(files.shipped_folder(), H200))


def test_every_shipped_profile_is_of_its_device_and_has_kernels() -> None:
    for path in files.shipped_folder().glob("*.jsonl"):
        profiles = read_profiles(path)
        assert profiles
        assert len({profile.problem for profile in profiles}) == len(profiles)
        for profile in profiles:
            assert profile.device.slug == path.stem
            assert profile.candidate.candidate is not None
            assert profile.default.candidate is None
            assert profile.candidate.main.us > 1
            assert profile.default.main.registers


def test_a_profile_made_here_replaces_the_shipped_one(own: Path) -> None:
    first = profile_of(SHORT_K, H200)
    assert first is not None
    newer = replace(first, recorded_at="2026-11-26T20:00:00+00:00", tool="ncu 9")
    add_profiles(file_in(own, H200), [newer])
    assert profile_of(SHORT_K, H200) == newer
    again = replace(newer, tool="ncu 10")
    add_profiles(file_in(own, H200), [again, replace(again, problem=replace(SHORT_K, m=8))])
    assert profile_of(SHORT_K, H200) == again
    assert len(read_profiles(file_in(own, H200))) == 2
    assert profile_of(Problem(m=256, n=256, k=32768), H200) in shipped()


def test_what_was_not_profiled_has_no_profile() -> None:
    assert profile_of(replace(SHORT_K, m=7), H200) is None
    assert profile_of(SHORT_K, "nvidia-a100-108sm") is None
    assert profile_of(SHORT_K, "../../x y") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a file of profiles"),
        ("{}\n", "is not a file of profiles"),
        ('{"format":"gemmsmith-winners","schema":1}\n', "not a file of profiles but"),
        ('{"format":"gemmsmith-profiles","schema":2}\n', "reads 1 … 1: upgrade"),
        ('{"format":"gemmsmith-profiles","schema":1}\n{"problem":3}\n', "Remove it"),
        ('{"format":"gemmsmith-profiles","schema":1}\n\xff\n', "Remove it"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_counts_as_empty(
    own: Path, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_in(own, H200)
    own.mkdir()
    path.write_bytes(text.encode("latin-1", errors="replace"))
    with pytest.raises(files.ProfilesError, match=reason):
        read_profiles(path)
    with caplog.at_level(logging.WARNING):
        assert profile_of(SHORT_K, H200) in shipped()
    assert str(path) in caplog.text
    with pytest.raises(files.ProfilesError):  # and nothing is lost
        add_profiles(path, shipped())


def test_a_profile_without_kernels_is_refused(own: Path) -> None:
    path = file_in(own, H200)
    first = shipped()[0]
    add_profiles(path, [replace(first, default=replace(first.default, kernels=()))])
    with pytest.raises(files.ProfilesError, match="without kernels"):
        read_profiles(path)
