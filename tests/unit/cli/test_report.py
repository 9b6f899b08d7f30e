"""`gemmsmith report` on the shipped winners, and `gemmsmith ceilings` without a GPU."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from service.pages.render import STATIC
from service.pages.report import page
from service.report.problem_rows import device_report
from tests.support.commands import run, use
from tests.support.replacing import replace
from tests.support.serving import H100, H200, new_settings, promote, winner
from tests.unit.service.test_report_rows import CEILINGS, SHIPPED
from tuner.measure.ceilings import path_for, write_ceilings

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "configs" / "winners").glob(f"{H200.slug}.*.jsonl"))
VOID = {"meta", "br", "hr", "img", "link", "input"}


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty database, and a folder to work in."""
    monkeypatch.chdir(tmp_path)
    return use(new_settings(tmp_path), monkeypatch)


class Page(HTMLParser):
    """Checks that every element is closed, and collects the texts of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: set[str] = set()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.add(data)


CEILINGS_OF_H200 = replace(CEILINGS, device=SHIPPED[0].device, environment=SHIPPED[0].environment)


def test_every_shipped_problem_is_in_every_file(tmp_path: Path) -> None:
    unmeasured = ("--ceilings", tmp_path / "none")
    result = run("report", "--winners", *FILES, "-o", tmp_path / "out", *unmeasured)
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    with (tmp_path / "out" / "report.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["problem"]: row for row in csv.DictReader(file)}
    document = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert len(document["devices"]) == 1
    problems = {each["problem"]: each for each in document["devices"][0]["problems"]}
    cells = Page(html).cells
    assert len(rows) == len(problems) == len(SHIPPED)
    for shipped in SHIPPED:
        name = str(shipped.problem)
        assert shipped.speedup
        assert shipped.statistics
        assert float(rows[name]["ratio"]) == problems[name]["ratio"] == shipped.speedup.median
        assert float(rows[name]["ratio_low"]) == shipped.speedup.ci_low
        assert float(rows[name]["cutlass_us"]) == shipped.statistics.median_us
        tflops = shipped.problem.flops / shipped.statistics.median_us / 1e6
        assert problems[name]["cutlass_tflops"] == pytest.approx(tflops)
        assert rows[name]["cutlass_peak_share"] == ""
        assert problems[name]["cutlass_peak_share"] is None
        assert shipped.candidate
        assert rows[name]["kernel"] == shipped.candidate.kernel.name
        priced = shipped.use is Use.CUBLAS and shipped.speedup.ci_low > 1
        assert bool(rows[name]["why"]) == (shipped.speedup.median < 1 or priced)
        assert name in cells
        assert f"{shipped.speedup.ci_low:.3f}–{shipped.speedup.ci_high:.3f}" in cells
    assert document["devices"][0]["ceilings"] is None
    assert "No ceilings were measured for nvidia-h200-132sm" in html
    assert "No ceilings were measured" in result.stderr
    for path in ("report.html", "report.csv", "report.json"):
        assert str(tmp_path / "out" / path) in result.stdout
    assert "geometric mean" in result.stdout
    again = tmp_path / "again"
    run("report", *FILES, "-o", again, *unmeasured)
    assert (again / "report.html").read_text(encoding="utf-8") == html


def test_ceilings_give_shares_and_a_roof(tmp_path: Path) -> None:
    write_ceilings(CEILINGS_OF_H200, path_for(H200.slug, tmp_path / "ceilings"))
    run("report", *FILES, "-o", tmp_path, "--ceilings", tmp_path / "ceilings", "--dtype", "bf16")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    device = json.loads((tmp_path / "report.json").read_bytes())["devices"][0]
    assert 'class="roof"' in html
    assert "No ceilings" not in html
    assert device["ceilings"]["copy"]["bytes_per_second"] == pytest.approx(4e12)
    problems = device["problems"]
    rates = [each[f"{side}_tflops"] * 1e12 for each in problems for side in ("cutlass", "cublas")]
    peak = max(800e12, *rates)
    moved = [each[f"{side}_gb_per_s"] for each in problems for side in ("cutlass", "cublas")]
    bandwidth = max(4000, *moved)
    for each in device["problems"]:
        assert each["dtype"] == "bf16"
        assert each["cublas_peak_share"] == pytest.approx(each["cublas_tflops"] * 1e12 / peak)
        share = each["cutlass_gb_per_s"] / bandwidth
        assert each["cutlass_bandwidth_share"] == pytest.approx(share)
        memory = each["flop_per_byte"] < peak / bandwidth / 1e9
        assert each["bound"] == ("memory" if memory else "compute")


def test_the_page_needs_nothing_else() -> None:
    html = page([device_report(SHIPPED, CEILINGS_OF_H200)])
    read = Page(html)
    operations = {shipped.problem.dtype for shipped in SHIPPED}
    assert read.tags.count("svg") == 3 * len(operations)  # three pictures each
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert not {"src", "href"} & {name for name, _ in read.attributes}
    for sheet in STATIC.glob("*.css"):
        assert sheet.read_text(encoding="utf-8").strip() in html


def test_hostile_names_are_escaped() -> None:
    name = '<script>alert("1")</script>&</title>'
    hostile = replace(SHIPPED[0].device, name=name)
    environment = replace(SHIPPED[0].environment, driver=name)
    winners = [
        replace(w, device=hostile, environment=environment, baseline_kernels=(name,))
        for w in SHIPPED[:30]
    ]
    html = page([device_report(winners, None)])
    assert "script" not in Page(html).tags
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_a_slug_is_no_path(tmp_path: Path) -> None:
    outside = tmp_path / "secret.json"
    outside.write_text("not ceilings")
    assert not path_for("../secret", tmp_path / "ceilings").exists()


def test_ceilings_of_another_device_are_refused(tmp_path: Path) -> None:
    write_ceilings(replace(CEILINGS, device=H100), path_for(H200.slug, tmp_path))
    result = run("report", *FILES, "--ceilings", tmp_path, code=1)
    assert H100.slug in result.stderr


def test_an_empty_database_says_what_to_do() -> None:
    result = run("report", code=1)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "gemmsmith db upgrade" in result.stderr
    assert not Path("report").exists()


def test_the_database_is_the_default(database: Any) -> None:
    problem = Problem(m=4096, n=4096, k=4096)
    promote(database, winner(problem, us=190.0), winner(problem, device=H100, us=250.0))
    document = json.loads(run("report", "--json").stdout)
    assert {each["device"] for each in document["devices"]} == {H200.slug, H100.slug}
    assert Path(document["files"]["html"]).is_file()
    only = json.loads(run("report", "--json", "--device", H100.slug, "-o", "other").stdout)
    assert [each["device"] for each in only["devices"]] == [H100.slug]
    result = run("report", "--device", "h900", code=1)
    assert f"bf16 on {H200.slug}" in result.stderr


def test_wrong_input() -> None:
    assert "got 'int4'" in run("report", *FILES, "--dtype", "int4", code=2).stderr
    assert "cannot read none.jsonl" in run("report", "--winners", "none.jsonl", code=1).stderr
    assert "got 'replay:x'" in run("ceilings", "--device", "replay:x", code=2).stderr


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.measure.local_gpu.local_gpu", lambda _=0: None)
    result = run("ceilings", code=1)
    assert result.stderr.startswith("error: no CUDA device 0 on this machine")
    assert "gemmsmith doctor" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("configs").exists()
