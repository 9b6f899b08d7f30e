"""A fleet's compilers and GPUs as Ray would run them, here in one process and without it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gemmsmith.core.problem import Layout, Problem
from gemmsmith.core.tuning import JobState
from gemmsmith.signing import Trusted
from service import identity
from service.cli.runner import fleet_order
from service.cli.tasks import Task
from service.fleet import measuring
from service.fleet.compiling import CompileOrder, FleetGpu, compile_jobs
from service.fleet.measuring import GpuWorker, MeasureOrder
from service.fleet.packs import Share, ShareError
from service.settings import Settings
from service.worker import builder
from tests.support import fake_nvcc
from tests.support.commands import run, use
from tests.support.ledger import verify
from tests.support.processes import until
from tests.support.recordings import best_of, record
from tests.support.serving import H200, new_settings, own_signer
from tuner.backends import kernels
from tuner.compile import ArtifactStore
from tuner.devices.replay import ReplayDevice
from tuner.jobs import Queue
from tuner.jobs.stages import Stage, StagedQueue
from tuner.store import Store

PROBLEMS = [Problem(m=256 * (i + 1), n=1024, k=512) for i in range(3)]
DEVICE = f"replay:{H200.slug}"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Recorded GPUs that want packs, and what makes them."""
    toolchain = fake_nvcc.toolchain(tmp_path / "nvcc")
    monkeypatch.setattr(ReplayDevice, "needs_packs", True)
    for module in (builder, measuring):
        monkeypatch.setattr(module, "find_toolchain", lambda: toolchain)
    made = new_settings(tmp_path / "site")
    made.sweeps.mkdir()
    record(made.sweeps, *PROBLEMS)
    return made


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store.open(settings.database) as opened:
        yield opened


def compile_for(settings: Settings, share: str = "") -> int:
    order = CompileOrder(
        environ=settings.environment(),
        owner=f"compiler {time.monotonic_ns()}",
        devices=[FleetGpu(name=DEVICE, model=H200)],
        cores=1,
        share=share,
    )
    return compile_jobs(order)


def gpu(settings: Settings, share: str = "", *, compilers: bool = True) -> GpuWorker:
    worker = GpuWorker(
        MeasureOrder(
            environ=settings.environment(),
            owner=f"gpu {time.monotonic_ns()}",
            device=DEVICE,
            compilers=compilers,
            share=share,
            poll_s=0.02,
        )
    )
    worker.beat()
    return worker


def work_until(worker: GpuWorker, store: Store, count: int, state: JobState) -> None:
    """Let the GPU work until so many jobs are in that state; then end it."""
    try:
        until(lambda: Queue(store).counts()[state] == count, f"no {count} jobs are {state}")
        beat = worker.beat()
        assert (beat.device, beat.error) == (FleetGpu(name=DEVICE, model=H200), "")
    finally:
        worker.stop()


def test_compilers_and_gpus_hand_jobs_to_each_other(settings: Settings, store: Store) -> None:
    jobs = [Queue(store).enqueue(problem)[0].id for problem in PROBLEMS]
    waiting = gpu(settings)
    time.sleep(0.3)  # it must leave them to the compilers
    assert Queue(store).counts()[JobState.WAITING] == 3
    assert compile_for(settings) == 3
    work_until(waiting, store, 3, JobState.DONE)
    assert verify(settings.database, jobs) == {"done": 3}
    for problem in PROBLEMS:
        winner = store.winner(problem, H200.slug)
        assert winner is not None
        assert winner.candidate == best_of(problem)
        assert winner.pack is not None


def test_a_gpu_asks_for_what_has_gone_meanwhile(settings: Settings, store: Store) -> None:
    (job,) = (Queue(store).enqueue(problem)[0].id for problem in PROBLEMS[:1])
    compile_for(settings)
    for path in settings.packs.iterdir():
        path.unlink()
    worker = gpu(settings)
    try:
        compilers = StagedQueue(store, Stage.COMPILE)
        until(lambda: compilers.due([DEVICE]) == 1, "nothing was asked for")
        assert best_of(PROBLEMS[0]).kernel.name in compilers.notes(job).wanted
        assert compile_for(settings) == 1
        until(lambda: Queue(store).get(job).state is JobState.DONE, "the job is not done")
    finally:
        worker.stop()
    assert verify(settings.database, [job]) == {"done": 1}
    assert StagedQueue(store, None).notes(job).rounds == 1


def test_a_gpu_that_never_gets_its_packs_says_so(
    settings: Settings, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 1)
    job = Queue(store, max_attempts=1).enqueue(PROBLEMS[0])[0].id
    elsewhere = settings.model_copy(update={"packs": tmp_path / "elsewhere"})
    compile_for(settings)
    worker = gpu(elsewhere)
    try:
        until(lambda: StagedQueue(store, Stage.COMPILE).due([DEVICE]) == 1, "nothing asked for")
        compile_for(settings)
        until(lambda: Queue(store).get(job).state is JobState.FAILED, "the job goes on")
    finally:
        worker.stop()
    assert "do all machines see one packs folder" in (Queue(store).get(job).error or "")


def test_kernels_that_do_not_compile_are_failed_trials(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    bad = best_of(PROBLEMS[0]).kernel.name
    fake_nvcc.toolchain(tmp_path / "nvcc", bad=[bad])
    job = Queue(store).enqueue(PROBLEMS[0])[0].id
    compile_for(settings)
    work_until(gpu(settings), store, 1, JobState.DONE)
    assert StagedQueue(store, None).notes(job).rounds == 0
    failed = [each.trial for each in store.trials(job=job) if each.trial.failure]
    assert bad in {trial.candidate.kernel.name for trial in failed}
    winner = store.winner(PROBLEMS[0], H200.slug)
    assert winner is not None
    assert winner.candidate not in (None, best_of(PROBLEMS[0]))


def test_packs_travel_by_a_share(settings: Settings, store: Store, tmp_path: Path) -> None:
    share = f"file://{tmp_path}/share"
    elsewhere = settings.model_copy(update={"packs": tmp_path / "elsewhere"})
    job = Queue(store).enqueue(PROBLEMS[0])[0].id
    compile_for(settings, share)
    work_until(gpu(elsewhere, share), store, 1, JobState.DONE)
    winner = store.winner(PROBLEMS[0], H200.slug)
    assert winner is not None
    taken = ArtifactStore(elsewhere.packs, trusted=identity.trusted(elsewhere))
    assert winner.pack in {pack.hash for pack in taken.packs()}
    assert StagedQueue(store, None).notes(job).rounds == 0


def test_a_share_is_believed_no_more_than_others(settings: Settings, tmp_path: Path) -> None:
    toolchain = fake_nvcc.existing_toolchain(tmp_path / "nvcc")
    made = ArtifactStore(settings.packs, signer=own_signer())
    compiled = tmp_path / "compiled.so"
    some = kernels(PROBLEMS[0])[:2]
    compiled.write_bytes(b"\x7fELF" + b"\0".join(kernel.name.encode() for kernel in some))
    pack = made.publish(compiled, some, toolchain)
    url = f"file://{tmp_path}/share"
    Share(url, None).push(made, [pack])

    def pull(name: str, trusted: Trusted | None) -> tuple[list[str], ArtifactStore]:
        into = ArtifactStore(tmp_path / name, trusted=trusted)
        return Share(url, trusted).pull(into, [pack.hash, "0" * 64]), into

    believing = identity.trusted(settings)
    refused, into = pull("a", believing)
    assert refused == ["0" * 64]
    assert into.find(some[1]) == replace(pack, path=into.root / pack.path.name)
    refused, into = pull("b", Trusted.load())
    assert refused == [pack.hash, "0" * 64]
    assert into.packs() == []
    (tmp_path / "share" / pack.path.name).write_bytes(b"something else")
    assert pull("c", believing)[0] == [pack.hash, "0" * 64]
    with pytest.raises(ShareError, match="nothing-like-it"):
        Share("nothing-like-it://x", None)


def test_a_gpu_without_compilers_compiles_for_itself(settings: Settings, store: Store) -> None:
    jobs = [Queue(store).enqueue(PROBLEMS[0])[0].id]
    work_until(gpu(settings, compilers=False), store, 1, JobState.DONE)
    assert verify(settings.database, jobs) == {"done": 1}


def test_the_longest_of_each_operation_comes_first() -> None:
    """Their kernels are compiled side by side."""
    sizes = [(64, "tn"), (512, "tn"), (256, "nt"), (128, "tn"), (1024, "tn"), (64, "nt")]
    tasks = [
        Task(problem=Problem(m=m, n=1024, k=512, layout=Layout(layout)), origin="")
        for m, layout in sizes
    ]
    found = [(each.problem.m, each.problem.layout.value) for each in fleet_order(tasks, H200)]
    assert found[:2] == [(1024, "tn"), (256, "nt")]
    assert found[2:] == [(512, "tn"), (128, "tn"), (64, "tn"), (64, "nt")]


def test_a_suite_is_ordered_longest_first_and_followed(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(settings, monkeypatch)
    tasks = [Task(problem=problem, origin="") for problem in PROBLEMS]
    assert [each.problem for each in fleet_order(tasks, H200)] == PROBLEMS[::-1]
    suite = tmp_path / "some.toml"
    each = '[[problem]]\nname = "x"\ngroup = "x"\nm = {}\nn = 1024\nk = 512\n'
    suite.write_text('name = "some"\n' + "".join(each.format(p.m) for p in PROBLEMS))

    def tune(*arguments: str) -> str:
        return run("tune", "--suite", suite, "--fleet", *arguments).stdout

    ordered = json.loads(tune("--no-wait", "--json"))["jobs"]
    found = [Queue(store).get(job["id"]).problem for job in ordered]
    assert found == PROBLEMS[::-1]
    worker = gpu(settings, compilers=False)
    try:
        text = tune("--json")  # joins the jobs there are
    finally:
        worker.stop()
    outcomes = json.loads(text[text.index("{\n") :])["outcomes"]
    assert {Queue(store).get(each["job"]).state for each in outcomes} == {JobState.DONE}
    assert [each["status"] for each in outcomes] == ["tuned"] * 3
    assert {each["result"]["candidate"]["kernel"]["name"] for each in outcomes}
