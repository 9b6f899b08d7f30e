"""The peer comparison without a GPU: table, interface, and trouble that stays where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.peers import __main__ as program
from benchmarks.peers.peer import Unsupported, missing
from benchmarks.peers.records import BASELINE, Entry, Report, Request, Row
from benchmarks.peers.roster import PEERS, by_name
from benchmarks.peers.supervisor import Supervisor
from benchmarks.peers.table import as_answered, geometric_mean, markdown, ratios
from benchmarks.peers.triton import generated_by_triton
from benchmarks.peers.winners import find_packs, find_winners
from gemmsmith.answers.answer import Ratio, Statistics
from gemmsmith.core.problem import DType, Problem
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tuner.suites import load

CHILD = [sys.executable, str(Path(__file__).with_name("fake_peers_child.py"))]
SMALL = Problem(m=16, n=32, k=64)


def _entry(ratio: float, tuning_s: float = 0.0) -> Entry:
    return Entry(
        statistics=Statistics(median_us=10 / ratio, ci_low_us=1, ci_high_us=99, samples=5),
        ratio=Ratio(median=ratio, ci_low=ratio, ci_high=ratio),
        tuning_s=tuning_s,
    )


def _report() -> Report:
    rows = [
        Row(
            problem=SMALL,
            entries={
                BASELINE: _entry(1.0),
                "triton": _entry(0.5, 30.0),
                "gemmsmith": _entry(1.25),
            },
            use="cutlass",
        ),
        Row(
            problem=Problem(m=8, n=8, k=8, batch=3),
            entries={
                BASELINE: _entry(1.0),
                "triton": Entry(reason="wrong: error 1"),
                "gemmsmith": _entry(0.8),
            },
            use="cublas",
        ),
        Row(problem=Problem(m=9, n=9, k=9), failure="no memory"),
    ]
    return Report(
        dtype=DType.BF16,
        suite="test",
        recorded_at="",
        seed=1,
        rounds=5,
        unavailable={"quack": "not installed: quack"},
        rows=rows,
    )


def test_the_table_holds_ratios_means_counts_and_reasons() -> None:
    lines = markdown(_report(), [peer.name for peer in PEERS]).splitlines()
    head = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert head == [
        *("problem", "cuBLAS µs", "cublaslt", "triton", "gemmsmith", "gemmsmith, as answered")
    ]
    assert lines[4] == "| 16×32×64 tn | 10.0 | — | 0.500 | 1.250 | 1.250 |"
    assert lines[5] == "| 3×8×8×8 tn | 10.0 | — | — | 0.800 | 1.000 |"
    assert lines[6] == "| 9×9×9 tn | — | — | — | — | — |"
    assert "| — | 0.500 (1) | 1.000 (2) | 1.118 (2) |" in lines[7]
    assert "| — | 0.500 (1) | 1.250 (1) | 1.250 (1) |" in lines[8]
    assert lines[9].endswith("| 30.0 | 0.0 |  |")
    said = "\n".join(lines[10:])
    for reason in (
        "quack: not installed",
        "9×9×9 tn: no memory",
        "3×8×8×8 tn, triton: wrong: error 1",
    ):
        assert reason in said


def test_means_and_ratios() -> None:
    assert geometric_mean([]) is None
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    rows = _report().rows
    assert ratios(rows, "triton") == {0: 0.5}
    assert as_answered(rows) == {0: 1.25, 1: 1.0}


def test_a_report_survives_its_file() -> None:
    report = _report()
    again = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert again.rows == report.rows


def test_every_peer_has_the_interface() -> None:
    names = [peer.name for peer in PEERS]
    assert names[0] == BASELINE
    assert len(set(names)) == len(names)
    for peer in PEERS:
        assert by_name(peer.name) is peer
        assert 0 < peer.limit_s <= 600
        reason = peer.available()
        assert reason is None or reason.startswith("not installed: ")
    with pytest.raises(KeyError):
        by_name("no such peer")


def test_what_is_missing_is_named() -> None:
    assert missing("json", "sys") is None
    assert missing("json", "no_such_module") == "not installed: no_such_module"


def test_an_unavailable_peer_is_said_to_be() -> None:
    from importlib.util import find_spec

    if find_spec("quack") is not None:
        pytest.skip("QuACK is installed here")
    assert "quack" in (by_name("quack").available() or "")


def test_inductor_code_must_be_tritons() -> None:
    header = "extern_kernels = torch._inductor.select_algorithm.extern_kernels\n"
    comment = "# %mm = call_function[target=torch.ops.aten.mm.default](args = (a, b))\n"
    template = "triton_tem_fused_mm_0.run(a, b, buf0, 4, 1, 1, stream=stream0)\n"
    assert generated_by_triton(header + comment + template) == ["triton_tem_fused_mm_0"]
    for call in (
        "extern_kernels.mm(a, b, out=buf0)\n",
        "buf0 = torch.ops.aten._scaled_mm.default(a, b, s, t)\n",
    ):
        with pytest.raises(Unsupported, match="fell back"):
            generated_by_triton(header + call + template)
    with pytest.raises(Unsupported, match="no Triton kernel"):
        generated_by_triton(header + comment)


def test_a_hang_and_a_crash_cost_their_peer_only() -> None:
    request = Request(
        problem=SMALL, peers=("cublas", "hangs", "fine", "crashes", "last"), rounds=5, seed=1
    )
    with Supervisor(CHILD) as supervisor:
        row = supervisor.measure(request)
        assert supervisor.ready is not None
        again = supervisor.measure(Request(problem=SMALL, peers=("cublas",), rounds=5, seed=1))
    assert row.failure is None
    assert set(row.entries) == set(request.peers)
    assert row.entries["hangs"].reason == "gave no sign of life for 0.3 s and was killed"
    assert row.entries["crashes"].reason == "its process ended with status 70: an illegal address"
    for peer in ("cublas", "fine", "last"):
        assert row.entries[peer].ratio is not None
    assert again.failure is None


def test_a_baseline_that_fails_costs_its_problem_only() -> None:
    bad = Request(problem=Problem(m=13, n=1, k=1), peers=("cublas", "fine"), rounds=5, seed=1)
    good = Request(problem=SMALL, peers=("cublas", "fine"), rounds=5, seed=1)
    with Supervisor(CHILD) as supervisor:
        assert "status 70" in (supervisor.measure(bad).failure or "")
        assert supervisor.measure(good).failure is None


def test_a_process_that_cannot_start_is_a_failure() -> None:
    with Supervisor([sys.executable, "-c", "raise SystemExit('no GPU at all')"]) as supervisor:
        row = supervisor.measure(Request(problem=SMALL, peers=("cublas",), rounds=5, seed=1))
    assert row.failure == "its process ended with status 1: no GPU at all"


def test_the_suite_has_old_and_new_problems() -> None:
    own = load(program.SUITE)
    known = load(program.ROOT / "configs" / "suites" / "llm.toml").problems(DType.BF16)
    known_problems = {problem for _, problem in known}
    new = [(e, p) for e, p in own.problems(DType.BF16) if p not in known_problems]
    assert len(own.entries) == 20
    assert len(new) == 4
    assert all(entry.group == "new" for entry, _ in new)


@pytest.mark.parametrize("dtype", DType)
def test_dry_run_lists_problems_and_peers(dtype: DType, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--dry-run", "--dtype", dtype, "--limit", "3", "--database", ""]) == 0
    said = capsys.readouterr().out
    for peer in PEERS:
        assert f"{peer.name}: " in said
    assert "3 problems" in said
    assert f"16×4096×4096 {dtype} tn" in said


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    options = program.parse(["--peer", "triton", "--device", "cuda:3"])
    assert options.peers == ("cublas", "triton")
    assert options.ordinal == 3
    with pytest.raises(SystemExit):
        program.parse(["--device", "replay:x"])
    assert "cuda:N" in capsys.readouterr().err


def test_shipped_winners_are_found_by_device() -> None:
    files = sorted((program.ROOT / "configs" / "winners").glob("*.jsonl"))
    winners = find_winners(files, None, None)
    for device in {winner.device.slug: winner.device for winner in winners.values()}.values():
        listed = find_winners(files, None, device)
        assert {winner.device.slug for winner in listed.values()} == {device.slug}
        mine = {one: won for one, won in winners.items() if won.device.slug == device.slug}
        assert mine.items() <= listed.items()
        assert find_winners(files, None, replace(device, name="another")) == {}
    assert Problem(m=16, n=4096, k=4096) in winners


def test_a_pack_that_cannot_be_built_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.errors import CompilerNotFound

    def nothing() -> None:
        raise CompilerNotFound("no nvcc anywhere")

    monkeypatch.setattr("tuner.compile.find_toolchain", nothing)
    packs, reasons = find_packs([KERNEL], tmp_path, deadline=0.0)
    assert packs == {}
    assert reasons == {KERNEL.name: "no nvcc anywhere"}
