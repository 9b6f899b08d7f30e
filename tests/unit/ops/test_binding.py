"""The binding's compiled file: named after its bytes, checked before it is loaded."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from gemmsmith.ops.below import binding as module
from gemmsmith.ops.below.binding import binding
from gemmsmith.runtime.pack import check_whole

COMPILER = """#!/bin/sh
echo compiled >> {log}
for last; do :; done
cp {made} "$last"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that gives a shared object which is there already."""
    made = module.INSTALLED
    check_whole(made)  # built by `make .venv/.test`
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=tmp_path / "log", made=made))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "INSTALLED", tmp_path / "none")
    return tmp_path / "cache" / "bindings"


def compiled(cache: Path) -> int:
    return len((cache.parents[1] / "log").read_text().splitlines())


def test_it_is_compiled_once_and_kept_private(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        path = binding()
    finally:
        os.umask(before)
    assert binding() == path
    assert compiled(cache) == 1
    assert list(cache.iterdir()) == [path]
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.9999])
def test_one_that_is_truncated_is_compiled_anew(share: float, cache: Path) -> None:
    path = binding()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert binding().read_bytes() == whole
    assert compiled(cache) == 2
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("byte", [0, 100, 5000, -1])
def test_one_that_was_altered_is_compiled_anew(byte: int, cache: Path) -> None:
    path = binding()
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[byte] ^= 1
    path.write_bytes(altered)
    assert binding().read_bytes() == whole
    assert compiled(cache) == 2


def test_one_that_others_may_change_is_compiled_anew(cache: Path) -> None:
    path = binding()
    path.chmod(0o664)
    assert stat.S_IMODE(binding().stat().st_mode) == 0o600
    assert compiled(cache) == 2


def test_a_folder_that_others_may_write_to_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    binding()
    cache.chmod(0o770)
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="chmod go-w"):
        binding()
    assert f"chmod go-w {cache}" in caplog.text


def test_an_installed_one_that_is_truncated_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = binding()
    installed = tmp_path / "installed.so"
    monkeypatch.setattr(module, "INSTALLED", installed)
    installed.write_bytes(whole.read_bytes()[:-100])
    assert binding() == whole
    installed.write_bytes(whole.read_bytes())
    assert binding() == installed
