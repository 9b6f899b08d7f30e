"""The session's steps about waiting: real commands on a recorded GPU; compiling alone is played."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.session import core, stability, waiting
from benchmarks.session.core import ROOT, Session
from benchmarks.session.waiting import Target
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from tests.support.recordings import BEST_US, CUBLAS_US, best_of, record, some_candidates
from tests.support.replacing import replace
from tests.support.serving import winner
from tuner.exchange import read_winners
from tuner.suites import load

PROBLEM = Problem(m=256, n=4096, k=4096)
TARGET = Target(m=256, n=4096, k=4096, dtype="bf16")
OTHER = Target(m=512, n=512, k=1024, dtype="bf16")
PACK = {"kernels": ["one", "two"]}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    record(tmp_path, PROBLEM, Problem(m=512, n=512, k=1024))
    monkeypatch.setenv("GEMMSMITH_SWEEPS", str(tmp_path))
    for module in (core, waiting):
        monkeypatch.setattr(module, "STATE", tmp_path / "state")
    (tmp_path / "state" / "packs").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    return Session(
        out=tmp_path / "out",
        dry_run=False,
        dtypes=("bf16",),
        time_limit=600,
        effort="default",
        limit=None,
        device="replay:h200",
        suite=None,
        problems=(),
        models=(),
        modes=(),
        tests=(),
        bundle=None,
        rounds=1,
        tag="replay",
    )


def _put_pack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ab.so").write_bytes(b"pack")
    (folder / "ab.json").write_text(json.dumps(PACK))


def _kept(session: Session, stem: str) -> Any:
    return json.loads(session.file(stem, ".json").read_text())


def test_cold_begins_with_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_pack(waiting.STATE / "packs")
    fp8 = Target(m=64, n=64, k=64, dtype="fp8_e4m3")  # not of this session
    monkeypatch.setattr(waiting, "COLD", (TARGET, fp8, OTHER))
    assert waiting.cold(session) == 0
    first, second = _kept(session, "cold")["problems"]
    assert (first["problem"], second["problem"]) == (str(TARGET), "512x512x1024 bf16 tn")
    assert first["seconds"] > first["tuning"] > 0
    assert first["status"] == second["status"] == "tuned"
    assert first["speedup"] == pytest.approx(CUBLAS_US / BEST_US, rel=0.01)
    assert first["kernel"] == best_of(PROBLEM).kernel.name
    place = waiting.STATE / "measured-replay" / "cold-0"
    assert (place / "gemmsmith.db").exists()
    assert not list((place / "packs").glob("*.json"))


def test_what_cannot_be_tuned_is_a_row_with_its_status(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Target(m=7, n=9, k=11, dtype="bf16")
    monkeypatch.setattr(waiting, "COLD", (unknown, TARGET))
    assert waiting.cold(session) == 1
    first, second = _kept(session, "cold")["problems"]
    assert (first["exit"], first["status"]) == (1, "no answer")
    assert second["status"] == "tuned"
    assert "holds no measurement of 7×9×11" in session.file("cold", ".log").read_text()


def test_nothing_begins_after_the_time_limit(session: Session) -> None:
    over = replace(session, time_limit=0)
    assert waiting.cold(over) == 0
    assert not session.file("cold", ".json").exists()


def test_waiting_starts_every_time_from_the_base(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _put_pack(waiting.STATE / "base-packs-replay")
    suite = tmp_path / "unseen.toml"
    suite.write_text("".join(_entry(wanted) for wanted in (TARGET, OTHER)))
    monkeypatch.setattr(waiting, "UNSEEN", str(suite))
    assert waiting.waiting(session) == 0
    found = _kept(session, "waiting")
    assert [row["problem"] for row in found["one_by_one"]] == [str(TARGET), str(OTHER)]
    assert [row["compiled"] for row in found["one_by_one"]] == [0, 0]
    together = found["together"]
    assert [row["status"] for row in together["problems"]] == ["tuned", "tuned"]
    assert together["seconds"] > sum(row["tuning"] for row in together["problems"])
    assert together["totals"]["tuned"] == 2
    assert "suite" not in found  # that is for fp8_e4m3
    for name in ("waiting-0", "waiting-1", "waiting-together"):
        linked = waiting.STATE / "measured-replay" / name / "packs" / "ab.so"
        assert linked.samefile(waiting.STATE / "base-packs-replay" / "ab.so")


def _entry(wanted: Target) -> str:
    return f"[[problem]]\nname = 'x'\nm = {wanted.m}\nn = {wanted.n}\nk = {wanted.k}\n"


class Compiling(Session):
    """A session whose compiler made one pack of two kernels; a third failed."""

    def ask(self, *words: str, **_: Any) -> tuple[int, Any]:
        _put_pack(Path(words[words.index("--packs") + 1]))
        counts = {"wanted": 3, "compiled": 2, "failed": 1, "packs": 1}
        return 1, {"counts": counts, "bytes": 4, "failures": [{"kernel": "three"}]}


@pytest.mark.parametrize("fresh", [True, False])
def test_the_base_is_compiled_apart_and_taken_beside_what_a_session_has(
    session: Session, fresh: bool
) -> None:
    fields = {name: getattr(session, name) for name in Session.__dataclass_fields__}
    own = waiting.STATE / "packs"
    if not fresh:
        (own / "cd.json").write_text(json.dumps(PACK))
    _put_pack(waiting.STATE / "base-packs-replay" / "left over")
    assert waiting.base(Compiling(**fields)) == 1
    found = _kept(session, "base")
    assert (found["kernels"], found["compiled"], found["failed"], found["bytes"]) == (3, 2, 1, 4)
    assert found["failures"] == [{"kernel": "three"}]
    assert {path.name for path in (waiting.STATE / "base-packs-replay").iterdir()} == {
        "ab.so",
        "ab.json",
    }
    assert (own / "ab.so").exists()
    assert (own / "cd.json").exists() != fresh


def test_kernels_are_counted_by_the_minute_of_a_core() -> None:
    counts = {"wanted": 400, "compiled": 320, "failed": 0, "packs": 40}
    document = {"counts": counts, "bytes": 10**8, "failures": []}
    assert waiting.base_figures(document, 240.0, 16)["kernels_per_core_minute"] == 5.0
    assert waiting.base_figures(None, 1.04, 16) == {"seconds": 1.0, "cores": 16}


def test_a_command_is_stopped_at_its_time_limit(session: Session, tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('stopped')))\n"
        "time.sleep(60)"
    )
    log = tmp_path / "log"
    assert session.command(sys.executable, "-c", program, log=log, time_limit=2.0) == 0
    assert log.read_text() == "stopped\n"


def test_stability_tunes_again_with_a_new_database_and_races_the_winners(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suite = tmp_path / "stable.toml"
    suite.write_text(_entry(TARGET))
    monkeypatch.setattr(waiting, "STABLE", str(suite))
    monkeypatch.setattr(waiting, "RUNS", 2)
    assert waiting.stability(session) == 0
    assert [row["status"] for row in _kept(session, "stability-runs")] == ["tuned", "tuned"]
    (row,) = _kept(session, "stability")["problems"]
    assert (row["problem"], row["runs"], row["distinct"]) == (str(PROBLEM), 2, 1)
    assert row["uses"] == {"cutlass": 2}
    (entry,) = row["winners"]
    assert (entry["candidate"], entry["won"]) == (best_of(PROBLEM).key, 2)
    assert entry["median_us"] == pytest.approx(BEST_US, rel=0.01)
    assert row["largest_difference"] == 0.0


def test_different_winners_meet_in_common_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, PROBLEM)
    broken, slower, best = some_candidates(PROBLEM)[:3]
    arguments = _race(tmp_path, best, slower, best, broken)
    assert stability.main(arguments) == 0
    document = json.loads((tmp_path / "result.json").read_text())
    (row,) = document["problems"]
    assert (row["runs"], row["distinct"], row["rounds"]) == (4, 3, 25)
    assert [entry["candidate"] for entry in row["winners"]] == [best.key, slower.key]
    assert [entry["won"] for entry in row["winners"]] == [2, 1]
    assert row["winners"][1]["over_best"]["median"] == pytest.approx(19 / 16)
    assert row["largest_difference"] == pytest.approx(3 / 16)
    assert row["cublas_us"] == pytest.approx(CUBLAS_US)
    assert row["failures"] == [{"candidate": broken.key, "message": "can_implement refused"}]
    assert "largest difference 18.75%" in capsys.readouterr().out


def test_where_cublas_stays_it_is_the_answer(tmp_path: Path) -> None:
    record(tmp_path, PROBLEM)
    _, slower, best = some_candidates(PROBLEM)[:3]
    arguments = _race(tmp_path, best, slower)
    kept = replace(winner(PROBLEM), candidate=slower, use=Use.CUBLAS)
    with (tmp_path / "winners.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(kept) + b"\n")
    assert stability.main(arguments) == 0
    (row,) = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert (row["runs"], row["distinct"]) == (3, 3)
    answers = {entry["candidate"]: entry["won"] for entry in row["winners"]}
    assert answers == {best.key: 1, slower.key: 1, stability.CUBLAS: 1}
    (cublas,) = (each for each in row["winners"] if each["candidate"] == stability.CUBLAS)
    assert cublas["over_best"]["median"] == pytest.approx(CUBLAS_US / BEST_US)

    with (tmp_path / "winners.jsonl").open("wb") as file:
        file.write(msgspec.json.encode(kept) + b"\n")
    assert stability.main(arguments) == 0
    (row,) = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert (row["distinct"], row["largest_difference"]) == (1, 0.0)  # whatever its best kernel is


def test_a_problem_that_cannot_be_raced_is_an_error_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, Problem(m=512, n=512, k=1024))
    assert stability.main(_race(tmp_path, best_of(PROBLEM))) == 1
    (row,) = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert "holds no measurement" in row["error"]


def test_without_winners_there_is_no_race(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stability.main(_race(tmp_path)) == 1
    assert "nothing to race" in capsys.readouterr().out


def _race(folder: Path, *candidates: Candidate) -> list[str]:
    """Arguments of a race among the winners of as many runs."""
    runs = [replace(winner(PROBLEM), candidate=each, use=Use.CUTLASS) for each in candidates]
    winners = folder / "winners.jsonl"
    winners.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    where = ["--device", "replay:h200", "--sweeps", str(folder), "--packs", str(folder / "packs")]
    return [str(winners), *where, "-o", str(folder / "result.json")]


def test_the_unseen_problems_are_unseen() -> None:
    known = {
        (entry.m, entry.n, entry.k, entry.layout)
        for path in (
            *(ROOT / "configs/suites").glob("*.toml"),
            ROOT / "benchmarks/peers/problems.toml",
        )
        if path.name != "unseen.toml"
        for entry in load(path).entries
    }
    for path in (ROOT / "configs/winners").glob("*.jsonl"):
        known |= {
            (w.problem.m, w.problem.n, w.problem.k, w.problem.layout) for w in read_winners(path)
        }
    suite = load(ROOT / waiting.UNSEEN)
    assert known.isdisjoint({(entry.m, entry.n, entry.k, entry.layout) for entry in suite.entries})
    asked = {str(wanted) for wanted in waiting.unseen()}
    listed = {
        f"{p.m}x{p.n}x{p.k} {p.dtype} {p.layout}"
        for dtype in (DType.BF16, DType.FP16, DType.FP8_E4M3)
        for _, p in suite.problems(dtype)
    }
    assert asked == listed
    assert len(asked) == 13
