"""`gemmsmith tune`, `record` and `worker`, on a recorded GPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import Result

from gemmsmith.core.problem import DType, Problem
from service import identity
from service.settings import Settings
from tests.support.commands import run, use
from tests.support.recordings import BEST_US, CUBLAS_US, best_of, record
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, running
from tuner.jobs import Queue
from tuner.store import Store
from tuner.store.statement import is_believed

PROBLEMS = (
    Problem(m=256, n=4096, k=4096),
    Problem(m=512, n=512, k=1024),
    Problem(m=256, n=4096, k=4096, dtype=DType.FP16),
)
SUITE = """
name = "three"
[[problem]]
name = "first"
m = 256
n = 4096
k = 4096
[[problem]]
name = "second"
m = 512
n = 512
k = 1024
[[problem]]
name = "never recorded"
m = 64
n = 64
k = 64
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    settings = use(new_settings(tmp_path, device="replay:h200"), monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    settings.sweeps.mkdir()
    record(settings.sweeps, *PROBLEMS)
    (tmp_path / "suite.toml").write_text(SUITE)
    return settings


def started(*arguments: object) -> subprocess.Popen[str]:
    """The command as a process of its own while it runs, with what it says."""
    return subprocess.Popen(
        [sys.executable, "-m", "service.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*arguments: object, code: int = 0) -> tuple[str, str]:
    """What the command prints as a process of its own, apart from the log of a service in this."""
    process = started(*arguments)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    return output, errors


def test_tune_finds_the_recorded_optimum(settings: Settings) -> None:
    output, errors = ended("tune", 256, 4096, 4096, "--json")
    outcome = json.loads(output)
    assert outcome["status"] == "tuned"
    winner = outcome["result"]
    assert winner["candidate"]["kernel"]["name"] == best_of(PROBLEMS[0]).kernel.name
    assert winner["speedup"]["median"] == pytest.approx(CUBLAS_US / BEST_US, rel=0.01)
    assert winner["replayed"] is True
    assert "best 1" in errors
    timed = [line for line in errors.splitlines() if " µs" in line]
    assert any("screen" in line for line in timed)
    assert all("best " in line and "µs (recorded H200)" in line for line in timed), timed
    with Store.open(settings.database) as store:
        stored = store.winner(PROBLEMS[0], H200.slug)
        assert stored is not None
        assert stored.replayed
        assert is_believed(stored, identity.trusted(settings))
        assert any(s.trial.failure for s in store.trials(problem=PROBLEMS[0]))
    text = run("best", 256, 4096, 4096).stdout
    assert best_of(PROBLEMS[0]).kernel.name in text
    assert all("(recorded H200)" in line for line in text.splitlines() if " µs" in line)
    assert "revision   1, recorded H200" in text
    tuned = run("tune", 256, 4096, 4096).stdout
    assert "µs (recorded H200)" in tuned


def test_a_problem_that_is_not_recorded_is_one_line(settings: Settings) -> None:
    done = run("tune", 64, 64, 64, code=1)
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_suite_is_tuned_once(settings: Settings, tmp_path: Path) -> None:
    suite = ("tune", "--suite", tmp_path / "suite.toml", "--dtype", "bf16", "--dtype", "fp16")
    done = run(*suite, "--json")
    document = json.loads(done.stdout)
    assert [o["status"] for o in document["outcomes"]] == [
        "tuned", "tuned", "unrecorded", "tuned", "unrecorded", "unrecorded",
    ]  # fmt: skip
    assert document["totals"]["tuned"] == 3
    assert document["totals"]["speedup_geometric_mean"] == pytest.approx(1.25, rel=0.01)
    assert document["totals"]["speedup_median"] == pytest.approx(1.25, rel=0.01)
    assert "[6/6]" in done.stderr
    again = run(*suite)
    assert "not recorded, so not tuned: 64×64×64 bf16 tn; 512×512×1024" in again.stdout
    assert "unrecorded" not in again.stderr
    assert "3 current, 3 unrecorded" in again.stdout
    assert best_of(PROBLEMS[0]).kernel.name in again.stdout.replace("\n", "")
    assert "first" in again.stdout
    anew = json.loads(run(*suite, "--again", "--limit", 1, "--json").stdout)
    assert [o["status"] for o in anew["outcomes"]] == ["tuned"]


DEMAND = """
[[problem]]
name = "small"
m = 512
n = 512
k = 1024
calls = 10
[[problem]]
name = "unsaid"
m = 64
n = 64
k = 64
[[problem]]
name = "large"
m = 256
n = 4096
k = 4096
calls = 5
[[problem]]
name = "small again"
m = 512
n = 512
k = 1024
calls = 490
"""


def origins(done: Result) -> list[str]:
    return [outcome["origin"] for outcome in json.loads(done.stdout)["outcomes"]]


def test_a_suite_with_calls_is_tuned_by_the_time_at_stake(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "demand.toml").write_text(DEMAND)
    suite = ("tune", "--suite", tmp_path / "demand.toml", "--json")
    assert origins(run(*suite)) == ["small", "large", "unsaid"]
    # The two have winners now: only what could not be tuned promises to save anything.
    again = run(*suite, "--again", "--calls", 1)
    assert origins(again) == ["unsaid", "small", "large"]


def test_a_service_tunes_a_suite_by_the_time_at_stake(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "demand.toml").write_text(DEMAND)
    with running(settings) as http:
        suite = ("tune", "--suite", tmp_path / "demand.toml", "--url", http.base_url)
        ordered, _ = ended(*suite, "--no-wait", "--json")
    jobs = json.loads(ordered)["jobs"]
    assert [job["calls"] for job in jobs] == [500, 5, 0]
    savings = [job["expected_saving_us"] for job in jobs]
    assert savings[0] > savings[1] > 0
    assert savings[2] is None
    with Store.open(settings.database) as store:
        queue = Queue(store)
        for job in jobs:
            leased = queue.lease("worker", [])
            assert leased is not None
            assert leased.job.id == job["id"]


def test_no_problem_is_begun_after_the_time_limit(settings: Settings, tmp_path: Path) -> None:
    suite = ("tune", "--suite", tmp_path / "suite.toml", "--time-limit", 0)
    document = json.loads(run(*suite, "--json").stdout)
    assert {o["status"] for o in document["outcomes"]} == {"skipped"}
    assert "3 skipped" in run(*suite).stdout


def test_an_interrupted_suite_keeps_what_it_has(settings: Settings, tmp_path: Path) -> None:
    many = "".join(
        f'[[problem]]\nname = "p{i}"\nm = 256\nn = 4096\nk = {8 * i}\n' for i in range(1, 400)
    )
    (tmp_path / "many.toml").write_text(SUITE.replace('name = "three"', "") + many)
    process = started("tune", "--suite", tmp_path / "many.toml", "--json")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[3/"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    document = json.loads(output)
    assert process.returncode == 130
    assert "interrupted: 2 of 402 problems have a new winner, and every trial is kept" in errors
    assert [o["status"] for o in document["outcomes"][:2]] == ["tuned", "tuned"]
    assert document["outcomes"][-1]["status"] == "skipped"


def test_tune_through_a_service(settings: Settings) -> None:
    with running(settings) as http:
        url = str(http.base_url)
        ordered, _ = ended("tune", 512, 512, 1024, "--url", url, "--no-wait", "--json")
        (job,) = json.loads(ordered)["jobs"]
        worker = started("worker")
        try:
            done, errors = ended("tune", 512, 512, 1024, "--url", url, "--json")
            failed, _ = ended("tune", 64, 64, 64, "--url", url, "--json", code=1)
            rows, _ = ended("results", "--url", url, "--json", "--job", job["id"])
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=60)
        assert worker.returncode == 0
    outcome = json.loads(done)
    assert outcome["result"]["config"]["kernel"]["name"] == best_of(PROBLEMS[1]).kernel.name
    assert outcome["result"]["replayed"]
    assert outcome["result"]["served"]["revision"] == outcome["result"]["revision"]
    assert all("(recorded H200)" in line for line in errors.splitlines() if " µs" in line)
    assert json.loads(failed)["status"] == "failed"
    assert len(rows.splitlines()) >= 8


def test_waiting_for_nobody_is_said_and_so_is_how_to_cancel(settings: Settings) -> None:
    with running(settings) as http:
        url = str(http.base_url)
        process = started("tune", "512x512x1024", "--url", url)
        assert process.stderr is not None
        said = next(line for line in process.stderr if "waits" in line)
        assert said.startswith("  waits: no worker is alive; start one with gemmsmith worker. To ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        command = errors.splitlines()[-1].partition("to cancel: gemmsmith ")[2].split()
        assert command[:2] == ["jobs", "cancel"]
        assert "cancelled" in run(*command).stdout
        watched = run("jobs", "watch", "--url", url, code=1)
        assert f"{command[2]}  cancelled" in watched.stdout


def test_a_job_of_the_local_database_is_watched_to_its_end(settings: Settings) -> None:
    with Store.open(settings.database) as store:
        job, _ = Queue(store).enqueue(PROBLEMS[1])
    worker = started("worker", "--until-idle")
    done = run("jobs", "watch", job.id)
    worker.communicate(timeout=60)
    assert f"{job.id}  done" in done.stdout
    assert re.search(r"  best +[0-9.]+ µs \(recorded H200\)", done.stdout)
    assert "revision 1" in done.stdout


def test_the_demo_lists_searches_and_shows_the_winner(settings: Settings) -> None:
    listed = run("demo", "--device", "replay:h200")
    assert "256×4096×4096 bf16 tn" in listed.stdout
    assert "watch one: gemmsmith demo 256 4096 4096" in listed.stdout
    done = run("demo", "256x4096x4096", "--seconds", 0, "--device", "replay:h200")
    times = [float(line.split()[2]) for line in done.stderr.splitlines() if "  trial " in line]
    assert times == sorted(times, reverse=True)
    name = best_of(PROBLEMS[0]).kernel.name
    assert f"  kernel     {name}" in done.stdout
    shown = done.stdout.partition("$ gemmsmith ")[2].splitlines()[0]
    assert name in run(*shown.split()).stdout
    unheard = run("demo", 64, 64, 64, "--device", "replay:h200", code=1)
    assert "or ask for one of the 3 that it holds" in unheard.stderr


def test_an_order_of_sums_is_tuned_and_answered_at_every_m(
    settings: Settings, tmp_path: Path
) -> None:
    problem = Problem(m=256, n=4096, k=4096, dtype="bf16.sum_sequential")
    record(settings.sweeps, problem, name="ordered", device=replace(H200, name="Ordered"))
    order = ("--dtype", problem.dtype)
    device = ("--device", "replay:ordered")
    tuned = run("tune", 256, 4096, 4096, *order, *device)
    kernel = best_of(problem).kernel
    assert kernel.dtype == "bf16"
    assert kernel.name in tuned.stdout
    for m in (1, 255, 256, 16384):
        shown = run("best", m, 4096, 4096, *order, "--device", "ordered-132sm")
        assert kernel.name in shown.stdout
        assert "use        cutlass" in shown.stdout
        assert ("match      nearest" in shown.stdout) is (m != 256)
    invariant = ("--numerics", "invariant", "--device", "ordered-132sm")
    shown = run("best", 100, 4096, 4096, *invariant)
    assert f"100×4096×4096 {problem.dtype} tn" in shown.stdout
    assert kernel.name in shown.stdout
    twice = run("best", 100, 4096, 4096, *order, *invariant, code=2)
    assert "leave out numerics" in twice.stderr
    suite = tmp_path / "s.toml"
    suite.write_text("[[problem]]\nname = 'p'\nm = 256\nn = 4096\nk = 4096\n")
    again = ("tune", "--suite", suite, "--numerics", "invariant", *device)
    assert f"{problem}: " in run(*again).stderr
    unknown = run("best", 256, 4096, 4104, "--dtype", "fp16", *invariant, code=1)
    assert "tune 256 4096 4104 --dtype fp16.sum_sequential --layout tn" in unknown.stderr


@pytest.mark.compiles
def test_an_interrupted_compile_stops_at_once(settings: Settings) -> None:
    process = started("compile", 512, 512, 1024, "--limit", 2)
    assert process.stderr is not None
    assert any("compile 0/2" in line for line in process.stderr)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 15  # a kernel alone takes 30 s and more
    assert process.returncode == 130
    assert "interrupted: 0 of 2 kernels are compiled and kept" in errors


def test_a_recording_cannot_be_recorded(settings: Settings, tmp_path: Path) -> None:
    done = run("record", 256, 4096, 4096, "-o", tmp_path / "again.jsonl.zst", code=1)
    assert "recording needs a GPU" in done.stderr
    assert not (tmp_path / "again.jsonl.zst").exists()


def test_no_gpu_is_one_line(settings: Settings, tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    done = run("tune", 256, 4096, 4096, "--device", "cuda:0", code=1)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.compiles
def test_compile_makes_a_kernel_that_lookups_can_name(settings: Settings) -> None:
    # Odd extents: a 2.x kernel, which compiles in seconds.
    first = run("compile", 7, 13, 127, "--limit", 1, "--json")
    document = json.loads(first.stdout)
    assert document["counts"]["compiled"] == 1
    ((kernel, pack),) = document["kernels"].items()
    assert (settings.packs / f"{pack}.so").stat().st_size > 100_000
    with Store.open(settings.database) as store:
        assert store.pack_for(kernel) == pack
    second = run("compile", 7, 13, 127, "--limit", 1)
    assert "0 compiled, 1 compiled before" in second.stdout
