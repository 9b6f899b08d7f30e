"""An answer carries what the winner's record says of cuBLAS."""

from __future__ import annotations

from dataclasses import replace

from gemmsmith.answer import Match
from gemmsmith.problem import Problem
from service.lookup import Snapshot, find
from tests.support.serving import H200, winner

KNOWN = Problem(m=4096, n=4096, k=4096)
NAMES = ("Memset (Device)", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN")


def test_an_answer_names_what_cublas_ran() -> None:
    source = Snapshot([replace(winner(KNOWN), baseline_kernels=NAMES)])
    for problem, match in ((KNOWN, Match.EXACT), (replace(KNOWN, m=8192), Match.NEAREST)):
        answer = find(source, problem, H200.slug, exact=False, pack_of=lambda _: None)
        assert answer is not None
        assert (answer.match, answer.baseline_kernels) == (match, NAMES)
