"""The test of two ranks that GPUs run, as two processes on the host with stand-in kernels."""

from tests.gpu.test_ranks import test_a_warm_and_a_cold_rank_choose_and_compute_alike

__all__ = ["test_a_warm_and_a_cold_rank_choose_and_compute_alike"]
