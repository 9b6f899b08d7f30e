"""Recorded profiles: tables of ncu that become profiles, and the ten problems."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import profiles
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from tests.support import played_ncu
from tests.support.shipped import SLUG, shipped_files
from tuner.exchange import read_winners
from tuner.profiling import ncu
from tuner.profiling.files import file_in, read_profiles, shipped_folder

DEEP = played_ncu.TABLES / "2026-11-25-h200-ncu-1536x2048x32768x128-bf16.group_depth.csv"


def test_a_table_becomes_a_profile_of_the_winner_with_its_kernel(tmp_path: Path) -> None:
    assert profiles.main(["add", str(DEEP), "-o", str(tmp_path)]) == 0
    [made] = read_profiles(file_in(tmp_path, SLUG))
    assert str(made.problem) == "128×1536×2048×32768 bf16.group_depth nt"
    assert made.device.slug == SLUG
    assert made.recorded_at.startswith("2026-11-25")
    preparing, product = made.candidate.kernels
    assert "prepare_groups" in preparing.name
    assert (product.waves, product.registers, product.us) == (1.0, 168, 498.72)
    assert made.candidate.main == product
    assert "prepare_grouped_gemm_data" in made.default.kernels[0].name
    assert made.default.main.us == 531.2


def test_the_shipped_tables_are_the_shipped_profiles() -> None:
    """All numbers of the five tables are in configs/profiles, unless newer ones replaced them."""
    shipped = read_profiles(file_in(shipped_folder(), SLUG))
    for path in played_ncu.TABLES.glob("*-ncu-*.csv"):
        kernels = ncu.read(path.read_text())
        sizes = [int(size) for size in re.findall(r"ncu-(\S+?)-", path.name)[0].split("x")]
        same = (p for p in shipped if [p.problem.m, p.problem.n, p.problem.k] == sizes[:3])
        made = next(same)
        if made.tool == "ncu":
            durations = {kernel.us for kernel in kernels}
            for side in (made.candidate, made.default):
                assert {kernel.us for kernel in side.kernels} <= durations


def test_a_table_of_another_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the winner is cublaslt"):
        profiles.main(["add", str(played_ncu.SHORT_K), "-o", str(tmp_path)])
    nameless = tmp_path / "table.csv"
    shutil.copy(DEEP, nameless)
    with pytest.raises(ValueError, match="is not named DATE"):
        profiles.main(["add", str(nameless), "-o", str(tmp_path)])


def test_files_of_profiles_are_added(tmp_path: Path) -> None:
    shipped = file_in(shipped_folder(), SLUG)
    assert profiles.main(["add", str(shipped), "-o", str(tmp_path)]) == 0
    assert file_in(tmp_path, SLUG).read_bytes() == shipped.read_bytes()


def test_ten_kinds_of_shipped_winners_are_recorded() -> None:
    problems = [Problem.parse(text) for text in profiles.PROBLEMS]
    assert len(set(problems)) == 10
    for_h200 = [file for file in shipped_files() if file.name.startswith(SLUG)]
    winners = {w.problem: w for file in for_h200 for w in read_winners(file)}
    for problem in problems:
        assert not winners[problem].use.is_default, problem


def test_without_a_gpu_nothing_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiles.main(["record", "-o", str(tmp_path / "profiles.jsonl")]) == 2
    assert "no CUDA GPU on this machine" in capsys.readouterr().out


def test_the_kernels_of_all_device_models_are_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[str] = []

    def find_packs(kernels: list[AnyKernel], *_: object) -> tuple[dict[str, Path], dict[str, str]]:
        built.extend(kernel.name for kernel in kernels)
        return {name: Path("pack.so") for name in built[1:]}, {built[0]: "does not compile"}

    monkeypatch.setattr(profiles, "find_packs", find_packs)
    assert profiles.main(["build"]) == 1
    assert len(set(built)) == len(built) > 10
    said = capsys.readouterr().out
    assert f"{built[0]}: does not compile" in said
    assert said.count(": pack.so") == len(built) - 1


def test_each_problem_is_written_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played_ncu.install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(profiles, "local_gpu", device)
    pack = tmp_path / "pack.so"
    monkeypatch.setattr(
        profiles, "find_packs", lambda kernels, *_: ({k.name: pack for k in kernels}, {})
    )
    output = tmp_path / "profiles.jsonl"
    problems = ("4096x6144x1024", "8x8x8", "16x4096x14336")
    words = [word for problem in problems for word in ("--problem", problem)]
    assert profiles.main(["record", *words, "-o", str(output)]) == 1
    said = capsys.readouterr().out
    assert "bf16 tn: 10.91 against 9.22 µs; 202 registers, not known by the pack" in said
    assert "8×8×8 bf16 tn: no winner on NVIDIA H200: tune it first" in said
    assert [p.problem.m for p in read_profiles(output)] == [16, 4096]
    late = ["record", *words, "-o", str(output), "--time-limit", "0"]
    assert profiles.main(late) == 1
    assert capsys.readouterr().out.count("no time left") == 3


def device() -> DeviceModel:
    return read_profiles(shipped_folder() / f"{SLUG}.jsonl")[0].device


def test_a_problem_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        profiles.main(["record", "--problem", "8x8x8 bf17", "-o", str(tmp_path / "x")])
    with pytest.raises(InvalidProblem):
        Problem.parse("8x8x8 bf17")
