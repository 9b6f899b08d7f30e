"""The part for training code: operators, patches that use them, and the capture of shapes.

Importing it needs torch. `import gemmsmith` does not import it until one of its names is used.
"""

from gemmsmith.ops.capturing import Shapes, capture
from gemmsmith.ops.comparing import compare
from gemmsmith.ops.engine.source import use
from gemmsmith.ops.models.invariance import InvarianceReport, check_invariance
from gemmsmith.ops.models.patching import patch, unpatch
from gemmsmith.ops.products.fused import linear
from gemmsmith.ops.products.grouped import grouped_mm
from gemmsmith.ops.products.integer import int8_mm
from gemmsmith.ops.products.operators import matmul, scaled_mm

__all__ = [
    "InvarianceReport",
    "Shapes",
    "capture",
    "check_invariance",
    "compare",
    "grouped_mm",
    "int8_mm",
    "linear",
    "matmul",
    "patch",
    "scaled_mm",
    "unpatch",
    "use",
]
