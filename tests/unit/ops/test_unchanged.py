"""Programs that know nothing of gemmsmith, switched on by a variable: with stand-in kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import gemmsmith
from gemmsmith import Snapshot
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.errors import PackCorrupt, PackIncompatible, ServiceUnavailable
from gemmsmith.ops import autouse
from gemmsmith.ops.engine import source
from gemmsmith.winners.bundle import kept_bundle, write_bundle
from tests.gpu.support.choosing import Ground
from tests.gpu.support.counting import launches
from tests.support import stand_in, unchanged
from tests.support.replacing import replace
from tests.support.serving import own_signer

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn

several = "RANK" in os.environ
if several:
    dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Linear(16, 48, bias=False, dtype=torch.bfloat16)
data = torch.utils.data.DataLoader(
    torch.randn(96, 16).bfloat16(), batch_size=32, num_workers=int(os.environ.get("WORKERS", "0")),
    multiprocessing_context="spawn" if "WORKERS" in os.environ else None,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def main():
    for x in data:
        x.requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        if several:
            for one in model.parameters():
                total = one.grad.float()
                dist.all_reduce(total)
                one.grad.copy_(total)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.6f}", flush=True)
    if several:
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
    sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""
FORWARD = Problem(m=32, n=48, k=16)
INPUT = Problem(m=32, n=16, k=48, layout=Layout.TT)
WEIGHT = Problem(m=48, n=16, k=32, layout=Layout.NT)
STEP = (FORWARD, INPUT, WEIGHT)
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def baked(ground: Ground, path: Path, winners: Sequence[Problem] | Snapshot) -> Path:
    snapshot = winners if isinstance(winners, Snapshot) else ground.snapshot(winners)
    packs = [ground.store.get(name) for name in snapshot.packs()]
    write_bundle(path, snapshot, {pack.hash: pack.path for pack in packs if pack is not None})
    return path


def run(folder: Path, words: Sequence[str], value: str, **variables: str) -> CompletedProcess[str]:
    given = unchanged.environment(folder / "site", stand_in=True, GEMMSMITH=value, **variables)
    return unchanged.run([*words, "train.py"], folder, given)


def kinds(folder: Path, rank: int = 0) -> dict[str, int]:
    """How often each problem ran a kernel."""
    found = [line.rpartition(" ")[0] for line in unchanged.launched(folder / "site", rank)]
    return {problem: found.count(problem) for problem in sorted(set(found))}


@pytest.mark.long
def test_a_bundle_in_a_plain_program(ground: Ground, script: Path, tmp_path: Path) -> None:
    """Loaders' spawned processes import torch and do nothing; what has no winner is named."""
    bundle = baked(ground, tmp_path / "winners.gspack", [FORWARD, WEIGHT])
    # Python's tracker of semaphores may warn of one that the worker has just removed.
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    more = {"WORKERS": "1", "ENDS_WITH": "5", "PYTHONWARNINGS": quiet}
    done = run(tmp_path, [sys.executable], bundle.name, **more)
    assert done.returncode == 5, done.stderr
    assert kinds(tmp_path) == {str(FORWARD): 3, str(WEIGHT): 3}
    (worker,) = (tmp_path / "site").glob("worker-*")
    assert worker.read_text() == "torch gemmsmith.startup.hook"
    assert done.stderr.splitlines() == [
        "no winner for 32×16×48 bf16 tt: torch runs it, which may be slower. Tune it: "
        "gemmsmith tune 32 16 48 --dtype bf16 --layout tt",
    ]


@pytest.mark.long
def test_a_service_that_is_away_is_one_warning(script: Path, tmp_path: Path) -> None:
    cache = {"GEMMSMITH_CACHE_DIR": str(tmp_path / "cache")}
    done = run(tmp_path, [sys.executable], "http://127.0.0.1:9", **cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    (line,) = done.stderr.splitlines()
    assert line.startswith("GEMMSMITH is ignored: no answer from")
    assert kinds(tmp_path) == {}


@pytest.fixture
def started(ground: Ground, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whatever is started in this process ends with the test."""
    monkeypatch.setattr(autouse, "Engine", stand_in.ENGINE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GEMMSMITH_URL", raising=False)
    yield
    autouse._State.running.close()


@pytest.fixture
def runs() -> Iterator[Callable[[], int]]:
    """How many kernels were launched since this was last called."""
    with launches() as found:

        def since() -> int:
            count = len(found)
            found.clear()
            return count

        yield since


def product(problem: Problem = FORWARD) -> None:
    a, b = torch.ones(problem.m, problem.k), torch.ones(problem.n, problem.k)
    torch.nn.functional.linear(a.bfloat16(), b.bfloat16())


def test_auto_takes_the_users_own_bundle(
    ground: Ground, started: None, monkeypatch: pytest.MonkeyPatch, runs: Callable[[], int]
) -> None:
    monkeypatch.setattr(source, "local_model", lambda: ground.model.slug)
    monkeypatch.setattr(autouse, "DEFAULT_URL", "http://127.0.0.1:9")
    with pytest.raises(FileNotFoundError, match="no winners are found"):
        autouse.start("auto")
    baked(ground, kept_bundle(ground.model.slug), STEP)
    autouse.start("auto")
    product()
    assert runs() == 1
    monkeypatch.setenv("GEMMSMITH_URL", "http://127.0.0.1:9")  # goes before the file
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", "/dev/null/none")
    with pytest.raises(ServiceUnavailable):
        autouse.start("auto")
    product()
    assert runs() == 0


def test_winners_of_another_gpu_and_files_that_are_none(
    ground: Ground, started: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = baked(ground, tmp_path / "winners.gspack", STEP)
    monkeypatch.setattr(source, "local_model", lambda: "nvidia-h100-80gb-hbm3-132sm")
    with pytest.raises(PackIncompatible, match="and this is nvidia-h100"):
        autouse.start(str(path))
    path.write_bytes(b"nothing")
    with pytest.raises(PackCorrupt, match="not a whole bundle"):
        autouse.start(str(path))


def test_use_in_a_program_goes_before_its_environment(
    ground: Ground, started: None, tmp_path: Path, runs: Callable[[], int]
) -> None:
    autouse.start(str(baked(ground, tmp_path / "winners.gspack", STEP)))
    product()
    assert runs() == 1
    gemmsmith.use(None)
    product()
    assert runs() == 0


def test_only_kernels_with_a_fixed_order_run(
    ground: Ground, started: None, tmp_path: Path, runs: Callable[[], int]
) -> None:
    snapshot = ground.snapshot(STEP)
    loose = Snapshot.of(
        snapshot.device, [replace(row, deterministic=False) for row in snapshot.rows], own_signer()
    )
    autouse.start(str(baked(ground, tmp_path / "winners.gspack", loose)))
    product()
    assert runs() == 0


@pytest.mark.long
def test_a_service_that_is_killed_changes_nothing(
    ground: Ground,
    started: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runs: Callable[[], int],
) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    with ground.serving(tmp_path / "service", STEP) as (process, url):
        autouse.start(url)
        product()
        process.kill()
        process.wait()
    product()
    assert runs() == 2
    product(Problem(m=33, n=48, k=16))  # not met before: no neighbour's kernel is run
    assert runs() == 0


def test_a_service_that_goes_away_is_waited_for_once() -> None:
    asked = []

    class Away:
        def path(self, pack_hash: str) -> Path:
            asked.append(pack_hash)
            raise ServiceUnavailable("no answer")

    packs = autouse._Bounded(Away())  # type: ignore[arg-type]
    for name in ("a", "b"):
        with pytest.raises(ServiceUnavailable):
            packs.path(name)
    assert asked == ["a"]


@pytest.mark.long
def test_two_ranks_of_torchrun_run_what_rank_0_got(
    ground: Ground, script: Path, tmp_path: Path
) -> None:
    with ground.serving(tmp_path / "service", STEP) as (_, url):
        given = {"GEMMSMITH_CACHE_DIR": str(tmp_path / "cache")}
        done = run(tmp_path, TORCHRUN, url, **given)
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == {str(one): 3 for one in sorted_(STEP)}
    one, other = re.findall(r"loss [\d.]+", done.stdout)  # they write into each other's lines
    assert one == other  # the same data and parameters, and the same bits


@pytest.mark.long
def test_a_rank_without_the_file_keeps_all_from_running_it(
    ground: Ground, script: Path, tmp_path: Path
) -> None:
    """As on two machines, of which one has no such file."""
    baked(ground, tmp_path / "winners-0.gspack", STEP)
    script.write_text(
        "import os\nos.environ['GEMMSMITH'] = f'winners-{os.environ[\"RANK\"]}.gspack'\n" + SCRIPT
    )
    done = run(tmp_path, TORCHRUN, "winners-0.gspack")
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == {}
    (line,) = [one for one in done.stderr.splitlines() if "GEMMSMITH" in one]
    assert "rank 1 does not take the snapshot: FileNotFoundError" in line


def sorted_(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(problems, key=str)
