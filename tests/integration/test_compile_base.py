"""`gemmsmith compile --base`: the kernels that win most often, ahead of any problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import Result

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import DType, Problem
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.commands import run, use
from tests.support.machines import document
from tests.support.replacing import replace
from tests.support.serving import H100, H200, new_settings, packs_of, promote, running, winner
from tuner.backends import kernels
from tuner.compile import Toolchain
from tuner.search.base import DTYPES, base_kernels
from tuner.store import Store
from tuner.trial import Winner

PROBLEM = Problem(m=64, n=64, k=64)
MEMBERS = kernels(PROBLEM)[:6]


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    made = fake_nvcc.toolchain(tmp_path / "toolchain")
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: made)
    return made


@pytest.fixture
def settings(tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A machine without a GPU that knows a winner of an H200 and one of an H100."""
    made = use(new_settings(tmp_path), monkeypatch)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    promote(made, _won_by(MEMBERS[3], H200), _won_by(MEMBERS[4], H100))
    return made


class Choice:
    """In `base_kernels`'s place: a short list, and what was asked."""

    def __init__(self, chosen: Sequence[Kernel]) -> None:
        self.chosen = chosen
        self.asked: list[tuple[str, tuple[DType, ...], list[str], int]] = []

    def __call__(
        self, device: DeviceModel, dtypes: Sequence[DType], winners: Sequence[Winner], limit: int
    ) -> list[Kernel]:
        won = [item.candidate.kernel.name for item in winners if item.candidate]
        self.asked.append((device.slug, tuple(dtypes), won, limit))
        return list(self.chosen[:limit])


@pytest.fixture
def choice(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Choice:
    made = Choice(MEMBERS)
    monkeypatch.setattr("tuner.search.base.base_kernels", made)
    return made


def _won_by(kernel: Kernel, device: DeviceModel) -> Winner:
    candidate = Candidate(kernel=kernel, launch=Launch())
    return replace(winner(PROBLEM, device=device), candidate=candidate)


def compile_(*arguments: object, code: int = 0) -> Result:
    return run("compile", "--base", *arguments, code=code)


def test_the_base_of_a_type_is_compiled_and_weighed(settings: Settings, tmp_path: Path) -> None:
    found = document(compile_("--dtype", "fp8_e4m3", "--limit", 6, "--device", H200.slug, "--json"))
    chosen = base_kernels(H200, [DType.FP8_E4M3], (), 6)
    assert set(found["kernels"]) == {kernel.name for kernel in chosen}
    assert found["counts"]["compiled"] == len(chosen) == 6
    assert found["seconds"] > 0
    assert found["bytes"] == sum(path.stat().st_size for path in settings.packs.glob("*.so"))
    units = fake_nvcc.calls(tmp_path / "toolchain")
    assert units > 0
    with Store.open(settings.database) as store:
        assert {store.pack_for(kernel.name) for kernel in chosen} == set(found["kernels"].values())
    again = compile_("--dtype", "fp8_e4m3", "--limit", 6, "--device", H200.slug)
    assert (
        f"0 compiled, 6 compiled before, 0 failed, of 6 kernels, in {units} packs (" in again.stdout
    )
    assert f" ({found['bytes'] / 1e6:.1f} MB), " in again.stdout
    assert "choosing the base for NVIDIA H200, fp8_e4m3" in again.stderr
    assert fake_nvcc.calls(tmp_path / "toolchain") == units


def test_what_is_asked_by_default_and_in_words(choice: Choice) -> None:
    compile_("--device", H200.slug)
    compile_("--device", H100.slug, "--dtype", "fp16,fp8_e5m2", "--limit", 2)
    assert choice.asked == [
        (H200.slug, DTYPES, [MEMBERS[3].name], None),
        (H100.slug, (DType.FP16, DType.FP8_E5M2), [MEMBERS[4].name], 2),
    ]
    assert set(DTYPES) == {DType.BF16, DType.FP16, DType.FP8_E4M3}


def test_an_unknown_device_is_named_with_those_there_are(choice: Choice) -> None:
    said = compile_("--device", "h900", code=1).stderr
    assert said.startswith("error: no device 'h900'; there is ")
    assert H100.slug in said
    assert not choice.asked


def test_a_kernel_that_does_not_compile_is_reported(
    choice: Choice, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = fake_nvcc.toolchain(tmp_path / "bad", bad=[MEMBERS[1].name])
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: bad)
    found = document(compile_("--json", code=1))
    assert (found["counts"]["compiled"], found["counts"]["failed"]) == (5, 1)
    assert [failure["kernel"] for failure in found["failures"]] == [MEMBERS[1].name]
    packs = {path.stem for path in settings.packs.glob("*.so")}
    assert found["bytes"] == sum((settings.packs / f"{name}.so").stat().st_size for name in packs)


def test_the_base_comes_from_a_service_that_has_it(
    choice: Choice, settings: Settings, toolchain: Toolchain, tmp_path: Path
) -> None:
    there = new_settings(tmp_path / "there")
    compiled = tmp_path / "unit.so"
    compiled.write_bytes(b"".join(kernel.name.encode() + b"\0" for kernel in MEMBERS[:2]))
    packs_of(there).publish(compiled, MEMBERS[:2], toolchain)
    with running(there) as http:
        found = document(compile_("--from", http.base_url, "--json"))
    assert (found["counts"]["fetched"], found["counts"]["compiled"]) == (2, 4)
    assert found["bytes"] == sum(path.stat().st_size for path in settings.packs.glob("*.so"))
