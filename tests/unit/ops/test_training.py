"""The tests of training that GPUs run, on the host with stand-in kernels: all that need no CUDA."""

from tests.gpu.test_training import (  # noqa: F401 - pytest collects them
    test_500_random_sizes_against_torch,
    test_a_pack_that_is_not_what_it_should_be_is_refused,
    test_an_fp8_layer_eager_and_compiled,
    test_compiled_training,
    test_gradients_of_every_operator_in_every_layout,
    test_main_grad,
    test_only_deterministic_kernels_give_the_same_bits,
    test_scaled_products,
    test_training_goes_on_when_the_service_is_killed,
)
