"""Lookups of new problems get the answers that they always got, one by one and in batches.

`cold_answers.xz` holds the answers to random problems, recorded on 2026-11-23. A change of the
space, the cost model or the neighbours on purpose changes them:
`python -m tests.unit.service.test_cold_answers` writes them anew.
"""

from __future__ import annotations

import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks import million
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from service.settings import Settings
from tests.support.candidates import EXACT
from tests.support.replacing import replace
from tests.support.serving import H100, H200, new_settings, promote, running, winner
from tuner.backends import launches, offered
from tuner.errors import NoLegalCandidate
from tuner.exchange import export_winners
from tuner.store import Store
from tuner.trial import Winner

FROZEN = Path(__file__).with_name("cold_answers.xz")
A100 = replace(
    H200, name="NVIDIA A100", arch="sm80", sm_count=108, memory_bytes=80 * 10**9, l2_bytes=40 << 20
)
DTYPES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "tf32", "bf16.out_f32.accumulate")
WIDTHS = {"tf32": 4, "int8": 16, "fp8_e4m3": 16, "fp8_e5m2": 16}
PIECE = 100


def problems(count: int, seed: int) -> list[Problem]:
    """Random ones of all kinds: aligned and not, few tokens and many, batches."""
    draw = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        dtype = draw.choice(DTYPES)
        layout = draw.choice(("tn", "tn", "tt", "nt", "nn"))
        step = draw.choice((WIDTHS.get(dtype, 8),) * 3 + (1, 2, 4, 64))
        m, n, k = (
            max(1, int(2 ** draw.uniform(low, 15)) // by) * by
            for low, by in ((0, draw.choice((1, step))), (3, step), (3, step))
        )
        body: dict[str, Any] = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout}
        try:
            problem = Problem(**body, batch=draw.choice((1, 1, 1, 1, 2, 12, 100)))
        except InvalidProblem:
            continue
        if problem.operand_bytes < 70 * 10**9:
            found[problem] = None
    return list(found)


def winners(count: int, seed: int) -> list[Winner]:
    """Made up: any kernel the problem is offered in any of its launches, or cuBLAS."""
    draw = random.Random(seed)
    found = []
    for problem in problems(count, seed):
        try:
            kernel = draw.choice(offered(problem, H200))
        except NoLegalCandidate:
            continue
        known = launches(kernel, problem, H200)
        if not known:
            continue
        made = winner(replace(problem, dtype="bf16", layout="tn"))
        if problem.operation.a.is_integer:
            made = replace(made, correctness=replace(EXACT, tolerance=0.0))
        found.append(
            replace(
                made,
                problem=problem,
                candidate=Candidate(kernel=kernel, launch=draw.choice(known)),
                use=draw.choice((Use.CUTLASS, Use.CUTLASS, Use.CUBLAS)),
            )
        )
    return found


def near(known: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """Problems around those that have winners."""
    draw = random.Random(seed)
    return [
        replace(base, m=base.m + draw.randrange(200), n=base.n + 8 * draw.randrange(9))
        for base in (draw.choice(known) for _ in range(count))
    ]


def few(folder: Path) -> tuple[Settings, list[Problem]]:
    """Some winners: neighbours are looked for among all of them."""
    settings = new_settings(folder)
    made = winners(250, seed=1)
    promote(settings, *made, winner(Problem(m=64, n=64, k=64), device=H100))
    promote(settings, winner(Problem(m=64, n=64, k=64), device=A100))
    return settings, problems(2000, seed=2) + near([each.problem for each in made], 500, seed=3)


def many(folder: Path) -> tuple[Settings, list[Problem]]:
    """Thousands of winners."""
    settings = new_settings(folder)
    promote(settings, *winners(30, seed=4))
    with Store.open(settings.database) as store:
        export_winners(store, folder / "winners.jsonl")
    path = folder / "gemmsmith.db"
    path.unlink()
    million.fill(path, [folder / "winners.jsonl"], 6000)
    return settings, near(million.sample(path, 800), 500, seed=5) + problems(100, seed=6)


def answers(settings: Settings, asked: Sequence[Problem], device: str) -> list[str]:
    """A line for each problem: what matters of its answer, alone and in a batch."""
    lines = []
    names = ("m", "n", "k", "batch", "dtype", "layout")
    with running(settings) as client:
        client.timeout = 120.0
        for start in range(0, len(asked), PIECE):
            body = [
                {name: getattr(problem, name) for name in names}
                for problem in asked[start : start + PIECE]
            ]
            reply = client.post("/best:batch", json={"problems": body, "device": device})
            for query, batched in zip(
                body, reply.raise_for_status().json()["answers"], strict=True
            ):
                answer = client.get("/best", params={**query, "device": device}).json()
                predicted = answer.get("match") == "predicted"
                assert summary(batched) == ("404" if predicted else summary(answer))
                lines.append(summary(answer))
    return lines


def summary(answer: dict[str, Any]) -> str:
    if "match" not in answer:
        return str(answer["status"])
    config = answer["config"]
    launch = config and "/".join(str(value) for value in config["launch"].values())
    measured = answer["measured"] and "/".join(map(str, answer["measured"].values()))
    words = (
        answer["match"], answer["use"], measured, answer["distance"],
        config and config["kernel"]["name"], launch, answer.get("predicted_us"),
    )  # fmt: skip
    return " ".join(map(str, words))


CASES = {
    "few": (few, H200.slug),
    "few-h100": (few, H100.slug),
    "few-a100": (few, A100.slug),
    "many": (many, H200.slug),
}


def made(name: str, folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    build, device = CASES[name]
    settings, asked = build(folder)
    if device != H200.slug:
        asked = asked[:500]
    return [f"{name} {line}" for line in answers(settings, asked, device)]


@pytest.mark.parametrize(
    "name",
    ["many", *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "many")],
)
def test_answers_are_what_they_were(name: str, tmp_path: Path) -> None:
    frozen = lzma.decompress(FROZEN.read_bytes()).decode().splitlines()
    wanted = [line for line in frozen if line.split()[0] == name]
    assert len(wanted) >= 500
    assert [split(line) for line in made(name, tmp_path / "made")] == [
        (text, us if us is None else pytest.approx(us, rel=1e-9))  # processors differ in powers
        for text, us in map(split, wanted)
    ]


def split(line: str) -> tuple[str, float | None]:
    """An answer without the predicted time, and that."""
    text, _, us = line.rpartition(" ")
    return (text, None) if us == "None" else (text, float(us))


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        lines = [line for name in CASES for line in made(name, Path(temporary) / name)]
    FROZEN.write_bytes(lzma.compress("\n".join(lines).encode()))
