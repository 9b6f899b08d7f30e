"""The shipped winners, as a stranger gets them: imported by `serve`, asked for by the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith import Client, Match, Use
from gemmsmith.core.problem import DType, Problem
from gemmsmith.signing import Trusted
from service.cli.serve import prepare
from service.settings import Settings
from tests.support.serving import new_settings, running
from tuner.backends import refusal
from tuner.exchange import read_winners
from tuner.store.statement import is_believed
from tuner.suites import load
from tuner.trial import Winner

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DTYPES = (DType.BF16, DType.FP16, DType.FP8_E4M3)


@pytest.fixture(scope="module")
def everywhere() -> list[Winner]:
    return [w for path in (CONFIGS / "winners").glob("*.jsonl") for w in read_winners(path)]


@pytest.fixture(scope="module")
def shipped(everywhere: list[Winner]) -> dict[Problem, Winner]:
    """Those of the model that answers where a request names none."""
    model = Settings.load({}).default_model
    return {winner.problem: winner for winner in everywhere if winner.device.slug == model}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    settings = new_settings(tmp_path_factory.mktemp("shipped"), winners=CONFIGS / "winners")
    prepare(settings)
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        yield client


def suite_problems() -> list[Problem]:
    suite = load(CONFIGS / "suites" / "llm.toml")
    return [problem for dtype in DTYPES for _, problem in suite.problems(dtype)]


def test_every_problem_of_the_suite_has_a_shipped_winner(shipped: dict[Problem, Winner]) -> None:
    assert [problem for problem in suite_problems() if problem not in shipped] == []


def test_every_shipped_winner_is_verified_paired_and_says_where_it_was_measured(
    everywhere: list[Winner],
) -> None:
    for winner in everywhere:
        problem = winner.problem
        assert winner.candidate is not None, problem
        assert refusal(winner.candidate.kernel, problem) is None, problem
        assert winner.correctness is not None, problem
        assert winner.correctness.error <= winner.correctness.tolerance, problem
        assert winner.statistics is not None, problem
        assert winner.baseline is not None, problem
        assert winner.statistics.samples >= 10, problem
        assert winner.speedup is not None, problem
        assert winner.conditions is not None, problem
        assert winner.conditions.sm_clock_mhz > 0, problem
        assert winner.environment.driver, problem
        assert winner.environment.gpu_uuid, problem
        assert not winner.replayed, problem
        # Never slower: CUTLASS only where the interval of its speed-up lies wholly above 1, or
        # where an order of sums is demanded, which the default does not keep.
        is_faster = winner.use is Use.CUBLAS or winner.speedup.ci_low > 1.0
        assert is_faster or problem.operation.summation is not None, problem


def test_every_shipped_winner_is_signed_by_a_key_that_is_shipped_with_it(
    shipped: dict[Problem, Winner],
) -> None:
    trusted = Trusted.load(Settings.load({}).shipped_keys)
    for path in (CONFIGS / "winners").glob("*.jsonl"):
        for winner in read_winners(path):
            assert is_believed(winner, trusted), (path, winner.problem)
    some = next(iter(shipped.values()))
    assert not is_believed(some, Trusted())


def test_the_client_reads_every_answer_of_the_suite_from_a_running_service(
    client: Client, shipped: dict[Problem, Winner]
) -> None:
    for problem in suite_problems():
        answer = client.best(
            problem.m,
            problem.n,
            problem.k,
            batch=problem.batch,
            dtype=problem.dtype,
            layout=problem.layout,
            exact=True,
        )
        winner = shipped[problem]
        assert answer.match is Match.EXACT
        assert answer.use is winner.use
        assert answer.config is not None
        assert winner.candidate is not None
        assert answer.config.kernel == winner.candidate.kernel
        assert answer.config.launch == winner.candidate.launch
        assert answer.statistics == winner.statistics
        assert answer.environment == winner.environment


def test_one_batch_answers_the_whole_suite_alike(client: Client) -> None:
    problems = suite_problems()
    answers = client.best_many(problems)
    assert [getattr(answer, "problem", answer) for answer in answers] == problems
