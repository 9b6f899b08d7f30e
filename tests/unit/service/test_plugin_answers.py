"""A winner with a plugin's kernel: any client that knows plugins gets it, an older one cuBLAS."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gemmsmith import Client
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import Backend
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tests.support.plugins import plain
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner.backends import backend_of

PROBLEM = Problem(m=4096, n=4096, k=4096)
SIZES = {"m": 4096, "n": 4096, "k": 4096}


def test_it_is_served_where_the_package_is_not_installed(tmp_path: Path) -> None:
    kernel = plain(128)
    assert backend_of(kernel) is None
    settings = new_settings(tmp_path)
    candidate = Candidate(kernel=kernel, launch=Launch())
    promote(settings, replace(winner(PROBLEM, use=Use.PLUGIN), candidate=candidate))
    with running(settings) as service:
        with Client(str(service.base_url), cache_dir=tmp_path / "cache") as client:
            answer = client.best(4096, 4096, 4096)
            (row,) = client.snapshot().rows
        older = {"gemmsmith-runs": "cutlass3x cutlass2x cute cublaslt"}
        best = service.get("/best", params=SIZES, headers=older).json()
        (theirs,) = service.get("/snapshot", headers=older).json()["winners"]
        described = service.get(f"/kernels/{kernel.name}").json()
        problems = "/ui/problems"
        pages = [
            service.get(path, headers={"accept": "text/html"})
            for path in (
                "/ui",
                f"{problems}?device={H200.slug}",
                f"{problems}/{H200.slug}/bf16/tn/4096x4096x4096",
            )
        ]
    assert answer.use is row.use is Use.PLUGIN
    assert answer.config is not None
    assert row.config is not None
    assert answer.config.kernel == row.config.kernel == kernel
    assert (best["use"], best["config"]) == ("cublas", None)
    assert (theirs["use"], theirs["config"]) == ("cublas", None)
    assert described["plugin"] == "plain"
    assert described["backend"] == Backend.PLUGIN
    assert [page.status_code for page in pages] == [200, 200, 200]
    for page in pages[1:]:
        assert '<span class="use plugin">a plugin</span>' in page.text
        assert kernel.name in page.text
    assert msgspec.to_builtins(kernel)["traits"] == ()
