"""What is left to gain: families, where a kernel by hand would pay, and the same in every file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmsmith.core.operation import of_dtype
from service.report.headroom import LISTED, WORTH, family, headroom_report, problem_cells
from tests.support.commands import run
from tests.unit.service.test_report_rows import SHIPPED
from tuner.explain.headroom import Cause, headroom

FAMILIES = {
    "bf16": "plain products, bf16 and fp16",
    "fp16": "plain products, bf16 and fp16",
    "fp8_e4m3": "plain products, FP8",
    "fp8_e4m3.scale_row": "plain products, FP8 scaled by rows",
    "int8": "plain products, INT8",
    "tf32": "plain products, TF32",
    "bf16.out_f32.accumulate": "sums into FP32, bf16 and fp16",
    "bf16.then_bias": "bias, bf16 and fp16",
    "bf16.then_bias_gelu_tanh_aux": "activations, bf16 and fp16",
    "bf16.then_dgelu_bgrad": "activations, backward, bf16 and fp16",
    "bf16.then_bias_residual": "residual sums, bf16 and fp16",
    "bf16.then_bias_residual_relu": "residual sums, bf16 and fp16",
    "bf16.then_row_scale_bias": "factors of rows, bf16 and fp16",
    "fp16.then_silu_gate_aux": "gated layers, bf16 and fp16",
    "bf16.then_dsilu_gate_act": "gated layers, backward, bf16 and fp16",
    "fp8_e4m3.out_e4m3.then_silu_gate": "gated layers, FP8",
    "bf16.group_rows": "experts, bf16 and fp16",
    "bf16.group_rows.sum_sequential": "one order of sums, bf16 and fp16",
    "fp8_e4m3.scale_row.group_rows": "experts, FP8 scaled by rows",
    "bf16.group_rows.then_silu_gate": "gated experts, bf16 and fp16",
    "bf16.group_rows.then_dsilu_gate_act": "gated experts, backward, bf16 and fp16",
    "bf16.group_depth": "experts' weight gradients, bf16 and fp16",
    "bf16.out_f32.group_depth.accumulate": "experts' weight gradients, bf16 and fp16",
}


@pytest.mark.parametrize("dtype", FAMILIES)
def test_every_family_has_a_name_for_people(dtype: str) -> None:
    assert family(of_dtype(dtype)) == FAMILIES[dtype]


def test_families_are_sums_and_the_list_has_a_cut_off() -> None:
    items = [item for winner in SHIPPED if (item := headroom(winner))]
    report = headroom_report(items)
    assert sum(summed.problems for summed in report.families) == len(items)
    for summed in report.families:
        members = [item for item in items if family(item.problem.operation) == summed.family]
        assert summed.problems == len(members)
        assert summed.distance_us == pytest.approx(sum(item.distance_us for item in members))
        assert sum(summed.shares.values()) == pytest.approx(1.0)
        assert 0 < summed.reached <= 1
    distances = [summed.distance_us for summed in report.families]
    assert distances == sorted(distances, reverse=True)
    saved = [item.by_hand_us for item in report.by_hand]
    assert saved == sorted(saved, reverse=True)
    listed = {item.problem for item in report.by_hand}
    for item in items:
        assert (item.problem in listed) == (item.by_hand_share >= WORTH), item.problem
    assert headroom_report([]).families == ()


def test_the_command_the_page_and_the_document_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).resolve().parents[3]
    files = sorted((root / "configs" / "winners").glob("nvidia-h200-132sm.*.jsonl"))
    printed = run("report", "--winners", *files, "-o", tmp_path, "--headroom").stdout
    html = (tmp_path / "report.html").read_text(encoding="utf-8").replace("&#39;", "'")
    device = json.loads((tmp_path / "report.json").read_bytes())["devices"][0]
    document = device["headroom"]
    items = [item for winner in SHIPPED if (item := headroom(winner))]
    report = headroom_report(items)
    assert [item["family"] for item in document["families"]] == [
        summed.family for summed in report.families
    ]
    assert len(document["by_hand"]) == len(report.by_hand) > LISTED
    for summed in report.families:
        assert summed.family in printed
        assert f"<td>{summed.family}</td>" in html
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert document["by_hand"] == [str(item.problem) for item in report.by_hand]
    for item in report.by_hand:
        is_listed = " ".join(problem_cells(item)) in lines
        assert is_listed == (item in report.by_hand[:LISTED])
    written = {row["problem"]: row for row in device["problems"]}
    for item in items:
        row = written[str(item.problem)]
        assert row["floor_us"] == item.floor_us
        assert row["by_hand_us"] == item.by_hand_us
        causes = {cause: row[f"headroom_{cause.value.lower()}_us"] for cause in Cause}
        assert causes == item.causes
    assert f"{LISTED} of {len(report.by_hand)}" in printed
    assert "geometric mean" not in printed
