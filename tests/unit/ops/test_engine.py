"""What the engine launches, what it leaves to torch, and that nothing reaches training."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.config import Config, Use
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.launch import Algorithm, Launch
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.errors import PackCorrupt
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import current
from gemmsmith.runtime.abi import Arguments
from gemmsmith.signing import Signer
from gemmsmith.winners.bundle import Bundle, write_bundle
from gemmsmith.winners.lookup import Lookup
from tests.support.processes import in_threads
from tests.support.serving import own_signer
from tests.support.stand_in import (
    Choice,
    Chooser,
    Host,
    Packs,
    config,
    deterministic,
    installed,
)

BF16 = torch.bfloat16
Runs = Callable[[], int]


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=BF16)


def same(x: torch.Tensor, w: torch.Tensor) -> None:
    torch.testing.assert_close(gemmsmith.linear(x, w), functional.linear(x, w), rtol=2e-2, atol=0.1)


def test_a_product_is_decided_once(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    x, w = random(4, 16), random(8, 16)
    for _ in range(3):
        same(x, w)
    assert runs() == 3
    assert chooser.asked == [Problem(m=4, n=8, k=16, dtype=DType.BF16, layout=Layout.TN)]
    same(random(5, 16), w)
    assert len(chooser.asked) == 2


def test_a_workspace_reaches_the_kernel(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    chooser.name = "split"  # fails without its 1000 bytes
    same(random(4, 16), random(8, 16))
    assert runs() == 1


@pytest.mark.parametrize("name", ["refuses", "fails", "absent", "other_library"])
def test_a_kernel_that_does_not_run_is_torchs_from_then_on(
    engine: Engine, chooser: Chooser, runs: Runs, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    chooser.name = name
    with caplog.at_level(logging.WARNING, "gemmsmith"):
        for m in (4, 4, 5, 6):
            same(random(m, 16), random(8, 16))
    assert runs() == 0
    messages = [record.message for record in caplog.records if record.name == "gemmsmith"]
    assert len(messages) == 1
    assert messages[0].startswith(
        "torch's own operators run instead of kernel pack aaaaaaaaaaaaaaaa"
    )


def test_a_librarys_kernel_gets_its_algorithm(
    engine: Engine, chooser: Chooser, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = CublasLtKernel(
        name="tn",
        arch="sm90",
        dtype="bf16",
        layout=Layout.TN,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
    )
    algorithm = Algorithm.of(130100, range(1, 9), workspace_bytes=4096)
    chosen = Config(kernel=kernel, launch=Launch(algorithm=algorithm), pack="a" * 64)
    monkeypatch.setattr(chooser, "lookup", lambda *problem: Choice(chosen))
    x, w = random(4, 16), random(8, 16)
    same(x, w)
    plan = engine.plan(Form.LINEAR, x, w)
    assert plan is not None
    arguments = Arguments.from_buffer_copy(bytes(plan.raw(15).arguments))
    assert list(arguments.algorithm) == list(range(1, 9))
    assert (arguments.library_version, arguments.workspace_limit) == (130100, 4096)
    shifted = random(65)[1:].view(4, 16)  # 2 bytes behind an aligned address
    same(shifted, w)
    same(x, random(9, 16))  # rows of D are 18 bytes apart
    assert runs() == 1


@pytest.mark.parametrize("damage", ["missing", "truncated", "refused", "lookup"])
def test_a_bad_pack_or_lookup_is_one_line_in_the_log(
    chooser: Chooser,
    pack: Path,
    host: Host,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    path = tmp_path / "bad.so"
    if damage == "truncated":
        path.write_bytes(pack.read_bytes()[:2000])
    packs = Packs(path)
    if damage == "refused":

        def refuse(pack_hash: str) -> Path:
            raise PackCorrupt(f"pack {pack_hash[:4]} was tampered with")

        packs.path = refuse  # type: ignore[method-assign]
    if damage == "lookup":

        def fail(problem: Problem) -> bool:
            raise KeyError(problem.m)

        chooser.answers = fail
    with (
        installed(Engine(chooser, packs, platform=host)),
        caplog.at_level(logging.WARNING, "gemmsmith"),
    ):
        for m in (4, 5, 4):
            same(random(m, 16), random(8, 16))
    assert len([r for r in caplog.records if r.name == "gemmsmith"]) == 1


def test_only_deterministic_kernels_where_that_is_asked(
    chooser: Chooser, pack: Path, host: Host, runs: Runs
) -> None:
    chooser.deterministic = False
    x, w = random(4, 16), random(8, 16)
    with installed(Engine(chooser, Packs(pack), platform=host, deterministic=True)):
        same(x, w)
        assert runs() == 0
    with installed(Engine(chooser, Packs(pack), platform=host)):
        same(x, w)
        assert runs() == 1
        with deterministic():
            same(x, w)
        assert runs() == 0


def test_another_architecture_is_not_run(
    engine: Engine, host: Host, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "arch", lambda index: "sm100")
    same(random(4, 16), random(8, 16))
    assert runs() == 0


def test_what_a_kernel_does_not_take_is_torchs_without_a_word(
    engine: Engine, chooser: Chooser, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    same(random(4, 17)[:, :16], random(8, 16))  # rows that are not aligned
    same(random(4, 15), random(8, 15))
    chooser.name = "no_algorithm"  # a neighbour's, which this library does not have
    same(random(4, 16), random(8, 16))
    assert runs() == 0
    assert not caplog.records


def test_a_bias_is_torchs_unless_the_kernel_saves_more_than_it_costs(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.answers = lambda problem: not problem.operation.is_fused
    x, w, b = random(4, 16), random(8, 16), random(8)
    for m, saving, expected in ((4, None, 0), (5, 1.0, 0), (6, 3.0, 1)):
        chooser.saving_us = saving
        x = random(m, 16)
        torch.testing.assert_close(
            gemmsmith.linear(x, w, b), functional.linear(x, w, b), rtol=2e-2, atol=0.1
        )
        assert runs() == expected


def test_nothing_is_loaded_or_first_launched_during_a_capture(
    engine: Engine, host: Host, runs: Runs
) -> None:
    x, w = random(4, 16), random(8, 16)
    host.is_capturing = True
    same(x, w)
    assert runs() == 0
    host.is_capturing = False
    same(x, w)
    host.is_capturing = True
    same(x, w)
    assert runs() == 2


def test_another_device_than_the_current_one_is_made_current(
    engine: Engine, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    same(random(4, 16), random(8, 16))
    assert host.guarded == 0
    monkeypatch.setattr(host, "current", lambda: 0)
    same(random(4, 16), random(8, 16))
    assert host.guarded == 1


def test_newer_winners_are_taken_over(chooser: Chooser, pack: Path, host: Host, runs: Runs) -> None:
    chooser.snapshot = object()  # type: ignore[attr-defined]
    chooser.answers = lambda problem: False
    x, w = random(4, 16), random(8, 16)
    with installed(Engine(chooser, Packs(pack), platform=host)):
        same(x, w)
        chooser.answers = lambda problem: True
        same(x, w)
        assert runs() == 0
        chooser.snapshot = object()  # type: ignore[attr-defined]
        same(x, w)
        assert runs() == 1


def test_threads_do_not_share_arguments(engine: Engine) -> None:
    w = random(8, 64)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.full((64, 64), float(seed), dtype=BF16)
        expected = functional.linear(x, w)
        for _ in range(300):
            if not torch.allclose(gemmsmith.linear(x, w), expected, rtol=2e-2, atol=0.5):
                wrong.append(seed)

    in_threads(*(partial(work, seed) for seed in (1, 2, 3, 4)))
    assert not wrong


def test_winners_out_of_a_baked_file(pack: Path, host: Host, tmp_path: Path) -> None:
    name = hashlib.sha256(pack.read_bytes()).hexdigest()
    row = Row(
        problem=Problem(m=4, n=8, k=16),
        use=Use.CUTLASS,
        config=config("tn", DType.BF16, Layout.TN, pack=name),
        deterministic=True,
    )
    write_bundle(tmp_path / "w.gspack", Snapshot.of("host-4sm", [row], own_signer()), {name: pack})
    bundle = Bundle.open(tmp_path / "w.gspack", folder=tmp_path / "cache")
    counted = ctypes.CDLL(str(bundle.packs.path(name))).runs_so_far
    counted.restype = ctypes.c_int64
    with installed(Engine(Lookup(bundle.snapshot, pin=True), bundle.packs, platform=host)):
        same(random(4, 16), random(8, 16))
        same(random(6, 16), random(8, 16))  # a neighbour's kernel is not run
        assert counted() == 1
        same(random(4000, 16), random(8, 16))
        same(random(4, 16).t(), random(8, 4))
        assert counted() == 1


def test_use_takes_a_lookup_and_packs_and_lets_go(
    chooser: Chooser, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(current()):
        gemmsmith.use((chooser, Packs(pack)))
        assert current() is not None
        same(random(4, 16), random(8, 16))  # the host is no CUDA device
        assert not chooser.asked
        gemmsmith.use(None)
        assert current() is None


def test_use_without_a_service_is_torch_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = gemmsmith.Client("http://127.0.0.1:9", retries=0, cache_dir=tmp_path)
    gemmsmith.use(client)
    assert current() is None
    (record,) = [r for r in caplog.records if r.name == "gemmsmith"]
    assert record.message.startswith("torch's own operators run: ")


def test_use_of_what_nobody_believed_has_signed_is_torch_and_one_line(
    pack: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = hashlib.sha256(pack.read_bytes()).hexdigest()
    chosen = config("tn", DType.BF16, Layout.TN, pack=name)
    row = Row(problem=Problem(m=4, n=8, k=16), use=Use.CUTLASS, config=chosen)
    stranger = Signer.create(tmp_path / "stranger.key")
    write_bundle(tmp_path / "w.gspack", Snapshot.of("host-4sm", [row], stranger), {name: pack})
    with installed(current()):
        gemmsmith.use(tmp_path / "w.gspack")
        assert current() is None
        (record,) = [r for r in caplog.records if r.name == "gemmsmith"]
        assert record.message.startswith("torch's own operators run: ")
        assert "python -m gemmsmith trust" in record.message
        monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
        gemmsmith.use(tmp_path / "w.gspack")
        assert current() is not None


def test_use_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Client, a service's URL, a Bundle or its path"):
        gemmsmith.use(5)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No such file"):
        gemmsmith.use(tmp_path / "none.gspack")
