"""Rewrites all blocks and the pictures, see the package's docstring."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.readme import (
    beside,
    fleet,
    kinds,
    matrix,
    operations,
    picture,
    regimes,
    service,
    steps,
    two_gpus,
)
from benchmarks.readme.shipped import ROOT, shipped

README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
FLEET = ROOT / "docs" / "fleet.md"
FUSING = ROOT / "docs" / "fusing.md"


def blocks() -> dict[Path, dict[str, str]]:
    """Return the Markdown of every block, by page and name."""
    winners = shipped()
    return {
        README: {
            "gains": kinds.table(winners),
            "models": steps.models(),
            "steps": steps.table(),
            "beside": beside.table(winners),
            "matrix": matrix.table(winners),
        },
        BENCHMARKS: {
            "operations": operations.table(winners),
            "load": service.table(),
            "writers": fleet.writers(),
        },
        FUSING: {"models": steps.all_models()},
        FLEET: {
            "two gpus": two_gpus.table(),
            "clusters": fleet.clusters(),
            "simulated": fleet.simulated(),
        },
    }


def put(text: str, name: str, block: str) -> str:
    """Return the page with this block between its markers.

    Raises:
        ValueError: the page has no such markers.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no markers <!-- {name} --> … <!-- /{name} -->")
    return pattern.sub(lambda match: f"{match[1]}{block}\n{match[2]}", text)


def main() -> int:
    """Rewrite the pages and the pictures."""
    for page, of_page in blocks().items():
        text = page.read_text(encoding="utf-8")
        for name, block in of_page.items():
            text = put(text, name, block)
        page.write_text(text, encoding="utf-8")
    picture.draw(shipped())
    regimes.draw(shipped())
    return 0


if __name__ == "__main__":
    sys.exit(main())
