"""How a layer's bias is added: by the kernel, or by a pass after a kernel without a bias."""

from __future__ import annotations

import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.ops.engine.forms import Form, Shape, Spec, shapes

BIAS_US = 2.0
"""Fixed cost of the pass that adds a bias: one more launch. An estimate, not measured yet."""
BIAS_BYTES_PER_US = 3e6
"""Device memory moved in a microsecond by that pass, 3 TB/s: below an H200's 4.8 TB/s peak."""


def ways(
    form: Form, a: Spec, b: Spec, output: torch.dtype | None, groups: int, epilogue: Epilogue
) -> tuple[Shape, ...]:
    """How kernels could run the product; those that add a bias themselves come first."""
    plain = shapes(form, a, b, output, groups, epilogue)
    if form is not Form.LINEAR_BIAS or epilogue is not Epilogue.NONE:
        return plain
    return (*shapes(form, a, b, output, groups, Epilogue.BIAS), *plain)


def adds_bias_afterwards(form: Form, shape: Shape) -> bool:
    return form is Form.LINEAR_BIAS and not shape.problem.operation.is_fused


def pays(saving_us: float | None, shape: Shape) -> bool:
    """Whether a product is faster than torch's although a pass of its own adds the bias.

    torch adds the bias within the product, as kernels with a bias do. A pass reads and writes the
    output once more. If the kernel's saving was not measured, torch computes the product.
    """
    if saving_us is None:
        return False
    problem = shape.problem
    moved = 2 * problem.m * problem.n * problem.operation.d.bytes
    return saving_us > BIAS_US + moved / BIAS_BYTES_PER_US
