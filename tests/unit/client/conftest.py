"""A real HTTP server that misbehaves on demand, and answers for it to serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gemmsmith import Client
from gemmsmith.answers.answer import Answer, Ratio, Statistics
from gemmsmith.core.config import Config, Match, Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tests.unit.client.misbehaving import Misbehaving, Say, misbehaving, never_wait

H200 = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=150 * 10**9, l2_bytes=60 * 2**20
)


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    with misbehaving() as running:
        yield running


@pytest.fixture
def client(server: Misbehaving, tmp_path: Path) -> Iterator[Client]:
    with Client(server.url, timeout=5, retries=2, cache_dir=tmp_path) as opened:
        never_wait(opened)
        yield opened


@pytest.fixture
def answer() -> Answer:
    problem = Problem(m=256, n=4096, k=4096)
    kernel = replace(KERNEL, name="cutlass3x_sm90_example")
    timing = Statistics(median_us=15.7, ci_low_us=15.6, ci_high_us=15.8, samples=25)
    return Answer(
        problem=problem,
        match=Match.EXACT,
        measured=problem,
        distance=0.0,
        use=Use.CUTLASS,
        config=Config(kernel=kernel, launch=Launch()),
        statistics=timing,
        baseline=replace(timing, median_us=18.6),
        speedup=Ratio(median=1.18, ci_low=1.17, ci_high=1.19),
        correctness=None,
        conditions=None,
        ties=(),
        device=H200,
        environment=Environment(
            gpu_uuid="GPU-0",
            driver="580",
            cuda="13.0",
            cutlass="4.2.0",
            compiler="nvcc 13.0.88",
            torch="2.13.0",
            cublas="13.1",
            gemmsmith="0.1.0",
        ),
        revision=1,
        promoted_at="2026-11-21T00:00:00Z",
        replayed=False,
    )


@pytest.fixture
def served(answer: Answer) -> Say:
    """The answer as the service sends it, with its links."""
    body = msgspec.to_builtins(answer) | {"links": {"self": {"href": "/best"}}}
    return Say(body=msgspec.json.encode(body), headers={"ETag": 'W/"one"'})
