from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from service.settings import Settings
from tests.support.serving import H100, H200, new_settings, promote, running, winner

KNOWN = Problem(m=4096, n=4096, k=4096)
CUBLAS_WINS = Problem(m=512, n=512, k=8192)
FP8 = Problem(m=256, n=4096, k=4096, dtype=DType.FP8_E4M3)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A database that knows a few winners on an H200 and one on an H100."""
    folder: Path = tmp_path_factory.mktemp("service")
    settings = new_settings(folder, max_body_bytes=2**20)
    promote(
        settings,
        winner(KNOWN, us=190.0),
        winner(CUBLAS_WINS, use=Use.CUBLAS, us=14.0),
        winner(FP8, us=9.0),
        winner(KNOWN, device=H100, us=250.0),
    )
    return settings


@pytest.fixture(scope="session", autouse=True)
def no_gpu() -> Iterator[None]:
    """Services know no GPU, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.http.state.usable_gpu", lambda: None)
        yield


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    with running(settings) as client:
        yield client


@pytest.fixture(scope="module")
def device() -> str:
    return H200.slug


@pytest.fixture
def http(settings: Settings) -> Iterator[httpx.Client]:
    with running(settings) as client:
        yield client
