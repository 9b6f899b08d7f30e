"""Training code's side: operators, the patch that puts them in, and the capture of shapes.

Importing this needs torch; `import gemmsmith` does not, and takes these names from here when they
are used.
"""

from gemmsmith.ops.capturing import Shapes, capture
from gemmsmith.ops.comparing import compare
from gemmsmith.ops.fused import linear
from gemmsmith.ops.grouped import grouped_mm
from gemmsmith.ops.integer import int8_mm
from gemmsmith.ops.operators import matmul, scaled_mm
from gemmsmith.ops.patching import patch, unpatch
from gemmsmith.ops.source import use

__all__ = [
    "Shapes",
    "capture",
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
