"""The example notebook, cell by cell in a kernel of its own, against a service with a worker."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs import ROOT
from tests.support.processes import SHIPPED, address, serving

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


WITHOUT_GPU = (
    "gemmsmith.compare: both sides would run torch: no product of the step has a winner that runs "
    "here; "
)


def shown(cell: Any) -> str:
    """All that a cell displays and prints."""
    texts = []
    for output in cell.outputs:
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text
        texts += [output.get("text", ""), *map(str, output.get("data", {}).values())]
    return "\n".join(texts)


@pytest.mark.long
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        import nbformat
        from nbclient import NotebookClient

        book = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in book.cells)  # none is kept
    for name, value in {
        "SIGNING_KEY": tmp_path / "key", "TRUSTED": tmp_path / "trusted",
        "CACHE_DIR": tmp_path / "cache",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"GEMMSMITH_{name}", str(value))
    for name in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name))
    with serving(tmp_path, "worker", **SHIPPED) as (_, banner):
        url = address(banner)
        monkeypatch.setenv("GEMMSMITH_URL", url)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            NotebookClient(book, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    code = [shown(cell) for cell in book.cells if cell.cell_type == "code"]
    assert url in code[0]
    assert "<table>" in code[1]
    assert "4096×6144×1024 bf16 tn" in code[1]
    assert re.search(r"\d+ TFLOP/s, the default \d+", code[2])
    assert "'backend': 'cutlass3x'" in code[2]
    assert code[3].count("<Answer ") == 2
    assert "Tune it with client.tune(1024, 6144, 1024, dtype='bf16', layout='tn'" in code[3]
    assert "<td" in code[4]
    assert "1024×6144×1024 bf16 tn" in code[4]
    assert ">done</td>" in code[5]
    first, last = map(float, re.findall(r"[\d.]+", code[6]))
    assert last < first
    assert code[7].startswith(WITHOUT_GPU)
