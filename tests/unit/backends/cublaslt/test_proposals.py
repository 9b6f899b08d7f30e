"""Listing the library's algorithms, and those near one of them."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest

from gemmsmith.core.launch import Algorithm
from gemmsmith.core.operation import Layout, Scaling
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime import Arguments, LoadedKernel
from tests.support.libraries import library_version
from tests.support.products import product
from tuner.backends.cublaslt.build import INCLUDE
from tuner.backends.cublaslt.operations import LibraryOperation
from tuner.backends.cublaslt.proposals import Proposal, RawProposal, propose, variants
from tuner.backends.cublaslt.renewing import renewed, settings, version_of
from tuner.backends.cutlass import HEADERS

from .conftest import Fakes

BF16 = LibraryOperation(a="bf16", b="bf16", d="bf16", layout=Layout.TN)
FP8 = LibraryOperation(a="e4m3", b="e4m3", d="bf16", layout=Layout.TN, scales=Scaling.ROW)
M, N, K = 64, 48, 1024
VERSION = 139900


@pytest.fixture
def asked(fakes: Fakes) -> tuple[LoadedKernel, Arguments]:
    return fakes.pack.kernel(BF16.name), product(BF16, M, N, K).arguments()


def test_the_heuristics_list_comes_whole_and_in_order(
    asked: tuple[LoadedKernel, Arguments],
) -> None:
    proposed = propose(*asked)
    assert [(each.id, each.tile_id, each.split_k) for each in proposed] == [
        (66, 21, 1),
        (66, 22, 2),
        (67, 20, 1),
    ]
    assert [each.workspace_bytes for each in proposed] == [0, 2 * M * N * 4, 0]
    first = proposed[0]
    assert first.algorithm == (66, 21, 1, 2, 1, 0, 0, 0)
    assert (first.library_version, first.stages_id, first.cluster_id) == (VERSION, 1, 2)
    assert first.waves == pytest.approx(2.1)


def test_no_more_are_listed_than_asked_for_nor_beyond_the_workspace(
    asked: tuple[LoadedKernel, Arguments],
) -> None:
    kernel, arguments = asked
    assert len(propose(kernel, arguments, most=2)) == 2
    arguments.workspace_limit = 2 * M * N * 4 - 1
    assert [each.split_k for each in propose(kernel, arguments)] == [1, 1]


def test_what_the_library_cannot_do_has_no_proposals(fakes: Fakes) -> None:
    unaligned = product(FP8, M, N, K + 1).arguments()
    assert propose(fakes.pack.kernel(FP8.name), unaligned) == []
    assert propose(fakes.pack.kernel(FP8.name), product(FP8, M, N, K).arguments())


def test_variants_are_legal_different_and_nearest_first(
    asked: tuple[LoadedKernel, Arguments],
) -> None:
    kernel, arguments = asked
    start = propose(kernel, arguments)[0]
    proposed = variants(kernel, arguments, start.chosen)
    algorithms = [each.algorithm for each in proposed]
    assert len(set(algorithms)) == len(algorithms)
    assert start.algorithm not in algorithms
    assert not any(arguments.algorithm)  # the caller's are its own
    for each in proposed:
        each.launch(arguments)
        assert kernel.can_implement(arguments) == 0, each
    # Of id 66: any one thing changed, and tiles with clusters, stages and splits.
    near = [each for each in proposed if each.id == 66]
    assert {each.tile_id for each in near} == {20, 21, 22, 23}
    assert {each.cluster_id for each in near} == {0, 2, 3}
    assert {each.stages_id for each in near} == {0, 1, 2}
    assert {(each.split_k, each.reduction) for each in near} == {(1, 0), (2, 2), (3, 2), (4, 2)}
    assert {each.swizzle for each in near} == {0, 1}
    assert all(_distance(start, each) <= 2 for each in near)
    ones = [_distance(start, each) == 1 for each in near]
    assert ones == sorted(ones, reverse=True)
    # The other id that the library has, from its defaults; never one that it does not have.
    assert {each.id for each in proposed} == {66, 67}
    assert {each.tile_id for each in proposed if each.id == 67} == {20, 21, 22, 23}
    assert [each.id for each in proposed] == sorted(each.id for each in proposed)


def test_variants_respect_the_limits(asked: tuple[LoadedKernel, Arguments]) -> None:
    kernel, arguments = asked
    start = propose(kernel, arguments)[0]
    assert len(variants(kernel, arguments, start.chosen, most=5)) == 5
    arguments.workspace_limit = 1
    assert all(each.split_k == 1 for each in variants(kernel, arguments, start.chosen))


def test_short_sums_are_not_split(fakes: Fakes) -> None:
    kernel, arguments = fakes.pack.kernel(BF16.name), product(BF16, M, N, 300).arguments()
    start = propose(kernel, arguments)[0]
    assert {each.split_k for each in variants(kernel, arguments, start.chosen)} == {1, 2}


def test_variants_of_another_version_s_algorithm_are_refused(
    asked: tuple[LoadedKernel, Arguments],
) -> None:
    kernel, arguments = asked
    start = replace(propose(kernel, arguments)[0], library_version=VERSION + 1)
    with pytest.raises(LaunchFailed, match="another version"):
        variants(kernel, arguments, start.chosen)


def test_wrong_arguments_are_told(asked: tuple[LoadedKernel, Arguments]) -> None:
    kernel, arguments = asked
    arguments.lda = 1
    with pytest.raises(LaunchFailed, match="layout"):
        propose(kernel, arguments)


def test_the_structure_matches_the_header(tmp_path: Path) -> None:
    names = [name for name, *_ in RawProposal._fields_]
    prints = "".join(f'printf("%d ", (int)offsetof(gs_proposal, {name}));' for name in names)
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <cublaslt/proposal.h>\n"
        f'int main(void) {{ {prints} printf("%d", (int)sizeof(gs_proposal)); return 0; }}\n'
    )
    subprocess.run(
        ["gcc", f"-I{HEADERS}", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True
    )
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    expected = [getattr(RawProposal, name).offset for name in names]
    assert [int(each) for each in said.split()] == [*expected, ctypes.sizeof(RawProposal)]


def test_a_process_without_the_library_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.libraries._NAMES", ("libgemmsmith_none.so.13",))
    assert library_version() is None


def test_the_version_is_that_of_the_library_loaded(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.libraries._NAMES", ("none.so", "fake_cublaslt.so"))
    assert library_version() == VERSION


def _distance(one: Proposal, other: Proposal) -> int:
    """How many of the things that can be set differ; a split counts with its reduction."""
    apart = ("algorithm", "library_version", "workspace_bytes", "reduction", "waves", "id")
    names = [each.name for each in fields(Proposal) if each.name not in apart]
    return sum(getattr(one, name) != getattr(other, name) for name in names)


def test_an_algorithm_of_another_version_is_made_anew_from_its_settings(
    asked: tuple[LoadedKernel, Arguments], fakes: Fakes
) -> None:
    for proposal in propose(*asked):
        old = replace(proposal, library_version=VERSION - 100, workspace_bytes=0).chosen
        (anew,) = renewed(*asked, old, fakes.library)
        assert anew.chosen == proposal.chosen
    assert version_of(fakes.library) == VERSION


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 68), (0, 99), (1, 30), (2, 7), (3, 9), (4, 9), (6, 5), (7, 3)],
    ids=[
        "not initialized",
        "no such id",
        "tile",
        "stages",
        "cluster",
        "split",
        "swizzle",
        "custom",
    ],
)
def test_settings_that_this_version_does_not_take_give_nothing(
    asked: tuple[LoadedKernel, Arguments], fakes: Fakes, word: int, value: int
) -> None:
    words = [*propose(*asked)[0].algorithm]
    words[word] = value
    assert renewed(*asked, Algorithm.of(VERSION - 100, words), fakes.library) == []


def test_more_workspace_than_the_limit_is_refused(
    asked: tuple[LoadedKernel, Arguments], fakes: Fakes
) -> None:
    kernel, arguments = asked
    split = next(each for each in propose(kernel, arguments) if each.split_k > 1)
    arguments.workspace_limit = split.workspace_bytes - 1
    assert renewed(kernel, arguments, split.chosen, fakes.library) == []


def test_all_settings_are_read(fakes: Fakes) -> None:
    words = (66, 21, 1, 2, 4, 3, 1, 6)
    read = settings(fakes.library, words)
    assert read == {0: 66, 1: 21, 2: 4, 3: 3, 4: 1, 5: 6, 6: 1, 7: 0, 8: 2}
