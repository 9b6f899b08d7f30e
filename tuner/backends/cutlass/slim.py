"""CUTLASS's headers of Hopper's matrix instructions, without the ones that no kernel here issues.

Half of what the compiler's front end does for a unit is reading some 2,100 `wgmma` instructions and
their traits, sparse and integer ones included: 22 of 28 seconds for the headers alone (nvcc
13.0.88, one core, 2026-11-21). The copies made here lie before CUTLASS's own on the include path.
An instruction left out keeps its name, because selectors name it, but has nothing in it: a kernel
that needed one would not compile. What compiles is what compiled before.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tuner.backends.cutlass.package import include_dirs

_ISSUED = re.compile(
    r"(?:MMA|SM90)_64x\d+x\d+_F32(?:F16F16|BF16BF16|E[45]M[23]E[45]M[23])_SS(?:_TN)?"
)
"""Dense, both operands in shared memory, FP32 accumulators; the sparse ones are named `GMMA_…`."""

_INSTRUCTION = re.compile(r"^struct (\w*MMA_\w+)\n\{\n.*?^\};\n", re.MULTILINE | re.DOTALL)
_TRAITS = re.compile(
    r"^template ?<[^{}]*?>\nstruct MMA_Traits<(?:\w+::)*(\w+)(?:<[^{}]*?>)?>\n\{\n.*?^\};\n",
    re.MULTILINE | re.DOTALL,
)


def write_slim_headers(folder: Path) -> None:
    """Write the headers under `folder`, to be named on the include path before CUTLASS's own.

    Raises:
        OSError: `folder` cannot be written.
    """
    for name, text in slim_headers().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@cache
def slim_headers() -> dict[str, str]:
    """Texts by path below the include folder; a header that this CUTLASS lacks is left alone."""
    root = include_dirs()[0]
    texts = {}
    for kind in ("gmma", "gmma_ext", "gmma_sparse", "gmma_sparse_ext"):
        for path, slim in (
            (f"cute/arch/mma_sm90_{kind}.hpp", _without_bodies),
            (f"cute/atom/mma_traits_sm90_{kind}.hpp", _without_traits),
        ):
            if (root / path).is_file():
                texts[path] = slim((root / path).read_text(encoding="utf-8"))
    return texts


def _without_bodies(text: str) -> str:
    def slim(found: re.Match[str]) -> str:
        return found[0] if _ISSUED.fullmatch(found[1]) else f"struct {found[1]} {{}};\n"

    return _INSTRUCTION.sub(slim, text)


def _without_traits(text: str) -> str:
    return _TRAITS.sub(lambda found: found[0] if _ISSUED.fullmatch(found[1]) else "", text)
