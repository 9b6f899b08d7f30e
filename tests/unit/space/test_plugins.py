"""Backends of other packages: their kernels are listed, judged and compiled like all others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import isfinite
from pathlib import Path

import msgspec
import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, Backend, PluginKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from service.cli import checks
from service.settings import Settings
from tests.support import fake_nvcc, plugins
from tests.support.plugins import plain
from tests.support.replacing import replace
from tuner import backends
from tuner.backends import registry
from tuner.backends.unit import include_dirs, kernel_digest, unit_source
from tuner.claims import kernel_reason
from tuner.compile import ArtifactStore, Builder
from tuner.search.cost_model import predicted_us

PROBLEM = Problem(m=4096, n=4096, k=4096)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture
def installed(folder: Path) -> Iterator[None]:
    plugins.write(folder)
    with plugins.beside(folder):
        yield


@pytest.mark.usefixtures("installed")
def test_its_kernels_compete_with_all_others(h200: DeviceModel) -> None:
    own = [kernel for kernel in backends.kernels(PROBLEM) if kernel.source != "plain"]
    assert backends.kernels(PROBLEM) == [*own, plain(64), plain(128), plain(256)]
    assert {kernel.backend for kernel in own} == {Backend.CUTLASS3X, Backend.CUTE}
    candidates = backends.candidates(PROBLEM, h200)
    ours = [candidate for candidate in candidates if candidate.kernel.source == "plain"]
    assert ours == [Candidate(kernel=plain(tile), launch=Launch()) for tile in (64, 128, 256)]
    assert all(backends.is_legal(candidate, PROBLEM) for candidate in ours)
    assert all(map(isfinite, predicted_us(PROBLEM, ours, h200)))
    assert all(backends.compiles(candidate.kernel) for candidate in ours)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "problem",
    [
        Problem(m=64, n=64, k=64, dtype="fp16"),
        Problem(m=64, n=64, k=68),
        Problem(m=64, n=68, k=64),
        Problem(m=64, n=64, k=64, dtype="bf16.then_bias"),
    ],
    ids=str,
)
def test_it_is_not_asked_for_what_it_does_not_take(problem: Problem) -> None:
    assert not any(kernel.source == "plain" for kernel in backends.kernels(problem))
    assert backends.refusal(plain(64), problem) is not None


@pytest.mark.usefixtures("installed")
def test_only_kernels_that_it_lists_are_legal() -> None:
    assert kernel_reason(plain(64), PROBLEM) is None
    for wrong in (
        plain(32),
        replace(plain(64), alignment_a=1),
        replace(plain(64), tile=(64, 64, 0)),
        replace(plain(64), traits=(("stages", 3),)),
        replace(plain(64), arch="sm80"),
    ):
        assert kernel_reason(wrong, PROBLEM) is not None, wrong


def test_without_the_package_its_kernels_are_known_but_not_compiled(
    h200: DeviceModel, tmp_path: Path
) -> None:
    kernel = plain(64)
    assert backends.backend_of(kernel) is None
    assert backends.refusal(kernel, PROBLEM) is None
    assert backends.launches(kernel, PROBLEM, h200) == []
    assert "no backend plain is known here" in str(kernel_reason(kernel))
    builder = Builder(ArtifactStore(tmp_path / "packs"), fake_nvcc.toolchain(tmp_path))
    assert not builder.has(kernel)
    (built,) = builder.build([kernel])
    assert built.failure is not None
    assert "kernels of plain cannot be compiled here" in built.failure.message


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("cutlass3x_sm90_tensorop", "plain"),
        ("plain", "plain"),
        ("plain_64;", "plain"),
        ("plain_64x ", "plain"),
        ("plain_ü", "plain"),
        ("_64", ""),
        ("a b_64", "a b"),
        ("my-kernels_64", "my-kernels"),
    ],
)
def test_its_kernels_bear_its_name(name: str, plugin: str) -> None:
    with pytest.raises(ValueError, match=r"a kernel of the plugin .* is called .*; name it"):
        replace(plain(64), name=name, plugin=plugin)
    wire = msgspec.to_builtins(plain(64)) | {"name": name, "plugin": plugin}
    with pytest.raises(msgspec.ValidationError, match="a kernel of the plugin"):
        msgspec.convert(wire, AnyKernel)


def test_a_kernel_is_itself_after_a_journey() -> None:
    kernel = replace(plain(64), traits=(("stages", 3),))
    assert msgspec.json.decode(msgspec.json.encode(kernel), type=AnyKernel) == kernel
    assert hash(kernel) != hash(plain(64))
    assert kernel.output_tile == (64, 64)
    assert ("stages", 3) in kernel.choices
    assert Use.of(kernel) is Use.PLUGIN


def test_a_kernel_is_compiled_again_if_what_it_is_made_from_has_changed(tmp_path: Path) -> None:
    texts = (
        plugins.PLAIN,
        plugins.PLAIN.replace("compiler 1", "compiler 2"),
        plugins.PLAIN.replace('"g.alpha", ', ""),
        plugins.PLAIN.replace("g.beta == 0", "true"),
    )
    digests = set()
    for number, text in enumerate(texts):
        folder = tmp_path / str(number)
        folder.mkdir()
        plugins.write(folder, text)
        with plugins.beside(folder):
            digests |= {kernel_digest(plain(64)), kernel_digest(plain(128))}
    assert len(digests) == 2 * len(texts)


@pytest.mark.usefixtures("installed")
def test_its_part_names_the_headers_that_it_includes() -> None:
    text = unit_source([plain(64), plain(128)])
    assert '#include "plain_64.cubin.hpp"' in text
    for name in ("cubin/kernel.hpp", "cublaslt/library.hpp", "gemmsmith/table.hpp"):
        assert any((folder / name).is_file() for folder in include_dirs([plain(64)])), name


def checked() -> checks.Check:
    """What `gemmsmith doctor` says about plugins."""
    (check,) = (check for check in checks.run(Settings(), None) if check.name == "plugins")
    return check


IMPORTED = "from plain_plugin import BACKEND\n"

BROKEN: dict[str, tuple[str, str, str]] = {
    "it cannot be imported": ("import no_such_module", plugins.POINT, "No module named"),
    "it ends the program": ("raise SystemExit(3)", plugins.POINT, "SystemExit: 3"),
    "it has no such object": ("", plugins.POINT, "has no attribute 'BACKEND'"),
    "it is another thing": ("BACKEND = 3", plugins.POINT, "it is a int, no PluginBackend"),
    "it is the class": (plugins.PLAIN + "BACKEND = Plain", plugins.POINT, "no PluginBackend"),
    "it lacks a method": (
        plugins.PLAIN.replace("def part", "def parts"),
        plugins.POINT,
        "abstract",
    ),
    "it has another name": (plugins.PLAIN, "other = plain_plugin:BACKEND", "both must have"),
    "it has the name of a backend": (
        plugins.PLAIN.replace('name = "plain"', 'name = "cute"'),
        "cute = plain_plugin:BACKEND",
        "both must have",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_left_out_and_named(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, point, reason = BROKEN[case]
    plugins.write(folder, module, point)
    with plugins.beside(folder), caplog.at_level(logging.WARNING):
        assert all(kernel.source != "plain" for kernel in backends.kernels(PROBLEM))
        (refusal,) = registry.plugins().refused.items()
        warned = checked()
    assert refusal[0] == "plain_plugin:BACKEND"
    assert warned.status is checks.CheckStatus.WARNING
    assert f"plain_plugin:BACKEND is left out: {refusal[1]}" in warned.detail
    assert reason in refusal[1]
    assert "\n" not in refusal[1]
    assert f"the plugin plain_plugin:BACKEND is left out: {refusal[1]}" in caplog.text


FAULTS: dict[str, tuple[str, str, str]] = {
    "it fails": ("return []", "raise KeyError('odd')", "KeyError: 'odd'"),
    "it lists nothing that can be counted": ("return []", "return None", "TypeError"),
    "it lists other things": ("return []", "return [3]", "AttributeError"),
    "its kernels are of another plugin": ('plugin="plain"', 'plugin="plai"', "ValueError"),
    "it lists a kernel twice": ("(64, 128, 256)", "(64, 128, 64)", "lists a name twice"),
    "it cannot describe one": ("tile = kernel.tile[0]", "tile = 1 // 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_list_with_a_fault_is_left_out_and_the_others_stay(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, reason = FAULTS[case]
    assert before in plugins.PLAIN
    plugins.write(folder, plugins.PLAIN.replace(before, after))
    with plugins.beside(folder), caplog.at_level(logging.WARNING):
        for dtype in ("bf16", "fp16"):
            problem = replace(PROBLEM, dtype=dtype)
            assert {kernel.source for kernel in backends.kernels(problem)} >= {"cutlass3x", "cute"}
    (said,) = {message for message in caplog.messages if "is left out for" in message}
    assert reason in said
    assert "\n" not in said


def test_of_two_packages_with_one_name_the_first_counts(folder: Path) -> None:
    plugins.write(folder)
    plugins.write(folder, IMPORTED, "plain = zz_plugin:BACKEND", package="zz_plugin")
    with plugins.beside(folder):
        assert list(registry.plugins().backends) == ["plain"]
        assert list(registry.plugins().refused) == ["zz_plugin:BACKEND"]


def test_the_doctor_names_it(folder: Path) -> None:
    assert checked().detail == "no other package adds kernels"
    plugins.write(folder)
    with plugins.beside(folder):
        assert (checked().status, checked().detail) == (checks.CheckStatus.OK, "plain")


def test_it_can_be_imported_before_gemmsmith(folder: Path) -> None:
    plugins.write(folder)
    with plugins.beside(folder):
        __import__("plain_plugin")
        assert backends.backend_of(plain(64)) is registry.plugins().backends["plain"]
        assert isinstance(plain(64), PluginKernel)
