"""Two ranks as GPUs run them, here two processes on the host with stand-in kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.support.choosing import Ground
from tests.gpu.test_ranks import check


@pytest.mark.long
def test_a_warm_and_a_cold_rank_choose_and_compute_alike(ground: Ground, tmp_path: Path) -> None:
    """The cold one is rank 0, who asks for all; the other order takes as long again."""
    check(ground, tmp_path, warm=1)
