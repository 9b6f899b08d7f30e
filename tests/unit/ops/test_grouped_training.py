"""The tests of mixtures of experts that GPUs run, on the host with stand-in kernels."""

import pytest

from tests.gpu import test_grouped as on_gpus
from tests.gpu.support.choosing import Ground
from tests.gpu.test_grouped import test_300_random_mixtures_against_torch, test_scaled_mixtures
from tests.support import stand_in
from tests.support.below import only_python

__all__ = ["test_300_random_mixtures_against_torch", "test_scaled_mixtures"]


@pytest.fixture(autouse=True)
def _on_the_host(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below autograd, without the binding; fewer, as torch's loop over the experts is slow here."""
    monkeypatch.setattr(stand_in.ENGINE.keywords["platform"], "kind", "cpu")
    only_python(monkeypatch)
    monkeypatch.setattr(on_gpus, "CASES", 12)
    monkeypatch.setattr(on_gpus, "EXPERTS", (1, 3, 8))
