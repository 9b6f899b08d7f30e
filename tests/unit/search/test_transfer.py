"""Seeds: winners of near problems lead, across bf16 and fp16 too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tuner.backends import kernels
from tuner.search.hints import near_winners
from tuner.store import Store

ASKED = Problem(m=4096, n=4096, k=4096, dtype=DType.FP16)


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


def test_a_bf16_winner_leads_as_its_fp16_twin(store: Store) -> None:
    far = winner(replace(ASKED, m=1024))
    twin = winner(replace(ASKED, dtype=DType.BF16))
    third = kernels(ASKED)[2]
    far = replace(far, candidate=Candidate(kernel=third))
    store.promote(far)
    store.promote(twin)
    seeds = near_winners(store, ASKED, H200.slug)
    assert [seed.kernel for seed in seeds] == [kernels(ASKED)[0], third]


def test_a_near_winner_that_is_illegal_here_is_left_out(store: Store) -> None:
    store.promote(winner(ASKED))
    assert near_winners(store, replace(ASKED, k=4097), H200.slug) == []


def test_fp8_winners_stay_among_themselves(store: Store) -> None:
    store.promote(winner(ASKED))
    fp8 = replace(ASKED, dtype=DType.FP8_E4M3, layout=Layout.TN)
    assert near_winners(store, fp8, H200.slug) == []
