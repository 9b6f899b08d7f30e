"""Who adds a layer's bias: the kernel of an operation that has one, or a pass after another's."""

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
    """What kernels could run: of a bias those first that add it themselves."""
    plain = shapes(form, a, b, output, groups, epilogue)
    if form is not Form.LINEAR_BIAS or epilogue is not Epilogue.NONE:
        return plain
    return (*shapes(form, a, b, output, groups, Epilogue.BIAS), *plain)


def adds_bias_afterwards(form: Form, shape: Shape) -> bool:
    """Whether the bias of such a product takes a pass of its own."""
    return form is Form.LINEAR_BIAS and not shape.problem.operation.is_fused


def pays(saving_us: float | None, shape: Shape) -> bool:
    """Whether a product whose bias is added by a pass of its own still gains on torch's.

    torch adds the bias within the product. So do kernels of the operation that has it; after one
    that has not, the output is read and written once more. Where nobody knows what the kernel
    saves, torch computes it: never slower.
    """
    if saving_us is None:
        return False
    problem = shape.problem
    moved = 2 * problem.m * problem.n * problem.operation.d.bytes
    return saving_us > BIAS_US + moved / BIAS_BYTES_PER_US
