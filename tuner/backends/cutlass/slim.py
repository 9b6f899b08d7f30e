"""Copies of CUTLASS's headers of Hopper's matrix instructions, without unused instructions.

The headers define about 2,100 `wgmma` instructions and their traits, including sparse and integer
ones. Reading them is half of the compiler front end's work on a unit: 22 of 28 seconds for the
headers alone (nvcc 13.0.88, one core, 2026-11-21). The copies come before CUTLASS's own headers on
the include path. An instruction that is left out keeps its name, which CUTLASS's selectors mention,
but has an empty body: a kernel that used it would not compile. All other code is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from gemmsmith.core.operation import Element, Operation
from tuner.backends.cutlass.package import include_dirs

_FLOATS = "F32(?:F16F16|BF16BF16|E[45]M[23]E[45]M[23])"
_OTHERS = {Element.S8: "S32S8S8", Element.TF32: "F32TF32TF32"}
"""Types of sums and operands in the names of instructions that are kept only for units that use
them."""

_ISSUED = r"(?:MMA|SM90)_64x\d+x\d+_(?:{})_SS(?:_TN)?"
"""Dense, both operands in shared memory; the sparse ones are named `GMMA_…`."""

_INSTRUCTION = re.compile(r"^struct (\w*MMA_\w+)\n\{\n.*?^\};\n", re.MULTILINE | re.DOTALL)
_TRAITS = re.compile(
    r"^template ?<[^{}]*?>\nstruct MMA_Traits<(?:\w+::)*(\w+)(?:<[^{}]*?>)?>\n\{\n.*?^\};\n",
    re.MULTILINE | re.DOTALL,
)


def write_slim_headers(folder: Path, operations: Iterable[Operation] = ()) -> None:
    """Write the headers into `folder`, which must come before CUTLASS's own on the include path.

    They suit units of 16-bit and FP8 floats, and of these operations.

    Raises:
        OSError: `folder` cannot be written.
    """
    others = frozenset(operation.a for operation in operations).intersection(_OTHERS)
    for name, text in slim_headers(others).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@cache
def slim_headers(others: frozenset[Element] = frozenset()) -> dict[str, str]:
    """Texts by path below the include folder; a header that this CUTLASS lacks is left out.

    `others` are operand types whose instructions are kept beside 16-bit and FP8 floats.
    """
    types = "|".join((_FLOATS, *sorted(_OTHERS[element] for element in others)))
    issued = re.compile(_ISSUED.format(types))
    root = include_dirs()[0]
    texts = {}
    for kind in ("gmma", "gmma_ext", "gmma_sparse", "gmma_sparse_ext"):
        for path, slim in (
            (f"cute/arch/mma_sm90_{kind}.hpp", _without_bodies),
            (f"cute/atom/mma_traits_sm90_{kind}.hpp", _without_traits),
        ):
            if (root / path).is_file():
                texts[path] = slim((root / path).read_text(encoding="utf-8"), issued)
    return texts


def _without_bodies(text: str, issued: re.Pattern[str]) -> str:
    def slim(match: re.Match[str]) -> str:
        return match[0] if issued.fullmatch(match[1]) else f"struct {match[1]} {{}};\n"

    return _INSTRUCTION.sub(slim, text)


def _without_traits(text: str, issued: re.Pattern[str]) -> str:
    return _TRAITS.sub(lambda match: match[0] if issued.fullmatch(match[1]) else "", text)
