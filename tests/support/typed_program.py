"""Calls of a user's program, for `mypy --strict`: see tests/integration/test_typing.py."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, assert_type

import numpy as np
import torch

import gemmsmith
from gemmsmith import (
    Answer,
    AsyncClient,
    AsyncTuningJob,
    Client,
    JobEvent,
    JobStatus,
    NotTuned,
    Operation,
    Problem,
    Ratio,
    TunedAnswer,
    TuningJob,
)


def lookups(client: Client) -> Iterator[Answer]:
    """Calls with an element type or a size."""
    problem = Problem(4096, 6144, 1024, dtype=torch.bfloat16, layout="nt")
    assert_type(problem.m, int)
    assert_type(problem.to_dict(), dict[str, Any])
    assert_type(Problem(np.int64(8), 8, 8, batch=2, dtype="fp8"), Problem)
    assert_type(Problem.parse("4096x6144x1024"), Problem)
    assert_type(Operation.of(torch.bfloat16, out=torch.float32), Operation)
    try:
        answer = client.best(np.int64(4096), 6144, 1024, dtype=torch.bfloat16)
    except NotTuned as error:
        assert_type(error.call, str)
        job = client.tune(4096, 6144, 1024, dtype="bfloat16")
        assert_type(job, TuningJob)
        answer = job.wait(progress=True)
    assert_type(answer.tflops, float | None)
    if answer.config is not None:
        assert_type(answer.config.kernel.name, str)
    yield answer


async def awaited(client: AsyncClient) -> Answer:
    """The same calls, awaited."""
    job = await client.tune(4096, 6144, 1024, dtype="bfloat16", wait=True)
    assert_type(job, AsyncTuningJob)
    assert_type(await job.retry(), AsyncTuningJob)
    assert_type(await job.wait(progress=True), TunedAnswer)
    async for event in job.events():
        assert_type(event, JobEvent)
    async for status in client.jobs(state="done", limit=1):
        assert_type(status, JobStatus)
    async for row in client.results(dtype="bf16", m=4096):
        assert_type(row, dict[str, Any])
    assert_type(await client.best_many([job.problem]), list[Answer | NotTuned])
    return await client.best(4096, 6144, 1024, dtype=torch.float16)


def training(model: torch.nn.Module, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Calls of training code."""
    assert_type(gemmsmith.__version__, str)
    gemmsmith.use("http://127.0.0.1:8000", pin=True)
    gemmsmith.use(gemmsmith.Bundle.open("winners.gspack"))
    block: AbstractContextManager[object] = gemmsmith.patch(model, report=True)
    with block, gemmsmith.capture() as shapes:
        assert_type(shapes, gemmsmith.Shapes)
        out = gemmsmith.linear(x, w, activation="silu")
        assert_type(gemmsmith.matmul(x, w), torch.Tensor)
    gain = gemmsmith.compare(lambda: model(x), model, blocks=8)
    assert_type(gain, Ratio)
    assert_type(gain.ci_low, float)
    gemmsmith.use(None)
    return out


print(list(lookups(Client(retries=1))))
