"""Why a kernel is the fastest on record for a problem, and what the default does instead.

`explain` computes an `Explanation` from what a winner records, from its kernel's traits and from
the names of the default's kernels. Nothing here needs a GPU, a compiler or torch. Figures that are
estimates are named so where they are printed; what is not on record is None.
"""

from __future__ import annotations

from tuner.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
