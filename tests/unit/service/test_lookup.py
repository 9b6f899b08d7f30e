"""Which answer comes first, and what it carries of the winner's record."""

from __future__ import annotations

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Config, Match, Use
from gemmsmith.core.problem import Problem
from service.lookup.find import ANY, EXACT, MEASURED, find
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tests.support.winners_in_memory import WinnersInMemory
from tuner.search.predict import predict

KNOWN = Problem(m=4096, n=4096, k=4096)
NAMES = ("Memset (Device)", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN")


def ask(
    source: WinnersInMemory, problem: Problem, accepted: frozenset[Match] = ANY
) -> Answer | None:
    return find(source, problem, H200, accepted=accepted)


def test_an_exact_winner_comes_before_a_neighbour_and_that_before_a_prediction() -> None:
    near = replace(KNOWN, m=8192)
    far = replace(KNOWN, m=2**20)
    unaligned = replace(KNOWN, k=4095)
    matches = [
        (KNOWN, Match.EXACT),
        (near, Match.NEAREST),
        (far, Match.PREDICTED),
        (unaligned, Match.PREDICTED),  # near, but the winner's kernel is illegal for it
        (replace(KNOWN, batch=2), Match.PREDICTED),
    ]
    for problem, match in matches:
        answer = present(ask(WinnersInMemory([winner(KNOWN)]), problem))
        assert (answer.problem, answer.match) == (problem, match)
    for problem, _ in matches[1:]:
        assert ask(WinnersInMemory([winner(KNOWN)]), problem, EXACT) is None
    for problem, match in matches:
        measured = ask(WinnersInMemory([winner(KNOWN)]), problem, MEASURED)
        assert (measured and measured.match) == (None if match is Match.PREDICTED else match)
    answer = present(ask(WinnersInMemory([winner(KNOWN), winner(near)]), near))
    assert answer.match is Match.EXACT


def test_a_prediction_is_the_cost_models_and_measured_by_nobody() -> None:
    expected = present(predict(KNOWN, H200))
    answer = ask(WinnersInMemory([]), KNOWN)
    kernel = expected.candidate.kernel
    assert answer == Answer(
        problem=KNOWN,
        match=Match.PREDICTED,
        measured=None,
        distance=None,
        use=Use.CUBLAS,
        config=Config(kernel=kernel, launch=expected.candidate.launch),
        statistics=None,
        baseline=None,
        speedup=None,
        correctness=None,
        conditions=None,
        ties=(),
        device=H200,
        environment=None,
        revision=None,
        promoted_at=None,
        replayed=False,
        predicted_us=expected.us,
    )
    compiled = present(ask(WinnersInMemory([], str.upper), KNOWN))
    assert compiled.config is not None
    assert compiled.config.pack == kernel.name.upper()


def test_no_legal_kernel_is_no_answer() -> None:
    assert ask(WinnersInMemory([]), Problem(m=2**31 - 1, n=2**31 - 1, k=1)) is None


def test_an_answer_names_what_cublas_ran_and_what_power_costs() -> None:
    source = WinnersInMemory([replace(winner(KNOWN), baseline_kernels=NAMES, power_penalty=1.05)])
    for problem, match in ((KNOWN, Match.EXACT), (replace(KNOWN, m=8192), Match.NEAREST)):
        answer = present(ask(source, problem))
        assert (answer.match, answer.baseline_kernels) == (match, NAMES)
        assert answer.power_penalty == 1.05
